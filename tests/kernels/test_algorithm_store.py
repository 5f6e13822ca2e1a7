"""Choices of algorithms across processes: what is read again, and that no file can do harm."""

import json

import pytest

from narrowgauge.kernels.algorithm_store import DEFAULT, MOST_ENTRIES, AlgorithmStore


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))


def test_a_choice_is_found_by_a_later_process():
    AlgorithmStore("NVIDIA H200", 130100).add("shape", 3, 8)
    AlgorithmStore("NVIDIA H200", 130100).add("other", DEFAULT, 8)
    later = AlgorithmStore("NVIDIA H200", 130100)
    assert later.find("shape", 8) == 3 and later.find("other", 8) == DEFAULT
    assert later.find("shape", 7) is None, "another number of proposals: they may be others"
    assert later.find("unknown", 8) is None
    assert AlgorithmStore("NVIDIA H200", 130200).find("shape", 8) is None
    assert AlgorithmStore("NVIDIA H100 80GB HBM3", 130100).find("shape", 8) is None


def test_what_another_process_has_written_is_kept():
    one, other = AlgorithmStore("gpu", 1), AlgorithmStore("gpu", 1)
    one.add("a", 0, 2)
    other.add("b", 1, 2)
    later = AlgorithmStore("gpu", 1)
    assert (later.find("a", 2), later.find("b", 2)) == (0, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[1, 2]", b"not json", b"\xff\xfe", b'{"a": 1}', b'{"a": [9, 8]}', b'{"a": [-2, 8]}', b'{"a": [true, 8]}',
        b'{"a": [1.0, 8]}', b'{"a": [1]}', b'{"a": ["1", 8]}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_empty(content):
    store = AlgorithmStore("gpu", 1)
    store.path.parent.mkdir(parents=True)
    store.path.write_bytes(content)
    damaged = AlgorithmStore("gpu", 1)
    assert damaged.find("a", 8) is None
    damaged.add("a", 2, 8)
    assert json.loads(store.path.read_text()) == {"a": [2, 8]}


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "file" / "cache"))
    store = AlgorithmStore("gpu", 1)
    store.add("a", 2, 8)
    assert store.find("a", 8) == 2, "for this process"
    assert AlgorithmStore("gpu", 1).find("a", 8) is None


def test_a_link_is_not_replaced(tmp_path):
    store = AlgorithmStore("gpu", 1)
    store.path.parent.mkdir(parents=True)
    (tmp_path / "victim").write_text("{}")
    store.path.symlink_to(tmp_path / "victim")
    store.add("a", 2, 8)
    assert (tmp_path / "victim").read_text() == "{}"


def test_the_file_does_not_grow_without_end():
    store = AlgorithmStore("gpu", 1)
    store._known = {str(number): (0, 1) for number in range(MOST_ENTRIES)}
    store.add("a", 0, 1)
    assert not store.path.exists()
