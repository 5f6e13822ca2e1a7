"""Gauges, findings and captures in a host's loop: called by the engine, without waiting for the device."""

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
    """Reads tensors and applies narrowgauge's rules while a host library trains.

    Args:
        engine: The hosted engine.
        every: Read tensors every so many updates.
        captures: Folder for captured steps. None: capture nothing. Only a host that calls ``record_batch`` before each
            forward can capture.
        tell: Called with one line for each finding and each capture. Default: log a warning.

    Attributes:
        engine: The hosted engine.
        examiner: Applies the rules.
        recorder: Captures steps, or None.

    Example:
        >>> gauges = Gauges(plugin.engine, every=100)
        >>> ...  # train
        >>> gauges.finish()
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
        """All findings so far."""
        return self.examiner.findings

    def record_batch(self, batch: Any) -> None:
        """Remember a microbatch for a capture. Call it before the forward pass.

        Args:
            batch: What the model is called with.
        """
        if self.recorder is not None and torch.is_grad_enabled() and self.engine.model.training:
            self.recorder.record_batch(batch)

    @contextlib.contextmanager
    def around(self, _: str) -> Iterator[None]:
        """Do nothing around the phases of a step."""
        yield

    def after(self, report: StepReport) -> None:
        """Send an update's numbers to the host, and examine those of earlier updates that have arrived.

        Args:
            report: The update's report.
        """
        assert self.engine.loss is not None  # every update has a backward
        self._readback.push(report.index, {**report.tensors, "loss": self.engine.loss})
        self._examine(self._readback.ready())
        self._report(self.examiner.collect()[2])

    def finish(self) -> list[Finding]:
        """Wait for the numbers of all updates, stop watching, and return all findings."""
        if self in self.engine.watchers:
            self._examine(self._readback.drain())
            self._report(self.examiner.collect(wait=True)[2])
            self._report(self.examiner.finish())
            self.engine.watchers.remove(self)
            if self.examiner.watch is not None:
                self.examiner.watch.stop()
        return self.findings

    def _examine(self, arrived: list[tuple[Any, dict[str, float]]]) -> None:
        for number, values in arrived:
            applied = values["applied"] > 0
            if self.recorder is not None:
                self.recorder.check_step(number, values["loss"], applied)
            step = Step(number, values["loss"], values["grad_norm"], values["loss_scale"], applied)
            self._report(self.examiner.check_step(step))

    def _report(self, found: list[Finding]) -> None:
        for finding in found:
            self._tell(f"{finding.severity}: {finding.rule} at {finding.where}: {finding.detail}; {finding.fix}")
