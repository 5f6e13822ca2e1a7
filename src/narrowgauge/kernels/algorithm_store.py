"""Remembers the fastest algorithm of each matrix product across processes, in the user's cache folder.

A file per GPU and version of cuBLASLt has the place of the chosen algorithm among cuBLASLt's proposals, by shape, so a
later process need not try them: it starts sooner, and its products add up in the same order, as a resumed run must. A
place is only used if there are as many proposals as before. A file that cannot be read counts as empty, and one that
cannot be written is left alone.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError

VERSION = 1
"""Version of the file, increased when the measurement changes."""
DEFAULT = -1
"""The place of torch's own algorithm."""
MOST_ENTRIES = 4096


class AlgorithmStore:
    """The choices for one GPU and one version of the library."""

    def __init__(self, gpu: str, library: int) -> None:
        name = re.sub(r"[^A-Za-z0-9]+", "-", gpu)
        self.path: Path = files.get_cache_folder() / f"algorithms-{VERSION}-{name}-{library}.json"
        self._known = self._read()

    def find(self, shape: str, proposals: int) -> int | None:
        """Return the place of the algorithm chosen for a shape, or None if it is not known."""
        place, count = self._known.get(shape, (None, None))
        return place if count == proposals else None

    def add(self, shape: str, place: int, proposals: int) -> None:
        """Note a choice. What other processes have written meanwhile is kept."""
        self._known = {**self._read(), **self._known, shape: (place, proposals)}
        if len(self._known) > MOST_ENTRIES:
            return
        with contextlib.suppress(OSError, UsageError):
            files.replace(self.path, self._write)

    def _write(self, path: Path) -> None:
        path.write_text(json.dumps(self._known, indent=0))

    def _read(self) -> dict[str, tuple[int, int]]:
        found: Any = None
        with contextlib.suppress(OSError, UsageError, ValueError):
            found = files.parse_json(files.read(self.path))
        entries = found.items() if isinstance(found, dict) else ()
        return {shape: (entry[0], entry[1]) for shape, entry in entries if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    is_pair = isinstance(entry, list) and len(entry) == 2 and all(type(number) is int for number in entry)
    return is_pair and DEFAULT <= entry[0] < entry[1]
