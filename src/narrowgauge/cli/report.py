"""``narrowgauge report RUN...``: one self-contained HTML file of runs and saved results, or the page of a live run."""

from __future__ import annotations

import argparse
from pathlib import Path

from narrowgauge import files
from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.numbers import whole
from narrowgauge.cli.terminal import say

ABOUT = "write one self-contained HTML page of runs, validations, benchmarks and forecasts; --serve follows a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        metavar="RUN",
        help="run folders, and JSON of validate, bench, memory, roofline, lint or break",
    )
    add(
        "--serve",
        nargs="?",
        type=whole,
        const=-1,
        metavar="PORT",
        help="serve the page live on 127.0.0.1 until Ctrl-C",
    )


def run(args: argparse.Namespace) -> Outcome:
    paths = [Path(path) for path in args.paths]
    if args.serve is not None:
        return _serve(args, paths)
    from narrowgauge.report import write

    path = write(paths, Path(args.out) if args.out is not None else _default_output(paths))
    say(f"{path}: {path.stat().st_size / 1e6:.1f} MB, opens in any browser, needs no network", prose(args))
    return Outcome({"path": str(path)})


def _default_output(paths: list[Path]) -> Path:
    """The default output: the folder of the only run, else the working directory."""
    runs = [path for path in paths if files.is_folder(path)]
    return runs[0] if len(runs) == 1 else Path("report.html")


def _serve(args: argparse.Namespace, paths: list[Path]) -> Outcome:
    from narrowgauge.report import live
    from narrowgauge.runs.interruption import Interruption

    with Interruption() as stop, live.serve(paths, None if args.serve == -1 else args.serve) as server:
        say(f"{server.url} shows {', '.join(map(str, paths))} live; press Ctrl-C to stop", prose(args))
        server.serve_until(lambda: stop.wanted)
    say("stopped", prose(args))
    return Outcome({"path": None, "url": server.url})
