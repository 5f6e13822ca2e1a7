"""Selects documents, holds some of them out for evaluation, and writes both parts as JSON lines."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.corpus.documents import Counts, Document
from bench.corpus.errors import Failed
from bench.corpus.packages import Package

CODE_SHARE = 0.1
"""Share of the corpus that is source code. Prose fills the rest, and code fills what prose cannot."""
SOURCE_SHARE = 0.06
"""Largest share of one package, so that no dictionary dominates."""
EVAL_EVERY = 50
"""One document in this many is held out for evaluation, by its hash."""
SHARD_BYTES = 50_000_000
"""Size of a file of training documents."""
README = """\
Texts of Debian and PyPI packages, collected by bench/corpus of narrowgauge. about.json lists the packages and
what was left out. Every text has the licence of its package, which this folder does not repeat.
"""
"""With a file that is not JSON in the folder, `narrowgauge train --data FOLDER` does not read about.json as data."""


def select_documents(documents: Iterable[Document], size: int, counts: Counts) -> list[Document]:
    """Order documents by their hash and take them until the size is reached: prose first, then code."""
    ordered = sorted(documents, key=lambda document: document.digest)
    from_source: collections.Counter[str] = collections.Counter()
    sizes = {"prose": 0, "code": 0}
    taken = []
    code = sum(document.size for document in ordered if document.kind == "code")
    for kind in ("prose", "code"):
        limit = size - min(code, int(size * CODE_SHARE)) if kind == "prose" else size - sizes["prose"]
        for document in ordered:
            if document.kind != kind:
                continue
            if sizes[kind] + document.size > limit:
                counts[document.source]["beyond the size"] += 1
            elif from_source[document.source] + document.size > size * SOURCE_SHARE:
                counts[document.source]["beyond the share of a package"] += 1
            else:
                sizes[kind] += document.size
                from_source[document.source] += document.size
                taken.append(document)
    return sorted(taken, key=lambda document: document.digest)


def is_held_out(document: Document) -> bool:
    """Whether a document is for evaluation. The order is by the start of the hash, so this uses its end."""
    return int.from_bytes(document.digest[-8:], "big") % EVAL_EVERY == 0


def write_corpus(
    documents: Sequence[Document],
    packages: Sequence[Package],
    counts: Counts,
    folder: Path,
) -> dict[str, Any]:
    """Write the documents and about.json. Returns what that says."""
    if not documents:
        raise Failed("no document is left; give a larger --size")
    parts: dict[str, list[Document]] = {"train": [], "eval": []}
    for document in documents:
        parts["eval" if is_held_out(document) else "train"].append(document)
    total = hashlib.sha256()
    names = []
    for name, part in parts.items():
        for number, shard in enumerate(split_shards(part) if name == "train" else [part]):
            names.append(f"{name}-{number:02}.jsonl" if name == "train" else f"{name}.jsonl")
            with (folder / names[-1]).open("wb") as file:
                for one in shard:
                    record = {"text": one.text, "source": one.source, "path": one.path, "kind": one.kind}
                    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
                    file.write(line)
                    total.update(line)
    sizes = collections.Counter[tuple[str, str]]()
    taken = collections.Counter[str]()
    for one in documents:
        sizes[one.source, one.kind] += one.size
        taken[one.source] += 1
    prose = sum(size for (_, kind), size in sizes.items() if kind == "prose")
    about = {
        "sha256": total.hexdigest(),
        "documents": len(documents),
        "eval_documents": len(parts["eval"]),
        "bytes": sum(sizes.values()),
        "prose_bytes": prose,
        "prose_share": round(prose / sum(sizes.values()), 4),
        "files": names,
        "sources": {
            package.name: {
                "registry": package.registry,
                "version": package.version,
                "documents": taken[package.name],
                "prose_bytes": sizes[package.name, "prose"],
                "code_bytes": sizes[package.name, "code"],
                "files": counts[package.name].pop("files", 0),
                "dropped": dict(sorted(counts[package.name].items())),
            }
            for package in packages
        },
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    (folder / "README.txt").write_text(README)
    return about


def split_shards(documents: Sequence[Document]) -> Iterator[list[Document]]:
    shard: list[Document] = []
    size = 0
    for document in documents:
        if shard and size + document.size > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(document)
        size += document.size
    if shard:
        yield shard
