"""Documents: texts one by one out of JSON lines and Parquet files, with never more than a few of them in memory.

    .jsonl  .jsonl.gz   an object a line, the text in one of its fields
    .parquet            a row a document, the text in one of its columns
    .json  .csv  .tsv   arrays and tables (tables.py)

The field is ``text``, else ``content``, else the user names it. A text that is empty or null is passed over; anything
else that is not as it should be ends the reading with the file, the line and what was found there.
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from narrowgauge import files
from narrowgauge.data import cache, file_type, tables
from narrowgauge.data.fields import as_text, choose_field
from narrowgauge.errors import UsageError, one_line

Texts = Generator[str, None, None]
ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
"""Files that hold documents wherever they lie; JSON files and tables do where nothing else lies beside them."""
EVAL_WORDS = frozenset({"val", "valid", "validation", "eval", "test"})
"""A file, folder or split with one of these words in its name is for evaluation."""
LINE_BYTES = 1 << 28
"""A line longer than this is no line of JSON but a file without lines."""
ROWS = 256
"""Rows of a table that are turned into texts at once: some MB of them."""

_WHAT_LINES_ARE = "the file is truncated or damaged, or it is not an array and not an object a line"

orjson: Any
try:
    import orjson
except ImportError:
    orjson = None


@dataclass(frozen=True)
class Part:
    """Documents that lie together: a file, or a split."""

    name: str
    read: Callable[[], Texts]
    for_evaluation: bool
    """By its name. Where all parts or none are, documents are held back one by one."""


@dataclass(frozen=True)
class Documents:
    """Where texts come from."""

    name: str
    """As the user gave it, for messages."""
    key: str
    """A fingerprint of the content: what is made of the documents is cached under this name."""
    open: Callable[[], Sequence[Part]]
    """Finds the parts. Only called where nothing is in the cache: it may need a network."""


def is_file(path: Path) -> bool:
    """Whether a file is of documents, by its name."""
    return path.name.lower().endswith(ENDINGS) or tables.is_table(path)


def files_in(folder: Path) -> list[Path]:
    """The files of documents below a folder, hidden ones left out.

    A folder of source code has JSON files and tables, too: they count as documents where there is nothing else.
    """
    found = (path for path in folder.rglob("*") if path.is_file())
    seen = sorted(path for path in found if not any(p.startswith(".") for p in path.relative_to(folder).parts))
    if seen and all(is_file(path) for path in seen):
        return seen
    return [path for path in seen if path.name.lower().endswith(ENDINGS)]


def open_files(path: Path, field: str | None) -> Documents:
    """The documents of one file, or of all such files below a folder."""
    found = files_in(path) if path.is_dir() else [path]
    for file in found:
        _refuse_impostor(file)
    key = cache.fingerprint([files.whole(file) for file in found], "documents", field)

    def parts() -> list[Part]:
        others = sum(other.is_file() for other in path.rglob("*")) - len(found) if path.is_dir() else 0
        if others:
            cache.say(f"{path}: {len(found)} files of documents are read, {others} others left out")
        return [Part(str(file), _reader(file, field), is_for_evaluation(_within(file, path))) for file in found]

    return Documents(str(path), key, parts)


def is_for_evaluation(name: str) -> bool:
    """Whether what has this name is meant to be evaluated on."""
    return not EVAL_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def read_jsonl(path: Path, wanted: str | None) -> Texts:
    """The texts of a file with a JSON object a line."""
    field = wanted
    for number, line in enumerate(_lines(path), 1):
        if not line or line.isspace():
            continue
        where = f"{path} line {number}"
        record = _parse(line, where)
        if field is None or field not in record:
            field = choose_field(record, field, where)
        yield as_text(record[field], field, where)


def read_parquet(path: Path, wanted: str | None) -> Texts:
    """The texts of one column of a Parquet file."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"{path} needs the package pyarrow; install it (pip install pyarrow)") from None
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            field = choose_field(file.schema_arrow.names, wanted, str(path))
            kind = file.schema_arrow.field(field).type
            inner = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not (pyarrow.types.is_string(inner) or pyarrow.types.is_large_string(inner)):
                raise UsageError(f"{path}: column {field!r} holds {kind}, not text; name another one by --field")
            for batch in file.iter_batches(ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield as_text(value, field, str(path))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged or no Parquet file ({one_line(error)}); write it again") from error


def _reader(file: Path, field: str | None) -> Callable[[], Texts]:
    name = file.name.lower()
    read: Callable[[Path, str | None], Texts] = read_jsonl
    if name.endswith(".parquet"):
        read = read_parquet
    elif tables.is_csv(file):
        read = tables.read_csv
    elif tables.is_table(file) and tables.begins_an_array(file):
        read = tables.read_array
    return lambda: read(file, field)


def _within(file: Path, root: Path) -> str:
    """A file's path below the folder that was given: the user's other folders have no say in what it is for."""
    return file.relative_to(root).as_posix() if root.is_dir() else file.name


def _refuse_impostor(file: Path) -> None:
    """Refuse a file that is empty, unreadable, or of another kind than its name says."""
    if why := files.why_unreadable(file):
        raise UsageError(f"cannot read {file} ({why}); make it readable or leave it out")
    with file.open("rb") as stream:
        start = stream.read(16)
    if not start:
        raise UsageError(f"{file} is empty; write it again or leave it out")
    name, what = file.name.lower(), file_type.recognise(start)
    expected = {".parquet": "a Parquet file", ".gz": "a gzip archive"}.get(Path(name).suffix)
    if what != expected:
        found = f"{what}," if what else "damaged or"
        wanted = expected or ("a table" if tables.is_csv(file) else "JSON" if tables.is_table(file) else "JSON lines")
        raise UsageError(f"{file} is {found} not {wanted}; write it again or give it its right name")


def _lines(path: Path) -> Generator[bytes, None, None]:
    packed = path.name.lower().endswith(".gz")
    try:
        with cast(BinaryIO, gzip.open(path)) if packed else path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES + 1):
                number += 1
                if len(line) > LINE_BYTES:
                    raise UsageError(f"{path} line {number} is longer than {LINE_BYTES >> 20} MB; it is no JSON lines")
                yield line if number > 1 else line.removeprefix(b"\xef\xbb\xbf")
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path} ({one_line(error)}); it is truncated or damaged") from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    record: Any = None
    if orjson is not None:
        with suppress(ValueError):
            record = orjson.loads(line)
    if record is None:
        # What json takes counts (NaN, lone surrogates), whether or not orjson, which is stricter, is installed.
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not JSON ({one_line(error)}); {_WHAT_LINES_ARE}") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where} is {type(record).__name__}, not an object with a field for the text")
    return record
