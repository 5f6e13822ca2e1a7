"""The interface of a data source: one kind of data that ``--data`` can name, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from narrowgauge import files

Kind = Literal["corpus", "tokens", "documents", "text"]
Opened = TypeVar("Opened", covariant=True)
"""What a source opens: ``TokenData``, ``Documents`` or ``Text``."""


@dataclass(frozen=True)
class OpenOptions:
    """What a source needs to know to open data."""

    vocab: int
    """Number of tokens of the model."""
    context: int
    """Tokens in a sequence."""
    field: str | None = None
    """The field that holds the text of a document, if the user named one."""


def resolve_path(data: str) -> str:
    """Make the path of data absolute, so that a run can be resumed from another folder."""
    return str(files.resolve_path(files.expand_path(data)))


@dataclass(frozen=True)
class DataSource(Generic[Opened]):
    """One kind of data. To add one, write its file with a ``DataSource`` and list it in ``sources.SOURCES``."""

    kind: Kind
    """``tokens`` opens TokenData, ``documents`` opens Documents, ``text`` opens Text."""
    matches: Callable[[str], bool]
    """Whether the text of ``--data`` names data of this source. False for a path that does not exist."""
    open: Callable[[str, OpenOptions], Opened]
    """Opens the data."""
    prefix: str = ""
    """How the text starts if it is not a path."""
    resolve: Callable[[str], str] = resolve_path
    """Makes the name independent of the current folder."""
