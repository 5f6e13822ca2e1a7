"""Runs a captured step again, op by op, and names the op that made the first inf or NaN.

model, recipe, weights, FP8 scales, loss scale   as they were; nothing compiled, nothing recomputed
for each microbatch:
    random states as they were; forward, then backward, under ``Dataflow``
    loss or a gradient not finite: its origin is the producer; stop
where the producer lies inside narrowgauge's fused blocks: again without them, for the module's name
where there is one: the whole step again under recipe fp32, to say whether FP32 survives it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import random_state
from narrowgauge.engine import Engine
from narrowgauge.errors import NarrowgaugeError, UsageError
from narrowgauge.gauges.replay import capture_files
from narrowgauge.gauges.replay.advice import advise
from narrowgauge.gauges.replay.nonfinite_flow import Dataflow, Event, Source, choose, input_source, kind_of, values_of
from narrowgauge.gauges.replay.op_locations import Places
from narrowgauge.optim import load_full_precision
from narrowgauge.recipe import Recipe, parse

Model = nn.Module | Callable[[], nn.Module]
Loss = Callable[[nn.Module, Any], Tensor]
FUSED = ("_Block", "_LastNorm", "_HeadLoss")
"""narrowgauge's own functions that stand for several modules at once."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What came of replaying a captured step. Everything but ``step`` and ``message`` is None where all was finite."""

    step: int
    message: str
    """The finding in a sentence."""
    module: str | None = None
    """Path of the module whose op it was; (model) for the outermost, (loss) outside of it, (batch) for the data."""
    op: str | None = None
    """aten's name in forward and the autograd node's in backward; in a torch.autograd.Function that one's name."""
    kernel: str | None = None
    """The op that was dispatched, in aten's name."""
    phase: str | None = None
    """forward or backward."""
    kind: str | None = None
    """inf or nan."""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """Name, shape, dtype, min, max and amax of each."""
    output: dict[str, Any] | None = None
    microbatch: int | None = None
    """Which of the step's microbatches, counted from 1."""
    source: str | None = None
    """file:line of the code that asked for the op (in backward: for its forward)."""
    survives_fp32: bool | None = None
    """Whether FP32 would have survived it: this op, or the whole step."""
    op_survives_fp32: bool | None = None
    """Whether this op on these inputs, widened to FP32, is finite."""
    step_survives_fp32: bool | None = None
    """Whether the whole step is finite under recipe fp32, from the same weights."""
    op_survives_fp64: bool | None = None
    advice: str | None = None
    exact: bool = True
    """Whether weights and batches are those of the step, or of a little later."""
    operations: int = 0

    @property
    def found(self) -> bool:
        return self.kind is not None

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def replay(
    capture: str | Path | capture_files.Capture,
    model: Model,
    loss: Loss,
    *,
    progress: Callable[[str], None] | None = None,
) -> Replay:
    """Name the op behind the inf or NaN of a captured step.

    ``model`` is a fresh model of the same kind, or better a function that makes one: it is given the captured weights,
    and changed as recipes change a model. ``loss(model, batch)`` is the loop's loss of one microbatch.
    """
    held = capture if isinstance(capture, capture_files.Capture) else capture_files.read(Path(capture))
    recipe = _recipe(held)
    with random_state.put_back(), torch.compiler.set_stance("force_eager"):
        attempt = _Attempt(held, model, loss, progress)
        event, microbatch = attempt.trace(recipe, bool(held.facts["fused"]))
        if event is not None and event.function in FUSED:
            apart, where = attempt.trace(recipe, False)
            if apart is not None:
                event, microbatch = apart, where
        if event is None:
            return _finite(held, attempt.operations)
        survives = attempt.survives_fp32(recipe)
    return _named(held, event, microbatch, survives, attempt.operations)


def _recipe(held: capture_files.Capture) -> Recipe:
    """The run's recipe, as far as it decides what is computed."""
    try:
        recipe = parse(held.facts["recipe"])
    except (KeyError, UsageError) as error:
        raise UsageError(f"capture {held.path}: its recipe cannot be read ({error})") from None
    changes: dict[str, Any] = {"checkpoint": "none", "moments": "fp32"}
    if recipe.gradients == "released":  # or backward would step
        changes["gradients"] = "fp32" if recipe.master == "fp32" else "bf16"
    if held.facts.get("loss_scale") is not None:
        changes["loss_scale"] = float(held.facts["loss_scale"])
    return recipe.replace(**changes)


def _for_device(recipe: Recipe, device: str) -> Recipe:
    """The recipe of a GPU's capture as a CPU can run it."""
    if device == "cuda":
        return recipe
    attention = recipe.attention if recipe.attention in ("auto", "any", "math") else "any"
    return recipe.replace(attention=attention, compute="fp32" if recipe.compute == "tf32" else recipe.compute)


class _Attempt:
    """Runs the captured step, as often as it takes."""

    def __init__(
        self, held: capture_files.Capture, model: Model, loss: Loss, progress: Callable[[str], None] | None
    ) -> None:
        self.held, self.loss, self.progress = held, loss, progress
        self._model = model
        self._used = False
        self.operations = 0

    def trace(self, recipe: Recipe, fused: bool) -> tuple[Event | None, int]:
        """The producer, and the microbatch (from 1) it belongs to."""
        engine = self._engine(recipe, fused)
        places = Places(engine.model)
        flow = Dataflow(places, self.progress)
        count = len(self.held.state["microbatches"])
        with places.following():
            for number, batch in self._microbatches(engine):
                flow.label = f"microbatch {number} of {count}, "
                _introduce(flow, places, engine.model, batch)
                with engine.forward(), places.functions(), flow:
                    value = self._call(engine.model, batch, number)
                    scaled = engine.scaled(value)
                    places.claim(scaled)
                event = flow.origin(value.detach()) or flow.origin(scaled.detach())
                if event is None:
                    with engine.step_context.backward(), places.backward(), places.functions(), flow:
                        _explained(scaled.backward, number)
                    grads = [p.grad for p in engine.model.parameters() if p.grad is not None]
                    event = choose([origin for grad in grads if (origin := flow.origin(grad)) is not None])
                places.forget()
                self.operations = flow.ops
                if event is not None:
                    return event, number
        if not _norm_is_finite(engine.model):
            name, largest = max(engine.model.named_parameters(), key=lambda pair: _size(pair[1]))
            return flow.overflowing_norm(name, places.owner(largest), _gradient(largest)), count
        return None, 0

    def survives_fp32(self, recipe: Recipe) -> bool | None:
        """Whether the whole step is finite in FP32; None where the model cannot be taken back to it."""
        if recipe.compute == "fp32":
            return False
        if isinstance(self._model, nn.Module) and recipe.master != "fp32":
            return None  # its weights are BF16 now
        engine = self._engine(Recipe(), False)
        for number, batch in self._microbatches(engine):
            if self.progress is not None:
                self.progress(f"the same step in FP32, microbatch {number}")
            with engine.forward():
                value = self._call(engine.model, batch, number)
            if kind_of(value) is not None:
                return False
            engine.backward(value)
        return _norm_is_finite(engine.model)

    def _engine(self, recipe: Recipe, fused: bool) -> Engine:
        facts, state = self.held.facts, self.held.state
        model = self._model if isinstance(self._model, nn.Module) else self._model()
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
        recipe = _for_device(recipe, next(model.parameters()).device.type)
        engine = Engine(model, optimizer, recipe, accumulate=int(facts["accumulate"]), fused=fused)
        try:
            load_full_precision(model, _without_wrappers(state["model"]))
            for name, buffer in model.named_buffers():
                if name in state["buffers"]:
                    buffer.copy_(state["buffers"][name])
        except (RuntimeError, AttributeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UsageError(
                f"the model does not fit the weights of capture {self.held.path}: {reason}; give the model that was "
                "trained"
            ) from None
        if engine.conversion.scales is not None and state["tensor_scales"] is not None:
            engine.conversion.scales.load_state_dict(state["tensor_scales"])
        resting = set(facts["in_evaluation"])
        for name, module in model.named_modules():
            module.training = name not in resting
        model.zero_grad(set_to_none=True)
        return engine

    def _microbatches(self, engine: Engine) -> Iterator[tuple[int, Any]]:
        """Each batch on the engine's device, the random states put back to before its forward."""
        for number, microbatch in enumerate(self.held.state["microbatches"], 1):
            batch = _to(capture_files.unpack(microbatch["batch"]), engine.device)
            random_state.restore(microbatch["random"])
            yield number, batch

    def _call(self, model: nn.Module, batch: Any, number: int) -> Tensor:
        value: Tensor = _explained(lambda: self.loss(model, batch), number)
        return value


def _explained(call: Callable[[], Any], number: int) -> Any:
    """What a call returns; what it raises becomes one line."""
    try:
        return call()
    except NarrowgaugeError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise UsageError(
            f"replaying microbatch {number} raised {type(error).__name__}: {reason}; give the model and the loss that "
            "were trained with"
        ) from error


def _introduce(flow: Dataflow, places: Places, model: nn.Module, batch: Any) -> None:
    """Say what the tensors are that were there before the step."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            flow.know(parameter, Source("parameter", f"{path}.{name}".strip("."), places.owner(parameter)))
        for name, buffer in module.named_buffers(recurse=False):
            flow.know(buffer, Source("buffer", f"{path}.{name}".strip("."), path or "(model)"))
    for place, tensor in capture_files.tensors_in(batch):
        flow.know(tensor, input_source(place))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else values_of(parameter.grad)


def _size(parameter: Tensor) -> float:
    return float(torch.linalg.vector_norm(_gradient(parameter).double()))


def _norm_is_finite(model: nn.Module) -> bool:
    """Whether the engine would take the gradients: it looks at their norm, which may leave FP32 before they do."""
    norms = torch.stack([torch.linalg.vector_norm(_gradient(p).float()).cpu() for p in model.parameters()])
    return bool(torch.isfinite(torch.linalg.vector_norm(norms)))


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _to(item, device) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to(item, device) for item in batch)
    return batch


def _without_wrappers(state: dict[str, Any]) -> dict[str, Any]:
    """The weights under the names they have without torch.compile's wrapper around the whole model."""
    if all(name.startswith("_orig_mod.") for name in state):
        return {name.removeprefix("_orig_mod."): value for name, value in state.items()}
    return state


def _finite(held: capture_files.Capture, operations: int) -> Replay:
    why = held.facts.get("why", "")
    message = f"step {held.step} replays finite: no op made an inf or NaN that reached the loss or a gradient"
    if not held.facts.get("exact", True):
        message += "; its weights or batches are not exactly those of the step, as the news of it came late"
    elif why and why not in capture_files.REQUESTED:
        message += f", though it was captured because {why}: it may depend on the device or on compiled code"
    return Replay(step=held.step, message=message, exact=bool(held.facts.get("exact", True)), operations=operations)


def _named(
    held: capture_files.Capture, event: Event, microbatch: int, survives: bool | None, operations: int
) -> Replay:
    op = event.function or (event.place.node if event.phase == "backward" and event.place.node else event.op)
    known = [answer for answer in (survives, event.survives.get("fp32")) if answer is not None]
    return Replay(
        step=held.step,
        message=_sentence(held, event, op, microbatch),
        module=event.place.module,
        op=op,
        kernel=event.op,
        phase=event.phase,
        kind=event.kind,
        inputs=event.inputs,
        output=event.output,
        microbatch=microbatch,
        source=event.place.source,
        survives_fp32=any(known) if known else None,
        op_survives_fp32=event.survives.get("fp32"),
        step_survives_fp32=survives,
        op_survives_fp64=event.survives.get("fp64"),
        advice=advise(op, event, any(known)),
        exact=bool(held.facts.get("exact", True)),
        operations=operations,
    )


def _sentence(held: capture_files.Capture, event: Event, op: str, microbatch: int) -> str:
    kind = "NaN" if event.kind == "nan" else "inf"
    count = len(held.state["microbatches"])
    when = f"step {held.step}" + (f", microbatch {microbatch} of {count}" if count > 1 else "")
    if event.op == "input":
        return f"{when}: {event.inputs[0]['name']} holds {kind}: the data brought it"
    if event.op in ("parameter", "buffer"):
        return f"{when}: {event.op} {event.inputs[0]['name']} holds {kind} before the step begins"
    if event.op == "gradient norm":
        return (
            f"{when}: every gradient is finite, but their norm leaves FP32: {event.inputs[0]['name']} has "
            f"{event.inputs[0]['amax']:.3g}"
        )
    made = "put there" if event.deliberate else "made"
    if event.op == "unseen":
        return f"{when}: {kind} comes to {event.place.module} in a tensor that no op was seen to make"
    return f"{when}: {kind} is {made} by {op} in the {event.phase} of {event.place.module}"
