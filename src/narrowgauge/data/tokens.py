"""Token files, the ``.bin`` of nanoGPT and llm.c: memory-mapped, checked once, sampled by batch number.

    nanoGPT   headerless little-endian uint16
    llm.c     256 int32 (magic, version, token count, zeros), then the tokens:
              magic 20240520 version 1 uint16 (GPT-2), magic 20240801 version 7 uint32 (Llama 3)

A headerless file does not identify itself, so a ``.bin`` that starts like a file of another known type is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from narrowgauge import files
from narrowgauge.data import cache, file_type
from narrowgauge.data.cache import Array
from narrowgauge.data.documents import EVAL_WORDS, is_for_evaluation
from narrowgauge.data.source import DataSource
from narrowgauge.errors import UsageError

HEADER_INTS = 256
LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""llm.c's magic numbers of token files, each with its version and token dtype."""
LLMC_FAMILY = range(20240101, 20250000)
"""llm.c's magic numbers are dates. As two uint16 they hold a token beyond GPT-2's vocabulary: not a nanoGPT file."""
EVAL_SHARE = 0.05
TRAIN_WORDS = frozenset({"train", "training"})
SPLITS = ("train", "eval")
BLOCK_TOKENS = 1 << 24


class TokenData:
    """Tokens for training and evaluation, from which random windows are sampled."""

    def __init__(
        self, train: Sequence[Array], eval: Sequence[Array], vocab: int, name: str = "data", *, checked: bool = False
    ) -> None:
        """Hold the tokens of both splits.

        Args:
            train: The arrays for training. A window never spans two arrays.
            eval: The arrays for evaluation.
            vocab: Number of tokens of the model.
            name: The name of the data, for error messages.
            checked: Whether all tokens are known to be below ``vocab``.

        Raises:
            UsageError: A token is outside the vocabulary.
        """
        self.shards = {"train": tuple(train), "eval": tuple(eval)}
        self.vocab = vocab
        self.name = name
        for shards in self.shards.values() if not checked else ():
            for shard in shards:
                check_range(shard, vocab, name)

    def size(self, split: str) -> int:
        """Return how many tokens a split holds."""
        return sum(len(shard) for shard in self.shards[split])

    def count_windows(self, split: str, context: int) -> list[int]:
        """Count the windows of ``context`` tokens and a successor in each array of a split.

        Raises:
            UsageError: The split does not exist, or holds no window.
        """
        if split not in self.shards:
            raise UsageError(f"there is no split {split!r}; the splits are {' and '.join(SPLITS)}")
        counts = [max(0, len(shard) - context) for shard in self.shards[split]]
        if not any(counts):
            raise UsageError(
                f"{self.name}: {self.size(split)} tokens for {split} are too few for a context of {context}, which "
                f"takes {context + 1} of them in one piece; give more data or a shorter --context"
            )
        return counts

    def sample(self, step: int, split: str, batch: int, context: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample inputs and targets of shape (batch, context) at random positions: a pure function of the arguments."""
        ends = np.cumsum(self.count_windows(split, context))
        # numpy does not accept negative seeds.
        generator = np.random.default_rng([seed % (1 << 64), step, SPLITS.index(split)])
        rows = []
        for number in generator.integers(0, ends[-1], size=batch):
            index = int(np.searchsorted(ends, number, side="right"))
            start = int(number - (ends[index - 1] if index else 0))
            rows.append(self.shards[split][index][start : start + context + 1])
        window = torch.from_numpy(np.stack(rows).astype(np.int64))
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def holds_tokens(path: Path) -> bool:
    """Whether a path is a ``.bin`` file, or a folder with some."""
    return bool(_list_bins(path)) if path.is_dir() else _is_bin(path)


def open_tokens(path: Path, vocab: int, context: int) -> TokenData:
    """Open the tokens of a ``.bin`` file, or of a folder of them, split into training and evaluation.

    In a folder, files with val, eval or test in their names or their folder's name are for evaluation. If there are
    none, and for a single file, the last twentieth is.

    Args:
        path: A file or a folder.
        vocab: Number of tokens of the model.
        context: Tokens in a sequence.

    Raises:
        UsageError: A file is damaged, has another type, or holds a token outside the vocabulary.
    """
    shards = _list_bins(path) if path.is_dir() else [path]
    train: list[Array] = []
    evaluation: list[Array] = []
    for file in shards:
        array = read_bin(file)
        _check_file(file, array, vocab)
        words = file.relative_to(path).with_suffix("").as_posix() if path.is_dir() else file.stem
        (evaluation if is_for_evaluation(words) else train).append(array)
    if not train or not evaluation:
        train, evaluation = split_tail(train or evaluation, context)
    return TokenData(train, evaluation, vocab, str(path), checked=True)


def read_bin(path: Path) -> Array:
    """Map the tokens of one ``.bin`` file.

    Raises:
        UsageError: The file is empty, damaged or of another type.
    """
    if why := files.explain_unreadable(path):
        raise UsageError(f"cannot read {path} ({why}); give a .bin of tokens that can be read")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4 * HEADER_INTS)
    if not size:
        raise UsageError(f"{path} is empty; give a .bin of tokens, or write this one again")
    if what := file_type.recognize(start):
        raise UsageError(f"{path} is {what}, not a .bin of tokens; write the tokens as uint16 or give the text")
    first = int.from_bytes(start[:4], "little")
    if int.from_bytes(start[:4], "big") in LLMC:
        raise UsageError(f"{path} is an llm.c file in big-endian byte order; write it again in little-endian order")
    if first in LLMC_FAMILY and len(start) >= 4:
        return _read_llmc(path, start, size)
    if size % 2:
        raise UsageError(
            f"{path} has {size} bytes, not a whole number of uint16 tokens; it is truncated, or not tokens"
        )
    return np.memmap(path, "<u2", mode="r")


def check_range(tokens: Array, vocab: int, name: str) -> None:
    """Refuse tokens outside the vocabulary. On a GPU they fail an assertion that names no position or value."""
    if tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < vocab:
        return
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS]
        if int(block.max()) >= vocab:
            place = int(np.argmax(block >= vocab))
            raise UsageError(
                f"{name}: token {int(block[place])} at position {start + place} is outside the vocabulary of {vocab}; "
                f"give --vocab {int(block[place]) + 1} or more, or data made for this model"
            )


def split_tail(shards: Sequence[Array], context: int) -> tuple[list[Array], list[Array]]:
    """Split off the last twentieth of the tokens for evaluation, or as much as one window needs."""
    wanted = max(int(EVAL_SHARE * sum(len(shard) for shard in shards)), context + 1)
    train = list(shards)
    evaluation: list[Array] = []
    while wanted > 0 and train:
        last = train.pop()
        rest = max(0, len(last) - wanted)
        evaluation.insert(0, last[rest:])
        wanted -= len(last) - rest
        if rest:
            train.append(last[:rest])
    return train or [shards[0][:0]], evaluation


def _read_llmc(path: Path, start: bytes, size: int) -> Array:
    if len(start) < 4 * HEADER_INTS:
        raise UsageError(f"{path} starts like llm.c but its {size} bytes are less than a header; it is truncated")
    magic, version, count = (int(number) for number in np.frombuffer(start, "<i4")[:3])
    if magic not in LLMC:
        known = " or ".join(str(number) for number in LLMC)
        raise UsageError(
            f"{path} is an llm.c file with magic {magic}, not a token file (magic {known}); give a token file"
        )
    expected, dtype = LLMC[magic]
    if version != expected:
        raise UsageError(f"{path} is an llm.c token file of version {version}, expected {expected}; convert it")
    held, odd = divmod(size - len(start), np.dtype(dtype).itemsize)
    if held != count or odd:
        raise UsageError(
            f"the header of {path} says {count} tokens but it holds {held}; it is truncated or damaged: write it again"
        )
    if not count:
        raise UsageError(f"{path} has a header and no tokens; write it again")
    return np.memmap(path, dtype, mode="r", offset=len(start))


def _check_file(path: Path, tokens: Array, vocab: int) -> None:
    """Check the tokens of a file. The largest token of a long file is cached, since reading 20 GB takes minutes."""
    if len(tokens) <= BLOCK_TOKENS:
        check_range(tokens, vocab, str(path))
        return
    blocks = range(0, len(tokens), BLOCK_TOKENS)
    largest = cache.load_or_make_text(
        f"largest-{cache.fingerprint([files.resolve_path(path)])}.txt",
        lambda: str(max(int(tokens[start : start + BLOCK_TOKENS].max()) for start in blocks)),
    )
    if not largest.isdecimal() or int(largest) >= vocab:
        check_range(tokens, vocab, str(path))


def _list_bins(folder: Path) -> list[Path]:
    """List the ``.bin`` files of a folder and of its subfolders that are named for a split (train/, val/)."""
    found = [file for file in folder.iterdir() if file.is_file() and _is_bin(file)]
    for inner in folder.iterdir():
        if inner.is_dir() and inner.name.lower() in EVAL_WORDS | TRAIN_WORDS:
            found += [file for file in inner.iterdir() if file.is_file() and _is_bin(file)]
    return sorted(found)


def _is_bin(path: Path) -> bool:
    return path.suffix.lower() == ".bin"


def _holds_tokens(data: str) -> bool:
    path = files.expand_path(data)
    return files.exists(path) and holds_tokens(path)


SOURCE = DataSource(
    "tokens",
    matches=_holds_tokens,
    open=lambda data, options: open_tokens(files.expand_path(data), options.vocab, options.context),
)
"""A ``.bin`` file of tokens, or a folder with some."""
