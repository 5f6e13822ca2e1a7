"""The cache: whole files or none, reused when there, and never a reason for a run to fail."""

import os
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.data import cache


def blocks(calls):
    calls.append(1)
    yield np.array([1, 2], np.int64)
    yield np.array([300], np.int64)


def test_the_folder_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "own"
    monkeypatch.delenv("NARROWGAUGE_CACHE")
    assert cache.folder() == tmp_path / "xdg" / "narrowgauge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "narrowgauge"


def test_an_array_is_made_once_and_then_mapped(cache_folder):
    calls = []
    first = cache.keep_array("a.bin", np.uint16, lambda: blocks(calls))
    again = cache.keep_array("a.bin", np.uint16, lambda: blocks(calls))
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

    assert cache.keep_text("t.json", make) == cache.keep_text("t.json", make) == "häh\n"
    assert len(calls) == 1


def test_a_cut_file_is_made_again(cache_folder):
    cache_folder.mkdir()
    (cache_folder / "a.bin").write_bytes(b"\1\2\3")
    assert cache.keep_array("a.bin", np.uint16, lambda: blocks([])).tolist() == [1, 2, 300]


def test_a_failure_half_way_leaves_nothing_behind(cache_folder):
    def fail():
        yield np.array([1])
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        cache.keep_array("a.bin", np.uint16, fail)
    assert list(cache_folder.iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "file" / "cache"))
    assert cache.keep_array("a.bin", np.uint16, lambda: blocks([])).tolist() == [1, 2, 300]
    assert cache.keep_text("t.json", lambda: "text") == "text"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("going on without it" in line for line in lines)


def test_a_fingerprint_follows_path_size_time_and_more(tmp_path):
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
