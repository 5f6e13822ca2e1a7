"""Only one process at a time can use a run folder, and a killed process does not keep the lock."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import child_processes
from narrowgauge.errors import UsageError
from narrowgauge.runs import lock, record

HOLDER = """
import sys, pathlib
from narrowgauge.runs import lock
with lock.hold(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    with child_processes.start(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"in use by process {holder.pid}; wait"), lock.hold(tmp_path):
            pass
        holder.kill()
        holder.wait(60)
        with lock.hold(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_the_lock_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with lock.hold(tmp_path / "new" / "run"):
            pass


def test_a_path_that_cannot_be_a_folder_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"), lock.hold(tmp_path / "file" / "run"):
        pass


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("not there"))


def hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("put", [link, dangling, pipe, folder])
def test_another_file_at_its_path_is_refused_and_unchanged(tmp_path: Path, put: Callable[[Path, Path], None]) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    put(run / ".lock", victim)
    with pytest.raises(UsageError, match=r"\.lock is a link or a device"), lock.hold(run):
        pass
    assert victim.read_text() == "precious" and not (tmp_path / "not there").exists()


def test_a_hard_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    hard_link(tmp_path / "run" / ".lock", victim)
    with lock.hold(tmp_path / "run"):
        assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["events.jsonl", ".events.jsonl.tmp", ".run.json.tmp", "run.json"])
def test_a_run_does_not_write_through_links(tmp_path: Path, name: str) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    (run / name).symlink_to(victim)
    with contextlib.suppress(UsageError):
        with record.Record(run) as events:
            events.append("note", 1)
        record.truncate_after(run, 1)
    record.write_configuration(run, {"task": "x"})
    assert victim.read_text() == "precious" and record.read_configuration(run) == {"task": "x"}
