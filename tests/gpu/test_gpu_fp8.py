"""FP8 training on a GPU: as accurate as the format, no synchronization, matches its emulation, robust to outliers."""

import copy
import gc
import math

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")


def gpt():
    return GPT(GPTConfig(layers=2, width=256, heads=4, vocab=512, context=128))


def llama():
    return Llama(LlamaConfig(layers=2, width=256, heads=4, kv_heads=2, hidden=384, vocab=512, context=128))


def make(build=gpt, recipe="fp8[products=all]", device="cuda", **options):
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Engine(model, optimizer, recipe, **options)


def batch(seed=0, rows=8, device="cuda"):
    tokens = torch.randint(0, 512, (rows, 129), generator=torch.Generator().manual_seed(seed)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def backward(engine, data):
    with engine.forward():
        loss = engine.model(*data)
    engine.backward(loss)
    return loss.item(), {name: p.grad.double().cpu() for name, p in engine.model.named_parameters()}


def sqnr(value, reference):
    return 10 * torch.log10(reference.square().sum() / (value - reference).square().sum()).item()


@pytest.mark.parametrize("build", [gpt, llama])
@pytest.mark.parametrize(
    ("recipe", "least"), [("bf16", 30), ("fp8[products=all]", 14), ("fp8[products=all,scaling=current]", 14)]
)
def test_gradients_match_fp64_within_the_formats_error(build, recipe, least):
    engine = make(build, recipe, fused=True)
    exact = copy.deepcopy(make(build, "fp32", "cpu").model).double()
    exact(*batch(device="cpu")).backward()
    wanted = {name: p.grad for name, p in exact.named_parameters()}
    backward(engine, batch())
    if engine.conversion.scales is not None:
        engine.conversion.scales.update()
        engine.model.zero_grad()
        _, found = backward(engine, batch())
    else:
        found = {name: p.grad.double().cpu() for name, p in engine.model.named_parameters()}
    ratios = {name: sqnr(found[name], wanted[name]) for name in wanted}
    assert min(ratios.values()) > least, ratios


@pytest.mark.parametrize("build", [gpt, llama])
def test_the_cpu_emulation_matches(build):
    """Up to the order of accumulation, whose differences a tie in a cast can amplify.

    The learning rate is 0: Adam's first steps depend only on the sign, so any difference would become a whole step.
    """
    on_gpu, on_cpu = make(build), make(build, device="cpu")
    for engine in (on_gpu, on_cpu):
        engine.optimizers[0].param_groups[0]["lr"] = 0.0
    for engine, device in ((on_gpu, "cuda"), (on_cpu, "cpu")):
        for seed in range(2):
            engine.results = backward(engine, batch(seed, 2, device))
            engine.step()
    assert on_gpu.results[0] == pytest.approx(on_cpu.results[0], rel=2e-3)
    ratios = {name: sqnr(grad, on_cpu.results[1][name]) for name, grad in on_gpu.results[1].items()}
    # The emulation compared with itself, with products perturbed by 2**-11, has an SQNR of 17 dB over all gradients,
    # and of 21 dB (Llama) and 23 dB (GPT) in the gradient after the fewest casts: a value that crosses a tie moves by
    # one E5M2 step.
    assert min(ratios.values()) > 15, ratios
    assert ratios["blocks.1.down.weight"] > 18, ratios
    ratio = on_gpu.conversion.scales.scale.cpu() / on_cpu.conversion.scales.scale
    assert ratio.log2().abs().max() <= 1


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8[products=all]"])
def test_steps_do_not_synchronize(recipe):
    engine = make(recipe=recipe, fused=True, clip_norm=1.0, accumulate=2)
    data = batch()

    def step():
        with engine.forward():
            loss = engine.model(*data)
        engine.backward(loss)
        return engine.step()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("build", [gpt, llama])
def test_recomputation_changes_nothing_and_saves_memory(build, mode):
    results = []
    for recipe in ("fp8[products=all,activations=bf16]", f"fp8[products=all,checkpoint={mode}]"):
        engine = make(build, recipe)
        backward(engine, batch(rows=32))
        engine.step()
        gc.collect()  # engines of earlier tests are reference cycles: freed during the backward, they would hide a peak
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, grads = backward(engine, batch(1, rows=32))
        results.append((loss, grads, torch.cuda.max_memory_allocated() - before))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert min(sqnr(results[1][1][name], grad) for name, grad in results[0][1].items()) > 35
    assert results[1][2] < results[0][2]


def test_outliers_saturate_are_counted_and_damage_no_weight():
    engine = make(clip_norm=1.0)
    gain = engine.model.blocks[0].norm1.weight
    counts = engine.conversion.scales.counts
    for number in range(300):
        planted = number % 50 == 49
        before = counts[:, 0].sum().item()
        with torch.no_grad():
            gain.mul_(1000 if planted else 1)
        with engine.forward():
            loss = engine.model(*batch(number, 4))
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            gain.div_(1000 if planted else 1)
        assert (counts[:, 0].sum().item() > before) or not planted
    assert all(torch.isfinite(p).all() for p in engine.model.parameters())
    assert math.isfinite(loss.item())
