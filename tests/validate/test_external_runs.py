"""Comparing runs by their logs: pairing, gaps, and verdicts that claim no more than the logs show."""

import json
import math
import random

import numpy as np
import pytest

from narrowgauge.errors import UsageError
from narrowgauge.validate.curves.external_logs import Curves, Series, read_run
from narrowgauge.validate.curves.external_runs import compare_runs, pair_runs
from narrowgauge.validate.statistics.verdict import BETTER, EQUIVALENT, INCONCLUSIVE, WORSE


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def curves(values, name="run", first=1, every=1, **more):
    steps = np.arange(first, first + every * len(values), every, dtype=float)
    evaluations = more.pop("evaluations", None)
    if evaluations is not None:
        more["eval"] = Series("eval_loss", *np.array(sorted(evaluations.items()), dtype=float).T)
    loss = Series("loss", steps, np.array(values, dtype=float))
    return Curves(name, loss, diverged=not math.isfinite(values[-1]), **more)


def falling(count, seed=0, gap=0.0, noise=0.01):
    draw = random.Random(seed)
    return [(1 + 3 / (1 + step / 50)) * (1 + gap + noise * draw.gauss(0, 1)) for step in range(count)]


def test_pairs():
    def named(*names):
        return [curves([1.0], name) for name in names]

    def paired(ours, theirs):
        return [(r.name, c.name) for r, c in pair_runs(named(*ours), named(*theirs))]

    assert paired(["s0", "s1"], ["s1", "s0"]) == [("s0", "s0"), ("s1", "s1")]
    assert paired(["a10", "a2"], ["b2", "b10"]) == [("a2", "b2"), ("a10", "b10")]
    assert paired(["x"], ["y"]) == [("x", "y")] and len(paired(["log", "log"], ["log", "log"])) == 2
    with pytest.raises(UsageError, match=r"only some run names match.*s0, s1 against s1, s2"):
        paired(["s0", "s1"], ["s1", "s2"])
    with pytest.raises(UsageError, match=r"same number of runs, got s0, s1 against s0"):
        paired(["s0", "s1"], ["s0"])


def seeds(gap=0.0, spread=0.0005, count=4, **more):
    runs = [], []
    for seed in range(count):
        end = 1.2 + 0.02 * seed
        own = end * (1 + gap + spread * (-1) ** seed)
        for side, last in zip(runs, (end, own), strict=True):
            side.append(curves(falling(200, seed), f"s{seed}", evaluations={100: last + 1, 200: last}, **more))
    return runs


@pytest.mark.parametrize(("gap", "expected"), [(0, EQUIVALENT), (0.02, WORSE), (-0.02, BETTER), (0.005, INCONCLUSIVE)])
def test_verdicts_on_evaluations(gap, expected):
    found = compare_runs(*seeds(gap))
    assert found.verdict.verdict == expected and found.what == "the final evaluation loss" and found.notes == []
    assert found.verdict.seeds == 4 and found.pairs[0].best == (found.pairs[0].final[0], found.pairs[0].final[1])
    assert found.overall.area == 0 and found.block_interval is None


def test_verdict_uses_training_loss_without_evaluations():
    ours, theirs = ([curves(falling(400, seed, gap), f"s{seed}") for seed in range(3)] for gap in (0.0, 0.05))
    found = compare_runs(ours, theirs)
    assert found.verdict.verdict == WORSE and found.what == "the mean of the last tenth of the training loss"
    assert found.verdict.gap == pytest.approx(0.05, rel=0.05) and found.overall.area == pytest.approx(0.05, rel=0.05)
    assert found.overall.gap_mean == pytest.approx(found.overall.area)
    assert found.pairs[1].final[0] == pytest.approx(np.mean(falling(400, 1)[-40:]))


def test_one_pair_is_never_equivalent():
    same = compare_runs([curves(falling(400))], [curves(falling(400))])
    assert same.verdict.verdict == INCONCLUSIVE and same.verdict.gap == 0 and same.block_interval == (0, 0)
    assert "does not show the noise between seeds" in same.verdict.reason and same.verdict.seeds_needed == 3
    worse = compare_runs([curves(falling(400))], [curves(falling(400, seed=1, gap=0.03))])
    low, high = worse.block_interval
    assert worse.verdict.verdict == INCONCLUSIVE and low < worse.block_gap < high and low < 0.03 < high
    assert f"{low:+.3%} to {high:+.3%}" in worse.verdict.reason
    short = compare_runs([curves([2.0, 1.0])], [curves([2.0, 1.1])])
    assert short.block_interval is None and "+3.333%" in short.verdict.reason


def test_last_quarter_and_smoothing():
    late = compare_runs([curves([2.0] * 400)], [curves([2.0] * 300 + [2.2] * 100)])
    assert late.block_gap == pytest.approx(0.1) and late.pairs[0].gap_mean < 0.03
    spike = compare_runs([curves([2.0] * 400)], [curves([2.0] * 200 + [4.0] + [2.0] * 199)]).pairs[0]
    assert spike.gap_largest == pytest.approx(1 / 20) and 201 <= spike.gap_largest_step <= 220


def test_block_interval_has_its_nominal_coverage():
    held = 0
    for seed in range(200):
        found = compare_runs([curves(falling(160, 2 * seed))], [curves(falling(160, 2 * seed + 1, 0.01))])
        held += found.block_interval[0] <= 0.01 <= found.block_interval[1]
    assert 0.82 <= held / 200 <= 0.97


def test_diverged_runs():
    lost = compare_runs([curves(falling(100))], [curves([*falling(50), *[math.nan] * 50])])
    assert lost.verdict.verdict == WORSE and lost.pairs[0].diverged == (0, 1) and lost.block_interval is None
    assert lost.pairs[0].area == 0 and "1 of 1 runs diverged" in lost.verdict.reason
    nothing = compare_runs([curves(falling(50))], [curves([math.nan] * 50)])
    assert nothing.verdict.verdict == WORSE and math.isnan(nothing.pairs[0].area)
    both = compare_runs([curves([1.0, math.nan])], [curves([1.0, math.nan])])
    assert both.verdict.verdict == INCONCLUSIVE
    ours, theirs = seeds()
    theirs = [curves([*falling(20), math.inf], run.name) for run in theirs]
    some = compare_runs(ours, [*theirs[:1], *seeds()[1][1:]])
    assert some.verdict.verdict == EQUIVALENT and some.what == "the final evaluation loss"
    assert some.overall.diverged == (0, 1) and compare_runs(ours, theirs).verdict.verdict == WORSE


def test_early_stop_counts_as_diverged_unless_all_runs_are_short():
    ours = [curves(falling(200, seed), f"s{seed}") for seed in range(3)]
    theirs = [curves(falling(count, seed), f"s{seed}") for seed, count in enumerate((200, 60, 200))]
    found = compare_runs(ours, theirs)
    assert found.overall.diverged == (0, 1) and "s1 of the candidate stopped at step 60" in found.notes[-1]
    unfinished = compare_runs(ours, [curves(falling(60, seed), f"s{seed}") for seed in range(3)])
    assert unfinished.verdict.verdict == EQUIVALENT and unfinished.overall.diverged == (0, 0)
    assert "s0: compared up to step 60, but the reference continues to 200" in unfinished.notes


def test_curves_with_different_steps_are_interpolated():
    fine = curves([10.0 - 0.1 * step for step in range(1, 81)])
    coarse = curves([10.0 - 0.1 * step for step in range(5, 86, 10)], first=5, every=10)
    for one, other in ((fine, coarse), (coarse, fine)):
        found = compare_runs([one], [other]).pairs[0]
        assert found.area == pytest.approx(0, abs=1e-12) and found.gap_largest == pytest.approx(0, abs=1e-12)
    up = compare_runs([fine], [curves([11.0 - 0.1 * step for step in range(5, 86, 10)], first=5, every=10)]).pairs[0]
    assert up.gap_largest == pytest.approx(1 / 2.5) and up.gap_largest_step == 75
    assert up.area == pytest.approx(1 / 6) and up.gap_mean > 0
    with pytest.raises(UsageError, match="no steps in common: 1 to 80 of run and 100 to 101 of run"):
        compare_runs([fine], [curves([1.0, 1.0], first=100)])


def test_evaluations_at_other_steps():
    ours = curves(falling(100), evaluations={50: 2.0, 100: 1.0})
    found = compare_runs([ours], [curves(falling(100), evaluations={25: 2.5, 75: 1.4})])
    assert (
        found.pairs[0].final == (2.0, pytest.approx(1.95)) and "last common evaluation is at step 50" in found.notes[-1]
    )


def test_gradient_norms_skips_and_output():
    norms = [Series("grad_norm", np.arange(1.0, 101), np.full(100, norm)) for norm in (2.0, 3.0)]
    ours = [curves(falling(100, n), f"s{n}", grad_norm=norms[0], skipped=1) for n in (0, 1)]
    theirs = [curves(falling(100, n), f"s{n}", grad_norm=norms[1], skipped=n) for n in (0, 1)]
    found = compare_runs(ours, theirs)
    assert found.pairs[0].grad_norm_ratio == 1.5 and found.overall.skipped == (2, 1)
    columns, rows = found.to_table()
    assert all(len(row) == len(columns) for row in rows) and [row[0] for row in rows] == ["s0", "s1", "all"]
    assert rows[2][3:] == ["+0.000%", "-", "0.000%", "+0.000% at 1", "1.500", "2 / 1", "0 / 0"]
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["verdict"] == EQUIVALENT and told["pairs"][0]["best"] == ["nan", "nan"] and told["detectable"] > 0
    assert (told["diverged"], told["diverged_reference"], told["overall"]["skipped"]) == (0, 0, [2, 1])
    lost = compare_runs([curves([1.0, 2.0])], [curves([1.0, math.nan])]).to_table()[1][0]
    assert lost[2] == "diverged" and lost[3] == "-"


def test_steps_are_not_compared_with_epochs(tmp_path):
    ours = read_run(write_lines(tmp_path / "a.jsonl", [{"step": at, "loss": 1.0} for at in range(9)]))
    theirs = read_run(write_lines(tmp_path / "b.jsonl", [{"epoch": at, "training_loss": 1.0} for at in range(3)]))
    with pytest.raises(UsageError, match="steps cannot be compared with epochs"):
        compare_runs([ours], [theirs])


def test_a_loss_of_zero_in_one_pair(tmp_path):
    for name, loss in (("fp32", 0.0), ("bf16", 0.25)):
        (tmp_path / f"{name}.csv").write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step in range(30)))
    found = compare_runs(*([read_run(tmp_path / f"{name}.csv")] for name in ("fp32", "bf16")))
    assert found.verdict.verdict == "inconclusive" and found.verdict.gap is None
    assert found.verdict.reason.endswith("the mean of the last tenth of the training loss is 0 and 0.25")
