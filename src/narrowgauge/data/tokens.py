"""Token files of the user's: text, nanoGPT's and llm.c's ``.bin``; memory-mapped, checked once, sampled by number.

    nanoGPT   headerless little-endian uint16
    llm.c     256 int32 (magic, version, token count, zeros), then the tokens:
              magic 20240520 version 1 uint16 (GPT-2), magic 20240801 version 7 uint32 (Llama 3)
    others    text: its bytes are the tokens, or the input of a byte-pair encoding

A headerless format cannot say what it is, so a ``.bin`` that begins like some other known thing is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from narrowgauge import files
from narrowgauge.data import cache, corpus, file_type, tables
from narrowgauge.data.cache import Array
from narrowgauge.data.corpus import Text
from narrowgauge.data.documents import EVAL_WORDS, is_for_evaluation
from narrowgauge.errors import UsageError

HEADER_INTS = 256
LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""llm.c's magic numbers of token files, each with its version and token type."""
LLMC_FAMILY = range(20240101, 20250000)
"""llm.c's magic numbers are dates. Read as two uint16, they hold a token beyond GPT-2's vocabulary: no nanoGPT file."""
EVAL_SHARE = 0.05
TRAIN_WORDS = frozenset({"train", "training"})
SPLITS = ("train", "eval")
BLOCK_TOKENS = 1 << 24


class TokenData:
    """Tokens to train on and to evaluate on, from which windows are drawn."""

    def __init__(
        self, train: Sequence[Array], eval: Sequence[Array], vocab: int, name: str = "data", *, checked: bool = False
    ) -> None:
        """Each split is one or more arrays; a window never spans two.

        Refuses tokens that ``vocab`` does not hold, unless they were ``checked`` or made for it.
        """
        self.shards = {"train": tuple(train), "eval": tuple(eval)}
        self.vocab = vocab
        self.name = name
        for shards in self.shards.values() if not checked else ():
            for shard in shards:
                check_range(shard, vocab, name)

    def size(self, split: str) -> int:
        """How many tokens a split holds."""
        return sum(len(shard) for shard in self.shards[split])

    def windows(self, split: str, context: int) -> list[int]:
        """How many windows of ``context`` tokens and their successors each array of a split holds."""
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
        """Inputs and targets (batch, context) at random places: a pure function of the arguments."""
        ends = np.cumsum(self.windows(split, context))
        # A negative seed is as good as any other, but numpy takes none.
        generator = np.random.default_rng([seed % (1 << 64), step, SPLITS.index(split)])
        rows = []
        for draw in generator.integers(0, ends[-1], size=batch):
            index = int(np.searchsorted(ends, draw, side="right"))
            start = int(draw - (ends[index - 1] if index else 0))
            rows.append(self.shards[split][index][start : start + context + 1])
        window = torch.from_numpy(np.stack(rows).astype(np.int64))
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def holds_tokens(path: Path) -> bool:
    """Whether a path is a ``.bin`` file or a folder with some; everything else is text."""
    if not files.exists(path):
        raise UsageError(
            f"there is no file or folder {str(path)!r}; --data takes a text, .jsonl, .json, .csv, .parquet, "
            "a .bin of tokens, a folder of them, or hf:NAME"
        )
    return bool(_bins(path)) if path.is_dir() else _is_bin(path)


def open_tokens(path: Path, vocab: int, context: int) -> TokenData:
    """The tokens of a ``.bin`` file, or of a folder of them, split into training and evaluation.

    In a folder, files with val, eval or test in their names, or in a folder called so, are for evaluation; where there
    are none, and in a single file, the last twentieth is.
    """
    shards = _bins(path) if path.is_dir() else [path]
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


def open_text(path: Path, context: int) -> Text:
    """The bytes of a text file, or of every text in a folder; the last twentieth is for evaluation."""
    texts = [path]
    if path.is_dir():
        texts = sorted(file for file in path.rglob("*") if _is_text(file, path))
        if not texts:
            raise UsageError(
                f"{path} holds no text and no .bin file; --data takes a text, a .bin of tokens or a folder"
            )
        if count := sum(tables.is_table(file) for file in texts):
            cache.say(f"{path}: {count} JSON files and tables among the texts are read as plain text")
    else:
        _refuse_binary(path)
    if not sum(file.stat().st_size for file in texts):
        raise UsageError(f"{path} is empty; give a text of at least {2 * (context + 1)} bytes")
    whole = np.memmap(path, np.uint8, mode="r") if path.is_file() else corpus.join(texts)
    train, evaluation = split_tail([whole], context)
    key = cache.fingerprint([files.whole(file) for file in texts], "text", len(train[0]))
    return Text(train[0], evaluation[0], key)


def _refuse_binary(path: Path) -> None:
    if why := files.why_unreadable(path):
        raise UsageError(f"cannot read {path} ({why}); give a text that can be read")
    with path.open("rb") as file:
        start = file.read(file_type.LOOK_BYTES)
    if why := file_type.why_no_text(start):
        raise UsageError(
            f"{path} {why}, where text was expected; give UTF-8 text, .jsonl, .json, .csv, .parquet or a .bin of tokens"
        )


def read_bin(path: Path) -> Array:
    """The tokens of one ``.bin`` file, memory-mapped; refused where the file is not what it should be."""
    if why := files.why_unreadable(path):
        raise UsageError(f"cannot read {path} ({why}); give a .bin of tokens that can be read")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4 * HEADER_INTS)
    if not size:
        raise UsageError(f"{path} is empty; give a .bin of tokens, or write this one again")
    if what := file_type.recognise(start):
        raise UsageError(f"{path} is {what}, not a .bin of tokens; write the tokens as uint16 or give the text")
    first = int.from_bytes(start[:4], "little")
    if int.from_bytes(start[:4], "big") in LLMC:
        raise UsageError(f"{path} is an llm.c file in big-endian byte order; write it again in little-endian order")
    if first in LLMC_FAMILY and len(start) >= 4:
        return _read_llmc(path, start, size)
    if size % 2:
        raise UsageError(f"{path} has {size} bytes, not a whole number of uint16 tokens; it is truncated or no tokens")
    return np.memmap(path, "<u2", mode="r")


def check_range(tokens: Array, vocab: int, name: str) -> None:
    """Refuse tokens beyond the vocabulary: a GPU would end the run in an assertion without place or value."""
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
    """Take the last twentieth of the tokens for evaluation, or as much as one window needs."""
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
        raise UsageError(f"{path} begins like llm.c but its {size} bytes are less than a header; it is truncated")
    magic, version, count = (int(number) for number in np.frombuffer(start, "<i4")[:3])
    if magic not in LLMC:
        known = " or ".join(str(number) for number in LLMC)
        raise UsageError(
            f"{path} is an llm.c file with magic {magic}, not of tokens (magic {known}); give a token file"
        )
    expected, dtype = LLMC[magic]
    if version != expected:
        raise UsageError(f"{path} is an llm.c token file of version {version}, where {expected} is known; convert it")
    held, odd = divmod(size - len(start), np.dtype(dtype).itemsize)
    if held != count or odd:
        raise UsageError(
            f"{path} says it has {count} tokens but holds {held}; it is truncated or damaged: write it again"
        )
    if not count:
        raise UsageError(f"{path} has a header and no tokens; write it again")
    return np.memmap(path, dtype, mode="r", offset=len(start))


def _check_file(path: Path, tokens: Array, vocab: int) -> None:
    """Check the tokens of a file; of a long one the largest is remembered, since to read 20 GB takes minutes."""
    if len(tokens) <= BLOCK_TOKENS:
        check_range(tokens, vocab, str(path))
        return
    blocks = range(0, len(tokens), BLOCK_TOKENS)
    largest = cache.keep_text(
        f"largest-{cache.fingerprint([files.whole(path)])}.txt",
        lambda: str(max(int(tokens[start : start + BLOCK_TOKENS].max()) for start in blocks)),
    )
    if not largest.isdecimal() or int(largest) >= vocab:
        check_range(tokens, vocab, str(path))


def _bins(folder: Path) -> list[Path]:
    """The ``.bin`` files of a folder and of its folders named for a split (train/, val/)."""
    found = [file for file in folder.iterdir() if file.is_file() and _is_bin(file)]
    for inner in folder.iterdir():
        if inner.is_dir() and inner.name.lower() in EVAL_WORDS | TRAIN_WORDS:
            found += [file for file in inner.iterdir() if file.is_file() and _is_bin(file)]
    return sorted(found)


def _is_bin(path: Path) -> bool:
    return path.suffix.lower() == ".bin"


def _is_text(file: Path, root: Path) -> bool:
    """Not hidden and, by git's rule, without a zero byte near its beginning."""
    if any(part.startswith(".") for part in file.relative_to(root).parts) or not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return file_type.why_no_text(stream.read(file_type.LOOK_BYTES)) is None
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror}); make it readable or leave it out") from error
