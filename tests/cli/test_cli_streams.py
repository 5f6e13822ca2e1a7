"""Closed pipes, full disks, closed terminals, signals and tasks that raise: no work is lost, exit codes are correct."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import child_processes
import forked
from narrowgauge.cli import main
from narrowgauge.cli.output import ProtectedStream, protect_streams
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint

TASKS = Path(__file__).parent.parent / "runs" / "tiny_task.py"
CHATTY = """
import sys
import tiny_task

def make():
    def loss(model, batch):
        print("a line of the task's own", flush=True)
        sys.stdout.buffer.write(b"and some bytes\\n")
        sys.stderr.write("and another\\n")
        return tiny_task.loss(model, batch)
    return tiny_task.tiny(loss=loss)
"""
PATIENCE_S = 120
ENDLESS = f"{TASKS}:command_line", "--checkpoint-every", "0"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TASKS.parent), os.environ["PYTHONPATH"]]))
    (tmp_path / "chatty.py").write_text(CHATTY)


def arguments(task: str, *more: str, steps: int = 40) -> list[str]:
    options = ["--steps", str(steps), "--log", "none", "--out", "run", "--eval-every", "10", *more]
    return ["train", task, "--device", "cpu", "--recipe", "fp32", *options]


def command(task: str, *more: str, steps: int = 40) -> list[str]:
    return [sys.executable, "-m", "narrowgauge", *arguments(task, *more, steps=steps)]


def assert_finished(steps: int = 40) -> None:
    assert checkpoint.list_steps(Path("run"))[-1] == steps
    events = list(record.read(Path("run")))
    assert [e["step"] for e in events if e["kind"] == "step"] == list(range(1, steps + 1))
    assert events[-1]["kind"] == "end"


@pytest.mark.parametrize(
    ("task", "stderr"),
    [(f"{TASKS}:command_line", subprocess.DEVNULL), ("chatty.py:make", subprocess.STDOUT)],
    ids=["quiet", "chatty"],
)
def test_a_closed_pipe_does_not_stop_training(task: str, stderr: int) -> None:
    start_new = functools.partial(child_processes.start, command(task))
    start_fork = functools.partial(forked.start_cli, arguments(task))
    with (start_new if task == "chatty.py:make" else start_fork)(stdout=subprocess.PIPE, stderr=stderr) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0
    assert_finished()


def test_the_exit_code_reports_a_finding_despite_closed_pipes() -> None:
    with forked.start_cli(
        arguments(f"{TASKS}:diverging", "--json", steps=400), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        process.stderr.close()
        assert process.wait(PATIENCE_S) == 1


@pytest.mark.parametrize(
    ("full", "more", "code"), [("stdout", [], 0), ("stdout", ["--json"], 2), ("stderr", ["--json"], 0), ("both", [], 0)]
)
def test_a_full_disk_does_not_stop_training(full: str, more: list[str], code: int) -> None:
    with open("/dev/full", "w") as disk:  # noqa: PTH123
        out = disk if full in ("stdout", "both") else subprocess.PIPE
        err = disk if full in ("stderr", "both") else subprocess.PIPE
        with forked.start_cli(arguments("chatty.py:make", *more), stdout=out, stderr=err, text=True) as process:
            _, errors = process.communicate(PATIENCE_S)
    assert process.returncode == code, errors
    assert_finished()
    if full == "stdout":
        assert "standard output cannot be written (No space left on device)" in errors
        assert "Traceback" not in errors


def test_streams_closed_from_the_start_do_not_write_into_the_record() -> None:
    redirections = " ".join(f"{number}>&-" for number in (0, 1, 2))
    text = " ".join(command("chatty.py:make"))
    done = subprocess.run(["sh", "-c", f"exec {text} {redirections}"], timeout=PATIENCE_S, check=False)
    assert done.returncode == 0
    assert_finished()


@contextlib.contextmanager
def start(**options: Any) -> Iterator[forked.Child]:
    """A run that has begun to train."""
    with forked.start_cli(arguments(*ENDLESS, steps=1_000_000), **options) as process:
        wait_until_it_trains(process)
        yield process


def wait_until_it_trains(process: forked.Child) -> None:
    wait_until(lambda: process.poll() is not None or last_step() > 2)
    assert process.poll() is None


def last_step() -> int:
    with contextlib.suppress(OSError):
        return (Path("run") / "events.jsonl").read_bytes().count(b'"kind":"step"')
    return 0


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_sigint_and_sighup_that_were_ignored_stay_ignored_and_sigterm_saves() -> None:
    with start(ignored=[signal.SIGINT, signal.SIGHUP, signal.SIGTERM]) as process:
        for number in (signal.SIGINT, signal.SIGHUP) * 2:
            before = last_step()
            process.send_signal(number)
            wait_until(lambda before=before: process.poll() is not None or last_step() > before + 20)  # type: ignore[misc]
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    events = list(record.read(Path("run")))
    assert events[-1]["kind"] == "end" and events[-1]["interrupted"]
    assert checkpoint.list_steps(Path("run")) == [events[-1]["step"]]


def test_closing_the_terminal_saves_the_run() -> None:
    """As when ssh is cut: SIGHUP comes, and every write to the terminal fails."""
    keyboard, screen = pty.openpty()
    stream = os.fdopen(screen, "wb", buffering=0)
    with stream, start(stdout=stream, stderr=stream, terminal=True) as process:
        stream.close()
        os.close(keyboard)
        assert process.wait(PATIENCE_S) == 0
    events = list(record.read(Path("run")))
    assert events[-1]["kind"] == "end" and events[-1]["interrupted"]
    assert checkpoint.list_steps(Path("run")) == [events[-1]["step"]]


def raising(text: str) -> str:
    Path("bad.py").write_text(f"import sys, os\nimport torch\nimport tiny_task\n{text}\n")
    return "bad.py:make"


FAILURES = {
    "task": "def make(): raise ValueError('no such thing')",
    "model": "def broken(): raise RuntimeError('no such thing')\ndef make(): return tiny_task.tiny(model=broken)",
    "loss": "def broken(m, b): raise KeyError('no such thing')\ndef make(): return tiny_task.tiny(loss=broken)",
    "batch": "def broken(s, p): return {}['no such thing']\ndef make(): return tiny_task.tiny(batch=broken)",
    "ahead": "def broken(s, p):\n    if s == 25: raise OSError('no such thing')\n    return tiny_task.draw(s, p)\n"
    "def make(): return tiny_task.tiny(batch=broken, reads_ahead=True)",
    "metrics": "def broken(m, b): assert False, 'no such thing'\ndef make(): return tiny_task.tiny(metrics=broken)",
    "exit": "def broken(m, b): sys.exit(0)\ndef make(): return tiny_task.tiny(loss=broken)",
    "pipe": "def broken(m, b): raise BrokenPipeError('no such thing')\ndef make(): return tiny_task.tiny(loss=broken)",
    "late": "def broken(m, b):\n    global n; n += 1\n    if n > 40: raise MemoryError('no such thing')\n"
    "    return tiny_task.loss(m, b)\nn = 0\ndef make(): return tiny_task.tiny(loss=broken)",
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_task_that_raises_gives_exit_code_3_and_a_traceback(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TASKS.parent)
    monkeypatch.delitem(sys.modules, "narrowgauge_task_bad", raising=False)
    task = raising(FAILURES[where])
    options = ["--device", "cpu", "--recipe", "fp32", "--steps", "40", "--checkpoint-every", "10", "--eval-every", "10"]
    code = main(["train", task, *options, "--log", "none", "--out", "run", "--json"])
    said = capsys.readouterr()
    assert code == 3 and said.out == ""
    assert "Traceback" in said.err and "bad.py" in said.err and said.err.splitlines()[-1].startswith("narrowgauge: ")
    if where in ("late", "ahead"):
        assert checkpoint.list_steps(Path("run")) == [10, 20] and "narrowgauge train --resume run" in said.err
        assert checkpoint.find_damage(checkpoint.make_path(Path("run"), 20)) is None


def test_a_failed_stream_drops_output() -> None:
    class Failing(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    stream = ProtectedStream(Failing(), "standard output")
    assert stream.write("one") == 3
    stream.flush()
    assert stream.write("two") == 3 and stream.failure is not None
    assert stream.getvalue() == "one"


def test_characters_outside_of_the_encoding_are_escaped() -> None:
    raw = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, encoding="ascii")), protect_streams():
        print("loss \u2192 0, \udcff")
    assert raw.getvalue() == b"loss \\u2192 0, \\udcff\n"


def test_streams_are_restored() -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError), protect_streams():
        assert sys.stdout is not before[0]
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == before


def test_json_is_complete_after_sighup() -> None:
    with start(stdout=subprocess.PIPE) as process:
        for _ in range(3):  # a shell and the kernel may both send it
            process.send_signal(signal.SIGHUP)
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and b"interrupted after" in out
    assert json.loads((Path("run") / "run.json").read_text())
