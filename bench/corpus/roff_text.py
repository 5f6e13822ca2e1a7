"""Takes the text of manual pages, which are written in roff with the macros of `man`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.corpus.errors import Dropped

ROFF_ESCAPES = re.compile(
    r"\\f(?:\[[^\]]*\]|\(..|.)|\\s[-+]?\d+|\\[&|^%:/),c]|\\\*(?:\(..|.)|\\n(?:\(..|.)|\\m\[[^\]]*\]|\\\"[^\n]*"
)
ROFF_CHARACTERS = {
    r"\-": "-", r"\(bu": "*", r"\(aq": "'", r"\(dq": '"', r"\(oq": "'", r"\(cq": "'", r"\(lq": '"', r"\(rq": '"',
    r"\(em": "--", r"\(en": "-", r"\(co": "(C)", r"\e": "\\", r"\ ": " ", r"\~": " ", r"\0": " ", r"\(ti": "~",
    r"\(ha": "^", r"\(mi": "-", r"\(+-": "+-", r"\(rs": "\\", r"\(ga": "`", r"\(<=": "<=", r"\(>=": ">=",
    r"\(->": "->", r"\(mu": "x", r"\'": "'", r"\`": "`", r"\(pc": ".", r"\.": ".",
}  # fmt: skip
ROFF_CHARACTER = re.compile("|".join(re.escape(name) for name in sorted(ROFF_CHARACTERS, key=len, reverse=True)))
ROFF_BREAKS = {"PP": "\n\n", "P": "\n\n", "LP": "\n\n", "TP": "\n\n", "HP": "\n\n", "TQ": "\n", "sp": "\n\n"}
ROFF_BREAKS |= {"Sp": "\n\n", "br": "\n", "RS": "\n", "RE": "\n\n"}
ROFF_FONTS = {"B", "I", "R", "SM", "SB", "CW", "C"}
ROFF_MIXED_FONTS = {"BR", "RB", "BI", "IB", "IR", "RI"}


def strip_roff(text: str) -> str:
    """Take the text of a manual page that uses the macros of `man`. Those with `mdoc` and links are dropped."""
    if text.startswith(".so ") or re.search(r"^\.Dd ", text, re.MULTILINE):
        raise Dropped("mdoc or link")
    pieces: list[str] = []
    skipped = verbatim = False
    for line in text.split("\n"):
        if line[:1] in (".", "'") and len(line) > 1:
            macro, _, rest = line[1:].strip().partition(" ")
            if macro in ("de", "de1", "ig", "am", "TS", "EQ"):
                skipped = True
            elif macro in (".", "TE", "EN"):
                skipped = False
            elif not skipped:
                words = [quoted or word for quoted, word in re.findall(r'"((?:[^"]|"")*)"|(\S+)', rest)]
                if macro in ("nf", "EX", "Vb", "fi", "EE", "Ve"):
                    verbatim = macro in ("nf", "EX", "Vb")
                    pieces.append("\n\n")
                else:
                    pieces.append(_expand_macro(macro, words, "\n" if verbatim else " "))
        elif not skipped:
            pieces.append(line + ("\n" if verbatim else " ") if line.strip() else "\n\n")
    joined = ROFF_ESCAPES.sub("", "".join(pieces))
    joined = ROFF_CHARACTER.sub(lambda name: ROFF_CHARACTERS[name[0]], joined)
    return re.sub(r" +\n", "\n", re.sub(r"\\\(..|\\\[[^\]]*\]", "", joined))


def _expand_macro(macro: str, words: Sequence[str], end: str) -> str:
    if macro in ("SH", "SS"):
        return f"\n\n{'#' if macro == 'SH' else '##'} {' '.join(words)}\n\n"
    if macro == "IP":
        return "\n\n" + (words[0] + "\n" if words else "")
    if macro in ROFF_FONTS:
        return " ".join(words) + end
    return "".join(words) + end if macro in ROFF_MIXED_FONTS else ROFF_BREAKS.get(macro, "")
