"""Gauges, findings and captures of a hosted engine: told of each update by the engine itself, waiting for nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from narrowgauge.device_readback import Readback
from narrowgauge.findings import Finding
from narrowgauge.gauges.capture import Recorder
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.rules.step_rules import Step
from narrowgauge.gauges.watch.watch import EVERY
from narrowgauge.integrations.hosted import Hosted
from narrowgauge.step_report import StepReport


class Gauges:
    """Applies narrowgauge's rules to a hosted run; ``findings`` has what they found.

    Tensors are read every ``every`` updates. ``captures`` is the folder for steps that went wrong (None: none are
    kept); a host that shows its batches (``saw``) before their forward can have them. ``tell`` takes a line for each
    finding and each capture (default: the log, as a warning).
    """

    def __init__(
        self,
        engine: Hosted,
        every: int = EVERY,
        captures: str | Path | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.engine = engine
        self._tell = tell or logging.getLogger("narrowgauge").warning
        self.examiner = Examiner(engine, every)
        self.recorder = None if captures is None else Recorder(engine, captures, tell=self._tell)
        self._readback = Readback()
        engine.watchers.append(self)

    @property
    def findings(self) -> list[Finding]:
        return self.examiner.findings

    def saw(self, batch: Any) -> None:
        """Remember a microbatch, before its forward."""
        if self.recorder is not None and torch.is_grad_enabled() and self.engine.model.training:
            self.recorder.record_batch(batch)

    @contextlib.contextmanager
    def around(self, _: str) -> Iterator[None]:
        yield

    def after(self, report: StepReport) -> None:
        """An update is done; its numbers are on their way, and those of earlier ones may be here."""
        assert self.engine.loss is not None  # no update without a backward
        self._readback.push(report.index, {**report.tensors, "loss": self.engine.loss})
        self._hear(self._readback.ready())
        self._told(self.examiner.collect()[2])

    def finish(self) -> list[Finding]:
        """Wait for what is still on its way, watch no longer, and return all findings."""
        if self in self.engine.watchers:
            self._hear(self._readback.drain())
            self._told(self.examiner.collect(wait=True)[2])
            self.engine.watchers.remove(self)
            self.examiner.watch.stop()
        return self.findings

    def _hear(self, news: list[tuple[Any, dict[str, float]]]) -> None:
        for number, values in news:
            applied = values["applied"] > 0
            if self.recorder is not None:
                self.recorder.check_step(number, values["loss"], applied)
            step = Step(number, values["loss"], values["grad_norm"], values["loss_scale"], applied)
            self._told(self.examiner.check_step(step))

    def _told(self, found: list[Finding]) -> None:
        for finding in found:
            self._tell(f"{finding.severity}: {finding.rule} at {finding.where}: {finding.detail}; {finding.fix}")
