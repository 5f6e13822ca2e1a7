"""``narrowgauge break [FAULT]``: trains with a classic mistake and shows its effect and the finding that reports it."""

from __future__ import annotations

import argparse
import difflib
import math
import time
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.gauges.faults import faults

ABOUT = "train with a classic low-precision mistake, and see its effect and the finding that reports it"
_BARS = "▁▂▃▄▅▆▇█"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fault", nargs="?", metavar="FAULT", help="name of a fault, or all; default: list them")


def run(args: argparse.Namespace) -> Outcome:
    from narrowgauge.gauges.faults.faults import FAULTS

    out = prose(args)
    if args.fault is None:
        rows = [[fault.name, fault.about, ", ".join(fault.expected)] for fault in FAULTS.values()]
        show_table("classic mistakes", ["fault", "mistake", "finding"], rows, out)
        say("\nnarrowgauge break FAULT runs one and its healthy counterpart; narrowgauge break all runs every one", out)
        return Outcome({"faults": [{"name": fault.name, "about": fault.about} for fault in FAULTS.values()]})
    if args.fault == "all":
        shown = [_run(fault, out) for fault in FAULTS.values()]
        missed = [one["fault"] for one in shown if not one["caught"]]
        say(f"\n{len(shown) - len(missed)} of {len(shown)} found", out)
        for name in missed:
            say(f"missed: {name}", out)
        return Outcome({"faults": shown}, exit_code=1 if missed else 0)
    if args.fault not in FAULTS:
        near = difflib.get_close_matches(args.fault, FAULTS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"unknown fault {args.fault!r}: expected one of {', '.join(FAULTS)}, or all{hint}")
    data = _run(FAULTS[args.fault], out)
    return Outcome(data, exit_code=0 if data["caught"] else 1)


def _run(fault: faults.Fault, out: TextIO) -> dict[str, Any]:
    """Train both. ``caught``: the mistake was reported, and the healthy counterpart has no serious finding."""
    from narrowgauge.gauges.faults import faults
    from narrowgauge.runs.json_lines import replace_nonfinite

    say(f"\n{fault.name}: {fault.about}", out)
    begin = time.perf_counter()
    wrong, right = (faults.train_setup(setup, fault.steps) for setup in (fault.wrong, fault.right))
    hits = faults.select_expected(fault, wrong.findings)
    for title, outcome, setup in (("mistake", wrong, fault.wrong), ("healthy", right, fault.right)):
        first, last = outcome.losses[0], outcome.losses[-1]
        end = ", then stalled" if outcome.stalled else ""
        say(f"  {title}  {_draw_curve(outcome.losses)}  loss {first:.4g} -> {last:.4g}{end}   ({setup.recipe})", out)
    for finding in hits[:1] or wrong.findings[:1]:
        say(f"  {'found' if hits else 'found, but not what was expected'}: {finding.rule} at {finding.where}", out)
        for text in (finding.detail, finding.why, f"-> {finding.fix}"):
            say(f"    {text}", out)
    others = sorted({finding.rule for finding in wrong.findings} - {finding.rule for finding in hits})
    if others:
        say(f"  also: {', '.join(others)}", out)
    if right.serious:
        say(f"  serious findings in the healthy run: {', '.join(finding.rule for finding in right.serious)}", out)
    data = {
        "fault": fault.name,
        "about": fault.about,
        "expected": list(fault.expected),
        "caught": bool(hits) and not right.serious,
        "findings": [finding.describe() for finding in wrong.findings],
        "losses": wrong.losses,
        "twin": {"findings": [finding.describe() for finding in right.findings], "losses": right.losses},
        "seconds": round(time.perf_counter() - begin, 2),
    }
    described: dict[str, Any] = replace_nonfinite(data)
    return described


def _draw_curve(losses: list[float], width: int = 30) -> str:
    """Draw the losses as a line of bars, with x for a nonfinite loss."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    bars = []
    for index in range(min(width, len(losses))):
        loss = losses[index * len(losses) // min(width, len(losses))]
        if not math.isfinite(loss):
            bars.append("x")
        else:
            bars.append(_BARS[round((loss - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0])
    return "".join(bars)
