"""Reads the records of a file for fine-tuning one by one: JSON objects, or the rows of a Parquet file.

    .jsonl  .jsonl.gz  .ndjson   one object per line
    .json  .json.gz              an array of objects, or one object per line
    .parquet                     one row per record; columns may hold lists and structures

A folder gives the records of all such files below it, in the order of their names. Each record comes with the place
where it was found, for error messages. Nothing in a file is ever executed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.data import documents, tables
from narrowgauge.errors import UsageError, one_line

Record = dict[str, Any]


def list_record_files(path: Path) -> list[Path]:
    """List the files that hold the records of a path.

    Args:
        path: A file or a folder.

    Raises:
        UsageError: A file is missing, empty, unreadable or of another type.
    """
    if not files.is_folder(path):
        found = [path]
    elif not (found := documents.list_files(path)):
        raise UsageError(f"{path} holds no .jsonl, .json or .parquet file; give such a file")
    for file in found:
        if not documents.is_document_file(file) or tables.is_csv(file):
            raise UsageError(f"{file}: expected a .jsonl, .jsonl.gz, .json or .parquet file; convert it to one of them")
        documents.refuse_wrong_type(file)
    return found


def read_records(file: Path) -> Iterator[tuple[str, Record]]:
    """Read the records of a file, each with its file and line, item or row.

    Args:
        file: One of the files of ``list_record_files``.

    Raises:
        UsageError: The file is damaged, or holds something that is not a record.
    """
    if file.name.lower().endswith(".parquet"):
        yield from _read_parquet_rows(file)
    elif tables.is_table(file) and tables.is_array(file):
        for number, item in enumerate(tables.read_items(file), 1):
            if not isinstance(item, dict):
                raise UsageError(f"{file} item {number} is {type(item).__name__}, not an object; write it as an object")
            yield f"{file} item {number}", item
    else:
        yield from documents.read_jsonl_records(file)


def _read_parquet_rows(file: Path) -> Iterator[tuple[str, Record]]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"{file} needs the package pyarrow; install it (pip install pyarrow)") from None
    number = 0
    try:
        with parquet.ParquetFile(file, memory_map=True) as table:
            for batch in table.iter_batches(documents.ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file} row {number}", row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is damaged or not a Parquet file ({one_line(error)}); write it again") from error
