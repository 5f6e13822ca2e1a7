"""Plain text: a UTF-8 file, or every text below a folder, as bytes. The last twentieth is for evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from narrowgauge import files
from narrowgauge.data import cache, corpus, file_type, tables
from narrowgauge.data.corpus import Text
from narrowgauge.data.source import DataSource
from narrowgauge.data.tokens import split_tail
from narrowgauge.errors import UsageError


def open_text(path: Path, context: int) -> Text:
    """Open the bytes of a text file, or of every text in a folder.

    Args:
        path: A file or a folder.
        context: Tokens in a sequence: the evaluation part holds at least one.

    Raises:
        UsageError: The file is binary or empty, or the folder holds no text.
    """
    texts = [path]
    if path.is_dir():
        texts = sorted(file for file in path.rglob("*") if _is_text(file, path))
        if not texts:
            raise UsageError(
                f"{path} holds no text and no .bin file; --data takes a text, a .bin of tokens or a folder"
            )
        if count := sum(tables.is_table(file) for file in texts):
            cache.print_status(f"{path}: {count} JSON files and tables among the texts are read as plain text")
    else:
        _refuse_binary(path)
    if not sum(file.stat().st_size for file in texts):
        raise UsageError(f"{path} is empty; give a text of at least {2 * (context + 1)} bytes")
    whole = np.memmap(path, np.uint8, mode="r") if path.is_file() else corpus.join_files(texts)
    train, evaluation = split_tail([whole], context)
    key = cache.fingerprint([files.resolve_path(file) for file in texts], "text", len(train[0]))
    return Text(train[0], evaluation[0], key)


def _refuse_binary(path: Path) -> None:
    if why := files.explain_unreadable(path):
        raise UsageError(f"cannot read {path} ({why}); give a text that can be read")
    with path.open("rb") as file:
        start = file.read(file_type.CHECKED_BYTES)
    if why := file_type.explain_not_text(start):
        raise UsageError(
            f"{path} {why}, where text was expected; give UTF-8 text, .jsonl, .json, .csv, .parquet or a .bin of tokens"
        )


def _is_text(file: Path, root: Path) -> bool:
    """Whether a file is not hidden and, by git's rule, has no zero byte near its start."""
    if any(part.startswith(".") for part in file.relative_to(root).parts) or not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return file_type.explain_not_text(stream.read(file_type.CHECKED_BYTES)) is None
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror}); make it readable or leave it out") from error


SOURCE = DataSource(
    "text",
    matches=lambda data: files.exists(files.expand_path(data)),
    open=lambda data, options: open_text(files.expand_path(data), options.context),
)
"""Any file or folder that no other source matches."""
