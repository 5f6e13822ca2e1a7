"""Tokens to slots and back, and the activation of experts: kernels beside their references."""

import pytest
import torch
from oracle import hardware_rounding  # noqa: F401

from narrowgauge import kernels
from narrowgauge.kernels.experts import activation, rows
from narrowgauge.kernels.experts.slots import assign_slots

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = pytest.mark.usefixtures("hardware_rounding")


def make(tokens=150, experts=4, choices=2, alive=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, alive, generator=generator).topk(choices).indices
    return assign_slots(index, experts)


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def twice(monkeypatch, function, *args, **kwargs):
    """Return results and statistics of the kernel, and of plain torch."""
    found = []
    for interpreting in (True, False):
        monkeypatch.setattr(kernels, "interpreting", interpreting)
        amax, counts = torch.zeros(()), torch.zeros(2, dtype=torch.int64)
        made = function(*args, **kwargs, amax=amax, counts=counts)
        found.append((made if isinstance(made, tuple) else (made,), amax, counts))
    return found


def same_bits(a, b):
    if a is None or b is None:
        return a is b
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("width", [64, 144])
@pytest.mark.parametrize(("as_rows", "transposed"), [(True, False), (True, True), (False, True)])
def test_gather_cast_equals_its_reference(monkeypatch, dtype, width, as_rows, transposed):
    slots, x = make(), draw(150, width)
    x[3, 5], x[9, 1] = 300.0, 1e-6
    scale = torch.tensor(2.0)
    kernel, plain = twice(monkeypatch, rows.gather_cast, x, slots, scale, dtype, rows=as_rows, transposed=transposed)
    assert all(same_bits(a, b) for a, b in zip(kernel[0], plain[0], strict=True))
    assert (kernel[0][0] is None) is not as_rows and (kernel[0][1] is None) is not transposed
    if as_rows:  # without rows it is a repetition, and records nothing
        assert kernel[1] == plain[1] == 300.0 and torch.equal(kernel[2], plain[2])
        made = kernel[0][0].float() / 2
        assert not made[slots.pairs < 0].any()
        token = int(slots.pairs[slots.of_pairs[7, 1]]) // 2
        assert token == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 1040])
def test_sum_slots_equals_its_reference(dtype, width):
    slots = make()
    y = draw(slots.size, width)
    made = rows.sum_slots(y, slots, dtype)
    torch.testing.assert_close(made, rows.sum_slots_reference(y, slots.of_pairs, dtype))
    first, second = (y[int(slot)].float() for slot in slots.of_pairs[4])
    torch.testing.assert_close(made[4].float(), first + second, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu-tanh", "reglu"])
@pytest.mark.parametrize("width", [64, 80])
def test_activation_equals_its_reference(monkeypatch, kind, width):
    slots = make()
    empty = (slots.pairs < 0)[:, None]
    u = draw(slots.size, 2 * width).masked_fill(empty, torch.nan)  # whatever a product left there
    weights = torch.rand(150, 2, generator=torch.Generator().manual_seed(3))
    scale = torch.tensor(16.0)
    kernel, plain = twice(monkeypatch, activation.activate_experts, kind, u, weights, slots, scale)
    difference = (kernel[0][0].float() - plain[0][0].float()).abs()
    assert (difference <= 0.13 * plain[0][0].float().abs() + 2**-9).all()  # one step of E4M3 at most
    assert (difference > 0).float().mean() < 0.01
    torch.testing.assert_close(kernel[1], plain[1], rtol=1e-4, atol=0)
    assert not kernel[0][0].float()[empty[:, 0]].any()


@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("width", [64, 80])
def test_backward_of_activation_equals_its_reference(monkeypatch, kind, dtype, width):
    slots = make()
    empty = (slots.pairs < 0)[:, None]
    u, grad = (draw(slots.size, n, seed=n).masked_fill(empty, torch.nan) for n in (2 * width, width))
    weights = torch.rand(150, 2, generator=torch.Generator().manual_seed(3))
    scale, forward_scale = torch.tensor(32.0), torch.tensor(16.0)
    kernel, plain = twice(
        monkeypatch, activation.activate_experts_backward, kind, grad, u, weights, slots, scale, dtype, forward_scale
    )
    for made, expected in zip(kernel[0][:3], plain[0][:3], strict=True):
        difference = (made.float() - expected.float()).abs()
        assert (difference <= 0.26 * expected.float().abs() + 2**-9).all()
        assert (difference > 0).float().mean() < 0.01
    torch.testing.assert_close(kernel[0][3], plain[0][3], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(kernel[1], plain[1], rtol=1e-4, atol=0)
    assert torch.equal(kernel[0][0].float().t(), kernel[0][1].float())


def test_gradients_of_activation_and_weights_are_those_of_autograd():
    slots, width = make(), 64
    u = draw(slots.size, 2 * width).float().requires_grad_()
    assert (slots.pairs < 0).any()
    weights = torch.rand(150, 2).requires_grad_()
    gate, up = u.chunk(2, 1)
    made = torch.nn.functional.silu(gate) * up * activation.get_factors(weights, slots.pairs)
    grad = draw(slots.size, width)
    made.backward(grad.float())
    big = torch.tensor(2.0**20)
    _, _, _, of_weights = activation.activate_experts_backward(
        "swiglu", grad, u.detach().bfloat16(), weights.detach(), slots, big, E5M2, big
    )
    torch.testing.assert_close(of_weights, weights.grad, rtol=1e-2, atol=1e-2)
