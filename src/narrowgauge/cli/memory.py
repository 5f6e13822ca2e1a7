"""``narrowgauge memory``: predicts what a task allocates under each recipe, without a GPU."""

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
    from narrowgauge.forecast.run import RecipeForecast, Scenario
    from narrowgauge.hardware import Device, Gpu
    from narrowgauge.nn.memory_plan import MemoryPlan
    from narrowgauge.recipe import Recipe
    from narrowgauge.task import Task

ABOUT = "predict memory by component and recipe without a GPU: the peak and when it occurs, what fits, largest batch"
RECIPES = "fp32,bf16,fp8,bf16-lean,fp8-lean"
LETTERS = {"weights": "w", "master": "m", "gradients": "g", "moments": "o", "activations": "a", "workspace": "."}
"""The letter of each component in a bar."""
WIDTH = 44
LESSON = {
    "FP32, textbook": {"weights": 28, "master": 0, "gradients": 28, "moments": 56, "activations": 10},
    "mixed, textbook": {"weights": 14, "master": 28, "gradients": 14, "moments": 56, "activations": 5},
}
"""The usual textbook estimate for 7B parameters, in GB (10^9): 122 and 117, so mixed precision saves 5."""
LESSON_PARAMETERS = (6.4e9, 7.6e9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="built-in name or file.py:function")
    add("--recipes", default=RECIPES, help=f"comma-separated (default {RECIPES})")
    add("--gpu", help="report what fits into this GPU: h200, a100, ... (default: the installed one, else an H200)")
    add_size_arguments(parser)
    add_scale_arguments(parser)
    add("--shards", type=whole, default=1, metavar="N", help="FSDP over N GPUs on unspecified nodes: what each holds")
    add("--no-search", action="store_true", help="do not search for the largest batch or for what makes a recipe fit")
    add("--no-measure", action="store_true", help="do not measure, even if the GPU is installed")


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that ``memory`` and ``roofline`` have in common."""
    add = parser.add_argument
    add(
        "--model",
        metavar="MODEL",
        help="your model instead of a task: transformers:CLASS, a folder with config.json, ORG/NAME on the Hub, or "
        "file.py:Class",
    )
    add("--config", metavar="JSON", help="fields of the model's configuration, such as '{\"num_hidden_layers\": 4}'")
    add("--lora", metavar="OPTIONS", help="with --model: train adapters, as in narrowgauge train, such as rank=16")
    add("--batch", type=whole, help="items per batch")
    add("--context", type=whole, help="tokens per sequence, for language tasks")
    add("--accumulate", type=whole, default=1, metavar="N", help="microbatches per update")
    add("--optimizer", metavar="NAME", default="adamw", help="adamw (default) or muon, as in narrowgauge train")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="predict compiled (default)")
    add("--fit", metavar="SIZE", help="choose what each block keeps for backward, so that a step fits: 80GB, 0.9")


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of both commands for several GPUs."""
    add = parser.add_argument
    add("--gpus", type=whole, metavar="N", help="N GPUs, each with its own --batch: what each of them holds and does")
    add("--nodes", type=whole, metavar="M", help="the number of nodes (default: as few as hold the GPUs)")
    add(
        "--parallel",
        choices=("auto", "ddp", "fsdp"),
        default="auto",
        help="several GPUs: copies (ddp) or shards (fsdp); default auto: by model size, as train does",
    )


def cluster_for(args: argparse.Namespace, gpu: Gpu) -> Cluster | None:
    """The GPUs of --gpus and --nodes; None for a single GPU."""
    from narrowgauge.forecast.cluster.collectives import make_cluster

    if args.gpus is None:
        if args.nodes is not None:
            raise UsageError(f"--nodes {args.nodes} needs --gpus")
        return None
    shards = getattr(args, "shards", 1)
    if shards != 1 and (shards != args.gpus or args.parallel == "ddp"):
        raise UsageError(f"--shards {shards} and --gpus {args.gpus}: use --gpus only, with --parallel fsdp or ddp")
    cluster = make_cluster(gpu, args.gpus, args.nodes)
    return cluster if cluster.gpus > 1 else None


def run(args: argparse.Namespace) -> Outcome:
    from narrowgauge.forecast.run import Scenario, predict_recipe

    if args.gpu and "," in args.gpu:
        raise UsageError(f"--gpu {args.gpu}: memory takes one GPU; roofline takes several")
    task, gpu, device = find(args)
    cluster = cluster_for(args, gpu)
    scenario = Scenario(
        task=task, gpu=gpu, accumulate=args.accumulate, compile=args.compile, shards=args.shards, cluster=cluster,
        parallel=args.parallel, fit=args.fit,
    )  # fmt: skip
    recipes = scenario.choose_recipes(runnable(args.recipes, gpu, RECIPES, args.lora), tell)
    search = args.gpu is not None and not args.no_search and args.fit is None
    out = prose(args)
    rows: dict[str, dict[str, Any]] = {}
    parameters, refused = 0, None
    for recipe in recipes:
        tell(f"{recipe}: tracing {'two' if args.fit is None else 'some'} simulated steps")
        try:
            traced = scenario.trace(recipe) if scenario.gpus == 1 else scenario.trace_model(recipe)
        except UsageError as error:
            if args.recipes != RECIPES:
                raise
            tell(f"{recipe}: skipped: {error}")  # not every default recipe suits every optimizer, or can be planned
            refused = error
            continue
        outlook = predict_recipe(scenario, recipe, traced, search, tell)
        parameters = traced.parameters
        measured = _measure(args, scenario, recipe, device, outlook.plan)
        rows[str(recipe)] = _describe(outlook, measured, gpu if args.gpu else None)
        if cluster is not None:
            rows[str(recipe)]["scale"] = describe_share(cluster, outlook.memory)
        if not args.json:
            _show(outlook, measured, gpu if args.gpu else None, out)
    if not rows and refused is not None:
        raise refused
    refuse_small_budget(args.fit, {name: row["plan"] for name, row in rows.items()})
    lesson = _lesson(parameters)
    data = {
        "task": task.name,
        "optimizer": args.optimizer,
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
    """The task with its optimizer, the GPU to predict for, and the device of this machine."""
    from narrowgauge import hardware
    from narrowgauge.forecast.run import DEFAULT_GPU
    from narrowgauge.runs.optimizers import with_optimizer

    device = hardware.detect(args.device)
    name = args.gpu.split(",")[0] if args.gpu else device.gpu.name if device.gpu else DEFAULT_GPU
    gpu = hardware.find_gpu(name)
    return with_optimizer(_find_task(args), args.optimizer), gpu, device


def _find_task(args: argparse.Namespace) -> Task:
    from narrowgauge import tasks

    if args.model is not None:
        return _find_model(args)
    if args.lora is not None:
        raise UsageError("--lora is for --model: give the model whose adapters are trained")
    if args.config is not None:
        raise UsageError("--config is for --model: give the model, such as --model transformers:Qwen3ForCausalLM")
    spec = args.task or tasks.default("cuda")
    return tasks.find(spec, batch=args.batch, context=args.context, **args.own)


def _find_model(args: argparse.Namespace) -> Task:
    """The task of --model. Of a folder, or on the Hub, only config.json and the headers of the weights are read."""
    from narrowgauge.pretrained.transformers_model import parse_fields
    from narrowgauge.tasks import user_model

    if args.task is not None:
        raise UsageError(f"give either the task {args.task} or --model {args.model}, not both")
    fields = {} if args.config is None else parse_fields(args.config)
    return user_model.make_task(
        args.model, fields, args.batch, args.context, small=False, lora=args.lora, headers_only=True
    )


def runnable(text: str, gpu: Gpu, default: str, lora: str | None = None) -> list[str]:
    """The recipes of --recipes; of the default ones, those that the GPU can run. With --lora, with a narrow base."""
    from narrowgauge.forecast.trace.fake_gpu import describe_device
    from narrowgauge.recipe import parse, refusal, refuse_emulation, split

    texts = split(text)
    if not texts:
        raise UsageError("--recipes is empty; name at least one, such as bf16,fp8-lean")
    device = describe_device(gpu)
    refuse_emulation("forecast", *(parse(one, device) for one in texts))
    if lora is not None:
        from narrowgauge.pretrained.lora_options import set_frozen

        texts = [set_frozen(one, device) for one in texts]
    if text != default:
        return texts
    return [one for one in texts if refusal(parse(one, device), device) is None]


def tell(line: str) -> None:
    say(line, sys.stderr)


def refuse_small_budget(fit: str | None, plans: dict[str, dict[str, Any] | None]) -> None:
    """Raise UsageError if no recipe fits into the memory of --fit."""
    made = {name: plan for name, plan in plans.items() if plan is not None}
    if made and not any(plan["fits"] for plan in made.values()):
        name = min(made, key=lambda one: made[one]["smallest"])
        least = gigabytes(made[name]["smallest"])
        raise UsageError(
            f"--fit {fit}: nothing fits; the smallest peak is {least}, of {name}. Use a smaller batch, a shorter "
            "context or a lean recipe"
        )


def _measure(
    args: argparse.Namespace, scenario: Scenario, recipe: Recipe, device: Device, plan: MemoryPlan | None
) -> int | None:
    """The measured peak, where the GPU of the forecast is installed."""
    if plan is not None and not plan.fits:
        return None
    if device.kind != "cuda" or device.gpu is not scenario.gpu or args.no_measure or scenario.gpus > 1:
        return None
    import torch

    from narrowgauge.forecast.time.measure import measure_run

    tell(f"{recipe}: measuring")
    try:
        found = measure_run(
            scenario.task, recipe, device, compile=args.compile, accumulate=args.accumulate, steps=1, plan=plan
        )
    except torch.OutOfMemoryError:
        return None
    return found.peak_bytes


def _describe(outlook: RecipeForecast, measured: int | None, gpu: Gpu | None) -> dict[str, Any]:
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
        "host": memory.host,
        "batch": memory.batch,
        "fits": outlook.fits if gpu or outlook.plan is not None else None,
        "largest_batch": outlook.largest_batch,
        "advice": outlook.advice or None,
        "exact": memory.exact,
        "notes": memory.notes,
        "plan": None if outlook.plan is None else outlook.plan.describe(),
        "timeline": [{"label": label, **parts} for label, parts in memory.timeline],
        "measured": measured,
        "error": None if not measured else memory.total / measured - 1,
    }


def describe_share(cluster: Cluster, memory: Memory) -> dict[str, Any]:
    """What each of several GPUs holds; what is gathered is listed apart from the workspace."""
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
    """The textbook estimate, for models of the size it describes."""
    if not LESSON_PARAMETERS[0] < parameters < LESSON_PARAMETERS[1]:
        return None
    return {
        name: {**{part: size * 1e9 for part, size in parts.items()}, "total": sum(parts.values()) * 1e9}
        for name, parts in LESSON.items()
    }


def bar(memory: Memory, width: int = WIDTH) -> str:
    """A bar of the components, each drawn with its letter."""
    drawn, done, total = "", 0.0, max(1, memory.total)
    for name, size in memory.components().items():
        done += size
        drawn += LETTERS[name] * (round(done / total * width) - len(drawn))
    return drawn


def _show(outlook: RecipeForecast, measured: int | None, gpu: Gpu | None, out: TextIO) -> None:
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
        say(f"  maximum at other times: {', '.join(later)}", out)
    if memory.host:
        say(f"  in host memory between forward and backward: {gigabytes(memory.host)}", out)
    if memory.peak > memory.total * 1.005:
        where = "the first step" if memory.first_step >= memory.building else "building the model"
        say(f"  {where} needs more: {gigabytes(memory.peak)}", out)
    if outlook.plan is not None:
        say(f"  {outlook.plan}", out)
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
    count = data["parameters"]
    size = f"{count / 1e6:,.0f}M" if count >= 1e6 else f"{count:,}"
    title = f"{data['task']}, {size} parameters, batch {data['batch']}{shards} (GB = 10^9)"
    say("", out)
    show_table(title, ["", *names], rows, out)
    if data["lesson"]:
        say("textbook rows: the usual estimate for FP32 and mixed precision, with 10 and 5 GB of activations", out)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
