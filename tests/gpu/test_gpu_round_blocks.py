"""Rounding to block formats by the kernel on a GPU: bit for bit as in plain torch there and on a CPU."""

import pytest
import torch
from torch.nn import functional as F

from narrowgauge import Engine
from narrowgauge.block_formats import BLOCK_FORMATS
from narrowgauge.gauges.watch.watch import Watch
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.scaling import round_matrix as round_file
from narrowgauge.scaling.block_quantize import quantize_blocks, random_hadamard
from narrowgauge.scaling.round_matrix import round_matrix, spread_outliers

BF16 = torch.bfloat16
TRICKS = "emulated-nvfp4[gradient_rounding=stochastic,hadamard=random]"
NEAREST = [
    "emulated-mxfp8",
    "emulated-mxfp8[gradients_format=e5m2]",
    "emulated-mxfp4",
    "emulated-nvfp4",
    "emulated-nvfp4[hadamard=random]",
]
CASES = [(name, rule) for name, f in BLOCK_FORMATS.items() for rule in ("floor", "up")[: 1 + (f.scale == "e8m0")]]
EVERY_CASE = pytest.mark.parametrize(("name", "rule"), CASES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm"),
]


def draw(*shape, dtype=torch.float32):
    """Return numbers of all sizes, some zeros, and rows of zeros, subnormals and FP32's largest numbers."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 8, shape, generator=generator))
    x *= torch.exp2(torch.randint(-60, 60, (shape[0], 1), generator=generator))
    x[torch.rand(shape, generator=generator) < 0.05] = -0.0
    for row, scale in ((0, 0.0), (1, 2.0**-149), (2, 2.0**-130), (3, 2.0**-120), (4, 2.0**127)):
        if row < len(x):
            x[row] = (torch.randn(shape[1], generator=generator) * scale).clamp(-3.3e38, 3.3e38)
    return x.to(dtype).nan_to_num(0.0, 6e4, -6e4) if dtype is torch.float16 else x.to(dtype)


def assert_same_bits(found, wanted):
    """Every NaN is the same number."""
    found, wanted = found.cpu(), wanted.cpu()
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    integers = torch.int32 if found.dtype is torch.float32 else torch.int16
    assert ((found.view(integers) == wanted.view(integers)) | (found.isnan() & wanted.isnan())).all()


def assert_like_torch(x, name, rule):
    """``x`` is on the CPU."""
    f, on_gpu = BLOCK_FORMATS[name], x.cuda() if x.is_contiguous() else x.t().cuda().t()
    assert on_gpu.stride() == x.stride() or not x.numel()
    found = round_matrix(on_gpu, f, scale_rule=rule, with_blocks=True)
    assert_same_bits(round_matrix(on_gpu, f, scale_rule=rule).values, found.values)
    for where in (on_gpu, x):
        wanted = quantize_blocks(where, f, scale_rule=rule)
        assert torch.equal(found.blocks.scales.view(torch.uint8).cpu(), wanted.scales.view(torch.uint8).cpu())
        assert torch.equal(found.blocks.codes.cpu(), wanted.codes.cpu())
        assert_same_bits(found.values, wanted.dequantize(BF16, apply_tensor_scale=False))
        if f.tensor_scale:
            assert_same_bits(found.tensor_scale, wanted.tensor_scale)


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("shape", [(130, 72), (256, 512), (1000, 257), (5, 3), (1, 1), (0, 16)])
def test_shapes_dtypes_and_layouts(shape, dtype, name, rule):
    x = draw(*shape, dtype=dtype)
    assert_like_torch(x, name, rule)
    assert_like_torch(x.t(), name, rule)


@EVERY_CASE
def test_inf_and_nan(name, rule):
    for value in (torch.inf, -torch.inf, torch.nan):
        x = draw(100, 90)
        x[33, 33] = x[99, 89] = value
        assert_like_torch(x, name, rule)


@EVERY_CASE
def test_random_bits(name, rule):
    """Random mantissas and signs; exponents within 40, 6 and 1 binades, from FP32's smallest to its largest."""
    generator = torch.Generator().manual_seed(0)
    for top in (0, 1, 20, 100, 127, 140, 254):
        for spread in (40, 6, 1):
            fields = torch.randint(max(0, top - spread), top + 1, (512, 256), generator=generator)
            rest = torch.randint(0, 2**24, fields.shape, generator=generator)
            bits = (fields << 23) | (rest & 0x7FFFFF) | ((rest >> 23) << 31)
            assert_like_torch(bits.to(torch.int32).view(torch.float32), name, rule)


def test_more_than_2_to_the_31_elements():
    x = torch.randn(2**16 + 64, 2**15 + 32, device="cuda", dtype=BF16)
    found = round_matrix(x, BLOCK_FORMATS["nvfp4"])
    low, high = x.aminmax()
    tail = quantize_blocks(x[-64:], "nvfp4", amax=torch.maximum(-low, high))
    assert torch.equal(found.tensor_scale, tail.tensor_scale)
    assert_same_bits(found.values[-64:], tail.dequantize(BF16, apply_tensor_scale=False))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 512), (70, 90), (1, 1), (130, 17), (2, 0)])
def test_the_hadamard_transform(shape, dtype):
    x = draw(*shape, dtype=dtype).cuda()
    if x.numel() > 100:
        x[7, 9], x[8, 2], x[9, 1], x[9, 12] = torch.nan, torch.inf, torch.inf, -torch.inf
    signs = torch.randint(0, 2, (16,), device="cuda") * 2 - 1
    for view in (x, x.t()):
        wanted = random_hadamard(F.pad(view, (0, -view.shape[1] % 16)), signs=signs)
        assert_same_bits(spread_outliers(view, signs), wanted)
        assert_same_bits(spread_outliers(view, signs), spread_outliers(view.contiguous(), signs))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_stochastic_rounding(name):
    """The mean of 4096 draws is the value; values are neighbours; numbers follow the seed, not the layout."""
    f, count = BLOCK_FORMATS[name], 4096
    x = torch.rand(1, 4 * f.block, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[:, :: f.block] = 1.5
    x = x.cuda()
    rows = x.expand(count, -1)
    found = []
    for seed, matrix in ((0, rows), (0, rows.contiguous().t().contiguous().t()), (1, rows)):
        torch.manual_seed(seed)
        found.append(round_matrix(matrix, f, rounding="stochastic").values)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    plain = quantize_blocks(x, f)
    t = 1.0 if plain.tensor_scale is None else plain.tensor_scale.double()
    values = found[0].double() * t
    low, high = values.amin(0), values.amax(0)
    assert ((values == low) | (values == high)).all(), "no more than two different values"
    assert ((low <= x.double() + 1e-6) & (x.double() - 1e-6 <= high)).all()
    near = plain.dequantize().double()[0]
    assert (((near - low).abs() < 1e-6) | ((near - high).abs() < 1e-6)).all(), "to nearest is one of them"
    deviation = values.std(0).clamp(min=1e-9) / count**0.5
    assert ((values.mean(0) - x.double()[0]).abs() <= 5 * deviation + (high - low) * 1e-3 + 1e-6).all()


def make(recipe, **options):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(GPTConfig(layers=2, width=256, heads=4, vocab=1024, context=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Engine(model, optimizer, recipe, clip_norm=1.0, **options)


def train(engine, steps=4, first=0):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator("cuda").manual_seed(step % 2)
        tokens = torch.randint(0, 1024, (4, 128), device="cuda", generator=generator)
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])  # 508 tokens: a last block that is not full
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("recipe", NEAREST)
def test_losses_are_those_without_the_kernel(recipe, deterministic, monkeypatch):
    by_kernel = train(make(recipe))
    monkeypatch.setattr(round_file, "use_triton", lambda x: False)
    assert torch.equal(by_kernel, train(make(recipe)))


@pytest.mark.parametrize("recipe", [*NEAREST[2:], TRICKS])
def test_watching_changes_nothing(recipe, deterministic):
    """Also not the random numbers of stochastic rounding. Models that are emulated are not compiled."""
    torch.manual_seed(3)
    engine = make(recipe, compile=True)
    assert not engine.compiled
    torch.manual_seed(3)
    plain = train(engine)
    engine = make(recipe)
    watch = Watch(engine, every=2)
    torch.manual_seed(3)
    assert torch.equal(train(engine), plain)
    assert len(watch.snapshots(wait=True)[-1].rounding) == 8 * 6


@pytest.mark.parametrize("recipe", [*NEAREST[2:], TRICKS])
def test_nothing_waits_for_the_device(recipe):
    engine = make(recipe)
    train(engine, 3)
    tokens = torch.randint(0, 1024, (4, 128), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            with engine.forward():
                loss = engine.model(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_matrix_is_rounded_in_few_kernels():
    """Plain torch takes about 30."""
    x = torch.randn(512, 512, device="cuda", dtype=BF16)
    for name, most in (("mxfp4", 1), ("nvfp4", 3)):
        round_matrix(x, BLOCK_FORMATS[name])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            round_matrix(x, BLOCK_FORMATS[name])
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert 0 < len(kernels) <= most, kernels
