"""Where tokens come from: decides what ``--data`` names, and opens it with the tokens that were asked for.

             vocabulary 256         larger                      with a tokenizer
corpus, text bytes                  byte-pair encoding of it    encoded by it
documents    bytes                  byte-pair encoding of them  encoded by it, an end between two
.bin         as they are            as they are                 as they are; it only says what they mean
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from narrowgauge import files
from narrowgauge.data import bpe, corpus, documents, hub, pack, tokenizer, tokens
from narrowgauge.data.cache import Array
from narrowgauge.data.corpus import Text
from narrowgauge.data.tokenizer import Tokenizer
from narrowgauge.data.tokens import TokenData
from narrowgauge.errors import UsageError

BYTES = 256
PROMPT = "def __init__(self"
PROMPT_TOKENS = 8
Kind = Literal["corpus", "tokens", "documents", "text"]


@dataclass(frozen=True)
class Source:
    """Tokens with the way from text to them and back; where the way is not known, tokens stay numbers."""

    data: TokenData
    encode: Callable[[str], list[int]] | None
    decode: Callable[[Sequence[int]], str] | None
    prompt: list[int]
    """What a sample begins with."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What is known of the documents."""


def whole_name(data: str) -> str:
    """The data's name with its whole path, so that a run can be taken up from anywhere."""
    if not data.startswith(hub.PREFIX):
        return str(files.whole(files.named(data)))
    folder = hub.parse(data).folder
    rest = data.removeprefix(hub.PREFIX)
    return data if folder is None else hub.PREFIX + str(files.whole(folder)) + rest[len(hub.parse(data).dataset) :]


def kind_of(data: str | None) -> Kind:
    """What the data is; refused where there is nothing."""
    if data is None:
        return "corpus"
    if data.startswith(hub.PREFIX):
        hub.parse(data)
        return "documents"
    path = files.named(data)
    if path.is_dir() and hub.is_saved(path):
        return "documents"
    if tokens.holds_tokens(path):
        return "tokens"
    return "documents" if (documents.files_in(path) if path.is_dir() else documents.is_file(path)) else "text"


def open_source(
    data: str | None,
    *,
    vocab: int,
    context: int,
    packages: bool = False,
    coder: Tokenizer | None = None,
    field: str | None = None,
    max_tokens: int | None = None,
) -> Source:
    """Open the data, encoding it where need be; refused where it is too short for one window."""
    kind = kind_of(data)
    if kind != "documents" and (field is not None or max_tokens is not None):
        option = "--field" if field is not None else "--max-tokens"
        raise UsageError(
            f"{option} is for documents (.jsonl, .json, .csv, .parquet, hf:NAME), but {data or 'the corpus'} is {kind}"
        )
    if kind == "tokens":
        source = _open_tokens(files.named(data or ""), vocab, context, coder)
    elif kind == "documents":
        source = _open_documents(data or "", vocab, context, coder, field, max_tokens)
    else:
        text = corpus.load(packages) if data is None else tokens.open_text(files.named(data), context)
        source = _open_text(text, vocab, coder, data or "the corpus")
    for split in tokens.SPLITS:
        source.data.windows(split, context)  # refuses data that is too short before a model is trained on half of it
    return source


def _open_tokens(path: Path, vocab: int, context: int, coder: Tokenizer | None) -> Source:
    data = tokens.open_tokens(path, vocab, context)
    prompt = data.shards["eval"][0][:PROMPT_TOKENS].tolist()
    return Source(data, coder.encode if coder else None, coder.decode if coder else None, prompt)


def _open_text(text: Text, vocab: int, coder: Tokenizer | None, name: str) -> Source:
    if coder is None and vocab == BYTES:
        data = TokenData([text.train], [text.eval], vocab, name)
        return Source(data, _to_bytes, _from_bytes, _to_bytes(PROMPT))
    encoded = bpe.encode(text, vocab) if coder is None else tokenizer.encode_text(text, coder)
    data = TokenData([encoded.train], [encoded.eval], vocab, name, checked=True)
    return Source(data, encoded.encode, encoded.decode, encoded.encode(PROMPT))


def _open_documents(
    name: str, vocab: int, context: int, coder: Tokenizer | None, field: str | None, max_tokens: int | None
) -> Source:
    path = files.named(name)
    if name.startswith(hub.PREFIX):
        found = hub.open_named(name, field)
        if max_tokens is None and hub.parse(name).folder is None:
            max_tokens = hub.MAX_TOKENS
    else:
        found = hub.open_saved(path, field) if hub.is_saved(path) else documents.open_files(path, field)
    packed = pack.pack(found, coder or tokenizer.Bytes(), context, max_tokens)
    facts = {key: packed.facts[key] for key in ("documents", "eval_documents", "empty_documents", "split")}
    if coder is not None:
        data = TokenData([packed.train], [packed.eval], vocab, name, checked=True)
        return Source(data, coder.encode, coder.decode, _start(packed.eval), facts)
    source = _open_text(Text(packed.train, packed.eval, packed.key), vocab, None, name)
    return Source(source.data, source.encode, source.decode, _start(source.data.shards["eval"][0]), facts)


def _start(tokens: Array) -> list[int]:
    return [int(token) for token in tokens[:PROMPT_TOKENS]]


def _to_bytes(prompt: str) -> list[int]:
    return list(prompt.encode())


def _from_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")
