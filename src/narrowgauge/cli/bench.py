"""``narrowgauge bench``: recipes and peers side by side on this machine, and the gate that keeps them fast."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge import files
from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.numbers import number, whole
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.bench.base import Base
    from narrowgauge.bench.contest import Row, Settings
    from narrowgauge.bench.trace import Summary
    from narrowgauge.hardware import Device
    from narrowgauge.recipe import Recipe
    from narrowgauge.task import Task

ABOUT = "measure recipes and peers side by side: tokens/s, step time, memory, MFU; fail when a saved base was faster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="built-in name or file.py:function")
    add("--recipes", help="comma-separated (default: fp32 and what auto takes)")
    add("--peers", help="comma-separated: torch (the same step by hand), torchao (its FP8)")
    add("--batch", type=whole, help="items a batch")
    add("--context", type=whole, help="tokens a sequence, for language tasks")
    add("--steps", type=whole, help="steps in a round (default 5)")
    add(
        "--rounds",
        type=whole,
        help="rounds; contestants take turns (default 5; with a base 12 and up to 8 times that)",
    )
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    add("--save", metavar="FILE", help="write the result as JSON: with --peers torch, a base for --against")
    add(
        "--against",
        metavar="FILE",
        help="measure again what this base has; exit 1 where a recipe became slower or larger",
    )
    add("--tolerance", type=number, help="relative slowdown or growth that is still no failure (default 0.03)")
    add("--profile", nargs="?", const="", metavar="PATH", help="trace each recipe to a file or folder; where time goes")


def run(args: argparse.Namespace) -> Outcome:
    for name in ("steps", "rounds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} must be at least 1")
    from narrowgauge import bench, hardware, tasks
    from narrowgauge.bench import base, gate, trace

    if args.save:
        files.refuse_unwritable(Path(args.save), "--save")
    tolerance = gate.TOLERANCE if args.tolerance is None else args.tolerance
    if not 0 < tolerance < 1:
        raise UsageError(f"--tolerance {tolerance}: expected a share between 0 and 1, such as 0.03")
    device = hardware.detect(args.device)
    before = base.Base.read(Path(args.against)) if args.against else None
    plan = _plan(args, device, before)
    targets = {} if args.profile is None else trace.paths(args.profile, args.out, plan.recipes)
    judge = gate.Gate(before, [str(recipe) for recipe in plan.recipes], tolerance, tell) if before else None
    task = tasks.find(plan.spec, batch=plan.batch, context=plan.context, **plan.own)
    facts = base.describe(plan.spec, task, device, plan.settings, plan.peers, plan.batch, plan.context, plan.own)
    if before:
        before.refuse_other(facts)
        if before.facts["torch"] != facts["torch"]:
            tell(f"the base was measured with torch {before.facts['torch']}, this is {facts['torch']}")
    if plan.for_a_base and (facts["threads"] or 1) > 1:
        tell(f"{facts['threads']} threads: on cores that others use too, OMP_NUM_THREADS=1 is measured far better")
    enough = judge.enough if judge else gate.steady(tolerance, tell) if plan.for_a_base else None
    rows = bench.measure(task, plan.recipes, plan.peers, device, plan.settings, tell, enough)
    data: dict[str, Any] = {**facts, "rows": base.as_json(rows)}
    out = prose(args)
    _show(plan, task, device, rows, out)
    if judge:
        data["gate"] = judge.rule(rows)
        _show_gate(data["gate"], args.against, device, out)
    if targets:
        found = {str(one): trace.profile(task, one, device, plan.settings, path) for one, path in targets.items()}
        data["profile"] = {name: dataclasses.asdict(summary) for name, summary in found.items()}
        _show_profile(found, device, out)
    if args.save:
        base.save(Path(args.save), data)
    return Outcome(data, exit_code=int(judge is not None and not data["gate"]["ok"]))


def tell(line: str) -> None:
    say(line, sys.stderr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What to measure: as the command line says, else as the base was, else the defaults."""

    spec: str
    recipes: list[Recipe]
    peers: list[str]
    batch: int | None
    context: int | None
    own: dict[str, Any]
    """Options of the task's own."""
    settings: Settings
    for_a_base: bool


def _plan(args: argparse.Namespace, device: Device, before: Base | None) -> _Plan:
    from narrowgauge import bench, tasks
    from narrowgauge.bench import gate
    from narrowgauge.recipe import parse, split

    then = before.facts if before else {}
    if args.profile and args.task is None and args.profile in dict(tasks.names()):
        raise UsageError(f"--profile {args.profile}: that is a task; it goes before --profile")
    texts = split(args.recipes) if args.recipes else before.recipes if before else ["fp32", "auto"]
    recipes = list(dict.fromkeys(parse(text, device) for text in texts))
    peers = [peer for peer in args.peers.split(",") if peer] if args.peers is not None else then.get("peers", [])
    for_a_base = bool(before or args.save) and "torch" in peers
    compile_ = args.compile if args.compile is not None else then.get("compile", device.kind == "cuda")
    settings = bench.Settings(
        steps=args.steps or then.get("steps", 5),
        rounds=args.rounds or (gate.ROUNDS if for_a_base else 5),
        compile=compile_,
        seed=args.seed,
    )
    plan = _Plan(
        spec=args.task or then.get("task") or tasks.default(device.kind),
        recipes=recipes,
        peers=peers,
        batch=args.batch if args.batch is not None else then.get("batch"),
        context=args.context if args.context is not None else then.get("context"),
        own=args.own or dict(then.get("options", {})),
        settings=settings,
        for_a_base=for_a_base,
    )
    if before:
        wanted: dict[str, Any] = {
            "task": plan.spec,
            "device": device.name,
            "batch": plan.batch,
            "context": plan.context,
        }
        wanted["options"] = plan.own
        before.refuse_other({**wanted, "compile": compile_, "steps": settings.steps, "peers": peers})
    return plan


def _show(plan: _Plan, task: Task, device: Device, rows: list[Row], out: TextIO) -> None:
    compiled = ", compiled" if plan.settings.compile else ""
    show_table(
        f"{plan.spec} on {device.name}: {task.items_per_batch:,} {task.unit}s a step{compiled}",
        ["", f"{task.unit}s/s", "step ms", "fastest-slowest", "peak GiB", "MFU", "x first", "x peer", "loss"],
        [
            [
                row.name,
                f"{row.tokens_per_s:,.0f}",
                f"{row.step_ms:.2f}",
                f"{row.step_ms_low:.2f}-{row.step_ms_high:.2f}",
                "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
                "" if row.mfu is None else f"{row.mfu:.1%}",
                f"{row.ratio:.2f}",
                "" if row.twin_ratio is None else f"{row.twin_ratio:.3f}",
                f"{row.loss:.3f}",
            ]
            for row in rows
        ],
        out,
    )


def _show_gate(found: dict[str, Any], path: str, device: Device, out: TextIO) -> None:
    rows = []
    for row in found["rows"]:
        interval = "" if row["interval"] is None else "{:+.2%} to {:+.2%}".format(*row["interval"])
        memory = "" if row["memory_change"] is None else f"{row['memory_change']:+.1%}"
        numbers = [f"{row['before']:.4f}", f"{row['now']:.4f}", f"{row['change']:+.2%}", interval, str(row["rounds"])]
        rows.append([row["name"], row["clock"], *numbers, memory, row["verdict"]])
    columns = ["time over the twin's", "clock", "before", "now", "change", "interval", "rounds", "memory", "verdict"]
    show_table(f"against {path}, tolerance {found['tolerance']:.1%}", columns, rows, out)
    if device.kind == "cpu":
        say("memory: not measured on a CPU", out)
    for row in found["rows"]:
        if row["verdict"] == "undecided":
            say(f"{row['name']}: the noise of {row['rounds']} rounds hides what there is; give more --rounds", out)
    for line in found["failures"]:
        say(f"FAILED: {line}", out)


def _show_profile(found: dict[str, Summary], device: Device, out: TextIO) -> None:
    kinds = [kind for kind in next(iter(found.values())).shares if any(one.shares[kind] for one in found.values())]
    rows = []
    for name, one in found.items():
        cores = "" if one.tensor_cores is None else f"{one.tensor_cores:.1%}"
        rows.append([name, f"{one.total_ms:.2f}", *(f"{one.shares[kind]:.1%}" for kind in kinds), cores])
    what = "kernels" if device.kind == "cuda" else "operators"
    show_table("where a step goes", ["", f"ms in {what}", *kinds, "products on tensor cores"], rows, out)
    for name, one in found.items():
        say(f"{name}: {one.trace} (open it in ui.perfetto.dev)", out)
