"""Plain technical English: words and phrases that the project does not use, with the term to use instead."""

from __future__ import annotations

import re

from doc_blocks import ROOT

INSTEAD = {
    r"mend(s|ed|ing)?": "fix",
    r"foret(ell|ells|old|elling)": "predict",
    r"goes on|went on|go on (from|with|as)": "resumes, continues",
    r"on paper": "dry run, simulated",
    r"whoever": "name who it is, or use the passive",
    r"(is|are) level with": "matches",
    r"no multiples? of": "not a multiple of",
    r"skipping without end": "too many consecutive skipped steps",
    r"guessing by frequency": "unigram baseline",
    r"ends at once": "quits immediately",
    r"held against": "compared with",
    r"hold(s)? .{1,30} against": "compares with",
    r"at hand": "this, the current",
    r"as it stands": "as it is, unchanged",
    r"keepers?": "modules kept in FP32",
    r"surroundings": "step context",
    r"takes? the place of": "replaces",
    r"(is|are|was|were) told": "is notified, receives",
    r"the truth of": "source of truth",
    r"learnt": "learned",
    r"afresh": "from the start",
    r"what becomes of": "say it directly",
    r"the house": "the package structure",
}
WORDS = [(re.compile(rf"\b({pattern})\b", re.IGNORECASE), term) for pattern, term in INSTEAD.items()]
ANY = re.compile("|".join(INSTEAD))
ALLOWED = {"tests/docs/test_plain_language.py"}
ALLOWED_LINES = re.compile(r'--foretell|"foret|`foret')  # the old flag and the old names in records, which still work
FILES = sorted(
    path
    for folder in ("src", "tests", "docs", "bench", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".js", ".html", ".toml") and "egg-info" not in str(path)
) + [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "mkdocs.yml", "pyproject.toml")
]


def test_text_is_plain_english():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}, better: {term}"
        for path in FILES
        if str(path.relative_to(ROOT)) not in ALLOWED and ANY.search((text := path.read_text()).lower())
        for number, line in enumerate(text.splitlines(), 1)
        if not ALLOWED_LINES.search(line)
        for pattern, term in WORDS
        if (match := pattern.search(line))
    ]
    assert not found, "\n".join(found)
