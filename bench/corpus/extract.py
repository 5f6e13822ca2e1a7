"""Turns the bytes of a file into plain text: prose as Markdown or as it is, source code unchanged."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable

from bench.corpus.errors import Dropped
from bench.corpus.html_text import strip_docbook, strip_html
from bench.corpus.paths import CODE, DOCBOOK, MARKUP, classify
from bench.corpus.read import read_limited
from bench.corpus.roff_text import strip_roff


def extract(path: str, content: bytes) -> tuple[str, str]:
    """Turn a file into text.

    Returns:
        The kind, which is prose or code, and the text.
    """
    if path.endswith((".gz", ".dz")):  # the format of dictionaries, .dz, is gzip with an index
        try:
            unpacked = read_limited(gzip.GzipFile(fileobj=io.BytesIO(content)))
        except (OSError, EOFError, zlib.error):
            raise Dropped("damaged") from None
        if isinstance(unpacked, Dropped):
            raise unpacked
        content = unpacked
    if b"\0" in content:
        raise Dropped("binary")
    text = content.decode("utf-8", "replace")
    if text.count("\ufffd") > len(text) / 10_000:  # single wrong bytes in a dictionary of 40 MB are only removed
        raise Dropped("not UTF-8")
    text = text.replace("\ufffd", "").replace("\ufeff", "").replace("\r\n", "\n")
    form = classify(path)
    if form in CODE:
        return "code", text
    if form in MARKUP:
        text = strip_html(text)
    elif form in DOCBOOK:
        text = strip_docbook(text)
    elif form in FORMATS:
        text = FORMATS[form](text)
    return "prose", text


def strip_info(text: str) -> str:
    """Take the text of GNU Info, without menus, headers of nodes and the table of nodes."""
    text = re.sub(r"(?s)\* Menu:.*?(?=\n\x1f|\Z)", "", text.partition("\nTag Table:")[0])
    return re.sub(r"\x1f\n?(File: [^\n]*\n)?", "\n\n", text)


def strip_dictionary(text: str) -> str:
    """Remove the name of the edition after each sense, and the header of the dictionary format."""
    text = re.sub(r"(?m)^00-?database.*\n", "", text)
    return re.sub(r"\s*\[(1913 Webster|WordNet 1\.5|PJC|Webster 1913 Suppl\.|1913 Webster \+PJC|\+PJC)\]", "", text)


FORMATS: dict[str | None, Callable[[str], str]] = {
    "man": strip_roff, "info": strip_info, "dict": strip_dictionary,
}  # fmt: skip
