"""Compares the folders that a run started from with those that are there now (``pretrained/fingerprint.py``).

A run with adapters reads its base again when it is resumed or exported. With another base, its adapters would change
something else than what they were trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowgauge.errors import UsageError


def compare_sources(recorded: Any, current: Any, what: str) -> None:
    """Refuse folders that have changed.

    Args:
        recorded: ``sources`` of the facts in run.json; None: the run has none.
        current: The same of the task now.
        what: What would go wrong, for the error message.

    Raises:
        UsageError: A fingerprint differs.
    """
    if not isinstance(recorded, Mapping) or not isinstance(current, Mapping):
        return
    for name, source in current.items():
        before = recorded.get(name)
        if isinstance(before, Mapping) and before.get("fingerprint") != source["fingerprint"]:
            raise UsageError(
                f"{source['folder']} is not the {name} that the run started from ({before.get('folder')}): its files "
                f"have changed; {what}"
            )
