"""Advice for an op that produced inf or NaN: chosen by the exact op, the phase, the kind of value and the inputs."""

from __future__ import annotations

import re
from collections.abc import Callable

from narrowgauge.gauges.replay import advice_table as table
from narrowgauge.gauges.replay.nonfinite_flow import Origin


def _has_negative_exponent(origin: Origin) -> bool:
    exponents = [entry for entry in origin.inputs if entry["name"] == "exponent"]
    return any(float(entry.get("value", entry.get("min")) or 0) < 0 for entry in exponents)


def _list_formats(origin: Origin) -> set[str]:
    return {str(entry.get("dtype")) for entry in [*origin.inputs, origin.output]}


CONDITIONS: dict[str, Callable[[Origin], bool]] = {
    "empty": lambda origin: any(0 in entry.get("shape", ()) for entry in origin.inputs),
    "infinite input": lambda origin: any("inf" in entry for entry in origin.inputs),
    "infinite number": lambda origin: any(entry.get("value") in ("inf", "-inf", "nan") for entry in origin.inputs),
    "negative exponent": _has_negative_exponent,
    "16 bits": lambda origin: bool(_list_formats(origin) & {"float16", "bfloat16"}),
}
"""Conditions on the inputs that rows of the table may have."""


def advise(op: str, origin: Origin, survives: bool, fixed_scale: float | None = None) -> str:
    """Return one line of advice.

    Args:
        op: The op as it is shown to the user.
        origin: Where the inf or NaN comes from.
        survives: Whether the op or the step is finite in FP32.
        fixed_scale: The run's loss scale, if it has one that does not adapt.
    """
    if origin.op in table.SOURCES:
        return table.SOURCES[origin.op]
    if origin.deliberate:
        return table.DELIBERATE_NAN if origin.kind == "nan" else table.DELIBERATE
    formats = _list_formats(origin)
    lines = []
    if origin.phase == "backward" and fixed_scale is not None and fixed_scale > 1 and survives and "float16" in formats:
        lines.append(table.FIXED_SCALE.format(scale=fixed_scale))
    elif survives and formats & {"float16", "bfloat16"}:
        module = origin.place.module
        precision = table.UPCAST if module.startswith("(") else table.KEEP.format(module=module)  # (loss) has no path
        lines.append(precision + (table.BF16 if "float16" in formats else ""))
    row = find_row(op, origin)
    if row is not None:
        lines.append(row.advice)
    return "; ".join(lines) or table.GENERAL


def find_row(op: str, origin: Origin) -> table.Row | None:
    """Return the row of the table for an op, or None.

    A backward node is looked up as the derivative of its op. If it has no row, and inside a torch.autograd.Function or
    a hook, the kernel that ran is looked up as what it is: an op that computes something from its inputs.
    """
    node = re.fullmatch(r"(\w+?)Backward\d*", op) or re.fullmatch(r"CopySlices of (\w+)", op)
    for name, phase in ((node[1] if node else op, origin.phase), (origin.op, "forward")):
        for row in table.ROWS:
            if _matches(row, _simplify(name), phase, origin):
                return row
    return None


def _matches(row: table.Row, name: str, phase: str, origin: Origin) -> bool:
    return (
        name in map(_simplify, row.ops)
        and row.phase in (None, phase)
        and row.kind in (None, origin.kind)
        and (row.when is None or CONDITIONS[row.when](origin))
    )


def _simplify(name: str) -> str:
    """One spelling for aten.log_, log and Log; for aten._softmax and Softmax."""
    return name.removeprefix("aten.").replace("_", "").lower()
