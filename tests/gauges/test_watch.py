"""Watching an engine: every kind of tensor at every module is read, without changing the training."""

import copy

import pytest
import torch

import narrowgauge as ng
from narrowgauge import Engine
from narrowgauge.errors import UsageError
from narrowgauge.gauges.watch.watch import Watch
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig


def gpt():
    return GPT(GPTConfig(layers=2, width=64, heads=2, vocab=128, context=32))


def llama():
    return Llama(LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, hidden=96, vocab=128, context=32))


def make(recipe, build=gpt, **options):
    torch.manual_seed(0)
    model = build()
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=2e-3), recipe, **options)


def train(engine, steps):
    losses = []
    for step in range(steps * engine.accumulate):
        tokens = torch.randint(0, 128, (4, 33), generator=torch.Generator().manual_seed(step))
        with engine.forward():
            loss = engine.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine):
    return [p.detach().clone() for p in engine.model.parameters()]


@pytest.mark.parametrize("build", [gpt, llama])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", "fp8", "bf16-lean", "fp8-lean", "bf16[checkpoint=full]"])
def test_watching_changes_no_result(recipe, build):
    alone, watched = make(recipe, build), make(recipe, build)
    watch = ng.watch(watched, every=2)
    assert train(alone, 4) == train(watched, 4)
    assert all(torch.equal(a, b) for a, b in zip(weights(alone), weights(watched), strict=True))
    snapshots = watch.snapshots()
    assert [snapshot.update for snapshot in snapshots] == [1, 3]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("build", [gpt, llama])
def test_every_kind_is_read_at_every_layer(fused, build):
    engine = make("bf16", build, fused=fused)
    watch = Watch(engine, every=1)
    train(engine, 1)
    (snapshot,) = watch.snapshots()
    found = {(reading.kind, reading.module) for reading in snapshot.readings}
    linears = ["qkv", "out", "up", "down", *(["gate"] if build is llama else [])]
    for block in ("blocks.0", "blocks.1"):
        for name in linears:
            assert ("activation", f"{block}.{name}") in found
            assert {("weight", f"{block}.{name}.weight"), ("weight_gradient", f"{block}.{name}.weight")} <= found
            assert ("update", f"{block}.{name}.weight") in found
            if name != "gate" or not fused:
                assert ("gradient", f"{block}.{name}") in found
        assert ("activation", f"{block}.norm1") in found
    assert {("activation", "lm_head"), ("gradient", "lm_head")} <= found
    assert all(reading.count > 0 and reading.nan == reading.inf == 0 for reading in snapshot.readings)


def test_fused_and_plain_models_give_the_same_readings():
    found = []
    for fused in (False, True):
        engine = make("bf16", fused=fused)
        watch = Watch(engine, every=1)
        train(engine, 1)
        found.append({(r.kind, r.module): r for r in watch.snapshots()[0].readings})
    plain, fused = found
    for key in plain.keys() & fused.keys():
        if key[1] != "lm_head":  # the fused head reports its gradient before dividing by the number of rows
            assert fused[key].count == plain[key].count, key
            assert fused[key].mean_square == pytest.approx(plain[key].mean_square, rel=0.1), key


def test_fp8_tensors_are_read_with_their_scale_removed():
    wide, narrow = make("bf16", fused=True), make("fp8")
    watches = [Watch(engine, every=1) for engine in (wide, narrow)]
    for engine in (wide, narrow):
        train(engine, 3)
    found = [{(r.kind, r.module): r for r in watch.snapshots()[-1].readings} for watch in watches]
    first, second = (readings["activation", "blocks.0.norm2"] for readings in found)
    assert (first.dtype, second.dtype) == ("bf16", "e4m3")
    assert second.mean_square == pytest.approx(first.mean_square, rel=0.05)


def test_only_the_first_microbatch_of_training_is_read():
    engine = make("bf16", accumulate=2)
    watch = Watch(engine, every=1)
    with engine.evaluating():
        engine.model(torch.zeros(1, 8, dtype=torch.long))
    train(engine, 1)
    (snapshot,) = watch.snapshots()
    norm = next(r for r in snapshot.readings if (r.kind, r.module) == ("activation", "blocks.0.norm1"))
    assert norm.count == 4 * 32 * 64


def test_updates_are_compared_with_the_spacing_of_bf16():
    engine = make("fp32")
    watch = Watch(engine, every=1)
    train(engine, 1)
    updates = [r for r in watch.snapshots()[0].readings if r.kind == "update"]
    assert all(r.lost is not None and 0 <= r.lost <= 1 and 0 < r.ratio < 1 for r in updates)
    first = next(r for r in updates if r.module == "blocks.0.qkv.weight")
    assert first.amax == pytest.approx(2e-3, rel=0.02)  # Adam's first step is the learning rate


def test_compiled_models_are_read():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    plain = copy.deepcopy(model)
    for one, compile in ((plain, False), (model, "default")):
        engine = Engine(one, torch.optim.AdamW(one.parameters()), "fp32", compile=compile)
        watch = Watch(engine, every=2)
        for step in range(3):
            with engine.forward():
                loss = one(torch.randn(5, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            engine.backward(loss)
            engine.step()
        snapshots = watch.snapshots()
    assert [snapshot.update for snapshot in snapshots] == [1, 3]
    assert {"0", "1", "2"} <= {r.module for r in snapshots[1].readings if r.kind == "activation"}
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=1e-4, atol=1e-5)


def test_fp8_sites_are_read_in_every_update():
    engine = make("fp8")
    watch = Watch(engine, every=50)
    train(engine, 3)
    readings = watch.fp8_readings()
    assert [reading.update for reading in readings] == [1, 2, 3]
    assert set(readings[0].scales) == set(engine.conversion.scales.sites)
    assert len(watch.snapshots()) == 1 and watch.fp8_readings() == []


def test_stop_and_invalid_every():
    engine = make("fp32")
    watch = Watch(engine, every=1)
    watch.stop()
    train(engine, 1)
    assert watch.snapshots() == [] and not engine.watchers
    with pytest.raises(UsageError, match="every=0"):
        Watch(engine, every=0)
