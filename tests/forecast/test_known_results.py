"""Remembered results of operations without data: a trace is the same without them, and other operands are not equal."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge import hardware, tasks
from narrowgauge.forecast.trace.known_results import KnownResults
from narrowgauge.forecast.trace.trace_step import trace_steps
from narrowgauge.recipe import parse

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("kind", "recipe"), [("gpt:2x128", "fp8-lean"), ("moe:2x128x4", "bf16"), ("gpt:2x128", "fp16")]
)
def test_a_trace_is_that_of_computed_results(kind, recipe, monkeypatch):
    def trace():
        found = trace_steps(tasks.find(kind, batch=4, context=64), parse(recipe), hardware.find_gpu("h200")).trace
        return found.ops, found.blocks, found.events, found.returned

    made = trace()
    monkeypatch.setattr(KnownResults, "call", lambda self, func, args, kwargs, compute: compute(func, args, kwargs))
    assert trace() == made


class Calls:
    """Runs operations, and counts those that are computed."""

    def __init__(self, is_special=False):
        self.known, self.computed, self.is_special = KnownResults(), 0, is_special

    def run(self, func, *args, **kwargs):
        return self.known.call(func, args, kwargs, self._compute)[0]

    def _compute(self, func, args, kwargs):
        self.computed += 1
        return func(*args, **kwargs), self.is_special


class Counter(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_equal_operands_are_computed_once():
    calls = Calls()
    first, second = (calls.run(aten.add.Tensor, meta(4, 6), meta(6)) for _ in range(2))
    assert calls.computed == 1 and first is not second and first.shape == second.shape == (4, 6) and second.is_meta
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    for _ in range(2):
        values, indices = calls.run(aten.topk.default, meta(4, 6), 2)
        assert values.shape == indices.shape == (4, 2) and indices.dtype is torch.int64
    assert calls.computed == 2


def test_other_operands_are_computed_again():
    calls = Calls()
    whole = meta(4, dtype=torch.int64)
    for number, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64)):  # equal, as keys of a dict
        assert calls.run(aten.add.Tensor, whole, number).dtype is dtype
    for x in (meta(4, 6), meta(6, 4).t(), meta(4, 1).expand(4, 6), meta(4, 6, dtype=torch.bfloat16)):
        made = calls.run(aten.relu.default, x)
        assert (made.shape, made.stride(), made.dtype) == (x.shape, torch.relu(x).stride(), x.dtype)
    assert calls.computed == 7
    torch.set_default_dtype(torch.float64)
    try:
        assert calls.run(aten.add.Tensor, whole, 1.0).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_operations_that_return_or_change_operands_or_read_values_are_computed_each_time():
    calls, x = Calls(), meta(4, 6)
    for _ in range(2):
        assert calls.run(aten.t.default, x).untyped_storage()._cdata == x.untyped_storage()._cdata
        made = calls.run(aten._unsafe_view.default, x, [24])  # its schema says nothing of the shared memory
        assert made.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert calls.run(aten.add_.Tensor, x, 1.0) is x
        assert calls.run(aten.relu.default, torch.ones(3)).tolist() == [1, 1, 1]
        with pytest.raises(NotImplementedError):
            calls.run(aten.nonzero.default, x)
    assert calls.computed == 10
    with Counter() as counter:  # a mode below the recorder's
        assert [calls.run(aten.relu.default, x).shape for _ in range(2)] == [x.shape] * 2
    assert counter.operations == 2 and calls.computed == 12
    special = Calls(is_special=True)
    assert [special.run(aten.relu.default, x).shape for _ in range(2)] == [x.shape] * 2 and special.computed == 2
