"""Cross-entropy and the fused head on the GPU: FP8 bits, 64-bit offsets, memory, no synchronization."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from narrowgauge.kernels import cross_entropy as ce
from narrowgauge.nn.fused.head import compute_head_loss
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8, ALL_FP32, BF16, GemmChoice

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
CHOICES = [GemmChoice(*formats) for formats in itertools.product(("bf16", "fp8"), repeat=3)]


def make(rows, columns, spread=3.0, padding=0):
    torch.manual_seed(rows * columns)
    logits = (torch.randn(rows, columns + padding, device="cuda", dtype=BF16) * spread)[:, :columns]
    targets = torch.randint(columns, (rows,), device="cuda")
    targets[::7] = ce.IGNORE
    return logits, targets


def assert_same_bits(lp, exact):
    """Compare with torch's cast. A few values may be one code away, where an exponential's last bit decides a tie."""
    mine, theirs = lp.view(torch.uint8).int(), exact.to(lp.dtype).view(torch.uint8).int()
    zero = ((mine | theirs) & 0x7F) == 0  # +0 and -0
    apart = ((mine - theirs).abs() > 0) & ~zero
    assert apart.float().mean() < 2e-4
    assert (mine - theirs).abs()[apart].max().item() <= 1 if apart.any() else True


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(16, 128), (37, 300), (1024, 50304), (4112, 1000), (130, 32000)])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_fp8_bits_in_both_layouts(dtype, shape, spread):
    logits, targets = make(*shape, spread, padding=64)
    lse, loss = ce.compute_softmax_stats(logits, targets)
    exact = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=1e-5)
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse, dtype, counts=counts)
    unit = ce.grad_logits_reference(logits, targets, lse)
    assert_same_bits(d, ce.dither(unit * ce.UNIT_SCALE[dtype], dtype))
    assert torch.equal(d_t.view(torch.uint8), d.view(torch.uint8).t())
    assert counts[0] == 0 and counts[1].item() == ((unit != 0) & (d.float() == 0)).sum().item()
    alone, none = ce.compute_grad_logits_fp8(logits, targets, lse, dtype, transposed=False)
    assert none is None and torch.equal(alone.view(torch.uint8), d.view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_nan_stays_in_its_row(dtype):
    logits, targets = make(64, 1024)
    logits[5, 7] = torch.nan
    lse, _ = ce.compute_softmax_stats(logits, targets)
    d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse, dtype)
    wrong = torch.isnan(d.float())
    assert wrong[5].all() and wrong.sum() == 1024 and torch.equal(torch.isnan(d_t.float()), wrong.t())


@pytest.mark.parametrize("shape", [(16, 128), (37, 300), (1024, 50304)])
def test_bf16_gradient_overwrites_the_logits(shape):
    logits, targets = make(*shape)
    lse, _ = ce.compute_softmax_stats(logits, targets)
    factor = torch.tensor(1 / 37, device="cuda")
    exact = ce.grad_logits_reference(logits, targets, lse) * factor
    d = ce.compute_grad_logits(logits, targets, lse, factor, out=logits)
    assert d is logits
    torch.testing.assert_close(d.float(), exact, rtol=2**-8, atol=1e-9)


FORMS = [
    ce.LossForm(smoothing=0.1),
    ce.LossForm(multiplier=0.0625),
    ce.LossForm(cap=30.0),
    ce.LossForm(multiplier=1.5, cap=4.0, smoothing=0.2),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(37, 300), (144, 72), (1024, 50304)])
def test_forms_of_the_loss(form, shape):
    logits, targets = make(*shape, padding=64)
    leaf = logits.double().requires_grad_()
    x = leaf * (form.multiplier or 1.0)
    x = x if form.cap is None else torch.tanh(x / form.cap) * form.cap
    exact = F.cross_entropy(x, targets, reduction="none", label_smoothing=form.smoothing or 0.0)
    exact.sum().backward()
    unit = leaf.grad / (form.multiplier or 1.0)
    lse, loss = ce.compute_softmax_stats(logits, targets, form=form)
    torch.testing.assert_close(loss.double(), exact.detach(), rtol=4e-6, atol=2e-5)
    factor = torch.tensor(1 / 37, device="cuda")
    again, d = ce.compute_loss_and_grad(logits, targets, factor, form=form)
    torch.testing.assert_close(again, loss, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(d.double(), unit / 37, rtol=2**-8 + 1e-4, atol=1e-9)
    torch.testing.assert_close(
        ce.compute_grad_logits(logits, targets, lse, factor, form=form), d, rtol=2**-7, atol=1e-9
    )
    d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse, form=form)
    exact_d = ce.grad_logits_reference(logits, targets, lse, form=form)
    assert_same_bits(d, ce.dither(exact_d * ce.UNIT_SCALE[E4M3], E4M3))
    assert torch.equal(d_t.view(torch.uint8), d.view(torch.uint8).t())


def test_more_than_two_to_the_31_logits():
    rows, columns = 43008, 50304
    logits, targets = make(rows, columns)
    lse, loss = ce.compute_softmax_stats(logits, targets)
    d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse)
    for start in (0, rows // 2, rows - 256):
        part = slice(start, start + 256)
        exact_lse, exact_loss = ce.softmax_stats_reference(logits[part], targets[part])
        torch.testing.assert_close(lse[part], exact_lse, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(loss[part], exact_loss, rtol=1e-6, atol=1e-5)
        exact = ce.grad_logits_reference(logits[part], targets[part], lse[part])
        assert_same_bits(d[part], ce.dither(exact * ce.UNIT_SCALE[E4M3], E4M3, start))
        assert torch.equal(d_t[:, part].view(torch.uint8), d[part].view(torch.uint8).t())
        hp = ce.compute_grad_logits(logits[part], targets[part], lse[part], torch.ones((), device="cuda"))
        torch.testing.assert_close(hp.float(), exact, rtol=2**-8, atol=1e-9)
    ce.compute_grad_logits(logits, targets, lse, torch.ones((), device="cuda"), out=logits)
    torch.testing.assert_close(logits[-256:].float(), exact, rtol=2**-8, atol=1e-9)


def test_rescaling_of_a_large_tensor():
    tensor = torch.randn(1 << 20, 257, device="cuda", dtype=BF16)
    before = tensor.clone()
    assert torch.equal(ce.rescale_(tensor, torch.ones((), device="cuda")), before)
    assert torch.equal(ce.rescale_(tensor, torch.tensor(65536.0, device="cuda")), before * 65536)


def inputs(rows=2048, width=768, vocab=50304):
    torch.manual_seed(0)
    x = torch.randn(rows, width, device="cuda").bfloat16()
    weight = torch.randn(vocab, width, device="cuda") * (2.5 / math.sqrt(width))
    targets = torch.multinomial((x.float() @ weight.t()).softmax(1), 1)[:, 0]
    targets[::9] = ce.IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


def sqnr(exact, got):
    return 10 * torch.log10(exact.double().square().sum() / (exact - got).double().square().sum()).item()


@pytest.mark.parametrize("choice", CHOICES, ids="-".join)
def test_head_against_fp32(choice):
    x, weight, targets = inputs()
    wide, plain = x.detach().float().requires_grad_(), weight.detach().clone().requires_grad_()
    exact = F.cross_entropy(wide @ plain.t(), targets)
    exact.backward()
    loss = compute_head_loss(x, weight, targets, precision=choice, chunk_rows=768)
    loss.backward()
    lp = "fp8" in choice
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3 if choice.output == "fp8" else 1e-3)
    assert sqnr(wide.grad, x.grad) > (20 if lp else 35)
    assert sqnr(plain.grad, weight.grad) > (20 if lp else 35)


@pytest.mark.parametrize("choice", [ALL_FP32, ALL_BF16, ALL_FP8], ids="-".join)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]], ids=str)
def test_head_with_forms_of_the_loss_against_fp64(choice, form):
    x, weight, targets = inputs(rows=512, vocab=8192)
    bias = torch.linspace(-1, 1, len(weight), device="cuda").requires_grad_()
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
    logits = (leaves[0] @ leaves[1].t() + leaves[2]) * (form.multiplier or 1.0)
    logits = logits if form.cap is None else torch.tanh(logits / form.cap) * form.cap
    exact = F.cross_entropy(logits, targets, label_smoothing=form.smoothing)
    exact.backward()
    x = x.detach().to(torch.float32 if choice is ALL_FP32 else BF16).requires_grad_()
    loss = compute_head_loss(x, weight, targets, bias=bias, precision=choice, chunk_rows=256, form=form)
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5 if choice is ALL_FP32 else 5e-3)
    for leaf, ours in zip(leaves, (x, weight, bias), strict=True):
        assert sqnr(leaf.grad, ours.grad) > (100 if choice is ALL_FP32 else 33 if choice is ALL_BF16 else 18)


@pytest.mark.parametrize("choice", [ALL_BF16, ALL_FP8], ids="-".join)
def test_head_does_not_synchronize_and_saves_memory(choice):
    x, weight, targets = inputs(rows=16384)
    compute_head_loss(x, weight, targets, precision=choice, chunk_rows=4096).backward()  # compiles
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute_head_loss(x, weight, targets, precision=choice, chunk_rows=4096).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copies = 2 * weight.numel() + 4 * x.numel()  # of the weight, and of x in its layouts with its gradient
    if choice is ALL_FP8:  # one chunk's logits and their gradient, and the transposed gradient of a group: all rows
        logits = (3 * 4096 + 16384) * weight.shape[0]
    else:  # the gradient is written over the logits; a sum of the weight's gradients, and the next summand
        logits = 2 * 4096 * weight.shape[0] + 4 * 2 * weight.numel()
    assert torch.cuda.max_memory_allocated() - before < (logits + copies) * 1.05


def test_head_in_a_cuda_graph():
    x, weight, targets = inputs(rows=1024)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            x.grad = weight.grad = None
            eager = compute_head_loss(x, weight, targets, precision=ALL_FP8)
            eager.backward()
    torch.cuda.current_stream().wait_stream(stream)
    expected, expected_x = eager.detach().clone(), x.grad.clone()
    x.grad = weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = compute_head_loss(x, weight, targets, precision=ALL_FP8)
        loss.backward()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(loss.detach(), expected) and torch.equal(x.grad, expected_x)
