"""Texts out of JSON files and CSV tables, read piece by piece, so that a file of any size takes little memory.

    .json  .json.gz        an array of objects or of texts; or an object a line, as many tools call JSON lines
    .csv  .tsv  .csv.gz    a table whose first row names its columns; the comma may be ``;``, a tab or ``|``

A JSON file of another shape is refused with what to do: from plain text a model would learn brackets and field names.
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
"""Characters of one document: more is no document but a file of another shape."""
_SPACE = " \t\r\n"


def is_table(path: Path) -> bool:
    """Whether a file is JSON or a table, by its name."""
    return path.name.lower().endswith(JSON + CSV)


def is_csv(path: Path) -> bool:
    return path.name.lower().endswith(CSV)


def begins_an_array(path: Path) -> bool:
    """Whether a JSON file is one array; else it has an object a line, or is refused when it is read."""
    with _open(path) as file:
        return file.read(CHUNK).lstrip(_SPACE)[:1] == "["


def read_array(path: Path, wanted: str | None) -> Texts:
    """The texts of a JSON array of objects or texts."""
    field = wanted
    for number, item in enumerate(_items(path), 1):
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
    """The texts of one column of a table."""
    before = csv.field_size_limit(LARGEST)
    try:
        with _open(path) as file:
            header = file.readline(CHUNK)
            delimiter = max(",;\t|", key=header.count)
            names = next(csv.reader([header], delimiter=delimiter), [])
            field = choose_field(names, wanted, f"{path} line 1 (the names of its columns)")
            column = names.index(field)
            for row in csv.reader(file, delimiter=delimiter):
                if row:  # an empty line between two rows is none
                    yield row[column] if column < len(row) else ""
    except csv.Error as error:
        raise UsageError(f"{path} is not a table that can be read ({one_line(error)}); write it again") from None
    finally:
        csv.field_size_limit(before)


def _items(path: Path) -> Iterator[Any]:
    """The items of an array one by one: what is read and not yet an item is kept."""
    decoder = json.JSONDecoder()
    with _open(path) as file:
        text, place, number = file.read(CHUNK).lstrip(_SPACE)[1:], 0, 0
        while True:
            while place < len(text) and text[place] in _SPACE + ("," if number else ""):
                place += 1
            if place < len(text) and text[place] == "]":
                if (text[place + 1 :] + file.read(CHUNK)).strip(_SPACE):
                    raise UsageError(f"{path} goes on after its array; give an array, or an object a line")
                return
            try:
                if place == len(text):
                    raise ValueError("it ends within the array")
                item, place = decoder.raw_decode(text, place)
            except RecursionError:
                raise UsageError(f"{path} item {number + 1} is nested too deeply; give objects with a text") from None
            except ValueError as error:
                # Not an item, or not yet: twice as much is read each time, so that a long one is tried few times.
                more = "" if len(text) - place > LARGEST else file.read(max(CHUNK, len(text) - place))
                if not more:
                    raise UsageError(
                        f"{path} item {number + 1} is not JSON ({one_line(error)}); the file is truncated or damaged"
                    ) from None
                text, place = text[place:] + more, 0
                continue
            if not isinstance(item, str | dict):  # a number may not be whole yet, and is refused anyway
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
