"""A training step as one function, which a GPU repeats as one CUDA graph where the host is too slow to launch it.

Forward, loss, backward and update of a small model launch hundreds of kernels, and a fast GPU finishes them sooner than
the host launches them. A step whose tensors are all where they were before can be recorded once, and then started with
one call:

    eager      the first calls run as ``forward``, ``backward`` and ``step`` do. They create the optimizer's state,
               choose algorithms, and show whether the GPU waits for the host
    record     the same calls, on memory of the graph's own: inputs, activations, gradients. Learning rates are tensors
    run        copy inputs and learning rates, start the graph, count the update, copy the results
    key        a recording is used only for inputs of the same shapes, parameters, states and buffers at the same
               addresses, and the same settings; everything else runs eagerly, and is recorded after some calls

What is recorded computes what the eager step computes, to the bit. Python code runs while it is recorded, and not
again: code of the model that counts steps or draws random numbers on the host must not be recorded.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from narrowgauge import events
from narrowgauge.engine.engine import Engine
from narrowgauge.kernels.multi_tensor import RecordedTables
from narrowgauge.nn.blocks.settings import watch_settings
from narrowgauge.nn.fused.graphs import get_settings
from narrowgauge.nn.fused.recorded import Recorder
from narrowgauge.nn.recordable import recordable
from narrowgauge.optim.adamw import AdamW
from narrowgauge.step_report import StepReport, is_idle

WARM_UP = 2
"""Eager calls before it is measured whether the GPU waits: the first ones compile kernels and choose algorithms."""
MEASURED = 3
"""Eager calls that are measured."""
MOST_RECORDINGS = 4
"""Recordings of one function, for inputs of different shapes."""
MOST_KEYS = 64
"""Kinds of calls that are counted; the oldest is forgotten."""
PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)
"""Inputs besides tensors: part of the key."""
MARK = "narrowgauge: seen after a step"


@dataclass
class Recording:
    """A recorded step: where it reads its inputs, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    rates: list[tuple[dict[str, Any], Tensor]]
    """The optimizers' groups, and the learning rate that the graph reads for each."""
    tables: RecordedTables
    loss: Tensor
    found: Tensor
    grad_norm: Tensor
    scale: Tensor
    counted: dict[str, Tensor]
    stepped: list[Optimizer]
    known_rates: list[Any] = field(default_factory=list)


class StepFunction:
    """A whole training step as one function, which runs as one CUDA graph where the GPU waits for the host.

    Small models and small batches train faster: their kernels take less time than the host needs to launch them. After
    a few calls the step is recorded if the GPU was found to wait.
    From then on the Python code of ``compute_loss`` and of the model does not run again: it must compute the same from
    its arguments in every step. What cannot be recorded runs as ``forward``, ``backward`` and ``step``.

    Args:
        engine: The engine.
        compute_loss: Takes a batch in any arguments, runs the model and returns a scalar loss. To be recorded, a batch
            consists of tensors on the model's device, alone or in tuples, lists and dictionaries.
        record: True: record without looking whether the GPU waits. False: never. Default: the engine's ``cuda_graphs``.

    Attributes:
        recorded: Number of recordings: one for each shape of the batch.
        reason: Why steps are not recorded; None if they are, or if it is not known yet.

    Example:
        >>> step = ng.StepFunction(engine, lambda inputs, targets: F.cross_entropy(model(inputs), targets))
        >>> for inputs, targets in loader:
        ...     loss, report = step(inputs.cuda(), targets.cuda())
    """

    def __init__(self, engine: Engine, compute_loss: Callable[..., Tensor], record: bool | None = None) -> None:
        self._engine, self._compute_loss = engine, compute_loss
        self._wanted = engine._cuda_graphs if record is None else record
        self.reason = explain_eager(engine) or ("recording is turned off" if self._wanted is False else None)
        self._recordings: dict[Any, Recording] = {}
        self._calls: dict[Any, int] = {}
        self._places: list[int] = []
        self._idle = self._measured = 0
        self._recorder: Recorder | None = None
        self._watched = watch_settings(engine.inner)

    @property
    def recorded(self) -> int:
        """Number of recordings."""
        return len(self._recordings)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, StepReport]:
        """Run one step; with ``accumulate``, one microbatch.

        Args:
            *args: The arguments of ``compute_loss``.
            **kwargs: Its keyword arguments.

        Returns:
            The loss, without a graph, and the report of ``engine.step``.

        Raises:
            TrainingStalled: As in ``engine.step``.
        """
        if self.reason is not None or not self._can_record_now():
            return self._run_eagerly(args, kwargs)
        leaves, form = tree_flatten((args, kwargs))
        if not self._can_read(leaves):
            return self._run_eagerly(args, kwargs)
        places, key = self._locate(), self._make_key(leaves, form)
        if places != self._places or not self._watched.are_same():
            # a loaded state, new buffers: what was recorded reads other memory. Or code that reads other settings
            self._recordings.clear()
            self._calls.clear()
            self._recorder = None  # its memory is released with the last graph
            self._places, self._watched = places, watch_settings(self._engine.inner)
        recording = self._recordings.get(key)
        if recording is None and self._is_due(key):
            recording = self._record(key, leaves, form)
        if recording is not None:
            return self._run(recording, leaves)
        return self._run_eagerly(args, kwargs, self._calls[key])

    def _can_record_now(self) -> bool:
        """Whether nothing reads or changes this step on the host."""
        engine = self._engine
        return (
            all(is_idle(watcher) for watcher in engine.watchers)
            and not events.is_listening()
            and threading.current_thread() is threading.main_thread()
            and not torch.is_autocast_enabled(engine.device.type)  # inside of engine.forward()
            and not torch.cuda.is_current_stream_capturing()
            and engine._microbatches == 0
            and torch.is_grad_enabled()
        )

    def _can_read(self, leaves: list[Any]) -> bool:
        """Whether a recording can read these inputs: tensors on the device, and plain values."""
        device = self._engine.device
        return all(
            type(leaf) is Tensor and leaf.device == device and not leaf.requires_grad
            if isinstance(leaf, Tensor)
            else isinstance(leaf, PLAIN)
            for leaf in leaves
        )

    def _locate(self) -> list[int]:
        """Return the addresses of all that a step reads and writes besides its inputs."""
        engine = self._engine
        states = [state for one in engine.optimizers for state in one.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        own = [*engine.inner.parameters(), *engine.inner.buffers(), *moments, *engine.guard.tensors]
        return [tensor.data_ptr() for tensor in own]

    def _make_key(self, leaves: list[Any], form: Any) -> Any:
        engine = self._engine
        scales = engine.conversion.scales
        groups = [group for one in engine.optimizers for group in one.param_groups]
        options = [group[name] for group in groups for name in group if name not in ("params", "lr", "param_names")]
        return (
            repr(form),
            tuple((t.shape, t.dtype, t.stride()) if isinstance(t, Tensor) else (type(t), t) for t in leaves),
            tuple(parameter.requires_grad for parameter in engine.inner.parameters()),
            tuple(module.training for module in engine.inner.modules()),
            tuple(option.data_ptr() if isinstance(option, Tensor) else str(option) for option in options),
            engine.clip_norm,
            None if scales is None else (scales.mode, scales.delayed, scales.format_changes),
            get_settings(),
        )

    def _is_due(self, key: Any) -> bool:
        """Count a call; return whether its kind is to be recorded now."""
        if key not in self._calls and len(self._calls) >= MOST_KEYS:
            del self._calls[next(iter(self._calls))]
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= WARM_UP + MEASURED or len(self._recordings) >= MOST_RECORDINGS:
            return False
        if self._wanted is None and self._measured >= MEASURED:
            self._wanted = self._idle > self._measured / 2
            if not self._wanted:
                self.reason = "the GPU does not wait for the host"
        return bool(self._wanted) and not self._has_foreign_graph()

    def _has_foreign_graph(self) -> bool:
        """Whether somebody holds the autograd graph of an earlier step, such as its loss.

        Gradients would then be accumulated on the stream of that step, which is not recorded.
        """
        return any(MARK in _get_accumulator(parameter).metadata for parameter in self._list_trained())

    def _run_eagerly(self, args: Any, kwargs: Any, call: int = 0) -> tuple[Tensor, StepReport]:
        """Run a step as usual: the call of this number of its kind, or 0 if it is not to be recorded."""
        engine, measure = self._engine, self._wanted is None and call > WARM_UP
        with engine.forward():
            loss = self._compute_loss(*args, **kwargs)
        engine.backward(loss)
        behind = torch.cuda.Event() if measure else None
        if behind is not None:
            behind.record()
        report = engine.step()
        if behind is not None:
            self._measured += 1
            self._idle += behind.query()
        result = loss.detach()
        del loss
        if call >= WARM_UP + MEASURED:
            for parameter in self._list_trained():
                _get_accumulator(parameter).metadata[MARK] = True
        return result, report

    def _list_trained(self) -> list[Tensor]:
        return [parameter for parameter in self._engine.inner.parameters() if parameter.requires_grad]

    def _record(self, key: Any, leaves: list[Any], form: Any) -> Recording | None:
        """Record a step without running it. If that fails, all steps run eagerly from now on."""
        device = self._engine.device
        random = torch.cuda.get_rng_state(device), torch.cuda.default_generators[device.index].clone_state()
        recorder = self._recorder = self._recorder or Recorder(device, lambda error: None)
        try:
            made = self._recordings[key] = self._make_recording(recorder, leaves, form)
            return made
        except Exception as error:  # also of the model's own code: it is raised again when the step runs eagerly
            _restore_random_numbers(*random, device)
            line = str(error).strip().partition("\n")[0]
            self.reason = f"recording a step failed: {line}"
            warnings.warn(f"steps run without a CUDA graph: recording one failed ({line})", stacklevel=4)
            return None

    def _make_recording(self, recorder: Recorder, leaves: list[Any], form: Any) -> Recording:
        engine = self._engine
        places = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(places, form)

        def work() -> tuple[Any, ...]:
            with engine.forward():
                loss = self._compute_loss(*args, **kwargs)
            engine.backward(loss)
            update = engine._run_update()
            counted = engine.guard.count(update.check.found, update.check.bad)
            return loss.detach(), update.check.found, update.grad_norm, update.scale, counted, update.stepped

        with RecordedTables() as tables, _rates_as_tensors(engine) as rates, _uncounted(engine), recordable():
            graph, results = recorder.record(work)
        inputs = [place for place in places if isinstance(place, Tensor)]
        return Recording(graph, inputs, rates, tables, *results)

    @torch.no_grad()
    def _run(self, recording: Recording, leaves: list[Any]) -> tuple[Tensor, StepReport]:
        engine = self._engine
        if recording.inputs:
            torch._foreach_copy_(recording.inputs, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        current = [group["lr"] for group, _ in recording.rates]
        if current != recording.known_rates or any(isinstance(rate, Tensor) for rate in current):
            for rate, (_, place) in zip(current, recording.rates, strict=True):
                place.copy_(rate) if isinstance(rate, Tensor) else place.fill_(rate)
            recording.known_rates = [None if isinstance(rate, Tensor) else rate for rate in current]
        recording.graph.replay()
        torch.autograd.graph.increment_version(self._list_trained())
        for optimizer in recording.stepped:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        loss, found, grad_norm, scale = (
            tensor.clone() for tensor in (recording.loss, recording.found, recording.grad_norm, recording.scale)
        )
        return loss, engine._note_recorded_update(found, grad_norm, scale, recording.counted, recording.stepped)


def explain_eager(engine: Engine) -> str | None:
    """Return why an engine's steps cannot be recorded, or None."""
    recipe, optimizers = engine.recipe, engine.optimizers
    reasons = {
        "no CUDA device": engine.device.type != "cuda",
        "several ranks train": engine.update_sync.group is not None,
        "accumulate is not 1": engine.accumulate != 1,
        "the recipe scales the loss": engine.scaler is not None,
        "gradients are released during backward": engine.released,
        "formats of gradients are chosen during training": engine.gradient_formats is not None,
        "memory_budget chooses what blocks keep": engine.memory_plan is not None or not engine.memory_settled,
        "activations are offloaded": recipe.offload != "none",
        "the model is compiled": engine.compiled,
        "the recipe emulates its format": recipe.emulate != "none",
        "only AdamW with fused=True is recorded": not all(map(_can_record_optimizer, optimizers)),
        "parameters have hooks": any(_has_hooks(p) for p in engine.inner.parameters()),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _can_record_optimizer(optimizer: Optimizer) -> bool:
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}) or getattr(optimizer, "_optimizer_step_post_hooks", {})
    if isinstance(optimizer, AdamW) and type(optimizer).step_parameters is AdamW.step_parameters:
        fits = all(group["master"] != "none" for group in optimizer.param_groups)
    else:
        fits = type(optimizer) is torch.optim.AdamW and all(
            group["fused"] and not group["differentiable"] for group in optimizer.param_groups
        )
    return fits and not hooks


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _get_accumulator(parameter: Tensor) -> Any:
    """Return the node that accumulates a parameter's gradient: a new one, unless a graph holds it."""
    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
    return node.next_functions[0][0]


@contextlib.contextmanager
def _rates_as_tensors(engine: Engine) -> Iterator[list[tuple[dict[str, Any], Tensor]]]:
    """Let optimizers read their learning rates from the device, in FP64, so that the results are the same bits."""
    groups = [group for optimizer in engine.optimizers for group in optimizer.param_groups]
    before: list[dict[str, Any]] = [
        {name: group[name] for name in ("lr", "capturable") if name in group} for group in groups
    ]
    made = [(group, torch.zeros((), dtype=torch.float64, device=engine.device)) for group in groups]
    for group, rate in made:
        group["lr"] = rate
        if "capturable" in group:  # torch refuses to be recorded otherwise
            group["capturable"] = True
    try:
        yield made
    finally:
        for group, values in zip(groups, before, strict=True):
            group.update(values)


@contextlib.contextmanager
def _uncounted(engine: Engine) -> Iterator[None]:
    """Forget what an engine counts on the host, and its gradients: nothing has run when a step was recorded."""
    scales, watchers = engine.conversion.scales, engine.watchers
    counts = None if scales is None else (scales.updates, scales.moves)
    engine.watchers = []
    try:
        yield
    finally:
        engine.watchers = watchers
        engine._drop_gradients()
        if scales is not None and counts is not None:
            scales.updates, scales.moves = counts


def _restore_random_numbers(state: Tensor, generator: Any, device: torch.device) -> None:
    """Restore the random numbers after a recording that failed. Their generator may still belong to it."""
    try:
        torch.rand(1, device=device)
    except RuntimeError:
        torch.cuda.default_generators[device.index].graphsafe_set_state(generator)
    else:
        torch.cuda.set_rng_state(state, device)
