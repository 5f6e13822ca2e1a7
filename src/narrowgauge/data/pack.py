"""Packs documents into two long files of tokens in the cache, one to train on and one to be judged on.

    for each document:   hash of its text  ->  training or evaluation;  encode;  append, and what ends a document

A document is on one side as a whole, and every copy of it is on the same side. Which side depends on nothing but its
own text, so more documents can be added, or their order changed, without one moving. Where a small set leaves too
little to evaluate on, a larger share is held back: one in 20, 10, 2. Each of these sets holds those before it, so that
what is evaluated on after more documents were added was not trained on before either. Where documents are so few that
one side would be left without a window (a single long one), the end of them all is held back instead.

One pass, a few MB in memory whatever the size; the files appear in the cache together or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from narrowgauge.data import cache
from narrowgauge.data.cache import Array
from narrowgauge.data.documents import Documents, Part
from narrowgauge.data.tokenizer import dtype_for
from narrowgauge.errors import UsageError

HELD_BACK = (20, 10, 2)
"""One document in so many is held back. Each divides the one before, which is what makes the sets nest."""
FILES = ("train.bin", "eval.bin")
FACTS = "facts.json"
PIECE_CHARS = 1 << 17
"""Longer documents are encoded in pieces that end where a line does."""
GROUP_CHARS, GROUP_PIECES = 1 << 21, 4096
"""How much is encoded at once, by as many threads as there are."""
SAY_EVERY_S = 10.0
FORMAT = 1
"""Counts changes of what is written for the same documents."""


class Encoder(Protocol):
    """Turns texts into tokens."""

    @property
    def vocab(self) -> int: ...
    @property
    def key(self) -> str: ...
    @property
    def separator(self) -> Array: ...
    def encode_all(self, texts: Sequence[str]) -> list[Array]: ...


@dataclass(frozen=True)
class Packed:
    """Documents as tokens, memory-mapped."""

    train: Array
    eval: Array
    key: str
    facts: dict[str, Any]


@dataclass
class _Progress:
    """What was packed so far: index 0 is training, 1 evaluation."""

    documents: list[int] = field(default_factory=lambda: [0, 0])
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    empty: int = 0
    began: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    def tell(self, where: str, last: bool = False) -> None:
        now = time.monotonic()
        if now - self.said < SAY_EVERY_S and not (last and now - self.began > 1):
            return
        self.said = now
        done = f"{sum(self.documents):,} documents, {sum(self.tokens):,} tokens, {now - self.began:.0f} s"
        cache.say(f"encoded {where}: {done}" if last else f"encoding {where}: {done} so far")


def pack(documents: Documents, encoder: Encoder, context: int, max_tokens: int | None = None) -> Packed:
    """The tokens of documents, from the cache where they are there; at most about ``max_tokens`` to train on."""
    every: int | None
    for every in (*HELD_BACK, None):
        recipe = repr((FORMAT, documents.key, encoder.key, every, max_tokens))
        key = hashlib.blake2b(recipe.encode(), digest_size=12).hexdigest()
        make = functools.partial(_write, documents=documents, encoder=encoder, every=every, max_tokens=max_tokens)
        folder = cache.keep_folder(f"packed-{key}", make)
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts["split"] == "by name" or min(facts["train_tokens"], facts["eval_tokens"]) > context:
            break
    else:
        return _cut(folder, encoder, context, key, facts, documents.name)
    return Packed(*_map(folder, encoder), key, facts)


def _map(folder: Path, encoder: Encoder) -> tuple[Array, Array]:
    train, evaluation = (cache.map_array(folder / name, dtype_for(encoder.vocab)) for name in FILES)
    return train, evaluation


def _cut(folder: Path, encoder: Encoder, context: int, key: str, facts: dict[str, Any], name: str) -> Packed:
    """Of so few documents that none can be held back whole, the end of them all is for evaluation."""
    whole, _ = _map(folder, encoder)
    if len(whole) < 2 * (context + 1):
        raise UsageError(
            f"{name}: the {facts['documents']} documents here are {len(whole)} tokens, too few to hold whole documents "
            f"back, or their end, for a context of {context}; give more of them, a shorter --context, or a file with "
            "val in its name"
        )
    held = max(len(whole) // HELD_BACK[0], context + 1)
    known = {
        **facts,
        "train_tokens": len(whole) - held,
        "eval_tokens": held,
        "split": "the last tokens of all documents, which are too few to hold one back whole",
    }
    return Packed(whole[:-held], whole[-held:], f"{key}-{held}", known)


def is_held_back(text: str, every: int | None) -> bool:
    """Whether a document is for evaluation; None: none is."""
    if every is None:
        return False
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % every == 0


def _write(folder: Path, documents: Documents, encoder: Encoder, every: int | None, max_tokens: int | None) -> None:
    parts = list(documents.open())
    by_name = len({part.for_evaluation for part in parts}) == 2
    progress = _Progress()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb", buffering=1 << 20)) for name in FILES]
        for number, part in enumerate(parts, 1):
            where = f"{documents.name} ({number} of {len(parts)})" if len(parts) > 1 else documents.name
            side = int(part.for_evaluation) if by_name else None
            # Of what is named for evaluation a twentieth is plenty; and a Hub's may be as long as its training part.
            limit = max_tokens if max_tokens is None or not side else max(max_tokens // HELD_BACK[0], 1)
            counted = side or 0
            if limit is None or progress.tokens[counted] < limit:
                _pack_part(part, encoder, files, progress, every, side, limit, where)
        progress.tell(documents.name, last=True)
    if not sum(progress.tokens):
        raise UsageError(f"{documents.name} holds no text: {progress.empty} empty documents; give some with text")
    facts = {
        "documents": sum(progress.documents),
        "eval_documents": progress.documents[1],
        "empty_documents": progress.empty,
        "train_tokens": progress.tokens[0],
        "eval_tokens": progress.tokens[1],
        "split": "by name" if by_name else f"one document in {every}, by a hash of its text",
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _pack_part(
    part: Part,
    encoder: Encoder,
    files: Sequence[BinaryIO],
    progress: _Progress,
    every: int | None,
    side: int | None,
    limit: int | None,
    where: str,
) -> None:
    separator = encoder.separator.astype(dtype_for(encoder.vocab), copy=False)
    # Closed by hand: an iterator that is left half-way may hold a connection.
    with contextlib.closing(part.read()) as texts:
        for group in _groups(texts, progress, every, side):
            encoded = encoder.encode_all([piece for piece, _, _ in group])
            for tokens, (_, to, is_last) in zip(encoded, group, strict=True):
                files[to].write(tokens.tobytes())
                progress.tokens[to] += len(tokens)
                if not is_last:
                    continue
                files[to].write(separator.tobytes())
                progress.tokens[to] += len(separator)
                progress.documents[to] += 1
                if limit is not None and progress.tokens[side or 0] >= limit:
                    return
            progress.tell(where)


def _groups(
    texts: Iterator[str], progress: _Progress, every: int | None, side: int | None
) -> Iterator[list[tuple[str, int, bool]]]:
    """Pieces to encode together, each with its side and whether it ends a document."""
    group: list[tuple[str, int, bool]] = []
    chars = 0
    for text in texts:
        if not text or text.isspace():
            progress.empty += 1
            continue
        to = int(is_held_back(text, every)) if side is None else side
        pieces = list(_pieces(text))
        for index, piece in enumerate(pieces):
            group.append((piece, to, index == len(pieces) - 1))
            chars += len(piece)
            if chars >= GROUP_CHARS or len(group) >= GROUP_PIECES:
                yield group
                group, chars = [], 0
    if group:
        yield group


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = cut if cut > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]
