"""Activations inside fused blocks match autograd, with a kernel and without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from narrowgauge.kernels import activation
from narrowgauge.nn.blocks.activations import ACTIVATIONS, GATED, compute_activation
from narrowgauge.nn.fused.casts import Projection, apply_activation, apply_activation_backward
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP32, GemmChoice
from narrowgauge.weight_copies.casts import WeightCastPlan

CASES = [(kind, False) for kind in (*ACTIVATIONS, *GATED)] + [(kind, True) for kind in GATED]


@pytest.mark.parametrize("with_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize(("kind", "gate_last"), CASES, ids=str)
def test_activation_and_gradient(
    kind: str, gate_last: bool, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernel:
        monkeypatch.setattr(activation, "KINDS", ())
    spec = cast(Any, SimpleNamespace(activation=kind, gate_last=gate_last))
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(20, 32, generator=generator).requires_grad_()
    expected = compute_activation(kind, u, gate_last)
    grad_output = torch.randn(expected.shape, generator=generator)
    (expected_grad,) = torch.autograd.grad(expected, u, grad_output)
    for choice, tolerance in ((ALL_FP32, 1e-6), (ALL_BF16, 2**-8)):
        part = make_projection(choice)
        a = apply_activation(spec, u.detach(), part, None, needed=True)
        grad, again = apply_activation_backward(spec, grad_output, u.detach(), a, part, part, None)
        assert a.hp is not None and grad.hp is not None and again.hp is a.hp
        assert (a.hp - expected).norm() < tolerance * expected.norm()
        assert (grad.hp - expected_grad).norm() < tolerance * expected_grad.norm()


def make_projection(choice: GemmChoice) -> Projection:
    return Projection(WeightCastPlan(), choice)
