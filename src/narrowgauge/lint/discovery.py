"""Finds the scripts and notebooks in a folder."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from narrowgauge.lint.source import SUFFIXES

_SKIPPED = {".git", ".venv", "venv", "node_modules", "__pycache__", ".tox", "build", "dist", ".ipynb_checkpoints"}


def find_scripts(folder: Path, exclude: Sequence[str] = ()) -> list[Path]:
    """Return the scripts and notebooks in a folder and below it, in order.

    Args:
        folder: where to look.
        exclude: patterns of files and folders to leave out, as for ``is_excluded``.
    """
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        parent = Path(place)
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED and not is_excluded(parent / name, exclude)
        )
        found += [
            path
            for name in names
            if name.endswith(SUFFIXES) and (path := parent / name).is_file() and not is_excluded(path, exclude)
        ]
    return sorted(found)


def is_excluded(path: PurePath, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches a path, one of its parts, or its beginning.

    ``tests`` matches a folder or file of that name anywhere, ``old/*`` everything in a folder ``old``.
    """
    text, parts = path.as_posix().removeprefix("./"), path.parts
    for pattern in (one.removesuffix("/").removeprefix("./") for one in patterns):
        if any(fnmatch.fnmatchcase(part, pattern) for part in parts):
            return True
        if any(fnmatch.fnmatchcase(text, form) for form in (pattern, f"*/{pattern}", f"{pattern}/*", f"*/{pattern}/*")):
            return True
    return False
