"""Packs documents into two long files of tokens in the cache, one for training and one for evaluation.

    for each document:   hash of its text  ->  training or evaluation;  encode;  append it and a separator

A document is in one split as a whole, and so is every copy of it. The split depends only on the document's own text, so
documents can be added or reordered without moving others. If too little is left for evaluation, a larger part is held
out: one document in 20, then 10, then 2. Each of these sets contains the ones before it. So after documents are added,
the evaluation set still holds none that was trained on. If there are so few documents that one split would not fill a
sequence (a single long one, for example), the end of all of them together is held out instead.

It takes one pass and a few MB of memory for any size. Both files appear in the cache together, or neither does.
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

HELD_OUT = (20, 10, 2)
"""One document in this many is held out. Each number divides the one before, so that the sets nest."""
FILES = ("train.bin", "eval.bin")
FACTS = "facts.json"
PIECE_CHARS = 1 << 17
"""Longer documents are encoded in pieces that end at a line end."""
GROUP_CHARS, GROUP_PIECES = 1 << 21, 4096
"""How much is encoded at once, by all threads."""
REPORT_EVERY_S = 10.0
FORMAT = 1
"""Version of the files, part of their key: a change makes them again."""


class Encoder(Protocol):
    """Encodes texts as tokens."""

    @property
    def vocab(self) -> int:
        """Number of tokens."""

    @property
    def key(self) -> str:
        """A fingerprint of the encoding, for the cache."""

    @property
    def separator(self) -> Array:
        """The tokens between two documents."""

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        """Encode texts, each as one array."""


@dataclass(frozen=True)
class Packed:
    """Documents as tokens, memory-mapped."""

    train: Array
    eval: Array
    key: str
    facts: dict[str, Any]


@dataclass
class _Progress:
    """What was packed so far: index 0 is training, 1 is evaluation."""

    documents: list[int] = field(default_factory=lambda: [0, 0])
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    empty: int = 0
    started: float = field(default_factory=time.monotonic)
    reported: float = field(default_factory=time.monotonic)

    def report(self, where: str, last: bool = False) -> None:
        """Print the progress every ten seconds, and at the end if that took over a second."""
        now = time.monotonic()
        if now - self.reported < REPORT_EVERY_S and not (last and now - self.started > 1):
            return
        self.reported = now
        done = f"{sum(self.documents):,} documents, {sum(self.tokens):,} tokens, {now - self.started:.0f} s"
        cache.print_status(f"encoded {where}: {done}" if last else f"encoding {where}: {done} so far")


def pack(documents: Documents, encoder: Encoder, context: int, max_tokens: int | None = None) -> Packed:
    """Encode documents, or load their tokens from the cache.

    Args:
        documents: The documents.
        encoder: Encodes their texts.
        context: Tokens in a sequence: each split must be longer.
        max_tokens: Stop after about this many training tokens.

    Returns:
        The tokens of both splits, memory-mapped.

    Raises:
        UsageError: The documents cannot be read, or are too few.
    """
    every: int | None
    for every in (*HELD_OUT, None):
        recipe = repr((FORMAT, documents.key, encoder.key, every, max_tokens))
        key = hashlib.blake2b(recipe.encode(), digest_size=12).hexdigest()
        make = functools.partial(_write, documents=documents, encoder=encoder, every=every, max_tokens=max_tokens)
        folder = cache.load_or_make_folder(f"packed-{key}", make)
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts["split"] == "by name" or min(facts["train_tokens"], facts["eval_tokens"]) > context:
            break
    else:
        return _hold_out_end(folder, encoder, context, key, facts, documents.name)
    return Packed(*_map(folder, encoder), key, facts)


def _map(folder: Path, encoder: Encoder) -> tuple[Array, Array]:
    train, evaluation = (cache.map_array(folder / name, dtype_for(encoder.vocab)) for name in FILES)
    return train, evaluation


def _hold_out_end(folder: Path, encoder: Encoder, context: int, key: str, facts: dict[str, Any], name: str) -> Packed:
    """Hold out the end of all documents together, if there are too few to hold out whole ones."""
    whole, _ = _map(folder, encoder)
    if len(whole) < 2 * (context + 1):
        raise UsageError(
            f"{name}: the {facts['documents']} documents here are {len(whole)} tokens, too few to hold out whole "
            f"documents, or their end, for a context of {context}; give more of them, a shorter --context, or a file "
            "with val in its name"
        )
    held = max(len(whole) // HELD_OUT[0], context + 1)
    known = {
        **facts,
        "train_tokens": len(whole) - held,
        "eval_tokens": held,
        "split": "the last tokens of all documents, which are too few to hold out a whole one",
    }
    return Packed(whole[:-held], whole[-held:], f"{key}-{held}", known)


def is_held_out(text: str, every: int | None) -> bool:
    """Whether a document is for evaluation: one in ``every``, by a hash of its text. None: no document is."""
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
            # An evaluation split on the Hub may be as long as the training split: a twentieth of the limit is enough.
            limit = max_tokens if max_tokens is None or not side else max(max_tokens // HELD_OUT[0], 1)
            counted = side or 0
            if limit is None or progress.tokens[counted] < limit:
                _pack_part(part, encoder, files, progress, every, side, limit, where)
        progress.report(documents.name, last=True)
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
    # Closed explicitly: an iterator that is not exhausted may hold a connection.
    with contextlib.closing(part.read()) as texts:
        for group in _group_pieces(texts, progress, every, side):
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
            progress.report(where)


def _group_pieces(
    texts: Iterator[str], progress: _Progress, every: int | None, side: int | None
) -> Iterator[list[tuple[str, int, bool]]]:
    """Yield groups of pieces to encode together, each with its split and whether it ends a document."""
    group: list[tuple[str, int, bool]] = []
    chars = 0
    for text in texts:
        if not text or text.isspace():
            progress.empty += 1
            continue
        to = int(is_held_out(text, every)) if side is None else side
        pieces = list(_split_pieces(text))
        for index, piece in enumerate(pieces):
            group.append((piece, to, index == len(pieces) - 1))
            chars += len(piece)
            if chars >= GROUP_CHARS or len(group) >= GROUP_PIECES:
                yield group
                group, chars = [], 0
    if group:
        yield group


def _split_pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = cut if cut > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]
