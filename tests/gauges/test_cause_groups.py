"""One cause gives one finding: what follows from it is listed under it, and unrelated findings stay apart."""

import json

from narrowgauge.findings import SERIOUS, WARNING, Finding
from narrowgauge.gauges.cause_groups import CAUSES, group_by_cause


def make(rule, where="a", step=1, severity=SERIOUS):
    return Finding(rule=rule, severity=severity, where=where, detail="d", fix="f", step=step)


def test_a_dead_layer_and_what_it_cuts_off():
    found = [make("no-gradient", "first.weight", 1, WARNING), make("dead-layer", "relu"), make("dead-layer", "norm")]
    (group,) = group_by_cause(found)
    assert (group.rule, group.where, group.severity) == ("dead-layer", "relu", SERIOUS)
    assert [(one.rule, one.where) for one in group.consequences] == [
        ("no-gradient", "first.weight"),
        ("dead-layer", "norm"),
    ]


def test_skips_follow_from_what_is_not_finite():
    rules = ["skips-in-a-row", "overflow", "skipping-too-often", "training-stalled"]
    steps = [11, 2, 50, 51]
    group, end = group_by_cause([make(rule, step=step) for rule, step in zip(rules, steps, strict=True)])
    assert group.rule == "overflow" and len(group.consequences) == 2
    assert end.rule == "training-stalled" and not end.consequences  # why the run ended


def test_unrelated_findings_stay_apart():
    found = [make("exploding-logits"), make("dead-layer"), make("bad-batch", step=9), make("overflow", step=3)]
    assert group_by_cause(found) == found
    late = [make("gradient-not-finite", step=2), make("updates-too-large", step=8)]
    assert group_by_cause(late) == late  # an effect is not before its cause


def test_a_warning_with_a_serious_consequence_is_serious():
    found = [make("update-out-of-proportion", severity=WARNING), make("loss-diverging", step=30)]
    assert group_by_cause(found)[0].severity == SERIOUS


def test_groups_round_trip_through_json():
    (group,) = group_by_cause([make("dead-layer"), make("underflow", "b")])
    fields = json.loads(json.dumps(group.describe()))
    assert fields["step"] == 1 and fields["consequences"] == [
        {"rule": "underflow", "where": "b", "detail": "d", "step": 1}
    ]
    assert Finding.from_record(fields) == group


def test_causes_have_no_cycles():
    def depth(rule, seen=()):
        assert rule not in seen
        return [depth(cause, (*seen, rule)) for cause in CAUSES.get(rule, ())]

    for rule in CAUSES:
        depth(rule)
