"""AdamW on the GPU: its reference's numbers, split masters to the bit, no waiting, nothing allocated that stays."""

import pytest
import torch

from narrowgauge.kernels.adamw import gradient_norms
from narrowgauge.optim import AdamW, narrow
from narrowgauge.optim.adamw import full
from narrowgauge.optim.split import join, split

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")
SHAPES = [(768, 2304), (50304, 16), (768,), (1000, 48), (37, 19), (), (130,)]


def make(device, narrowed):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]
    return [narrow(p) if narrowed else p for p in parameters]


def draw(parameters, generator):
    for p in parameters:
        at = {"generator": generator, "device": generator.device}
        spread = torch.exp2(torch.randint(-12, 3, p.shape, **at).float())
        p.grad = (torch.randn(p.shape, **at) * spread).to(p.device, torch.bfloat16).to(p.dtype)


def run(device, master, moments, steps, draws_on="cpu", **options):
    parameters = make(device, master != "itself")
    optimizer = AdamW(parameters, master="fp32" if master == "itself" else master, moments=moments, **options)
    for step in range(steps):
        draw(parameters, torch.Generator(draws_on).manual_seed(step))
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("master", ["itself", "split", "fp32", "none"])
def test_the_kernel_follows_the_reference(master, moments):
    ours, mine = run("cuda", master, moments, 4, lr=1e-3, weight_decay=0.1)
    theirs, other = run("cpu", master, moments, 4, lr=1e-3, weight_decay=0.1)
    for p, q in zip(ours, theirs, strict=True):
        found, wanted = full(p).cpu(), full(q)
        if master == "none":
            torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-3)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 if moments == "fp32" else 1e-4)
        if moments == "8bit":
            for name in ("exp_avg", "exp_avg_sq"):
                off = (mine.state[p][name].cpu().int() - other.state[q][name].int()).abs()
                assert off.max() <= 2 and (off > 0).float().mean() < 0.02


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_split_masters_are_whole_ones_to_the_bit(moments):
    halves, _ = run("cuda", "split", moments, 200, "cuda", lr=1e-3)
    copies, _ = run("cuda", "fp32", moments, 200, "cuda", lr=1e-3)
    wholes, _ = run("cuda", "itself", moments, 200, "cuda", lr=1e-3)
    for p, q, r in zip(halves, copies, wholes, strict=True):
        assert torch.equal(full(p), full(q))
        assert torch.equal(full(p), r)
        assert torch.equal(p, split(r.detach())[0])


def test_every_pattern_joins_and_splits_in_the_kernel():
    """A step of size 0 over all high halves with the low halves around a tie."""
    high = torch.arange(1 << 16, dtype=torch.int32, device="cuda")
    values = torch.stack([(high << 16) | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(torch.float32)
    parameter = narrow(torch.nn.Parameter(values.clone()))
    optimizer = AdamW([parameter], lr=0.0, weight_decay=0.0, master="split")
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    joined = join(parameter.detach(), optimizer.state[parameter]["remainder"])
    finite = torch.isfinite(values)
    assert torch.equal(joined[finite].view(torch.int32), values[finite].view(torch.int32))
    assert torch.equal(torch.isnan(joined), torch.isnan(values))


def test_bad_gradients_change_nothing_and_nobody_waits():
    parameters = make("cuda", True)
    optimizer = AdamW(parameters, master="split", moments="8bit")
    zero, one, factor = (torch.tensor(value, device="cuda") for value in (0.0, 1.0, 2.0))

    def step(found):
        optimizer.grad_scale, optimizer.found_inf = factor, found
        optimizer.step()

    draw(parameters, torch.Generator().manual_seed(0))
    step(zero)
    before = [full(p).clone() for p in parameters]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(full(p), old) for p, old in zip(parameters, before, strict=True))
    assert optimizer.state[parameters[0]]["step"].item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype):
    grads = [torch.randn(shape, device="cuda").to(dtype) for shape in SHAPES]
    wanted = torch.stack([torch.linalg.vector_norm(g.double()) for g in grads])
    torch.testing.assert_close(gradient_norms(grads).double(), wanted, rtol=1e-5, atol=0)
    grads[1][5, 3] = float("inf")
    assert torch.isfinite(gradient_norms(grads)).tolist() == [i != 1 for i in range(len(grads))]


def test_the_peak_is_the_states():
    """8.0625 bytes a parameter for weights, gradients and states, and next to nothing on top while it steps."""
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    count = 64 * 1024 * 1024
    parameters = [torch.nn.Parameter(torch.zeros(count // 4, dtype=torch.bfloat16, device="cuda")) for _ in range(4)]
    optimizer = AdamW(parameters, master="split", moments="8bit")
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert (torch.cuda.max_memory_allocated() - start) / count < 8.10
