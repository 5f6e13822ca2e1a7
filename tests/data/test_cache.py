"""The cache: complete files or none, made once, and never the reason for a run to fail."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.data import cache
from narrowgauge.errors import UsageError


def blocks(calls):
    calls.append(1)
    yield np.array([1, 2], np.int64)
    yield np.array([300], np.int64)


def test_the_environment_sets_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.get_folder() == tmp_path / "own"
    monkeypatch.delenv("NARROWGAUGE_CACHE")
    assert cache.get_folder() == tmp_path / "xdg" / "narrowgauge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.get_folder() == tmp_path / ".cache" / "narrowgauge"


def test_an_array_is_made_once_and_then_mapped(cache_folder):
    calls = []
    first = cache.load_or_make_array("a.bin", np.uint16, lambda: blocks(calls))
    again = cache.load_or_make_array("a.bin", np.uint16, lambda: blocks(calls))
    assert first.tolist() == again.tolist() == [1, 2, 300]
    assert first.dtype == np.uint16
    assert isinstance(again, np.memmap)
    assert len(calls) == 1
    assert [file.name for file in cache_folder.iterdir()] == ["a.bin"]


def test_a_text_is_made_once(cache_folder):
    calls = []

    def make():
        calls.append(1)
        return "häh\n"

    assert cache.load_or_make_text("t.json", make) == cache.load_or_make_text("t.json", make) == "häh\n"
    assert len(calls) == 1


def test_a_truncated_file_is_made_again(cache_folder):
    cache_folder.mkdir()
    (cache_folder / "a.bin").write_bytes(b"\1\2\3")
    assert cache.load_or_make_array("a.bin", np.uint16, lambda: blocks([])).tolist() == [1, 2, 300]


def test_an_error_while_writing_leaves_no_files(cache_folder):
    def fail():
        yield np.array([1])
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        cache.load_or_make_array("a.bin", np.uint16, fail)
    assert list(cache_folder.iterdir()) == []


def test_an_unwritable_cache_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "file" / "cache"))
    assert cache.load_or_make_array("a.bin", np.uint16, lambda: blocks([])).tolist() == [1, 2, 300]
    assert cache.load_or_make_text("t.json", lambda: "text") == "text"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("continuing without it" in line for line in lines)


def test_a_fingerprint_depends_on_path_size_time_and_more(tmp_path):
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_text("one")
    other.write_text("one")
    os.utime(file, ns=(1, 1))
    os.utime(other, ns=(1, 1))
    before = cache.fingerprint([file], 5)
    assert before == cache.fingerprint([file], 5)
    assert before != cache.fingerprint([file], 6)
    assert before != cache.fingerprint([other], 5)
    os.utime(file, ns=(2, 2))
    assert before != cache.fingerprint([file], 5)
    Path(file).write_text("longer")
    os.utime(file, ns=(1, 1))
    assert before != cache.fingerprint([file], 5)


def write_two(calls, folder):
    calls.append(1)
    (folder / "a.bin").write_bytes(b"ab")
    (folder / "b.json").write_text("{}")


def test_a_folder_is_made_once_and_atomically(cache_folder):
    calls = []
    for _ in range(2):
        kept = cache.load_or_make_folder("both", lambda folder: write_two(calls, folder))
        assert sorted(file.name for file in kept.iterdir()) == ["a.bin", "b.json"]
    assert len(calls) == 1
    assert [place.name for place in cache_folder.iterdir()] == ["both"]


def test_an_error_while_filling_a_folder_leaves_none(cache_folder):
    def fail(folder):
        (folder / "a.bin").write_bytes(b"ab")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        cache.load_or_make_folder("both", fail)
    assert list(cache_folder.iterdir()) == []


def test_an_unwritable_cache_uses_a_temporary_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "file" / "cache"))
    kept = cache.load_or_make_folder("both", lambda folder: write_two([], folder))
    assert (kept / "a.bin").read_bytes() == b"ab"
    assert "continuing without it" in capsys.readouterr().err


def test_a_full_disk_everywhere_is_a_one_line_error(monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="No space left on device"):
        cache.load_or_make_folder("both", full)


def test_without_locks_the_first_to_finish_wins(cache_folder, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)

    def late(folder):
        other = cache_folder / "both"
        other.mkdir()
        (other / "a.bin").write_bytes(b"first")
        write_two([], folder)

    assert (cache.load_or_make_folder("both", late) / "a.bin").read_bytes() == b"first"
    assert sorted(place.name for place in cache_folder.iterdir() if place.suffix != ".lock") == ["both"]


def test_only_leftovers_of_killed_processes_are_removed(cache_folder):
    cache_folder.mkdir()
    for name in ("a.bin.x1.part", "a.bin.x2.part", "b.bin.y.part"):
        (cache_folder / name).write_bytes(b"half")
    cache.load_or_make_array("a.bin", np.uint16, lambda: blocks([]))
    assert sorted(file.name for file in cache_folder.iterdir()) == ["a.bin", "b.bin.y.part"]


def test_a_lock_on_a_removed_file_does_not_count(cache_folder):
    """Many threads take and free the lock: no two hold it at the same time."""
    inside, most = [], []

    def enter():
        for _ in range(30):
            with cache.lock_entry(cache_folder / "a"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 120
    assert list(cache_folder.iterdir()) == []
