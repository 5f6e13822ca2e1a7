"""A corpus that every machine has: the source code of Python's standard library, as bytes.

Files go to training or evaluation as a whole, by a hash of their path, so that no function is seen on both sides and
the split is the same on every machine with the same Python.
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
    # Generated tables (encodings is hex, pydoc_data one long page) are not what people write, and lib2to3 is going.
    # The library's tests stay: they are two thirds of its source, and a larger model needs them.
    {"encodings", "pydoc_data", "idlelib", "lib2to3", "__pycache__"}
    # Not the standard library: these come in with ``packages``.
    | {"site-packages", "dist-packages", "ensurepip"}
)
BLOCK_BYTES = 1 << 26
EVAL_EVERY = 20
"""One file in this many is held back for evaluation."""
ENTROPY_TOKENS = 1 << 24
"""Tokens an entropy is counted over: enough for three digits, and a second of work however long the file."""


@dataclass(frozen=True)
class Text:
    """Bytes of text to learn from and to be judged on."""

    train: Array
    """uint8, for training."""
    eval: Array
    """uint8, for evaluation."""
    key: str
    """A fingerprint of the files behind it: what is derived from the text is cached under this name."""


def load(packages: bool = False) -> Text:
    """The standard library's source; with ``packages`` also that of every installed package."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    if packages:
        roots += sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
    files = [(root, file) for root in roots for file in source_files(root)]
    paths = [file for _, file in files]
    held = [is_held_back(file.relative_to(root)) for root, file in files]
    train = [path for path, out in zip(paths, held, strict=True) if not out]
    evaluation = [path for path, out in zip(paths, held, strict=True) if out]
    if not train or not evaluation:
        raise UsageError(
            f"the corpus is Python's own source, but {roots[0]} holds {len(paths)} files of it; give a text with --data"
        )
    key = cache.fingerprint(paths, "corpus", EVAL_EVERY)
    return Text(
        cache.keep_array(f"corpus-{key}-train.bin", np.uint8, lambda: _blocks(train)),
        cache.keep_array(f"corpus-{key}-eval.bin", np.uint8, lambda: _blocks(evaluation)),
        key,
    )


def source_files(root: Path) -> list[Path]:
    """Every Python source below a folder, in an order that does not depend on the file system."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(file for file in found if file.is_file() and os.access(file, os.R_OK))


def is_held_back(relative: Path) -> bool:
    """Whether a file is for evaluation: a hash that no process salts decides."""
    digest = hashlib.blake2b(relative.as_posix().encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % EVAL_EVERY == 0


def join(files: Sequence[Path]) -> Array:
    """Texts of any number of files, end to end, as one memory-mapped array of bytes."""
    return cache.keep_array(f"text-{cache.fingerprint(files)}.bin", np.uint8, lambda: _blocks(files))


def unigram_entropy(tokens: Array) -> float:
    """Nats per token of a model that knows nothing but how often each token comes: -sum p log p."""
    if not len(tokens):
        raise UsageError("the entropy of no tokens at all is not defined; the data is empty")
    counts = np.bincount(tokens[:ENTROPY_TOKENS])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _blocks(files: Sequence[Path]) -> Iterator[Array]:
    for file in files:
        try:
            with file.open("rb") as stream:
                while block := stream.read(BLOCK_BYTES):
                    yield np.frombuffer(block, np.uint8)
        except OSError as error:
            raise UsageError(f"cannot read {file} ({error.strerror}); make it readable or leave it out") from error
