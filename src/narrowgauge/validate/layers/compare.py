"""One step in the reference and in a candidate, from the same weights, batch and random state, compared by module.

    end to end   the whole step in each: what a module's output and gradients have lost by the time they are there
    own          each module alone, on the inputs and output gradients of the reference's step: what it loses itself
    total        all weights' gradients together, and with each of the worst modules kept in FP32: what that would bring

An input counts in the format that the candidate hands it over in, so what is lost in reading is the reader's loss too.
A tied weight has one gradient: both of its modules show it end to end. What a model computes between its modules (a
residual sum, an attention written out) is seen end to end only. The step's activations and their gradients are held
once beside those that autograd holds, with two copies of the model: a smaller batch needs less.
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
from narrowgauge.nn.changes import remove_changes
from narrowgauge.recipe import Recipe
from narrowgauge.runs.batches import make_batch, to_device
from narrowgauge.task import Task
from narrowgauge.validate.layers.isolated import (
    QUANTITIES,
    RANGE,
    UNKNOWN,
    Explanation,
    Inquest,
    Way,
    as_candidate,
    run_alone,
)
from narrowgauge.validate.layers.sqnr import Tally, capped, spoken
from narrowgauge.validate.layers.step import Call, Hooks, Recorder, Stage, loss_scale, watched

WORST = 5
_MARGIN = 6.0
"""By so many dB a module must be worse than those inside it to be named itself."""


@dataclass(frozen=True)
class Pair:
    """One quantity's SQNR in dB: inf where equal, -inf where not finite, None where it does not exist."""

    own: float | None = None
    end_to_end: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One module."""

    module: str
    """Its path; (model) for the model itself."""
    kind: str
    """Its class."""
    output: Pair
    grad_input: Pair
    """None of both for a module that reads no gradient's tensor, such as an embedding."""
    grad_weight: Pair
    """Of the parameters it holds itself, bias included."""
    calls: int
    not_finite: int = 0
    """Values that are inf or NaN in the candidate alone, end to end."""
    note: str = ""
    """Why it could not be run alone."""

    @property
    def worst(self) -> tuple[float, str]:
        """The lowest of its own figures, and which quantity's; inf where there is none."""
        found = [(pair.own, name) for name in QUANTITIES if (pair := getattr(self, name)).own is not None]
        return min(found, key=lambda pair: pair[0], default=(math.inf, ""))


@dataclass(frozen=True, kw_only=True)
class Worst:
    """A module that loses most."""

    module: str
    quantity: str
    """output, grad_input or grad_weight."""
    decibels: float
    """Its own SQNR."""
    reason: str
    """range, cancellation, accumulation or rounding; unknown where it could not be measured."""
    advice: str
    """What was measured and what to do, in a sentence."""
    gain: float | None
    """By how many dB the total rises if the module is kept in FP32; None where it cannot be kept."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A candidate's first step beside the reference's."""

    candidate: str
    reference: str
    rows: list[LayerRow] = field(default_factory=list)
    """In the order of the model."""
    worst: list[Worst] = field(default_factory=list)
    """The worst first, by their own figures; none where everything is equal."""
    total: float
    """SQNR of all weights' gradients as one, end to end."""
    losses: tuple[float, float]
    """The reference's and the candidate's."""
    loss_scale: float = 1.0
    """At which the candidate ran: a dynamic one is lowered until the step is finite, as training would."""

    @property
    def loss_error(self) -> float:
        """Of the candidate's loss, relative to the reference's."""
        reference, candidate = self.losses
        return (candidate - reference) / abs(reference) if reference else candidate - reference

    def describe(self) -> dict[str, Any]:
        """As JSON has it: dB within 200 either way, 200 for equal, -200 for not finite, null for what is not there."""
        rows = [
            {
                "module": row.module,
                "class": row.kind,
                **{name: _described(getattr(row, name)) for name in QUANTITIES},
                "calls": row.calls,
                "not_finite": row.not_finite,
                "note": row.note,
            }
            for row in self.rows
        ]
        worst = [vars(one) | {"decibels": capped(one.decibels), "gain": capped(one.gain)} for one in self.worst]
        finite = [loss if math.isfinite(loss) else None for loss in (*self.losses, self.loss_error)]
        return {
            "candidate": self.candidate,
            "reference": self.reference,
            "total": capped(self.total),
            "loss_reference": finite[0],
            "loss_candidate": finite[1],
            "loss_error": finite[2],
            "loss_scale": self.loss_scale,
            "worst": worst,
            "rows": rows,
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows for a terminal, in dB: of each quantity the module's own, and end to end."""
        columns = ["module", "class", *(title for name in QUANTITIES for title in (name, "end to end"))]
        rows = []
        for row in self.rows:
            pairs = [getattr(row, name) for name in QUANTITIES]
            figures = [spoken(figure) for pair in pairs for figure in (pair.own, pair.end_to_end)]
            rows.append([row.module, row.kind, *figures])
        return columns, rows


def _described(pair: Pair) -> dict[str, float | None]:
    return {"own": capped(pair.own), "end_to_end": capped(pair.end_to_end)}


def compare(
    task: Task,
    candidate: Recipe,
    reference: Recipe,
    *,
    device: str = "cpu",
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> Layers:
    """The task's first step under both recipes, module by module. ``tell`` hears what is being done."""
    if reference.loss_scale != "none":
        raise UsageError(f"layers: a reference has no loss scale, but {reference} has one; take fp32, tf32 or bf16")
    with random_state.preserve(), torch.compiler.set_stance("force_eager"):
        return _Comparison(task, candidate, reference, device, seed, tell or (lambda _: None)).result()


class _Comparison:
    def __init__(
        self, task: Task, candidate: Recipe, reference: Recipe, device: str, seed: int, tell: Callable[[str], None]
    ) -> None:
        self.names, self.seed, self.tell = (str(candidate), str(reference)), seed, tell
        batch = to_device(make_batch(task, 0, "train", "the first step"), torch.device(device))
        self.stage = Stage(task, batch, device, seed)
        self.tell(f"the step in {reference}")
        self.exact = self.stage.engine(reference, self.stage.model)
        self.modules = watched(self.exact.model)
        recorder = Recorder(self.modules)
        self.loss = self.stage.run(self.exact, recorder)
        self.calls = recorder.calls
        self.grads = _gradients(self.exact)
        self.tell(f"the step in {candidate}")
        self._run(candidate)

    def _run(self, candidate: Recipe) -> None:
        """The candidate's step, at a loss scale that it is finite at, if there is one."""
        self.engine = self.stage.engine(candidate)
        while True:
            self.seen = _Comparer(watched(self.engine.model), self.calls, self.engine)
            self.candidate_loss = self.stage.run(self.engine, self.seen)
            self.total = self._total(self.engine)
            scale = loss_scale(self.engine)
            self.settled = candidate if candidate.loss_scale == "none" else candidate.replace(loss_scale=scale)
            if not self.total.not_finite or candidate.loss_scale != "dynamic" or scale <= 1:
                return
            assert self.engine.scaler is not None
            self.engine.scaler.update(scale / 2)

    def _total(self, engine: Engine, only: Sequence[str] | None = None) -> Tally:
        tally, scale, found = Tally(), loss_scale(engine), _gradients(engine)
        for name, exact in self.grads.items():
            if only is None or name in only:
                tally.add(exact, found.get(name, torch.zeros_like(exact)), scale)
        return tally

    def result(self) -> Layers:
        self.stage.rewind(self.exact.model)
        self.stage.rewind(self.engine.model)
        self.tell(f"{len(self.modules)} modules alone")
        rows = [self._row(path, module) for path, module in self.modules.items()]
        by_path = dict(zip(self.modules, rows, strict=True))
        remove_changes(self.exact.model)
        found = [(path, by_path[path], self._explain(path, by_path[path])) for path in self._ranked(by_path)[:WORST]]
        losses, total, scale = (self.loss, self.candidate_loss), self.total.decibels, loss_scale(self.engine)
        del self.engine, self.seen  # one model less in memory
        return Layers(
            candidate=self.names[0],
            reference=self.names[1],
            rows=rows,
            worst=[self._named(*one) for one in found],
            total=math.inf if total is None else total,
            losses=losses,
            loss_scale=scale,
        )

    def _row(self, path: str, module: nn.Module) -> LayerRow:
        own: dict[str, float | None] = {}
        note = "" if self.calls[path] else "it is not called by itself"
        if self.calls[path]:
            try:
                exact = run_alone(module, self.calls[path], Way(self.exact.step_context), self.seed)
                made = run_alone(*self._candidates(path), self.seed)
                own = {name: made.against(exact, name, loss_scale(self.engine)).decibels for name in QUANTITIES}
            except Exception as error:  # whatever a module needs that its arguments do not tell
                note = f"it does not run alone: {_first_line(error)}"
        held = set(module.parameters(recurse=False))
        weights = [name for name, parameter in self.exact.model.named_parameters() if parameter in held]
        tallies = {name: self.seen.tallies.get((path, name), Tally()) for name in QUANTITIES}
        tallies["grad_weight"] = self._total(self.engine, weights)
        return LayerRow(
            module=path or "(model)",
            kind=type(module).__name__,
            calls=len(self.calls[path]),
            not_finite=sum(tally.not_finite for tally in tallies.values()),
            note=note,
            **{name: Pair(own.get(name), tallies[name].decibels) for name in QUANTITIES},
        )

    def _candidates(self, path: str) -> tuple[nn.Module, list[Call], Way]:
        dtypes = self.seen.dtypes[path]
        return self.engine.model.get_submodule(path), self.calls[path], as_candidate(self.engine, dtypes)

    def _ranked(self, rows: dict[str, LayerRow]) -> list[str]:
        """Modules that lose something, the worst first; those that hold others only if they are worse than these."""

        def is_named(path: str) -> bool:
            prefix = f"{path}." if path else ""
            inside = [row.worst[0] for other, row in rows.items() if other != path and other.startswith(prefix)]
            return not inside or rows[path].worst[0] < min(inside) - _MARGIN

        lossy = [path for path, row in rows.items() if row.worst[0] < math.inf and is_named(path)]
        return sorted(lossy, key=lambda path: rows[path].worst[0])

    def _explain(self, path: str, row: LayerRow) -> Explanation:
        made = run_alone(*self._candidates(path), self.seed)
        inquest = Inquest(self.modules[path], self.calls[path], row.worst[1], self.seed)
        try:
            return inquest.explain(self.engine, path, made, self.seen.dtypes[path])
        except Exception as error:  # a module that will not take rounded weights
            return Explanation(UNKNOWN, f"the reason cannot be measured ({type(error).__name__})")

    def _named(self, path: str, row: LayerRow, why: Explanation) -> Worst:
        decibels, quantity = row.worst
        gain, promise = None, "the model as a whole cannot be kept in FP32 by a path"
        if path:
            self.tell(f"the step with {path} kept in FP32")
            try:
                gain = self._gain(path)
                promise = _promise(path, gain, not self.total.not_finite)
            except Exception as error:  # what reads its output may not take FP32
                promise = f"with keep={path} the step does not run: {_first_line(error)}"
        hint = ""
        if why.reason == RANGE and quantity != "output" and self.settled.compute == "fp16":
            hint = "a larger loss scale, or bf16, would hold it; " if self.settled.loss_scale == "none" else ""
        return Worst(
            module=row.module,
            quantity=quantity,
            decibels=decibels,
            reason=why.reason,
            advice=f"{why.detail}; {hint}{promise}",
            gain=gain,
        )

    def _gain(self, path: str) -> float:
        """What the weights' gradients gain if a module is kept in FP32."""
        engine = self.stage.engine(self.settled.replace(keep=(*self.settled.keep, path)))
        self.stage.run(engine)
        before, after = self.total.decibels, self._total(engine).decibels
        return 0.0 if before is None or after is None or before == after else after - before


def _promise(path: str, gain: float, finite: bool) -> str:
    if math.isinf(gain):
        made = "not finite" if gain < 0 else "equal to the reference's" if finite else "finite"
        return f"keep={path} would make the weights' gradients {made}"
    if gain < 0.1:
        return f"keep={path} would not help the weights' gradients ({gain:+.1f} dB)"
    return f"keep={path} would raise the weights' gradients by {gain:.1f} dB"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


class _Comparer(Hooks):
    """Compares what the candidate computes with what the reference did, as it comes; keeps nothing."""

    def __init__(self, modules: dict[str, nn.Module], calls: dict[str, list[Call]], engine: Engine) -> None:
        super().__init__(modules)
        self.calls, self.scale = calls, loss_scale(engine)
        self.tallies: dict[tuple[str, str], Tally] = {}
        self.dtypes: dict[str, list[list[torch.dtype]]] = {path: [] for path in modules}
        """Of the inputs of each call."""

    def begin(self, path: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[str, Call | None]:
        number = len(self.dtypes[path])
        self.dtypes[path].append([tensor.dtype for tensor in inputs])
        return path, self.calls[path][number] if number < len(self.calls[path]) else None

    def see(self, call: tuple[str, Call | None], quantity: str, index: int, tensor: Tensor) -> None:
        path, before = call
        if before is None or quantity == "grad_output":
            return
        exact = before.grad_inputs.get(index) if quantity == "grad_input" else before.output(index)
        if exact is not None and exact.shape == tensor.shape:
            scale = 1.0 if quantity == "output" else self.scale
            self.tallies.setdefault((path, quantity), Tally()).add(exact, tensor, scale)


def _gradients(engine: Engine) -> dict[str, Tensor]:
    return {name: p.grad for name, p in engine.model.named_parameters() if p.grad is not None}
