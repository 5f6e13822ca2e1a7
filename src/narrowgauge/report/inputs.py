"""The inputs of a report: each path is a run folder, or JSON that another verb has saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.report.run_data import RunData
from narrowgauge.report.saved_results import read_result
from narrowgauge.runs import record


@dataclass
class Inputs:
    """Everything that one page shows."""

    runs: list[RunData] = field(default_factory=list)
    saved: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Saved results by kind: validation, bench, memory, roofline, findings."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The saved results of a kind."""
        return self.saved.get(kind, [])


def open_inputs(paths: Sequence[Path]) -> Inputs:
    """Reads every path once. Call ``update`` on its runs to read new events later.

    Raises:
        UsageError: If there is no path, or a path is neither a run folder nor a known JSON file.
    """
    if not paths:
        raise UsageError("report: give at least one run folder, or JSON of validate, bench, memory or roofline")
    inputs = Inputs()
    for path in dict.fromkeys(paths):
        if files.is_folder(path):
            if not record.holds_run(path):
                raise UsageError(f"{path} contains no run: it has no {record.CONFIGURATION}; give a run folder")
            run = RunData(path)
            run.update()
            inputs.runs.append(run)
        else:
            kind, data = read_result(path)
            inputs.saved.setdefault(kind, []).append({"name": path.stem, **data})
    return inputs
