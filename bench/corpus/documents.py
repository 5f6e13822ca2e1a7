"""Documents of packages: their archives are read, and their files extracted, cleaned, checked and split."""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.corpus.clean import check_text, clean, split
from bench.corpus.errors import Dropped
from bench.corpus.extract import extract
from bench.corpus.packages import Package
from bench.corpus.paths import classify
from bench.corpus.progress import map_in_order, say
from bench.corpus.read import read_archive

Counts = dict[str, collections.Counter[str]]
"""For each package, the number of files or documents by the reason why they were dropped."""


@dataclass(frozen=True)
class Document:
    """A text, and where it is from."""

    text: str
    source: str
    path: str
    kind: str
    """prose or code."""

    @functools.cached_property
    def size(self) -> int:
        return len(self.text.encode())

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()


def read_packages(packages: Sequence[Package], archives: dict[str, Path], jobs: int) -> tuple[list[Document], Counts]:
    """Read the documents of all packages, in the order of the list, and count the files that were dropped."""
    tasks = [(package.name, archives[package.sha256]) for package in packages]
    documents: list[Document] = []
    counts: Counts = {}
    with map_in_order(read_package, tasks, jobs) as results:
        for number, (package, (found, count)) in enumerate(zip(packages, results, strict=True), 1):
            documents += found
            counts[package.name] = count
            megabytes = sum(len(document.text) for document in found) / 1e6
            say(f"read {number} of {len(packages)}: {package.name}, {len(found)} documents, {megabytes:.1f} MB")
    return documents, counts


def read_package(task: tuple[str, Path]) -> tuple[list[Document], collections.Counter[str]]:
    """Read the documents of one archive, and count the files by what happened to them."""
    name, archive = task
    documents: list[Document] = []
    count: collections.Counter[str] = collections.Counter()
    formats: dict[str, tuple[str | None, int]] = {}
    for path, content in read_archive(archive):
        count["files"] += 1
        try:
            if isinstance(content, Dropped):
                raise content
            kind, text = extract(path, content)
            text = clean(text, kind)
            check_text(text, kind)
            stem = path.rsplit("/", 1)[-1].partition(".")[0].lower()
            form, size = formats.setdefault(stem, (classify(path), len(text)))
            if form != classify(path) and 0.5 < len(text) / size < 2:  # as HTML and as Markdown, or as man and POD
                raise Dropped("another format")
        except Dropped as reason:
            count[str(reason)] += 1
            continue
        documents += [Document(piece, name, path, kind) for piece in split(text)]
    return documents, count
