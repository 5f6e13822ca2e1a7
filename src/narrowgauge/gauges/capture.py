"""Captures the step in which a number first went wrong, so that it can be run again op by op (replay.py).

    saw(batch)            before each microbatch's forward: keep the batch, the random states; at the first of a step
                          also the loss scale, the FP8 scales and the buffers
    after(report, loss)   after each step: send "was it applied, was the loss finite" to the host, without waiting
    heard(step, ...)      when that has arrived: forget the steps before; write a capture where
                              the loss is not finite, or
                              a gradient is not, unless a dynamic loss scale has yet to find its place, or
                              ``patience`` updates in a row were skipped, or
                              it was asked for

On a CPU the news is there at once. On a GPU it comes a step or two late, which is why the last few steps are kept, by
reference. Weights are taken when the news comes: a skipped update leaves them untouched, so they are those of the bad
step unless good updates came in between, and the capture says which (``weights_of_step``). For a step that was asked
for they are taken before it. Whatever goes wrong in writing costs a line, never the training.
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

from narrowgauge import __version__, random_state
from narrowgauge.device_readback import Readback
from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.gauges.replay import capture_files
from narrowgauge.step_report import StepReport

SMALL = 1 << 16
"""Most elements of a buffer that is copied at every step."""
ASKED = "it was asked for"
MAX_BYTES = 8 << 30
WINDOW_BYTES = 256 << 20
"""Most bytes of batches that are held back for news that has yet to come; two steps are kept whatever they weigh."""


@dataclass
class _Microbatch:
    batch: Any
    random: dict[str, Any]
    versions: list[int]
    """Of the batch's tensors: a loop that writes the next batch into the same memory gives itself away."""


@dataclass
class _Seen:
    """What a step began with."""

    step: int
    loss_scale: Tensor | None
    scales: dict[str, Any] | None
    buffers: dict[str, Tensor]
    weights: dict[str, Any] | None = None
    """Those before the step, where its capture was asked for."""
    microbatches: list[_Microbatch] = field(default_factory=list)

    def nbytes(self) -> int:
        return sum(t.nbytes for m in self.microbatches for _, t in capture_files.tensors_in(m.batch))


class Recorder:
    """Watches a loop around an engine, and captures what went wrong in it into ``folder``.

    ``max_captures`` lie in the folder at most, earlier runs' included; one of more than ``max_bytes`` is refused.
    ``about`` makes what is needed to make the task again; ``tell`` takes the lines for people (default: the log).
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
        for name, value in (("window", window), ("patience", patience)):
            if value < 1:
                raise UsageError(f"Recorder: {name}={value} must be at least 1")
        self.engine, self.folder = engine, Path(folder)
        self.max_captures, self.max_bytes, self.window, self.patience = max_captures, max_bytes, window, patience
        self._about = about
        self._tell = tell or logging.getLogger("narrowgauge").warning
        self._seen: deque[_Seen] = deque()
        self._readback = Readback()
        self._loss: Tensor | None = None
        self._wanted: set[int] = set()
        self._streak = 0
        self._in_trouble = False
        self._large: dict[str, tuple[int, Tensor]] = {}

    def state_dict(self) -> dict[str, Any]:
        """What decides whether a step is captured, beside its own numbers."""
        return {"streak": self._streak, "in_trouble": self._in_trouble}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._streak = state.get("streak", 0)
        self._in_trouble = state.get("in_trouble", False)

    def request(self, step: int | None = None) -> None:
        """Capture a step that is to come: the given one (counted from 1), or the next."""
        following = self.engine.updates + 1
        if step is not None and step < following:
            raise UsageError(f"Recorder: step {step} is over; the next one is {following}")
        self._wanted.add(step or following)

    def saw(self, batch: Any) -> None:
        """Remember a microbatch, before its forward."""
        step = self.engine.updates + 1
        if not self._seen or self._seen[-1].step != step:
            self._begin(step)
        versions = [_version(tensor) for _, tensor in capture_files.tensors_in(batch)]
        self._seen[-1].microbatches.append(_Microbatch(batch, random_state.capture(), versions))

    def after(self, report: StepReport | None, loss: Tensor | None = None) -> Path | None:
        """Take note of a step or flush, with the microbatch's loss; returns where a capture was written, if one was."""
        if loss is not None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if report is None or not report.complete:
            return None
        applied = report.tensors["applied"]
        total, self._loss = self._loss, None
        self._readback.push(report.index, {"applied": applied, "loss": applied.float() if total is None else total})
        return self._heard_all(self._readback.ready())

    def settle(self) -> Path | None:
        """Wait for the news of every step so far; at the end of a loop."""
        return self._heard_all(self._readback.drain())

    def heard(self, step: int, loss: float, applied: bool) -> Path | None:
        """Judge a step by its numbers, now that they are on the host."""
        while self._seen and self._seen[0].step < step:
            self._seen.popleft()
        finite = math.isfinite(loss)
        self._streak = 0 if applied else self._streak + 1
        asked = step in self._wanted
        reason = ASKED if asked else self._reason(loss, finite, applied)
        self._wanted.discard(step)
        if finite and applied:
            self._in_trouble = False
        if reason is None or (self._in_trouble and not asked):
            return None
        self._in_trouble = self._in_trouble or not (finite and applied)
        return self._capture(step, reason, loss, applied)

    def _heard_all(self, news: list[tuple[Any, dict[str, float]]]) -> Path | None:
        written = None
        for step, values in news:
            written = self.heard(step, values["loss"], bool(values["applied"])) or written
        return written

    def _reason(self, loss: float, finite: bool, applied: bool) -> str | None:
        if not finite:
            return f"the loss is {loss}"
        scaler = self.engine.scaler
        if not applied and (scaler is None or not scaler.dynamic):
            return "a gradient is not finite"
        if self._streak >= self.patience:
            return f"{self._streak} updates in a row were skipped"
        return None

    def _begin(self, step: int) -> None:
        engine = self.engine
        scale = engine.scaler.tensor(engine.device).clone() if engine.scaler is not None else None
        scales = engine.conversion.scales.state_dict() if engine.conversion.scales is not None else None
        self._seen.append(_Seen(step, scale, scales, self._copy_buffers()))
        if step in self._wanted:
            try:
                self._seen[-1].weights = self._weights()
            except Exception as error:  # out of memory, say: the training matters more
                self._fail(step, error)
                self._wanted.discard(step)
        held = sum(seen.nbytes() for seen in self._seen)
        while len(self._seen) > self.window or (len(self._seen) > 2 and held > WINDOW_BYTES):
            held -= self._seen.popleft().nbytes()

    def _copy_buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now; large ones that nobody has written to since the last look are not copied again.

        Small ones always are: batch norm writes its statistics without a trace in their version.
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

    def _weights(self) -> dict[str, Any]:
        """The model's FP32 weights, copied to the CPU."""
        size = sum(p.numel() * 4 for p in self.engine.model.parameters())
        if size > self.max_bytes:
            raise UsageError(f"the model has {size:,} bytes of weights, more than max_bytes={self.max_bytes:,}")
        state: dict[str, Any] = self.engine.state_dict()["model"]
        copies: dict[int, Tensor] = {}  # weights that two modules share stay one

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            key = value.data_ptr() or id(value)
            if key not in copies or copies[key].shape != value.shape:
                copies[key] = value.detach().to("cpu", copy=True)
            return copies[key]

        return {name: copy(value) for name, value in state.items()}

    def _capture(self, step: int, reason: str, loss: float, applied: bool) -> Path | None:
        path = capture_files.path_of(self.folder, step)
        try:
            full = len(capture_files.captures_in(self.folder)) >= self.max_captures
            if full or path.exists():
                if reason == ASKED:
                    self._tell(f"step {step} is not captured: {self.folder} has as many captures as it may hold")
                return None
            seen = self._seen[0] if self._seen and self._seen[0].step == step else None
            if seen is None or not seen.microbatches:
                self._tell(f"step {step} is not captured ({reason}): the news of it came after {self.window} others")
                return None
            capture_files.write(path, *self._describe(seen, reason, loss, applied))
        except Exception as error:  # a full disk, say: the training matters more
            self._fail(step, error)
            return None
        self._tell(f"step {step} is captured, as {reason}: narrowgauge replay {path}")
        return path

    def _describe(self, seen: _Seen, reason: str, loss: float, applied: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        engine = self.engine
        weights = seen.weights if seen.weights is not None else self._weights()
        since = 0 if seen.weights is not None else self._applied_since(seen.step) + applied
        model = {name: seen.buffers[name].cpu() if name in seen.buffers else value for name, value in weights.items()}
        buffers = {name: value.cpu() for name, value in seen.buffers.items() if name not in model}
        same = all(
            m.versions == [_version(tensor) for _, tensor in capture_files.tensors_in(m.batch)]
            for m in seen.microbatches
        )
        scales = seen.scales and {k: v.cpu() if isinstance(v, Tensor) else v for k, v in seen.scales.items()}
        state = {
            "model": model,
            "buffers": buffers,
            "tensor_scales": scales,
            "microbatches": [{"batch": capture_files.pack(m.batch), "random": m.random} for m in seen.microbatches],
        }
        facts = {
            "step": seen.step,
            "why": reason,
            "loss": loss,
            "applied": applied,
            "recipe": str(engine.recipe),
            "accumulate": engine.accumulate,
            "loss_scale": None if seen.loss_scale is None else float(seen.loss_scale.item()),
            "fused": bool(engine.conversion.layers),
            "weights_of_step": seen.step + since,
            # An engine that steps during backward has changed some weights before it knew that others are bad.
            "exact": since == 0 and same and not (engine.released and seen.weights is None),
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
        """How many updates after ``step`` were not skipped. Waits for the device, which a capture may."""
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
    """Copies of many small tensors, by one kernel where this torch has it."""
    together = getattr(torch, "_foreach_clone", None)
    return list(together(tensors)) if together is not None and tensors else [tensor.clone() for tensor in tensors]
