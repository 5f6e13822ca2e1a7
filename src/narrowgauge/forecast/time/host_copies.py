"""Predicts how long a step waits for inputs of blocks that are copied to the host, and back from there.

A copy runs beside the next block. What it takes longer than that block's forward, or its backward on the way back,
the step waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from narrowgauge.forecast.trace.trace import Op
from narrowgauge.forecast.trace.trace_step import Traced
from narrowgauge.hardware import interconnect

SHOWN = "waiting for the host's memory"
"""The name of this time among the kinds of work."""


def predict_wait(traced: Traced, costs: Iterable[tuple[Op, float, float]]) -> float:
    """Return the seconds that one step waits.

    Args:
        traced: The traced step.
        costs: Each operation, its seconds, and how often it runs; a block may represent others that were not traced.
    """
    paths = traced.block_paths
    if not traced.offloaded or not paths:
        return 0.0
    middle = paths[len(paths) // 2]
    spent, repeats = {"forward": 0.0, "backward": 0.0}, 1.0
    for op, seconds, times in costs:
        if op.phase in spent and is_inside(op.where, [middle]):
            spent[op.phase] += seconds
            repeats = times
    moved = "offload" if traced.recipe.offload == "none" else "full"
    planned = traced.plan.counts.get(moved, 0) if traced.plan is not None else 0
    copy_s = traced.offloaded / (planned or len(paths)) / (traced.gpu.node.pcie * interconnect().pcie_share)
    return (planned or len(paths) - 1 + repeats) * sum(max(0.0, copy_s - seconds) for seconds in spent.values())


def is_inside(where: str, paths: Sequence[str]) -> bool:
    """Whether a module is one of some, or inside of one."""
    return any(where == path or where.startswith(f"{path}.") for path in paths)
