"""``narrowgauge bench``: measures recipes and baselines side by side, and detects performance regressions."""

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
    from narrowgauge.bench.compare import Row, Settings
    from narrowgauge.bench.saved_benchmark import SavedBenchmark
    from narrowgauge.bench.trace import Summary
    from narrowgauge.hardware import Device
    from narrowgauge.recipe import Recipe
    from narrowgauge.task import Task

ABOUT = "measure recipes and baselines side by side: tokens/s, step time, memory, MFU; --against detects regressions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="built-in name or file.py:function")
    add("--recipes", help="comma-separated (default: fp32 and the recipe of auto)")
    add("--peers", help="baselines, comma-separated: torch (the same step in plain PyTorch), torchao (its FP8)")
    add("--batch", type=whole, help="items per batch")
    add("--context", type=whole, help="tokens per sequence, for language tasks")
    add("--steps", type=whole, help="steps per round (default 5)")
    add(
        "--rounds",
        type=whole,
        help="rounds (default 5; with --against, or --save and --peers torch: 12, and up to 8 times as many)",
    )
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    add("--save", metavar="FILE", help="write the result as JSON; with --peers torch it can be used with --against")
    add(
        "--against",
        metavar="FILE",
        help="repeat a saved benchmark; exit 1 if a recipe became slower or needs more memory",
    )
    add("--tolerance", type=number, help="relative slowdown or memory growth to accept (default 0.03)")
    add("--profile", nargs="?", const="", metavar="PATH", help="write a trace of each recipe, and show time by kind")


def run(args: argparse.Namespace) -> Outcome:
    for name in ("steps", "rounds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} must be at least 1")
    from narrowgauge import bench, hardware
    from narrowgauge.bench import gate, saved_benchmark, trace

    if args.save:
        files.refuse_unwritable(Path(args.save), "--save")
    tolerance = gate.TOLERANCE if args.tolerance is None else args.tolerance
    if not 0 < tolerance < 1:
        raise UsageError(f"--tolerance {tolerance}: expected a fraction between 0 and 1, such as 0.03")
    device = hardware.detect(args.device)
    saved = saved_benchmark.SavedBenchmark.read(Path(args.against)) if args.against else None
    plan = _make_plan(args, device, saved)
    targets = {} if args.profile is None else trace.choose_trace_paths(args.profile, args.out, plan.recipes)
    judge = gate.Gate(saved, [str(recipe) for recipe in plan.recipes], tolerance, tell) if saved else None
    task = plan.task
    facts = saved_benchmark.describe_setup(
        plan.spec, task, device, plan.settings, plan.peers, plan.batch, plan.context, plan.own
    )
    if saved:
        saved.check_same_setup(facts)
        if saved.facts["torch"] != facts["torch"]:
            tell(f"{args.against} was measured with torch {saved.facts['torch']}, this is {facts['torch']}")
    if plan.for_gate and (facts["threads"] or 1) > 1:
        tell(f"{facts['threads']} threads: on shared cores OMP_NUM_THREADS=1 gives far less noise")
    enough = judge.enough if judge else gate.make_save_rule(tolerance, tell) if plan.for_gate else None
    rows = bench.measure(task, plan.recipes, plan.peers, device, plan.settings, tell, enough)
    data: dict[str, Any] = {**facts, "rows": saved_benchmark.rows_to_json(rows)}
    out = prose(args)
    _show(plan, task, device, rows, out)
    if judge:
        data["gate"] = judge.judge_rows(rows)
        _show_gate(data["gate"], args.against, device, out)
    if targets:
        found = {str(one): trace.profile(task, one, device, plan.settings, path) for one, path in targets.items()}
        data["profile"] = {name: dataclasses.asdict(summary) for name, summary in found.items()}
        _show_profile(found, device, out)
    if args.save:
        saved_benchmark.save(Path(args.save), data)
    return Outcome(data, exit_code=int(judge is not None and not data["gate"]["ok"]))


def tell(line: str) -> None:
    """Prints a line of progress."""
    say(line, sys.stderr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What to measure: from the command line, else from the saved benchmark, else the defaults."""

    spec: str
    task: Task
    recipes: list[Recipe]
    peers: list[str]
    batch: int | None
    context: int | None
    own: dict[str, Any]
    """Options of the task."""
    settings: Settings
    for_gate: bool
    """Whether the result is compared with a saved benchmark, or saved for a later comparison."""


def _make_plan(args: argparse.Namespace, device: Device, saved: SavedBenchmark | None) -> _Plan:
    from narrowgauge import bench, tasks
    from narrowgauge.bench import gate
    from narrowgauge.engine.choose_recipe import choose_for_task
    from narrowgauge.recipe import parse, split

    facts = saved.facts if saved else {}
    if args.profile and args.task is None and args.profile in dict(tasks.names()):
        raise UsageError(f"--profile {args.profile}: that is a task; put it before --profile")
    texts = split(args.recipes) if args.recipes else saved.recipes if saved else ["fp32", "auto"]
    for text in texts:
        parse(text, device)  # refuses what is not a recipe before the task is made
    peers = [peer for peer in args.peers.split(",") if peer] if args.peers is not None else facts.get("peers", [])
    for_gate = bool(saved or args.save) and "torch" in peers
    compile_ = args.compile if args.compile is not None else facts.get("compile", device.kind == "cuda")
    settings = bench.Settings(
        steps=args.steps or facts.get("steps", 5),
        rounds=args.rounds or (gate.ROUNDS if for_gate else 5),
        compile=compile_,
        seed=args.seed,
    )
    spec = args.task or facts.get("task") or tasks.default(device.kind)
    batch = args.batch if args.batch is not None else facts.get("batch")
    context = args.context if args.context is not None else facts.get("context")
    own = args.own or dict(facts.get("options", {}))
    task = tasks.find(spec, batch=batch, context=context, **own)
    chosen = [choose_for_task(text, task, device, compile=compile_) for text in texts]
    for recipe, reason in chosen:
        if reason is not None:
            tell(f"auto is {recipe}: {reason}")
    plan = _Plan(
        spec=spec,
        task=task,
        recipes=list(dict.fromkeys(recipe for recipe, _ in chosen)),
        peers=peers,
        batch=batch,
        context=context,
        own=own,
        settings=settings,
        for_gate=for_gate,
    )
    if saved:
        wanted: dict[str, Any] = {
            "task": plan.spec,
            "device": device.name,
            "batch": plan.batch,
            "context": plan.context,
        }
        wanted["options"] = plan.own
        saved.check_same_setup({**wanted, "compile": compile_, "steps": settings.steps, "peers": peers})
    return plan


def _show(plan: _Plan, task: Task, device: Device, rows: list[Row], out: TextIO) -> None:
    compiled = ", compiled" if plan.settings.compile else ""
    show_table(
        f"{plan.spec} on {device.name}: {task.items_per_batch:,} {task.unit}s per step{compiled}",
        ["", f"{task.unit}s/s", "step ms", "fastest-slowest", "peak GiB", "MFU", "x first", "x baseline", "loss"],
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
    columns = ["time / baseline", "clock", "before", "now", "change", "interval", "rounds", "memory", "verdict"]
    show_table(f"compared with {path}, tolerance {found['tolerance']:.1%}", columns, rows, out)
    if device.kind == "cpu":
        say("memory: not measured on a CPU", out)
    for row in found["rows"]:
        if row["verdict"] == "undecided":
            say(f"{row['name']}: undecided, {row['rounds']} rounds are too noisy; use more --rounds", out)
    for line in found["failures"]:
        say(f"FAILED: {line}", out)


def _show_profile(found: dict[str, Summary], device: Device, out: TextIO) -> None:
    kinds = [kind for kind in next(iter(found.values())).shares if any(one.shares[kind] for one in found.values())]
    rows = []
    for name, one in found.items():
        cores = "" if one.tensor_cores is None else f"{one.tensor_cores:.1%}"
        rows.append([name, f"{one.total_ms:.2f}", *(f"{one.shares[kind]:.1%}" for kind in kinds), cores])
    what = "kernels" if device.kind == "cuda" else "operators"
    show_table("time of a step by kind of work", ["", f"ms in {what}", *kinds, "products on tensor cores"], rows, out)
    for name, one in found.items():
        say(f"{name}: {one.trace} (open it in ui.perfetto.dev)", out)
