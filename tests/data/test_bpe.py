"""The byte-pair encoding: any text round-trips, in fewer tokens than bytes, and it is trained once."""

import sys

import numpy as np
import pytest

from narrowgauge.data import bpe
from narrowgauge.data.corpus import Text
from narrowgauge.errors import UsageError

WORDS = b"def keep(self, name):\n    return self.kept[name]\n\n"


def as_text(train, evaluation=b"def other(self):\n    return 1\n", key="k"):
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(evaluation, np.uint8), key)


def test_tokens_decode_to_the_text_and_are_fewer_than_its_bytes():
    encoded = bpe.encode(as_text(WORDS * 200), 300)
    assert encoded.train.dtype == np.uint16
    assert encoded.decode(encoded.train.tolist()) == (WORDS * 200).decode()
    assert encoded.decode(encoded.eval.tolist()) == "def other(self):\n    return 1\n"
    assert len(encoded.train) < 0.5 * len(WORDS * 200)
    assert max(encoded.train.max(), encoded.eval.max()) < 300
    unseen = "größer ≠ 🚂\t\0"
    assert encoded.decode(encoded.encode(unseen)) == unseen


def test_chunks_end_at_line_ends_and_are_complete(monkeypatch):
    monkeypatch.setattr(bpe, "CHUNK_BYTES", 70)
    chunks = list(bpe._split_chunks(np.frombuffer(WORDS * 5, np.uint8)))
    assert "".join(chunks).encode() == WORDS * 5
    assert len(chunks) > 3
    assert all(chunk.endswith("\n") for chunk in chunks)
    unbroken = np.frombuffer(b"x" * 200, np.uint8)
    assert list(bpe._split_chunks(unbroken)) == ["x" * 70, "x" * 70, "x" * 60]


def test_the_encoding_is_trained_once_and_reported(capsys, monkeypatch):
    first = bpe.encode(as_text(WORDS * 50), 280)
    assert "learning a vocabulary of 280" in capsys.readouterr().err
    monkeypatch.setattr(bpe, "_train", None)
    again = bpe.encode(as_text(WORDS * 50), 280)
    assert capsys.readouterr().err == ""
    assert first.train.tolist() == again.train.tolist()
    assert first.encode("def x") == again.encode("def x")


def test_an_unwritable_cache_gives_the_same_tokens(monkeypatch, tmp_path):
    kept = bpe.encode(as_text(WORDS * 50), 280)
    (tmp_path / "file").touch()
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "file" / "below"))
    assert bpe.encode(as_text(WORDS * 50), 280).train.tolist() == kept.train.tolist()


@pytest.mark.parametrize("vocab", [255, 65537])
def test_vocabularies_out_of_range_are_refused(vocab):
    with pytest.raises(UsageError, match=f"--vocab {vocab}: text takes"):
        bpe.encode(as_text(WORDS), vocab)


def test_a_missing_package_is_a_one_line_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="package tokenizers"):
        bpe.encode(as_text(WORDS), 300)
