"""Logs of other tools: read whatever their names and shape, paired, and never judged beyond what they show."""

import json
import math
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.errors import UsageError
from narrowgauge.runs import record
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.trackers.tensorboard import TensorBoardTracker
from narrowgauge.runs.train import train
from narrowgauge.runs.trainer import Observer
from narrowgauge.task import Task
from narrowgauge.validate.curves.external_runs import Curves, Series, compare, pair, read, read_all
from narrowgauge.validate.statistics.verdict import BETTER, EQUIVALENT, INCONCLUSIVE, WORSE


def write_lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def points(series):
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


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


# Reading


@pytest.mark.parametrize(
    ("step", "loss", "evaluation", "norm"),
    [
        ("step", "loss", "eval_loss", "grad_norm"),
        ("global_step", "train_loss", "val_loss", "gradient_norm"),
        ("iteration", "train/loss", "validation_loss", "train/grad_norm"),
        ("iter", "training_loss", "eval/loss", "gnorm"),
        ("epoch", "Loss/train", "loss_eval", "grad_norm"),
    ],
)
def test_names_of_other_tools(tmp_path, step, loss, evaluation, norm):
    rows = [{step: at, loss: 2.0 / at, norm: 0.5, "lr": 1e-3} for at in (1, 2, 3, 4)] + [{step: 4, evaluation: 0.6}]
    run = read(write_lines(tmp_path / "log.jsonl", rows))
    assert points(run.loss) == [(1, 2), (2, 1), (3, 2 / 3), (4, 0.5)] and points(run.eval) == [(4, 0.6)]
    assert points(run.grad_norm)[0] == (1, 0.5) and not run.diverged and run.name == "log"
    assert repr(loss) in run.source and repr(evaluation) in run.source and f"by {step} 1 to 4" in run.source


def test_json_lines_in_all_their_shapes(tmp_path):
    rows = [
        '\ufeff{"step": 1, "train": {"loss": "2.5", "grad_norm": NaN}}',
        "",
        "INFO: warming up",
        '{"step": 2, "train": {"loss": Infinity}, "note": null}',
        "[1, 2]",
        '{"step": 3, "train": {"loss": "NaN"}}',
        '{"val": {"loss": 1.75}}',
        '{"step": 2, "train": {"loss": 2.25}}',
        '{"step": 4, "train": {"loss": 2.0',
    ]
    run = read(write_lines(tmp_path / "log.jsonl", rows))
    assert run.loss.steps.tolist() == [1, 2, 3] and run.loss.values[:2].tolist() == [2.5, 2.25]
    assert run.diverged and math.isnan(run.loss.values[2]) and points(run.eval) == [(3, 1.75)]
    assert "3 lines are not JSON" in run.source and "1 lines were written again" in run.source


def test_which_of_several_names_and_a_forced_one(tmp_path):
    rows = [{"step": at, "train_loss": 3.0, "loss": 1.0, "val/aux": 7.0, "aux": 8.0} for at in (1, 2)]
    path = write_lines(tmp_path / "log.jsonl", [*rows, {"step": 2, "eval_loss": 0.5}])
    run = read(path)
    assert run.loss.tag == "loss" and "(not train_loss)" in run.source and run.eval is not None
    forced = read(path, tag="aux")
    assert forced.loss.values.tolist() == [8, 8] and forced.eval is None
    assert points(read(path, tag="val/aux").eval) == [(1, 7), (2, 7)]
    with pytest.raises(UsageError, match=r"nothing of the name 'acc'; .*train_loss, loss, val/aux"):
        read(path, tag="acc")


def test_rows_of_evaluations_are_told_by_a_word(tmp_path):
    rows = [{"mode": "train", "step": 1, "loss": 3.0}, {"mode": "val", "step": 1, "loss": 2.5, "val_loss": 9.0}]
    run = read(write_lines(tmp_path / "log.jsonl", rows))
    assert points(run.loss) == [(1, 3)] and run.eval.tag in ("val/loss", "val_loss")


def test_epochs_give_way_to_steps_and_no_steps_are_counted(tmp_path):
    rows = [{"epoch": 0, "val_loss": 9.0}, *({"step": s, "loss": 1.0} for s in (10, 20)), {"epoch": 1, "val_loss": 1.5}]
    run = read(write_lines(tmp_path / "log.jsonl", rows))
    assert points(run.eval) == [(20, 1.5)]
    bare = read(write_lines(tmp_path / "bare.jsonl", [{"loss": value} for value in (3, 2, 1)]))
    assert points(bare.loss) == [(1, 3), (2, 2), (3, 1)] and "by line" in bare.source


def test_hugging_face(tmp_path):
    history = [{"epoch": s / 10, "step": s, "loss": 4.0 / s, "grad_norm": 1.5, "learning_rate": 1e-4} for s in (5, 10)]
    history += [{"epoch": 1.0, "step": 10, "eval_loss": 0.35, "eval_runtime": 1.0}]
    history += [{"epoch": 1.0, "step": 10, "train_loss": 0.6, "train_runtime": 9.0}]
    for number, end in ((9, 3), (10, 4)):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        state = {"global_step": 10, "is_world_process_zero": True, "log_history": history[:end]}
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))
    for path in (tmp_path / "checkpoint-10" / "trainer_state.json", tmp_path / "checkpoint-10", tmp_path):
        run = read(path)
        assert points(run.loss) == [(5, 0.8), (10, 0.4)] and points(run.eval) == [(10, 0.35)]
        assert "(not train_loss)" in run.source
    (tmp_path / "list.json").write_text(json.dumps(history))
    assert points(read(tmp_path / "list.json").loss) == [(5, 0.8), (10, 0.4)]


@pytest.mark.parametrize("comma", [",", ";", "\t"])
def test_csv_with_empty_cells(tmp_path, comma):
    text = "epoch,step,train_loss_step,val_loss\n0,9,2.5,\n0,19,2.25,\n0,19,,2.0\n1,29,nan,\n"
    path = tmp_path / "version_0" / "metrics.csv"
    path.parent.mkdir()
    path.write_text(text.replace(",", comma))
    run = read(tmp_path / "version_0")
    assert run.loss.steps.tolist() == [9, 19, 29] and run.diverged and points(run.eval) == [(19, 2)]


def test_skips(tmp_path):
    def skips(values):
        rows = [{"step": at, "loss": 1.0, "skipped": value} for at, value in enumerate(values)]
        return read(write_lines(tmp_path / "log.jsonl", rows)).skipped

    assert skips([0, 1, 1, 4]) == 4 and skips([True, False, True]) == 2
    assert read(write_lines(tmp_path / "log.jsonl", [{"loss": 1}])).skipped is None


def test_tensorboard(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter

        for part in ((0, 1, 2, 3), (2, 3, 4)):  # the second is a resumed life: another file, some steps again
            with SummaryWriter(tmp_path / "run", filename_suffix=f".{part[0]}") as writer:
                for step in part:
                    writer.add_scalar("Loss/train", 10 * part[0] + step, step)
                    writer.add_scalar("Loss/val", 5.0, step)
                    writer.add_histogram("weights", torch.ones(3), step)
                writer.add_text("note", "some words")
                writer.add_scalar("new/style", 3.5, 0, new_style=True)
    assert len(list((tmp_path / "run").iterdir())) == 2
    run = read(tmp_path / "run")
    assert points(run.loss) == [(0, 0), (1, 1), (2, 22), (3, 23), (4, 24)] and run.eval.values.tolist() == [5] * 5
    assert points(read(tmp_path / "run", tag="new/style").loss) == [(0, 3.5)]
    one = max((tmp_path / "run").iterdir(), key=lambda path: path.name[-1])
    assert points(read(one).loss) == [(2, 22), (3, 23), (4, 24)]
    one.write_bytes(one.read_bytes()[:-7])
    assert points(read(one).loss) == [(2, 22), (3, 23), (4, 24)]
    with pytest.raises(UsageError, match=r"nothing of the name 'acc'.*Loss/train"):
        read(tmp_path / "run", tag="acc")


def test_tensorboard_forgets_what_a_killed_life_wrote_too_much(tmp_path):
    for first, steps in ((1, (1, 2, 3, 4)), (3, (3,))):
        board = TensorBoardTracker(tmp_path, {}, first, pytest.fail)
        for step in steps:
            board.log_metrics("train", step, {"loss": first + step})
        board.close()
    assert points(read(tmp_path / "tensorboard").loss) == [(1, 2), (2, 3), (3, 6)]


def batch(step, split):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step + 1000 * (split == "eval")))
    return x, x.sum(1, keepdim=True)


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "run"
    task = Task(
        model=lambda: torch.nn.Linear(4, 1),
        batch=batch,
        loss=lambda model, given: F.mse_loss(model(given[0]), given[1]),
        name="line",
        items_per_batch=8,
        steps=12,
        learning_rate=1e-2,
    )
    chosen = make_settings(task, recipe="fp32", device="cpu", compile=False, eval_every=4, watch_every=0)
    result = train(task, chosen, folder, resume=False, configuration={"task": "line"}, observer=Observer())
    return folder, result


def test_a_run_of_our_own(own_run):
    folder, result = own_run
    for path in (folder, folder / record.EVENTS):
        run = read(path)
        assert run.loss.steps.tolist() == list(range(1, 13)) and run.eval.steps.tolist() == [4, 8, 12]
        assert run.eval.values[-1] == result.loss_eval and run.loss.values[-1] == result.loss_last
        assert run.skipped == 0 and not run.diverged and run.name == "run" and len(run.grad_norm.steps) == 12
    board = read(folder / "tensorboard")
    assert board.loss.values.tolist() == pytest.approx(run.loss.values.tolist()) and len(board.eval.steps) == 3
    both = compare([read(folder)], [board])
    assert both.verdict.gap == pytest.approx(0, abs=1e-6) and both.what == "the final evaluation loss"
    assert both.notes[0] == "run is held against tensorboard"


def test_a_run_of_our_own_that_stalled(tmp_path):
    record.write_configuration(tmp_path, {"task": "x"})
    with record.Record(tmp_path) as log:
        for step in (1, 2, 3):
            log.append("step", step, loss=math.inf if step == 2 else 2.0, grad_norm=1.0, applied=step != 2)
        log.append("end", 3, interrupted=False, steps=10, skipped=1)
    run = read(tmp_path)
    assert run.diverged and run.skipped == 1
    (tmp_path / record.EVENTS).write_text('{"loss": "nan"}\n[1]\n')
    with pytest.raises(UsageError, match="is damaged in line 1"):
        read(tmp_path)


# Folders of runs


def test_a_folder_of_runs(tmp_path):
    for seed in (0, 1, 10):
        write_lines(tmp_path / f"seed{seed}.jsonl", [{"step": 1, "loss": seed}])
        (tmp_path / "deep" / f"seed{seed}" / "logs").mkdir(parents=True)
        write_lines(tmp_path / "deep" / f"seed{seed}" / "logs" / "x.jsonl", [{"step": 1, "loss": seed}])
    (tmp_path / "readme.txt").write_text("words")
    (tmp_path / "seed0.csv").write_text("step,loss\n1,0\n")  # another logger's, of the same run
    assert [run.name for run in read_all(tmp_path)] == ["seed0", "seed1", "seed10"]
    assert [(run.name, run.loss.values[0]) for run in read_all(tmp_path / "deep")][2] == ("seed10", 10)
    with pytest.raises(UsageError, match="holds several runs where one was asked for: seed0, seed1, seed10"):
        read(tmp_path)


@pytest.mark.parametrize(("one", "other", "name"), [("train", "validation", "run"), ("s0_train", "s0_val", "s0")])
def test_train_and_validation_are_no_two_seeds(tmp_path, one, other, name):
    folder = tmp_path / "run"
    folder.mkdir()
    write_lines(folder / f"{one}.jsonl", [{"step": at, "loss": 2.0} for at in (1, 2)])
    write_lines(folder / f"{other}.jsonl", [{"step": 2, "loss": 1.0}])
    run = read(folder)
    assert len(run.loss.steps) == 2 and points(run.eval) == [(2, 1)] and run.name == name


def test_pairs():
    def named(*names):
        return [curves([1.0], name) for name in names]

    def paired(ours, theirs):
        return [(r.name, c.name) for r, c in pair(named(*ours), named(*theirs))]

    assert paired(["s0", "s1"], ["s1", "s0"]) == [("s0", "s0"), ("s1", "s1")]
    assert paired(["a10", "a2"], ["b2", "b10"]) == [("a2", "b2"), ("a10", "b10")]
    assert paired(["x"], ["y"]) == [("x", "y")] and len(paired(["log", "log"], ["log", "log"])) == 2
    with pytest.raises(UsageError, match=r"only some names of runs agree.*s0, s1 against s1, s2"):
        paired(["s0", "s1"], ["s1", "s2"])
    with pytest.raises(UsageError, match=r"as many runs .* got s0, s1 against s0"):
        paired(["s0", "s1"], ["s0"])


# Comparing


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
    found = compare(*seeds(gap))
    assert found.verdict.verdict == expected and found.what == "the final evaluation loss" and found.notes == []
    assert found.verdict.seeds == 4 and found.pairs[0].best == (found.pairs[0].final[0], found.pairs[0].final[1])
    assert found.overall.area == 0 and found.block_interval is None


def test_verdict_on_the_training_loss_where_not_all_were_evaluated():
    ours, theirs = ([curves(falling(400, seed, gap), f"s{seed}") for seed in range(3)] for gap in (0.0, 0.05))
    found = compare(ours, theirs)
    assert found.verdict.verdict == WORSE and found.what == "the mean of the last tenth of the training loss"
    assert found.verdict.gap == pytest.approx(0.05, rel=0.05) and found.overall.area == pytest.approx(0.05, rel=0.05)
    assert found.overall.gap_mean == pytest.approx(found.overall.area)
    assert found.pairs[1].final[0] == pytest.approx(np.mean(falling(400, 1)[-40:]))


def test_one_pair_is_never_equivalent():
    same = compare([curves(falling(400))], [curves(falling(400))])
    assert same.verdict.verdict == INCONCLUSIVE and same.verdict.gap == 0 and same.block_interval == (0, 0)
    assert "no spread between seeds" in same.verdict.reason and same.verdict.seeds_needed == 3
    worse = compare([curves(falling(400))], [curves(falling(400, seed=1, gap=0.03))])
    low, high = worse.block_interval
    assert worse.verdict.verdict == INCONCLUSIVE and low < worse.block_gap < high and low < 0.03 < high
    assert f"{low:+.3%} and {high:+.3%}" in worse.verdict.reason
    short = compare([curves([2.0, 1.0])], [curves([2.0, 1.1])])
    assert short.block_interval is None and "+3.333%" in short.verdict.reason


def test_the_last_quarter_and_smoothing():
    late = compare([curves([2.0] * 400)], [curves([2.0] * 300 + [2.2] * 100)])
    assert late.block_gap == pytest.approx(0.1) and late.pairs[0].gap_mean < 0.03
    spike = compare([curves([2.0] * 400)], [curves([2.0] * 200 + [4.0] + [2.0] * 199)]).pairs[0]
    assert spike.gap_largest == pytest.approx(1 / 20) and 201 <= spike.gap_largest_step <= 220


def test_the_noise_of_blocks_holds_the_gap_as_often_as_it_says():
    held = 0
    for seed in range(200):
        found = compare([curves(falling(160, 2 * seed))], [curves(falling(160, 2 * seed + 1, 0.01))])
        held += found.block_interval[0] <= 0.01 <= found.block_interval[1]
    assert 0.82 <= held / 200 <= 0.97


def test_diverged():
    lost = compare([curves(falling(100))], [curves([*falling(50), *[math.nan] * 50])])
    assert lost.verdict.verdict == WORSE and lost.pairs[0].diverged == (0, 1) and lost.block_interval is None
    assert lost.pairs[0].area == 0 and "1 of 1 runs diverged" in lost.verdict.reason
    nothing = compare([curves(falling(50))], [curves([math.nan] * 50)])
    assert nothing.verdict.verdict == WORSE and math.isnan(nothing.pairs[0].area)
    both = compare([curves([1.0, math.nan])], [curves([1.0, math.nan])])
    assert both.verdict.verdict == INCONCLUSIVE
    ours, theirs = seeds()
    theirs = [curves([*falling(20), math.inf], run.name) for run in theirs]
    some = compare(ours, [*theirs[:1], *seeds()[1][1:]])
    assert some.verdict.verdict == EQUIVALENT and some.what == "the final evaluation loss"
    assert some.overall.diverged == (0, 1) and compare(ours, theirs).verdict.verdict == WORSE


def test_one_that_stopped_half_way_diverged_but_not_where_all_are_shorter():
    ours = [curves(falling(200, seed), f"s{seed}") for seed in range(3)]
    theirs = [curves(falling(count, seed), f"s{seed}") for seed, count in enumerate((200, 60, 200))]
    found = compare(ours, theirs)
    assert found.overall.diverged == (0, 1) and "s1 of the candidate stopped at step 60" in found.notes[-1]
    unfinished = compare(ours, [curves(falling(60, seed), f"s{seed}") for seed in range(3)])
    assert unfinished.verdict.verdict == EQUIVALENT and unfinished.overall.diverged == (0, 0)
    assert "s0: compared up to step 60, though the reference goes on to 200" in unfinished.notes


def test_other_steps_are_met_half_way():
    fine = curves([10.0 - 0.1 * step for step in range(1, 81)])
    coarse = curves([10.0 - 0.1 * step for step in range(5, 86, 10)], first=5, every=10)
    for one, other in ((fine, coarse), (coarse, fine)):
        found = compare([one], [other]).pairs[0]
        assert found.area == pytest.approx(0, abs=1e-12) and found.gap_largest == pytest.approx(0, abs=1e-12)
    up = compare([fine], [curves([11.0 - 0.1 * step for step in range(5, 86, 10)], first=5, every=10)]).pairs[0]
    assert up.gap_largest == pytest.approx(1 / 2.5) and up.gap_largest_step == 75
    assert up.area == pytest.approx(1 / 6) and up.gap_mean > 0
    with pytest.raises(UsageError, match="no steps in common: 1 to 80 of run and 100 to 101 of run"):
        compare([fine], [curves([1.0, 1.0], first=100)])


def test_evaluations_at_other_steps():
    ours = curves(falling(100), evaluations={50: 2.0, 100: 1.0})
    found = compare([ours], [curves(falling(100), evaluations={25: 2.5, 75: 1.4})])
    assert (
        found.pairs[0].final == (2.0, pytest.approx(1.95)) and "evaluation to compare is at step 50" in found.notes[-1]
    )


def test_gradients_skips_and_how_it_is_told():
    norms = [Series("grad_norm", np.arange(1.0, 101), np.full(100, norm)) for norm in (2.0, 3.0)]
    ours = [curves(falling(100), f"s{n}", grad_norm=norms[0], skipped=1) for n in (0, 1)]
    theirs = [curves(falling(100), f"s{n}", grad_norm=norms[1], skipped=n) for n in (0, 1)]
    found = compare(ours, theirs)
    assert found.pairs[0].grad_norm_ratio == 1.5 and found.overall.skipped == (2, 1)
    columns, rows = found.table()
    assert all(len(row) == len(columns) for row in rows) and [row[0] for row in rows] == ["s0", "s1", "all"]
    assert rows[2][3:] == ["+0.000%", "-", "0.000%", "+0.000% at 1", "1.500", "2 / 1", "0 / 0"]
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert told["verdict"] == EQUIVALENT and told["pairs"][0]["best"] == ["nan", "nan"] and told["detectable"] > 0
    assert (told["diverged"], told["diverged_reference"], told["overall"]["skipped"]) == (0, 0, [2, 1])
    lost = compare([curves([1.0, 2.0])], [curves([1.0, math.nan])]).table()[1][0]
    assert lost[2] == "diverged" and lost[3] == "-"


def test_steps_are_not_held_against_epochs(tmp_path):
    ours = read(write_lines(tmp_path / "a.jsonl", [{"step": at, "loss": 1.0} for at in range(9)]))
    theirs = read(write_lines(tmp_path / "b.jsonl", [{"epoch": at, "training_loss": 1.0} for at in range(3)]))
    with pytest.raises(UsageError, match="steps cannot be held against epochs"):
        compare([ours], [theirs])


# What is wrong with the input


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("empty.jsonl", b"", "holds no log"),
        ("blank.jsonl", b"\n\n  \n", "holds no log"),
        ("words.log", b"epoch 1 loss 2.0\n", "holds no log"),
        ("cut.jsonl", b'{"step": 1, "lo', "holds no log"),
        ("lists.jsonl", b"[1, 2]\n[3]\n", "holds no log"),
        ("deep.jsonl", b"[" * 100_000, "holds no log"),
        ("bytes.jsonl", bytes(range(256)), "its bytes are not text"),
        ("bytes.csv", bytes(range(256)), "its bytes are not text"),
        ("bytes.tfevents", bytes(range(256)) * 9, "holds no log"),
        ("other.jsonl", b'{"step": 1, "acc\\nuracy": 0.5, "text": "x"}\n', "no loss .* step, acc uracy, text"),
        ("text.jsonl", b'{"step": 1, "loss": "low"}\n', "no loss under any usual name"),
        ("bare.csv", b"1,2.5\n2,2.25\n", "no loss under any usual name"),
        ("header.csv", b"step,loss\n", "holds no log"),
        ("wide.csv", b'step,loss\n1,"' + b"9" * 200_000, "is not CSV: field larger"),
        ("state.json", b'{"log_history": []}', "holds no log"),
    ],
)
def test_bad_files_cost_one_line(tmp_path, name, content, line):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=line) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_bad_folders_cost_one_line(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="does not exist"):
        read(tmp_path / "none")
    with pytest.raises(UsageError, match="holds no run"):
        read(tmp_path)
    path = write_lines(tmp_path / "a.jsonl", [{"loss": 1.0}])

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match=r"a.jsonl cannot be read: Permission denied"):
        read(path)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    (tmp_path / "a.jsonl").rename(tmp_path / "x.tfevents")
    with pytest.raises(UsageError, match="TensorBoard is not installed"):
        read(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["step", "loss", "x"]), inner),
    max_leaves=6,
)
rows = st.dictionaries(st.sampled_from(["step", "epoch", "loss", "eval_loss", "mode", "skipped", "train"]), json_values)


@settings(max_examples=150, deadline=None)
@given(st.lists(rows.map(json.dumps) | st.text(max_size=12), max_size=8), st.sampled_from(["jsonl", "csv", "json"]))
def test_whatever_is_in_it_it_is_read_or_refused(tmp_path_factory, lines, suffix):
    path = tmp_path_factory.mktemp("any") / f"log.{suffix}"
    path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    try:
        run = read(path)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    assert len(run.loss.steps) == len(run.loss.values) > 0 and (np.diff(run.loss.steps) > 0).all()
    json.dumps(compare([run], [run]).as_dict(), allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_whatever_bytes_tensorboard_left(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("board")
    board = TensorBoardTracker(folder, {}, 1, pytest.fail)
    board.log_metrics("train", 1, {"loss": 2.0})
    board.close()
    path = next((folder / "tensorboard").iterdir())
    path.write_bytes(path.read_bytes() + content)
    assert points(read(path).loss)[0] == (1, 2)
