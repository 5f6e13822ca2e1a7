"""Documents of Hugging Face's ``datasets``: one saved by ``save_to_disk``, a folder it can read, or one by its name.

    FOLDER                        with dataset_info.json and state.json, or dataset_dict.json: as it was saved
    hf:FOLDER[:CONFIG][@SPLIT]    what load_dataset makes of a folder: CSV, Arrow, a README that names files
    hf:NAME[:CONFIG][@SPLIT]      from the Hub, streamed: nothing is downloaded beyond the documents that are kept

Splits with val or test in their names are for evaluation; with @SPLIT, only that one is read. A named dataset is asked
for once: what was kept of it is found in the cache, without a network, from then on.
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
from narrowgauge.errors import UsageError, one_line

PREFIX = "hf:"
MAX_TOKENS = 200_000_000
"""How much of a dataset by name is kept unless the user says otherwise: 400 MB of uint16."""
HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Name:
    """What ``hf:NAME[:CONFIG][@SPLIT]`` stands for."""

    dataset: str
    configuration: str | None
    split: str | None

    @property
    def folder(self) -> Path | None:
        """The folder, where the name is that of one."""
        path = files.named(self.dataset)
        return path if files.is_folder(path) else None


def parse(spec: str) -> Name:
    """Take a name apart."""
    whole, at, split = spec.removeprefix(PREFIX).partition("@")
    dataset, colon, configuration = whole.partition(":")
    if not dataset or (at and not split) or (colon and not configuration):
        raise UsageError(f"--data {spec}: expected hf:NAME[:CONFIG][@SPLIT], such as hf:roneneldan/TinyStories@train")
    return Name(dataset, configuration or None, split or None)


def is_saved(path: Path) -> bool:
    """Whether a folder is a dataset, or several by split, that ``save_to_disk`` wrote."""
    one = (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    return one or (path / "dataset_dict.json").is_file()


def open_saved(path: Path, field: str | None) -> Documents:
    """The documents of a dataset on the disk, memory-mapped by ``datasets``."""

    def parts() -> list[Part]:
        datasets = _library(str(path))
        with _one_line(f"{path} cannot be read as a dataset", "save it again with save_to_disk"):
            return parts_of(datasets.load_from_disk(str(path)), field, str(path))

    return Documents(str(path), _folder_key(path, field), parts)


def open_named(spec: str, field: str | None) -> Documents:
    """The documents of a dataset by its name, streamed when they are first needed."""
    name = parse(spec)
    folder = name.folder
    key = _folder_key(folder, field, name) if folder else cache.fingerprint([], "hub", name, field)

    def parts() -> list[Part]:
        datasets = _library(spec)
        is_offline = folder is None and bool(datasets.config.HF_HUB_OFFLINE)
        if folder is None and not is_offline and not _hub_is_there():
            raise UsageError(f"{spec}: the Hugging Face Hub cannot be reached; give a file or a folder with --data")
        advice = "check the name, the configuration and the split, and the network"
        with _one_line(f"{spec} cannot be loaded", advice):
            # Streaming makes no copy of it all; but only a download can be found where the user works offline.
            loaded = datasets.load_dataset(
                str(folder or name.dataset), name.configuration, split=name.split, streaming=not is_offline
            )
            return parts_of(loaded, field, spec)

    return Documents(spec, key, parts)


def parts_of(loaded: Any, field: str | None, name: str) -> list[Part]:
    """The splits of what ``datasets`` gave: one dataset or several by name, on the disk or streamed."""
    if not isinstance(loaded, Mapping):
        return [Part(name, _reader(loaded, field, name), False)]
    if not loaded:
        raise UsageError(f"{name} has no splits; save it again, or give a file with --data")
    return [
        Part(f"{name}@{split}", _reader(dataset, field, f"{name}@{split}"), is_for_evaluation(str(split)))
        for split, dataset in loaded.items()
    ]


def _reader(dataset: Any, wanted: str | None, where: str) -> Any:
    def read() -> Texts:
        with _one_line(f"{where} cannot be read", "check it with the package datasets"):
            rows = dataset
            names = rows.column_names  # None for a stream that has not said
            if names is not None:
                rows = rows.select_columns([choose_field(names, wanted, where)])
            for block in rows.iter(batch_size=ROWS):
                field = choose_field(block, wanted, where)
                for value in block[field]:
                    yield as_text(value, field, where)

    return read


@contextmanager
def _one_line(what: str, advice: str) -> Iterator[None]:
    """Turn whatever the library raises, from a broken file to a refused connection, into one line."""
    try:
        yield
    except (UsageError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(f"{what} ({one_line(error)}); {advice}") from error


def _library(what: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise UsageError(f"{what} needs the package datasets; install it (pip install datasets)") from None


def _folder_key(folder: Path, field: str | None, *more: object) -> str:
    found = sorted(files.whole(file) for file in folder.rglob("*") if file.is_file())
    return cache.fingerprint(found, "dataset", field, *more)


def _hub_is_there() -> bool:
    """Whether the Hub's name can be looked up, or a proxy will: the library itself takes 20 s to say that it cannot."""
    host = urlsplit(os.environ.get("HF_ENDPOINT") or HUB).hostname or ""
    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
