"""Which field of a document holds its text, and that it holds text."""

from __future__ import annotations

from collections.abc import Iterable

from narrowgauge.errors import UsageError

FIELDS = ("text", "content")
"""Where a text is looked for, in this order."""


def choose_field(names: Iterable[str], wanted: str | None, where: str) -> str:
    """The field that holds the text, of those there are."""
    known = [str(name) for name in names]
    for field in (wanted,) if wanted is not None else FIELDS:
        if field in known:
            return field
    asked = repr(wanted) if wanted is not None else " or ".join(map(repr, FIELDS))
    listed = f"its fields are {', '.join(known[:20])}" if known else "it has no fields"
    raise UsageError(f"{where} has no field {asked}; {listed}: name the one with the text by --field")


def as_text(value: object, field: str, where: str) -> str:
    """The text of a field; null is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UsageError(
            f"{where}: field {field!r} holds {type(value).__name__}, not text; name another one by --field"
        )
    return value
