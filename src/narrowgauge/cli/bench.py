"""``narrowgauge bench``: measures recipes and baselines side by side, and detects performance regressions."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge import files
from narrowgauge.cli import Outcome, bench_tables, bench_to_loss, prose
from narrowgauge.cli.numbers import number, whole
from narrowgauge.cli.terminal import say
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.bench.compare import Settings
    from narrowgauge.bench.saved_benchmark import SavedBenchmark
    from narrowgauge.hardware import Device
    from narrowgauge.recipe import Recipe
    from narrowgauge.task import Task

ABOUT = "measure recipes and baselines on a task or your model: speed, energy, memory; --against finds regressions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="built-in name or file.py:function")
    add(
        "--model",
        metavar="MODEL",
        help="your model instead of a task: transformers:CLASS, a folder with config.json, ORG/NAME on the Hub, or "
        "file.py:Class",
    )
    add("--config", metavar="JSON", help="fields of the model's configuration, such as '{\"num_hidden_layers\": 4}'")
    add("--recipes", help="comma-separated (default: fp32 and the recipe of auto; with --model: bf16,fp8)")
    add(
        "--peers",
        help="baselines, comma-separated: torch (the same step in plain PyTorch), torchao (its FP8); default: none; "
        "with --model: torch, and torchao if it is installed",
    )
    add("--batch", type=whole, help="items per batch")
    add("--context", type=whole, help="tokens per sequence, for language models")
    add("--steps", type=whole, help="steps per round (default 5)")
    add(
        "--rounds",
        type=whole,
        help="rounds (default 5; with --against, or --save and --peers torch: 12, and up to 8 times as many)",
    )
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    add("--fit", metavar="SIZE", help="memory budget of the recipes, which choose what blocks keep for backward: 80GB")
    add("--save", metavar="FILE", help="write the result as JSON; with --peers torch it can be used with --against")
    add(
        "--against",
        metavar="FILE",
        help="repeat a saved benchmark; exit 1 if a recipe became slower or needs more memory",
    )
    add("--tolerance", type=number, help="relative slowdown or memory growth to accept (default 0.03)")
    add("--profile", nargs="?", const="", metavar="PATH", help="write a trace of each recipe, and show time by kind")
    add("--optimizer", metavar="NAME", help="adamw (default) or muon, as in narrowgauge train")
    add("--data", metavar="PATH", help="texts or tokens of a language task, as for train")
    bench_to_loss.add_arguments(parser)


def run(args: argparse.Namespace) -> Outcome:
    for name in ("steps", "rounds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} must be at least 1")
    if args.model is not None and args.task is not None:
        raise UsageError(f"give either the task {args.task} or --model {args.model}, not both")
    if args.model is not None and args.data is not None:
        raise UsageError("--data is for tasks: steps of a --model are measured with random tokens, so omit it")
    bench_to_loss.check_arguments(args)
    from narrowgauge import bench, hardware
    from narrowgauge.bench import gate, losses, saved_benchmark, trace

    if args.save:
        files.refuse_unwritable(Path(args.save), "--save")
    tolerance = gate.TOLERANCE if args.tolerance is None else args.tolerance
    if not 0 < tolerance < 1:
        raise UsageError(f"--tolerance {tolerance}: expected a fraction between 0 and 1, such as 0.03")
    device = hardware.detect(args.device)
    saved = saved_benchmark.SavedBenchmark.read(Path(args.against)) if args.against else None
    plan = _make_plan(args, device, saved)
    if args.to_loss:
        bench_to_loss.check_recipes([str(recipe) for recipe in plan.recipes])
    targets = {} if args.profile is None else trace.choose_trace_paths(args.profile, args.out, plan.recipes)
    judge = gate.Gate(saved, [str(recipe) for recipe in plan.recipes], tolerance, tell) if saved else None
    task = _prepare_task(plan, device)
    facts = saved_benchmark.describe_setup(
        plan.spec, task, device, plan.settings, plan.peers, plan.batch, plan.context, plan.own, plan.optimizer
    )
    facts["model"] = plan.spec if plan.is_model else None
    if plan.is_model:
        facts |= {
            name: task.facts[name] for name in ("class", "purpose", "parameters", "weights") if name in task.facts
        }
    if saved:
        saved.check_same_setup(facts)
        if saved.facts["torch"] != facts["torch"]:
            tell(f"{args.against} was measured with torch {saved.facts['torch']}, this is {facts['torch']}")
    if plan.for_gate and (facts["threads"] or 1) > 1:
        tell(f"{facts['threads']} threads: on shared cores OMP_NUM_THREADS=1 gives far less noise")
    enough = judge.enough if judge else gate.make_save_rule(tolerance, tell) if plan.for_gate else None
    rows = bench.measure(task, plan.recipes, plan.peers, device, plan.settings, tell, enough)
    gaps = losses.compare_losses(rows)
    data: dict[str, Any] = {**facts, "rows": saved_benchmark.rows_to_json(rows)}
    data["losses"] = [{**dataclasses.asdict(gap), "comparable": gap.comparable} for gap in gaps]
    out = prose(args)
    compiled = ", compiled" if plan.settings.compile else ""
    size = f" ({facts['parameters']:,} parameters)" if "parameters" in facts else ""
    title = f"{plan.spec}{size} on {device.name}: {task.items_per_batch:,} {task.unit}s per step{compiled}"
    bench_tables.show_rows(title, task, rows, out)
    bench_tables.show_losses(gaps, out)
    bench_tables.show_blocks(rows, out)
    if judge:
        data["gate"] = judge.judge_rows(rows)
        bench_tables.show_gate(data["gate"], args.against, device, out)
    if targets:
        found = {str(one): trace.profile(task, one, device, plan.settings, path) for one, path in targets.items()}
        data["profile"] = {name: dataclasses.asdict(summary) for name, summary in found.items()}
        bench_tables.show_profile(found, device, out)
    ok = judge is None or data["gate"]["ok"]
    if args.save:
        saved_benchmark.save(Path(args.save), data)
    if args.to_loss:
        options = {"batch": plan.batch, "context": plan.context, **plan.own}
        options = {name: value for name, value in options.items() if value is not None}
        names = [str(recipe) for recipe in plan.recipes]
        validation = bench_to_loss.train_to_loss(args, plan.spec, options, plan.optimizer, names, out)
        bench_to_loss.show(validation, out)
        data["to_loss"] = bench_to_loss.describe(validation)
        ok = bench_to_loss.is_answered(validation)
        if args.save:
            saved_benchmark.save(Path(args.save), data)
    return Outcome(data, exit_code=int(not ok))


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
    """Options of the task; for a model the fields of its configuration, as ``config``."""
    optimizer: str
    is_model: bool
    """Whether ``spec`` is a model rather than a task."""
    settings: Settings
    for_gate: bool
    """Whether the result is compared with a saved benchmark, or saved for a later comparison."""


def _make_plan(args: argparse.Namespace, device: Device, saved: SavedBenchmark | None) -> _Plan:
    from narrowgauge import bench, tasks
    from narrowgauge.bench import gate
    from narrowgauge.engine.choose_recipe import choose_for_task
    from narrowgauge.pretrained import transformers_model
    from narrowgauge.recipe import parse, refuse_emulation, split
    from narrowgauge.runs.optimizers import with_optimizer
    from narrowgauge.runs.settings import OPTIMIZERS

    facts = saved.facts if saved else {}
    if args.profile and args.task is None and args.profile in dict(tasks.names()):
        raise UsageError(f"--profile {args.profile}: that is a task; put it before --profile")
    model = args.model or (facts.get("model") if args.task is None else None)
    if args.config is not None and model is None:
        raise UsageError("--config is for --model: give the model, such as --model transformers:Qwen3ForCausalLM")
    default_texts, default_peers = (
        (["fp32", "auto"], []) if model is None else _choose_contestants(device, bool(args.compile))
    )
    texts = split(args.recipes) if args.recipes else saved.recipes if saved else default_texts
    for text in texts:
        refuse_emulation("bench", parse(text, device))  # and what is not a recipe, before the task is made
    given = None if args.peers is None else [peer for peer in args.peers.split(",") if peer]
    peers = given if given is not None else facts.get("peers", default_peers)
    for_gate = bool(saved or args.save) and "torch" in peers
    compile_ = args.compile if args.compile is not None else facts.get("compile", device.kind == "cuda")
    settings = bench.Settings(
        steps=args.steps or facts.get("steps", 5),
        rounds=args.rounds or (gate.ROUNDS if for_gate else 5),
        compile=compile_,
        seed=args.seed,
        fit=args.fit or facts.get("fit"),
    )
    spec = model or args.task or facts.get("task") or tasks.default(device.kind)
    batch = args.batch if args.batch is not None else facts.get("batch")
    context = args.context if args.context is not None else facts.get("context")
    own = (
        args.own | _read_data(args.data)
        if args.config is None
        else {"config": transformers_model.parse_fields(args.config)}
    )
    own = own or dict(facts.get("options", {}))
    optimizer = args.optimizer or facts.get("optimizer", OPTIMIZERS[0])
    task = with_optimizer(_find_task(spec, batch, context, own, device, model is not None), optimizer)
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
        optimizer=optimizer,
        is_model=model is not None,
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
        wanted["options"], wanted["fit"], wanted["optimizer"] = plan.own, settings.fit, optimizer
        saved.check_same_setup({**wanted, "compile": compile_, "steps": settings.steps, "peers": peers})
    return plan


def _read_data(path: str | None) -> dict[str, Any]:
    """The option of the task that names the user's data, if any."""
    from narrowgauge.data.sources import resolve_name

    return {} if path is None else {"data": resolve_name(path)}


def _choose_contestants(device: Device, compiles: bool) -> tuple[list[str], list[str]]:
    """Return the recipes and baselines to race on a model: BF16 and FP8 where they run, and all installed baselines.

    A CPU without BF16 has no fast baseline in it, so FP32 is the comparison there. Emulated formats cannot be compiled.
    """
    from narrowgauge.bench.compare import is_slow
    from narrowgauge.recipe import parse, refusal

    recipes = [name for name in ("bf16", "fp8") if refusal(parse(name, device), device) is None]
    if is_slow(parse("bf16", device), device):
        recipes.insert(0, "fp32")
    if compiles:
        recipes = [name for name in recipes if not is_slow(parse(name, device), device)]
    return recipes, ["torch", "torchao"] if importlib.util.find_spec("torchao") else ["torch"]


def _find_task(
    spec: str, batch: int | None, context: int | None, own: dict[str, Any], device: Device, is_model: bool
) -> Task:
    from narrowgauge import tasks
    from narrowgauge.tasks import user_model

    if not is_model:
        return tasks.find(spec, batch=batch, context=context, **own)
    return user_model.make_task(spec, own.get("config", {}), batch, context, device.kind == "cpu")


def _prepare_task(plan: _Plan, device: Device) -> Task:
    """Return the plan's task; a user's model is checked for its size, and tried on one batch."""
    if not plan.is_model:
        return plan.task
    from narrowgauge.bench.compare import choose_baselines
    from narrowgauge.bench.memory_check import refuse_too_large
    from narrowgauge.tasks import user_model

    for recipe in plan.recipes:
        refuse_too_large(plan.task, recipe, len(choose_baselines(recipe, plan.peers, device)), device)
    return user_model.try_model(plan.task, device.torch_device)
