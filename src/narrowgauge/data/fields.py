"""Chooses the field of a document that holds its text, and checks that it holds text."""

from __future__ import annotations

from collections.abc import Iterable

from narrowgauge.errors import UsageError

FIELDS = ("text", "content")
"""The fields that are tried, in this order."""


def choose_field(names: Iterable[str], wanted: str | None, where: str) -> str:
    """Choose the field that holds the text.

    Args:
        names: The fields of the document.
        wanted: The field that the user named, or None.
        where: Where the document is, for the error message.

    Raises:
        UsageError: There is no such field.
    """
    known = [str(name) for name in names]
    for field in (wanted,) if wanted is not None else FIELDS:
        if field in known:
            return field
    tried = repr(wanted) if wanted is not None else " or ".join(map(repr, FIELDS))
    listed = f"its fields are {', '.join(known[:20])}" if known else "it has no fields"
    raise UsageError(f"{where} has no field {tried}; {listed}: name the field with the text by --field")


def as_text(value: object, field: str, where: str) -> str:
    """Return the text of a field. Null is an empty text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UsageError(
            f"{where}: field {field!r} holds {type(value).__name__}, not text; name another field by --field"
        )
    return value
