"""Muon's kernels match the plain torch of ``optim.muon``."""

import pytest
import torch

from narrowgauge import kernels
from narrowgauge.optim import Muon, narrow
from narrowgauge.optim.masters import join_fp32

SHAPES = [(64, 32), (48, 16), (64, 32), (16, 80)]
ODD = [(37, 19), (5, 3), (37, 19), (130, 1)]


def run(monkeypatch, by_kernel, shapes, master, moments, **options):
    monkeypatch.setattr(kernels, "interpreting", by_kernel)
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    parameters = [p if master == "itself" else narrow(p) for p in parameters]
    optimizer = Muon(parameters, lr=1e-2, master="fp32" if master == "itself" else master, moments=moments, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            p.grad = (torch.randn(p.shape, generator=generator) * 8).to(p.dtype)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(step == 1))
        optimizer.step()
    return parameters, [optimizer.state[p] for p in parameters], optimizer


@pytest.mark.parametrize("shapes", [SHAPES, ODD], ids=["whole", "odd"])
@pytest.mark.parametrize(
    ("master", "moments"),
    [("itself", "fp32"), ("itself", "8bit"), ("split", "fp32"), ("split", "8bit"), ("fp32", "bf16"), ("none", "8bit")],
)
def test_kernels_match_the_reference(monkeypatch, shapes, master, moments):
    """A skipped step in between changes nothing in either."""
    ours, states, _ = run(monkeypatch, True, shapes, master, moments)
    theirs, wanted, _ = run(monkeypatch, False, shapes, master, moments)
    for p, q, state, other in zip(ours, theirs, states, wanted, strict=True):
        assert state["step"].item() == other["step"].item() == 2
        # Directions are BF16, and products of stacks are summed in another order: 1% of two steps.
        moved = 2e-2 * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        assert (join_fp32(p) - join_fp32(q)).abs().max() < (0.05 if moments == "fp32" else 0.1) * moved + (
            2**-7 * p.abs().max() if master == "none" else 0
        )
        first, second = state["momentum_buffer"], other["momentum_buffer"]
        if moments == "8bit":
            assert (first.int() - second.int()).abs().max() <= 1 and (first != second).float().mean() < 0.02
        else:
            close = {"rtol": 1e-5, "atol": 1e-6} if moments == "fp32" else {"rtol": 2**-6, "atol": 5e-3}
            torch.testing.assert_close(first, second, **close)  # the interpreter truncates to BF16


@pytest.mark.parametrize("options", [{"nesterov": False}, {"maximize": True}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_options_reach_the_kernels(monkeypatch, options):
    ours, _, _ = run(monkeypatch, True, SHAPES, "itself", "fp32", **options)
    theirs, _, _ = run(monkeypatch, False, SHAPES, "itself", "fp32", **options)
    plain, _, _ = run(monkeypatch, False, SHAPES, "itself", "fp32")
    for p, q, other in zip(ours, theirs, plain, strict=True):
        assert (p - q).norm() < 0.25 * (q - other).norm()  # the interpreter truncates directions to BF16


def test_foreign_writes_are_counted_and_kept(monkeypatch):
    monkeypatch.setattr(kernels, "interpreting", True)
    weight = narrow(torch.nn.Parameter(torch.randn(16, 64)))
    optimizer = Muon([weight], lr=1e-2, master="split", weight_decay=0.0)
    weight.grad = torch.randn(16, 64).bfloat16()
    optimizer.step()
    with torch.no_grad():
        weight.view(-1)[:128] = 1.0
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert int(optimizer.foreign_writes) == 1 and torch.equal(join_fp32(weight).view(-1)[:128], torch.ones(128))
