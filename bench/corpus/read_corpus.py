"""Turns a packed corpus into tokens that narrowgauge reads. Needs Python and numpy, and no other file of this folder.

usage: python bench/corpus/read_corpus.py FILE FOLDER
       narrowgauge validate gpt2-124m --data FOLDER ...

bench/corpus/pack.py writes the file. It holds text, because text compresses better than its tokens do. Inside xz:

    a line of JSON   format, vocab, documents and tokens of both parts, SHA-256 hash of the tokens
    a line of JSON   the byte-pair encoding, as the library `tokenizers` writes it
    documents        each with a zero byte at its end: those for training, then those for evaluation

FOLDER gets train.bin and eval.bin (nanoGPT's format: little-endian uint16, an end-of-text token after each document)
and tokenizer.json. The tokens are compared with the hash. FOLDER appears when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import lzma
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "narrowgauge corpus 1"
PARTS = ("train", "eval")
END = "<|endoftext|>"
"""The token after a document."""
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]{1,3}| ?[^ \t\nA-Za-z0-9]+|[ \t\n]+(?![^ \t\n])|[ \t\n]+"
"""How a text is split before pairs are merged: as GPT-2 does. Its classes are listed, so that Python's regular
expressions and those of the library `tokenizers` agree on every text."""
WORDS = re.compile(SPLIT)
SAY_SECONDS = 10
"""Time between two lines of progress."""
BLOCK = 50
"""Documents that a process gets at once."""


class BadFile(Exception):
    """The file cannot be read. The message is one line for the user."""


class Encoder(dict[str, bytes]):
    """A byte-pair encoding. As a dictionary it holds the tokens of each word that it has seen, as uint16.

    encode(word):
        tokens = the bytes of the word
        while two adjacent tokens are in the list of merges:
            replace the pair that is first in that list, wherever it occurs, by its merged token
    """

    def __init__(self, tokenizer: str) -> None:
        """Read the JSON of a tokenizer.

        Raises:
            BadFile: It is not a byte-level byte-pair encoding.
        """
        try:
            model = json.loads(tokenizer)["model"]
            vocab = model["vocab"]
            self.of_byte = [vocab[name] for name in name_bytes()]
            self.merges = {
                (vocab[left], vocab[right]): (rank, vocab[left + right])
                for rank, (left, right) in enumerate(model["merges"])
            }
            self.end = np.array(vocab[END], "<u2").tobytes()
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise BadFile(f"not a byte-level byte-pair encoding ({error!r})") from error

    def __missing__(self, word: str) -> bytes:
        tokens = [self.of_byte[byte] for byte in word.encode()]
        never = (len(self.merges), -1)
        while len(tokens) > 1:
            pairs = list(itertools.pairwise(tokens))
            best = min(pairs, key=lambda pair: self.merges.get(pair, never))
            if best not in self.merges:
                break
            merged, position = [], 0
            while position < len(tokens):
                is_best = position < len(pairs) and pairs[position] == best
                merged.append(self.merges[best][1] if is_best else tokens[position])
                position += 1 + is_best
            tokens = merged
        self[word] = found = np.array(tokens, "<u2").tobytes()
        return found

    def encode(self, text: str) -> bytes:
        """Encode a document, with the token that ends it."""
        return b"".join(map(self.__getitem__, WORDS.findall(text))) + self.end


def encode_all(tokenizer: str, texts: Sequence[str], jobs: int) -> Iterator[bytes]:
    """Encode documents in several processes, in their order. Says now and then how many are done."""
    said = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if jobs == 1:
            results: Iterator[bytes] = map(Encoder(tokenizer).encode, texts)
        else:
            pool = multiprocessing.get_context("spawn").Pool(jobs, start_worker, (tokenizer,))
            results = stack.enter_context(pool).imap(encode_in_worker, texts, chunksize=BLOCK)
        for done, tokens in enumerate(results, 1):
            yield tokens
            if time.perf_counter() - said > SAY_SECONDS:
                said = time.perf_counter()
                print(f"encoded {done} of {len(texts)} documents", flush=True)


encoder: Encoder
"""Of a process that encodes."""


def start_worker(tokenizer: str) -> None:
    global encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers
    encoder = Encoder(tokenizer)


def encode_in_worker(text: str) -> bytes:
    return encoder.encode(text)


def name_bytes() -> list[str]:
    """Return the character that stands for each byte in a byte-level encoding: GPT-2's table.

    Printable bytes of Latin-1 stand for themselves. The others, in their order, get the characters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def read_packed(file: Path) -> tuple[dict[str, Any], str, dict[str, list[str]]]:
    """Read the header, the tokenizer and the documents of both parts.

    Raises:
        BadFile: The file is damaged or something else.
    """
    try:
        with lzma.open(file) as stream:
            header = json.loads(stream.readline(1 << 16))
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise ValueError("unknown format")
            tokenizer = stream.readline().decode()
            documents = stream.read().decode().split("\0")[:-1]
        count = int(header["train_documents"])
        if len(documents) != count + header["eval_documents"]:
            raise ValueError(f"{len(documents)} documents, and the header says another number")
    except (lzma.LZMAError, EOFError, ValueError, KeyError, TypeError) as error:
        raise BadFile(f"{file} is damaged or not a packed corpus ({error}); copy it again") from error
    return header, tokenizer, {"train": documents[:count], "eval": documents[count:]}


def unpack(file: Path, folder: Path, jobs: int = 1) -> dict[str, Any]:
    """Write the tokens of a packed corpus.

    Returns:
        The header of the file.

    Raises:
        BadFile: The file is damaged, or the folder exists.
    """
    if folder.exists():
        raise BadFile(f"{folder} exists already; delete it or name another folder")
    header, tokenizer, parts = read_packed(file)
    Encoder(tokenizer)  # a damaged one is reported here, and not by the processes
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    unfinished.mkdir(parents=True)
    try:
        digest = hashlib.sha256()
        for part in PARTS:
            with (unfinished / f"{part}.bin").open("wb") as out:
                for tokens in encode_all(tokenizer, parts[part], jobs):
                    out.write(tokens)
                    digest.update(tokens)
        if digest.hexdigest() != header.get("sha256"):
            raise BadFile(f"{file}: the tokens differ from those that were packed; copy the file again")
        (unfinished / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return header


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        print("usage: python bench/corpus/read_corpus.py FILE FOLDER", file=sys.stderr)
        return 2
    start = time.perf_counter()
    try:
        header = unpack(Path(sys.argv[1]), Path(sys.argv[2]), len(os.sched_getaffinity(0)))
    except (BadFile, OSError) as error:
        print(f"read_corpus: {error}", file=sys.stderr)
        return 2
    print(
        f"{sys.argv[2]}: {header['train_tokens']} tokens for training, {header['eval_tokens']} for evaluation,"
        f" vocabulary {header['vocab']}, in {time.perf_counter() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
