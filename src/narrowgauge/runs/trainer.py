"""One life of a run: steps a task from its start or a checkpoint on, keeping record, checkpoints and summary.

    step k of the run:   batches k*accumulate .. ; forward and backward of each; update; numbers sent to the host
    when it is due:      wait for the numbers of all steps so far, evaluate, checkpoint
    at the end:          evaluate, checkpoint, sample, judge

A checkpoint holds everything the next step depends on, and batches are pure functions of their number, so a resumed run
does what the uninterrupted one would have done; on a CPU, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge import random_state
from narrowgauge.device_readback import Readback
from narrowgauge.engine import Engine
from narrowgauge.errors import TrainingStalled
from narrowgauge.findings import Finding
from narrowgauge.gauges.capture import Recorder
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.rules.step_rules import Step
from narrowgauge.ranks.init_model import make_model
from narrowgauge.ranks.world import ALONE, World
from narrowgauge.runs import record
from narrowgauge.runs.batches import BadData, Feed, make_alone, to_device
from narrowgauge.runs.checkpoints import checkpoint, resuming
from narrowgauge.runs.checkpoints.saving import make_saver
from narrowgauge.runs.interruption import Interruption
from narrowgauge.runs.rank_batches import Share
from narrowgauge.runs.result import Result, failed_sample, judge, refused_data, stalled
from narrowgauge.runs.schedule import Schedule, make_adamw
from narrowgauge.runs.settings import Settings
from narrowgauge.runs.throughput import Pace
from narrowgauge.runs.trackers import base
from narrowgauge.task import Task

CAPTURES = "captures"
"""Folder of a run that holds the steps in which a number went wrong."""


class Observer:
    """Who watches a run; this one looks away."""

    def tell(self, line: str) -> None:
        """A line for people."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts after ``step`` updates."""

    def saw(self, event: Mapping[str, Any], skipped: int) -> None:
        """The numbers of a step or an evaluation have arrived."""

    def end(self) -> None:
        """Training is over."""


class Trainer:
    """From the start of a run, or a checkpoint, to its end or an interruption."""

    def __init__(self, task: Task, settings: Settings, folder: Path, observer: Observer, world: World = ALONE) -> None:
        self.task, self.settings, self.folder, self.observer, self.world = task, settings, folder, observer, world
        model = make_model(
            task.model,
            settings.recipe,
            torch.device(settings.device),
            world,
            parallel=settings.parallel,
            seed=settings.seed,
            tell=observer.tell,
        )
        self.share = Share(world.rank, world.size, settings.accumulate)
        rate = settings.learning_rate
        optimizer = task.optimizer(model, rate) if task.optimizer else make_adamw(model, rate, task.weight_decay)
        self.schedule = Schedule(optimizer, settings.steps, settings.warmup)
        self.engine = Engine(
            model,
            optimizer,
            recipe=settings.recipe,
            clip_norm=settings.clip_norm or None,
            accumulate=self.share.microbatches,
            compile=settings.compile,
        )
        if self.engine.recipe.compute not in ("fp32", "tf32"):
            observer.tell(self.engine.conversion.summary())
        self.readback = Readback()
        self.recorder: Recorder | None = None
        if world.alone:  # a step of several ranks cannot be run again by one
            self.recorder = Recorder(
                self.engine, folder / CAPTURES, about=lambda: record.read_configuration(folder), tell=observer.tell
            )
        watched = settings.watch_every and world.first
        self.examiner = Examiner(self.engine, settings.watch_every) if watched else None
        self.saver = make_saver(folder, settings.keep, world)
        self.result = Result(
            run=str(folder),
            recipe=str(self.engine.recipe),
            step=0,
            steps=settings.steps,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            unit=task.unit,
        )
        self.saved_step = self.evaluated_step = -1
        self.resumed = False
        self.pace = Pace(task.items_per_batch * settings.accumulate)

    def go_on_from(self, path: Path | None) -> None:
        """Take up a checkpoint; without one, begin again."""
        self.resumed = True
        step = checkpoint.step_of(path) if path is not None else 0
        state = resuming.load(path, self.engine, self.world) if path is not None else {"result": {}}
        found = state["result"].pop("findings", None) if path is not None else []
        if self.world.first:  # only now: a checkpoint that does not fit costs no event
            record.cut_after(self.folder, step, None if found is None else len(found))
        if path is None:
            self.observer.tell("no checkpoint was written yet: beginning again")
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
        result, settings = self.result, self.settings
        self.pace.begin(result.seconds)
        with contextlib.ExitStack() as stack:
            first = self.world.first
            self.record = stack.enter_context(record.Record(self.folder) if first else record.Silent())
            names = base.parse(settings.log) if first else ()
            asked = record.read_configuration(self.folder) if first else {}
            self.board = base.begin(names, self.folder, asked, result.step + 1, self.observer.tell)
            stack.callback(self.board.close)
            stop = stack.enter_context(Interruption())
            if self.resumed:
                self.record.append("resume", result.step)
            stack.callback(self.observer.end)
            self.observer.begin(result.step, settings.steps)
            pin = self.engine.device.type == "cuda"
            feed = stack.enter_context(
                Feed(self.task, result.step, settings.steps, self.share, pin, settings.seed, self.observer.tell)
            )
            try:
                while result.step < settings.steps and (batches := self._next(feed, stop)) is not None:
                    self._step(batches)
                    self._do_what_is_due()
                self._settle_numbers()
                if result.step < settings.steps:
                    signalled = stop.name or "another rank was told to stop"
                    self.observer.tell(f"{signalled}: saving; press Ctrl-C again to quit immediately")
                    result.interrupted = True
                self._finish()
            except TrainingStalled as error:
                # No checkpoint: one of a stalled run would only push out those it can be taken up from.
                self._settle_numbers()
                self._finding(stalled(result.step, error))
            except BadData as error:
                # The weights are good, so they are saved before the run ends with the line about its data.
                # The finding is in no checkpoint: a run that is resumed with good data has none.
                self._settle_numbers()
                self._checkpoint()
                self._saved(wait=True)
                self._finding(refused_data(result.step, error))
                raise
            for prediction in self.examiner.predict() if self.examiner is not None else ():
                result.predictions.append(prediction.as_event())
                self.record.append("prediction", result.step, **prediction.as_event())
            for finding in judge(result) if not result.interrupted else ():
                self._finding(finding)
            result.seconds, result.tokens_per_s = self.pace.seconds(), self.pace.rate()
            self.record.append("end", **result.describe())
            self.record.sync()
            self.board.close(result.describe())
        return result

    def _next(self, feed: Feed, stop: Interruption) -> list[Any] | None:
        """The batches of the next step; None where a rank was told to stop; where one has bad data, all say so."""
        batches: list[Any] = []
        bad: BadData | None = None
        if not stop.wanted:
            try:
                batches = feed.take()
            except BadData as error:
                bad = error
        trouble = self.world.most(2 if bad is not None else 1 if stop.wanted else 0)
        if trouble == 2:
            raise bad or BadData("another rank was given bad data; its own line says what")
        return None if trouble else batches

    def _step(self, batches: list[Any]) -> None:
        engine, result = self.engine, self.result
        rate = self.schedule.set(result.step)
        total: Tensor | None = None
        for number, batch in enumerate(batches, 1):
            if self.recorder is not None:
                self.recorder.record_batch(batch)
            on_device = to_device(batch, engine.device)
            with engine.forward():
                loss = self.task.loss(engine.model, on_device)
            engine.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
            if number == len(batches):
                total = engine.update_sync.average(total / len(batches))
            # The report that counts is the last microbatch's; the others only say that the update is not complete.
            report = engine.step()
        assert total is not None
        result.step += 1
        self.readback.push((result.step, rate), {"loss": total, **report.tensors})
        self._arrived(self.readback.ready())

    def _arrived(self, pushes: list[tuple[Any, dict[str, float]]]) -> None:
        rate = self.pace.tick(len(pushes)) if pushes else None
        for (step, learning_rate), values in pushes:
            result = self.result
            result.loss_first = values["loss"] if result.loss_first is None else result.loss_first
            result.loss_last = values["loss"]
            applied = bool(values.pop("applied"))
            result.skipped += not applied
            captured = self.recorder.check_step(step, values["loss"], applied) if self.recorder is not None else None
            if captured is not None:
                result.captures.append(str(captured))
                self.record.append("capture", step, path=str(captured))
            numbers = {"loss": values.pop("loss"), "lr": learning_rate, **values, "tokens_per_s": rate}
            self.record.append("step", step, **numbers, applied=applied, time=self.pace.seconds())
            self.board.add("train", step, {name: value for name, value in numbers.items() if value is not None})
            self.observer.saw({"kind": "step", "step": step, **numbers, "applied": applied}, result.skipped)
            if self.examiner is not None:
                seen = Step(step, numbers["loss"], values["grad_norm"], values["loss_scale"], applied)
                self._findings(self.examiner.check_step(seen), step)
        self._look(wait=False)

    def _look(self, wait: bool) -> None:
        """Take what has been read off the tensors to the record, and what it shows to whoever watches."""
        if self.examiner is None:
            return
        snapshots, _, found = self.examiner.collect(wait)
        for snapshot in snapshots:
            readings = [reading.as_event() for reading in snapshot.readings]
            self.record.append("look", snapshot.update, applied=snapshot.applied, readings=readings)
        self._findings(found, snapshots[-1].update if snapshots else self.result.step)

    def _findings(self, found: list[Finding], step: int) -> None:
        for finding in found:
            self._finding(finding)
            self.observer.tell(f"step {step}, {finding.severity}: {finding.where}: {finding.detail}")

    def _settle_numbers(self) -> None:
        """Wait until the numbers of every step so far are in the record."""
        self._arrived(self.readback.drain())
        self._look(wait=True)

    def _do_what_is_due(self) -> None:
        step, settings = self.result.step, self.settings
        if not self.pace.began:
            self._settle_numbers()
        self._saved()
        evaluate = settings.eval_every > 0 and step % settings.eval_every == 0
        save = settings.checkpoint_every > 0 and step % settings.checkpoint_every == 0
        if evaluate or save:
            self._settle_numbers()
            with self.pace.paused():
                if evaluate:
                    self._evaluate()
                if save:
                    self._checkpoint()

    def _finish(self) -> None:
        with self.pace.paused():
            # An interrupted run is not evaluated: the uninterrupted one would not have been at this step.
            if not self.result.interrupted and self.evaluated_step != self.result.step:
                self._evaluate()
            self._checkpoint()
            if not self.result.interrupted:
                self._sample()
            self._saved(wait=True)

    def _evaluate(self) -> None:
        """Average loss and metrics over the fixed evaluation batches, leaving the random generators as they were."""
        sums: dict[str, Tensor] = {}
        count, world = self.settings.eval_batches, self.world
        own = Share(world.rank, world.size if count % world.size == 0 else 1, count)  # else all evaluate all
        with random_state.preserve(), self.engine.evaluating():
            for number in own.numbers(0) if own.size > 1 else range(count):
                where = f"the evaluation after step {self.result.step}"
                batch = make_alone(self.task, number, "eval", where, self.settings.seed)
                batch = to_device(batch, self.engine.device)
                values = {"loss": self.task.loss(self.engine.model, batch)}
                if self.task.metrics is not None:
                    values |= self.task.metrics(self.engine.model, batch)
                for name, value in values.items():
                    sums[name] = sums[name] + value.detach().double() if name in sums else value.detach().double()
        totals = [float(value) for value in sums.values()]
        totals = world.sum(totals) if own.size > 1 else totals
        means = {name: total / count for name, total in zip(sums, totals, strict=True)}
        self.evaluated_step = self.result.step
        self.result.loss_eval = means["loss"]
        self.result.metrics = {name: value for name, value in means.items() if name != "loss"}
        self.record.append("eval", self.result.step, **means)
        self.board.add("eval", self.result.step, means)
        self.observer.saw({"kind": "eval", "step": self.result.step, **means}, self.result.skipped)

    def _checkpoint(self) -> None:
        result = self.result
        if result.step == self.saved_step:
            return
        result.seconds = self.pace.seconds()
        self.record.sync()  # the events up to a checkpoint must not be younger on the disk than the checkpoint itself
        engine = self.engine.state_dict()
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
        self._saved()

    def _saved(self, wait: bool = False) -> None:
        """Note the checkpoints that have come to be."""
        for step, path in self.saver.done(wait):
            self.result.checkpoint = str(path)
            self.record.append("checkpoint", step, path=str(path))

    def _sample(self) -> None:
        if self.task.sample is None:
            return
        random_state.seed(self.settings.seed)
        try:
            # A growing text changes its shape at every token, which is no work for a compiler.
            eager = torch.compiler.set_stance("force_eager") if self.settings.compile else contextlib.nullcontext()
            with self.engine.evaluating(), eager:
                self.result.sample = self.task.sample(self.engine.inner)
        except Exception as error:  # the model is trained and saved: a broken sample must not hide that
            self._finding(failed_sample(self.result.step, error))
            return
        self.record.append("sample", self.result.step, text=self.result.sample)

    def _finding(self, finding: Finding) -> None:
        self.result.findings.append(finding)
        self.record.append("finding", self.result.step, **finding.describe())
        self.board.finding(self.result.step, finding.describe())
