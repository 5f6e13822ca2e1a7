"""AdamW's kernel matches its reference, and norms match torch's."""

import pytest
import torch

from narrowgauge import kernels
from narrowgauge.kernels.adamw import launch_grad_norms
from narrowgauge.optim import AdamW, narrow
from narrowgauge.optim.adamw import join_fp32
from narrowgauge.optim.split_fp32 import join

SHAPES = [(64, 32), (48, 16), (2048,), (16,)]
ODD = [(37, 19), (300,), (), (5, 3)]


def make(shapes, narrowed):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return [narrow(p) if narrowed else p for p in parameters]


def run(monkeypatch, by_kernel, shapes, master, moments, steps=3, **options):
    monkeypatch.setattr(kernels, "interpreting", by_kernel)
    parameters = make(shapes, master != "itself")
    optimizer = AdamW(parameters, lr=1e-2, master="fp32" if master == "itself" else master, moments=moments, **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            p.grad = (torch.randn(p.shape, generator=generator) * 8).to(p.dtype)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(step == 1))
        optimizer.step()
    return parameters, [optimizer.state[p] for p in parameters]


@pytest.mark.parametrize("shapes", [SHAPES, ODD], ids=["whole", "odd"])
@pytest.mark.parametrize(
    ("master", "moments"),
    [("itself", "fp32"), ("itself", "8bit"), ("split", "fp32"), ("split", "8bit"), ("split", "bf16"), ("fp32", "bf16"),
     ("none", "8bit")],
)  # fmt: skip
def test_the_kernel_matches_the_reference(monkeypatch, shapes, master, moments):
    """A skipped step in between changes nothing in either."""
    ours, states = run(monkeypatch, True, shapes, master, moments)
    theirs, wanted = run(monkeypatch, False, shapes, master, moments)
    for p, q, state, other in zip(ours, theirs, states, wanted, strict=True):
        assert state["step"].item() == other["step"].item() == 2
        if master == "none":  # a last-bit difference can move a weight across the random threshold
            assert (p != q).float().mean() < 0.01
            torch.testing.assert_close(p, q, rtol=2**-7, atol=0)
        else:
            # A last-bit difference can also move a narrow moment to the next value: 1% of an update of 0.01.
            torch.testing.assert_close(join_fp32(p), join_fp32(q), rtol=1e-5, atol=1e-6 if moments == "fp32" else 5e-4)
        for name in ("exp_avg", "exp_avg_sq"):
            if moments == "8bit":
                assert (state[name].int() - other[name].int()).abs().max() <= 1
                assert (state[name] != other[name]).float().mean() < 0.01
                torch.testing.assert_close(state[f"{name}_scale"], other[f"{name}_scale"], rtol=1e-5, atol=0)
            else:
                # The interpreter truncates to BF16 where it should round.
                close = {"rtol": 1e-5, "atol": 1e-7} if moments == "fp32" else {"rtol": 2**-6, "atol": 5e-3}
                torch.testing.assert_close(state[name], other[name], **close)


def test_split_and_fp32_masters_have_the_same_bits(monkeypatch):
    """With gradients that BF16 represents, the kernel steps the same FP32 numbers in either form."""
    halves, _ = run(monkeypatch, True, SHAPES, "split", "fp32")
    copies, states = run(monkeypatch, True, SHAPES, "fp32", "fp32")
    for p, q, state in zip(halves, copies, states, strict=True):
        assert torch.equal(join_fp32(p), state["master"])
        assert torch.equal(p, q)


def test_the_kernels_halves_match_the_reference(monkeypatch):
    """A step of size 0 joins and splits the halves: every special bit pattern must be unchanged."""
    patterns = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x3F808000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FFE8000, 0x7FFFFFFF]
    bits = torch.tensor([*patterns, *(p - (1 << 31) for p in patterns)], dtype=torch.int32)
    values = bits.view(torch.float32).repeat(8)[:160]
    parameter = narrow(torch.nn.Parameter(values.clone()))
    monkeypatch.setattr(kernels, "interpreting", True)
    optimizer = AdamW([parameter], lr=0.0, weight_decay=0.0, master="split")
    parameter.grad = torch.zeros(160, dtype=torch.bfloat16)
    optimizer.step()
    joined = join(parameter.detach(), optimizer.state[parameter]["remainder"])
    finite = torch.isfinite(values)
    assert torch.equal(joined[finite], values[finite])
    assert torch.equal(torch.isnan(joined), torch.isnan(values))
    assert torch.equal(torch.isinf(joined), torch.isinf(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(monkeypatch, dtype):
    monkeypatch.setattr(kernels, "interpreting", True)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in (*SHAPES, *ODD)]
    wanted = torch.stack([torch.linalg.vector_norm(g.double()) for g in grads])
    torch.testing.assert_close(launch_grad_norms(grads).double(), wanted, rtol=1e-5, atol=0)
    grads[2][5] = float("nan")
    grads[4][1] = float("inf")
    assert torch.isfinite(launch_grad_norms(grads)).tolist() == [i not in (2, 4) for i in range(len(grads))]
