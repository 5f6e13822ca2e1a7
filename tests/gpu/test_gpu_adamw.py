"""AdamW on the GPU: matches its reference, split masters are bit-exact, no synchronization, no extra memory."""

import pytest
import torch

from narrowgauge.kernels.adamw import launch_grad_norms
from narrowgauge.optim import AdamW, narrow
from narrowgauge.optim.masters import join_fp32, sample_masters
from narrowgauge.optim.norms import compute_grad_norms as all_norms
from narrowgauge.optim.norms import compute_total_norm
from narrowgauge.optim.split_fp32 import join, split
from narrowgauge.optim.weight_checksums import compute_checksums

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
def test_the_kernel_matches_the_reference(master, moments):
    ours, mine = run("cuda", master, moments, 4, lr=1e-3, weight_decay=0.1)
    theirs, other = run("cpu", master, moments, 4, lr=1e-3, weight_decay=0.1)
    for p, q in zip(ours, theirs, strict=True):
        found, wanted = join_fp32(p).cpu(), join_fp32(q)
        if master == "none":
            torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-3)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 if moments == "fp32" else 1e-4)
        if moments == "8bit":
            for name in ("exp_avg", "exp_avg_sq"):
                off = (mine.state[p][name].cpu().int() - other.state[q][name].int()).abs()
                assert off.max() <= 2 and (off > 0).float().mean() < 0.02


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_split_masters_match_fp32_masters_bit_for_bit(moments):
    halves, _ = run("cuda", "split", moments, 200, "cuda", lr=1e-3)
    copies, _ = run("cuda", "fp32", moments, 200, "cuda", lr=1e-3)
    wholes, _ = run("cuda", "itself", moments, 200, "cuda", lr=1e-3)
    for p, q, r in zip(halves, copies, wholes, strict=True):
        assert torch.equal(join_fp32(p), join_fp32(q))
        assert torch.equal(join_fp32(p), r)
        assert torch.equal(p, split(r.detach())[0])


def test_the_kernel_joins_and_splits_every_bit_pattern():
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


def test_bad_gradients_change_nothing_without_synchronizing():
    parameters = make("cuda", True)
    optimizer = AdamW(parameters, master="split", moments="8bit")
    zero, one, factor = (torch.tensor(value, device="cuda") for value in (0.0, 1.0, 2.0))

    def step(found):
        optimizer.grad_scale, optimizer.found_inf = factor, found
        optimizer.step()

    draw(parameters, torch.Generator().manual_seed(0))
    step(zero)
    before = [join_fp32(p).clone() for p in parameters]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(join_fp32(p), old) for p, old in zip(parameters, before, strict=True))
    assert optimizer.state[parameters[0]]["step"].item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype):
    grads = [torch.randn(shape, device="cuda").to(dtype) for shape in SHAPES]
    wanted = torch.stack([torch.linalg.vector_norm(g.double()) for g in grads])
    torch.testing.assert_close(launch_grad_norms(grads).double(), wanted, rtol=1e-5, atol=0)
    grads[1][5, 3] = float("inf")
    assert torch.isfinite(launch_grad_norms(grads)).tolist() == [i != 1 for i in range(len(grads))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_any_size(dtype):
    """Every norm that FP32 can represent, with subnormal gradients and with any strides."""
    sizes = [1e-44, 1e-40, 1e-38, 1e-25, 1e-19, 1.0, 1e19, 1e25, 1e35]
    if dtype is torch.bfloat16:
        sizes[0] = 1e-39  # BF16 has no numbers below 9e-41
    at = {"device": "cuda", "dtype": torch.float64, "generator": torch.Generator("cuda").manual_seed(0)}
    grads = [(torch.randn(40_000, **at) * size).to(dtype) for size in sizes]
    grads.append(torch.cat(grads))
    grads += [torch.randn(64, 32, 3, 3, **at).to(dtype, memory_format=torch.channels_last), grads[5][::3], grads[5][:0]]
    wanted = torch.stack([torch.linalg.vector_norm(g.double()) for g in grads])
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g
    found = all_norms(parameters, {}, torch.device("cuda"))
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-44)
    torch.testing.assert_close(compute_total_norm(found).double(), torch.linalg.vector_norm(wanted), rtol=2e-6, atol=0)
    for bad in (float("inf"), float("nan")):
        grads[3][39_999] = bad
        assert torch.isfinite(all_norms(parameters, {}, torch.device("cuda"))).tolist() == [
            i != 3 for i in range(len(grads))
        ]


def test_checksums_match_the_reference_and_updates_are_not_foreign():
    parameters, optimizer = run("cuda", "split", "8bit", 5, "cuda", lr=1e-2)
    for p in parameters:
        assert torch.equal(optimizer.state[p]["check"], compute_checksums(p.detach()))
        assert torch.equal(compute_checksums(p.detach()).cpu(), compute_checksums(p.detach().cpu()))
    assert optimizer.foreign_writes == 0


WRITES = {
    "negated": lambda p: p.data.neg_(),
    "zeroed": lambda p: p.data.zero_(),
    "scaled": lambda p: p.data.mul_(0.75),
    "one ulp larger": lambda p: p.data.view(torch.int16).add_(1),
    "swapped": lambda p: p.data.copy_(p.data.reshape(-1).flip(0).view_as(p)),
    "replaced": lambda p: setattr(p, "data", p.data * 0.75),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_overwritten_weights_become_the_masters(master, write):
    """The next step matches the reference on a CPU, which other tests compare with torch's AdamW."""
    ours, mine = run("cuda", master, "fp32", 3, lr=1e-2)
    theirs, other = run("cpu", master, "fp32", 3, lr=1e-2)
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p.data)  # a bit-identical start
        for name, value in mine.state[p].items():
            other.state[q][name].copy_(value)
        WRITES[write](p)
        WRITES[write](q)
        assert torch.equal(join_fp32(p).cpu(), join_fp32(q))
    for parameters, optimizer in ((ours, mine), (theirs, other)):
        draw(parameters, torch.Generator().manual_seed(9))
        optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(join_fp32(p).cpu(), join_fp32(q), rtol=1e-6, atol=1e-6)
        assert torch.isfinite(join_fp32(p)).all()
    assert mine.foreign_writes.item() == other.foreign_writes.item() > 0


def test_all_pairs_of_a_zero_and_a_remainder_decode_to_finite_numbers():
    """With matching check words, as if a foreign write had not been detected: this tests only the kernel's decoding."""
    low = torch.arange(-0x8000, 0x8000, dtype=torch.int32, device="cuda").to(torch.int16)
    for high in (0x0000, -0x8000, 0x0001, 0x7F7F, -0x8000 + 0x7F7F):
        weight = torch.full_like(low, high).view(torch.bfloat16)
        parameter = narrow(torch.nn.Parameter(weight.float()))
        parameter.other_half.copy_(low)
        optimizer = AdamW([parameter], lr=0.0, weight_decay=0.0, master="split")
        wanted = join(weight, low)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert torch.isfinite(wanted).all() and optimizer.foreign_writes == 0
        assert torch.equal(join_fp32(parameter).view(torch.int32), wanted.view(torch.int32))


def test_reading_masters_does_not_synchronize():
    parameters, optimizer = run("cuda", "split", "8bit", 2, "cuda", lr=1e-2)
    parameters[0].data.mul_(0.5)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        count = optimizer.foreign_writes
        sample_masters({str(i): p for i, p in enumerate(parameters)}, 1000)
        masters = [join_fp32(p) for p in parameters]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert count.item() == 768 * 2304 // 128 and all(torch.isfinite(master).all() for master in masters)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_strides_and_complex_numbers(moments):
    """channels_last, transposed and complex parameters give the same bits as row-major ones."""
    torch.manual_seed(0)
    made = [
        torch.randn(32, 16, 3, 3, device="cuda").to(memory_format=torch.channels_last),
        torch.randn(48, 64, device="cuda").t(),
        torch.randn(17, 9, dtype=torch.cfloat, device="cuda").t(),
    ]
    transposed_weight = [torch.nn.Parameter(value.clone()) for value in made]
    plain = [torch.nn.Parameter(value.contiguous().clone()) for value in made]
    for p in (*transposed_weight, *plain):
        narrow(p)
    one, other = (AdamW(side, lr=1e-2, master="split", moments=moments) for side in (transposed_weight, plain))
    for _ in range(3):
        for p, q in zip(transposed_weight, plain, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = torch.empty_like(p).copy_(q.grad)
        one.step()
        other.step()
    assert transposed_weight[0].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(join_fp32(p), join_fp32(q)) for p, q in zip(transposed_weight, plain, strict=True))
    assert not torch.equal(transposed_weight[2].imag, made[2].imag), "complex parameters did not change"


def test_peak_memory_is_mostly_states():
    """8.094 bytes per parameter for weights, gradients and states, and almost nothing more during a step."""
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
    assert (torch.cuda.max_memory_allocated() - start) / count < 8.12
