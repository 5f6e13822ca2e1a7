"""Rules over tensors: real faults in small models, each named at the module that has it; and FP8 sites."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import Engine
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.findings import SERIOUS, WARNING, Log
from narrowgauge.gauges.rules.tensor_rules import SiteRules, see_look
from narrowgauge.gauges.watch.probe import Look, Pulse
from narrowgauge.gauges.watch.readings import Reading


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def net(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *middle, nn.ReLU(), nn.Linear(32, 4))


def findings(model, recipe, steps=1, lr=1e-3, scale=1.0, optimizer=torch.optim.AdamW):
    engine = Engine(model, optimizer(model.parameters(), lr=lr), recipe)
    examiner = Examiner(engine, every=1)
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator)
        with engine.forward():
            loss = F.cross_entropy(model(x).float(), y) * scale
        engine.backward(loss)
        engine.step()
        found += examiner.collect()[2]
    return {(finding.rule, finding.where): finding for finding in found}


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", "bf16[master=split,gradients=bf16]"])
def test_a_healthy_model_has_none(recipe):
    assert findings(net(), recipe, steps=5) == {}


@pytest.mark.parametrize("scale", [1e-8, 3e-6])
def test_underflow_without_a_loss_scale(scale):
    """All gradients below FP16's smallest number, or most of them among its subnormals."""
    found = findings(net(), "fp16[loss_scale=none]", scale=scale)
    places = {where for rule, where in found if rule == "underflow"}
    assert "2" in places
    assert found["underflow", "2"].severity == SERIOUS and "at a loss scale of 1" in found["underflow", "2"].detail


def test_overflow_is_named_at_its_producer_and_nowhere_else():
    found = findings(net(Times(1e6)), "fp16")
    overflow = [where for rule, where in found if rule in ("overflow", "activation-not-finite")]
    assert overflow == ["1"]
    assert found["overflow", "1"].severity == SERIOUS


def test_activations_near_the_limit():
    found = findings(net(Times(2e4)), "fp16")
    assert found["activations-near-limit", "1"].severity == WARNING


def test_a_dead_layer():
    model = net(Times(0.0))
    assert ("dead-layer", "1") in findings(model, "bf16")


def test_bf16_weights_without_a_master_stagnate():
    model = net().bfloat16()
    readings = []
    for name, p in model.named_parameters():
        before = p.detach().float().clone()
        with torch.no_grad():
            p.add_(torch.full_like(p, 1e-5))
        moved = p.detach().float() - before
        zeros = int((moved == 0).sum())
        common = {"module": name, "count": p.numel(), "amax": moved.abs().max().item()}
        readings.append(Reading(kind="update", dtype="fp32", zeros=zeros, **common))
        readings.append(Reading(kind="weight", dtype="bf16", module=name, count=p.numel()))
    found = see_look(Look(1, readings, True))
    assert {finding.where for finding in found if finding.rule == "stagnating-updates"} >= {"0.weight", "2.weight"}
    assert not see_look(Look(1, readings, True), dithered=True)
    assert not see_look(Look(1, readings, False))


def test_updates_that_destroy_the_weights():
    assert ("updates-too-large", "0.weight") in findings(net(), "fp32", lr=50.0)
    assert not findings(net(), "fp32", lr=1e-2, steps=3)


def test_exploding_logits():
    def look(amax):
        return Look(1, [Reading(kind="activation", module="lm_head", dtype="bf16", count=8, amax=amax)], True)

    assert see_look(look(100.0)) == []
    assert [f.severity for size in (800.0, 3e4) for f in see_look(look(size))] == [WARNING, SERIOUS]


def pulses(rises, scales=None, flushes=None):
    total = flushed = 0
    for update, rise in enumerate(rises):
        total += rise
        flushed += 0 if flushes is None else flushes
        yield Pulse(update, {"a.input": scales[update] if scales else 1.0 + update}, {"a.input": total},
                    {"a.input": flushed})  # fmt: skip


def seen(stream, **sizes):
    rules, log = SiteRules(), Log()
    rules.sizes.update(sizes)
    for pulse in stream:
        log.add(rules.see(pulse))
    return {finding.rule: finding.severity for finding in log.findings}


def test_fp8_sites():
    assert seen(pulses([0, 0, 40, 0, 0, 0, 0, 0, 0, 0, 3, 0])) == {}  # a jump, followed within a step
    assert seen(pulses([50] * 12, scales=[2.0] * 12)) == {"fp8-stale-scale": SERIOUS}
    assert seen(pulses([50] * 12)) == {"fp8-saturating": WARNING}
    assert seen(pulses([0] * 12, flushes=700), **{"a.input": 1000}) == {"fp8-underflow": SERIOUS}


def test_a_warning_that_turns_serious_is_told_again():
    log = Log()
    readings = [Reading(kind="activation", module="lm_head", dtype="bf16", count=8, amax=size) for size in (800, 3e4)]
    told = [log.add(see_look(Look(1, [reading], True))) for reading in (readings[0], readings[0], readings[1])]
    assert [len(found) for found in told] == [1, 0, 1]
