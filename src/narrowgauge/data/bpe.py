"""A byte-level byte-pair encoding, trained once on the text it is for and kept, with the tokens, in the cache.

Any bytes can be encoded, because the 256 bytes are its first tokens. Training and encoding 10 MB take some seconds and
happen once per text and vocabulary.
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
"""The bytes alone; and what uint16 holds."""
TRAIN_BYTES = 1 << 26
"""Merges are learned from the beginning of a long text: beyond this they hardly change, and the memory does."""
CHUNK_BYTES = 1 << 17
CHUNKS_AT_ONCE = 64
"""Chunks that are encoded side by side, by as many threads as there are."""


@dataclass(frozen=True)
class Encoded:
    """A text as tokens, with the way there and back."""

    train: Array
    eval: Array
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def encode(text: Text, vocab: int) -> Encoded:
    """Train a byte-pair encoding of at most ``vocab`` tokens on the text's training part, and encode both parts."""
    if not SMALLEST <= vocab <= LARGEST:
        raise UsageError(f"a vocabulary of {vocab} tokens was asked for; a text takes {SMALLEST} (bytes) to {LARGEST}")
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "this vocabulary needs the package tokenizers; install it, or give --vocab 256 or a .bin with --data"
        ) from None
    name = f"bpe-{text.key}-{vocab}"
    # Through its text form whether or not it was kept: the tokenizer of the first run is that of all later ones.
    tokenizer = tokenizers.Tokenizer.from_str(cache.keep_text(f"{name}.json", lambda: _train(text.train, vocab)))
    return encode_with(tokenizer, text, name, np.uint16)


def encode_with(tokenizer: Any, text: Text, name: str, dtype: DTypeLike) -> Encoded:
    """Encode both parts of a text with any tokenizer of the library ``tokenizers``, kept under ``name``."""
    return Encoded(
        cache.keep_array(f"{name}-train.bin", dtype, lambda: _encode(tokenizer, text.train, "train", dtype)),
        cache.keep_array(f"{name}-eval.bin", dtype, lambda: _encode(tokenizer, text.eval, "eval", dtype)),
        lambda prompt: list(tokenizer.encode(prompt, add_special_tokens=False).ids),
        lambda tokens: str(tokenizer.decode(list(tokens))),
    )


def _train(text: Array, vocab: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = text[:TRAIN_BYTES]
    cache.say(f"learning a vocabulary of {vocab} tokens from {len(text) / 1e6:.1f} MB of text (once; then it is kept)")
    began = time.perf_counter()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_chunks(text), trainer)
    cache.say(f"learned {tokenizer.get_vocab_size()} tokens in {time.perf_counter() - began:.1f} s")
    return str(tokenizer.to_str())


def _encode(tokenizer: Any, text: Array, split: str, dtype: DTypeLike) -> Iterator[Array]:
    began, done = time.perf_counter(), 0
    chunks = _chunks(text)
    while group := list(itertools.islice(chunks, CHUNKS_AT_ONCE)):
        for encoded in tokenizer.encode_batch_fast(group, add_special_tokens=False):
            done += len(encoded.ids)
            yield np.array(encoded.ids, dtype)
    cache.say(f"encoded {len(text) / 1e6:.1f} MB for {split} into {done} tokens in {time.perf_counter() - began:.1f} s")


def _chunks(text: Array) -> Iterator[str]:
    """Pieces that end where a line does, so that no word is cut; bad UTF-8 is replaced."""
    start = 0
    while start < len(text):
        piece = text[start : start + CHUNK_BYTES].tobytes()
        if start + len(piece) < len(text) and (cut := piece.rfind(b"\n")) >= 0:
            piece = piece[: cut + 1]
        start += len(piece)
        yield piece.decode("utf-8", errors="replace")
