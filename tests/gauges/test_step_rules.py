"""Rules over steps: each reports its own fault at the right step, and none reports healthy noise."""

import json
import math
import random

import pytest

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.finding_log import FindingLog
from narrowgauge.gauges.rules.nonfinite_advice import advise_on_nonfinite
from narrowgauge.gauges.rules.step_rules import Step, StepRules
from narrowgauge.recipe import parse


def run(steps, scaled=False):
    rules, log = StepRules(scaled), FindingLog()
    for step in steps:
        log.add(rules.check(step))
    return log.findings


def healthy(count=300, seed=0, scale=65536.0):
    noise = random.Random(seed)
    for number in range(1, count + 1):
        loss = 2 + 3 * math.exp(-number / 60) + noise.gauss(0, 0.15)
        yield Step(number, loss, math.exp(noise.gauss(0, 0.4)) * (3 if number < 10 else 1), scale, True)


def changed(steps, **changes):
    """Replace fields in a range of steps: {"loss": (first, last, value or function)}."""
    for step in steps:
        new = {}
        for name, (first, last, value) in changes.items():
            if first <= step.number <= last:
                new[name] = value(step) if callable(value) else value
        yield Step(**{**step.__dict__, **new})


def rules_of(findings):
    return {finding.rule for finding in findings}


@pytest.mark.parametrize("seed", range(20))
def test_healthy_noise_has_no_findings(seed):
    assert run(healthy(seed=seed), scaled=True) == []


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("loss-not-finite", {"loss": (100, 300, math.nan)}),
        ("bad-batch", {"loss": (100, 100, math.nan), "applied": (100, 100, False)}),
        ("loss-spike", {"loss": (150, 150, 9.0)}),
        ("loss-diverging", {"loss": (150, 300, lambda s: 2.0 + (s.number - 150) * 0.1)}),
        ("gradient-spike", {"grad_norm": (150, 150, 500.0)}),
        ("no-gradient", {"grad_norm": (100, 300, 0.0)}),
        ("gradient-norm-constant", {"grad_norm": (1, 300, 1.0 / 65536)}),
        ("scale-collapsing", {"loss_scale": (100, 120, lambda s: 65536.0 / 2 ** (s.number - 100)),
                              "applied": (100, 120, False)}),
        ("scale-at-floor", {"loss_scale": (50, 300, 1.0), "applied": (50, 300, lambda s: s.number % 12 != 0)}),
        ("scale-oscillating", {"loss_scale": (50, 300, lambda s: 65536.0 / (1 + s.number % 2))}),
        ("skipping-too-often", {"applied": (100, 300, lambda s: s.number % 3 != 0)}),
    ],
)  # fmt: skip
def test_each_fault_is_found(rule, changes):
    found = run(changed(healthy(), **changes), scaled=True)
    assert rule in rules_of(found)
    for finding in found:
        assert finding.detail and finding.why and finding.fix and finding.where


def test_a_finding_is_reported_once_when_it_happens():
    rules, log = StepRules(), FindingLog()
    reported = {}
    for step in changed(healthy(), loss=(200, 300, math.inf)):
        for finding in log.add(rules.check(step)):
            reported.setdefault(finding.rule, []).append(step.number)
    assert reported == {"loss-not-finite": [202]}
    assert log.findings[0].severity == SERIOUS and "since step 200" in log.findings[0].detail


def test_a_bad_batch_is_reported_with_its_step():
    (found,) = run(changed(healthy(), loss=(123, 123, math.inf), applied=(123, 123, False)))
    assert (found.rule, found.where) == ("bad-batch", "step 123")


def test_findings_say_whether_updates_were_skipped_or_applied():
    """A loss can be NaN while all gradients are finite: the update is then applied and changes the weights."""
    for last in (123, 124, 140):
        for applied in (True, False, lambda s: s.number % 2 == 0):
            steps = list(changed(healthy(), loss=(123, last, math.nan), applied=(123, last, applied)))
            bad = [step for step in steps if 123 <= step.number <= last]
            skipped, count = sum(not step.applied for step in bad), len(bad)
            found = run(steps)
            assert {"bad-batch"} <= rules_of(found)
            for finding in found:
                if finding.rule not in ("bad-batch", "loss-not-finite"):
                    continue
                text = f"{finding.detail} {finding.why}"
                seen = min(count, 3) if finding.rule == "loss-not-finite" else count
                if not any(step.applied for step in bad[:seen]):
                    assert "skipped" in text and "applied" not in text
                else:
                    assert "applied" in text and "skipped" not in text and "same weights" not in text
                if finding.rule == "bad-batch" and 0 < skipped < count:
                    assert f"{count - skipped} of {count} updates were applied" in text


def test_state_round_trip_through_json():
    """Saving and loading the rules after any step does not change the findings."""
    scales = (50, 80, lambda s: 2.0**s.number)
    steps = list(changed(healthy(), loss=(60, 64, math.nan), applied=(61, 90, False), loss_scale=scales))
    whole = run(steps, scaled=True)
    for cut in (0, 3, 20, 61, 63, 65, 250):
        rules, log = StepRules(True), FindingLog()
        for number, step in enumerate(steps):
            if number == cut:
                fresh, fresh_log = StepRules(True), FindingLog()
                fresh.load_state_dict(json.loads(json.dumps(rules.state_dict())))
                fresh_log.load_state_dict(json.loads(json.dumps(log.state_dict())))
                rules, log = fresh, fresh_log
            log.add(rules.check(step))
        assert log.findings == whole
    assert len(whole) > 2


def test_lowering_the_scale_at_the_start_is_not_reported():
    """A dynamic loss scale is normally lowered a few times before the first applied update."""
    start = changed(healthy(), loss_scale=(1, 300, lambda s: 65536.0 / 2 ** min(s.number - 1, 6)),
                    applied=(1, 6, False))  # fmt: skip
    assert run(start, scaled=True) == []


def test_findings_of_older_states_load():
    """Older checkpoints and records have ``consequence`` instead of ``why``."""
    old = {
        "rule": "loss-spike",
        "severity": "warning",
        "where": "step 3",
        "detail": "d",
        "fix": "f",
        "consequence": "c",
    }
    log = FindingLog()
    log.load_state_dict([old])
    assert log.findings == [
        Finding(rule="loss-spike", severity="warning", where="step 3", detail="d", fix="f", why="c")
    ]
    assert log.add(log.findings) == []


def test_skipped_updates_with_and_without_a_dynamic_loss_scale():
    """A dynamic scale may skip a few updates in a row, not ten; without one, a single skip has a cause in the model."""
    few, many = (list(changed(healthy(), applied=(100, last, False))) for last in (104, 109))
    assert run(few, scaled=True) == []
    (found,) = run(many, scaled=True)
    assert (found.rule, found.severity, found.step) == ("skips-in-a-row", SERIOUS, 100)
    (found,) = run(few)
    assert (found.rule, found.severity, found.step) == ("gradient-not-finite", SERIOUS, 100)
    first = next(iter(healthy())).number
    (found,) = run(list(changed(healthy(), applied=(first, first + 9, False))), scaled=True)
    assert (found.rule, found.severity) == ("skips-in-a-row", WARNING)  # a scale that started too high


def test_advice_fits_the_recipe():
    for name, expected in [("fp32", "FP32 has"), ("bf16", "BF16 has"), ("fp16", "use bf16"), ("fp8", "bf16 to see"),
                           ("fp16[loss_scale=1024]", "dynamic loss scale")]:  # fmt: skip
        assert expected in advise_on_nonfinite(parse(name))
