"""Writes a million events to a run's record, one at a time as training does, and reads them: time and memory.

usage: python bench/record.py [EVENTS]
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from narrowgauge.runs import record


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with record.Record(Path(folder)) as events:
            for step in range(count):
                events.append(
                    "step", step, loss=2.3 + 1 / (step + 1), lr=3e-4 * (1 - step / count), grad_norm=0.98765432101234,
                    loss_scale=65536.0, applied=True, tokens_per_s=123456.789012 + step, time=step * 0.0123,
                )  # fmt: skip
        written = time.perf_counter()
        total = sum(event["step"] for event in record.read(Path(folder)))
        read = time.perf_counter()
        assert total == count * (count - 1) // 2
        size = (Path(folder) / record.EVENTS).stat().st_size
    unit = 1 if sys.platform == "darwin" else 1024
    result = {
        "events": count, "file_mb": size / 1e6, "write_s": written - start, "read_s": read - written,
        "peak_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6,
    }  # fmt: skip
    print(json.dumps({key: round(value, 2) for key, value in result.items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
