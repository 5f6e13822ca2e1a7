"""Weights that are used as one are adjacent in memory, each with its own storage, for as long as they live there."""

import copy
import gc
import io

import pytest
import torch
from torch import nn

from narrowgauge.weight_copies import adjacent
from narrowgauge.weight_copies.adjacent import set_parts, store_contiguously, view_as_one


def make_weights(dtype=torch.float32):
    return [nn.Parameter(torch.randn(rows, 8).to(dtype)) for rows in (4, 6, 2)]


def test_weights_used_as_one_move_into_one_buffer_and_stay_parameters():
    weights = [nn.Parameter(torch.randn(rows, 8)) for rows in (4, 6, 2)]
    values = [weight.detach().clone() for weight in weights]
    assert view_as_one(weights) is None
    store_contiguously(weights)
    joint = view_as_one(weights)
    assert torch.equal(joint, torch.cat(values)) and joint.data_ptr() == weights[0].data_ptr()
    assert all(torch.equal(weight, value) for weight, value in zip(weights, values, strict=True))
    places = [weight.data_ptr() for weight in weights]
    store_contiguously(weights)
    assert places == [weight.data_ptr() for weight in weights], "CUDA graphs have recorded these addresses"
    weights[1].data = weights[1].data.clone()
    assert view_as_one(weights) is None and view_as_one(weights[::-1]) is None


def test_weights_that_differ_stay_where_they_are():
    weights = [nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8).bfloat16())]
    places = [weight.data_ptr() for weight in weights]
    store_contiguously(weights)
    assert places == [weight.data_ptr() for weight in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_has_a_storage_of_its_own_in_the_same_memory(dtype):
    weights = make_weights(dtype)
    store_contiguously(weights)
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 3
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)
    joint = view_as_one(weights)
    with torch.no_grad():
        weights[1].fill_(3)
        joint[10:] = 5
    assert (joint[4:10] == 3).all() and (weights[2] == 5).all()


def test_some_of_them_are_read_as_one_from_the_first():
    weights = make_weights()
    store_contiguously(weights)
    assert torch.equal(view_as_one(weights[:2]), torch.cat(list(weights[:2])))
    assert torch.equal(view_as_one(weights[:1]), weights[0])
    assert view_as_one([weights[0], weights[2]]) is None and view_as_one([*weights, weights[0]]) is None


def test_the_memory_is_freed_with_the_last_weight_that_is_stored_in_it():
    gc.collect()
    before = len(adjacent._joints)
    weights = make_weights()
    store_contiguously(weights)
    address = weights[0].data_ptr()
    for index in range(3):
        assert address in adjacent._joints
        weights[index].data = weights[index].data.double()
    gc.collect()
    assert address not in adjacent._joints and len(adjacent._joints) <= before


def test_a_weight_outlives_the_others():
    weights = make_weights()
    store_contiguously(weights)
    last, value = weights.pop(), weights[-1]
    expected = last.detach().clone()
    del weights, value
    gc.collect()
    torch.randn(1000).sum()
    assert torch.equal(last, expected)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save", "clone"])
def test_copies_are_apart_and_may_be_placed_again(how):
    weights = nn.ParameterList(make_weights())
    store_contiguously(list(weights))
    if how == "deepcopy":
        other = copy.deepcopy(weights)
    elif how == "clone":
        other = nn.ParameterList(nn.Parameter(weight.detach().clone()) for weight in weights)
    else:
        file = io.BytesIO()
        torch.save(weights, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert view_as_one(list(other)) is None
    store_contiguously(list(other))
    assert torch.equal(view_as_one(list(other)), view_as_one(list(weights)))
    other[0].data.zero_()
    assert weights[0].any()


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_weights_without_memory_are_views_of_one_tensor(kind):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        weights = make_weights()
        store_contiguously(weights)
        assert view_as_one(weights).shape == (12, 8)


def test_rows_of_bytes_become_weights_of_another_dtype():
    weights = [nn.Parameter(torch.randn(rows, 8), requires_grad=False) for rows in (4, 6)]
    stored = torch.randint(0, 255, (10, 8), dtype=torch.uint8)
    set_parts(weights, stored)
    assert all(weight.dtype is torch.uint8 for weight in weights)
    assert view_as_one(weights).data_ptr() == stored.data_ptr() and torch.equal(torch.cat(weights), stored)


def test_empty_weights_and_single_ones_stay_plain():
    weights = [nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.empty(0, 8))]
    store_contiguously(weights)
    assert torch.equal(view_as_one(weights), weights[0])
    alone = [nn.Parameter(torch.randn(4, 8))]
    place = alone[0].data_ptr()
    store_contiguously(alone)
    assert alone[0].data_ptr() == place
