"""Documents: reads texts one by one from JSON lines and Parquet files, with only a few of them in memory.

    .jsonl  .jsonl.gz   one object per line, with the text in one of its fields
    .parquet            one row per document, with the text in one of its columns
    .json  .csv  .tsv   arrays and tables (tables.py)

The field is ``text``, else ``content``, else the one that the user names. Empty and null texts are skipped. Any other
unexpected content is an error with the file, the line and what was found there.
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
from narrowgauge.data.source import DataSource
from narrowgauge.errors import UsageError, one_line

Texts = Generator[str, None, None]
ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".parquet")
"""Files that always hold documents. JSON files and tables only do if a folder holds nothing else."""
EVAL_WORDS = frozenset({"val", "valid", "validation", "eval", "test"})
"""A file, folder or split with one of these words in its name is for evaluation."""
LINE_BYTES = 1 << 28
"""Maximum length of a line. A longer one means that the file has no lines."""
ROWS = 256
"""Rows of a table that are read at once: a few MB."""

_EXPECTED_LINES = "the file is truncated or damaged, or it is neither an array nor one object per line"

orjson: Any
try:
    import orjson
except ImportError:
    orjson = None


@dataclass(frozen=True)
class Part:
    """Documents from one file or one split."""

    name: str
    read: Callable[[], Texts]
    for_evaluation: bool
    """According to its name. If this is the same for all parts, single documents are held out instead."""


@dataclass(frozen=True)
class Documents:
    """Documents that are not read yet."""

    name: str
    """The name that the user gave, for messages."""
    key: str
    """A fingerprint of the content. What is made from the documents is cached under this name."""
    open: Callable[[], Sequence[Part]]
    """Finds the parts. It is only called if nothing is in the cache, since it may need a network."""
    default_max_tokens: int | None = None
    """How many tokens to read if the user gives no limit. None: all."""


def is_document_file(path: Path) -> bool:
    """Whether a file holds documents, by its name."""
    return path.name.lower().endswith(ENDINGS) or tables.is_table(path)


def list_files(folder: Path) -> list[Path]:
    """List the files of documents below a folder, without hidden ones.

    A folder of source code may also have JSON files and tables. They only count if there is nothing else.
    """
    found = (path for path in folder.rglob("*") if path.is_file())
    seen = sorted(path for path in found if not any(p.startswith(".") for p in path.relative_to(folder).parts))
    if seen and all(is_document_file(path) for path in seen):
        return seen
    return [path for path in seen if path.name.lower().endswith(ENDINGS)]


def open_files(path: Path, field: str | None) -> Documents:
    """Open the documents of one file, or of all files of documents below a folder.

    Args:
        path: A file or a folder.
        field: The field that holds the text, or None for ``text`` or ``content``.

    Raises:
        UsageError: A file is empty or unreadable, or its content does not match its name.
    """
    found = list_files(path) if path.is_dir() else [path]
    for file in found:
        refuse_wrong_type(file)
    key = cache.fingerprint([files.resolve_path(file) for file in found], "documents", field)

    def parts() -> list[Part]:
        others = sum(other.is_file() for other in path.rglob("*")) - len(found) if path.is_dir() else 0
        if others:
            cache.print_status(f"{path}: reading {len(found)} files of documents, ignoring {others} others")
        return [Part(str(file), _make_reader(file, field), is_for_evaluation(_within(file, path))) for file in found]

    return Documents(str(path), key, parts)


def is_for_evaluation(name: str) -> bool:
    """Whether the name of a file, folder or split means that it is for evaluation."""
    return not EVAL_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def read_jsonl_records(path: Path) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Read the objects of a file with one JSON object per line, each with its file and line for error messages."""
    for number, line in enumerate(_read_lines(path), 1):
        if line and not line.isspace():
            where = f"{path} line {number}"
            yield where, _parse(line, where)


def read_jsonl(path: Path, wanted: str | None) -> Texts:
    """Read the texts of a file with one JSON object per line."""
    field = wanted
    for where, record in read_jsonl_records(path):
        if field is None or field not in record:
            field = choose_field(record, field, where)
        yield as_text(record[field], field, where)


def read_parquet(path: Path, wanted: str | None) -> Texts:
    """Read the texts of one column of a Parquet file."""
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
                raise UsageError(f"{path}: column {field!r} holds {kind}, not text; name another column by --field")
            for batch in file.iter_batches(ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield as_text(value, field, str(path))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged or not a Parquet file ({one_line(error)}); write it again") from error


def _make_reader(file: Path, field: str | None) -> Callable[[], Texts]:
    name = file.name.lower()
    read: Callable[[Path, str | None], Texts] = read_jsonl
    if name.endswith(".parquet"):
        read = read_parquet
    elif tables.is_csv(file):
        read = tables.read_csv
    elif tables.is_table(file) and tables.is_array(file):
        read = tables.read_array
    return lambda: read(file, field)


def _within(file: Path, root: Path) -> str:
    """Return a file's path below the given folder: the names of parent folders must not decide its split."""
    return file.relative_to(root).as_posix() if root.is_dir() else file.name


def refuse_wrong_type(file: Path) -> None:
    """Refuse a file that is empty or unreadable, or whose content does not match its name."""
    if why := files.explain_unreadable(file):
        raise UsageError(f"cannot read {file} ({why}); make it readable or leave it out")
    with file.open("rb") as stream:
        start = stream.read(16)
    if not start:
        raise UsageError(f"{file} is empty; write it again or leave it out")
    name, what = file.name.lower(), file_type.recognize(start)
    expected = {".parquet": "a Parquet file", ".gz": "a gzip archive"}.get(Path(name).suffix)
    if what != expected:
        found = f"{what}," if what else "damaged or"
        wanted = expected or ("a table" if tables.is_csv(file) else "JSON" if tables.is_table(file) else "JSON lines")
        raise UsageError(f"{file} is {found} not {wanted}; write it again or correct its name")


def _read_lines(path: Path) -> Generator[bytes, None, None]:
    packed = path.name.lower().endswith(".gz")
    try:
        with cast(BinaryIO, gzip.open(path)) if packed else path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES + 1):
                number += 1
                if len(line) > LINE_BYTES:
                    raise UsageError(f"{path} line {number} is longer than {LINE_BYTES >> 20} MB; not JSON lines")
                yield line if number > 1 else line.removeprefix(b"\xef\xbb\xbf")
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path} ({one_line(error)}); it is truncated or damaged") from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    record: Any = None
    if orjson is not None:
        with suppress(ValueError):
            record = orjson.loads(line)
    if record is None:
        # orjson is stricter than json (NaN, lone surrogates). What json accepts is accepted with and without orjson.
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not JSON ({one_line(error)}); {_EXPECTED_LINES}") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where} is {type(record).__name__}, not an object with a field for the text")
    return record


def _holds_documents(data: str) -> bool:
    path = files.expand_path(data)
    if files.is_folder(path):
        return bool(list_files(path))
    return files.exists(path) and is_document_file(path)


SOURCE = DataSource(
    "documents",
    matches=_holds_documents,
    open=lambda data, options: open_files(files.expand_path(data), options.field),
)
"""Files of documents, and folders of them."""
