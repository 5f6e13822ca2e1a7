"""The default corpus, which every machine has: the source code of Python's standard library, as bytes.

Whole files are used for training or for evaluation, by a hash of their path. So no function is in both splits, and the
split is the same on every machine with the same Python.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from narrowgauge.data import cache
from narrowgauge.data.cache import Array
from narrowgauge.errors import UsageError

SKIPPED = frozenset(
    # Generated tables (encodings is hex, pydoc_data one long page) are not typical code, and lib2to3 is deprecated.
    # The library's tests are included: they are two thirds of its source, and a larger model needs them.
    {"encodings", "pydoc_data", "idlelib", "lib2to3", "__pycache__"}
    # Not the standard library: ``packages`` adds these.
    | {"site-packages", "dist-packages", "ensurepip"}
)
BLOCK_BYTES = 1 << 26
EVAL_EVERY = 20
"""One file in this many is held out for evaluation."""
ENTROPY_TOKENS = 1 << 24
"""Tokens from which an entropy is computed: enough for three digits, in one second for a file of any length."""
COUNTED_TOKENS = 1 << 16


@dataclass(frozen=True)
class Text:
    """Bytes of text for training and for evaluation."""

    train: Array
    """uint8, for training."""
    eval: Array
    """uint8, for evaluation."""
    key: str
    """A fingerprint of its files. What is derived from the text is cached under this name."""


def load(packages: bool = False) -> Text:
    """Load the source code of the standard library.

    Args:
        packages: Whether to add the source code of every installed package.

    Raises:
        UsageError: This Python comes without its source code.
    """
    roots = [Path(sysconfig.get_path("stdlib"))]
    if packages:
        roots += sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
    files = [(root, file) for root in roots for file in list_source_files(root)]
    paths = [file for _, file in files]
    held = [is_held_out(file.relative_to(root)) for root, file in files]
    train = [path for path, out in zip(paths, held, strict=True) if not out]
    evaluation = [path for path, out in zip(paths, held, strict=True) if out]
    if not train or not evaluation:
        raise UsageError(
            f"the corpus is Python's own source, but {roots[0]} holds {len(paths)} files of it; give a text with --data"
        )
    key = cache.fingerprint(paths, "corpus", EVAL_EVERY)
    return Text(
        cache.load_or_make_array(f"corpus-{key}-train.bin", np.uint8, lambda: _read_blocks(train)),
        cache.load_or_make_array(f"corpus-{key}-eval.bin", np.uint8, lambda: _read_blocks(evaluation)),
        key,
    )


def list_source_files(root: Path) -> list[Path]:
    """List every Python source file below a folder, sorted."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(file for file in found if file.is_file() and os.access(file, os.R_OK))


def is_held_out(relative: Path) -> bool:
    """Whether a file is for evaluation, by a hash of its path that is the same in every process."""
    digest = hashlib.blake2b(relative.as_posix().encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % EVAL_EVERY == 0


def join_files(files: Sequence[Path]) -> Array:
    """Concatenate files into one memory-mapped array of bytes, in the cache."""
    return cache.load_or_make_array(f"text-{cache.fingerprint(files)}.bin", np.uint8, lambda: _read_blocks(files))


def unigram_entropy(tokens: Array) -> float:
    """Compute the loss of the unigram baseline, which only knows token frequencies: -sum p log p, in nats per token."""
    if not len(tokens):
        raise UsageError("the data is empty: its entropy is not defined")
    counts = np.zeros(0, np.int64)
    for start in range(0, min(len(tokens), ENTROPY_TOKENS), COUNTED_TOKENS):  # as int64 these fit the processor's cache
        block = np.bincount(tokens[start : min(start + COUNTED_TOKENS, ENTROPY_TOKENS)], minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def _read_blocks(files: Sequence[Path]) -> Iterator[Array]:
    for file in files:
        try:
            with file.open("rb") as stream:
                while block := stream.read(BLOCK_BYTES):
                    yield np.frombuffer(block, np.uint8)
        except OSError as error:
            raise UsageError(f"cannot read {file} ({error.strerror}); make it readable or leave it out") from error
