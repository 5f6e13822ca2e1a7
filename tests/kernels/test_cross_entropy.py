"""Cross-entropy: kernels match their references, and references match torch in FP64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge.kernels import cross_entropy as ce
from narrowgauge.kernels.fp8_formats import FP8_MAX

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter computes with NumPy, which warns about inf - inf; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
# Its cast to BF16 truncates.
BF16_STEP = 2**-8 if DEVICE == "cuda" else 2**-7
SHAPES = [(1, 17), (37, 300), (16, 128), (144, 272), (5, 4500)]
LP_SHAPES = SHAPES
if (
    DEVICE == "cpu"
):  # the interpreter takes the longer the more rows or tiles; these have one, several and incomplete ones
    SHAPES = [(1, 17), (3, 300), (16, 128), (17, 530), (5, 4500)]
    LP_SHAPES = [(1, 17), (37, 72), (16, 128), (144, 72)]


def make(rows, columns, seed=0, spread=3.0, padding=0):
    """Return logits whose row stride may exceed the columns, and targets of which every fifth is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns + padding, generator=generator) * spread
    targets = torch.randint(columns, (rows,), generator=generator)
    targets[::5] = ce.IGNORE
    return logits.bfloat16().to(DEVICE)[:, :columns], targets.to(DEVICE)


def spacing(values, dtype):
    """Return the distance to the next representable value, for each value."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(values.abs().clamp(min=info.smallest_normal)))
    return torch.exp2(exponent + math.log2(info.eps))


def assert_cast(lp, exact):
    """Check that FP8 values are within one step of the exact ones.

    Triton's interpreter loses the carry if rounding reaches the next power of two (7.9 becomes 4, not 8). On the CPU
    such values are not checked.
    """
    wrong = (lp.float() - exact.float()).abs() > spacing(exact, lp.dtype)
    if DEVICE == "cpu":
        wrong &= torch.frexp(exact.to(lp.dtype).float()).exponent == torch.frexp(exact.float()).exponent
    assert not wrong.any(), f"{exact[wrong][:4].tolist()} became {lp.float()[wrong][:4].tolist()}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", [0, 16, 3])
def test_statistics_match_fp64(shape, padding):
    logits, targets = make(*shape, padding=padding)
    lse, loss = ce.compute_softmax_stats(logits, targets)
    assert lse.dtype is loss.dtype is torch.float32
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits.double(), 1), rtol=1e-6, atol=1e-6)
    exact = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=4e-6)
    for mine, theirs in zip((lse, loss), ce.softmax_stats_reference(logits, targets), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=4e-6)


def test_statistics_of_extreme_logits():
    logits, targets = make(8, 5000)
    targets[:] = 4999
    logits[0] *= 1000  # exp would overflow
    logits[1, :4500] = -torch.inf  # the whole first block
    logits[2, 7] = torch.nan
    logits[3, 7] = torch.inf
    logits[4] = -30000.0
    lse, loss = ce.compute_softmax_stats(logits, targets)
    exact = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=1e-2, equal_nan=True)
    assert torch.isfinite(loss[[0, 1, 4, 5]]).all() and torch.isnan(loss[[2, 3]]).all()
    assert torch.isfinite(lse[1])


def test_another_ignore_index():
    logits, targets = make(12, 64)
    targets[targets == ce.IGNORE] = 3
    targets[:4] = 0
    lse, loss = ce.compute_softmax_stats(logits, targets, ignore_index=0)
    exact = F.cross_entropy(logits.double(), targets, ignore_index=0, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=2e-6, atol=4e-6)
    d = ce.compute_grad_logits(logits, targets, lse, torch.ones((), device=DEVICE), ignore_index=0)
    assert not d[targets == 0].any() and d[targets != 0].any(1).all()


def test_a_target_outside_the_vocabulary_gives_nan():
    logits, targets = make(4, 64)
    targets[1], targets[2] = 64, -1
    loss = ce.compute_softmax_stats(logits, targets)[1]
    assert torch.isnan(loss).tolist() == [False, True, True, False]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", [0, 16])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient_in_bf16(shape, padding, in_place):
    logits, targets = make(*shape, padding=padding)
    factor = torch.tensor(1 / 7, device=DEVICE)
    leaf = logits.double().requires_grad_()
    (F.cross_entropy(leaf, targets, reduction="sum") * factor).backward()
    lse = ce.compute_softmax_stats(logits, targets)[0]
    d = ce.compute_grad_logits(logits, targets, lse, factor, out=logits if in_place else None)
    assert (d is logits) is in_place and d.dtype is torch.bfloat16
    torch.testing.assert_close(d.double(), leaf.grad, rtol=BF16_STEP, atol=1e-7)
    assert not d[targets == ce.IGNORE].any()


@pytest.mark.parametrize("shape", [*SHAPES, (3, 20000)])
@pytest.mark.parametrize("padding", [0, 16])
@pytest.mark.parametrize("in_place", [False, True])
def test_loss_and_gradient_in_one(shape, padding, in_place, monkeypatch):
    logits, targets = make(*shape, padding=padding)
    factor, before = torch.tensor(1 / 7, device=DEVICE), logits.clone()
    leaf = logits.double().requires_grad_()
    exact = F.cross_entropy(leaf, targets, reduction="none")
    (exact.sum() * factor).backward()
    loss, d = ce.compute_loss_and_grad(logits, targets, factor, out=logits if in_place else None)
    assert (d is logits) is in_place and d.dtype is torch.bfloat16 and loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), exact.detach(), rtol=2e-6, atol=4e-6)
    torch.testing.assert_close(d.double(), leaf.grad, rtol=BF16_STEP, atol=1e-7)
    assert not d[targets == ce.IGNORE].any()
    monkeypatch.setattr(ce, "use_triton", lambda tensor: False)
    by_torch, d_by_torch = ce.compute_loss_and_grad(before, targets, factor)
    torch.testing.assert_close(loss, by_torch, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(d, d_by_torch, rtol=2 * BF16_STEP, atol=1e-7)


@pytest.mark.parametrize("width", [5000, 20000])
def test_loss_and_gradient_of_extreme_logits(width):
    logits, targets = make(6, width)
    targets[:] = width - 1
    logits[0] *= 1000
    logits[1, : width - 500] = -torch.inf  # the first block has no maximum
    logits[2, 7] = torch.nan
    targets[3], targets[4] = width, ce.IGNORE
    logits[4, 3] = torch.nan
    logits[5, width - 9] = 500.0  # far above the first block's
    leaf = logits[[0, 1, 5]].double().requires_grad_()
    exact = F.cross_entropy(leaf, targets[[0, 1, 5]], reduction="none")
    exact.sum().backward()
    loss, d = ce.compute_loss_and_grad(logits, targets, torch.ones((), device=DEVICE))
    assert torch.isnan(loss).tolist() == [False, False, True, True, False, False]
    torch.testing.assert_close(loss[[0, 1, 5]].double(), exact.detach(), rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(d[[0, 1, 5]].double(), leaf.grad, rtol=2 * BF16_STEP, atol=1e-6)
    assert torch.isnan(d[2]).all()
    assert not d[4].any(), "an ignored row, whatever it holds"


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("shape", "transposed"), [*((shape, True) for shape in LP_SHAPES), *((shape, False) for shape in LP_SHAPES[1:3])]
)
def test_gradient_in_fp8_is_within_a_step(dtype, shape, transposed):
    logits, targets = make(*shape, padding=16)
    leaf = logits.double().requires_grad_()
    F.cross_entropy(leaf, targets, reduction="sum").backward()
    scaled = leaf.grad * ce.UNIT_SCALE[dtype]
    lse = ce.softmax_stats_reference(logits, targets)[0]
    d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse, dtype, transposed=transposed)
    assert d.shape == shape and d.dtype is dtype and d.is_contiguous()
    assert_cast(d, ce.dither(scaled, dtype))
    if transposed:
        assert d_t.shape == shape[::-1] and d_t.is_contiguous()
        assert torch.equal(d_t.view(torch.uint8), d.view(torch.uint8).t())
    else:
        assert d_t is None


@pytest.mark.parametrize("start", [0, 16, 96])
@pytest.mark.parametrize("shape", [(48, 80), (64, 96), (16, 400)])
def test_the_transposed_gradient_fills_columns_of_a_wider_tensor(shape, start, monkeypatch):
    monkeypatch.setattr(ce, "LP_TILE", {"BLOCK_N": 32, "BLOCK_D": 32, "num_warps": 4})
    logits, targets = make(*shape)
    lse = ce.softmax_stats_reference(logits, targets)[0]
    whole = torch.full((shape[1], start + shape[0] + 16), 7, dtype=torch.uint8, device=DEVICE).view(E4M3)
    into = whole[:, start : start + shape[0]]
    d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse, out_t=into)
    assert d_t is into and torch.equal(into.view(torch.uint8), d.view(torch.uint8).t())
    around = whole.view(torch.uint8)
    assert (around[:, :start] == 7).all() and (around[:, start + shape[0] :] == 7).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_too_small_for_the_format_are_right_on_average(dtype):
    """Entries of a tenth of the smallest step are kept in the sums over rows, over columns and over all."""
    step = 2 * ce.FLUSH_THRESHOLD[dtype]
    plain = torch.full((512, 384), 0.1 * step, device=DEVICE)
    assert not plain.to(dtype).float().any()
    cast = ce.dither(plain, dtype).to(dtype).float() / step
    assert cast.mean().item() == pytest.approx(0.1, rel=1e-3)
    assert (cast.mean(0) - 0.1).abs().max() < 0.01 and (cast.mean(1) - 0.1).abs().max() < 0.01
    assert not ce.dither(torch.zeros(64, 64, device=DEVICE), dtype).to(dtype).float().any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_of_any_size_are_right_on_average(dtype):
    """Also beside powers of two, where the step changes, and near the smallest normal number."""
    info, found = torch.finfo(dtype), []
    normal = info.smallest_normal
    values = [0.999 * normal, 1.001 * normal, 1.06 * normal, 0.3, 0.97, 1.01, 17.3, 127.9, 128.5, 131.0, 250.0, 255.99]
    for value in [*values, *(-value for value in values)]:
        cast = ce.dither(torch.full((512, 512), value, device=DEVICE), dtype).to(dtype).float()
        assert len(cast.unique()) == 2 and cast.min() <= value <= cast.max()  # its two neighbours
        found.append(cast.double().mean().item() / value - 1)
    assert max(map(abs, found)) < 2e-5
    nearest = torch.full((), 250.0).to(dtype).float().item() / 250.0 - 1
    assert abs(nearest) > 0.02


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rows_add_up_to_zero_on_average(dtype):
    """What a row's sum differs from zero pushes all hidden states along the mean of the head's rows."""
    generator = torch.Generator().manual_seed(0)
    logits = (
        2.5 * torch.randn(1, 4096, generator=generator) + 1.8 * torch.randn(2048, 4096, generator=generator)
    ).bfloat16()
    targets = torch.multinomial(torch.softmax(logits.float(), 1), 1, generator=generator)[:, 0]
    lse, _ = ce.softmax_stats_reference(logits, targets)
    exact = ce.grad_logits_reference(logits, targets, lse) * ce.UNIT_SCALE[dtype]

    def count_errors(rounded):
        sums = (rounded.float() - exact).sum(1)
        return (sums.mean() / sums.std() * len(sums) ** 0.5).abs().item()

    assert count_errors(ce.dither(exact, dtype).to(dtype)) < 3 < 8 < count_errors(exact.to(dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_the_format_has_does_not_change(dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype).float()
    exact = codes[codes.abs() <= ce.UNIT_SCALE[dtype]]
    cast = ce.dither(exact.repeat(64, 1), dtype).to(dtype).float()
    assert torch.equal(cast, exact.expand_as(cast))
    assert torch.isnan(ce.dither(torch.full((16, 16), torch.nan), dtype)).all()


@pytest.mark.parametrize(("rows", "width"), [(16, 80), (34, 80), (48, 80), (34, 96), (32, 64), (48, 96)])
def test_full_tiles_and_tiles_at_the_edges_are_written(rows, width, monkeypatch):
    monkeypatch.setattr(ce, "LP_TILE", {"BLOCK_N": 16, "BLOCK_D": 32, "num_warps": 4})
    logits, targets = make(rows, width)
    lse = ce.softmax_stats_reference(logits, targets)[0]
    d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse)
    exact = ce.grad_logits_reference(logits, targets, lse) * ce.UNIT_SCALE[E4M3]
    assert_cast(d, ce.dither(exact, E4M3))
    assert torch.equal(d_t.view(torch.uint8), d.view(torch.uint8).t())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_counts_what_is_flushed(dtype, kind):
    logits, targets = make(130, 120, spread=8.0)
    lse = ce.softmax_stats_reference(logits, targets)[0]
    counts = torch.tensor([3, 5], dtype=kind, device=DEVICE)
    ce.compute_grad_logits_fp8(logits, targets, lse, dtype, counts=counts)
    expected = torch.tensor([0, 0], device=DEVICE)
    ce.grad_logits_fp8_reference(logits, targets, lse, dtype, counts=expected)
    saturated, flushed = (counts - torch.tensor([3, 5], device=DEVICE)).tolist()
    assert saturated == 0 and expected[1] > 100
    assert flushed == pytest.approx(expected[1].item(), abs=2)  # exponentials differ in the last bit


def test_scales_fill_the_formats_and_nothing_saturates():
    for dtype, scale in ce.UNIT_SCALE.items():
        assert scale <= FP8_MAX[dtype] < 2 * scale
    logits = torch.full((16, 32), -60.0, dtype=torch.bfloat16, device=DEVICE)
    logits[:, 3] = 60.0  # probability 1: correct in even rows, wrong in odd ones
    targets = torch.tensor([3, 4] * 8, device=DEVICE)
    lse = ce.compute_softmax_stats(logits, targets)[0]
    d, _ = ce.compute_grad_logits_fp8(logits, targets, lse)
    assert d[1, 3].float() == ce.UNIT_SCALE[E4M3] and d[1, 4].float() == -ce.UNIT_SCALE[E4M3]
    assert not d[0].float().any()


def test_nan_reaches_the_gradient():
    logits, targets = make(16, 32)
    logits[2, 5] = torch.nan
    lse = ce.compute_softmax_stats(logits, targets)[0]
    assert torch.isnan(ce.compute_grad_logits(logits, targets, lse, torch.ones((), device=DEVICE))[2]).all()
    for dtype in (E4M3, E5M2):  # Triton's interpreter casts NaN to a number; tests/gpu has the kernel
        d, d_t = ce.grad_logits_fp8_reference(logits, targets, lse, dtype)
        assert torch.isnan(d.float()[2]).all() and torch.isnan(d_t.float()[:, 2]).all()
        assert torch.isfinite(d.float()[[0, 1, *range(3, 16)]]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rescaling(dtype):
    tensor = torch.randn(97, 55, device=DEVICE).to(dtype)
    for factor in (1.0, 65536.0, 1 / 3):
        mine = tensor.clone()
        assert ce.rescale_(mine, torch.tensor(factor, device=DEVICE)) is mine
        rtol = 0 if dtype is torch.float32 or math.log2(factor).is_integer() or DEVICE == "cuda" else BF16_STEP
        torch.testing.assert_close(mine, (tensor.float() * factor).to(dtype), rtol=rtol, atol=0)
    turned = tensor.clone().t()
    assert torch.equal(ce.rescale_(turned, torch.tensor(2.0, device=DEVICE)), tensor.t() * 2)


FORMS = [
    ce.LossForm(smoothing=0.1),
    ce.LossForm(multiplier=0.0625),
    ce.LossForm(multiplier=-1.5, cap=4.0),
    ce.LossForm(multiplier=3.0, cap=-5.0, smoothing=0.3),
]


def by_autograd(logits, targets, form):
    """Return each row's loss and the gradient of their sum in FP64, with the operations that models use."""
    leaf = logits.double().requires_grad_()
    x = leaf * (form.multiplier or 1.0)
    if form.cap:
        x = torch.tanh(x / form.cap) * form.cap
    loss = F.cross_entropy(x, targets, reduction="none", label_smoothing=form.smoothing or 0.0)
    loss.sum().backward()
    return loss.detach(), leaf.grad / (form.multiplier or 1.0)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scaled_capped_and_smoothed(form):
    # The first shape has several blocks, and columns outside of the last; the second has incomplete tiles.
    for shape in ((2, 4500), (16, 72)):
        logits, targets = make(*shape, padding=16)
        exact, d_exact = by_autograd(logits, targets, form)
        lse, loss = ce.compute_softmax_stats(logits, targets, form=form)
        torch.testing.assert_close(loss.double(), exact, rtol=4e-6, atol=8e-6)
        by_torch = ce.softmax_stats_reference(logits, targets, form=form)
        torch.testing.assert_close((lse, loss), by_torch, rtol=2e-6, atol=8e-6)
        reference = ce.grad_logits_reference(logits, targets, lse, form=form)
        torch.testing.assert_close(reference.double(), d_exact, rtol=2e-5, atol=2e-7)
        factor = torch.tensor(1 / 7, device=DEVICE)
        again, both = ce.compute_loss_and_grad(logits, targets, factor, form=form)
        torch.testing.assert_close(again, loss, rtol=2e-6, atol=8e-6)
        for d in (both, ce.compute_grad_logits(logits, targets, lse, factor, form=form)):
            torch.testing.assert_close(d.double(), d_exact / 7, rtol=BF16_STEP, atol=1e-7)
        if shape[1] < 100:
            d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse, form=form)
            assert_cast(d, ce.dither(d_exact * ce.UNIT_SCALE[E4M3], E4M3))
            assert torch.equal(d_t.view(torch.uint8), d.view(torch.uint8).t())


def test_extreme_logits_with_a_cap():
    logits, targets = make(6, 300)
    targets[:] = 7
    logits[0] *= 1e30
    logits[1, 9], logits[2, 9], logits[3, 9] = torch.inf, -torch.inf, torch.nan
    form = ce.LossForm(1.0, 30.0)
    exact, d_exact = by_autograd(logits, targets, form)
    loss, d = ce.compute_loss_and_grad(logits, targets, torch.ones((), device=DEVICE), form=form)
    torch.testing.assert_close(loss.double(), exact, rtol=4e-6, atol=8e-6, equal_nan=True)
    assert torch.isnan(loss).tolist() == [False, False, False, True, False, False]
    torch.testing.assert_close(d.double(), d_exact, rtol=2 * BF16_STEP, atol=1e-6, equal_nan=True)


def test_no_rows():
    logits, targets = make(0, 32)
    lse, loss = ce.compute_softmax_stats(logits, targets)
    d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse)
    assert lse.shape == loss.shape == (0,) and d.shape == (0, 32) and d_t.shape == (32, 0)
    assert ce.compute_grad_logits(logits, targets, lse, torch.ones((), device=DEVICE)).shape == (0, 32)
    assert ce.compute_loss_and_grad(logits, targets, torch.ones((), device=DEVICE))[0].shape == (0,)


def test_operators_pass_opcheck():
    logits, targets = make(16, 32)
    lse, _ = ce.compute_softmax_stats(logits, targets)
    factor, counts = torch.ones((), device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    checks = ("test_schema", "test_faketensor")
    out, ops, form = torch.empty_like(logits), torch.ops.narrowgauge, ce.LossForm(0.5, 2.0, 0.1)
    torch.library.opcheck(ops.softmax_statistics, (logits, targets, -100, *ce.PLAIN), test_utils=checks)
    torch.library.opcheck(ops.grad_logits, (logits, targets, lse, factor, out, -100, *form), test_utils=checks)
    torch.library.opcheck(ops.loss_gradient, (logits, targets, factor, out, -100, *form), test_utils=checks)
    for more in ((counts, None, True, 0, *ce.PLAIN), (None, None, False, 48, *form)):
        args = (logits, targets, lse, E5M2, -100, *more)
        torch.library.opcheck(torch.ops.narrowgauge.grad_logits_fp8, args, test_utils=checks)
    into = torch.empty(32, 48, dtype=E5M2, device=DEVICE)[:, 16:32]  # torch's check of schemas has no FP8
    args = (logits, targets, lse, E5M2, -100, None, into, False, 48, *form)
    torch.library.opcheck(torch.ops.narrowgauge.grad_logits_fp8, args, test_utils="test_faketensor")


def test_fake_tensors_pass_through():
    with FakeTensorMode():
        logits = torch.empty(32, 64, dtype=torch.bfloat16, device=DEVICE)
        targets = torch.empty(32, dtype=torch.int64, device=DEVICE)
        lse, loss = ce.compute_softmax_stats(logits, targets)
        d, d_t = ce.compute_grad_logits_fp8(logits, targets, lse)
        assert ce.compute_grad_logits(logits, targets, lse, loss.sum(), out=logits) is logits
        again, over = ce.compute_loss_and_grad(logits, targets, loss.sum(), out=logits)
        assert over is logits and again.shape == (32,) and again.dtype is torch.float32
        ce.rescale_(logits, loss.sum())
    assert lse.shape == loss.shape == (32,) and d.shape == (32, 64) and d_t.shape == (64, 32) and d_t.dtype is E4M3
