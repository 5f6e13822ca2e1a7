"""``narrowgauge roofline``: what bounds each layer on a GPU, and a step's predicted time, speed and cost."""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli import Outcome, prose
from narrowgauge.cli.cluster_table import describe_scale, show_scale
from narrowgauge.cli.memory import (
    add_scale_arguments,
    add_size_arguments,
    cluster_for,
    find,
    gigabytes,
    refuse_small_budget,
    runnable,
    tell,
)
from narrowgauge.cli.numbers import number, whole
from narrowgauge.cli.terminal import say, show_table
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    from narrowgauge.forecast.compare import AttentionCost, Saving
    from narrowgauge.forecast.extrapolate import TracedModel
    from narrowgauge.forecast.run import Scenario
    from narrowgauge.forecast.time.roofline import Cost, Layer, Roofline
    from narrowgauge.forecast.trace.trace_step import Traced
    from narrowgauge.hardware import Device, Gpu
    from narrowgauge.task import Task

ABOUT = "predict each layer's FLOPs, bytes and bound on a GPU, and step time, tokens/s, MFU and cost per recipe"
RECIPES = "bf16,fp8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("task", nargs="?", metavar="TASK", help="built-in name or file.py:function")
    add("--gpu", help="comma-separated: h200,a100 (default: the installed one, else an H200)")
    add("--recipes", default=RECIPES, help=f"comma-separated (default {RECIPES})")
    add_size_arguments(parser)
    add_scale_arguments(parser)
    add("--price", type=number, metavar="P", help="price of a GPU hour, in any currency")
    add("--tokens", type=number, metavar="N", help="tokens (or images) to train on: 3e9 (default 1e9)")
    add("--layers", type=whole, default=24, metavar="N", help="number of layers to list, slowest first (default 24)")
    add("--quick", action="store_true", help="skip what fusions and fused attention save, which needs more traces")
    add("--no-measure", action="store_true", help="do not measure, even if the GPU is installed")


def run(args: argparse.Namespace) -> Outcome:
    for name in ("price", "tokens"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name} {value:g} must be a positive number")
    from narrowgauge import hardware

    task, first, device = find(args)
    gpus = list(dict.fromkeys(hardware.find_gpu(name) for name in args.gpu.split(","))) if args.gpu else [first]
    out = prose(args)
    data: dict[str, Any] = {}
    for gpu in gpus:
        found = _forecast(args, task, gpu, device, out)
        data = data or {**found, "gpus": {}}
        data["gpus"][gpu.name] = {key: found[key] for key in ("ridge", "recipes", "source")}
    if len(gpus) > 1 and not args.json:
        _show_gpus(data, task, args, out)
    return Outcome(data)


def _forecast(args: argparse.Namespace, task: Task, gpu: Gpu, device: Device, out: TextIO) -> dict[str, Any]:
    """The forecast for one GPU."""
    from narrowgauge.forecast.run import Scenario
    from narrowgauge.forecast.time.reachable_rates import ReachableRates
    from narrowgauge.forecast.time.roofline import estimate_costs, predict_time, sum_costs

    cluster = cluster_for(args, gpu)
    scenario = Scenario(
        task=task, gpu=gpu, accumulate=args.accumulate, compile=args.compile, cluster=cluster,
        parallel=args.parallel, fit=args.fit,
    )  # fmt: skip
    installed = device.kind == "cuda" and device.gpu is gpu and not args.no_measure and cluster is None
    roofs = _measure_roofs(device) if installed else {}
    rates = ReachableRates(gpu, roofs)
    if not args.json:
        _show_gpu(gpu, rates.source, roofs, out)
    recipes = scenario.choose_recipes(runnable(args.recipes, gpu, RECIPES, args.lora), tell)
    rows: dict[str, dict[str, Any]] = {}
    layers: list[dict[str, Any]] = []
    last: Traced | None = None
    for recipe in recipes:
        tell(f"{recipe} on {gpu.name}: tracing {'two' if args.fit is None else 'some'} simulated steps")
        traced_model = scenario.trace_model(recipe) if cluster is not None else None
        last = traced_model.traced if traced_model is not None else scenario.trace(recipe)
        costs = estimate_costs(last, rates)
        roofline = predict_time(last, rates) if traced_model is None else sum_costs(last, traced_model.costs(rates))
        real = _measure(args, scenario, last, costs, device) if installed else None
        rows[str(recipe)] = _describe(roofline, args, real) | _describe_memory(scenario, traced_model or last)
        if traced_model is not None:
            rows[str(recipe)]["scale"] = describe_scale(scenario, traced_model, rates, args)
        own = [_describe_layer(layer, str(recipe)) for layer in collapse(roofline.layers)]
        _add_measured(own, costs, real)
        layers += own
        if not args.json:
            _show_layers(own, roofline, task, args, out)
    assert last is not None
    refuse_small_budget(args.fit, {name: row["plan"] for name, row in rows.items()})
    extras = {} if args.quick or cluster is not None or args.fit is not None else _extras(scenario, last)
    if not args.json:
        _show_recipes(rows, task, gpu, args, out)
        for name, row in rows.items():
            if "scale" in row:
                show_scale(name, row["scale"], task, out)
        _show_extras(extras, str(last.recipe), out)
    return {
        "task": task.name,
        "optimizer": args.optimizer,
        "gpu": gpu.name,
        "ridge": {format: gpu.ridge(format) for format in gpu.peaks},
        "hierarchy": hierarchy(gpu),
        "source": rates.source,
        "roofs": roofs or None,
        "unit": task.unit,
        "layers": layers,
        "recipes": rows,
        "attention": vars(extras["attention"]) if extras.get("attention") else None,
        "fusions": [{**vars(saving), "saved_ms": saving.saved_ms} for saving in extras.get("fusions", [])],
    }


def hierarchy(gpu: Gpu) -> dict[str, float]:
    """The memory hierarchy: sizes from the fastest level to the slowest, and the bandwidth of the last."""
    return {
        "shared_memory_bytes": gpu.shared_memory_bytes * gpu.sms,
        "l2_bytes": gpu.l2_bytes,
        "memory_bytes": gpu.memory_bytes,
        "bandwidth": gpu.bandwidth,
        "nvlink": gpu.nvlink or 0.0,
    }


def collapse(layers: list[Layer]) -> list[Layer]:
    """Merge layers that differ only in a number of their path (the blocks of a model); slowest first."""
    import dataclasses

    groups: dict[tuple[str, ...], list[Layer]] = {}
    for layer in layers:
        path = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", layer.path)
        groups.setdefault((path, layer.kind, layer.phase, layer.format, layer.bound), []).append(layer)
    made = [
        dataclasses.replace(
            members[0],
            path=key[0],
            count=sum(layer.count for layer in members),
            flops=sum(layer.flops for layer in members),
            bytes=sum(layer.bytes for layer in members),
            ms=sum(layer.ms for layer in members),
        )
        for key, members in groups.items()
    ]
    return sorted(made, key=lambda layer: -layer.ms)


def _measure_roofs(device: Device) -> dict[str, float]:
    from narrowgauge.forecast.time.measure import measure_roofs

    tell("measuring peak rates: a copy, and a product in each format")
    return measure_roofs(device)


def _measure(
    args: argparse.Namespace, scenario: Scenario, traced: Traced, costs: list[Cost], device: Device
) -> dict[str, Any]:
    """Measure the whole step, and each operation on its own."""
    from narrowgauge.forecast.time.measure import measure_calls, measure_run

    tell(f"{traced.recipe}: measuring")
    whole = measure_run(
        scenario.task, traced.recipe, device, compile=args.compile, accumulate=traced.accumulate, plan=traced.plan
    )
    return {"step_ms": whole.step_ms, "peak": whole.peak_bytes, "calls": measure_calls(costs, device, tell)}


def _add_measured(layers: list[dict[str, Any]], costs: list[Cost], real: dict[str, Any] | None) -> None:
    """Add each layer's measured time, where all its operations could be measured on their own."""
    if real is None:
        return
    sums: dict[tuple[str, str, str], float] = {}
    for cost in costs:
        path = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", cost.op.where)
        key = path, cost.op.kind, cost.op.phase
        seconds = real["calls"].get(cost.op.call, math.nan) if cost.op.call is not None else math.nan
        sums[key] = sums.get(key, 0.0) + seconds * 1e3
    for layer in layers:
        ms = sums.get((layer["path"], layer["kind"], layer["phase"]), math.nan)
        one = sum(1 for other in layers if all(other[k] == layer[k] for k in ("path", "kind", "phase"))) == 1
        if one and math.isfinite(ms) and ms > 0:
            layer["measured_ms"], layer["error"] = ms, layer["ms"] / ms - 1


def _describe(roofline: Roofline, args: argparse.Namespace, real: dict[str, Any] | None) -> dict[str, Any]:
    items = args.tokens or 1e9
    return {
        "step_ms": roofline.step_ms,
        "tokens_per_s": roofline.items_per_s,
        "bound": roofline.bound,
        "mfu": roofline.mfu,
        "device_ms": roofline.device_ms,
        "host_ms": roofline.host_ms,
        "flops": roofline.flops,
        "bytes": roofline.bytes,
        "by_kind": roofline.by_kind,
        "by_bound": roofline.by_bound,
        "hours": items / roofline.items_per_s / 3600,
        "tokens": items,
        "cost": None if args.price is None else roofline.cost(items, args.price),
        "measured_ms": real["step_ms"] if real else None,
        "error": roofline.step_ms / real["step_ms"] - 1 if real else None,
        "notes": roofline.notes,
    }


def _describe_memory(scenario: Scenario, traced: Traced | TracedModel) -> dict[str, Any]:
    """Whether the step whose time is predicted fits into the GPU, and what its blocks keep for backward."""
    from narrowgauge.forecast.extrapolate import TracedModel
    from narrowgauge.forecast.memory.estimate import fits, predict_memory
    from narrowgauge.forecast.run import complete_plan
    from narrowgauge.forecast.trace.trace_step import Traced

    if isinstance(traced, TracedModel):
        memory = traced.memory(scenario.shards_of(traced))
    else:
        memory = predict_memory(traced)
    plan = complete_plan(traced, memory) if isinstance(traced, Traced) else None
    return {
        "peak": memory.peak,
        "fits": fits(memory, scenario.gpu) and (plan is None or plan.fits),
        "plan": None if plan is None else plan.describe(),
    }


def _describe_layer(layer: Layer, recipe: str) -> dict[str, Any]:
    return {"recipe": recipe, **vars(layer), "intensity": layer.intensity, "measured_ms": None, "error": None}


def _extras(scenario: Scenario, traced: Traced) -> dict[str, Any]:
    from narrowgauge.forecast.compare import compare_attention, compare_fusions

    tell(f"{traced.recipe}: tracing without fused attention and without fusions")
    return {
        "attention": compare_attention(scenario, traced.recipe, traced),
        "fusions": compare_fusions(scenario, traced.recipe, traced),
    }


def _show_gpu(gpu: Gpu, source: str, roofs: dict[str, float], out: TextIO) -> None:
    levels = hierarchy(gpu)
    say(
        f"{gpu.name}: {gpu.sms} SMs with {levels['shared_memory_bytes'] / 2**20:.0f} MiB of shared memory, L2 "
        f"{gpu.l2_bytes / 2**20:.0f} MiB, memory {gigabytes(gpu.memory_bytes)} at {gpu.bandwidth / 1e12:.2f} TB/s",
        out,
    )
    peaks = ", ".join(f"{name} {peak / 1e12:.0f} ({gpu.ridge(name):.0f})" for name, peak in gpu.peaks.items())
    say(f"  peaks in TFLOP/s (ridge point in FLOP/byte): {peaks}", out)
    say(f"  rates: {source}", out)
    for name, rate in roofs.items():
        peak = gpu.bandwidth if name == "copy" else gpu.peak(name)
        say(f"  measured {name}: {rate / 1e12:.4g} T/s, {rate / peak:.0%} of the datasheet", out)


def _show_layers(
    layers: list[dict[str, Any]], roofline: Roofline, task: Task, args: argparse.Namespace, out: TextIO
) -> None:
    rows = []
    shown = layers[: args.layers]
    measured = any(layer["measured_ms"] is not None for layer in layers)
    for layer in shown:
        name = f"{layer['path'] or '(model)'}: {layer['kind']}"
        measured_cells = []
        if measured:
            known = layer["measured_ms"] is not None
            measured_cells = [f"{layer['measured_ms']:.2f}", f"{layer['error']:+.0%}"] if known else ["", ""]
        rows.append(
            [
                name, layer["phase"], layer["format"], str(layer["count"]), f"{layer['flops'] / 1e9:,.0f}",
                f"{layer['bytes'] / 1e6:,.0f}", f"{layer['intensity']:.0f}", layer["bound"], f"{layer['ms']:.2f}",
                *measured_cells,
            ]
        )  # fmt: skip
    rest = sum(layer["ms"] for layer in layers[args.layers :])
    if rest > 0:
        rows.append([f"({len(layers) - len(shown)} more)", *[""] * 7, f"{rest:.2f}", *([""] * 2 if measured else [])])
    columns = ["layer", "phase", "format", "ops", "GFLOP", "MB", "FLOP/byte", "bound", "ms"]
    say("", out)
    show_table(f"{task.name}, {roofline.recipe}", [*columns, *(["measured", "error"] if measured else [])], rows, out)


def _show_recipes(rows: dict[str, dict[str, Any]], task: Task, gpu: Gpu, args: argparse.Namespace, out: TextIO) -> None:
    from narrowgauge.nn.memory_plan import MemoryPlan

    say("", out)
    columns = ["", "step ms", f"{task.unit}s/s", "MFU", "bound", "hours", "cost", "measured ms", "error"]
    cells = [
        [
            name,
            f"{row['step_ms']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            row["bound"],
            f"{row['hours']:,.1f}",
            "" if row["cost"] is None else f"{row['cost']:,.2f}",
            "" if row["measured_ms"] is None else f"{row['measured_ms']:.2f}",
            "" if row["error"] is None else f"{row['error']:+.1%}",
        ]
        for name, row in rows.items()
    ]
    items = args.tokens or 1e9
    alone = "one " if any("scale" in row for row in rows.values()) else ""
    show_table(f"{task.name} on {alone}{gpu.name}; hours and cost for {items:,.0f} {task.unit}s", columns, cells, out)
    for name, row in rows.items():
        if not row["fits"]:
            size = f"{gigabytes(row['peak'])} of {gigabytes(gpu.memory_bytes)}"
            say(f"{name} does NOT fit into {gpu.name} ({size}): narrowgauge memory says what to change", out)
        if row["plan"] is not None:
            say(f"{name}: {MemoryPlan.read(row['plan'])}", out)
        for note in row["notes"]:
            say(f"{name}: {note}", out)


def _show_extras(extras: dict[str, Any], recipe: str, out: TextIO) -> None:
    attention: AttentionCost | None = extras.get("attention")
    fusions: list[Saving] = extras.get("fusions", [])
    if attention is not None:
        say(
            f"attention ({recipe}): {attention.fused_ms:.1f} ms per step with {attention.backend}, "
            f"{attention.plain_ms:.1f} ms unfused, with a peak of {gigabytes(attention.plain_peak)} instead of "
            f"{gigabytes(attention.fused_peak)}",
            out,
        )
    for saving in fusions:
        say(
            f"fused {saving.name}: {saving.with_ms:.1f} ms per step instead of {saving.without_ms:.1f} "
            f"({saving.saved_ms:+.1f} saved)",
            out,
        )


def _show_gpus(data: dict[str, Any], task: Task, args: argparse.Namespace, out: TextIO) -> None:
    rows = [
        [gpu, recipe, f"{row['step_ms']:.2f}", f"{row['tokens_per_s']:,.0f}", row["bound"],
         "" if row["cost"] is None else f"{row['cost']:,.2f}"]
        for gpu, found in data["gpus"].items()
        for recipe, row in found["recipes"].items()
    ]  # fmt: skip
    say("", out)
    show_table(task.name, ["GPU", "recipe", "step ms", f"{task.unit}s/s", "bound", "cost"], rows, out)
