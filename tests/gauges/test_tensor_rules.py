"""Rules over tensors: real faults in small models, each reported at the module that has it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge import Engine
from narrowgauge.findings import SERIOUS, WARNING
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.finding_log import FindingLog
from narrowgauge.gauges.rules.tensor_rules import UpdateContext, check_tensors
from narrowgauge.gauges.watch.readings import Reading
from narrowgauge.gauges.watch.snapshots import Snapshot
from narrowgauge.optim import AdamW


class Multiply(nn.Module):
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


def check(readings, applied=True, **settings):
    return check_tensors(UpdateContext(Snapshot(1, readings, applied), **settings))


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", "bf16[master=split,gradients=bf16]"])
def test_a_healthy_model_has_no_findings(recipe):
    assert findings(net(), recipe, steps=5) == {}


@pytest.mark.parametrize("scale", [1e-8, 3e-6])
def test_underflow_without_a_loss_scale(scale):
    """All gradients are below the smallest FP16 number, or most of them are subnormal."""
    found = findings(net(), "fp16[loss_scale=none]", steps=6, scale=scale)
    places = {where for rule, where in found if rule == "underflow"}
    assert "2" in places
    assert found["underflow", "2"].severity == SERIOUS and "at a loss scale of 1" in found["underflow", "2"].detail


def test_overflow_is_reported_only_where_it_starts():
    found = findings(net(Multiply(1e6)), "fp16")
    overflow = [where for rule, where in found if rule in ("overflow", "activation-not-finite")]
    assert overflow == ["1"]
    assert found["overflow", "1"].severity == SERIOUS


def test_activations_near_the_limit():
    found = findings(net(Multiply(2e4)), "fp16")
    assert found["activations-near-limit", "1"].severity == WARNING


def test_dead_layer():
    model = net(Multiply(0.0))
    assert ("dead-layer", "1") in findings(model, "bf16", steps=6)


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
    found = check(readings)
    assert {finding.where for finding in found if finding.rule == "stagnating-updates"} >= {"0.weight", "2.weight"}
    assert not check(readings, stochastic_rounding=True)
    assert not check(readings, applied=False)


@pytest.mark.parametrize("recipe", ["bf16-lean", "fp8-lean", "bf16-lean[gradients=released]"])
@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_learning_rate_of_0_is_no_stagnation(recipe, rate):
    """Warm-ups of transformers and others start at 0."""
    assert findings(net(), recipe, lr=rate, optimizer=AdamW) == {}


def test_updates_that_destroy_the_weights():
    assert ("updates-too-large", "0.weight") in findings(net(), "fp32", lr=50.0)
    assert not findings(net(), "fp32", lr=1e-2, steps=3)


def test_exploding_logits():
    def head(amax):
        return [Reading(kind="activation", module="lm_head", dtype="bf16", count=8, amax=amax)]

    assert check(head(100.0)) == []
    assert [f.severity for size in (800.0, 3e4) for f in check(head(size))] == [WARNING, SERIOUS]


def test_a_warning_that_becomes_serious_is_reported_again():
    log = FindingLog()
    readings = [Reading(kind="activation", module="lm_head", dtype="bf16", count=8, amax=size) for size in (800, 3e4)]
    reported = [log.add(check([reading])) for reading in (readings[0], readings[0], readings[1])]
    assert [len(found) for found in reported] == [1, 0, 1]
