"""A run folder has one process at a time, and a killed one does not keep it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from narrowgauge.errors import UsageError
from narrowgauge.runs import lock

HOLDER = """
import sys, pathlib
from narrowgauge.runs import lock
with lock.hold(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"in use by process {holder.pid}; wait"), lock.hold(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with lock.hold(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_it_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with lock.hold(tmp_path / "new" / "run"):
            pass


def test_a_place_where_no_folder_can_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"), lock.hold(tmp_path / "file" / "run"):
        pass
