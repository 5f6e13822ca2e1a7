"""Formats of gradients chosen on a GPU: as on a CPU, also for blocks recorded as CUDA graphs, and without waiting."""

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.scaling import gradient_formats as module

pytestmark = pytest.mark.filterwarnings(
    "ignore:Synchronization debug mode", "ignore::narrowgauge.errors.SlowRecipeWarning"
)
AUTO = "fp8[products=all,gradients_format=auto]"


@pytest.fixture(autouse=True)
def _early(monkeypatch):
    monkeypatch.setattr(module, "EARLY", (4, 12))


def make(recipe, device="cuda", **options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=3, width=256, heads=4, vocab=512, context=128)).to(device)
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), recipe, **options)


def train(engine, steps):
    tokens = torch.randint(0, 512, (8, 129), generator=torch.Generator().manual_seed(0)).to(engine.device)
    losses = []
    for _ in range(steps):
        with engine.forward():
            loss = engine.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("graphs", [False, True])
def test_formats_change_and_losses_stay_near(graphs):
    engine = make(AUTO, cuda_graphs=graphs)
    losses = train(engine, 14)
    formats = engine.gradient_formats.formats
    assert set(formats.values()) == {"e4m3", "e5m2"} or set(formats.values()) == {"e4m3"}
    assert all(formats[f"blocks.{n}.{name}.grad_output"] == "e4m3" for n in range(3) for name in ("out", "down"))
    assert {change.update for change in engine.gradient_formats.changes} <= {4, 12}
    assert losses == pytest.approx(train(make("fp8[products=all]", cuda_graphs=graphs), 14), rel=0.01)


def test_the_cpu_chooses_the_same():
    found = []
    for device in ("cuda", "cpu"):
        engine = make(AUTO, device)
        train(engine, 4)
        found.append({change.site: (change.format, change.flushed) for change in engine.gradient_formats.changes})
    assert found[0].keys() == found[1].keys()
    for site, (format, flushed) in found[0].items():
        assert format == found[1][site][0] and flushed == pytest.approx(found[1][site][1], abs=2e-3)


def test_updates_that_read_nothing_do_not_wait():
    engine = make(AUTO)
    train(engine, 6)
    tokens = torch.randint(0, 512, (8, 129), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            with engine.forward():
                loss = engine.model(inputs, targets)
            engine.backward(loss)
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
