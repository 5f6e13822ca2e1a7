"""Documents of Hugging Face's ``datasets``: saved by ``save_to_disk``, in a folder that it can read, or on the Hub.

    FOLDER                        with dataset_info.json and state.json, or dataset_dict.json: from save_to_disk
    hf:FOLDER[:CONFIG][@SPLIT]    what load_dataset reads from a folder: CSV, Arrow, a README that names files
    hf:NAME[:CONFIG][@SPLIT]      from the Hub, streamed: only the documents that are used are downloaded

Splits with val or test in their names are for evaluation. With @SPLIT, only that split is read. A dataset on the Hub is
read once. After that its documents are in the cache, and no network is needed.
"""

from __future__ import annotations

import importlib
import os
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from narrowgauge import files
from narrowgauge.data import cache
from narrowgauge.data.documents import ROWS, Documents, Part, Texts, is_for_evaluation
from narrowgauge.data.fields import as_text, choose_field
from narrowgauge.data.source import DataSource
from narrowgauge.errors import UsageError, one_line

PREFIX = "hf:"
MAX_TOKENS = 200_000_000
"""How much of a dataset on the Hub is read by default: 400 MB of uint16."""
HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Name:
    """A dataset's name: the parts of ``hf:NAME[:CONFIG][@SPLIT]``. Its repr is part of keys in the cache."""

    dataset: str
    configuration: str | None
    split: str | None

    @property
    def folder(self) -> Path | None:
        """The folder, if the name is the path of one."""
        path = files.expand_path(self.dataset)
        return path if files.is_folder(path) else None


def parse(spec: str) -> Name:
    """Parse ``hf:NAME[:CONFIG][@SPLIT]``."""
    whole, at, split = spec.removeprefix(PREFIX).partition("@")
    dataset, colon, configuration = whole.partition(":")
    if not dataset or (at and not split) or (colon and not configuration):
        raise UsageError(f"--data {spec}: expected hf:NAME[:CONFIG][@SPLIT], such as hf:roneneldan/TinyStories@train")
    return Name(dataset, configuration or None, split or None)


def resolve_name(spec: str) -> str:
    """Make the path in ``hf:FOLDER`` absolute. The name of a dataset on the Hub is unchanged."""
    name = parse(spec)
    rest = spec.removeprefix(PREFIX)[len(name.dataset) :]
    return spec if name.folder is None else f"{PREFIX}{files.resolve_path(name.folder)}{rest}"


def is_saved(path: Path) -> bool:
    """Whether ``save_to_disk`` wrote a folder: a dataset, or one per split."""
    one = (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    return one or (path / "dataset_dict.json").is_file()


def open_saved(path: Path, field: str | None) -> Documents:
    """Open the documents of a dataset that ``save_to_disk`` wrote.

    Args:
        path: The folder.
        field: The field that holds the text, or None for ``text`` or ``content``.
    """

    def parts() -> list[Part]:
        datasets = _import_datasets(str(path))
        with _shorten_errors(f"{path} cannot be read as a dataset", "save it again with save_to_disk"):
            return list_parts(datasets.load_from_disk(str(path)), field, str(path))

    return Documents(str(path), _make_folder_key(path, field), parts)


def open_named(spec: str, field: str | None) -> Documents:
    """Open the documents of ``hf:NAME[:CONFIG][@SPLIT]``. They are streamed when they are first needed.

    Args:
        spec: The name of a dataset on the Hub, or a folder that ``load_dataset`` can read.
        field: The field that holds the text, or None for ``text`` or ``content``.
    """
    name = parse(spec)
    folder = name.folder
    key = _make_folder_key(folder, field, name) if folder else cache.fingerprint([], "hub", name, field)

    def parts() -> list[Part]:
        datasets = _import_datasets(spec)
        is_offline = folder is None and bool(datasets.config.HF_HUB_OFFLINE)
        if folder is None and not is_offline and not can_reach(os.environ.get("HF_ENDPOINT") or HUB):
            raise UsageError(f"{spec}: the Hugging Face Hub cannot be reached; give a file or a folder with --data")
        advice = "check the name, the configuration and the split, and the network"
        with _shorten_errors(f"{spec} cannot be loaded", advice):
            # Streaming does not copy the whole dataset. But offline, only a complete download can be found.
            loaded = datasets.load_dataset(
                str(folder or name.dataset), name.configuration, split=name.split, streaming=not is_offline
            )
            return list_parts(loaded, field, spec)

    return Documents(spec, key, parts, default_max_tokens=MAX_TOKENS if folder is None else None)


def list_parts(loaded: Any, field: str | None, name: str) -> list[Part]:
    """List the splits of what ``datasets`` loaded: one dataset or several by name, on disk or streamed."""
    if not isinstance(loaded, Mapping):
        return [Part(name, _make_reader(loaded, field, name), False)]
    if not loaded:
        raise UsageError(f"{name} has no splits; save it again, or give a file with --data")
    return [
        Part(f"{name}@{split}", _make_reader(dataset, field, f"{name}@{split}"), is_for_evaluation(str(split)))
        for split, dataset in loaded.items()
    ]


def _make_reader(dataset: Any, wanted: str | None, where: str) -> Any:
    def read() -> Texts:
        with _shorten_errors(f"{where} cannot be read", "check it with the package datasets"):
            rows = dataset
            names = rows.column_names  # None for a stream whose columns are not known yet
            if names is not None:
                rows = rows.select_columns([choose_field(names, wanted, where)])
            for block in rows.iter(batch_size=ROWS):
                field = choose_field(block, wanted, where)
                for value in block[field]:
                    yield as_text(value, field, where)

    return read


@contextmanager
def _shorten_errors(what: str, advice: str) -> Iterator[None]:
    """Turn any error of the library, from a broken file to a refused connection, into one line."""
    try:
        yield
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(f"{what} ({one_line(error)}); {advice}") from error


def _import_datasets(what: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise UsageError(f"{what} needs the package datasets; install it (pip install datasets)") from None


def _make_folder_key(folder: Path, field: str | None, *more: object) -> str:
    found = sorted(files.resolve_path(file) for file in folder.rglob("*") if file.is_file())
    return cache.fingerprint(found, "dataset", field, *more)


def can_reach(endpoint: str) -> bool:
    """Whether DNS finds the Hub, or there is a proxy. The library itself takes 20 s to report that it cannot.

    Args:
        endpoint: The Hub's address.
    """
    host = urlsplit(endpoint).hostname or ""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _is_name(data: str) -> bool:
    if not data.startswith(PREFIX):
        return False
    parse(data)  # raises UsageError for an invalid name
    return True


def _is_saved_folder(data: str) -> bool:
    path = files.expand_path(data)
    return files.is_folder(path) and is_saved(path)


NAMED = DataSource(
    "documents",
    matches=_is_name,
    open=lambda data, options: open_named(data, options.field),
    prefix=PREFIX,
    resolve=resolve_name,
)
"""A dataset on the Hub, or a folder that ``load_dataset`` can read."""
SAVED = DataSource(
    "documents",
    matches=_is_saved_folder,
    open=lambda data, options: open_saved(files.expand_path(data), options.field),
)
"""A dataset that ``save_to_disk`` wrote."""
