"""``narrowgauge validate [TASK]``: does a recipe train as good a model as FP32? Paired runs, and a verdict."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge import files
from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.numbers import number, whole
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.validate.run import Validation

ABOUT = "prove, or fail to prove, that a recipe trains as good a model as the reference"

ROWS = 12
"""Modules shown of a step; JSON has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="a built-in task or file.py:function (default: one for this machine)")
    add("--candidates", help="recipes, or RECIPE@TASK, separated by commas (default bf16)")
    add("--reference", help="what they are held against (default fp32)")
    add(
        "--seeds",
        type=_seeds,
        default="auto",
        help="pairs of runs, or auto: as many as it takes, within the budget (default auto)",
    )
    add("--margin", type=number, default=0.005, help="relative gap of the loss that is still as good (default 0.005)")
    add("--budget", type=number, default=10.0, metavar="MINUTES", help="time that auto may spend (default 10)")
    layers = "compare one step module by module first (default: yes)"
    add("--layers", action=argparse.BooleanOptionalAction, default=True, help=layers)
    add("--steps", type=whole, metavar="N", help="updates of a run (default: the task's, if the budget has room)")
    add("--batch", type=whole, metavar="N", help="items a batch")
    add("--context", type=whole, metavar="N", help="tokens a sequence, for language tasks")
    add("--lr", type=number, metavar="RATE", help="peak learning rate (default: the task's)")
    add("--save", metavar="FILE", help="write the result as JSON, for --against")
    add("--against", metavar="FILE", help="hold the candidates of a saved validation to what they were; trains afresh")
    add("--curves", nargs=2, metavar=("REFERENCE", "CANDIDATE"), help="compare finished runs by their logs instead")
    add("--tag", help="with --curves: which number of the logs is the loss")


def _seeds(text: str) -> int | str:
    """A number; else what it says, which is auto or refused with what was expected."""
    return whole(text) if text.lstrip("-").isdecimal() else text


def run(args: argparse.Namespace) -> Outcome:
    if args.curves:
        if args.task or args.candidates or args.save or args.against:
            raise UsageError("--curves compares finished runs: no task, --candidates, --save or --against goes with it")
        return _compare_logs(args)
    from narrowgauge import hardware, tasks
    from narrowgauge.recipe import split
    from narrowgauge.validate import gate
    from narrowgauge.validate.run import validate

    out = prose(args)
    if args.save:
        files.refuse_unwritable(Path(args.save), "--save")
    base = gate.read(Path(args.against)) if args.against else None
    if base is not None:
        _take_over(args, base)
    spec = args.task or tasks.default(hardware.detect(args.device).kind)
    reference, candidates = args.reference or "fp32", split("bf16" if args.candidates is None else args.candidates)
    if not candidates:
        raise UsageError("--candidates: give at least one recipe, such as bf16,fp8")
    say(f"{spec}: {', '.join(candidates)} against {reference}, margin {args.margin:.2%}", out)
    options = {name: getattr(args, name) for name in ("batch", "context") if getattr(args, name) is not None} | args.own
    with tempfile.TemporaryDirectory() as passing:  # what was trained with older code proves nothing of today's
        validation = validate(
            spec,
            candidates,
            reference,
            seeds=args.seeds,
            margin=args.margin,
            steps=args.steps,
            learning_rate=args.lr,
            options=options,
            budget_s=args.budget * 60,
            device=args.device,
            out=passing if base is not None else args.out,
            layers=args.layers,
            tell=lambda line: say(line, out),
        )
    show(validation, out)
    described = validation.describe() | {"options": options | {"lr": args.lr}}
    if args.save:
        gate.save(Path(args.save), described)
    if base is None:
        return Outcome(described, exit_code=0 if validation.good else 1)
    held = gate.hold(base, described)
    _show_gate(held, args.against, out)
    return Outcome(described | {"gate": held}, exit_code=0 if held["ok"] else 1)


def _take_over(args: argparse.Namespace, base: dict[str, Any]) -> None:
    """What was asked then, where nothing else is asked now."""
    args.task = args.task or base["task"]
    args.reference = args.reference or base["reference"]
    args.candidates = args.candidates or ",".join(base["candidates"])
    args.steps = args.steps or base["steps"]
    args.margin = base["margin"]
    for name in ("batch", "context", "lr"):
        if getattr(args, name) is None:
            setattr(args, name, base["options"].get(name))
    args.own = {name: base["options"][name] for name in base["options"] if not hasattr(args, name)} | args.own
    if args.seeds == "auto":
        args.seeds = min(one["seeds"] for one in base["candidates"].values())


def _compare_logs(args: argparse.Namespace) -> Outcome:
    from narrowgauge.validate.curves import external_runs

    out = prose(args)
    reference, candidate = (external_runs.read_all(Path(path), args.tag) for path in args.curves)
    found = external_runs.compare(reference, candidate, args.margin)
    show_table(f"{args.curves[1]} against {args.curves[0]}: {found.what}", *found.table(), out)
    for note in found.notes:
        say(note, out)
    say(f"{found.verdict.verdict}: {found.verdict.reason}", out)
    described = {"reference": args.curves[0], "candidates": {args.curves[1]: found.as_dict()}}
    return Outcome(described, exit_code=0 if found.verdict.is_good else 1)


def show(validation: Validation, out: TextIO) -> None:
    """The verdicts for people."""
    for name, layers in validation.layers.items():
        columns, lines = layers.table()
        total = f"all weight gradients {layers.total:.1f} dB"
        show_table(
            f"{name} against {validation.reference}, one step, dB (own, end to end): {total}", columns, lines, out
        )
        for worst in layers.worst[:3]:
            say(f"  {worst.module} ({worst.quantity}, {worst.decibels:.1f} dB): {worst.advice}", out)
    described = validation.describe()
    rows = []
    for name, verdict in validation.items():
        known = described["candidates"][name]
        interval = "" if verdict.interval is None else f"{verdict.interval[0]:+.3%} to {verdict.interval[1]:+.3%}"
        gap = "" if verdict.gap is None else f"{verdict.gap:+.3%}"
        largest = known["curve_gap_largest"]
        curve = "" if largest is None else f"{largest:+.2%} at {known['curve_gap_step']}"
        norms = "" if known["grad_norm_ratio"] is None else f"{known['grad_norm_ratio']:.3f}"
        bad = f"{known['skipped']}, {verdict.diverged[1]}"
        rows.append([name, verdict.verdict, gap, interval, str(verdict.seeds), curve, norms, bad])
    columns = ["candidate", "verdict", "gap", "interval", "pairs", "largest gap", "grad norms", "skipped, diverged"]
    title = f"{described['task'] or 'task'}, {described['steps']} steps, against {validation.reference}"
    show_table(title, columns, rows, out)
    for name, verdict in validation.items():
        say(f"{name}: {verdict.verdict}: {verdict.reason}", out)
        needed, minutes = validation.inquiries[name].needed, validation.minutes_needed(name)
        if needed is not None and minutes is not None:
            say(f"  {needed} pairs would decide it, if the noise stays as it is: about {minutes:.0f} minutes more", out)
            say("  (shorter runs, --steps, have less of it: two runs drift apart with every step)", out)
        elif not verdict.is_good and verdict.verdict == "inconclusive":
            say("  the noise is too large for any number of pairs: make runs longer, or the margin wider", out)
        elif verdict.detectable is not None:
            say(f"  a gap of {verdict.detectable:.3%} would have been called worse four times of five", out)
    if described["noise_band"] is not None:
        say(f"{validation.reference}'s own runs scatter by {described['noise_band']:.2%} from seed to seed", out)
    say("a run of this length says nothing of what comes after it: later divergence is not excluded", out)


def _show_gate(held: dict[str, Any], path: str, out: TextIO) -> None:
    rows = []
    for row in held["rows"]:
        gap = "" if row["gap"] is None else f"{row['gap']:+.3%}"
        decibels = [row["decibels_before"], row["decibels_now"]]
        layers = "" if None in decibels else f"{decibels[0]:.1f} to {decibels[1]:.1f}"
        rows.append([row["name"], gap, row["verdict"], layers, "failed" if row["failures"] else "held"])
    show_table(f"against {path}", ["candidate", "gap to then", "", "gradients, dB", ""], rows, out)
    for failure in held["failures"]:
        say(failure, out)
