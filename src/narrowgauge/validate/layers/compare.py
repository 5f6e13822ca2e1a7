"""Compares one step of the reference and of a candidate module by module, with equal weights, batch and random state.

    end to end   the accumulated error of a module's output and gradients in the candidate's whole step
    own          the error of the module in isolation, on the inputs and output gradients of the reference's step
    total        the error of all weight gradients together, and its gain if one of the worst modules is kept in FP32

An isolated module gets its inputs in the format of the candidate's step, so the rounding of its inputs is part of its
own error. A tied weight has one gradient, which both of its modules show end to end. Operations of a model outside its
modules (a residual sum, attention without a module) only appear end to end. Memory: two copies of the model, and one
additional copy of the step's activations and their gradients. A smaller batch needs less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import random_state
from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.nn.module_changes import remove_changes
from narrowgauge.recipe import Recipe
from narrowgauge.runs.batches import make_batch, to_device
from narrowgauge.task import Task
from narrowgauge.validate.layers.isolated import (
    QUANTITIES,
    RANGE,
    UNKNOWN,
    ErrorAnalysis,
    Explanation,
    OperandCasts,
    make_candidate_casts,
    run_isolated,
)
from narrowgauge.validate.layers.sqnr import Tally, cap, format_decibels
from narrowgauge.validate.layers.step import Call, Hooks, Recorder, StepRunner, find_modules, get_loss_scale

WORST = 5
_MARGIN = 6.0
"""A module that contains others is only listed if it is worse than all of them by this many dB."""


@dataclass(frozen=True)
class Sqnr:
    """The SQNR of one quantity in dB: inf if equal, -inf if not finite, None if the quantity does not exist."""

    own: float | None = None
    end_to_end: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """The SQNR of one module."""

    module: str
    """Its path; (model) for the model itself."""
    kind: str
    """Its class."""
    output: Sqnr
    grad_input: Sqnr
    """Empty for a module whose inputs have no gradient, such as an embedding."""
    grad_weight: Sqnr
    """The gradients of its own parameters, including biases, without those of submodules."""
    calls: int
    not_finite: int = 0
    """Values that are inf or NaN only in the candidate, end to end."""
    note: str = ""
    """Why it could not be run in isolation."""

    @property
    def worst(self) -> tuple[float, str]:
        """The lowest own SQNR and its quantity; inf if there is none."""
        found = [(sqnr.own, name) for name in QUANTITIES if (sqnr := getattr(self, name)).own is not None]
        return min(found, key=lambda pair: pair[0], default=(math.inf, ""))


@dataclass(frozen=True, kw_only=True)
class WorstModule:
    """One of the modules with the largest error."""

    module: str
    quantity: str
    """output, grad_input or grad_weight."""
    decibels: float
    """Its own SQNR."""
    reason: str
    """range, cancellation, accumulation or rounding; unknown where it could not be measured."""
    advice: str
    """The measured cause and what to do, in one sentence."""
    gain: float | None
    """The gain of the total in dB if the module is kept in FP32; None if it cannot be kept."""


@dataclass(frozen=True, kw_only=True)
class LayerComparison:
    """The comparison of a candidate's first step with the reference's."""

    candidate: str
    reference: str
    rows: list[LayerRow] = field(default_factory=list)
    """In model order."""
    worst: list[WorstModule] = field(default_factory=list)
    """The modules with the lowest own SQNR, the worst first; empty if everything is equal."""
    total: float
    """The SQNR of all weight gradients together, end to end."""
    losses: tuple[float, float]
    """The losses of the reference and of the candidate."""
    loss_scale: float = 1.0
    """The candidate's loss scale. A dynamic one is lowered until the step is finite, as in training."""

    @property
    def loss_error(self) -> float:
        """The relative error of the candidate's loss."""
        reference, candidate = self.losses
        return (candidate - reference) / abs(reference) if reference else candidate - reference

    def describe(self) -> dict[str, Any]:
        """The comparison as JSON data: dB limited to ±200; 200 for equal, -200 for not finite, null if missing."""
        rows = [
            {
                "module": row.module,
                "class": row.kind,
                **{name: _describe_sqnr(getattr(row, name)) for name in QUANTITIES},
                "calls": row.calls,
                "not_finite": row.not_finite,
                "note": row.note,
            }
            for row in self.rows
        ]
        worst = [vars(one) | {"decibels": cap(one.decibels), "gain": cap(one.gain)} for one in self.worst]
        finite = [loss if math.isfinite(loss) else None for loss in (*self.losses, self.loss_error)]
        return {
            "candidate": self.candidate,
            "reference": self.reference,
            "total": cap(self.total),
            "loss_reference": finite[0],
            "loss_candidate": finite[1],
            "loss_error": finite[2],
            "loss_scale": self.loss_scale,
            "worst": worst,
            "rows": rows,
        }

    def to_table(self) -> tuple[list[str], list[list[str]]]:
        """The columns and rows of a table for the terminal, in dB: own and end-to-end SQNR of each quantity."""
        columns = ["module", "class", *(title for name in QUANTITIES for title in (name, "end to end"))]
        rows = []
        for row in self.rows:
            pairs = [getattr(row, name) for name in QUANTITIES]
            figures = [format_decibels(figure) for pair in pairs for figure in (pair.own, pair.end_to_end)]
            rows.append([row.module, row.kind, *figures])
        return columns, rows


def _describe_sqnr(sqnr: Sqnr) -> dict[str, float | None]:
    return {"own": cap(sqnr.own), "end_to_end": cap(sqnr.end_to_end)}


def compare_step(
    task: Task,
    candidate: Recipe,
    reference: Recipe,
    *,
    device: str = "cpu",
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> LayerComparison:
    """Runs the task's first step with both recipes and compares it module by module.

    Args:
        task: The task.
        candidate: The recipe to examine.
        reference: The recipe to compare with; it must not use a loss scale.
        device: The device to run on.
        seed: The seed of the weights.
        tell: Called with each line of progress.

    Raises:
        UsageError: If the reference uses a loss scale.
    """
    if reference.loss_scale != "none":
        raise UsageError(f"layers: the reference {reference} uses a loss scale; use fp32, tf32 or bf16")
    with random_state.preserve(), torch.compiler.set_stance("force_eager"):
        return _StepComparison(task, candidate, reference, device, seed, tell or (lambda _: None)).result()


class _StepComparison:
    def __init__(
        self, task: Task, candidate: Recipe, reference: Recipe, device: str, seed: int, tell: Callable[[str], None]
    ) -> None:
        self.names, self.seed, self.tell = (str(candidate), str(reference)), seed, tell
        batch = to_device(make_batch(task, 0, "train", "the first step"), torch.device(device))
        self.runner = StepRunner(task, batch, device, seed)
        self.tell(f"running the step in {reference}")
        self.exact = self.runner.make_engine(reference, self.runner.model)
        self.modules = find_modules(self.exact.model)
        recorder = Recorder(self.modules)
        self.loss = self.runner.run(self.exact, recorder)
        self.calls = recorder.calls
        self.grads = _gradients(self.exact)
        self.tell(f"running the step in {candidate}")
        self._run_candidate(candidate)

    def _run_candidate(self, candidate: Recipe) -> None:
        """Runs the candidate's step at a loss scale that keeps it finite, if there is one."""
        self.engine = self.runner.make_engine(candidate)
        while True:
            self.seen = _CandidateHooks(find_modules(self.engine.model), self.calls, self.engine)
            self.candidate_loss = self.runner.run(self.engine, self.seen)
            self.total = self._compare_gradients(self.engine)
            scale = get_loss_scale(self.engine)
            self.settled = candidate if candidate.loss_scale == "none" else candidate.replace(loss_scale=scale)
            if not self.total.not_finite or candidate.loss_scale != "dynamic" or scale <= 1:
                return
            assert self.engine.scaler is not None
            self.engine.scaler.update(scale / 2)

    def _compare_gradients(self, engine: Engine, only: Sequence[str] | None = None) -> Tally:
        tally, scale, found = Tally(), get_loss_scale(engine), _gradients(engine)
        for name, exact in self.grads.items():
            if only is None or name in only:
                tally.add(exact, found.get(name, torch.zeros_like(exact)), scale)
        return tally

    def result(self) -> LayerComparison:
        self.runner.reset_buffers(self.exact.model)
        self.runner.reset_buffers(self.engine.model)
        self.tell(f"running {len(self.modules)} modules in isolation")
        rows = [self._make_row(path, module) for path, module in self.modules.items()]
        by_path = dict(zip(self.modules, rows, strict=True))
        remove_changes(self.exact.model)
        found = [
            (path, by_path[path], self._explain(path, by_path[path])) for path in self._rank_modules(by_path)[:WORST]
        ]
        losses, total, scale = (self.loss, self.candidate_loss), self.total.decibels, get_loss_scale(self.engine)
        del self.engine, self.seen  # frees one copy of the model
        return LayerComparison(
            candidate=self.names[0],
            reference=self.names[1],
            rows=rows,
            worst=[self._make_worst(*one) for one in found],
            total=math.inf if total is None else total,
            losses=losses,
            loss_scale=scale,
        )

    def _make_row(self, path: str, module: nn.Module) -> LayerRow:
        own: dict[str, float | None] = {}
        note = "" if self.calls[path] else "its forward is not called"
        if self.calls[path]:
            try:
                exact = run_isolated(module, self.calls[path], OperandCasts(self.exact.step_context), self.seed)
                results = run_isolated(*self._candidate_inputs(path), self.seed)
                own = {
                    name: results.measure_noise(exact, name, get_loss_scale(self.engine)).decibels
                    for name in QUANTITIES
                }
            except Exception as error:  # the module needs state that is not part of its arguments
                note = f"it does not run in isolation: {_first_line(error)}"
        own_parameters = set(module.parameters(recurse=False))
        weights = [name for name, parameter in self.exact.model.named_parameters() if parameter in own_parameters]
        tallies = {name: self.seen.tallies.get((path, name), Tally()) for name in QUANTITIES}
        tallies["grad_weight"] = self._compare_gradients(self.engine, weights)
        return LayerRow(
            module=path or "(model)",
            kind=type(module).__name__,
            calls=len(self.calls[path]),
            not_finite=sum(tally.not_finite for tally in tallies.values()),
            note=note,
            **{name: Sqnr(own.get(name), tallies[name].decibels) for name in QUANTITIES},
        )

    def _candidate_inputs(self, path: str) -> tuple[nn.Module, list[Call], OperandCasts]:
        dtypes = self.seen.dtypes[path]
        return self.engine.model.get_submodule(path), self.calls[path], make_candidate_casts(self.engine, dtypes)

    def _rank_modules(self, rows: dict[str, LayerRow]) -> list[str]:
        """Modules with an error, the worst first. A module that contains others must be worse than all of them."""

        def is_listed(path: str) -> bool:
            prefix = f"{path}." if path else ""
            inside = [row.worst[0] for other, row in rows.items() if other != path and other.startswith(prefix)]
            return not inside or rows[path].worst[0] < min(inside) - _MARGIN

        lossy = [path for path, row in rows.items() if row.worst[0] < math.inf and is_listed(path)]
        return sorted(lossy, key=lambda path: rows[path].worst[0])

    def _explain(self, path: str, row: LayerRow) -> Explanation:
        results = run_isolated(*self._candidate_inputs(path), self.seed)
        analysis = ErrorAnalysis(self.modules[path], self.calls[path], row.worst[1], self.seed)
        try:
            return analysis.explain(self.engine, path, results, self.seen.dtypes[path])
        except Exception as error:  # a module that does not accept rounded weights
            return Explanation(UNKNOWN, f"the reason cannot be measured ({type(error).__name__})")

    def _make_worst(self, path: str, row: LayerRow, why: Explanation) -> WorstModule:
        decibels, quantity = row.worst
        gain, outcome = None, "the whole model cannot be kept in FP32 by its path"
        if path:
            self.tell(f"running the step with {path} kept in FP32")
            try:
                gain = self._measure_gain(path)
                outcome = _describe_gain(path, gain, not self.total.not_finite)
            except Exception as error:  # modules after it may not accept FP32
                outcome = f"with keep={path} the step does not run: {_first_line(error)}"
        hint = ""
        if why.reason == RANGE and quantity != "output" and self.settled.compute == "fp16":
            hint = "use a larger loss scale or bf16; " if self.settled.loss_scale == "none" else ""
        return WorstModule(
            module=row.module,
            quantity=quantity,
            decibels=decibels,
            reason=why.reason,
            advice=f"{why.detail}; {hint}{outcome}",
            gain=gain,
        )

    def _measure_gain(self, path: str) -> float:
        """The gain of the weight gradients' SQNR if a module is kept in FP32."""
        engine = self.runner.make_engine(self.settled.replace(keep=(*self.settled.keep, path)))
        self.runner.run(engine)
        before, after = self.total.decibels, self._compare_gradients(engine).decibels
        return 0.0 if before is None or after is None or before == after else after - before


def _describe_gain(path: str, gain: float, finite: bool) -> str:
    if math.isinf(gain):
        result = "not finite" if gain < 0 else "equal to the reference" if finite else "finite"
        return f"keep={path} would make the weight gradients {result}"
    if gain < 0.1:
        return f"keep={path} would not improve the weight gradients ({gain:+.1f} dB)"
    return f"keep={path} would improve the weight gradients by {gain:.1f} dB"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


class _CandidateHooks(Hooks):
    """Compares the candidate's tensors with the reference's during the step; keeps only the tallies."""

    def __init__(self, modules: dict[str, nn.Module], calls: dict[str, list[Call]], engine: Engine) -> None:
        super().__init__(modules)
        self.calls, self.scale = calls, get_loss_scale(engine)
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.dtypes: dict[str, list[list[torch.dtype]]] = {path: [] for path in modules}
        """The dtypes of the inputs of each call."""

    def on_call(self, path: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[str, Call | None]:
        number = len(self.dtypes[path])
        self.dtypes[path].append([tensor.dtype for tensor in inputs])
        return path, self.calls[path][number] if number < len(self.calls[path]) else None

    def on_tensor(self, call: tuple[str, Call | None], quantity: str, index: int, tensor: Tensor) -> None:
        path, before = call
        if before is None or quantity == "grad_output":
            return
        exact = before.grad_inputs.get(index) if quantity == "grad_input" else before.output(index)
        if exact is not None and exact.shape == tensor.shape:
            scale = 1.0 if quantity == "output" else self.scale
            self.tallies.setdefault((path, quantity), Tally()).add(exact, tensor, scale)


def _gradients(engine: Engine) -> dict[str, Tensor]:
    return {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
