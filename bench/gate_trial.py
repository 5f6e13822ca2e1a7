"""Tests the performance gate: unchanged runs must pass, runs with a planted slowdown must fail. One process per run.

usage: python bench/gate_trial.py [UNCHANGED] [PLANTED] [SHARE] [TASK [OPTION ...]]
       (default 20 10 0.05 digits --batch 32 --steps 3; JSON to $OUT/gate-trial-TASK.json where OUT is set)

A new benchmark is saved for every five runs. The slowdown is real work: matrix products that take SHARE of the recipe's
step, calibrated in the same process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from narrowgauge.bench import compare
from narrowgauge.cli import main as narrowgauge

PER_BASE = 5
CALIBRATION = 40


def plant(share: float) -> None:
    """Make every step of the engine longer by this share."""
    plain = compare.make_engine_step

    def slower(task, engine):
        step, calls, extra = plain(task, engine), 0, 0
        matrix = torch.randn(64, 64)

        def products() -> None:
            for _ in range(20):
                matrix @ matrix

        def timed(work) -> float:
            begin = time.process_time()
            work()
            return time.process_time() - begin

        def planted(batch):
            nonlocal calls, extra
            calls += 1
            if calls == 2:  # in the warm-up
                whole = statistics.median(timed(lambda: step(batch)) for _ in range(CALIBRATION))
                unit = statistics.median(timed(products) for _ in range(CALIBRATION)) / 20
                extra = round(share * whole / unit)
                print(f"planted {extra} products, {extra * unit / whole:.2%} of a step", file=sys.stderr)
            for _ in range(extra):
                matrix @ matrix
            return step(batch)

        return planted

    compare.make_engine_step = slower


def gate(base: Path, share: float) -> dict:
    begin = time.perf_counter()
    command = [sys.executable, __file__, "--one", str(share), str(base)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    row = json.loads(done.stdout)["gate"]["rows"][0]
    kept = {key: row[key] for key in ("verdict", "clock", "before", "now", "change", "interval", "rounds")}
    seconds = time.perf_counter() - begin
    planted = [line for line in done.stderr.splitlines() if line.startswith("planted")]
    return {**kept, "exit": done.returncode, "seconds": seconds, "load": os.getloadavg()[0], "planted": planted}


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--one"]:
        if float(words[1]):
            plant(float(words[1]))
        sys.exit(narrowgauge(["bench", "--against", words[2], "--json"]))
    unchanged, planted = (int(word) for word in (*words[:2], *("20", "10")[len(words) :]))
    share = float(words[2]) if len(words) > 2 else 0.05
    task = words[3:] or ["digits", "--batch", "32", "--steps", "3"]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        wanted = [0.0] * unchanged + [share] * planted
        for index, slower in enumerate(wanted):
            base = Path(folder) / f"base{index // PER_BASE}.json"
            if not base.exists():
                save = [
                    "-m",
                    "narrowgauge",
                    "bench",
                    *task,
                    "--recipes",
                    "fp32",
                    "--peers",
                    "torch",
                    "--save",
                    str(base),
                ]
                subprocess.run([sys.executable, *save], capture_output=True, check=True)
            run = gate(base, slower)
            runs.append({"slower": slower, **run})
            low, high = run["interval"]
            print(
                f"{index + 1} of {len(wanted)}: slower by {slower:.0%}: {run['verdict']} ({run['clock']}), "
                f"{run['change']:+.2%} ({low:+.2%} to {high:+.2%}), {run['rounds']} rounds, {run['seconds']:.0f} s, "
                f"load {run['load']:.1f}",
                flush=True,
            )
    passed = sum(run["exit"] == 0 for run in runs if not run["slower"])
    found = sum(run["exit"] == 1 for run in runs if run["slower"])
    print(f"{passed} of {unchanged} unchanged runs passed, {found} of {planted} slower by {share:.0%} were found")
    if "OUT" in os.environ:
        result = {"task": task, "share": share, "passed": [passed, unchanged], "found": [found, planted], "runs": runs}
        name = task[0].replace(":", "-")
        (Path(os.environ["OUT"]) / f"gate-trial-{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
