"""Examiner: watches an engine while it trains, applies every rule, and keeps the findings."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from narrowgauge.engine import Engine
from narrowgauge.findings import Finding
from narrowgauge.gauges.finding_log import FindingLog
from narrowgauge.gauges.rules.block_rules import find_rounding_faults
from narrowgauge.gauges.rules.expert_rules import ExpertRules
from narrowgauge.gauges.rules.forward_rules import find_forward_faults
from narrowgauge.gauges.rules.fp8_rules import Fp8Rules
from narrowgauge.gauges.rules.keep_modules import ModelParts
from narrowgauge.gauges.rules.lasting import LastingFindings
from narrowgauge.gauges.rules.muon_rules import is_usual_update
from narrowgauge.gauges.rules.predict_block_formats import predict_block_formats
from narrowgauge.gauges.rules.predict_formats import Prediction, predict_formats
from narrowgauge.gauges.rules.silent_rules import MATRIX, ModelHistory, find_silent_faults
from narrowgauge.gauges.rules.step_rules import Step, StepRules
from narrowgauge.gauges.rules.tensor_rules import UpdateContext, check_tensors
from narrowgauge.gauges.rules.zero_rules import find_zeros
from narrowgauge.gauges.watch.expert_readings import ExpertReading
from narrowgauge.gauges.watch.readings import Reading
from narrowgauge.gauges.watch.rounding_readings import RoundingReading
from narrowgauge.gauges.watch.snapshots import Fp8Reading, Snapshot
from narrowgauge.gauges.watch.watch import EVERY, Watch

_SNAPSHOTS = 32
_LOSSES = 64
"""Steps whose losses are kept: a snapshot arrives a step or two after its loss."""
_KIND_OF_SITE = {"input": "activation", "grad_output": "gradient", "weight": "weight"}


class Examiner:
    """Watches an engine and applies the rules for steps, tensors and FP8 sites.

    Call ``check_step`` with the numbers of each step, and ``collect`` regularly for what was read from tensors. Both
    return only new findings; ``findings`` has all of them.
    """

    def __init__(self, engine: Engine, every: int = EVERY, block_formats: bool = False) -> None:
        """Start watching.

        Args:
            engine: The engine to watch.
            every: Updates between two snapshots of its tensors. 0: read no tensors, and check steps only.
            block_formats: Also measure what MXFP8, MXFP4 and NVFP4 would do, for ``predict``.

        Raises:
            UsageError: ``every`` is not an integer of at least 0.
        """
        self.engine = engine
        self.watch = Watch(engine, every, block_formats) if every != 0 else None
        scaler, recipe = engine.scaler, engine.recipe
        dynamic = recipe.loss_scale == "dynamic" and scaler is not None
        floor = scaler.floor if dynamic and scaler is not None else 1.0
        self.step_rules = StepRules(dynamic, floor, clip_norm=engine.clip_norm, recipe=recipe)
        self.fp8_rules = Fp8Rules()
        self.expert_rules = ExpertRules()
        self.lasting = LastingFindings()
        self.log = FindingLog()
        self._losses: dict[int, float] = {}
        self._first_weights: dict[str, float] = {}
        """The mean square of each parameter in the first snapshot that has it."""
        self._decayed: dict[str, float] = {}
        self._first_logits: dict[str, float] = {}
        self._previous_update = 0
        self.snapshots: deque[Snapshot] = deque(maxlen=_SNAPSHOTS)
        """The latest snapshots, which predictions are made from."""
        self._stochastic = recipe.master == "none" and all(getattr(o, "dithers", False) for o in engine.optimizers)

    @property
    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self.log.findings

    def state_dict(self) -> dict[str, Any]:
        """Return what the rules remember, as plain values. Without it, a resumed run is judged like a new one."""
        steps, sites = self.step_rules.state_dict(), self.fp8_rules.state_dict()
        history = {"decayed": dict(self._decayed), "logits": dict(self._first_logits), "update": self._previous_update}
        own = {"lasting": self.lasting.state_dict(), "found": self.log.state_dict(), "history": history}
        return {"steps": steps, "sites": sites, "experts": self.expert_rules.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any], snapshots: Iterable[Mapping[str, Any]] = ()) -> None:
        """Restore what the rules remember.

        Args:
            state: A state from ``state_dict``; an empty one changes nothing.
            snapshots: The snapshots so far, as events of the run's record. They are not part of the state, because
                they are in the record anyway and would make every checkpoint larger.
        """
        for event in snapshots:
            readings, extra = (list(map(Reading.from_event, event.get(name, ()))) for name in ("readings", "extra"))
            rounding = list(map(RoundingReading.from_event, event.get("rounding", ())))
            experts = list(map(ExpertReading.from_event, event.get("experts", ())))
            parts = {"extra": extra, "rounding": rounding, "experts": experts}
            snapshot = Snapshot(event["step"], readings, bool(event["applied"]), **parts)  # type: ignore[arg-type]
            self.snapshots.append(snapshot)
            self._note_first_weights(self.snapshots[-1])
        if state:
            self.step_rules.load_state_dict(state["steps"])
            self.fp8_rules.load_state_dict(state["sites"])
            self.expert_rules.load_state_dict(state.get("experts", {}))
            if "lasting" in state:  # not in older checkpoints
                self.lasting.load_state_dict(state["lasting"])
            history = state.get("history", {})
            self._decayed, self._first_logits = dict(history.get("decayed", {})), dict(history.get("logits", {}))
            self._previous_update = history.get("update", 0)
            self.log.load_state_dict(state["found"])

    def check_step(self, step: Step) -> list[Finding]:
        """Apply the step rules.

        Args:
            step: The numbers of one update, in order.

        Returns:
            The new findings.
        """
        self._losses[step.number] = step.loss
        self._losses.pop(step.number - _LOSSES, None)
        return self.log.add(self.step_rules.check(step))

    see = check_step  # the former name, for existing scripts

    def collect(self, wait: bool = False) -> tuple[list[Snapshot], list[Fp8Reading], list[Finding]]:
        """Take what has been read from tensors since the last call, and apply the tensor and FP8 rules.

        Args:
            wait: Also wait for readings still being copied from the device.

        Returns:
            The snapshots, the FP8 readings and the new findings.
        """
        if self.watch is None:
            return [], [], []
        snapshots, fp8_readings = self.watch.snapshots(wait), self.watch.fp8_readings(wait)
        found: list[Finding] = []
        self.snapshots.extend(snapshots)
        for snapshot in snapshots:
            found += self._check_snapshot(snapshot)
            self._learn_sizes(snapshot)
        for reading in fp8_readings:
            found += [replace(finding, step=reading.update) for finding in self.fp8_rules.check(reading)]
        return snapshots, fp8_readings, self.log.add(found)

    def finish(self) -> list[Finding]:
        """Return the new findings at the end of a run: what it was too short to prove, as warnings."""
        return self.log.add(self.lasting.finish())

    def _check_snapshot(self, snapshot: Snapshot) -> list[Finding]:
        loss = self._losses.get(snapshot.update)
        context = UpdateContext(snapshot, self.engine.accumulate, self._stochastic, loss)
        self._note_first_weights(snapshot)
        self._note_history(snapshot)
        zero = {name for name, mean_square in self._first_weights.items() if mean_square == 0}
        updates = [one for one in context.select("update") if one.count >= MATRIX and one.module not in zero]
        unusual = [one for one in updates if not is_usual_update(snapshot, one)]
        self.step_rules.update_ratio = max((one.ratio or 0.0 for one in unusual), default=0.0)
        found = [replace(finding, step=snapshot.update) for finding in check_tensors(context)]
        if snapshot.applied:  # a skipped update shows nothing about what the next one changes
            zeros, explained = find_zeros(context)
            first = self.step_rules.first_losses
            first_loss = statistics.median(first) if first else None
            history = ModelHistory(self._first_weights, first_loss, self._decayed, self._first_logits)
            silent = [*find_silent_faults(context, history), *find_forward_faults(context, history)]
            # With --predict, the readings are of formats that the run does not use.
            rounded = find_rounding_faults(snapshot.rounding if self.engine.recipe.emulate != "none" else ())
            routed = self.expert_rules.check(snapshot)
            found += self.lasting.add(snapshot.update, [*zeros, *silent, *rounded, *routed], explained)
        return found

    def predict(self) -> list[Prediction]:
        """Predict how FP16 and FP8 would do; with ``block_formats`` also MXFP8, MXFP4 and NVFP4.

        Returns:
            A prediction for each format. Empty if the run itself is not in FP32, TF32 or BF16, and if all updates that
            were read were skipped: inf and NaN in this run's own format say nothing about another.
        """
        snapshots = [snapshot for snapshot in self.snapshots if snapshot.applied]
        if self.engine.recipe.compute not in ("fp32", "tf32", "bf16") or not snapshots:
            return []
        history = [[*snapshot.readings, *snapshot.extra] for snapshot in snapshots]
        updates = [snapshot.update for snapshot in snapshots]
        parts = ModelParts.from_model(self.engine.inner, history, snapshots[-1].stays_fp32)
        found = predict_formats(history, updates=updates, parts=parts)
        if self.engine.recipe.emulate != "none":
            return found  # its readings are of the format that it emulates
        rounding = [snapshot.rounding for snapshot in snapshots]
        return found + predict_block_formats(rounding, updates=updates, parts=parts)

    def _note_history(self, snapshot: Snapshot) -> None:
        """Note the first attention logits, and how much weight decay has shrunk norms since the last snapshot."""
        updates = snapshot.update - (self._previous_update or snapshot.update)
        self._previous_update = snapshot.update
        for (name, place), value in snapshot.facts.items():
            if name == "norm_decay":
                self._decayed[place] = self._decayed.get(place, 0.0) + value * updates
            elif name == "attention_logits":
                self._first_logits.setdefault(place, value)

    def _note_first_weights(self, snapshot: Snapshot) -> None:
        for reading in snapshot.readings:
            if reading.kind == "weight":
                self._first_weights.setdefault(reading.module, reading.mean_square)

    def _learn_sizes(self, snapshot: Snapshot) -> None:
        """Note the size of each FP8 site's tensor: a grad_output is as large as the output, a weight is known."""
        counts = {(reading.kind, reading.module): reading.count for reading in snapshot.readings}
        scales = self.engine.conversion.scales
        for site in scales.sites if scales is not None else ():
            path, _, end = site.rpartition(".")
            name = f"{path}.weight" if end == "weight" else path
            known = counts.get((_KIND_OF_SITE[end], name))
            if known and end != "input":  # the input of a layer is the output of another, and read under its name
                self.fp8_rules.sizes[site] = known
