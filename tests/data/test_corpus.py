"""The corpus: Python's own source, split by file, the same every time."""

import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.data import corpus
from narrowgauge.errors import UsageError


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library, with files in it that must not be read."""
    root = tmp_path / "lib"
    for index in range(60):
        (root / f"package{index % 3}").mkdir(parents=True, exist_ok=True)
        (root / f"package{index % 3}" / f"module{index}.py").write_text(f"value = {index}\n")
    for name in ("site-packages/other/a.py", "encodings/table.py", "package0/__pycache__/b.py", "package0/notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("not to be read\n")
    places = {"stdlib": root, "purelib": root / "site-packages", "platlib": root / "site-packages"}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(places[name]))
    return root


def test_every_source_is_in_one_of_the_splits(library):
    text = corpus.load()
    train, held = text.train.tobytes().decode().splitlines(), text.eval.tobytes().decode().splitlines()
    assert sorted(train + held) == sorted(f"value = {index}" for index in range(60))
    assert held
    assert len(held) < len(train) / 4


def test_the_split_is_reproducible_and_cached(library, cache_folder):
    first, again = corpus.load(), corpus.load()
    assert first.key == again.key
    assert first.train.tobytes() == again.train.tobytes()
    assert sorted(file.name for file in cache_folder.iterdir()) == [
        f"corpus-{first.key}-eval.bin",
        f"corpus-{first.key}-train.bin",
    ]


def test_a_changed_source_changes_the_key(library):
    before = corpus.load()
    (library / "package0" / "module0.py").write_text("value = 'another'\n")
    after = corpus.load()
    assert before.key != after.key
    assert b"another" in after.train.tobytes() + after.eval.tobytes()


def test_packages_are_added_with_the_option(library):
    text = corpus.load(packages=True)
    assert b"not to be read" in text.train.tobytes() + text.eval.tobytes()


def test_a_machine_without_sources_is_an_error_with_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "empty"))
    with pytest.raises(UsageError, match="--data"):
        corpus.load()


def test_the_real_library_is_a_corpus():
    files = corpus.list_source_files(Path(sysconfig.get_path("stdlib")))
    assert len(files) > 300
    assert files == sorted(files)
    share = sum(corpus.is_held_out(Path(file.name)) for file in files) / len(files)
    assert 0.02 < share < 0.1


def test_the_entropy_of_known_distributions():
    assert corpus.unigram_entropy(np.zeros(10, np.uint8)) == 0
    assert corpus.unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(math.log(256))
    assert corpus.unigram_entropy(np.array([0, 0, 0, 1], np.uint16)) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    )
    with pytest.raises(UsageError):
        corpus.unigram_entropy(np.empty(0, np.uint8))
