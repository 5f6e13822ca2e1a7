"""Logs of other tools are read whatever their names and structure, or refused with one line."""

import json
import math
import re
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
from narrowgauge.validate.curves.external_logs import read_run, read_runs
from narrowgauge.validate.curves.external_runs import compare_runs


def write_lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def points(series):
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


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
    run = read_run(write_lines(tmp_path / "log.jsonl", rows))
    assert points(run.loss) == [(1, 2), (2, 1), (3, 2 / 3), (4, 0.5)] and points(run.eval) == [(4, 0.6)]
    assert points(run.grad_norm)[0] == (1, 0.5) and not run.diverged and run.name == "log"
    assert repr(loss) in run.source and repr(evaluation) in run.source and f"by {step} 1 to 4" in run.source


def test_json_lines_in_various_forms(tmp_path):
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
    run = read_run(write_lines(tmp_path / "log.jsonl", rows))
    assert run.loss.steps.tolist() == [1, 2, 3] and run.loss.values[:2].tolist() == [2.5, 2.25]
    assert run.diverged and math.isnan(run.loss.values[2]) and points(run.eval) == [(3, 1.75)]
    assert "3 lines are not JSON" in run.source and "1 duplicate lines" in run.source


def test_choice_among_several_names_and_a_given_tag(tmp_path):
    rows = [{"step": at, "train_loss": 3.0, "loss": 1.0, "val/aux": 7.0, "aux": 8.0} for at in (1, 2)]
    path = write_lines(tmp_path / "log.jsonl", [*rows, {"step": 2, "eval_loss": 0.5}])
    run = read_run(path)
    assert run.loss.tag == "loss" and "(not train_loss)" in run.source and run.eval is not None
    forced = read_run(path, tag="aux")
    assert forced.loss.values.tolist() == [8, 8] and forced.eval is None
    assert points(read_run(path, tag="val/aux").eval) == [(1, 7), (2, 7)]
    with pytest.raises(UsageError, match=r"no value named 'acc'; .*train_loss, loss, val/aux"):
        read_run(path, tag="acc")


def test_evaluation_rows_are_recognized_by_a_field(tmp_path):
    rows = [{"mode": "train", "step": 1, "loss": 3.0}, {"mode": "val", "step": 1, "loss": 2.5, "val_loss": 9.0}]
    run = read_run(write_lines(tmp_path / "log.jsonl", rows))
    assert points(run.loss) == [(1, 3)] and run.eval.tag in ("val/loss", "val_loss")


def test_steps_take_precedence_over_epochs_and_missing_steps_are_counted(tmp_path):
    rows = [{"epoch": 0, "val_loss": 9.0}, *({"step": s, "loss": 1.0} for s in (10, 20)), {"epoch": 1, "val_loss": 1.5}]
    run = read_run(write_lines(tmp_path / "log.jsonl", rows))
    assert points(run.eval) == [(20, 1.5)]
    bare = read_run(write_lines(tmp_path / "bare.jsonl", [{"loss": value} for value in (3, 2, 1)]))
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
        run = read_run(path)
        assert points(run.loss) == [(5, 0.8), (10, 0.4)] and points(run.eval) == [(10, 0.35)]
        assert "(not train_loss)" in run.source
    (tmp_path / "list.json").write_text(json.dumps(history))
    assert points(read_run(tmp_path / "list.json").loss) == [(5, 0.8), (10, 0.4)]


@pytest.mark.parametrize("comma", [",", ";", "\t"])
def test_csv_with_empty_cells(tmp_path, comma):
    text = "epoch,step,train_loss_step,val_loss\n0,9,2.5,\n0,19,2.25,\n0,19,,2.0\n1,29,nan,\n"
    path = tmp_path / "version_0" / "metrics.csv"
    path.parent.mkdir()
    path.write_text(text.replace(",", comma))
    run = read_run(tmp_path / "version_0")
    assert run.loss.steps.tolist() == [9, 19, 29] and run.diverged and points(run.eval) == [(19, 2)]


def test_csv_with_spaces_after_commas(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step, loss\n1, 2.5\n2, 2.25\n")
    assert points(read_run(path).loss) == [(1, 2.5), (2, 2.25)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("log.csv", "step;loss\n1;2,5\n2;2,25\n", "'loss' is '2,5', which is not a number"),
        ("log.json", '{"loss": [2.5, 2.25]}', "'loss' is [2.5, 2.25], which is not a number"),
    ],
)
def test_losses_that_are_no_numbers_are_shown(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(f"{path} has no loss: {said}")):
        read_run(path)


def test_skipped_updates(tmp_path):
    def skips(values):
        rows = [{"step": at, "loss": 1.0, "skipped": value} for at, value in enumerate(values)]
        return read_run(write_lines(tmp_path / "log.jsonl", rows)).skipped

    assert skips([0, 1, 1, 4]) == 4 and skips([True, False, True]) == 2
    assert read_run(write_lines(tmp_path / "log.jsonl", [{"loss": 1}])).skipped is None


def test_tensorboard(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter

        for part in ((0, 1, 2, 3), (2, 3, 4)):  # the second is a resumed process: a new file that repeats some steps
            with SummaryWriter(tmp_path / "run", filename_suffix=f".{part[0]}") as writer:
                for step in part:
                    writer.add_scalar("Loss/train", 10 * part[0] + step, step)
                    writer.add_scalar("Loss/val", 5.0, step)
                    writer.add_histogram("weights", torch.ones(3), step)
                writer.add_text("note", "some words")
                writer.add_scalar("new/style", 3.5, 0, new_style=True)
    assert len(list((tmp_path / "run").iterdir())) == 2
    run = read_run(tmp_path / "run")
    assert points(run.loss) == [(0, 0), (1, 1), (2, 22), (3, 23), (4, 24)] and run.eval.values.tolist() == [5] * 5
    assert points(read_run(tmp_path / "run", tag="new/style").loss) == [(0, 3.5)]
    one = max((tmp_path / "run").iterdir(), key=lambda path: path.name[-1])
    assert points(read_run(one).loss) == [(2, 22), (3, 23), (4, 24)]
    one.write_bytes(one.read_bytes()[:-7])
    assert points(read_run(one).loss) == [(2, 22), (3, 23), (4, 24)]
    with pytest.raises(UsageError, match=r"no value named 'acc'.*Loss/train"):
        read_run(tmp_path / "run", tag="acc")


def test_tensorboard_drops_steps_that_a_resumed_run_repeats(tmp_path):
    for first, steps in ((1, (1, 2, 3, 4)), (3, (3,))):
        board = TensorBoardTracker(tmp_path, {}, first, pytest.fail)
        for step in steps:
            board.log_metrics("train", step, {"loss": first + step})
        board.close()
    assert points(read_run(tmp_path / "tensorboard").loss) == [(1, 2), (2, 3), (3, 6)]


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


def test_narrowgauge_run(own_run):
    folder, result = own_run
    for path in (folder, folder / record.EVENTS):
        run = read_run(path)
        assert run.loss.steps.tolist() == list(range(1, 13)) and run.eval.steps.tolist() == [4, 8, 12]
        assert run.eval.values[-1] == result.loss_eval and run.loss.values[-1] == result.loss_last
        assert run.skipped == 0 and not run.diverged and run.name == "run" and len(run.grad_norm.steps) == 12
    board = read_run(folder / "tensorboard")
    assert board.loss.values.tolist() == pytest.approx(run.loss.values.tolist()) and len(board.eval.steps) == 3
    both = compare_runs([read_run(folder)], [board])
    assert both.verdict.gap == pytest.approx(0, abs=1e-6) and both.what == "the final evaluation loss"
    assert both.notes[0] == "run is compared with tensorboard"


def test_narrowgauge_run_that_stalled(tmp_path):
    record.write_configuration(tmp_path, {"task": "x"})
    with record.Record(tmp_path) as log:
        for step in (1, 2, 3):
            log.append("step", step, loss=math.inf if step == 2 else 2.0, grad_norm=1.0, applied=step != 2)
        log.append("end", 3, interrupted=False, steps=10, skipped=1)
    run = read_run(tmp_path)
    assert run.diverged and run.skipped == 1
    (tmp_path / record.EVENTS).write_text('{"loss": "nan"}\n[1]\n')
    with pytest.raises(UsageError, match="is damaged in line 1"):
        read_run(tmp_path)


def test_folder_of_runs(tmp_path):
    for seed in (0, 1, 10):
        write_lines(tmp_path / f"seed{seed}.jsonl", [{"step": 1, "loss": seed}])
        (tmp_path / "deep" / f"seed{seed}" / "logs").mkdir(parents=True)
        write_lines(tmp_path / "deep" / f"seed{seed}" / "logs" / "x.jsonl", [{"step": 1, "loss": seed}])
    (tmp_path / "readme.txt").write_text("words")
    (tmp_path / "seed0.csv").write_text("step,loss\n1,0\n")  # from another logger, of the same run
    assert [run.name for run in read_runs(tmp_path)] == ["seed0", "seed1", "seed10"]
    assert [(run.name, run.loss.values[0]) for run in read_runs(tmp_path / "deep")][2] == ("seed10", 10)
    with pytest.raises(UsageError, match="contains several runs, but one was expected: seed0, seed1, seed10"):
        read_run(tmp_path)


@pytest.mark.parametrize(("one", "other", "name"), [("train", "validation", "run"), ("s0_train", "s0_val", "s0")])
def test_train_and_validation_logs_are_one_run(tmp_path, one, other, name):
    folder = tmp_path / "run"
    folder.mkdir()
    write_lines(folder / f"{one}.jsonl", [{"step": at, "loss": 2.0} for at in (1, 2)])
    write_lines(folder / f"{other}.jsonl", [{"step": 2, "loss": 1.0}])
    run = read_run(folder)
    assert len(run.loss.steps) == 2 and points(run.eval) == [(2, 1)] and run.name == name


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("empty.jsonl", b"", "is not a log"),
        ("blank.jsonl", b"\n\n  \n", "is not a log"),
        ("words.log", b"epoch 1 loss 2.0\n", "is not a log"),
        ("cut.jsonl", b'{"step": 1, "lo', "is not a log"),
        ("lists.jsonl", b"[1, 2]\n[3]\n", "is not a log"),
        ("deep.jsonl", b"[" * 100_000, "is not a log"),
        ("bytes.jsonl", bytes(range(256)), "it is a binary file"),
        ("bytes.csv", bytes(range(256)), "it is a binary file"),
        ("bytes.tfevents", bytes(range(256)) * 9, "is not a log"),
        ("other.jsonl", b'{"step": 1, "acc\\nuracy": 0.5, "text": "x"}\n', "no loss .* step, acc uracy, text"),
        ("text.jsonl", b'{"step": 1, "loss": "low"}\n', "'loss' is 'low', which is not a number"),
        ("bare.csv", b"1,2.5\n2,2.25\n", "no loss under any known name"),
        ("header.csv", b"step,loss\n", "is not a log"),
        ("wide.csv", b'step,loss\n1,"' + b"9" * 200_000, "is not CSV: field larger"),
        ("state.json", b'{"log_history": []}', "is not a log"),
    ],
)
def test_bad_files_give_a_one_line_error(tmp_path, name, content, line):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=line) as caught:
        read_run(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_bad_folders_give_a_one_line_error(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="does not exist"):
        read_run(tmp_path / "none")
    with pytest.raises(UsageError, match="contains no run"):
        read_run(tmp_path)
    path = write_lines(tmp_path / "a.jsonl", [{"loss": 1.0}])

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match=r"a.jsonl cannot be read: Permission denied"):
        read_run(path)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    (tmp_path / "a.jsonl").rename(tmp_path / "x.tfevents")
    with pytest.raises(UsageError, match="TensorBoard is not installed"):
        read_run(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["step", "loss", "x"]), inner),
    max_leaves=6,
)
rows = st.dictionaries(st.sampled_from(["step", "epoch", "loss", "eval_loss", "mode", "skipped", "train"]), json_values)


@settings(max_examples=150, deadline=None)
@given(st.lists(rows.map(json.dumps) | st.text(max_size=12), max_size=8), st.sampled_from(["jsonl", "csv", "json"]))
def test_any_text_is_read_or_refused(tmp_path_factory, lines, suffix):
    path = tmp_path_factory.mktemp("any") / f"log.{suffix}"
    path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    try:
        run = read_run(path)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    assert len(run.loss.steps) == len(run.loss.values) > 0 and (np.diff(run.loss.steps) > 0).all()
    json.dumps(compare_runs([run], [run]).to_dict(), allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_trailing_bytes_in_tensorboard_files_are_ignored(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("board")
    board = TensorBoardTracker(folder, {}, 1, pytest.fail)
    board.log_metrics("train", 1, {"loss": 2.0})
    board.close()
    path = next((folder / "tensorboard").iterdir())
    path.write_bytes(path.read_bytes() + content)
    assert points(read_run(path).loss)[0] == (1, 2)
