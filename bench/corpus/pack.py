"""Packs a corpus for a machine without a network: python -m bench.corpus.pack FOLDER FILE

usage: python -m bench.corpus.pack FOLDER FILE [--limit 45MB] [--tokens 40M] [--vocab 32768] [--jobs N]

FOLDER is a corpus of bench.corpus.make. FILE gets as many documents as fit into the limit, and a byte-pair encoding
that is learned from the training documents. bench/corpus/read_corpus.py describes the format and turns it into tokens.
The same corpus and the same versions of `tokenizers` and of xz give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.corpus.errors import Failed, run_command
from bench.corpus.progress import parse_count, say, track
from bench.corpus.read_corpus import END, FORMAT, PARTS, SPLIT, encode_all

TOKENIZER_CHARACTERS = 1 << 26
"""The encoding is learned from the start of the training documents, as narrowgauge.data.bpe does."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 28, "lc": 4, "pb": 0}]
"""Settings of xz for text: 5% smaller than its defaults. Preset 9e saves 0.2% more. Reading needs 256 MB of memory."""
SMALLEST_VOCAB, LARGEST_VOCAB = 512, 55_000
"""More than the bytes; less than the uint16 with which files of llm.c start, so that none is mistaken for one."""
NEXT_SHARE = 0.997
"""A file that is too large is packed again with this share of the tokens that should fit."""


@dataclass(frozen=True)
class Document:
    """A document of a corpus, with its tokens."""

    text: str
    place: tuple[str, str, str]
    """Kind, package and path: similar documents beside each other compress better."""
    tokens: bytes = b""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pack", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the corpus")
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--limit", type=parse_count, default=parse_count("45MB"), help="largest size (default: 45MB)")
    parser.add_argument("--tokens", type=parse_count, help="training tokens after which no document is added")
    parser.add_argument("--vocab", type=int, default=32768, help="tokens of the byte-pair encoding (default: 32768)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that encode documents")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: give 1 or more processes")
    return run_command("pack", lambda: pack(**vars(options)))


def pack(folder: Path, file: Path, limit: int, tokens: int | None, vocab: int, jobs: int = 1) -> int:
    """Write the first training documents that fit, and all evaluation documents, as one file. Returns exit code 0."""
    if not SMALLEST_VOCAB <= vocab <= LARGEST_VOCAB:
        raise Failed(f"--vocab {vocab}: tokens are stored as uint16; give {SMALLEST_VOCAB} to {LARGEST_VOCAB}")
    if not file.parent.is_dir():
        raise Failed(f"there is no folder {file.parent} to write {file.name} to")
    parts = {part: list(read_documents(folder, part)) for part in PARTS}
    say(f"read {len(parts['train'])} documents for training, {len(parts['eval'])} for evaluation")
    tokenizer = train_tokenizer([document.text for document in parts["train"]], vocab)
    say(f"learned {count_vocab(tokenizer)} tokens")
    for part, documents in parts.items():
        encoded = encode_all(tokenizer, [document.text for document in documents], jobs)
        parts[part] = [Document(one.text, one.place, found) for one, found in zip(documents, encoded, strict=True)]
        say(f"encoded {len(documents)} documents for {part}: {count_tokens(parts[part])} tokens")
    train = take(parts["train"], tokens)
    while len(content := compress(tokenizer, {"train": train, "eval": parts["eval"]})) > limit:
        count = count_tokens(train)
        say(f"{count} tokens take {len(content)} bytes, more than {limit}: packing fewer")
        train = take(parts["train"], int(count * limit / len(content) * NEXT_SHARE), is_most=True)
        if not train:
            raise Failed(f"--limit {limit}: the evaluation documents and one for training need more; give a higher one")
    unfinished = file.with_name(file.name + ".part")
    try:
        unfinished.write_bytes(content)
        unfinished.rename(file)
    finally:
        unfinished.unlink(missing_ok=True)
    say(f"{file}: {len(content)} bytes, {count_tokens(train)} tokens for training")
    say(f"sha256 {hashlib.sha256(content).hexdigest()}")
    return 0


def read_documents(folder: Path, part: str) -> Iterator[Document]:
    """Read the documents of a part, in the order of the corpus: by their hash."""
    paths = sorted(folder.glob(f"{part}*.jsonl"))
    if not paths:
        raise Failed(f"{folder} is not a corpus: it has no {part}*.jsonl; make one with python -m bench.corpus.make")
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    one = json.loads(line)
                    yield Document(one["text"], (one["kind"], one["source"], one["path"]))
                except (ValueError, KeyError, TypeError) as error:
                    raise Failed(f"{path}, line {number} is not a document of a corpus ({error!r})") from error


def take(documents: Sequence[Document], tokens: int | None, is_most: bool = False) -> list[Document]:
    """Take documents from the start until they have a number of tokens (None: all), or at most that many."""
    if tokens is None:
        return list(documents)
    taken, count = [], 0
    for document in documents:
        if count >= tokens or (is_most and count + len(document.tokens) // 2 > tokens):
            break
        taken.append(document)
        count += len(document.tokens) // 2
    return taken


def count_vocab(tokenizer: str) -> int:
    return len(json.loads(tokenizer)["model"]["vocab"])


def count_tokens(documents: Sequence[Document]) -> int:
    return sum(len(document.tokens) for document in documents) // 2


def compress(tokenizer: str, parts: dict[str, list[Document]]) -> bytes:
    """Write the format that read_corpus.py describes. Documents of one package are beside each other."""
    ordered = {part: sorted(documents, key=lambda one: one.place) for part, documents in parts.items()}
    digest = hashlib.sha256()
    for documents in ordered.values():
        for document in documents:
            digest.update(document.tokens)
    header: dict[str, Any] = {"format": FORMAT, "vocab": count_vocab(tokenizer)}
    header |= {f"{part}_documents": len(documents) for part, documents in ordered.items()}
    header |= {f"{part}_tokens": count_tokens(documents) for part, documents in ordered.items()}
    header |= {"sha256": digest.hexdigest()}
    compressor = lzma.LZMACompressor(filters=FILTERS)
    pieces = [compressor.compress(f"{json.dumps(header)}\n{tokenizer}\n".encode())]
    every = [document for documents in ordered.values() for document in documents]
    for document in track(iter(every), len(every), "compressed documents:"):
        pieces.append(compressor.compress(document.text.encode() + b"\0"))
    return b"".join([*pieces, compressor.flush()])


def train_tokenizer(texts: Sequence[str], vocab: int) -> str:
    """Learn a byte-level byte-pair encoding with a token that ends a document. Returns its JSON, which is one line."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(limit_characters(texts, TOKENIZER_CHARACTERS), trainer)
    return str(tokenizer.to_str())


def limit_characters(texts: Sequence[str], characters: int) -> Iterator[str]:
    """Yield texts from the start, until they have a number of characters."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


if __name__ == "__main__":
    sys.exit(main())
