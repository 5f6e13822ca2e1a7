"""Removes licences, navigation and tables from texts, and drops texts that are not worth learning."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bench.corpus.errors import Dropped

SHORTEST, LONGEST = 400, 100_000
"""Characters of a document. Longer ones are split between paragraphs."""
JUDGED = 20_000
"""Characters at the start of a document from which shares of words and letters are computed."""
LICENSE = re.compile(
    r"(?i)permission (is hereby granted|to use, copy)|redistribution and use in source|provided .{0,3}as is"
    r"|can redistribute it and/or modify|GNU (general|lesser|library|free documentation|affero)|apache licen[cs]e"
    r"|mozilla public licen[cs]e|warranty of merchantability|all rights reserved|spdx-license|licen[cs]ed under"
    r"|without any warranty|^copyright \(c\)"
)
NAVIGATION = re.compile(r"(Next|Previous|Up): [^\n]*(Up|Previous|Contents)[^\n]*$")
HEAD_COMMENT = re.compile(
    r"\A((?:#![^\n]*\n)?)\s*(?:/\*.*?\*/|(?:^[ \t]*(?://|#|;|--|%)[^\n]*\n)+)", re.DOTALL | re.MULTILINE
)
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
COMMON_WORDS = frozenset({
    "the", "of", "and", "to", "a", "in", "is", "that", "for", "it", "as", "with", "be", "on", "by", "this", "are", "or",
    "an", "if", "you", "from", "not", "can", "which", "at", "was", "will", "have", "but", "has", "its", "all", "when",
    "one", "may",
})  # fmt: skip
GENERATED = re.compile(r"(?i)generated (by|from|file|code|automatically)|do not edit|auto-?generated|machine.generated")
ENCODED = re.compile(r"[A-Za-z0-9+/=]{120,}|(0x[0-9a-fA-F]+[,\s]+){12}")


def clean(text: str, kind: str) -> str:
    """Remove licences, navigation, tables, control characters and superfluous empty lines."""
    text = CONTROLS.sub("", text.expandtabs(4) if kind == "prose" else text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    if kind == "prose":
        paragraphs = re.split(r"\n{2,}", text)
        return "\n\n".join(p for p in paragraphs if p.strip() and not is_boilerplate(p) and not is_table(p)).rstrip()
    head = HEAD_COMMENT.match(text)
    if head and LICENSE.search(head[0]):
        text = head[1] + text[head.end() :]
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def is_boilerplate(paragraph: str) -> bool:
    """Whether a paragraph is part of a licence, or the navigation of a page that GNU Texinfo made."""
    return len(paragraph) < 3000 and (LICENSE.search(paragraph) or NAVIGATION.match(paragraph)) is not None


def is_table(paragraph: str) -> bool:
    """Whether a paragraph is mostly digits, signs and gaps."""
    return len(paragraph) > 300 and sum(map(str.isalpha, paragraph)) < 0.4 * len(paragraph)


def check_text(text: str, kind: str) -> None:
    """Drop a text that is too short, not English, or not written by people.

    English prose has 35% to 40% of its words among the 36 most common ones, a reference manual 25% to 35%. Lists of
    functions, tables and texts in other languages have less than 20%.
    """
    if len(text) < SHORTEST:
        raise Dropped("short")
    start = text[:JUDGED]
    words = re.findall(r"[A-Za-z']+", start)
    if kind == "prose" and sum(word.lower() in COMMON_WORDS for word in words) < 0.22 * len(start.split()):
        raise Dropped("not English prose")
    if sum(map(len, words)) < (0.55 if kind == "prose" else 0.35) * len("".join(start.split())):
        raise Dropped("few letters")
    lines = [line for line in text.split("\n") if line.strip()]
    if len(set(lines)) < 0.5 * len(lines):
        raise Dropped("repetitive")
    if kind == "prose":
        return
    if max(map(len, lines)) > 1000 or len(text) > 100 * len(lines):
        raise Dropped("long lines")
    if GENERATED.search(text[:2000]):
        raise Dropped("generated")
    if sum(ENCODED.search(line) is not None for line in lines) > 0.02 * len(lines):
        raise Dropped("encoded data")


def split(text: str) -> Iterator[str]:
    """Split a long text between paragraphs, or else between lines."""
    while len(text) > LONGEST:
        cut = text.rfind("\n\n", SHORTEST, LONGEST)
        cut = cut if cut > 0 else text.rfind("\n", SHORTEST, LONGEST)
        cut = cut if cut > 0 else LONGEST
        yield text[:cut].strip("\n")
        text = text[cut:].strip("\n")
    if len(text) >= SHORTEST:
        yield text
