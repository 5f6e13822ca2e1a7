"""Plain text files and folders are opened as bytes; binary and empty ones are refused."""

import numpy as np
import pytest

from narrowgauge.data import text, tokens
from narrowgauge.errors import UsageError


def refusal(function, *arguments):
    with pytest.raises(UsageError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04 and so on" * 100, "PyTorch checkpoint, where text was expected"),
        ("UTF-16 text".encode("utf-16") * 100, "zero bytes"),
        (b"PAR1" + b"x" * 100, "Parquet"),
    ],
)
def test_a_binary_file_is_refused(tmp_path, content, words):
    (tmp_path / "x.txt").write_bytes(content)
    assert words in refusal(text.open_text, tmp_path / "x.txt", 8)


def test_text_files_and_folders_are_bytes(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 950 + b"y" * 50)
    assert not tokens.holds_tokens(file)
    opened = text.open_text(file, 8)
    assert isinstance(opened.train, np.memmap)
    assert (opened.train.tobytes(), opened.eval.tobytes()) == (b"x" * 950, b"y" * 50)
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.md").write_bytes(b"b" * 60)
    (folder / "deep" / "a.py").write_bytes(b"a" * 60)
    (folder / ".hidden").write_bytes(b"h" * 60)
    (folder / "picture").write_bytes(b"\x89PNG\0\0" * 20)
    opened = text.open_text(folder, 8)
    assert opened.train.tobytes() + opened.eval.tobytes() == b"b" * 60 + b"a" * 60


def test_empty_files_and_folders_are_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    assert "empty" in refusal(text.open_text, tmp_path / "empty.txt", 8)
    (tmp_path / "folder").mkdir()
    assert "holds no text" in refusal(text.open_text, tmp_path / "folder", 8)
