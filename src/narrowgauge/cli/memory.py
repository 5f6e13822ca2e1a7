"""``narrowgauge memory``: what a task would allocate under each recipe, before there is a GPU to allocate it on."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.numbers import whole
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.forecast.cluster.collectives import Cluster
    from narrowgauge.forecast.memory.estimate import Memory
    from narrowgauge.forecast.run import Outlook, Plan
    from narrowgauge.hardware import Device, Gpu
    from narrowgauge.recipe import Recipe
    from narrowgauge.task import Task

ABOUT = "predict memory by component and recipe, without a GPU: peak, when it comes, what fits, the largest batch"
RECIPES = "fp32,bf16,fp8,bf16-lean,fp8-lean"
LETTERS = {"weights": "w", "master": "m", "gradients": "g", "moments": "o", "activations": "a", "workspace": "."}
"""How the components are drawn in a bar."""
WIDTH = 44
LESSON = {
    "FP32, by the lesson": {"weights": 28, "master": 0, "gradients": 28, "moments": 56, "activations": 10},
    "mixed, by the lesson": {"weights": 14, "master": 28, "gradients": 14, "moments": 56, "activations": 5},
}
"""What the usual lesson reckons for 7B parameters, in GB (10^9): 122 and 117, so mixed precision saves 5."""
LESSON_PARAMETERS = (6.4e9, 7.6e9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="built-in name or file.py:function")
    add("--recipes", default=RECIPES, help=f"comma-separated (default {RECIPES})")
    add("--gpu", help="say what fits into this GPU: h200, a100, ... (default: the one at hand, else an H200 unasked)")
    add_size_arguments(parser)
    add_scale_arguments(parser)
    add("--shards", type=whole, default=1, metavar="N", help="FSDP over N GPUs, wherever they are: what each holds")
    add("--no-search", action="store_true", help="do not look for the largest batch, nor for what to switch on")
    add("--no-measure", action="store_true", help="with a GPU at hand, do not measure beside the prediction")


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that ``memory`` and ``roofline`` have in common."""
    add = parser.add_argument
    add("--batch", type=whole, help="items a batch")
    add("--context", type=whole, help="tokens a sequence, for language tasks")
    add("--accumulate", type=whole, default=1, metavar="N", help="microbatches an update")
    add(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="as torch.compile would run it (default)"
    )


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of both verbs for several GPUs."""
    add = parser.add_argument
    add("--gpus", type=whole, metavar="N", help="of N GPUs, each with its own --batch: what one of them holds and does")
    add("--nodes", type=whole, metavar="M", help="on how many nodes they are (default: as few as hold them)")
    add(
        "--parallel",
        choices=("auto", "ddp", "fsdp"),
        default="auto",
        help="several GPUs: copies or shards (default auto: by size, as train does)",
    )


def cluster_for(args: argparse.Namespace, gpu: Gpu) -> Cluster | None:
    """The GPUs that were asked for; None where one is meant."""
    from narrowgauge.forecast.cluster.collectives import cluster_of

    if args.gpus is None:
        if args.nodes is not None:
            raise UsageError(f"--nodes {args.nodes} says where GPUs are: give --gpus too")
        return None
    shards = getattr(args, "shards", 1)
    if shards != 1 and (shards != args.gpus or args.parallel == "ddp"):
        raise UsageError(f"--shards {shards} and --gpus {args.gpus}: give --gpus alone, with --parallel fsdp or ddp")
    cluster = cluster_of(gpu, args.gpus, args.nodes)
    return cluster if cluster.gpus > 1 else None


def run(args: argparse.Namespace) -> Outcome:
    from narrowgauge.forecast.run import Plan, look
    from narrowgauge.forecast.trace.fake_gpu import describe_device
    from narrowgauge.recipe import parse

    if args.gpu and "," in args.gpu:
        raise UsageError(f"--gpu {args.gpu}: memory asks about one GPU at a time; roofline takes several")
    task, gpu, device = find(args)
    cluster = cluster_for(args, gpu)
    plan = Plan(
        task=task, gpu=gpu, accumulate=args.accumulate, compile=args.compile, shards=args.shards, cluster=cluster,
        parallel=args.parallel,
    )  # fmt: skip
    recipes = list(dict.fromkeys(parse(text, describe_device(gpu)) for text in runnable(args.recipes, gpu, RECIPES)))
    search = args.gpu is not None and not args.no_search
    out = prose(args)
    rows: dict[str, dict[str, Any]] = {}
    parameters = 0
    for recipe in recipes:
        tell(f"{recipe}: tracing two steps on paper")
        try:
            traced = plan.trace(recipe) if plan.gpus == 1 else plan.sample(recipe)
        except UsageError as error:
            if args.recipes != RECIPES or not rows:
                raise
            tell(f"{recipe}: left out: {error}")  # of the default ones, not every one suits every optimizer
            continue
        outlook = look(plan, recipe, traced, search, tell)
        parameters = traced.parameters
        measured = _measure(args, plan, recipe, device)
        rows[str(recipe)] = _describe(outlook, measured, gpu if args.gpu else None)
        if cluster is not None:
            rows[str(recipe)]["scale"] = describe_share(cluster, outlook.memory)
        if not args.json:
            _show(outlook, measured, gpu if args.gpu else None, out)
    lesson = _lesson(parameters)
    data = {
        "task": task.name,
        "gpu": gpu.name,
        "parameters": parameters,
        "batch": next(iter(rows.values()))["batch"],
        "unit": task.unit,
        "compile": args.compile,
        "shards": max((row["scale"]["shards"] for row in rows.values()), default=1) if cluster else args.shards,
        "recipes": rows,
        "lesson": lesson,
    }
    if cluster is not None:
        data["scale"] = {"gpus": cluster.gpus, "nodes": cluster.nodes}
    if not args.json:
        _show_together(data, out)
    failed = [name for name, row in rows.items() if row["fits"] is False]
    return Outcome(data, exit_code=1 if failed else 0)


def find(args: argparse.Namespace) -> tuple[Task, Gpu, Device]:
    """The task, the GPU it is forecast for, and the device at hand."""
    from narrowgauge import hardware, tasks
    from narrowgauge.forecast.run import DEFAULT_GPU

    device = hardware.detect(args.device)
    name = args.gpu.split(",")[0] if args.gpu else device.gpu.name if device.gpu else DEFAULT_GPU
    gpu = hardware.find_gpu(name)
    spec = args.task or tasks.default("cuda")
    return tasks.find(spec, batch=args.batch, context=args.context, **args.own), gpu, device


def runnable(text: str, gpu: Gpu, default: str) -> list[str]:
    """The recipes that were asked for; of the default ones, those that the GPU can run."""
    from narrowgauge.forecast.trace.fake_gpu import describe_device
    from narrowgauge.recipe import parse, refusal, split

    texts = split(text)
    if not texts:
        raise UsageError("--recipes names none; give some, such as bf16,fp8-lean")
    device = describe_device(gpu)
    if text != default:
        return texts
    return [one for one in texts if refusal(parse(one, device), device) is None]


def tell(line: str) -> None:
    say(line, sys.stderr)


def _measure(args: argparse.Namespace, plan: Plan, recipe: Recipe, device: Device) -> int | None:
    """The real peak, where the GPU of the forecast is at hand."""
    if device.kind != "cuda" or device.gpu is not plan.gpu or args.no_measure or plan.gpus > 1:
        return None
    import torch

    from narrowgauge.forecast.time.measure import measure_run

    tell(f"{recipe}: measuring")
    try:
        found = measure_run(plan.task, recipe, device, compile=args.compile, accumulate=args.accumulate, steps=1)
    except torch.OutOfMemoryError:
        return None
    return found.peak_bytes


def _describe(outlook: Outlook, measured: int | None, gpu: Gpu | None) -> dict[str, Any]:
    memory = outlook.memory
    when = memory.when
    return {
        **memory.components(),
        "total": memory.total,
        "peak": memory.peak,
        "largest": memory.largest,
        "when": {"phase": when.phase, "module": when.module, "op": when.op, "share": when.share},
        "first_step": memory.first_step,
        "building": memory.building,
        "between_steps": memory.between,
        "reserved": memory.reserved,
        "batch": memory.batch,
        "fits": outlook.fits if gpu else None,
        "largest_batch": outlook.largest_batch,
        "advice": outlook.advice or None,
        "exact": memory.exact,
        "notes": memory.notes,
        "timeline": [{"label": label, **parts} for label, parts in memory.timeline],
        "measured": measured,
        "error": None if not measured else memory.total / measured - 1,
    }


def describe_share(cluster: Cluster, memory: Memory) -> dict[str, Any]:
    """What one GPU of several holds, with what is gathered taken out of the workspace."""
    gathered = dict(memory.gathered)
    own = {**memory.components(), "workspace": memory.workspace - sum(gathered.values())}
    return {
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "parallel": "fsdp" if memory.shards > 1 else "ddp",
        "shards": memory.shards,
        "per_gpu": {**own, **gathered, "total": memory.total},
    }


def _lesson(parameters: int) -> dict[str, dict[str, float]] | None:
    """The lesson's own sums, for models of the size it speaks of."""
    if not LESSON_PARAMETERS[0] < parameters < LESSON_PARAMETERS[1]:
        return None
    return {
        name: {**{part: size * 1e9 for part, size in parts.items()}, "total": sum(parts.values()) * 1e9}
        for name, parts in LESSON.items()
    }


def bar(memory: Memory, width: int = WIDTH) -> str:
    """The components side by side, each with its letter."""
    drawn, done, total = "", 0.0, max(1, memory.total)
    for name, size in memory.components().items():
        done += size
        drawn += LETTERS[name] * (round(done / total * width) - len(drawn))
    return drawn


def _show(outlook: Outlook, measured: int | None, gpu: Gpu | None, out: TextIO) -> None:
    memory = outlook.memory
    about = "about " if not memory.exact else ""
    say(f"{memory.recipe}: {about}{gigabytes(memory.total)} at the peak, in {memory.when}", out)
    say(f"  [{bar(memory)}]", out)
    parts = [f"{name} {gigabytes(size)}" for name, size in memory.components().items() if size >= 5e5]
    say(f"  {', '.join(parts)}", out)
    if memory.gathered:
        there = [f"{name.replace('_', ' ')} {gigabytes(size)}" for name, size in memory.gathered.items()]
        say(f"  of the workspace: {', '.join(there)}", out)
    later = [
        f"{name} {gigabytes(size)}"
        for name, size in memory.largest.items()
        if name in ("gradients", "weights") and size > 1.1 * memory.components()[name] and size >= 5e5
    ]
    if later:
        say(f"  at other moments up to: {', '.join(later)}", out)
    if memory.peak > memory.total * 1.005:
        where = "the first step" if memory.first_step >= memory.building else "building the model"
        say(f"  {where} takes more: {gigabytes(memory.peak)}", out)
    if measured is not None:
        say(f"  measured {gigabytes(measured)}: the prediction is off by {memory.total / measured - 1:+.1%}", out)
    if gpu is not None:
        verdict = "fits" if outlook.fits else "does NOT fit"
        size = f"; largest batch {outlook.largest_batch}" if outlook.largest_batch is not None else ""
        advice = f"; {outlook.advice}" if outlook.advice else ""
        say(f"  {verdict} into {gpu.name} ({gigabytes(gpu.memory_bytes)}){size}{advice}", out)
    for note in memory.notes:
        say(f"  {note}", out)


def _show_together(data: dict[str, Any], out: TextIO) -> None:
    names = [*LETTERS, "total"]
    rows = [[recipe, *(gigabytes(row[name]) for name in names)] for recipe, row in data["recipes"].items()]
    for title, parts in (data["lesson"] or {}).items():
        rows.append([title, *(gigabytes(parts.get(name, 0)) for name in names)])
    scale = data.get("scale")
    shards = f", a rank of {data['shards']}" if data["shards"] > 1 else ""
    if scale:
        shards = f" of each GPU, one of {scale['gpus']} on {scale['nodes']} {'nodes' if scale['nodes'] > 1 else 'node'}"
    title = f"{data['task']}, {data['parameters'] / 1e6:,.0f}M parameters, batch {data['batch']}{shards} (GB = 10^9)"
    say("", out)
    show_table(title, ["", *names], rows, out)
    if data["lesson"]:
        say("the lesson's sums are for FP32 and for mixed precision as it teaches it, 10 and 5 GB of activations", out)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
