"""The registry of data sources: finds the source that ``--data`` names, and encodes its data as tokens.

             vocabulary 256         larger                      with a tokenizer
corpus, text bytes                  byte-pair encoding of it    encoded by it
documents    bytes                  byte-pair encoding of them  encoded by it, with an end token between two documents
.bin         unchanged              unchanged                   unchanged; the tokenizer only decodes samples
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.data import bpe, corpus, documents, hub, pack, text, tokenizer, tokens
from narrowgauge.data.cache import Array
from narrowgauge.data.corpus import Text
from narrowgauge.data.documents import Documents
from narrowgauge.data.source import DataSource, Kind, OpenOptions, resolve_path
from narrowgauge.data.tokenizer import Tokenizer
from narrowgauge.data.tokens import TokenData
from narrowgauge.errors import UsageError

SOURCES: tuple[DataSource[TokenData | Documents | Text], ...] = (
    hub.NAMED,
    hub.SAVED,
    tokens.SOURCE,
    documents.SOURCE,
    text.SOURCE,
)
"""Every data source, in the order in which they are tried. The corpus is used if there is no ``--data``."""
BYTES = 256
PROMPT = "def __init__(self"
PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Source:
    """Tokens, and how to convert text to tokens and back. Without a known encoding, samples are numbers."""

    data: TokenData
    encode: Callable[[str], list[int]] | None
    decode: Callable[[Sequence[int]], str] | None
    prompt: list[int]
    """The tokens that a sample starts with."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers of documents, and how they were split."""


def find_source(data: str) -> DataSource[TokenData | Documents | Text]:
    """Find the source of the data that ``--data`` names.

    Args:
        data: A path, or ``hf:NAME[:CONFIG][@SPLIT]``.

    Raises:
        UsageError: There is no such file or folder, or the name is not valid.
    """
    for source in SOURCES:
        if source.matches(data):
            return source
    raise UsageError(
        f"there is no file or folder {data!r}; --data takes a text, .jsonl, .json, .csv, .parquet, "
        "a .bin of tokens, a folder of them, or hf:NAME"
    )


def resolve_name(data: str) -> str:
    """Make the name of data independent of the current folder, so that a run can be resumed from anywhere."""
    resolve = next((s.resolve for s in SOURCES if s.prefix and data.startswith(s.prefix)), resolve_path)
    return resolve(data)


def kind_of(data: str | None) -> Kind:
    """Return the kind of the data that ``--data`` names. None: the corpus."""
    return "corpus" if data is None else find_source(data).kind


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
    """Open data, and encode it if it is text.

    Args:
        data: A path, ``hf:NAME``, or None for the corpus.
        vocab: Number of tokens of the model.
        context: Tokens in a sequence.
        packages: Whether the corpus includes the installed packages.
        coder: The user's tokenizer.
        field: The field that holds the text of a document.
        max_tokens: How much of the documents to read.

    Returns:
        The tokens, and how to convert them.

    Raises:
        UsageError: The data cannot be read, does not fit the vocabulary, or is too short for one sequence.
    """
    found = None if data is None else find_source(data)
    kind = "corpus" if found is None else found.kind
    if kind != "documents" and (field is not None or max_tokens is not None):
        option = "--field" if field is not None else "--max-tokens"
        what = "there is no --data" if data is None else f"{data} is {kind}"
        raise UsageError(f"{option} is for documents (.jsonl, .json, .csv, .parquet, hf:NAME), but {what}")
    if found is None or data is None:
        source = _encode_text(corpus.load(packages), vocab, coder, "the corpus")
    else:
        opened = found.open(data, OpenOptions(vocab, context, field))
        if isinstance(opened, TokenData):
            source = _use_tokens(opened, coder)
        elif isinstance(opened, Documents):
            source = _encode_documents(opened, vocab, context, coder, max_tokens)
        else:
            source = _encode_text(opened, vocab, coder, data)
    for split in tokens.SPLITS:
        source.data.count_windows(split, context)  # refuses data that is too short, before training starts
    return source


def _use_tokens(data: TokenData, coder: Tokenizer | None) -> Source:
    prompt = _take_prompt(data.shards["eval"][0])
    return Source(data, coder.encode if coder else None, coder.decode if coder else None, prompt)


def _encode_text(content: Text, vocab: int, coder: Tokenizer | None, name: str) -> Source:
    if coder is None and vocab == BYTES:
        data = TokenData([content.train], [content.eval], vocab, name)
        return Source(data, _to_bytes, _from_bytes, _to_bytes(PROMPT))
    encoded = bpe.encode(content, vocab) if coder is None else tokenizer.encode_text(content, coder)
    data = TokenData([encoded.train], [encoded.eval], vocab, name, checked=True)
    return Source(data, encoded.encode, encoded.decode, encoded.encode(PROMPT))


def _encode_documents(
    found: Documents, vocab: int, context: int, coder: Tokenizer | None, max_tokens: int | None
) -> Source:
    limit = found.default_max_tokens if max_tokens is None else max_tokens
    packed = pack.pack(found, coder or tokenizer.Bytes(), context, limit)
    facts = {key: packed.facts[key] for key in ("documents", "eval_documents", "empty_documents", "split")}
    if coder is not None:
        data = TokenData([packed.train], [packed.eval], vocab, found.name, checked=True)
        return Source(data, coder.encode, coder.decode, _take_prompt(packed.eval), facts)
    source = _encode_text(Text(packed.train, packed.eval, packed.key), vocab, None, found.name)
    return Source(source.data, source.encode, source.decode, _take_prompt(source.data.shards["eval"][0]), facts)


def _take_prompt(tokens: Array) -> list[int]:
    return [int(token) for token in tokens[:PROMPT_TOKENS]]


def _to_bytes(prompt: str) -> list[int]:
    return list(prompt.encode())


def _from_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")
