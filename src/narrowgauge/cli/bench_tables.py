"""The tables that ``narrowgauge bench`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.cli.terminal import say, show_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narrowgauge.bench.compare import Row
    from narrowgauge.bench.losses import LossGap
    from narrowgauge.bench.trace import Summary
    from narrowgauge.hardware import Device
    from narrowgauge.task import Task


def show_rows(title: str, task: Task, rows: Sequence[Row], out: TextIO) -> None:
    """Print the table of measurements. Energy is left out if none was measured."""
    unit, has_energy = task.unit, any(row.joules_per_token is not None for row in rows)
    speed = ["", f"{unit}s/s", *([f"mJ/{unit}"] if has_energy else [])]
    others = ["step ms", "fastest-slowest", "peak GiB", "MFU", "x first", "x baseline", "loss", "ready s"]
    cells = []
    for row in rows:
        joules = "" if row.joules_per_token is None else f"{row.joules_per_token * 1e3:.4g}"
        cells.append(
            [
                row.name,
                f"{row.tokens_per_s:,.0f}" if row.tokens_per_s >= 100 else f"{row.tokens_per_s:.3g}",
                *([joules] if has_energy else []),
                f"{row.step_ms:.2f}",
                f"{row.step_ms_low:.2f}-{row.step_ms_high:.2f}",
                "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
                "" if row.mfu is None else f"{row.mfu:.1%}",
                f"{row.ratio:.2f}",
                "" if row.twin_ratio is None else f"{row.twin_ratio:.3f}",
                f"{row.loss:.3f}",
                "" if row.ready_s is None else f"{row.ready_s:.1f}",
            ]
        )
    show_table(title, [*speed, *others], cells, out)


def show_losses(gaps: Sequence[LossGap], out: TextIO) -> None:
    """Print how the losses of recipes differ from those of their baselines."""
    for gap in gaps:
        doubt = "" if gap.comparable else "; more than rounding explains, unless dropout or a small batch does"
        say(f"{gap}{doubt}", out)


def show_blocks(rows: Sequence[Row], out: TextIO) -> None:
    """Print which blocks of each recipe's model run fused, in which form, and what they keep for backward."""
    from narrowgauge.nn.memory_plan import MemoryPlan

    for row in rows:
        if row.conversion is None:
            continue
        say(f"{row.name}: {row.conversion['summary']}", out)
        for kind in row.conversion["fused"]:
            more = "" if kind["count"] == 1 else ", ..."
            say(f"  fused: {kind['count']} {kind['class']} ({kind['first']}{more}): {kind['form']}", out)
        for line in row.conversion["unfused"]:
            say(f"  {line}", out)
        if row.memory_plan is not None:
            say(f"  {MemoryPlan.read(row.memory_plan)}", out)


def show_gate(found: dict[str, Any], path: str, device: Device, out: TextIO) -> None:
    """Print the verdicts of the gate."""
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


def show_profile(found: dict[str, Summary], device: Device, out: TextIO) -> None:
    """Print the time by kind of work."""
    kinds = [kind for kind in next(iter(found.values())).shares if any(one.shares[kind] for one in found.values())]
    rows = []
    for name, one in found.items():
        cores = "" if one.tensor_cores is None else f"{one.tensor_cores:.1%}"
        rows.append([name, f"{one.total_ms:.2f}", *(f"{one.shares[kind]:.1%}" for kind in kinds), cores])
    what = "kernels" if device.kind == "cuda" else "operators"
    show_table("time of a step by kind of work", ["", f"ms in {what}", *kinds, "products on tensor cores"], rows, out)
    for name, one in found.items():
        say(f"{name}: {one.trace} (open it in ui.perfetto.dev)", out)
