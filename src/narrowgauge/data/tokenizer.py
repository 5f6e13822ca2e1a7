"""The user's tokenizer: a ``tokenizer.json`` of the library ``tokenizers``, or a folder that holds one.

Such a file also holds settings for inference, which would silently damage training data. So truncation and padding are
disabled, and nothing is added to a text except the token that ends a document.
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
"""Usual names of the token that ends a text, for a tokenizer without a configuration file."""
LARGEST = 512 << 20
"""Maximum size of a tokenizer in bytes. The largest known ones have about 30 million."""
BREAK = "\n\n"
"""Separates two documents if there is no end token: an empty line."""


@dataclass(frozen=True)
class Bytes:
    """An encoder whose tokens are the bytes of a text."""

    vocab: int = 256
    key: str = "bytes"

    @property
    def separator(self) -> Array:
        return np.frombuffer(BREAK.encode(), np.uint8)

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        return [np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts]


@dataclass(frozen=True)
class Tokenizer:
    """The user's tokenizer."""

    inner: Any
    """The tokenizer of the library."""
    vocab: int
    """The largest token plus one."""
    end: int | None
    """The token that ends a document."""
    key: str
    """A fingerprint of the file and the end token."""

    @property
    def separator(self) -> Array:
        if self.end is None:
            return self.encode_all([BREAK])[0]
        return np.array([self.end], dtype_for(self.vocab))

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        """Encode documents. The characters "<|endoftext|>" in a text are encoded as characters, not as the token."""
        whole = [text.encode(errors="replace").decode() for text in texts]  # replaces lone surrogates
        self.inner.encode_special_tokens = True
        try:
            encoded = self.inner.encode_batch_fast(whole, add_special_tokens=False)
        finally:
            self.inner.encode_special_tokens = False
        return [np.array(one.ids, dtype_for(self.vocab)) for one in encoded]

    def encode(self, prompt: str) -> list[int]:
        """Encode a prompt. Special tokens in it are encoded as such."""
        return list(self.inner.encode(prompt, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, special ones included."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))


def open_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.

    Args:
        path: A ``tokenizer.json``, or a folder that holds one.

    Raises:
        UsageError: The file cannot be read, is not a tokenizer, or has no tokens.
    """
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
        reason = one_line(error)
        raise UsageError(f"--tokenizer: {file} is not a tokenizer of the library tokenizers ({reason})") from None
    inner.no_truncation()
    inner.no_padding()
    vocabulary = inner.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise UsageError(f"--tokenizer: {file} has no tokens; train it first")
    end = _find_end(inner, file.with_name(CONFIGURATION))
    key = hashlib.blake2b(content + repr(end).encode(), digest_size=12).hexdigest()
    return Tokenizer(inner, max(vocabulary.values()) + 1, end, key)


def encode_text(text: Text, tokenizer: Tokenizer) -> bpe.Encoded:
    """Encode plain text, which is not divided into documents. The characters "<|endoftext|>" in it are the token."""
    name = f"tokens-{text.key}-{tokenizer.key}"
    return bpe.encode_with(tokenizer.inner, text, name, dtype_for(tokenizer.vocab))


def dtype_for(vocab: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest dtype for the tokens of a vocabulary."""
    return np.uint8 if vocab <= 1 << 8 else np.uint16 if vocab <= 1 << 16 else np.uint32


def _find_end(inner: Any, configuration: Path) -> int | None:
    names: tuple[Any, ...] = ENDS
    try:
        given = files.parse_json(files.read(configuration)).get("eos_token")
        names = (given.get("content") if isinstance(given, dict) else given, *ENDS)
    except (ValueError, AttributeError):
        pass  # no configuration, or a damaged one: the usual names are tried
    found = (inner.token_to_id(name) for name in names if isinstance(name, str))
    return next((int(token) for token in found if token is not None), None)
