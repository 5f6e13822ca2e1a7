"""Report: one self-contained HTML page of runs, validations, benchmarks and forecasts. It never imports torch.

    paths -> inputs (runs and saved results) -> run data (downsampled curves, tensors, findings) -> page (data + assets)

``write`` writes the file. ``live`` serves the same page while a run is in progress.
"""

from __future__ import annotations

from narrowgauge.report.pages import write

__all__ = ["write"]
