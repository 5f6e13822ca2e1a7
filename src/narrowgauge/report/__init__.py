"""Report: one self-contained HTML page from runs, validations, benchmarks and forecasts. Reads records, never torch.

    paths > sources (what each is) > stories (runs, thinned) and saved results > pages (data + assets = one file)

``write`` makes the file; ``live`` serves the same page while a run goes on.
"""

from __future__ import annotations

from narrowgauge.report.pages import write

__all__ = ["write"]
