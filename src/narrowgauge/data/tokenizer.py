"""A tokenizer of the user's: the ``tokenizer.json`` of the library ``tokenizers``, or a folder in which one lies.

What such a file says beside its vocabulary is for inference, and would spoil training data without a word: truncation
and padding are turned off, and nothing is put before or after a text but the token that ends a document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge import files
from narrowgauge.data import bpe
from narrowgauge.data.cache import Array
from narrowgauge.data.corpus import Text
from narrowgauge.errors import UsageError, one_line

FILE, CONFIGURATION = "tokenizer.json", "tokenizer_config.json"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end|>")
"""What the token that ends a text is called, where no configuration beside the file says it."""
LARGEST = 512 << 20
"""Bytes of a tokenizer: the largest known have some 30 million."""
BREAK = "\n\n"
"""What stands between two documents where no token can: an empty line."""


@dataclass(frozen=True)
class Bytes:
    """The bytes of a text are its tokens."""

    vocab: int = 256
    key: str = "bytes"

    @property
    def separator(self) -> Array:
        return np.frombuffer(BREAK.encode(), np.uint8)

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        return [np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and what is known of it."""

    inner: Any
    """That of the library."""
    vocab: int
    """One more than the largest token."""
    end: int | None
    """The token that ends a document."""
    key: str
    """A fingerprint of the file and of the end."""

    @property
    def separator(self) -> Array:
        if self.end is None:
            return self.encode_all([BREAK])[0]
        return np.array([self.end], dtype_for(self.vocab))

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        """The tokens of documents: one that spells "<|endoftext|>" holds these characters, not that token."""
        whole = [text.encode(errors="replace").decode() for text in texts]  # a lone surrogate is no text
        self.inner.encode_special_tokens = True
        try:
            encoded = self.inner.encode_batch_fast(whole, add_special_tokens=False)
        finally:
            self.inner.encode_special_tokens = False
        return [np.array(one.ids, dtype_for(self.vocab)) for one in encoded]

    def encode(self, prompt: str) -> list[int]:
        return list(self.inner.encode(prompt, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))


def open_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer."""
    try:
        import tokenizers
    except ImportError:
        raise UsageError("--tokenizer needs the package tokenizers; install it (pip install tokenizers)") from None
    within = files.is_folder(path)
    file = path / FILE if within else path
    try:
        content = files.read(file, LARGEST)
    except UsageError as error:
        what = f"folder {path} holds no {FILE} that can be read" if within else str(error)
        raise UsageError(
            f"--tokenizer: {what}; give a {FILE}, or a folder that transformers' save_pretrained made"
        ) from None
    try:
        inner = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises Exception itself
        raise UsageError(f"--tokenizer: {file} is no tokenizer of the library tokenizers ({one_line(error)})") from None
    inner.no_truncation()
    inner.no_padding()
    vocabulary = inner.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UsageError(f"--tokenizer: {file} has no tokens; train it first")
    end = _end(inner, file.with_name(CONFIGURATION))
    key = hashlib.blake2b(content + repr(end).encode(), digest_size=12).hexdigest()
    return Tokenizer(inner, max(vocabulary.values()) + 1, end, key)


def encode_text(text: Text, tokenizer: Tokenizer) -> bpe.Encoded:
    """Encode a text that knows no documents. A "<|endoftext|>" spelled in it is that token: it has no other way."""
    name = f"tokens-{text.key}-{tokenizer.key}"
    return bpe.encode_with(tokenizer.inner, text, name, dtype_for(tokenizer.vocab))


def dtype_for(vocab: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type in which tokens of a vocabulary are kept."""
    return np.uint8 if vocab <= 1 << 8 else np.uint16 if vocab <= 1 << 16 else np.uint32


def _end(inner: Any, configuration: Path) -> int | None:
    names: tuple[Any, ...] = ENDS
    try:
        said = files.parse_json(files.read(configuration)).get("eos_token")
        names = (said.get("content") if isinstance(said, dict) else said, *ENDS)
    except (ValueError, AttributeError):
        pass  # without it, or where it is damaged, the usual names are tried
    found = (inner.token_to_id(name) for name in names if isinstance(name, str))
    return next((int(token) for token in found if token is not None), None)
