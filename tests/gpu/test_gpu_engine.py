"""The engine on a GPU: steps without synchronization, skips decided on the device, fused attention, FP32 operations."""

import copy
import gc
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from narrowgauge import Engine, LossScaler, TrainingStalled, UsageError
from narrowgauge.models.gpt import GPT, GPTConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]
RECIPES = ["fp32", "tf32", "fp16", "bf16"]


def make(recipe="bf16", seed=0, compile=False, optimizer=None, **options):
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = GPT(GPTConfig(layers=3, width=128, heads=2, vocab=256, context=64))
    optimizer = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)))(model.parameters())
    return Engine(model, optimizer, recipe, compile=compile, **options)


def batch(seed=0, rows=8):
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(0, 256, (rows, 65), device="cuda", generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run_step(engine, data, poison=None):
    with engine.forward():
        loss = engine.model(*data)
    engine.backward(loss if poison is None else loss * poison)
    return loss, engine.step()


def weights(engine):
    return copy.deepcopy(engine.model.state_dict())


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


@pytest.fixture
def forbid_sync():
    """Return a function that makes any synchronization an error until the end of the test."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def deterministic():
    """Return a function that makes torch deterministic (no atomic additions) until the end of the test."""
    yield lambda: torch.use_deterministic_algorithms(True, warn_only=True)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_do_not_synchronize(recipe, compile, forbid_sync):
    engine = make(recipe, compile=compile, clip_norm=1.0, accumulate=2)
    data = batch()
    for _ in range(4):
        run_step(engine, data)
    torch.cuda.synchronize()
    forbid_sync()
    reports = [run_step(engine, data)[1] for _ in range(6)]
    skipped = engine.skipped
    torch.cuda.set_sync_debug_mode("default")
    assert [report.complete for report in reports] == [False, True] * 3
    assert all(math.isfinite(report.grad_norm) for report in reports if report.complete)
    assert skipped >= 0


def test_the_test_above_detects_a_synchronization(forbid_sync):
    engine = make("bf16")
    run_step(engine, batch())
    forbid_sync()
    _, report = run_step(engine, batch())
    with pytest.raises(RuntimeError, match="synchronizing"):
        _ = report.applied


def test_loss_scaler_does_not_synchronize(forbid_sync):
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler, x = LossScaler("cuda"), torch.randn(4, 8, device="cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    forbid_sync()
    for _ in range(5):
        step()


@pytest.mark.parametrize("optimizer", [None, lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_skip_leaves_weights_and_optimizer_untouched(recipe, optimizer):
    engine = make(recipe, optimizer=optimizer, clip_norm=1.0)
    data = batch()
    for _ in range(3):
        run_step(engine, data)
    before, states = weights(engine), copy.deepcopy(engine.optimizers[0].state_dict()["state"])
    _, report = run_step(engine, data, poison=math.nan)
    assert not report.applied
    assert same(before, engine.model.state_dict())
    for key, state in engine.optimizers[0].state_dict()["state"].items():
        assert same(states[key], state)
    assert run_step(engine, data)[1].applied


@pytest.mark.parametrize("recipe", ["fp16", "bf16"])
def test_200_consecutive_skips_are_harmless_and_name_the_parameter(recipe):
    engine = make(recipe, max_consecutive_skips=150)
    before = weights(engine)
    engine.model.blocks[1].down.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainingStalled, match=r"blocks\.1\.down\.weight"):
        for _ in range(300):
            run_step(engine, batch())
    assert engine.updates <= 250
    assert same(before, engine.model.state_dict())


def test_same_scales_and_weights_as_grad_scaler():
    def drive(scaler):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        trace = []
        for poison in [0, 1, 0, 0, 0, 1, 1, 0, 0, 0]:
            loss = model(torch.ones(4, 8, device="cuda")).square().mean() * (math.inf if poison else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            trace.append((scaler.get_scale(), model.weight.detach().clone()))
        return trace

    theirs = drive(torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=3))
    ours = drive(LossScaler("cuda", init_scale=64.0, growth_interval=3))
    assert [scale for scale, _ in ours] == [scale for scale, _ in theirs]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


def test_tf32_and_fp32_set_and_restore_flags():
    flags = torch.backends.cuda.matmul.fp32_precision
    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    exact = a.double() @ b.double()
    errors = {}
    for recipe in ("fp32", "tf32"):
        with make(recipe).forward():
            errors[recipe] = ((a @ b).double() - exact).norm() / exact.norm()
    assert errors["fp32"] < 1e-6 < 1e-4 < errors["tf32"] < 1e-3
    assert torch.backends.cuda.matmul.fp32_precision == flags


@pytest.mark.parametrize("recipe", ["fp16", "bf16"])
def test_norms_softmax_and_loss_run_in_fp32(recipe):
    x = torch.randn(4, 16, device="cuda", dtype=torch.float16 if recipe == "fp16" else torch.bfloat16)
    with make(recipe).forward():
        assert F.layer_norm(x, (16,)).dtype is torch.float32
        assert F.softmax(x, -1).dtype is torch.float32
        assert F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device="cuda")).dtype is torch.float32
        assert x.sum().dtype is torch.float32


def kernels_of(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return " ".join(event.key.lower() for event in profile.key_averages())


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("attention", "kernel"), [("auto", "sdpa"), ("cudnn", "sdpa"), ("flash", "flash_fwd")])
def test_attention_runs_the_requested_backend(attention, kernel, compile):
    engine = make(f"bf16[attention={attention}]", compile=compile)
    run_step(engine, batch())
    names = kernels_of(lambda: run_step(engine, batch()))
    assert kernel in names, names
    other = {"sdpa": "flash_fwd", "flash_fwd": "sdpa"}[kernel]
    assert other not in names


FIRST = """
import contextlib, torch, torch.nn.functional as F
from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
if {engine}:
    with torch.device("cuda"):
        model = GPT(GPTConfig(layers=1, width=128, heads=2, vocab=256, context=64))
    with {inside}:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine = Engine(model, optimizer, "bf16", fused={fused}, compile={compile})
    ids = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    with engine.forward():
        loss = engine.model(ids, ids)
    engine.backward(loss)
    engine.step()
x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device="cuda")
F.scaled_dot_product_attention(x, x, x, is_causal=True)
print(torch._C._get_sdp_priority_order())
"""


@pytest.mark.parametrize("inside", ["contextlib.nullcontext()", "torch.device('cuda')"])
@pytest.mark.parametrize(("fused", "compile"), [(True, False), (False, False), (False, True)])
def test_an_engine_restores_the_order_of_attention_backends(fused, compile, inside):
    """In separate processes: torch decides its order at the first attention call, and puts cuDNN first on Hopper."""

    def order(engine):
        source = FIRST.format(engine=engine, fused=fused, compile=compile, inside=inside)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True, check=True
        )
        return done.stdout

    assert order(True) == order(False) != ""


def test_unsupported_attention_raises_one_clear_line():
    engine = make("fp32[attention=flash]")
    with pytest.raises(UsageError, match="flash attention does not support") as caught:
        run_step(engine, batch())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_saves_memory_and_keeps_the_loss(mode, compile, deterministic):
    peaks, losses = [], []
    if not compile:
        deterministic()
    for recipe in ("bf16", f"bf16[checkpoint={mode}]"):
        torch._dynamo.reset()
        engine = make(recipe, compile=compile)
        data = batch(rows=64)
        run_step(engine, data)
        gc.collect()  # engines of earlier tests are reference cycles: freed during the step, they would hide its peak
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_step(engine, data)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        losses.append(run_step(engine, data)[0].item())
    assert peaks[1] < 0.95 * peaks[0], peaks
    assert losses[1] == pytest.approx(losses[0], rel=1e-2 if compile else 1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_resume_matches_an_uninterrupted_run(recipe, deterministic):
    deterministic()
    straight, first = make(recipe, clip_norm=0.5), make(recipe, clip_norm=0.5)
    for engine in (straight, first):
        for step in range(4):
            run_step(engine, batch(step), poison=math.nan if step == 2 else None)
    second = make(recipe, seed=1, clip_norm=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(4, 7):
        run_step(straight, batch(step))
        run_step(second, batch(step))
    for a, b in zip(straight.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert second.skipped == straight.skipped
