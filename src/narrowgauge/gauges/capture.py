"""Recorder: captures the first step in which a number is inf or NaN, so that it can be replayed op by op.

    record_batch(batch)        before each microbatch's forward: keep the batch and the random states; at the first
                               microbatch of a step also the loss scale, the FP8 scales, the buffers and the
                               optimizer's settings
    record_step(report, loss)  after each step: start copying "applied" and the loss to the host, without blocking
    check_step(step, ...)      when they have arrived: drop earlier steps; write a capture if
                                   the loss is not finite, or
                                   a gradient is not, unless a dynamic loss scale is still adapting, or
                                   ``patience`` consecutive updates were skipped, or
                                   the step was requested

On a CPU the numbers arrive at once. On a GPU they arrive a step or two late, so references to the last few steps'
batches are kept. Weights are copied when the numbers arrive. A skipped update does not change them, so they are those
of the bad step unless other updates were applied in between; the capture records which (``weights_of_step``). For a
requested step they are copied before it. An error while writing is reported in one line and never stops the training.
"""

from __future__ import annotations

import logging
import math
import platform
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge import random_state
from narrowgauge.device_readback import Readback
from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.gauges.replay import capture_files, optimizer_settings
from narrowgauge.step_report import StepReport
from narrowgauge.version import __version__

SMALL = 1 << 16
"""Buffers of up to this many elements are copied at every step."""
MAX_BYTES = 8 << 30
WINDOW_BYTES = 256 << 20
"""Limit for the batches kept while their numbers are still being copied; two steps are always kept."""


@dataclass
class _Microbatch:
    batch: Any
    random: dict[str, Any]
    versions: list[int]
    """Version counters of the batch's tensors: they show whether the loop has overwritten the batch."""


@dataclass
class _StepStart:
    """State at the start of a step."""

    step: int
    loss_scale: Tensor | None
    scales: dict[str, Any] | None
    buffers: dict[str, Tensor]
    weights: dict[str, Any] | None = None
    """Weights before the step, if its capture was requested."""
    settings: list[dict[str, Any]] = field(default_factory=list)
    """Settings of the optimizer."""
    last_settings: list[dict[str, Any]] | None = None
    """Those of the step before: its update made the weights of this step."""
    microbatches: list[_Microbatch] = field(default_factory=list)

    def nbytes(self) -> int:
        return sum(t.nbytes for m in self.microbatches for _, t in capture_files.list_tensors(m.batch))


class Recorder:
    """Captures steps of a training loop in which the loss or a gradient becomes inf or NaN.

    Call ``record_batch`` before each forward, ``record_step`` after each ``engine.step()``, and ``finish`` at the end.
    Replay a capture with ``ng.replay`` or ``narrowgauge replay``.
    """

    def __init__(
        self,
        engine: Engine,
        folder: str | Path,
        *,
        max_captures: int = 2,
        max_bytes: int = MAX_BYTES,
        window: int = 8,
        patience: int = 10,
        about: Callable[[], Mapping[str, Any]] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare to capture steps of an engine.

        Args:
            engine: The engine that the loop trains with.
            folder: Where captures are written, one folder each. It is created when needed.
            max_captures: Captures in the folder at most, including those of earlier runs.
            max_bytes: Limit for the weights of one capture. Larger models are not captured.
            window: Steps whose batches are kept while their numbers are being copied to the host.
            patience: Under a dynamic loss scale, capture after this many consecutive skipped updates.
            about: Returns what ``narrowgauge replay`` needs to create the task again; stored in the capture.
            tell: Receives one line per capture or error. Default: a warning in the log.

        Raises:
            UsageError: ``window`` or ``patience`` is less than 1.
        """
        for name, value in (("window", window), ("patience", patience)):
            if value < 1:
                raise UsageError(f"Recorder: {name}={value} must be at least 1")
        self.engine, self.folder = engine, Path(folder)
        self.max_captures, self.max_bytes, self.window, self.patience = max_captures, max_bytes, window, patience
        self._about = about
        self._tell = tell or logging.getLogger("narrowgauge").warning
        self._starts: deque[_StepStart] = deque()
        self._readback = Readback()
        self._loss: Tensor | None = None
        self._requested: set[int] = set()
        self._streak = 0
        self._in_trouble = False
        self._large: dict[str, tuple[int, Tensor]] = {}
        self._settings: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that decide, with a step's own numbers, whether it is captured."""
        return {"streak": self._streak, "in_trouble": self._in_trouble}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters from ``state_dict``."""
        self._streak = state.get("streak", 0)
        self._in_trouble = state.get("in_trouble", False)

    def request(self, step: int | None = None) -> None:
        """Capture a future step whatever its result.

        Args:
            step: Number of the step, counted from 1. Default: the next one.

        Raises:
            UsageError: The step is over.
        """
        following = self.engine.updates + 1
        if step is not None and step < following:
            raise UsageError(f"Recorder: step {step} is over; the next one is {following}")
        self._requested.add(step or following)

    def record_batch(self, batch: Any) -> None:
        """Keep a microbatch. Call this before its forward.

        Args:
            batch: Tensors and plain values in tuples, named tuples, lists or dicts.
        """
        step = self.engine.updates + 1
        if not self._starts or self._starts[-1].step != step:
            self._begin(step)
        versions = [_version(tensor) for _, tensor in capture_files.list_tensors(batch)]
        self._starts[-1].microbatches.append(_Microbatch(batch, random_state.capture(), versions))

    def record_step(self, report: StepReport | None, loss: Tensor | None = None) -> Path | None:
        """Note the result of a step without blocking. Call this after each ``engine.step()`` or ``engine.flush()``.

        Args:
            report: What ``engine.step()`` returned.
            loss: The loss of the microbatch.

        Returns:
            The folder of a capture if one was written, for this step or an earlier one.
        """
        if loss is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if report is None or not report.complete:
            return None
        applied = report.tensors["applied"]
        total, self._loss = self._loss, None
        self._readback.push(report.index, {"applied": applied, "loss": applied.float() if total is None else total})
        return self._check_all(self._readback.ready())

    def finish(self) -> Path | None:
        """Wait for the numbers of all steps so far. Call this at the end of the loop.

        Returns:
            The folder of a capture if one was written.
        """
        return self._check_all(self._readback.drain())

    # The former names, for existing scripts.
    saw, after, settle = record_batch, record_step, finish

    def check_step(self, step: int, loss: float, applied: bool) -> Path | None:
        """Decide from a step's numbers whether to capture it. ``record_step`` does this once they have arrived.

        Args:
            step: Number of the step, counted from 1.
            loss: Its loss.
            applied: False if the update was skipped.

        Returns:
            The folder of the capture if one was written.
        """
        while self._starts and self._starts[0].step < step:
            self._starts.popleft()
        finite = math.isfinite(loss)
        self._streak = 0 if applied else self._streak + 1
        requested = step in self._requested
        reason = capture_files.REQUESTED[0] if requested else self._find_reason(loss, finite, applied)
        self._requested.discard(step)
        if finite and applied:
            self._in_trouble = False
        if reason is None or (self._in_trouble and not requested):
            return None
        self._in_trouble = self._in_trouble or not (finite and applied)
        return self._capture(step, reason, loss, applied)

    def capture_bad_batch(self, batch: Any) -> Path | None:
        """Capture the next step with a batch that is not finite, which will therefore not be trained on.

        Returns:
            The folder of the capture if one was written.
        """
        self._starts.clear()
        self.record_batch(batch)
        step = self._starts[-1].step
        try:
            self._starts[-1].weights = self._copy_weights()
        except Exception as error:  # for example out of memory: the error about the data must be shown
            self._fail(step, error)
            return None
        return self._capture(step, "its batch is not finite", math.nan, False)

    def _check_all(self, arrived: list[tuple[Any, dict[str, float]]]) -> Path | None:
        written = None
        for step, values in arrived:
            written = self.check_step(step, values["loss"], bool(values["applied"])) or written
        return written

    def _find_reason(self, loss: float, finite: bool, applied: bool) -> str | None:
        if not finite:
            return f"the loss is {loss}"
        scaler = self.engine.scaler
        if not applied and (scaler is None or not scaler.dynamic):
            return "a gradient is not finite"
        if self._streak >= self.patience:
            return f"{self._streak} consecutive updates were skipped"
        return None

    def _begin(self, step: int) -> None:
        engine = self.engine
        scale = engine.scaler.get_scale_tensor(engine.device).clone() if engine.scaler is not None else None
        scales = engine.conversion.scales.state_dict() if engine.conversion.scales is not None else None
        settings, before = optimizer_settings.read_settings(engine.optimizers), self._settings
        self._settings = settings
        start = _StepStart(step, scale, scales, self._copy_buffers(), settings=settings, last_settings=before)
        self._starts.append(start)
        if step in self._requested:
            try:
                self._starts[-1].weights = self._copy_weights()
            except Exception as error:  # for example out of memory: training must continue
                self._fail(step, error)
                self._requested.discard(step)
        held = sum(start.nbytes() for start in self._starts)
        while len(self._starts) > self.window or (len(self._starts) > 2 and held > WINDOW_BYTES):
            held -= self._starts.popleft().nbytes()

    def _copy_buffers(self) -> dict[str, Tensor]:
        """Copy the buffers. A large one is copied only if its version counter has changed since the last copy.

        Small ones are always copied: batch norm writes its statistics without changing their version.
        """
        buffers = {name: buffer.detach() for name, buffer in self.engine.model.named_buffers()}
        small = [name for name, buffer in buffers.items() if buffer.numel() <= SMALL]
        held = dict(zip(small, _copy([buffers[name] for name in small]), strict=True))
        for name in buffers.keys() - held.keys():
            version, copy = self._large.get(name, (-1, buffers[name]))
            if version != _version(buffers[name]):
                self._large[name] = _version(buffers[name]), (copy := buffers[name].clone())
            held[name] = copy
        return held

    def _copy_weights(self) -> dict[str, Any]:
        """The model's FP32 weights, copied to the CPU."""
        size = sum(p.numel() * 4 for p in self.engine.model.parameters())
        if size > self.max_bytes:
            raise UsageError(f"the model has {size:,} bytes of weights, more than max_bytes={self.max_bytes:,}")
        state: dict[str, Any] = self.engine.state_dict()["model"]
        copies: dict[int, Tensor] = {}  # tied weights are copied once

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            key = value.data_ptr() or id(value)
            if key not in copies or copies[key].shape != value.shape:
                copies[key] = value.detach().to("cpu", copy=True)
            return copies[key]

        return {name: copy(value) for name, value in state.items()}

    def _capture(self, step: int, reason: str, loss: float, applied: bool) -> Path | None:
        path = capture_files.make_path(self.folder, step)
        try:
            full = len(capture_files.list_captures(self.folder)) >= self.max_captures
            if full or path.exists():
                if reason == capture_files.REQUESTED[0]:
                    self._tell(f"step {step} is not captured: {self.folder} already holds {self.max_captures} captures")
                return None
            start = self._starts[0] if self._starts and self._starts[0].step == step else None
            if start is None or not start.microbatches:
                self._tell(
                    f"step {step} is not captured ({reason}): its numbers arrived after {self.window} later steps"
                )
                return None
            capture_files.write(path, *self._describe(start, reason, loss, applied))
        except Exception as error:  # for example a full disk: training must continue
            self._fail(step, error)
            return None
        self._tell(f"captured step {step} because {reason}; to replay it: narrowgauge replay {path}")
        return path

    def _describe(
        self, start: _StepStart, reason: str, loss: float, applied: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        engine = self.engine
        weights = start.weights if start.weights is not None else self._copy_weights()
        since = 0 if start.weights is not None else self._applied_since(start.step) + applied
        model = {name: start.buffers[name].cpu() if name in start.buffers else value for name, value in weights.items()}
        buffers = {name: value.cpu() for name, value in start.buffers.items() if name not in model}
        same = all(
            m.versions == [_version(tensor) for _, tensor in capture_files.list_tensors(m.batch)]
            for m in start.microbatches
        )
        scales = start.scales and {k: v.cpu() if isinstance(v, Tensor) else v for k, v in start.scales.items()}
        state = {
            "model": model,
            "buffers": buffers,
            "tensor_scales": scales,
            "microbatches": [{"batch": capture_files.pack(m.batch), "random": m.random} for m in start.microbatches],
        }
        facts = {
            "step": start.step,
            "why": reason,
            "loss": loss,
            "applied": applied,
            "recipe": str(engine.recipe),
            "accumulate": engine.accumulate,
            "loss_scale": None if start.loss_scale is None else float(start.loss_scale.item()),
            "optimizer": {
                "last_update": optimizer_settings.to_numbers(start.last_settings),
                "this_step": optimizer_settings.to_numbers(start.settings),
            },
            "fused": bool(engine.conversion.layers),
            "weights_of_step": start.step + since,
            # An engine that steps during backward has changed some weights before it finds that others are bad.
            "exact": since == 0 and same and not (engine.released and start.weights is None),
            "batches_unchanged": same,
            "in_evaluation": [
                name.removeprefix("_orig_mod.") for name, m in engine.model.named_modules() if not m.training
            ],
            "device": str(engine.device),
            "versions": {"narrowgauge": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "run": dict(self._about()) if self._about is not None else None,
        }
        return facts, state

    def _applied_since(self, step: int) -> int:
        """Count the updates applied after ``step``. This waits for the device, which is fine while capturing."""
        guard = self.engine.guard
        guard.settle()
        skipped = sum(mark.skipped for mark in guard.history if mark.update > step)
        return guard.updates - step - skipped

    def _fail(self, step: int, error: Exception) -> None:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        self._tell(f"step {step} is not captured: {reason}")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copy(tensors: list[Tensor]) -> list[Tensor]:
    """Copy many small tensors, with one kernel if this version of torch has it."""
    together = getattr(torch, "_foreach_clone", None)
    return list(together(tensors)) if together is not None and tensors else [tensor.clone() for tensor in tensors]
