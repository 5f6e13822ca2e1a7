"""AdamW matches torch bit for bit in FP32 and with split masters, and states round-trip."""

import copy

import pytest
import torch

from narrowgauge import kernels
from narrowgauge.errors import UsageError
from narrowgauge.optim import AdamW, full_precision, load_full_precision, narrow
from narrowgauge.optim.adamw import join_fp32
from narrowgauge.optim.master_access import round_stochastically


def make(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(37, 19), (300,), (), (4, 3, 5)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(step, shapes, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(s, generator=generator) * scale * 10 ** (step % 5 - 2) for s in shapes]


def set_gradients(parameters, step, dtype=None):
    for p, g in zip(parameters, gradients(step, [p.shape for p in parameters]), strict=True):
        p.grad = g.to(dtype or p.dtype)


OPTIONS = [
    {}, {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}, {"weight_decay": 0.0, "eps": 1e-6},
    {"maximize": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fp32_matches_torch_bit_for_bit(options):
    ours, theirs = make(), make()
    mine, other = AdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, fused=False, **options)
    for step in range(30):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        mine.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(mine.state[a]["exp_avg_sq"], other.state[b]["exp_avg_sq"])


def test_a_learning_rate_may_be_a_tensor():
    """torch then computes lr * weight_decay in FP32, so the last bits differ."""
    ours, theirs = make(), make()
    rate = torch.tensor(2e-3)
    mine, other = AdamW(ours, lr=rate), torch.optim.AdamW(theirs, lr=rate, foreach=False, fused=False)
    for step in range(10):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        mine.step()
        other.step()
        rate.mul_(0.9)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_thousand_steps_with_split_masters_match_fp32_bit_for_bit():
    """The same gradients, in BF16, as a model with BF16 weights would give."""
    exact, halves = make(), make()
    for p in halves:
        narrow(p)
    one = torch.optim.AdamW(exact, lr=1e-2, foreach=False, fused=False)
    other = AdamW(halves, lr=1e-2, master="split")
    for step in range(1000):
        set_gradients(halves, step, torch.bfloat16)
        for p, q in zip(exact, halves, strict=True):
            p.grad = q.grad.float()
        one.step()
        other.step()
    for p, q in zip(exact, halves, strict=True):
        assert q.dtype is torch.bfloat16
        assert torch.equal(join_fp32(q), p)


def test_an_fp32_copy_of_a_bf16_weight_steps_like_fp32():
    split, copied = make(), make()
    for p in (*split, *copied):
        narrow(p)
    one, other = AdamW(split, master="split"), AdamW(copied, master="fp32")
    for step in range(20):
        set_gradients(split, step)
        set_gradients(copied, step)
        one.step()
        other.step()
    for p, q in zip(split, copied, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(join_fp32(p), other.state[q]["master"])
        assert torch.equal(join_fp32(q), join_fp32(p))


@pytest.mark.parametrize("options", [{"moments": "bf16"}, {"moments": "8bit"}, {"moments": "8bit", "master": "split"}])
def test_narrow_moments_stay_close_to_fp32(options):
    exact, ours = make(), make()
    if options.get("master") == "split":
        for p in ours:
            narrow(p)
    one, other = torch.optim.AdamW(exact, lr=1e-3), AdamW(ours, lr=1e-3, **options)
    before = [p.detach().clone() for p in exact]
    for step in range(50):
        for parameters in (exact, ours):
            for p, g in zip(parameters, gradients(step % 3, [p.shape for p in parameters]), strict=True):
                p.grad = g.to(p.dtype)
        one.step()
        other.step()
    for p, q, start in zip(exact, ours, before, strict=True):
        moved = (p - start).norm()
        assert (join_fp32(q) - p).norm() < 0.05 * moved


def test_stochastic_rounding_has_the_right_mean():
    value = torch.full((200_000,), 1.0 + 2**-10)  # an eighth of a BF16 step above 1
    rounded = round_stochastically(value, 3, 1).float()
    assert sorted(rounded.unique().tolist()) == [1.0, 1.0 + 2**-7]
    assert rounded.mean().item() == pytest.approx(1.0 + 2**-10, rel=1e-4)
    assert not torch.equal(rounded, round_stochastically(value, 4, 1).float())
    assert torch.equal(rounded, round_stochastically(value, 3, 1).float())
    odd = torch.tensor([float("inf"), -float("inf"), float("nan")])
    assert round_stochastically(odd, 1, 1)[:2].tolist() == odd[:2].tolist()
    assert torch.isnan(round_stochastically(odd, 1, 1)[2])
    parameters = make(dtype=torch.bfloat16)
    optimizer = AdamW(parameters, lr=1e-4, master="none")
    start = parameters[0].detach().clone()
    for _ in range(20):  # updates far below half a BF16 step, which rounding to nearest would lose
        set_gradients(parameters, 0)
        optimizer.step()
    assert (parameters[0] != start).float().mean() > 0.05


def test_scaled_gradients_are_unscaled_and_bad_ones_skip():
    ours, theirs = make(), make()
    mine, other = AdamW(ours), AdamW(theirs)
    set_gradients(ours, 0)
    set_gradients(theirs, 0)
    for p in ours:
        p.grad.mul_(64)
    mine.grad_scale, mine.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    mine.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    state = copy.deepcopy(mine.state_dict())
    mine.found_inf = torch.tensor(1.0)
    mine.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert mine.state_dict()["state"][0]["step"] == state["state"][0]["step"]


@pytest.mark.parametrize("master", ["split", "fp32", "none"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_a_state_round_trips(master, moments):
    straight = make()
    for p in straight:
        narrow(p)
    one = AdamW(straight, master=master, moments=moments)
    for step in range(3):
        set_gradients(straight, step)
        one.step()
    saved = copy.deepcopy(one.state_dict())
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in straight]
    other = AdamW(resumed, master=master, moments=moments)
    other.load_state_dict(saved)
    for step in range(3, 6):
        set_gradients(straight, step)
        set_gradients(resumed, step)
        one.step()
        other.step()
    for p, q in zip(straight, resumed, strict=True):
        assert torch.equal(p, q)
        for name, value in one.state[p].items():
            mine = other.state[q][name]
            assert torch.equal(mine, value) and mine.dtype == value.dtype if torch.is_tensor(value) else mine == value


def test_groups_and_schedulers():
    first, second = make(), make(1)
    optimizer = AdamW([{"params": first, "lr": 1e-2}, {"params": second, "weight_decay": 0.0, "moments": "8bit"}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        set_gradients(first, step)
        set_gradients(second, step)
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 8, 1e-3 / 8]
    assert optimizer.state[second[0]]["exp_avg"].dtype is torch.int8
    assert optimizer.state[first[0]]["exp_avg"].dtype is torch.float32


def test_full_precision_round_trips():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    for p in model.parameters():
        narrow(p)
    exported = full_precision(model)
    assert all(torch.equal(exported[name], wanted[name]) for name in wanted)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    plain.load_state_dict(exported)
    other = {name: torch.randn_like(value) for name, value in wanted.items()}
    load_full_precision(model, other)
    assert all(torch.equal(value, other[name]) for name, value in full_precision(model).items())


def strided():
    """Return weights that are not row-major: channels_last, transposed, with gaps, and a complex one."""
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(6, 4, 3, 5).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.randn(40, 30).t()),
        torch.nn.Parameter(torch.randn(40, 30)[:, ::2]),
        torch.nn.Parameter(torch.randn(17, 9, dtype=torch.cfloat)),
        torch.nn.Parameter(torch.randn(9, 17, dtype=torch.cfloat).t()),
    ]


def set_strided_gradients(parameters, step, turned):
    """Set gradients that are row-major, have other strides, or are conjugated."""
    generator = torch.Generator().manual_seed(step)
    for p in parameters:
        grad = torch.randn(p.shape, generator=generator, dtype=torch.cfloat if p.is_complex() else torch.float32)
        grad = (
            (grad.conj() if p.is_complex() else grad.transpose(0, 1).contiguous().transpose(0, 1)) if turned else grad
        )
        p.grad = grad.to(p.dtype)


def resolve(parameters):
    """Resolve conjugated gradients, which torch's AdamW does not support."""
    for p in parameters:
        p.grad = p.grad.resolve_conj()


@pytest.mark.parametrize("by_kernel", [False, True] if kernels.HAVE_TRITON else [False])
@pytest.mark.parametrize("turned", [False, True])
def test_strides_and_complex_numbers_step_as_torchs(turned, by_kernel, monkeypatch):
    monkeypatch.setattr(kernels, "interpreting", by_kernel)
    ours, theirs = strided(), strided()
    strides = [p.stride() for p in ours]
    mine, other = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, foreach=False, fused=False)
    for step in range(4):
        set_strided_gradients(ours, step, turned)
        set_strided_gradients(theirs, step, turned)
        resolve(theirs)
        mine.step()
        other.step()
    assert [p.stride() for p in ours] == strides
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"], rtol=1e-5, atol=1e-7)
    state, fresh = copy.deepcopy(other.state_dict()), strided()  # torch's states have the weights' strides
    for p, q in zip(fresh, theirs, strict=True):
        p.data.copy_(q.data)
    taken = AdamW(fresh, lr=1e-2)
    taken.load_state_dict(state)
    set_strided_gradients(fresh, 9, turned)
    set_strided_gradients(theirs, 9, turned)
    resolve(theirs)
    taken.step()
    other.step()
    for p, q in zip(fresh, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_kernel", [False, True] if kernels.HAVE_TRITON else [False])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("master", ["itself", "split", "fp32", "none"])
def test_strides_change_no_bit_in_any_format(master, moments, by_kernel, monkeypatch):
    """Compare with the same numbers in row-major order, also after loading the state of one into the other."""
    monkeypatch.setattr(kernels, "interpreting", by_kernel)
    sides = []
    for plain in (False, True):
        parameters = [torch.nn.Parameter(p.detach().contiguous() if plain else p.detach()) for p in strided()]
        if master != "itself":
            for p in parameters:
                narrow(p)
        options = {"master": "fp32" if master == "itself" else master, "moments": moments}
        sides.append((parameters, AdamW(parameters, lr=1e-2, **options)))
    (turned, one), (plain, other) = sides
    for step in range(4):
        if step == 2:
            states = copy.deepcopy(one.state_dict()), copy.deepcopy(other.state_dict())
            one.load_state_dict(states[1])
            other.load_state_dict(states[0])
        set_strided_gradients(turned, step, True)
        set_strided_gradients(plain, step, False)
        for p in turned:
            if p.is_complex():
                p.grad = p.grad.conj()
        one.step()
        other.step()
    for p, q in zip(turned, plain, strict=True):
        assert p.is_complex() or q.is_contiguous()
        assert torch.equal(p, q) and torch.equal(join_fp32(p), join_fp32(q))
        assert p.dtype is torch.cfloat or one.state[p]["exp_avg"].is_contiguous()
    assert one.foreign_writes == 0 and turned[0].is_contiguous(memory_format=torch.channels_last)


def test_mistakes_raise_clear_errors():
    with pytest.raises(UsageError, match="master='half' is unknown"):
        AdamW(make(), master="half")
    with pytest.raises(UsageError, match="lr=-1"):
        AdamW(make(), lr=-1)
    with pytest.raises(UsageError, match="float16"):
        AdamW(make(dtype=torch.float16))
