"""Drops duplicates: equal documents, then near duplicates by their shingles, then paragraphs that were seen before."""

from __future__ import annotations

import collections
import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from bench.corpus.clean import SHORTEST
from bench.corpus.documents import Counts, Document
from bench.corpus.progress import map_in_order, say, track

SHINGLE = 8
"""Words of a shingle: a sequence of words at any position."""
SAMPLE_EVERY = 4
"""One shingle in this many is compared, by its hash."""
CONTAINED = 0.5
"""Share of shingles in earlier documents from which a document counts as a near duplicate."""
REPEATED_PARAGRAPH = 80
"""Characters from which a paragraph appears only once in the corpus."""
BOILERPLATE = 20
"""Number of documents from which a shorter paragraph is dropped at the start and the end of a document."""


def dedupe(documents: Sequence[Document], counts: Counts, jobs: int) -> list[Document]:
    """Drop equal documents, near duplicates and repeated paragraphs. Of several, the first one stays."""
    seen: set[bytes] = set()
    unique = []
    for document in documents:
        key = document.digest
        if key in seen:
            counts[document.source]["equal document"] += 1
        else:
            seen.add(key)
            unique.append(document)
    say(f"{len(documents)} documents, {len(documents) - len(unique)} of them equal to another")
    with map_in_order(sample_shingles, [document.text for document in unique], jobs) as samples:
        near = find_near_duplicates(list(track(samples, len(unique), "compared")))
    kept = []
    for document, is_near in zip(unique, near, strict=True):
        if is_near:
            counts[document.source]["near duplicate"] += 1
        else:
            kept.append(document)
    say(f"{len(unique) - len(kept)} near duplicates")
    return list(drop_repeated_paragraphs(kept, counts))


def sample_shingles(text: str) -> np.ndarray:
    """Hash the shingles of a text, and take those whose hash is a multiple of a number (Manber, 1994).

    The same shingles are taken from every text, so the share that two samples have in common is that of all shingles.
    Only letters and digits count: the same text may be marked up as HTML and as Markdown.
    """
    words = np.array([zlib.crc32(word.encode()) for word in re.findall(r"\w+", text.lower())], np.uint64)
    shingles = np.zeros(max(0, len(words) - SHINGLE + 1), np.uint64)
    for offset in range(SHINGLE):
        shingles = (shingles + words[offset : offset + len(shingles)]) * np.uint64(0x9E3779B97F4A7C15)
        shingles ^= shingles >> np.uint64(32)
    return np.unique(shingles[shingles % np.uint64(SAMPLE_EVERY) == 0])


def find_near_duplicates(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Find the documents of which at least half is in earlier ones.

    Other than a comparison of pairs (MinHash), this finds a chapter that is also in a whole manual, and a manual whose
    chapters are there already, which would be in both splits.
    """
    lengths = np.array([len(sample) for sample in samples], np.int64)
    owners = np.repeat(np.arange(len(samples)), lengths)
    _, first, groups = np.unique(
        np.concatenate([*samples, np.empty(0, np.uint64)]), return_index=True, return_inverse=True
    )
    is_known = owners[first][groups] < owners  # the first document with a shingle comes before this one
    known = np.bincount(owners, is_known, minlength=len(samples))
    return known >= CONTAINED * np.maximum(lengths, 1)


def drop_repeated_paragraphs(documents: Sequence[Document], counts: Counts) -> Iterator[Document]:
    """Drop paragraphs of prose that were seen before. Drop short ones that many documents have (navigation, empty
    sections) at the start and end of a document; elsewhere they are the terms of a list."""
    keys = [
        [hash_paragraph(paragraph) for paragraph in document.text.split("\n\n")] if document.kind == "prose" else []
        for document in documents
    ]
    often = collections.Counter(key for some in keys for key in set(some))
    seen: set[bytes] = set()
    for document, hashes in zip(documents, keys, strict=True):
        if document.kind != "prose":
            yield document
            continue
        kept: list[tuple[str, bool]] = []
        for paragraph, key in zip(document.text.split("\n\n"), hashes, strict=True):
            is_long = len(paragraph) >= REPEATED_PARAGRAPH
            if not is_long or key not in seen:
                kept.append((paragraph, not is_long and often[key] >= BOILERPLATE))
            if is_long:
                seen.add(key)
        while kept and kept[-1][1]:
            kept.pop()
        first = next((number for number, (_, is_boilerplate) in enumerate(kept) if not is_boilerplate), 0)
        text = "\n\n".join(paragraph for paragraph, _ in kept[first:])
        if len(text) >= SHORTEST and len(text) >= 0.3 * len(document.text):
            yield Document(text, document.source, document.path, document.kind)
        else:
            counts[document.source]["repeated paragraphs"] += 1


def hash_paragraph(paragraph: str) -> bytes:
    """Hash the letters and digits: the same paragraph may be marked up as Markdown and as HTML."""
    return hashlib.blake2b(re.sub(r"\W+", "", paragraph.lower()).encode(), digest_size=8).digest()
