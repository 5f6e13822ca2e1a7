"""Replays a captured step op by op and names the op that produced the first inf or NaN.

model, recipe, weights, FP8 scales and loss scale are as captured; nothing is compiled or recomputed
for each microbatch:
    restore the random states; run forward, then backward, under ``NonfiniteFlow``
    if the loss or a gradient is not finite: its origin is the producer; stop
if the producer is inside narrowgauge's fused blocks: replay without them, to name the module
if there is a producer: run the whole step under recipe fp32, to find out whether it is finite there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import random_state
from narrowgauge.engine import Engine
from narrowgauge.errors import NarrowgaugeError, UsageError
from narrowgauge.gauges.replay import capture_files
from narrowgauge.gauges.replay.nonfinite_flow import (
    NonfiniteFlow,
    Origin,
    Source,
    choose_origin,
    make_input_source,
)
from narrowgauge.gauges.replay.op_locations import OpLocator
from narrowgauge.gauges.replay.result import Replay, make_finite_result, make_result
from narrowgauge.gauges.replay.tensor_values import classify_nonfinite, read_values
from narrowgauge.nn.speed_advice import no_speed_warnings
from narrowgauge.optim import load_full_precision
from narrowgauge.recipe import Recipe, parse

Model = nn.Module | Callable[[], nn.Module]
Loss = Callable[[nn.Module, Any], Tensor]
FUSED = ("_Block", "_LastNorm", "_HeadLoss")
"""narrowgauge's own autograd functions that replace several modules."""


def replay(
    capture: str | Path | capture_files.Capture,
    model: Model,
    loss: Loss,
    *,
    progress: Callable[[str], None] | None = None,
) -> Replay:
    """Replay a captured step op by op and find the op that produced the first inf or NaN.

    Args:
        capture: A capture, a folder of captures or a run; for the latter two, the first capture is replayed.
        model: A function that creates the model, or a model. A model that is passed in is changed: it gets the captured
            weights and is converted to the recipe.
        loss: ``loss(model, batch)`` returns the loss of one microbatch, as in the training loop.
        progress: Receives a line of progress every two seconds.

    Returns:
        The result. ``found`` is False if the step is finite when replayed.

    Raises:
        UsageError: The capture cannot be read, the model does not fit its weights, or the model or loss failed.
    """
    held = capture if isinstance(capture, capture_files.Capture) else capture_files.read(Path(capture))
    recipe = _read_recipe(held)
    with random_state.preserve(), torch.compiler.set_stance("force_eager"):
        replayer = _Replayer(held, model, loss, progress)
        origin, microbatch = replayer.trace(recipe, bool(held.facts["fused"]))
        if origin is not None and origin.function in FUSED:
            unfused, number = replayer.trace(recipe, False)
            if unfused is not None:
                origin, microbatch = unfused, number
        if origin is None:
            return make_finite_result(held, replayer.operations)
        survives, reason = replayer.check_fp32(recipe)
    return make_result(held, origin, microbatch, survives, reason, replayer.operations)


def _read_recipe(held: capture_files.Capture) -> Recipe:
    """The run's recipe, without the parts that do not change results."""
    try:
        recipe = parse(held.facts["recipe"])
    except (KeyError, UsageError) as error:
        raise UsageError(f"capture {held.path}: its recipe cannot be read ({error})") from None
    changes: dict[str, Any] = {"checkpoint": "none", "moments": "fp32"}
    if recipe.gradients == "released":  # otherwise backward would update the weights
        changes["gradients"] = "fp32" if recipe.master == "fp32" else "bf16"
    if held.facts.get("loss_scale") is not None:
        changes["loss_scale"] = float(held.facts["loss_scale"])
    return recipe.replace(**changes)


def _adapt_to_device(recipe: Recipe, device: str) -> Recipe:
    """The recipe of a capture from a GPU, changed so that a CPU can run it."""
    if device == "cuda":
        return recipe
    attention = recipe.attention if recipe.attention in ("auto", "any", "math") else "any"
    return recipe.replace(attention=attention, compute="fp32" if recipe.compute == "tf32" else recipe.compute)


class _Replayer:
    """Runs the captured step, several times if needed."""

    def __init__(
        self, held: capture_files.Capture, model: Model, loss: Loss, progress: Callable[[str], None] | None
    ) -> None:
        self.held, self.loss, self.progress = held, loss, progress
        self._model = model
        self._used = False
        self.operations = 0

    def trace(self, recipe: Recipe, fused: bool) -> tuple[Origin | None, int]:
        """Return the producer and the number of its microbatch, counted from 1."""
        engine = self._make_engine(recipe, fused)
        locator = OpLocator(engine.model)
        flow = NonfiniteFlow(locator, self.progress)
        count = len(self.held.state["microbatches"])
        with locator.track_modules():
            for number, batch in self._microbatches(engine):
                flow.label = f"microbatch {number} of {count}, "
                _register_sources(flow, locator, engine.model, batch)
                with engine.forward(), locator.track_functions(), flow:
                    value = self._call(engine.model, batch, number)
                    scaled = engine.scaled(value)
                    locator.assign_nodes(scaled)
                origin = flow.find_origin(value.detach()) or flow.find_origin(scaled.detach())
                if origin is None:
                    with engine.step_context.backward(), locator.track_backward(), locator.track_functions(), flow:
                        _run_explained(scaled.backward, number)
                    grads = [p.grad for p in engine.model.parameters() if p.grad is not None]
                    origin = choose_origin([origin for grad in grads if (origin := flow.find_origin(grad)) is not None])
                locator.clear_graph()
                self.operations = flow.ops
                if origin is not None:
                    return origin, number
        if not _norm_is_finite(engine.model):
            name, largest = max(engine.model.named_parameters(), key=lambda pair: _gradient_size(pair[1]))
            return flow.make_norm_overflow(name, locator.find_owner(largest), _read_gradient(largest)), count
        return None, 0

    def check_fp32(self, recipe: Recipe) -> tuple[bool | None, str | None]:
        """Whether the whole step is finite in FP32; None with the reason if that cannot be found out."""
        if recipe.compute == "fp32":
            return False, None
        if isinstance(self._model, nn.Module) and recipe.master != "fp32":
            return None, "the weights of the given model are now BF16; pass a function that creates the model"
        try:
            return self._is_finite_in_fp32(), None
        except Exception as error:  # for example code with .half(), whose formats do not fit together in FP32
            reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0][:200]
            return None, f"the step does not run in FP32 ({reason})"

    def _is_finite_in_fp32(self) -> bool:
        engine = self._make_engine(Recipe(), False)
        for number, batch in self._microbatches(engine):
            if self.progress is not None:
                self.progress(f"the same step in FP32, microbatch {number}")
            with engine.forward():
                value = self._call(engine.model, batch, number)
            if classify_nonfinite(value) is not None:
                return False
            engine.backward(value)
        return _norm_is_finite(engine.model)

    def _make_engine(self, recipe: Recipe, fused: bool) -> Engine:
        facts, state = self.held.facts, self.held.state
        model = self._model if isinstance(self._model, nn.Module) else self._model()
        model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
        recipe = _adapt_to_device(recipe, next(model.parameters()).device.type)
        with no_speed_warnings():
            engine = Engine(model, optimizer, recipe, accumulate=int(facts["accumulate"]), fused=fused)
        try:
            load_full_precision(model, _without_wrappers(state["model"]))
            for name, buffer in model.named_buffers():
                if name in state["buffers"]:
                    buffer.copy_(state["buffers"][name])
        except (RuntimeError, AttributeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UsageError(
                f"the model does not fit the weights of capture {self.held.path}: {reason}; pass the model that was "
                "trained"
            ) from None
        if engine.conversion.scales is not None and state["tensor_scales"] is not None:
            engine.conversion.scales.load_state_dict(state["tensor_scales"])
        in_evaluation = set(facts["in_evaluation"])
        for name, module in model.named_modules():
            module.training = name not in in_evaluation
        model.zero_grad(set_to_none=True)
        return engine

    def _microbatches(self, engine: Engine) -> Iterator[tuple[int, Any]]:
        """Yield each batch on the engine's device, after restoring the random states from before its forward."""
        for number, microbatch in enumerate(self.held.state["microbatches"], 1):
            batch = _move(capture_files.unpack(microbatch["batch"]), engine.device)
            random_state.restore(microbatch["random"])
            yield number, batch

    def _call(self, model: nn.Module, batch: Any, number: int) -> Tensor:
        value: Tensor = _run_explained(lambda: self.loss(model, batch), number)
        return value


def _run_explained(call: Callable[[], Any], number: int) -> Any:
    """Run a call; an error becomes a one-line UsageError."""
    try:
        return call()
    except NarrowgaugeError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise UsageError(
            f"replaying microbatch {number} raised {type(error).__name__}: {reason}; pass the model and the loss that "
            "were trained"
        ) from error


def _register_sources(flow: NonfiniteFlow, locator: OpLocator, model: nn.Module, batch: Any) -> None:
    """Name the tensors that existed before the step."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            flow.register_source(
                parameter, Source("parameter", f"{path}.{name}".strip("."), locator.find_owner(parameter))
            )
        for name, buffer in module.named_buffers(recurse=False):
            flow.register_source(buffer, Source("buffer", f"{path}.{name}".strip("."), path or "(model)"))
    for place, tensor in capture_files.list_tensors(batch):
        flow.register_source(tensor, make_input_source(place))


def _read_gradient(parameter: Tensor) -> Tensor:
    return torch.zeros(()) if parameter.grad is None else read_values(parameter.grad)


def _gradient_size(parameter: Tensor) -> float:
    return float(torch.linalg.vector_norm(_read_gradient(parameter).double()))


def _norm_is_finite(model: nn.Module) -> bool:
    """Whether the engine would apply the update: it checks the norm, which can overflow before a gradient does."""
    norms = torch.stack([torch.linalg.vector_norm(_read_gradient(p).float()).cpu() for p in model.parameters()])
    return bool(torch.isfinite(torch.linalg.vector_norm(norms)))


def _move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _move(item, device) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_move(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_move(item, device) for item in batch)
    return batch


def _without_wrappers(state: dict[str, Any]) -> dict[str, Any]:
    """The weights without the name prefix that torch.compile adds to the whole model."""
    if all(name.startswith("_orig_mod.") for name in state):
        return {name.removeprefix("_orig_mod."): value for name, value in state.items()}
    return state
