"""Trains a run in one process, from its start or a checkpoint, and writes its record, checkpoints and summary.

    step k:           batches k*accumulate .. ; forward and backward of each; update; metrics are copied to the host
    every N steps:    wait for the metrics of all steps so far, evaluate, save a checkpoint
    at the end:       evaluate, save a checkpoint, sample, check the result

A checkpoint holds everything the next step depends on, and a batch is a pure function of its number. So a resumed run
computes what the uninterrupted run would have computed; on a CPU, bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge import random_state
from narrowgauge.device_readback import Readback
from narrowgauge.engine import Engine
from narrowgauge.engine.fit_memory import Budget
from narrowgauge.engine.step_function import StepFunction
from narrowgauge.errors import TrainingStalled
from narrowgauge.findings import Finding
from narrowgauge.gauges.capture import Recorder
from narrowgauge.gauges.cause_groups import group_by_cause
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.rules.step_rules import Step
from narrowgauge.nn.speed_advice import no_speed_warnings
from narrowgauge.ranks.init_model import make_model
from narrowgauge.ranks.world import SINGLE_PROCESS, World
from narrowgauge.runs import record
from narrowgauge.runs.batches import BatchReader, make_isolated_batch, to_device
from narrowgauge.runs.checkpoint_times import CheckpointTimes
from narrowgauge.runs.checkpoints import checkpoint, resuming
from narrowgauge.runs.checkpoints.saving import make_saver
from narrowgauge.runs.engine_choices import ChoicesReporter, describe_choices
from narrowgauge.runs.evaluation import Evaluation
from narrowgauge.runs.finite_batches import BadData
from narrowgauge.runs.interruption import Interruption
from narrowgauge.runs.optimizers import make_optimizers
from narrowgauge.runs.rank_batches import RankBatches
from narrowgauge.runs.result import (
    Result,
    check_result,
    make_data_finding,
    make_sample_finding,
    make_stall_finding,
)
from narrowgauge.runs.schedule import Schedule
from narrowgauge.runs.settings import Settings
from narrowgauge.runs.throughput import Throughput
from narrowgauge.runs.trackers import registry
from narrowgauge.task import ModelLoader, Task

CAPTURES = "captures"
"""Folder of a run that holds the captured steps: those in which a number went wrong."""


class Observer:
    """Receives the progress of a run. This base class ignores it."""

    def notify(self, line: str) -> None:
        """Show a line to the user."""

    def on_start(self, step: int, steps: int) -> None:
        """Training starts, after ``step`` of ``steps`` updates."""

    def on_metrics(self, event: Mapping[str, Any], skipped: int) -> None:
        """The metrics of a step or an evaluation have arrived.

        Args:
            event: The event as it is in the record, kind ``step`` or ``eval``.
            skipped: How many updates were skipped so far.
        """

    def on_end(self) -> None:
        """Training is over."""


class Trainer:
    """Trains a run from its start or a checkpoint to its end or an interruption."""

    def __init__(
        self, task: Task, settings: Settings, folder: Path, observer: Observer, world: World = SINGLE_PROCESS,
        times: CheckpointTimes | None = None, budget: Budget | None = None,
    ) -> None:  # fmt: skip
        self.times = times or CheckpointTimes(settings.checkpoint_every)
        self.task, self.folder, self.observer, self.world = task, folder, observer, world
        self.reloads_frozen = isinstance(task.model, ModelLoader) and task.model.reloads_frozen
        model = make_model(
            task.model,
            settings.recipe,
            torch.device(settings.device),
            world,
            parallel=settings.parallel,
            seed=settings.seed,
            notify=observer.notify,
        )
        self.rank_batches = RankBatches(world.rank, world.size, settings.accumulate)
        rate = settings.learning_rate
        optimizers = make_optimizers(task, model, rate)
        self.schedule = Schedule(optimizers, settings.steps, settings.warmup)
        with no_speed_warnings():
            self.engine = Engine(
                model, optimizers, settings.recipe, clip_norm=settings.clip_norm or None,
                accumulate=self.rank_batches.microbatches, compile=settings.compile, memory_budget=budget,
            )  # fmt: skip
        self.run_microbatch = StepFunction(self.engine, self._compute_loss, None if task.recordable else False)
        self.engine.watchers.append(ChoicesReporter(self.engine, observer.notify))
        self.settings = dataclasses.replace(settings, recipe=str(self.engine.recipe))
        if self.engine.recipe_reason is not None:
            observer.notify(f"recipe {self.engine.recipe}: {self.engine.recipe_reason}")
        if self.engine.recipe.compute not in ("fp32", "tf32"):
            observer.notify(self.engine.conversion.summary())
        if self.engine.speed_advice is not None:
            observer.notify(self.engine.speed_advice)
        self.evaluation = Evaluation(self.engine, task, observer.notify)
        self.readback = Readback()
        self.recorder: Recorder | None = None
        if world.is_single:  # one process cannot replay a step of several ranks
            self.recorder = Recorder(
                self.engine, folder / CAPTURES, about=lambda: record.read_configuration(folder), tell=observer.notify
            )
        self.examiner = Examiner(self.engine, settings.watch_every, settings.predict) if world.is_first else None
        self.saver = make_saver(folder, settings.keep, world)
        self.result = Result(
            run=str(folder),
            recipe=str(self.engine.recipe),
            step=0,
            steps=settings.steps,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            unit=task.unit,
            watched=settings.watch_every > 0,
        )
        self.saved_step = self.evaluated_step = -1
        self.resumed = False
        self.throughput = Throughput(task.items_per_batch * settings.accumulate)

    def resume_from(self, path: Path | None) -> None:
        """Resume from a checkpoint. None: the run has no checkpoint yet, and starts again."""
        self.resumed = True
        step = checkpoint.read_step(path) if path is not None else 0
        only = self.reloads_frozen
        state = resuming.restore(path, self.engine, self.world, only) if path is not None else {"result": {}}
        found = state["result"].pop("findings", None) if path is not None else []
        if self.world.is_first:  # after restore: a checkpoint that does not fit must not cost events
            record.truncate_after(self.folder, step, None if found is None else len(found))
        if path is None:
            self.observer.notify("no checkpoint was written yet: starting again")
            return
        for name, value in state["result"].items():
            setattr(self.result, name, value)
        self.result.findings = [Finding.from_record(finding) for finding in found or ()]
        self.result.step = self.saved_step = step
        self.evaluated_step = state["evaluated_step"]
        self.result.checkpoint = str(path)
        if self.recorder is not None:
            self.recorder.load_state_dict(state.get("recorder") or {})
        if self.examiner is not None:
            snapshots = (event for event in record.read(self.folder) if event["kind"] == "look")
            self.examiner.load_state_dict(state.get("examiner") or {}, snapshots)

    def train(self) -> Result:
        """Train to the last step, or until a signal arrives; return the summary."""
        result, settings = self.result, self.settings
        self.throughput.start(result.seconds)
        with contextlib.ExitStack() as stack:
            first = self.world.is_first
            self.record = stack.enter_context(record.Record(self.folder) if first else record.NullRecord())
            names = registry.parse_names(settings.log) if first else ()
            configuration = record.read_configuration(self.folder) if first else {}
            self.trackers = registry.start_trackers(
                names, self.folder, configuration, result.step + 1, self.observer.notify
            )
            stack.callback(self.trackers.close)
            stop = stack.enter_context(Interruption())
            if self.resumed:
                self.record.append("resume", result.step)
            stack.callback(self.observer.on_end)
            self.observer.on_start(result.step, settings.steps)
            pin, notify = self.engine.device.type == "cuda", self.observer.notify
            reader = stack.enter_context(
                BatchReader(self.task, result.step, settings.steps, self.rank_batches, pin, settings.seed, notify)
            )
            try:
                while result.step < settings.steps and (batches := self._read_batches(reader, stop)) is not None:
                    self._step(batches)
                    self._evaluate_and_save_if_due()
                self._drain_metrics()
                if result.step < settings.steps:
                    reason = stop.name or "another rank was stopped"
                    self.observer.notify(f"{reason}: saving; press Ctrl-C again to quit immediately")
                    result.interrupted = True
                self._finish()
            except TrainingStalled as error:
                # No checkpoint: one of a stalled run would only replace those from which it can be resumed.
                self._drain_metrics()
                self._add_finding(make_stall_finding(result, error))
            except BadData as error:
                # The weights are good, so they are saved before the run ends with the error about its data.
                # The finding is not in the checkpoint: a run that is resumed with good data has none.
                self._drain_metrics()
                self._save_checkpoint()
                self._record_saved(wait=True)
                if self.recorder is not None and error.batch is not None:
                    self._add_capture(result.step + 1, self.recorder.capture_bad_batch(error.batch))
                self._add_finding(make_data_finding(result.step, error))
                raise
            for prediction in self.examiner.predict() if self.examiner is not None else ():
                result.predictions.append(prediction.as_event())
                self.record.append("prediction", result.step, **prediction.as_event())
            short = self.examiner.finish() if self.examiner is not None and not result.interrupted else []
            for finding in [*short, *check_result(result)]:
                self._add_finding(finding)
            result.findings = group_by_cause(result.findings)
            result.seconds, result.tokens_per_s = self.throughput.seconds(), self.throughput.rate()
            vars(result).update(describe_choices(self.engine))
            self.record.append("end", **result.describe())
            self.record.sync()
            self.trackers.close(result.describe())
        return result

    def _read_batches(self, reader: BatchReader, stop: Interruption) -> list[Any] | None:
        """Read the batches of the next step. None: a rank was stopped. Bad data on one rank raises on all."""
        batches: list[Any] = []
        bad: BadData | None = None
        if not stop.wanted:
            try:
                batches = reader.read_step()
            except BadData as error:
                bad = error
        trouble = self.world.max(2 if bad is not None else 1 if stop.wanted else 0)
        if trouble == 2:
            raise bad or BadData("another rank has bad data; see its own error")
        return None if trouble else batches

    def _compute_loss(self, batch: Any) -> Tensor:
        return self.task.loss(self.engine.model, batch)

    def _step(self, batches: list[Any]) -> None:
        engine, result = self.engine, self.result
        rate = self.schedule.set(result.step)
        total: Tensor | None = None
        for batch in batches:
            if self.recorder is not None:
                self.recorder.record_batch(batch)
            # Only the report of the last microbatch matters; the others say that the update is not complete.
            loss, report = self.run_microbatch(to_device(batch, engine.device))
            total = loss if total is None else total + loss
        assert total is not None
        total = engine.update_sync.average(total / len(batches))
        result.step += 1
        self.readback.push((result.step, rate), {"loss": total, **report.tensors})
        self._record_metrics(self.readback.ready())

    def _record_metrics(self, pushes: list[tuple[Any, dict[str, float]]]) -> None:
        rate = self.throughput.count(len(pushes)) if pushes else None
        for (step, learning_rate), values in pushes:
            result = self.result
            result.loss_first = values["loss"] if result.loss_first is None else result.loss_first
            result.loss_last = values["loss"]
            applied = bool(values.pop("applied"))
            result.skipped += not applied
            captured = self.recorder.check_step(step, values["loss"], applied) if self.recorder is not None else None
            self._add_capture(step, captured)
            metrics = {"loss": values.pop("loss"), "lr": learning_rate, **values, "tokens_per_s": rate}
            self.record.append("step", step, **metrics, applied=applied, time=self.throughput.seconds())
            self.trackers.log_metrics("train", step, {name: v for name, v in metrics.items() if v is not None})
            self.observer.on_metrics({"kind": "step", "step": step, **metrics, "applied": applied}, result.skipped)
            if self.examiner is not None:
                seen = Step(step, metrics["loss"], values["grad_norm"], values["loss_scale"], applied)
                self._add_findings(self.examiner.check_step(seen))
        self._record_readings(wait=False)

    def _record_readings(self, wait: bool) -> None:
        """Record the readings of tensors that have arrived, and the findings from them."""
        if self.examiner is None:
            return
        snapshots, _, found = self.examiner.collect(wait)
        for snapshot in snapshots:
            self.record.append("look", snapshot.update, **snapshot.as_event())
        self._add_findings(found)

    def _add_findings(self, found: list[Finding]) -> None:
        for finding in found:
            self._add_finding(finding)
            self.observer.notify(f"step {finding.step}, {finding.severity}: {finding.where}: {finding.detail}")

    def _drain_metrics(self) -> None:
        """Wait until the metrics of every step so far are in the record."""
        self._record_metrics(self.readback.drain())
        self._record_readings(wait=True)

    def _evaluate_and_save_if_due(self) -> None:
        step, settings = self.result.step, self.settings
        if not self.throughput.is_steady:
            self._drain_metrics()
        self._record_saved()
        evaluate = settings.eval_every > 0 and step % settings.eval_every == 0
        save = self.times.is_due(step)
        if evaluate or save:
            self._drain_metrics()
            with self.throughput.paused():
                if evaluate:
                    self._evaluate()
                if save:
                    self._save_checkpoint()

    def _finish(self) -> None:
        with self.throughput.paused():
            # An interrupted run is not evaluated: the uninterrupted run would not have been at this step.
            if not self.result.interrupted and self.evaluated_step != self.result.step:
                self._evaluate()
            if self.times.at_end or self.result.interrupted:
                self._save_checkpoint()
            if not self.result.interrupted:
                self._sample()
            self._record_saved(wait=True)

    def _evaluate(self) -> None:
        """Average loss and metrics over the fixed evaluation batches, and restore the random generators."""
        count, world = self.settings.eval_batches, self.world
        # If the batches do not divide among the ranks, every rank evaluates all of them.
        own = RankBatches(world.rank, world.size if count % world.size == 0 else 1, count)
        where = f"the evaluation after step {self.result.step}"

        def make_batches() -> Iterator[Any]:
            for number in own.batch_numbers(0) if own.size > 1 else range(count):
                batch = make_isolated_batch(self.task, number, "eval", where, self.settings.seed)
                yield to_device(batch, self.engine.device)

        sums = self.evaluation.sum(make_batches)
        totals = [float(value) for value in sums.values()]
        totals = world.sum(totals) if own.size > 1 else totals
        means = {name: total / count for name, total in zip(sums, totals, strict=True)}
        self.evaluated_step = self.result.step
        self.result.loss_eval = means["loss"]
        self.result.metrics = {name: value for name, value in means.items() if name != "loss"}
        self.record.append("eval", self.result.step, **means)
        self.trackers.log_metrics("eval", self.result.step, means)
        self.observer.on_metrics({"kind": "eval", "step": self.result.step, **means}, self.result.skipped)

    def _save_checkpoint(self) -> None:
        result = self.result
        if result.step == self.saved_step:
            return
        result.seconds = self.throughput.seconds()
        self.record.sync()  # the events up to a checkpoint must be on disk before the checkpoint is
        engine = self.engine.state_dict(self.reloads_frozen)
        weights = engine.pop("model")
        kept = ("loss_first", "loss_last", "loss_eval", "metrics", "skipped", "seconds", "captures")
        findings = [finding.describe() for finding in result.findings]
        state = {
            "engine": engine,
            "result": {name: getattr(result, name) for name in kept} | {"findings": findings},
            "evaluated_step": self.evaluated_step,
            "examiner": self.examiner.state_dict() if self.examiner is not None else None,
            "recorder": self.recorder.state_dict() if self.recorder is not None else None,
        }
        self.saver.save(result.step, weights, state, random_state.capture())
        self.saved_step = result.step
        self._record_saved()

    def _record_saved(self, wait: bool = False) -> None:
        """Record the checkpoints that are complete."""
        for step, path in self.saver.collect_saved(wait):
            self.result.checkpoint = str(path)
            self.record.append("checkpoint", step, path=str(path))

    def _sample(self) -> None:
        if self.task.sample is None:
            return
        random_state.seed(self.settings.seed)
        try:
            # The text grows with every token, and each new shape would be compiled again.
            eager = torch.compiler.set_stance("force_eager") if self.settings.compile else contextlib.nullcontext()
            with self.engine.evaluating(), eager:
                self.result.sample = self.task.sample(self.engine.inner)
        except Exception as error:  # the model is trained and saved: a broken sample must not hide that
            self._add_finding(make_sample_finding(self.result.step, error))
            return
        self.record.append("sample", self.result.step, text=self.result.sample)

    def _add_capture(self, step: int, path: Path | None) -> None:
        if path is not None:
            self.result.captures.append(str(path))
            self.record.append("capture", step, path=str(path))

    def _add_finding(self, finding: Finding) -> None:
        finding = dataclasses.replace(finding, step=finding.step or self.result.step)
        self.result.findings.append(finding)
        fields = finding.describe()
        self.record.append("finding", **fields)
        self.trackers.log_finding(fields["step"], fields)
