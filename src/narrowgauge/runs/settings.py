"""Settings: how a run is trained, apart from what (the task) and in which formats (the recipe)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import UsageError
from narrowgauge.runs.trackers import base
from narrowgauge.task import Task


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is trained."""

    recipe: str
    """The text of the recipe, resolved: never ``auto``."""
    device: str
    """cpu, cuda or cuda:N."""
    steps: int
    """Updates in all; the learning rate's schedule ends there."""
    learning_rate: float
    """Peak learning rate."""
    warmup: int
    """Updates over which the learning rate rises to its peak."""
    eval_every: int
    """Updates between two evaluations; 0: only at the end."""
    checkpoint_every: int
    """Updates between two checkpoints; 0: only at the end."""
    seed: int = 0
    accumulate: int = 1
    """Batches that make one update."""
    clip_norm: float = 1.0
    """The gradients' norm is brought down to this; 0: never."""
    eval_batches: int = 8
    """How many fixed batches an evaluation averages over."""
    keep: int = 3
    """How many checkpoints are kept."""
    compile: bool = False
    watch_every: int = 100
    """Updates between two readings of tensors; 0: none are read, and no rules applied."""
    parallel: str = "auto"
    """How several ranks share the model: fsdp (shards), ddp (copies) or auto (by its size)."""
    log: str = base.DEFAULT
    """Where the numbers go beside the record: tensorboard, wandb, mlflow, with commas between them, or none."""

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1),
            ("warmup", 0),
            ("eval_every", 0),
            ("checkpoint_every", 0),
            ("accumulate", 1),
            ("eval_batches", 1),
            ("keep", 1),
            ("watch_every", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"--{name.replace('_', '-')} {value}: expected a whole number of at least {least}")
        if self.parallel not in ("auto", "ddp", "fsdp"):
            raise UsageError(f"--parallel {self.parallel}: expected auto, ddp or fsdp")
        base.parse(self.log)
        if self.seed >= 2**63:
            raise UsageError(f"--seed {self.seed}: expected a number below 2**63")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise UsageError(f"--lr {self.learning_rate}: expected a positive number such as 3e-4")
        if not (math.isfinite(self.clip_norm) and self.clip_norm >= 0):
            raise UsageError(f"--clip {self.clip_norm}: expected a positive number, or 0 for no clipping")
        if self.warmup > self.steps:
            raise UsageError(f"--warmup {self.warmup} is longer than the run of {self.steps} steps; take a shorter one")


def settle(task: Task, *, recipe: str, device: str, **given: Any) -> Settings:
    """The settings with what was not given (None) taken from the task, or from what suits the length of the run."""
    known = {name: value for name, value in given.items() if value is not None}
    steps = known.setdefault("steps", task.steps)
    known.setdefault("learning_rate", task.learning_rate)
    known.setdefault("eval_batches", task.eval_batches)
    known.setdefault("warmup", max(1, min(100, max(20, steps // 10), steps // 2)))  # Adam needs some twenty steps
    # Four looks at a short run; on a long one often enough to lose little, and rarely enough to cost little.
    known.setdefault("eval_every", max(1, min(1000, steps // 4)))
    known.setdefault("checkpoint_every", max(1, min(1000, steps // 4)))
    known.setdefault("watch_every", max(1, min(100, steps // 4)))
    known.setdefault("compile", device != "cpu")
    return Settings(recipe=recipe, device=device, **known)


def reread(saved: Mapping[str, Any], **changes: Any) -> Settings:
    """The settings a run was recorded with."""
    names = {field.name for field in dataclasses.fields(Settings)}
    try:
        return Settings(**{name: value for name, value in saved.items() if name in names} | changes)
    except TypeError as error:
        raise UsageError(f"the run's settings cannot be read ({error}); it was made by another version") from None
