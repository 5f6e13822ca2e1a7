"""The fused head and loss match plain PyTorch in FP64, for every combination of formats."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge.errors import UsageError
from narrowgauge.kernels import cast, compute_scale
from narrowgauge.kernels import cast_weights as weight_kernel
from narrowgauge.kernels.cross_entropy import LossForm
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.nn.fused import head
from narrowgauge.nn.fused.head import choose_chunk_rows, choose_group_rows, compute_head_loss
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8, ALL_FP32, BF16, E4M3, GemmChoice, compute_grad_weight
from narrowgauge.scaling.operand import Operand

CHOICES = [GemmChoice(*formats) for formats in itertools.product(("bf16", "fp8"), repeat=3)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(rows=200, width=64, vocab=304, seed=0, ignored=7):
    """Return a BF16 hidden state, a weight, and targets that they partly predict, so that the softmax is peaked."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    weight = torch.randn(vocab, width, generator=generator) * (2.5 / math.sqrt(width))
    targets = torch.multinomial((x.float() @ weight.t()).softmax(1), 1, generator=generator)[:, 0]
    if ignored:
        targets[::ignored] = -100
    return x.to(DEVICE).requires_grad_(), weight.to(DEVICE).requires_grad_(), targets.to(DEVICE)


def plain(x, weight, targets, **options):
    """Return loss and gradients in FP64."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = F.cross_entropy(x @ weight.t(), targets, **options)
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def sqnr(exact, got):
    return 10 * torch.log10(exact.double().square().sum() / (exact - got.double()).square().sum()).item()


@pytest.mark.parametrize("choice", CHOICES, ids="-".join)
def test_values_and_gradients_in_every_mix(choice):
    x, weight, targets = make()
    exact, exact_x, exact_weight = plain(x, weight, targets)
    loss = compute_head_loss(x, weight, targets, precision=choice, chunk_rows=64)
    assert loss.dtype is torch.float32 and loss.shape == ()
    loss.backward()
    assert x.grad.dtype is BF16 and weight.grad.dtype is torch.float32
    output, grad_input, grad_weight = (form == "fp8" for form in choice)
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3 if output else 5e-4)
    # An FP8 output also makes gradients less accurate: the softmax uses rounded logits.
    assert sqnr(exact_x, x.grad) > (20 if grad_input or output else 35)
    assert sqnr(exact_weight, weight.grad) > (20 if grad_weight or output else 35)


@pytest.mark.parametrize("choice", [ALL_BF16, ALL_FP8], ids="-".join)
@pytest.mark.parametrize("rows", [1, 15, 16, 200])
def test_chunks_change_nothing_but_the_order_of_sums(choice, rows):
    results = []
    for chunk_rows in (None, 16, 48, 4096):
        x, weight, targets = make(rows, ignored=0)
        loss = compute_head_loss(x, weight, targets, precision=choice, chunk_rows=chunk_rows)
        loss.backward()
        results.append((loss.detach(), x.grad, weight.grad))
    for loss, grad_x, grad_weight in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(grad_x, results[0][1], rtol=2**-7, atol=1e-9)
        torch.testing.assert_close(grad_weight, results[0][2], rtol=1e-4, atol=1e-7)


FORMS = [
    LossForm(),
    LossForm(smoothing=0.1),
    LossForm(multiplier=0.25),
    LossForm(multiplier=1.5, cap=3.0),
    LossForm(multiplier=-2.0, cap=4.0, smoothing=0.2),
]


def compare_form(form, choice, reduction):
    """Return (name, exact, ours) of the loss and the gradients, for a head with a bias; the exact ones in FP64."""
    results = []
    x, weight, targets = make()
    bias = torch.linspace(-1, 1, len(weight), device=DEVICE)
    for dtype in (torch.float64, torch.float32 if choice is ALL_FP32 else x.dtype):
        leaves = [x.detach().to(dtype), weight.detach().to(torch.promote_types(dtype, torch.float32)), bias.clone()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        if dtype is torch.float64:
            logits = (leaves[0] @ leaves[1].t() + leaves[2]) * (form.multiplier or 1.0)
            logits = logits if form.cap is None else torch.tanh(logits / form.cap) * form.cap
            loss = F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=form.smoothing or 0.0)
        else:
            loss = compute_head_loss(
                *leaves[:2], targets, bias=leaves[2], precision=choice, chunk_rows=64, reduction=reduction, form=form
            )
        (3 * loss).backward()
        results.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    return zip(("loss", "input", "weight", "bias"), *results, strict=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_of_the_loss_in_fp32(form, reduction):
    for name, exact, ours in compare_form(form, ALL_FP32, reduction):
        error = (exact - ours).norm() / exact.norm()
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("choice", [*CHOICES[:2], ALL_FP8], ids="-".join)
@pytest.mark.parametrize("form", FORMS[1:], ids=str)
def test_forms_of_the_loss_in_16_and_8_bits(form, choice):
    for name, exact, ours in compare_form(form, choice, "mean"):
        assert sqnr(exact, ours) > (20 if "fp8" in choice else 34), name


@pytest.mark.parametrize("choice", [ALL_BF16, ALL_FP8], ids="-".join)
def test_loss_scaling_is_exact(choice):
    grads = []
    for scale in (1.0, 65536.0):
        x, weight, targets = make()
        (compute_head_loss(x, weight, targets, precision=choice) * scale).backward()
        grads.append((x.grad.float() / scale, weight.grad / scale))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_factor_that_is_not_a_power_of_two():
    x, weight, targets = make()
    _, exact_x, exact_weight = plain(x, weight, targets)
    (compute_head_loss(x, weight, targets) / 3).backward()
    assert sqnr(exact_x / 3, x.grad) > 35 and sqnr(exact_weight / 3, weight.grad) > 35


@pytest.mark.parametrize("choice", [ALL_BF16, ALL_FP8], ids="-".join)
def test_ignored_rows_do_not_count(choice):
    x, weight, targets = make(ignored=2)
    exact, exact_x, exact_weight = plain(x, weight, targets)
    with torch.no_grad():
        x[::2] *= 0.5  # their values do not matter
    loss = compute_head_loss(x, weight, targets, precision=choice)
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)
    assert not x.grad[::2].any()
    assert sqnr(exact_x, x.grad) > 20 and sqnr(exact_weight, weight.grad) > 20


def test_another_ignore_index():
    x, weight, targets = make(ignored=0)
    exact = F.cross_entropy(x.detach().double() @ weight.detach().double().t(), targets, ignore_index=int(targets[0]))
    loss = compute_head_loss(x, weight, targets, ignore_index=int(targets[0]))
    assert loss.item() == pytest.approx(exact.item(), rel=5e-4)


@pytest.mark.parametrize("choice", [ALL_BF16, ALL_FP8], ids="-".join)
def test_all_rows_ignored_matches_pytorch(choice):
    x, weight, targets = make()
    targets[:] = -100
    loss = compute_head_loss(x, weight, targets, precision=choice)
    loss.backward()
    assert torch.isnan(loss) and torch.isnan(F.cross_entropy(x.detach().float() @ weight.detach().t(), targets))
    assert not x.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("choice", [ALL_BF16, ALL_FP8], ids="-".join)
def test_without_gradients_there_is_only_the_loss(choice, monkeypatch):
    x, weight, targets = make()
    trained = compute_head_loss(x, weight, targets, precision=choice)

    def never(*args, **kwargs):
        raise AssertionError("an unneeded gradient was computed")

    for name in ("compute_grad_logits", "compute_grad_logits_fp8", "compute_grad_input", "compute_grad_weight"):
        monkeypatch.setattr(head, name, never)
    with torch.no_grad():
        loss = compute_head_loss(x, weight, targets, precision=choice)
    assert torch.equal(loss, trained.detach()) and not loss.requires_grad
    assert not compute_head_loss(x.detach(), weight.detach(), targets, precision=choice).requires_grad


@pytest.mark.parametrize("choice", CHOICES, ids="-".join)
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_what_needs_a_gradient_gets_one(choice, frozen):
    x, weight, targets = make()
    _, exact_x, exact_weight = plain(x, weight, targets)
    (x if frozen == "x" else weight).requires_grad_(False)
    compute_head_loss(x, weight, targets, precision=choice).backward()
    assert (x.grad is None) == (frozen == "x") and (weight.grad is None) == (frozen == "weight")
    assert sqnr(exact_weight, weight.grad) > 20 if frozen == "x" else sqnr(exact_x, x.grad) > 20


def test_a_given_fp8_operand_is_used():
    x, weight, targets = make(192)
    scale = compute_scale(cast.max_abs(x.detach()), FP8_MAX[E4M3])
    lp, lp_t = cast.cast_transpose(x.detach(), scale, E4M3)
    made = compute_head_loss(x, weight, targets, precision=ALL_FP8)
    made.backward()
    for operand in (Operand(None, lp, lp_t, 1 / scale), Operand(None, lp, None, 1 / scale)):
        # x itself is not read: it may be a placeholder with a shape and no memory
        stand_in = torch.full((), torch.nan, dtype=BF16, device=DEVICE).expand_as(x).requires_grad_()
        other = weight.detach().clone().requires_grad_()
        loss = compute_head_loss(stand_in, other, targets, precision=ALL_FP8, operand=operand)
        loss.backward()
        torch.testing.assert_close(loss, made, rtol=1e-6, atol=0)
        assert sqnr(x.grad.double(), stand_in.grad) > 60 and sqnr(weight.grad.double(), other.grad) > 60


def test_a_weight_is_cast_once_for_all_chunks_and_again_for_the_next_loss(monkeypatch):
    x, weight, targets = make()
    casts = []
    original = weight_kernel.cast_weight
    monkeypatch.setattr(weight_kernel, "cast_weight", lambda *args: casts.append(1) or original(*args))
    losses = []
    for factor in (1, 1, 2):
        weight.data.mul_(factor)  # does not increment the tensor's version
        losses.append(compute_head_loss(x, weight, targets, precision=ALL_FP8, chunk_rows=64))
        losses[-1].backward()
    assert len(casts) == 3 and weight.grad is not None
    assert losses[0] == losses[1] != losses[2]


def test_an_fp32_input_gets_an_fp32_gradient():
    x, weight, targets = make()
    wide = x.detach().float().requires_grad_()
    compute_head_loss(wide, weight, targets).backward()
    assert wide.grad.dtype is torch.float32


def test_autocast_outside_changes_nothing():
    x, weight, targets = make()
    expected = compute_head_loss(x, weight, targets, precision=ALL_FP8)
    with torch.autocast(DEVICE, dtype=BF16):
        loss = compute_head_loss(x, weight, targets, precision=ALL_FP8)
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("choice", [ALL_BF16, ALL_FP8], ids="-".join)
def test_backward_runs_twice_only_with_a_retained_graph(choice):
    x, weight, targets = make()
    loss = compute_head_loss(x, weight, targets, precision=choice)
    (3 * loss).backward(retain_graph=True)
    first = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, first * 4 / 3)
    with pytest.raises(UsageError, match="retain_graph=True"):
        loss.backward()


def test_gradients_add_up_over_microbatches():
    x, weight, targets = make(192)
    _, exact_x, exact_weight = plain(x, weight, targets, reduction="sum")
    for part in range(2):
        rows = slice(96 * part, 96 * part + 96)
        counted = (targets[rows] != -100).sum()
        (compute_head_loss(x[rows], weight, targets[rows]) * counted).backward()
    assert sqnr(exact_x, x.grad) > 35 and sqnr(exact_weight, weight.grad) > 35


@pytest.mark.parametrize("choice", [ALL_BF16, ALL_FP8], ids="-".join)
def test_fake_tensors_pass_through(choice):
    with FakeTensorMode():
        x = torch.empty(100, 64, dtype=BF16, device=DEVICE, requires_grad=True)
        weight = torch.empty(304, 64, device=DEVICE, requires_grad=True)
        loss = compute_head_loss(x, weight, torch.empty(100, dtype=torch.int64, device=DEVICE), precision=choice)
        loss.backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads the loss after the graph break
def test_torch_compile_does_not_trace_the_head():
    def step(x, weight, targets):
        return compute_head_loss(x * 1.0, weight, targets, precision=ALL_FP8) * 2.0

    x, weight, targets = make()
    compiled = torch.compile(step, backend="eager")(x, weight, targets)
    compiled.backward()
    assert torch.equal(compiled.detach(), step(x, weight, targets).detach()) and x.grad is not None


def test_chunks_are_even_and_fit():
    assert choose_chunk_rows(65536, 50304) == 32768
    assert choose_chunk_rows(16384, 50304) == 16384
    assert choose_chunk_rows(16384, 128256) == 16384
    assert choose_chunk_rows(0, 50304) == choose_chunk_rows(1, 304) == 128
    for rows, vocab in [(100_000, 50304), (7777, 128256), (65536, 1 << 25)]:
        chunk = choose_chunk_rows(rows, vocab)
        assert chunk % 128 == 0 and (chunk == 128 or chunk * vocab * 2 <= head.WIDE_CHUNK_BYTES)


def test_groups_are_whole_chunks_and_fit():
    assert choose_chunk_rows(65536, 50304, head.CHUNK_BYTES) == 8192  # seven would do, but eight are equal
    assert choose_group_rows(65536, 50304, 8192) == 32768
    assert choose_group_rows(16384, 50304, 8192) == 16384
    assert choose_group_rows(0, 304, 128) == 0 and choose_group_rows(100, 304, 128) == 128
    for rows, vocab in [(100_000, 50304), (7777, 128256), (65536, 1 << 25), (131072, 128256)]:
        chunk = choose_chunk_rows(rows, vocab, head.CHUNK_BYTES)
        group = choose_group_rows(rows, vocab, chunk)
        assert group % chunk == 0 and (group == chunk or group * vocab <= head.GROUP_BYTES)


@pytest.mark.parametrize("group", [1, 2, 3, 100])
def test_groups_change_nothing(group, monkeypatch):
    x, weight, targets = make(208)
    loss = compute_head_loss(x, weight, targets, precision=ALL_FP8, chunk_rows=208)
    loss.backward()
    monkeypatch.setattr(head, "GROUP_BYTES", group * 64 * len(weight))
    calls = []
    monkeypatch.setattr(
        head, "compute_grad_weight", lambda d, *a, **k: (calls.append(1), compute_grad_weight(d, *a, **k))[1]
    )
    again = [t.detach().clone().requires_grad_() for t in (x, weight)]
    other = compute_head_loss(*again, targets, precision=ALL_FP8, chunk_rows=64)
    other.backward()
    assert len(calls) == -(-4 // min(group, 4))
    torch.testing.assert_close(other, loss, rtol=1e-6, atol=0)
    assert sqnr(x.grad.double(), again[0].grad) > 60 and sqnr(weight.grad.double(), again[1].grad) > 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (3, 4, 64)}, r"expected x \[N, D\]"),
        ({"targets": (199,)}, r"targets \[N\]"),
        ({"weight": (300, 64)}, "multiples of 16"),
        ({"chunk_rows": 40}, "chunk_rows=40"),
        ({"chunk_rows": 0}, "chunk_rows=0"),
    ],
)
def test_mistakes_raise(change, message):
    shapes = {"x": (200, 64), "weight": (304, 64), "targets": (200,)} | change
    chunk_rows = shapes.pop("chunk_rows", None)
    x, weight = torch.randn(shapes["x"], device=DEVICE), torch.randn(shapes["weight"], device=DEVICE)
    targets = torch.zeros(shapes["targets"], dtype=torch.int64, device=DEVICE)
    with pytest.raises(UsageError, match=message):
        compute_head_loss(x, weight, targets, precision=ALL_FP8, chunk_rows=chunk_rows)
