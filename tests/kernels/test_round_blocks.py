"""Rounding to block formats by the kernel equals plain torch bit for bit, and stochastic rounding selects the same
neighbours with the right probability."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import KERNEL, hardware_rounding  # noqa: F401
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from narrowgauge import events, kernels
from narrowgauge.block_formats import BLOCK_FORMATS
from narrowgauge.formats import ELEMENT_FORMATS, FORMATS, decode
from narrowgauge.kernels import round_blocks as kernel_file
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.scaling.block_quantize import quantize_blocks, random_hadamard
from narrowgauge.scaling.round_matrix import round_matrix, spread_outliers

pytestmark = [pytest.mark.usefixtures("hardware_rounding"), KERNEL]
CASES = [(name, rule) for name, f in BLOCK_FORMATS.items() for rule in ("floor", "up")[: 1 + (f.scale == "e8m0")]]
EVERY_CASE = pytest.mark.parametrize(("name", "rule"), CASES)
EVERY_FORMAT = pytest.mark.parametrize("name", BLOCK_FORMATS)
TRICKS = "emulated-nvfp4[gradient_rounding=stochastic,hadamard=random]"
BF16 = torch.bfloat16


def assert_same_bits(found, wanted):
    """Every NaN is the same number."""
    assert (found.shape, found.dtype, found.is_contiguous()) == (wanted.shape, wanted.dtype, True)
    integers = torch.int32 if found.dtype is torch.float32 else torch.int16
    assert ((found.view(integers) == wanted.view(integers)) | (found.isnan() & wanted.isnan())).all()


def assert_like_torch(x, name, rule="floor", rounding="nearest"):
    f = BLOCK_FORMATS[name]
    found = round_matrix(x, f, scale_rule=rule, rounding=rounding, with_blocks=True)
    wanted = quantize_blocks(x, f, scale_rule=rule, rounding=rounding)
    assert found.blocks.scales.dtype == wanted.scales.dtype and found.blocks.scales.shape == wanted.scales.shape
    assert torch.equal(found.blocks.scales.view(torch.uint8), wanted.scales.view(torch.uint8))
    assert torch.equal(found.blocks.codes, wanted.codes)
    assert_same_bits(found.values, wanted.dequantize(BF16, apply_tensor_scale=False))
    if f.tensor_scale:
        assert_same_bits(found.tensor_scale, wanted.tensor_scale)
    else:
        assert found.tensor_scale is None
    if rounding == "nearest":
        assert_same_bits(round_matrix(x, f, scale_rule=rule).values, found.values)  # without codes


def draw(*shape, seed=0):
    """Return numbers of all sizes, some zeros, and blocks of zeros, subnormals and FP32's largest numbers."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 8, shape, generator=generator))
    x *= torch.exp2(torch.randint(-60, 60, (shape[0], 1), generator=generator))
    x[torch.rand(shape, generator=generator) < 0.05] = -0.0
    for row, scale in ((0, 0.0), (1, 2.0**-149), (2, 2.0**-130), (3, 2.0**-120), (4, 2.0**127)):
        if row < len(x):
            x[row] = (torch.randn(shape[1], generator=generator) * scale).clamp(-3.4e38, 3.4e38)
    return x


def test_the_kernels_table_is_that_of_the_formats():
    for name, element in kernel_file.ELEMENTS.items():
        f = {**FORMATS, **ELEMENT_FORMATS}[name]
        top = int(np.log2(f.max))
        assert element == (f.mantissa_bits, f.min_exponent, top, f.max, 1 << (f.bits - 1))
    for f in BLOCK_FORMATS.values():
        assert kernel_file.ELEMENTS[f.element.name].max_exponent == f.max_exponent and 64 % f.block == 0


@EVERY_CASE
@pytest.mark.parametrize("shape", [(130, 72), (64, 128), (5, 3), (1, 1), (3, 257), (0, 16), (4, 0)])
def test_shapes(shape, name, rule):
    assert_like_torch(draw(*shape), name, rule)


@EVERY_CASE
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_dtypes(dtype, name, rule):
    assert_like_torch(draw(40, 48).to(dtype).nan_to_num(0.0, 6e4, -6e4), name, rule)


@EVERY_CASE
def test_layouts(name, rule):
    """A transposed matrix, columns of a wider one, every second value, and a matrix with equal rows."""
    x = draw(72, 80)
    for view in (x.t(), x[3:, 16:70], x[::2, ::2], x[:1].expand(40, 80), x.bfloat16().t()[:, 5:]):
        assert_like_torch(view, name, rule)


@EVERY_CASE
def test_inf_and_nan(name, rule):
    x = draw(40, 90)
    for row, value in enumerate((torch.inf, -torch.inf, torch.nan, -torch.nan)):
        spoiled = x.clone()
        spoiled[row + 5, 33] = value
        spoiled[39, 89] = value
        assert_like_torch(spoiled, name, rule)
    assert_like_torch(torch.full((3, 20), torch.inf), name, rule)


@EVERY_CASE
def test_tensors_of_zeros_and_of_one_size(name, rule):
    """With one size, NVFP4's tensor scale is the smallest or the largest that there is."""
    for size in (0.0, 2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 1.0, 2688.0, 3.4028234e38):
        assert_like_torch(torch.full((2, 40), size), name, rule)
        assert_like_torch(torch.tensor([[0.0, -0.0, size, -size, size / 2, -size / 3, size / 2**20]]), name, rule)


@EVERY_CASE
def test_all_numbers_of_bf16(name, rule):
    """In blocks that begin with a larger number, up to 15 binades above: 1860 is a multiple of 15 and of 31."""
    below = torch.arange(1860).view(-1, BLOCK_FORMATS[name].block - 1)

    def make(anchor):
        codes = torch.cat([torch.full((len(below), 1), anchor), (anchor - below).clamp(min=0)], 1)
        sign = torch.arange(codes.shape[1]) % 2 << 15
        return (codes | sign).to(torch.int16).view(BF16)

    assert_like_torch(torch.cat([make(anchor) for anchor in range(0x7F7F, 0, -1860)]), name, rule)
    for anchor in (0x3F80, 0x3FE0, 0x3FE1, 0x40C0, 0x4119, 0x0085, 0x0800):  # each with its own tensor scale
        assert_like_torch(make(anchor).float(), name, rule)


@EVERY_CASE
@pytest.mark.parametrize("anchor", [1.0, 1.4999999, 1.75, 1.7500001, 1.9999999, 5.3e-39, 3.3e38, 0.1, 2.0**-141])
def test_midpoints_between_elements(anchor, name, rule):
    """Each midpoint times the block's scales, and its FP32 neighbours: rounding twice would be seen here."""
    f = BLOCK_FORMATS[name]
    numbers = np.array([decode(code, f.element) for code in range(f.element.max_code + 1)])
    places = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    for factor in (1.0, 0.3, 0.7712345, 2.0**-7, 2.0**-9.5):  # blocks have other sizes than the tensor
        scales = quantize_blocks(
            torch.tensor([[anchor] + [0.0] * 63, [anchor * factor] + [0.0] * 63]), f, scale_rule=rule
        )
        t = 1.0 if scales.tensor_scale is None else scales.tensor_scale.double().item()
        with np.errstate(all="ignore"):
            values = np.concatenate([places * scales.scales[i, 0].double().item() * t for i in (0, 1)]).astype(
                np.float32
            )
            values = np.concatenate([np.nextafter(values, np.float32(end)) for end in (-np.inf, np.inf)] + [values])
        values = np.clip(values, 0, np.float32(anchor * factor))
        rows = np.zeros(-(-len(values) // (f.block - 1)) * (f.block - 1), np.float32)
        rows[: len(values)] = values
        rows = torch.from_numpy(rows).view(-1, f.block - 1)
        x = torch.cat([torch.full((len(rows), 1), anchor * factor), rows * -1], 1)
        x[0, 0] = anchor
        assert_like_torch(x, name, rule)


@pytest.mark.parametrize("seed", range(4))
def test_midpoints_between_the_scales_of_nvfp4(seed):
    """Largest magnitudes of blocks whose scales are halfway between two numbers of E4M3, and FP32 neighbours."""
    e4m3 = FORMATS["fp8_e4m3"]
    numbers = np.array([decode(code, e4m3) for code in range(e4m3.max_code + 1)])
    for anchor in np.random.default_rng(seed).uniform(1, 2, 8).astype(np.float32):
        t = quantize_blocks(torch.full((1, 1), float(anchor)), "nvfp4").tensor_scale.double().item()
        sizes = ((numbers[1:] + numbers[:-1]) / 2 * 6 * t).astype(np.float32)
        sizes = np.concatenate([np.nextafter(sizes, np.float32(end)) for end in (-np.inf, np.inf)] + [sizes, [anchor]])
        x = torch.from_numpy(sizes.astype(np.float32))[:, None] * torch.linspace(1, -1, 16)
        assert_like_torch(x, "nvfp4")


@EVERY_CASE
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**31), exponent=st.integers(0, 254), spread=st.integers(0, 40))
def test_any_bits(name, rule, seed, exponent, spread):
    """Random mantissas and signs, exponents within ``spread`` binades."""
    generator = torch.Generator().manual_seed(seed)
    fields = torch.randint(max(0, exponent - spread), exponent + 1, (9, 80), generator=generator)
    rest = torch.randint(0, 2**24, (9, 80), generator=generator)
    bits = (fields << 23) | (rest & 0x7FFFFF) | ((rest >> 23) << 31)
    assert_like_torch(bits.to(torch.int32).view(torch.float32), name, rule)


def philox(seed, offsets):
    """Return the first word of Philox4x32-10 (Salmon et al., 2011), with the offsets as counters."""
    mask, offsets = np.uint64(0xFFFFFFFF), offsets.astype(np.uint64)
    c = [offsets & mask, offsets >> np.uint64(32), np.zeros_like(offsets), np.zeros_like(offsets)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ key[0], b & mask, (a >> np.uint64(32)) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return c[0]


@EVERY_CASE
@pytest.mark.parametrize("shape", [(40, 90), (3, 5)])
def test_stochastic_rounding_with_the_same_numbers_is_that_of_torch(shape, name, rule, monkeypatch):
    """The reference gets the kernel's random numbers: Philox of the seed and the index of each value."""
    block, x = BLOCK_FORMATS[name].block, draw(*shape)
    columns = -(-shape[1] // block) * block
    torch.manual_seed(5)
    seed = kernel_file.draw_seed(x.device).item()
    place = np.arange(shape[0])[:, None] * shape[1] + np.arange(columns)
    numbers = torch.from_numpy((philox(seed, place) >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24))
    monkeypatch.setattr(torch, "rand", lambda size, **_: numbers.view(size))
    for view in (x, x.t().contiguous().t()):
        torch.manual_seed(5)
        assert_like_torch(view, name, rule, "stochastic")


@EVERY_FORMAT
def test_stochastic_rounding_takes_both_neighbours_and_has_no_bias(name):
    f, count = BLOCK_FORMATS[name], 512
    x = torch.rand(1, 4 * f.block, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[:, :: f.block] = 1.5  # fits without saturation in all formats
    torch.manual_seed(0)
    values = round_matrix(x.expand(count, -1), f, rounding="stochastic").values.double()
    blocks = quantize_blocks(x, f)
    t = 1.0 if blocks.tensor_scale is None else blocks.tensor_scale.double().item()
    scales = blocks.scales.double().repeat_interleave(f.block, 1)
    numbers = torch.tensor([decode(code, f.element) for code in range(f.element.max_code + 1)], dtype=torch.float64)
    numbers = torch.cat([-numbers.flip(0), numbers[1:]])
    exact = x.double() / t / scales
    above = torch.searchsorted(numbers, exact, right=True).clamp(max=len(numbers) - 1)
    low, high = numbers[above - 1] * scales, numbers[above] * scales
    assert ((values == low) | (values == high)).all()
    target, step = exact * scales, high - low
    deviation = (((target - low) / step).clamp(0, 1) * (1 - (target - low) / step).clamp(0, 1) / count).sqrt() * step
    assert ((values.mean(0) - target).abs() <= 5 * deviation + 1e-9).all()
    inner = (target - low > 0.1 * step) & (high - target > 0.1 * step)
    assert inner.any() and ((values == low).any(0) & (values == high).any(0))[inner[0]].all()


def test_stochastic_rounding_follows_the_seed():
    x = draw(70, 80)
    found = []
    for seed, matrix in ((1, x), (1, x.t().contiguous().t()), (2, x)):
        torch.manual_seed(seed)
        first, second = (
            round_matrix(matrix, BLOCK_FORMATS["mxfp4"], rounding="stochastic", with_blocks=codes).values
            for codes in (False, True)
        )
        assert not torch.equal(first, second)
        found.append((first, second, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True))
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 64), (70, 90), (1, 1), (3, 16), (130, 17), (2, 0)])
def test_the_hadamard_transform_is_that_of_torch(shape, dtype):
    x = draw(*shape).to(dtype)
    if x.numel() > 100:
        x[7, 9], x[8, 2], x[9, 1], x[9, 12] = torch.nan, torch.inf, torch.inf, -torch.inf
    signs = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(1)) * 2 - 1
    for view in (x, x.t(), x.t().contiguous().t(), x[1:]):
        wanted = random_hadamard(F.pad(view, (0, -view.shape[1] % 16)), signs=signs)
        found = spread_outliers(view, signs)
        assert_same_bits(found, wanted.contiguous())


@pytest.mark.parametrize("codes", [True, False])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_the_ops_promise_what_they_return(name, codes):
    f, x = BLOCK_FORMATS[name], draw(33, 50).t()
    options = {"powers": f.scale == "e8m0", "with_codes": codes}
    made = kernel_file.round_blocks(x, f.element.name, f.block, seed=kernel_file.draw_seed(x.device), **options)
    signs = torch.ones(16, dtype=torch.int64)
    made = [*made, spread_outliers(x, signs)]
    with FakeTensorMode() as mode:
        like = mode.from_tensor(x)
        seed = kernel_file.draw_seed(like.device)
        fake = [*kernel_file.round_blocks(like, f.element.name, f.block, seed=seed, **options)]
        fake.append(spread_outliers(like, mode.from_tensor(signs)))
    for mine, theirs in zip(made, fake, strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def train(recipe, by_kernel, monkeypatch, steps=3):
    from narrowgauge import Engine

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=64, heads=2, vocab=128, context=24))
    engine, losses = Engine(model, torch.optim.AdamW(model.parameters(), 1e-2), recipe), []
    for step in range(steps):
        tokens = torch.randint(0, 128, (2, 25), generator=torch.Generator().manual_seed(step % 2))
        monkeypatch.setattr("narrowgauge.scaling.round_matrix.use_triton", lambda x: by_kernel)
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "recipe",
    ["emulated-mxfp8", "emulated-mxfp8[gradients_format=e5m2]", "emulated-mxfp4", "emulated-nvfp4[hadamard=random]"],
)
def test_training_does_not_depend_on_who_rounds(recipe, monkeypatch):
    monkeypatch.setattr(kernels, "interpreting", False)  # all other parts in plain torch
    losses, weights = train(recipe, False, monkeypatch)
    monkeypatch.setattr("narrowgauge.kernels.round_blocks.max_abs", lambda x: x.abs().amax().float())
    again, others = train(recipe, True, monkeypatch)
    assert again == losses and all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


class Roundings(events.Listener):
    def __init__(self):
        self.found = []

    def report_rounding(self, operand, product, path, x, blocks):
        wanted = quantize_blocks(x, blocks.format)
        self.found.append((operand, product, path, bool(((wanted.codes.int() - blocks.codes.int()).abs() <= 1).all())))


def test_training_does_not_depend_on_who_listens(monkeypatch):
    """Also with stochastic rounding: listeners get what the kernel wrote beside its values."""
    monkeypatch.setattr(kernels, "interpreting", False)
    losses, weights = train(TRICKS, True, monkeypatch, steps=2)
    with events.listening(log := Roundings()):
        again, others = train(TRICKS, True, monkeypatch, steps=2)
    assert again == losses and all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert len(log.found) == 2 * 4 * 6 and all(close for *_, close in log.found)
