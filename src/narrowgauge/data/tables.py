"""Reads texts from JSON files and CSV tables in chunks, so that a file of any size takes little memory.

    .json  .json.gz        an array of objects or texts; or one object per line, since many tools write JSON lines so
    .csv  .tsv  .csv.gz    a table whose first row names its columns; the delimiter may be ``,``, ``;``, a tab or ``|``

A JSON file with another structure is refused with advice. Read as plain text, it would teach a model brackets and field
names.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from narrowgauge.data.fields import as_text, choose_field
from narrowgauge.errors import UsageError, one_line

Texts = Generator[str, None, None]
JSON, CSV = (".json", ".json.gz"), (".csv", ".tsv", ".csv.gz", ".tsv.gz")
CHUNK = 1 << 20
LARGEST = 1 << 28
"""Maximum number of characters of a document. A longer one means that the file has another structure."""
_SPACE = " \t\r\n"


def is_table(path: Path) -> bool:
    """Whether a file is JSON or a table, by its name."""
    return path.name.lower().endswith(JSON + CSV)


def is_csv(path: Path) -> bool:
    """Whether a file is a table, by its name."""
    return path.name.lower().endswith(CSV)


def is_array(path: Path) -> bool:
    """Whether a JSON file is one array. Otherwise it has one object per line, or is refused when it is read."""
    with _open(path) as file:
        return file.read(CHUNK).lstrip(_SPACE)[:1] == "["


def read_array(path: Path, wanted: str | None) -> Texts:
    """Read the texts of a JSON array of objects or texts."""
    field = wanted
    for number, item in enumerate(read_items(path), 1):
        where = f"{path} item {number}"
        if isinstance(item, str) and wanted is None:
            yield item
        elif isinstance(item, dict):
            if field is None or field not in item:
                field = choose_field(item, field, where)
            yield as_text(item[field], field, where)
        else:
            raise UsageError(f"{where} is {type(item).__name__}, not an object with a field for the text")


def read_csv(path: Path, wanted: str | None) -> Texts:
    """Read the texts of one column of a table."""
    before = csv.field_size_limit(LARGEST)
    try:
        with _open(path) as file:
            header = file.readline(CHUNK)
            delimiter = max(",;\t|", key=header.count)
            names = next(csv.reader([header], delimiter=delimiter), [])
            field = choose_field(names, wanted, f"{path} line 1 (the names of its columns)")
            column = names.index(field)
            for row in csv.reader(file, delimiter=delimiter):
                if row:  # an empty line is not a row
                    yield row[column] if column < len(row) else ""
    except csv.Error as error:
        raise UsageError(f"{path} is not a table that can be read ({one_line(error)}); write it again") from None
    finally:
        csv.field_size_limit(before)


def read_items(path: Path) -> Iterator[Any]:
    """Read the items of an array one by one, keeping text that is not a complete item yet."""
    decoder = json.JSONDecoder()
    with _open(path) as file:
        text, place, number = file.read(CHUNK).lstrip(_SPACE)[1:], 0, 0
        while True:
            while place < len(text) and text[place] in _SPACE + ("," if number else ""):
                place += 1
            if place < len(text) and text[place] == "]":
                if (text[place + 1 :] + file.read(CHUNK)).strip(_SPACE):
                    raise UsageError(f"{path} has more text after its array; give an array, or one object per line")
                return
            try:
                if place == len(text):
                    raise ValueError("it ends within the array")
                item, place = decoder.raw_decode(text, place)
            except RecursionError:
                raise UsageError(f"{path} item {number + 1} is nested too deeply; give objects with a text") from None
            except ValueError as error:
                # Not a complete item. The text doubles each time, so that a long item is only tried a few times.
                more = "" if len(text) - place > LARGEST else file.read(max(CHUNK, len(text) - place))
                if not more:
                    raise UsageError(
                        f"{path} item {number + 1} is not JSON ({one_line(error)}); the file is truncated or damaged"
                    ) from None
                text, place = text[place:] + more, 0
                continue
            if not isinstance(item, str | dict):  # a number may be incomplete, but is refused anyway
                raise UsageError(
                    f"{path} item {number + 1} is {type(item).__name__}, not an object with a field for the text"
                )
            number += 1
            yield item


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    packed = path.name.lower().endswith(".gz")
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            yield io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 ({one_line(error)}); write it again as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path} ({one_line(error)}); it is truncated or damaged") from error
