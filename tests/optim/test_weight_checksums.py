"""Checksums of weights: every outside change is detected, and unchanged groups keep every bit."""

import copy

import pytest
import torch
from torch import nn

from narrowgauge import kernels
from narrowgauge.kernels import adamw as kernel
from narrowgauge.optim import AdamW, full_precision, load_full_precision, narrow
from narrowgauge.optim.masters import join_fp32, sample_masters
from narrowgauge.optim.weight_checksums import GROUP, compute_checksums, find_own_groups

BF16 = torch.bfloat16


def random_bits(groups, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-0x8000, 0x8000, (groups, GROUP), generator=generator).to(torch.int16)


def swap(bits):
    order = torch.arange(GROUP)
    order[[3, 77]] = order[[77, 3]]
    return bits[:, order]


CHANGES = {
    "negated": lambda bits: bits ^ -0x8000,
    "zeroed": torch.zeros_like,
    "one more everywhere": lambda bits: bits + 1,
    "one less everywhere": lambda bits: bits - 1,
    "halved": lambda bits: bits - 0x80,
    "two swapped": swap,
    "turned round": lambda bits: bits.roll(1, 1),
    "mirrored": lambda bits: bits.flip(1),
    "one of them negated": lambda bits: torch.cat([bits[:, :5], bits[:, 5:6] ^ -0x8000, bits[:, 6:]], 1),
    "the last one zeroed": lambda bits: torch.cat([bits[:, :-1], torch.zeros_like(bits[:, -1:])], 1),
    "half of them negated": lambda bits: torch.cat([bits[:, :64] ^ -0x8000, bits[:, 64:]], 1),
    "up and down": lambda bits: bits + torch.tensor([1, -1] * 64, dtype=torch.int16),
    "neighbours swapped": lambda bits: bits.view(-1, 64, 2).flip(2).view(-1, 128),
    "the next group's": lambda bits: bits.roll(1, 0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["any bits", "small weights", "one value", "zeros and ones"])
def test_every_change_is_detected(kind, change):
    bits = random_bits(20_000)
    if kind == "small weights":
        drawn = torch.randn(20_000, GROUP, generator=torch.Generator().manual_seed(1))
        bits = (drawn * 0.02).to(BF16).view(torch.int16)
    elif kind == "one value":
        bits = random_bits(20_000)[:, :1].expand(-1, GROUP).contiguous()
    elif kind == "zeros and ones":
        bits = (bits > 0).to(BF16).view(torch.int16)
    after = CHANGES[change](bits).contiguous()
    changed = (after != bits).any(1)
    found = compute_checksums(bits.view(BF16)) != compute_checksums(after.view(BF16))
    assert torch.equal(found, changed)


def test_every_sign_change_is_detected():
    """As the docstring guarantees: all 65,536 values at each of the 128 positions."""
    values = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16)
    assert torch.equal(values.roll(0x8000), values ^ -0x8000)
    rows = torch.zeros(len(values), GROUP, dtype=torch.int16)
    for place in range(GROUP):
        rows[:, place] = values
        words = compute_checksums(rows.view(BF16))
        rows[:, place] = 0
        assert (words != words.roll(0x8000)).all()  # the other sign's
        if place % 16 == 0:
            assert len(words.unique()) >= len(words) - 4, "one value for another: a few collisions of 2**31 pairs"


@pytest.mark.skipif(not kernels.HAVE_TRITON, reason="needs triton")
@pytest.mark.parametrize("size", [1, 127, 128, 129, 2048, 5000])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.filterwarnings("ignore:invalid value")  # 0 / 0 past the end, as on a GPU
def test_the_kernel_writes_the_references_checksums(size, eps, monkeypatch):
    monkeypatch.setattr(kernels, "interpreting", True)
    parameter = narrow(nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(0))))
    optimizer = AdamW([parameter], master="split", eps=eps)
    for step in range(3):
        parameter.grad = torch.randn(size, generator=torch.Generator().manual_seed(step)).to(BF16)
        optimizer.step()
        assert torch.equal(optimizer.state[parameter]["check"], compute_checksums(parameter.detach()))
    assert optimizer.foreign_writes == 0
    assert optimizer.state[parameter]["check"].shape == (-(-size // GROUP),)


def make(by_kernel, monkeypatch, master="split", moments="fp32", shape=(5, 130)):
    if by_kernel and not kernels.HAVE_TRITON:
        pytest.skip("needs triton")
    monkeypatch.setattr(kernels, "interpreting", by_kernel)
    torch.manual_seed(0)
    parameter = narrow(nn.Parameter(torch.randn(shape)))
    return parameter, AdamW([parameter], lr=1e-2, weight_decay=0.0, master=master, moments=moments)


def step(parameter, optimizer, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    parameter.grad = (torch.randn(parameter.shape, generator=generator) * size).to(BF16)
    optimizer.step()


def through_set(p):
    with torch.no_grad():
        p.set_(p * 0.75)


def swapped(p):
    torch.utils.swap_tensors(p, nn.Parameter((p.detach() * 0.75).clone()))


def loaded(p):
    holder = nn.Module()
    holder.weight = p
    holder.load_state_dict({"weight": p.detach().float() * 0.75})


def in_place(p):
    with torch.no_grad():
        p.mul_(0.75)


def by_another_optimizer(p):
    p.grad = p.detach() * 0.25
    torch.optim.SGD([p], lr=1.0).step()


WRITES = {
    "in place": in_place,
    "data": lambda p: p.data.mul_(0.75),
    "data replaced": lambda p: setattr(p, "data", p.data * 0.75),
    "set_": through_set,
    "swap_tensors": swapped,
    "load_state_dict": loaded,
    "numpy": lambda p: p.detach().view(torch.int16).numpy().__setitem__(..., (p.data * 0.75).view(torch.int16).numpy()),
    "another optimizer": by_another_optimizer,
    "a clamp": lambda p: p.data.clamp_(-0.5, 0.5),
    "negated": lambda p: p.data.neg_(),
    "zeroed": lambda p: p.data.zero_(),
}


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("master", ["split", "fp32", "none"])
@pytest.mark.parametrize("write", WRITES)
def test_a_written_weight_becomes_the_master(write, master, by_kernel, monkeypatch):
    parameter, optimizer = make(by_kernel, monkeypatch, master)
    for seed in range(3):
        step(parameter, optimizer, seed)
    WRITES[write](parameter)
    expected = parameter.detach().float().clone()
    if master != "fp32" and write != "a clamp":
        assert torch.equal(join_fp32(parameter), expected)
        (sample,) = sample_masters({"p": parameter}, 100_000)
        assert torch.equal(sample.values[0], expected.reshape(-1))
    assert (join_fp32(parameter) - expected).abs().max() <= 2.0**-7 * expected.abs().max()
    moments = {name: optimizer.state[parameter][name].clone() for name in ("exp_avg", "exp_avg_sq")}
    step(parameter, optimizer, 9)
    exact = nn.Parameter(expected)  # the same update by torch, from the written values
    torchs = torch.optim.AdamW([exact], lr=1e-2, weight_decay=0.0, foreach=False)
    torchs.state[exact] = {"step": torch.tensor(3.0), **moments}
    exact.grad = parameter.grad.float()
    torchs.step()
    close = {"rtol": 2.0**-7, "atol": 0.0} if master == "none" else {"rtol": 1e-5, "atol": 1e-6}
    if write == "a clamp":  # unchanged values keep their bits in a copy, but lose them in a changed group
        close = {"rtol": 2.0**-7, "atol": 1e-4}
    torch.testing.assert_close(join_fp32(parameter), exact.detach(), **close)
    assert torch.isfinite(join_fp32(parameter)).all()
    if master != "none":
        assert 0 < optimizer.foreign_writes <= -(-parameter.numel() // GROUP)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_untouched_groups_keep_every_bit(by_kernel, monkeypatch):
    parameter, optimizer = make(by_kernel, monkeypatch)
    other, untouched = make(by_kernel, monkeypatch)
    for seed in range(3):
        step(parameter, optimizer, seed)
        step(other, untouched, seed)
    before = join_fp32(parameter).view(-1).clone()
    with torch.no_grad():
        parameter.view(-1)[300] += 1.0  # in the third group of six
    after = join_fp32(parameter).view(-1)
    same = torch.arange(650) // GROUP != 2
    assert torch.equal(after[same], before[same]) and not torch.equal(after[~same], before[~same])
    step(parameter, optimizer, 5)
    step(other, untouched, 5)
    assert torch.equal(join_fp32(parameter).view(-1)[same], join_fp32(other).view(-1)[same])
    assert optimizer.foreign_writes == 1 and untouched.foreign_writes == 0
    step(parameter, optimizer, 6)
    assert optimizer.foreign_writes == 1, "the next update finds its own weights"


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_swapping_weights_for_an_evaluation_loses_no_bits(master, by_kernel, monkeypatch):
    parameter, optimizer = make(by_kernel, monkeypatch, master)
    other, untouched = make(by_kernel, monkeypatch, master)
    for seed in range(3):
        for pair in ((parameter, optimizer), (other, untouched)):
            step(*pair, seed)
        kept = parameter.detach().clone()
        parameter.data.copy_(kept * 0.9)
        average = parameter.detach().float()
        assert torch.equal(join_fp32(parameter), average) or master == "fp32"
        parameter.data.copy_(kept)
    assert torch.equal(join_fp32(parameter), join_fp32(other)) and optimizer.foreign_writes == 0


@pytest.mark.parametrize("by_kernel", [False, True])
def test_pruned_weights_are_zeros_and_learn_again(by_kernel, monkeypatch):
    parameter, optimizer = make(by_kernel, monkeypatch, moments="8bit", shape=(64, 32))
    for seed in range(10):
        step(parameter, optimizer, seed)
    pruned = parameter.detach().abs() < parameter.detach().abs().median()
    parameter.data.mul_(~pruned)
    assert (join_fp32(parameter)[pruned] == 0).all()
    step(parameter, optimizer, 20)
    assert torch.isfinite(join_fp32(parameter)).all() and (parameter[pruned] != 0).float().mean() > 0.99


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_skipped_update_keeps_counts_and_checksums(by_kernel, monkeypatch):
    parameter, optimizer = make(by_kernel, monkeypatch)
    step(parameter, optimizer)
    words = optimizer.state[parameter]["check"].clone()
    parameter.data.mul_(0.5)
    optimizer.found_inf = torch.tensor(1.0)
    step(parameter, optimizer)
    assert optimizer.foreign_writes == 0 and torch.equal(optimizer.state[parameter]["check"], words)
    optimizer.found_inf = torch.tensor(0.0)
    step(parameter, optimizer)
    assert optimizer.foreign_writes == 6


@pytest.mark.parametrize("order", ["weights first", "state first"])
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_weights_and_state_may_be_loaded_in_either_order(order, master):
    torch.manual_seed(0)
    linear = nn.Linear(40, 30)
    for p in linear.parameters():
        narrow(p)
    optimizer = AdamW(linear.parameters(), master=master)
    for p in linear.parameters():
        step(p, optimizer)
    wanted = {name: value.clone() for name, value in full_precision(linear).items()}
    weights, state = copy.deepcopy(linear.state_dict()), copy.deepcopy(optimizer.state_dict())
    fresh = nn.Linear(40, 30).to(BF16)
    other = AdamW(fresh.parameters(), master=master)
    loads = [lambda: fresh.load_state_dict(weights), lambda: other.load_state_dict(state)]
    for load in loads if order == "weights first" else loads[::-1]:
        load()
    assert all(torch.equal(value, wanted[name]) for name, value in full_precision(fresh).items())


def test_states_without_checksums_apply_to_the_current_weights():
    parameter, optimizer = make(False, pytest.MonkeyPatch())
    step(parameter, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]["check"]
    fresh = nn.Parameter(parameter.detach().clone())
    other = AdamW([fresh], master="split")
    other.load_state_dict(state)
    assert torch.equal(join_fp32(fresh), join_fp32(parameter))
    step(fresh, other, 3)
    step(parameter, optimizer, 3)
    assert other.foreign_writes == 0


def test_loading_a_full_precision_state_updates_the_checksums():
    linear = nn.Linear(40, 30)
    for p in linear.parameters():
        narrow(p)
    optimizer = AdamW(linear.parameters(), master="split", lr=0.0, weight_decay=0.0)
    optimizer.make_states()
    wanted = {name: torch.randn_like(value) for name, value in full_precision(linear).items()}
    load_full_precision(linear, wanted)
    for p in linear.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.foreign_writes == 0
    assert all(torch.equal(value, wanted[name]) for name, value in full_precision(linear).items())


def test_samples_check_their_groups():
    parameter, optimizer = make(False, pytest.MonkeyPatch(), shape=(1000, 500))
    step(parameter, optimizer)
    with torch.no_grad():
        parameter.view(-1)[::1234] = 3.0
    for most in (7, 300, 5000, 600_000):
        every = -(-500_000 // most)
        (sample,) = sample_masters({"p": parameter}, most)
        assert torch.equal(sample.values[0], join_fp32(parameter).view(-1)[::every])
    assert not find_own_groups(parameter.detach(), optimizer.state[parameter]["check"]).all()


def test_a_parameter_whose_dtype_changes_is_still_stepped():
    linear = nn.Linear(16, 16)
    narrow(linear.weight)
    optimizer = AdamW(linear.parameters(), master="split", lr=1e-2)
    step(linear.weight, optimizer)
    linear.float()
    assert torch.equal(join_fp32(linear.weight), linear.weight)
    before = linear.weight.detach().clone()
    linear.weight.grad = torch.ones(16, 16)
    optimizer.step()
    assert linear.weight.dtype is torch.float32 and not torch.equal(before, linear.weight)
    linear.to(BF16)
    for seed in range(2):
        step(linear.weight, optimizer, seed)
    assert torch.equal(join_fp32(linear.weight).to(BF16), linear.weight) and optimizer.foreign_writes == 0


def test_kernel_and_reference_agree_on_the_group():
    assert kernel.GROUP == GROUP
