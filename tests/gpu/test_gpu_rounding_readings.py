"""What block formats do to operands, measured on the GPU: no synchronization, no effect, also inside fused blocks."""

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.gauges.watch.rounding_reader import sample_blocks
from narrowgauge.gauges.watch.watch import Watch
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.scaling.block_error import measure_rounding
from narrowgauge.scaling.block_quantize import quantize_blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm"),
]
OPERANDS = 6
"""Two operands of each of the three products."""


def make(recipe):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(GPTConfig(layers=2, width=256, heads=4, vocab=1024, context=128))
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe, clip_norm=1.0)


def run(engine, steps, tokens):
    losses = []
    for _ in range(steps):
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16-lean"])
def test_predictions_are_measured_without_synchronizing(recipe):
    tokens = torch.randint(0, 1024, (4, 129), device="cuda")
    plain = run(make(recipe), 5, tokens)
    engine = make(recipe)
    watch = Watch(engine, every=2, block_formats=True)
    losses = run(engine, 3, tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses += run(engine, 2, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.stack(losses), torch.stack(plain))
    rounding = watch.snapshots(wait=True)[-1].rounding
    assert {one.format for one in rounding} == {"mxfp8_e4m3", "mxfp4", "nvfp4"}
    layers = {f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "out", "up", "down")}
    assert {one.module for one in rounding} == layers and len(rounding) == 3 * OPERANDS * len(layers)
    assert all(abs(one.decibels - one.usual_decibels) < 5 for one in rounding)


@pytest.mark.parametrize("recipe", ["emulated-mxfp8", "emulated-mxfp4", "emulated-nvfp4"])
def test_emulated_runs_are_read(recipe):
    tokens = torch.randint(0, 1024, (4, 129), device="cuda")
    engine = make(recipe)
    watch = Watch(engine, every=2)
    run(engine, 3, tokens)
    rounding = watch.snapshots(wait=True)[-1].rounding
    assert len(rounding) == 8 * OPERANDS
    assert all(abs(one.decibels - one.usual_decibels) < 5 for one in rounding)


def test_counts_and_samples_are_those_of_the_cpu():
    x = torch.randn(1000, 96) * torch.randn(1000, 96).mul(3).exp()
    assert torch.equal(sample_blocks(x), sample_blocks(x.cuda()).cpu())
    for name in ("mxfp8_e4m3", "mxfp4", "nvfp4"):
        here, there = (measure_rounding(y, quantize_blocks(y, name)).cpu() for y in (x, x.cuda()))
        assert torch.equal(here[:4], there[:4])
        torch.testing.assert_close(here, there, rtol=1e-6, atol=0)
