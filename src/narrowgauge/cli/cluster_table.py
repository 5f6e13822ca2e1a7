"""The part of ``narrowgauge roofline`` about several GPUs: its JSON, and its tables on the terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli.memory import gigabytes
from narrowgauge.cli.terminal import say, show_table

if TYPE_CHECKING:
    from narrowgauge.forecast.cluster.predict_cluster import ClusterStep
    from narrowgauge.forecast.extrapolate import TracedModel
    from narrowgauge.forecast.run import Scenario
    from narrowgauge.forecast.time.reachable_rates import ReachableRates
    from narrowgauge.task import Task


def describe_scale(
    scenario: Scenario, traced_model: TracedModel, rates: ReachableRates, args: argparse.Namespace
) -> dict[str, Any]:
    """An update on the cluster, on smaller ones, and with the other kind of parallelism."""
    from narrowgauge.forecast.cluster.predict_cluster import list_cluster_sizes, predict_cluster_step
    from narrowgauge.forecast.memory.estimate import fits

    assert scenario.cluster is not None
    full = predict_cluster_step(traced_model, rates, scenario.cluster, scenario.parallel)
    other = predict_cluster_step(traced_model, rates, scenario.cluster, "ddp" if full.parallel == "fsdp" else "fsdp")
    items = args.tokens or 1e9
    hours = items / full.items_per_s / 3600
    table = []
    for cluster in list_cluster_sizes(scenario.cluster):
        one = predict_cluster_step(traced_model, rates, cluster, full.parallel)
        memory = traced_model.memory(cluster.gpus if full.parallel == "fsdp" else 1)
        table.append({**_describe_scaled(one), "peak": memory.peak, "fits": fits(memory, scenario.gpu)})
    alone = traced_model.memory(1 if full.parallel == "fsdp" else scenario.cluster.gpus)
    return {
        **_describe_scaled(full),
        "per_gpu": {
            "batch": full.batch,
            "tokens": traced_model.traced.items,
            **{k: table[-1][k] for k in ("peak", "fits")},
        },
        "communication": [{**vars(message), "hidden_ms": message.hidden_ms} for message in full.communication],
        "tokens": items,
        "hours": hours,
        "days": hours / 24,
        "cost": None if args.price is None else hours * full.gpus * args.price,
        "alternative": {**_describe_scaled(other), "peak": alone.peak, "fits": fits(alone, scenario.gpu)},
        "sizes": table,
        "notes": traced_model.notes,
    }


def _describe_scaled(scaled: ClusterStep) -> dict[str, Any]:
    names = ("gpus", "nodes", "parallel", "step_ms", "compute_ms", "communication_ms", "exposed_ms", "mfu",
             "efficiency", "bound", "hidden_from_batch", "load")  # fmt: skip
    return {**{name: getattr(scaled, name) for name in names}, "tokens_per_s": scaled.items_per_s}


def show_scale(recipe: str, scale: dict[str, Any], task: Task, out: TextIO) -> None:
    """Print the communication between the GPUs, and the same for smaller clusters."""
    rows = [
        [one["name"], str(one["count"]), gigabytes(one["bytes"]), gigabytes(one["sent_bytes"]), one["via"],
         f"{one['bandwidth'] / 1e9:.0f}", f"{one['ms']:.1f}", f"{one['hidden_ms']:.1f}", f"{one['exposed_ms']:.1f}"]
        for one in scale["communication"]
    ]  # fmt: skip
    where = f"{scale['gpus']} GPUs on {scale['nodes']} {'nodes' if scale['nodes'] > 1 else 'node'}"
    how = {"fsdp": "shards (FSDP2)", "ddp": "copies (DDP)"}
    say("", out)
    columns = ["", "count", "size", "sent per GPU", "over", "GB/s", "ms", "hidden", "exposed"]
    show_table(f"{task.name}, {recipe}, {where}: {how[scale['parallel']]}", columns, rows, out)
    table = [
        [str(one["gpus"]), str(one["nodes"]), f"{one['compute_ms']:.0f}", f"{one['communication_ms']:.0f}",
         f"{one['exposed_ms']:.0f}", f"{one['step_ms']:.0f}", f"{one['tokens_per_s']:,.0f}",
         "" if one["mfu"] is None else f"{one['mfu']:.1%}", f"{one['efficiency']:.1%}", one["bound"],
         str(one["hidden_from_batch"] or ""), f"{gigabytes(one['peak'])}{'' if one['fits'] else ', too much'}"]
        for one in scale["sizes"]
    ]  # fmt: skip
    columns = ["GPUs", "nodes", "compute ms", "comm. ms", "exposed ms", "step ms", f"{task.unit}s/s", "MFU",
               "efficiency", "bound", "hidden from batch", "memory per GPU"]  # fmt: skip
    show_table(f"{recipe}, {scale['per_gpu']['tokens']:,} {task.unit}s per GPU and update", columns, table, out)
    other = scale["alternative"]
    say(
        f"{how[other['parallel']]} instead: {other['step_ms']:.0f} ms per step, {other['exposed_ms']:.0f} of them "
        f"exposed; {gigabytes(other['peak'])} on each GPU, which {'fits' if other['fits'] else 'does not fit'}",
        out,
    )
    cost = "" if scale["cost"] is None else f" and cost {scale['cost']:,.0f}"
    lasts = f"{scale['days']:,.1f} days" if scale["days"] >= 2 else f"{scale['hours']:,.1f} hours"
    say(f"{scale['tokens']:,.0f} {task.unit}s take {lasts}{cost}", out)
    say("link rates from datasheets and NCCL's tuning model, none of them measured: docs/scale.md", out)
    for note in scale["notes"]:
        say(note, out)
