"""A byte-level byte-pair encoding (BPE), trained on the text that it encodes. The cache holds it and the tokens.

Any bytes can be encoded, because the first 256 tokens are the bytes. Training and encoding 10 MB take a few seconds,
once per text and vocabulary.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from narrowgauge.data import cache
from narrowgauge.data.cache import Array
from narrowgauge.data.corpus import Text
from narrowgauge.errors import UsageError

SMALLEST, LARGEST = 256, 1 << 16
"""Vocabulary sizes: only the bytes, and the range of uint16."""
TRAIN_BYTES = 1 << 26
"""Merges are learned from the start of a long text. More text hardly changes them, and takes more memory."""
CHUNK_BYTES = 1 << 17
CHUNKS_AT_ONCE = 64
"""Chunks that are encoded in parallel, by all threads."""


@dataclass(frozen=True)
class Encoded:
    """A text as tokens, and how to encode and decode more."""

    train: Array
    eval: Array
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def encode(text: Text, vocab: int) -> Encoded:
    """Train a byte-pair encoding on the training part of a text, and encode both parts.

    Args:
        text: The text.
        vocab: Maximum number of tokens.

    Raises:
        UsageError: The vocabulary is out of range, or the package tokenizers is missing.
    """
    if not SMALLEST <= vocab <= LARGEST:
        raise UsageError(f"--vocab {vocab}: text takes a vocabulary of {SMALLEST} (bytes) to {LARGEST} tokens")
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "this vocabulary needs the package tokenizers; install it, or use --vocab 256 or a .bin with --data"
        ) from None
    name = f"bpe-{text.key}-{vocab}"
    # Always parsed from its JSON, even if it was just trained, so that the first run has the tokenizer of later runs.
    content = cache.load_or_make_text(f"{name}.json", lambda: _train(text.train, vocab))
    tokenizer = tokenizers.Tokenizer.from_str(content)
    return encode_with(tokenizer, text, name, np.uint16)


def encode_with(tokenizer: Any, text: Text, name: str, dtype: DTypeLike) -> Encoded:
    """Encode both parts of a text with a tokenizer of the library ``tokenizers``. ``name`` is the name in the cache."""
    return Encoded(
        cache.load_or_make_array(f"{name}-train.bin", dtype, lambda: _encode(tokenizer, text.train, "train", dtype)),
        cache.load_or_make_array(f"{name}-eval.bin", dtype, lambda: _encode(tokenizer, text.eval, "eval", dtype)),
        lambda prompt: list(tokenizer.encode(prompt, add_special_tokens=False).ids),
        lambda tokens: str(tokenizer.decode(list(tokens))),
    )


def _train(text: Array, vocab: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = text[:TRAIN_BYTES]
    megabytes = len(text) / 1e6
    cache.print_status(f"learning a vocabulary of {vocab} tokens from {megabytes:.1f} MB of text (once, then cached)")
    start = time.perf_counter()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_split_chunks(text), trainer)
    cache.print_status(f"learned {tokenizer.get_vocab_size()} tokens in {time.perf_counter() - start:.1f} s")
    return str(tokenizer.to_str())


def _encode(tokenizer: Any, text: Array, split: str, dtype: DTypeLike) -> Iterator[Array]:
    start, done = time.perf_counter(), 0
    chunks = _split_chunks(text)
    while group := list(itertools.islice(chunks, CHUNKS_AT_ONCE)):
        for encoded in tokenizer.encode_batch_fast(group, add_special_tokens=False):
            done += len(encoded.ids)
            yield np.array(encoded.ids, dtype)
    seconds = time.perf_counter() - start
    cache.print_status(f"encoded {len(text) / 1e6:.1f} MB for {split} into {done} tokens in {seconds:.1f} s")


def _split_chunks(text: Array) -> Iterator[str]:
    """Split a text at line ends, so that no word is split. Invalid UTF-8 is replaced."""
    start = 0
    while start < len(text):
        piece = text[start : start + CHUNK_BYTES].tobytes()
        if start + len(piece) < len(text) and (cut := piece.rfind(b"\n")) >= 0:
            piece = piece[: cut + 1]
        start += len(piece)
        yield piece.decode("utf-8", errors="replace")
