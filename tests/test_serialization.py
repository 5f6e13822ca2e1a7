"""A state is restored exactly from its JSON and tensors."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.serialization import Flattener, unflatten

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape)
    dtype = draw(st.sampled_from(DTYPES))
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size))).bool().reshape(shape)
    width = size * torch.empty((), dtype=dtype).element_size()
    data = draw(st.binary(min_size=width, max_size=width))  # any bits, so that every NaN is covered
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if width else torch.empty(0, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
keys = st.text(max_size=4) | st.integers(-3, 99) | st.booleans() | st.tuples(st.integers(0, 9), st.text(max_size=2))
values = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.contiguous().flatten().view(torch.uint8).tolist() == other.flatten().view(torch.uint8).tolist()
    elif isinstance(one, dict):
        assert list(one) == list(other) and [type(k) for k in one] == [type(k) for k in other]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, float):
        assert repr(one) == repr(other)
    else:
        assert one == other


@given(values)
@settings(max_examples=150, deadline=None)
def test_round_trip(value: Any) -> None:
    flattener = Flattener()
    text = json.dumps(flattener.flatten(value), allow_nan=False)
    assert_same(value, unflatten(json.loads(text), flattener.tensors))


def test_similar_keys_are_kept_apart() -> None:
    value = {0: torch.tensor(1), "0": torch.tensor(2), "a/b": {"c": torch.tensor(3)}, "a": {"b/c": torch.tensor(4)}}
    flattener = Flattener()
    back = unflatten(json.loads(json.dumps(flattener.flatten(value))), flattener.tensors)
    assert [int(back[0]), int(back["0"]), int(back["a/b"]["c"]), int(back["a"]["b/c"])] == [1, 2, 3, 4]


def test_tied_tensors_are_stored_once_and_restored_as_tied() -> None:
    weight = torch.randn(3, 4)
    flattener = Flattener()
    text = flattener.flatten({"embedding": weight, "head": weight, "transposed": weight.t()})
    assert list(flattener.tensors) == ["embedding", "transposed"]
    assert flattener.aliases == {"head": "embedding"}
    back = unflatten(text, flattener.tensors)
    assert back["embedding"] is back["head"]
    assert torch.equal(back["transposed"], weight.t())


def test_views_of_one_buffer_do_not_share_memory_when_stored() -> None:
    buffer = torch.arange(10.0)
    flattener = Flattener()
    flattener.flatten([buffer, buffer[2:5], buffer[4:]])
    storages = {tensor.untyped_storage().data_ptr() for tensor in flattener.tensors.values()}
    assert len(storages) == 3


def test_objects_that_need_pickle_raise_with_their_path() -> None:
    with pytest.raises(TypeError, match="engine/hook is a function"):
        Flattener().flatten({"engine": {"hook": lambda: None}})
