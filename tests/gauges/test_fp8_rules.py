"""Rules over FP8 sites: stale scales, saturation and underflow over a window of updates."""

import json

from narrowgauge.findings import SERIOUS, WARNING
from narrowgauge.gauges.finding_log import FindingLog
from narrowgauge.gauges.rules.fp8_rules import Fp8Rules
from narrowgauge.gauges.watch.snapshots import Fp8Reading


def readings(rises, scales=None, flushes=0):
    """Readings of one site whose count of saturated values rises by these numbers; the scale moves unless given."""
    total = flushed = 0
    for update, rise in enumerate(rises):
        total += rise
        flushed += flushes
        scale = scales[update] if scales else 1.0 + update
        yield Fp8Reading(update, {"a.input": scale}, {"a.input": total}, {"a.input": flushed})


def check(stream, **sizes):
    rules, log = Fp8Rules(), FindingLog()
    rules.sizes.update(sizes)
    for reading in stream:
        log.add(rules.check(reading))
    return {finding.rule: finding.severity for finding in log.findings}


def test_a_jump_that_the_scale_follows_is_not_reported():
    assert check(readings([0, 0, 40, 0, 0, 0, 0, 0, 0, 0, 3, 0])) == {}


def test_saturation_with_a_frozen_scale():
    assert check(readings([50] * 12, scales=[2.0] * 12)) == {"fp8-stale-scale": SERIOUS}


def test_saturation_with_a_moving_scale():
    assert check(readings([50] * 12)) == {"fp8-saturating": WARNING}


def test_underflow_of_a_tensor_of_known_size():
    assert check(readings([0] * 12, flushes=700), **{"a.input": 1000}) == {"fp8-underflow": SERIOUS}
    assert check(readings([0] * 12, flushes=700)) == {}


def test_state_round_trip_through_json():
    stream = list(readings([50] * 12, scales=[2.0] * 12))
    rules = Fp8Rules()
    for reading in stream[:8]:
        assert rules.check(reading) == []
    restored = Fp8Rules()
    restored.load_state_dict(json.loads(json.dumps(rules.state_dict())))
    assert restored.check(stream[8]) == rules.check(stream[8]) != []
