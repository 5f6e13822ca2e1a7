"""Gauges on the GPU: exact counts, no synchronization, no effect on training."""

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.gauges.watch.watch import Watch
from narrowgauge.kernels.tensor_stats import StatsTable, add_statistics, add_statistics_reference
from narrowgauge.models.gpt import GPT, GPTConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm"),
]


FORMATS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("count", [1, 4096, 1_000_003, 30_000_001])
def test_the_kernel_counts_like_its_reference(dtype, count):
    x = torch.randn(count, device="cuda") * torch.exp2(torch.randint(-40, 12, (count,), device="cuda").float())
    x[: count // 7] = 0
    x = x.to(dtype)
    inverse = torch.tensor(0.37, device="cuda") if dtype.itemsize == 1 else None
    mine, theirs = StatsTable.make(2, "cuda"), StatsTable.make(2, "cuda")
    add_statistics(mine, 1, x, inverse)
    add_statistics_reference(theirs, 1, x, inverse)
    assert torch.equal(mine.counts, theirs.counts)
    assert torch.equal(mine.sizes[:, 0], theirs.sizes[:, 0])
    torch.testing.assert_close(mine.sizes[:, 1], theirs.sizes[:, 1], rtol=1e-4, atol=0)


def make(recipe):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(GPTConfig(layers=3, width=256, heads=4, vocab=1024, context=128))
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


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "bf16", "fp8[products=all]", "bf16-lean", "fp8-lean"])
def test_gauges_read_everything_without_synchronizing(recipe):
    tokens = torch.randint(0, 1024, (4, 129), device="cuda")
    engine = make(recipe)
    watch = Watch(engine, every=2)
    run(engine, 3, tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(engine, 4, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    snapshots = watch.snapshots(wait=True)
    assert [snapshot.update for snapshot in snapshots] == [1, 3, 5, 7]
    kinds = {reading.kind for reading in snapshots[-1].readings}
    assert kinds == {"weight", "activation", "gradient", "weight_gradient", "update"}
    names = {reading.module for reading in snapshots[-1].readings if reading.kind == "activation"}
    assert {"blocks.2.qkv", "blocks.2.down", "lm_head"} <= names


@pytest.mark.parametrize("recipe", ["bf16", "fp8[products=all]"])
def test_gauges_do_not_change_training(recipe, deterministic):
    """Otherwise two runs may differ by 3e-4: the embedding's gradient is summed in no fixed order,
    and a largest value that differs in its last bit changes a scale, and with it how a whole tensor is rounded."""
    tokens = torch.randint(0, 1024, (4, 129), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    alone, watched = make(recipe), make(recipe)
    watch = Watch(watched, every=1)
    first, second = run(alone, 4, tokens), run(watched, 4, tokens)
    assert torch.equal(torch.stack(first), torch.stack(second))
    assert len(watch.snapshots(wait=True)) == 4
