"""Packing: every document once, in a split that depends only on its text; done once, in little memory."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import child_processes
from narrowgauge.data import documents, pack
from narrowgauge.data.documents import Documents, Part
from narrowgauge.data.tokenizer import Bytes
from narrowgauge.errors import UsageError


def of(*parts, key="k", opened=None):
    """Make documents from lists. A tuple is a part for evaluation."""

    def generate(texts):
        yield from texts

    def open_():
        if opened is not None:
            opened.append(1)
        return [Part(str(n), lambda t=t: generate(t), isinstance(t, tuple)) for n, t in enumerate(parts)]

    return Documents("data", key, open_)


def split(array):
    return array.tobytes().decode().split("\n\n")[:-1]


MANY = [f"document {number} says {number * number}" for number in range(400)]


def test_every_document_is_whole_and_in_one_split():
    packed = pack.pack(of(MANY[:300], MANY[300:]), Bytes(), context=16)
    train, held = split(packed.train), split(packed.eval)
    assert train == [text for text in MANY if not pack.is_held_out(text, 20)]
    assert held == [text for text in MANY if pack.is_held_out(text, 20)]
    assert 5 < len(held) < 40
    assert packed.facts["documents"] == 400 and packed.facts["eval_documents"] == len(held)
    assert packed.facts["train_tokens"] == len(packed.train) and packed.train.dtype == np.uint8
    assert isinstance(packed.train, np.memmap)


def test_no_document_moves_when_more_are_added_in_another_order():
    before = pack.pack(of(MANY[:200], key="a"), Bytes(), context=16)
    after = pack.pack(of(list(reversed(MANY)), key="b"), Bytes(), context=16)
    assert set(split(before.eval)) < set(split(after.eval))
    assert set(split(before.train)) < set(split(after.train))


def test_copies_of_a_document_are_in_the_same_split():
    packed = pack.pack(of(MANY * 3), Bytes(), context=16)
    assert set(split(packed.train)).isdisjoint(split(packed.eval))
    assert len(split(packed.eval)) % 3 == 0


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=20), st.integers(0, 19))
def test_held_out_sets_nest(texts, grown):
    for text in texts[: grown + 1]:
        sides = [pack.is_held_out(text, every) for every in pack.HELD_OUT]
        assert sides == sorted(sides)  # once held out, held out of every larger set


def test_a_small_set_holds_out_a_larger_part():
    few = [text for text in MANY if not pack.is_held_out(text, 20)][:12]
    packed = pack.pack(of(few), Bytes(), context=16)
    assert sorted(split(packed.train) + split(packed.eval)) == sorted(few)
    assert len(packed.eval) > 16 and "one document in" in packed.facts["split"]
    assert "one document in 20" not in packed.facts["split"]


def test_too_few_documents_are_refused():
    with pytest.raises(UsageError, match=r"whole documents.*val in its name"):
        pack.pack(of(["only one, however long" * 100]), Bytes(), context=4000)
    with pytest.raises(UsageError, match="holds no text: 2 empty"):
        pack.pack(of(["", "  \n"], key="e"), Bytes(), context=16)


def test_parts_named_for_evaluation_are_used_for_it():
    packed = pack.pack(of(MANY[:50], tuple(MANY[40:60]), MANY[60:70]), Bytes(), context=16)
    assert split(packed.train) == MANY[:50] + MANY[60:70]
    assert split(packed.eval) == MANY[40:60]
    assert packed.facts["split"] == "by name"
    only = pack.pack(of(tuple(MANY), key="only"), Bytes(), context=16)
    assert only.facts["split"] == "one document in 20, by a hash of its text"


def test_packing_is_cached_per_encoder_and_limit(cache_folder):
    opened = []
    for _ in range(2):
        pack.pack(of(MANY, opened=opened), Bytes(), context=16)
    assert len(opened) == 1
    pack.pack(of(MANY, opened=opened), Bytes(key="other"), context=16)
    pack.pack(of(MANY, opened=opened), Bytes(), context=16, max_tokens=5000)
    assert len(opened) == 3
    assert all(place.name.startswith("packed-") and place.is_dir() for place in cache_folder.iterdir())


def test_max_tokens_stops_an_endless_stream():
    closed = []

    def endless():
        try:
            number = 0
            while True:
                number += 1
                yield f"document {number} of a stream that does not end"
        finally:
            closed.append(number)

    found = Documents("stream", "s", lambda: [Part("stream", endless, False)])
    packed = pack.pack(found, Bytes(), context=16, max_tokens=50_000)
    assert 50_000 <= len(packed.train) < 50_100
    assert closed


def test_max_tokens_does_not_depend_on_grouping(monkeypatch):
    first = pack.pack(of(MANY, key="a"), Bytes(), context=16, max_tokens=3000)
    monkeypatch.setattr(pack, "GROUP_PIECES", 3)
    again = pack.pack(of(MANY, key="b"), Bytes(), context=16, max_tokens=3000)
    assert first.train.tobytes() == again.train.tobytes() and first.eval.tobytes() == again.eval.tobytes()


@settings(max_examples=30)
@given(st.text(alphabet="ab\n", max_size=200))
def test_pieces_are_complete_and_end_at_line_ends(text):
    limit = pack.PIECE_CHARS
    try:
        pack.PIECE_CHARS = 16
        pieces = list(pack._split_pieces(text))
    finally:
        pack.PIECE_CHARS = limit
    assert "".join(pieces) == text
    assert all(len(piece) <= 16 for piece in pieces)
    assert all(piece.endswith("\n") or "\n" not in piece for piece in pieces[:-1])


def test_an_error_while_writing_leaves_no_files(cache_folder):
    def broken():
        yield "fine"
        raise UsageError("line 2 is not JSON")

    with pytest.raises(UsageError, match="line 2"):
        pack.pack(Documents("x", "x", lambda: [Part("x", broken, False)]), Bytes(), context=4)
    assert list(cache_folder.iterdir()) == []


def test_an_unwritable_cache_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "file" / "below"))
    packed = pack.pack(of(MANY), Bytes(), context=16)
    assert len(split(packed.train)) > 300
    assert "continuing without it" in capsys.readouterr().err


def test_long_work_reports_progress(monkeypatch, capsys):
    monkeypatch.setattr(pack, "REPORT_EVERY_S", -1.0)
    pack.pack(of(MANY[:200], MANY[200:]), Bytes(), context=16)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("narrowgauge: encoding data (1 of 2): 200 documents")
    assert "encoded data: 400 documents" in lines[-1]


WORKER = """
    import os, sys, time
    from pathlib import Path
    from narrowgauge.data import documents, pack
    from narrowgauge.data.tokenizer import Bytes
    class Slow(Bytes):
        def encode_all(self, texts):
            Path(sys.argv[2]).joinpath(str(os.getpid())).touch()
            while not Path(sys.argv[3]).exists():
                time.sleep(0.01)
            return super().encode_all(texts)
    packed = pack.pack(documents.open_files(Path(sys.argv[1]), None), Slow(), 16)
    import hashlib
    print(hashlib.sha256(packed.train.tobytes()).hexdigest())
"""


@pytest.fixture
def start(tmp_path):
    """Starts processes that pack the same file once ``gate`` exists; each that encodes leaves its id in ``seen``."""
    path, seen, gate = tmp_path / "x.jsonl", tmp_path / "seen", tmp_path / "gate"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in MANY))
    seen.mkdir()
    with contextlib.ExitStack() as stack:

        def begin(errors=subprocess.PIPE):
            command = [sys.executable, "-c", textwrap.dedent(WORKER), str(path), str(seen), str(gate)]
            return stack.enter_context(child_processes.start(command, stdout=subprocess.PIPE, stderr=errors, text=True))

        yield begin, seen, gate


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_of_two_processes_encodes_and_the_other_waits(start, tmp_path):
    begin, seen, gate = start
    errors = [tmp_path / "errors-0", tmp_path / "errors-1"]
    with errors[0].open("w") as first, errors[1].open("w") as second:
        both = [begin(first), begin(second)]
    wait_for(lambda: sum("waiting for another process" in path.read_text() for path in errors) == 1)
    gate.touch()
    answers = [process.communicate(timeout=60)[0] for process in both]
    assert answers[0] == answers[1] != ""
    assert len(list(seen.iterdir())) == 1
    assert sum("waiting for another process" in path.read_text() for path in errors) == 1


def test_leftovers_of_a_killed_process_are_replaced(start, cache_folder):
    begin, seen, gate = start
    first = begin()
    wait_for(lambda: any(seen.iterdir()))
    os.kill(first.pid, signal.SIGKILL)
    first.wait(60)
    gate.touch()
    assert any(place.suffix == ".part" for place in cache_folder.iterdir())
    answer, error = begin().communicate(timeout=60)
    train = "".join(text + "\n\n" for text in MANY if not pack.is_held_out(text, 20))
    assert answer.strip() == hashlib.sha256(train.encode()).hexdigest(), error
    assert [place.name[:7] for place in cache_folder.iterdir()] == ["packed-"]


def test_memory_does_not_grow_with_the_data(tmp_path):
    path = tmp_path / "x.jsonl"
    with path.open("w") as file:
        for number in range(600):
            file.write(json.dumps({"text": f"{number} " + "word and word " * 8000}) + "\n")  # 67 MB in all
    tracemalloc.start()
    try:
        packed = pack.pack(documents.open_files(path, None), Bytes(), context=16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(packed.train) > 5e7
    assert peak < 25e6
