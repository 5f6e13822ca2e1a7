"""Replay: the result of replaying a step, and how it is written from the producer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from narrowgauge.gauges.replay import capture_files
from narrowgauge.gauges.replay.advice import advise
from narrowgauge.gauges.replay.nonfinite_flow import Origin
from narrowgauge.gauges.replay.optimizer_settings import HUGE, FaultySetting, find_faulty_setting
from narrowgauge.nn.matrix_inventory import EXPERTS
from narrowgauge.recipe import parse


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of replaying a captured step. If all was finite, fields that describe an op are None."""

    step: int
    message: str
    """The result in one sentence."""
    module: str | None = None
    """Path of the module that ran the op; (model) for the outermost, (loss) outside the model, (batch) for the data."""
    op: str | None = None
    """The aten op in forward, the autograd node in backward, or the torch.autograd.Function that contains it."""
    kernel: str | None = None
    """The aten op that was dispatched."""
    phase: str | None = None
    """forward or backward."""
    kind: str | None = None
    """inf or nan."""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """Name, shape, dtype, min, max and amax of each input."""
    output: dict[str, Any] | None = None
    """The same for the output."""
    microbatch: int | None = None
    """Number of the microbatch in the step, counted from 1."""
    source: str | None = None
    """file:line of the code that called the op (in backward: its forward op)."""
    survives_fp32: bool | None = None
    """Whether this op or the whole step is finite in FP32."""
    op_survives_fp32: bool | None = None
    """Whether this op is finite on these inputs in FP32."""
    step_survives_fp32: bool | None = None
    """Whether the whole step is finite under recipe fp32 with the same weights; None if that is unknown."""
    step_fp32_unknown: str | None = None
    """Why it is unknown."""
    op_survives_fp64: bool | None = None
    """Whether this op is finite on these inputs in FP64."""
    optimizer: str | None = None
    """The optimizer and its setting that destroyed the weights, such as ``AdamW eps=0``."""
    advice: str | None = None
    """How to fix it, in one line."""
    exact: bool = True
    """False if weights or batches are from a later step."""
    operations: int = 0
    """Number of ops that were run."""

    @property
    def found(self) -> bool:
        """Whether an op was found that produced inf or NaN."""
        return self.kind is not None

    def describe(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return asdict(self)


def make_finite_result(held: capture_files.Capture, operations: int) -> Replay:
    """The result of a step in which nothing was found."""
    why = held.facts.get("why", "")
    message = f"step {held.step} replays finite: no op produced an inf or NaN that reached the loss or a gradient"
    if not held.facts.get("exact", True):
        message += "; its weights or batches are not exactly those of the step, because its numbers arrived late"
    elif why and why not in capture_files.REQUESTED:
        message += f", although it was captured because {why}: the result may depend on the device or on compiled code"
    return Replay(step=held.step, message=message, exact=bool(held.facts.get("exact", True)), operations=operations)


def make_result(
    held: capture_files.Capture,
    origin: Origin,
    microbatch: int,
    survives: bool | None,
    reason: str | None,
    operations: int,
) -> Replay:
    """The result for a producer; ``survives`` and ``reason`` answer whether the step is finite in FP32."""
    op = origin.function or (origin.place.node if origin.phase == "backward" and origin.place.node else origin.op)
    known = [answer for answer in (survives, origin.survives.get("fp32")) if answer is not None]
    fault = _find_setting(held, origin)
    message, advice = _write_message(held, origin, op, microbatch), advise(op, origin, any(known), _read_scale(held))
    if fault is not None:
        message += f"; its weights come from updates by {fault.text}"
        advice = f"{fault.text}: {fault.effect}; change it and resume from a checkpoint before step {held.step}"
    elif origin.op == "parameter" and held.step == 1:
        advice = "the initial weights are not finite: check how they are initialized or loaded"
    return Replay(
        step=held.step,
        message=message,
        module=origin.place.module,
        op=op,
        kernel=origin.op,
        phase=origin.phase,
        kind=origin.kind,
        inputs=origin.inputs,
        output=origin.output,
        microbatch=microbatch,
        source=origin.place.source,
        survives_fp32=any(known) if known else None,
        op_survives_fp32=origin.survives.get("fp32"),
        step_survives_fp32=survives,
        step_fp32_unknown=reason,
        op_survives_fp64=origin.survives.get("fp64"),
        optimizer=None if fault is None else fault.text,
        advice=advice,
        exact=bool(held.facts.get("exact", True)),
        operations=operations,
    )


def _read_scale(held: capture_files.Capture) -> float | None:
    """The run's loss scale, if it does not adapt."""
    scale = parse(held.facts["recipe"]).loss_scale
    return float(scale) if isinstance(scale, int | float) else None


def _find_setting(held: capture_files.Capture, origin: Origin) -> FaultySetting | None:
    """The optimizer's setting that explains weights that are not finite, or an overflow from huge weights."""
    if held.step == 1 or origin.phase != "forward" or origin.op == "input":
        return None
    fault = find_faulty_setting(held.facts.get("optimizer"))
    if fault is None or origin.op == "parameter":
        return fault
    weights = [v for v in held.state["model"].values() if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]
    grown = any(float(weight.abs().max()) > HUGE for weight in weights)
    return fault if grown and not fault.needs_nan else None


def _name_experts(tensor: dict[str, Any]) -> str:
    """The experts of a stack that are not finite, unless all are."""
    parts, count = tensor.get("parts", []), tensor["shape"][0] if tensor["shape"] else 0
    if not parts or len(parts) == count or not EXPERTS.search(tensor["name"]):
        return ""
    more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
    return f" (expert{'s' if len(parts) > 1 else ''} {', '.join(map(str, parts[:4]))}{more} of {count})"


def _write_message(held: capture_files.Capture, origin: Origin, op: str, microbatch: int) -> str:
    kind = "NaN" if origin.kind == "nan" else "inf"
    count = len(held.state["microbatches"])
    when = f"step {held.step}" + (f", microbatch {microbatch} of {count}" if count > 1 else "")
    if origin.op == "input":
        return f"{when}: {origin.inputs[0]['name']} contains {kind}: it comes from the data"
    if origin.op in ("parameter", "buffer"):
        name = origin.inputs[0]["name"]
        return f"{when}: {origin.op} {name}{_name_experts(origin.inputs[0])} contains {kind} before the step"
    if origin.op == "gradient norm":
        return (
            f"{when}: every gradient is finite, but their norm overflows FP32: {origin.inputs[0]['name']} has a "
            f"gradient of {origin.inputs[0]['amax']:.3g}"
        )
    verb = "set" if origin.deliberate else "produced"
    if origin.op == "unseen":
        return f"{when}: {kind} reaches {origin.place.module} in a tensor that no observed op produced"
    return f"{when}: {op} {verb} {kind} in the {origin.phase} of {origin.place.module}"
