"""The settings of a run: how it is trained. The task decides what is trained, the recipe in which formats."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import UsageError
from narrowgauge.runs.trackers import registry
from narrowgauge.task import Task

OPTIMIZERS = ("adamw", "muon")
"""Names of optimizers; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is trained."""

    recipe: str
    """The text of the recipe. ``auto`` until the engine has chosen; run.json has what it chose."""
    device: str
    """cpu, cuda or cuda:N."""
    steps: int
    """Total number of updates. The learning rate schedule ends there."""
    learning_rate: float
    """Peak learning rate."""
    warmup: int
    """Updates over which the learning rate rises to its peak."""
    eval_every: int
    """Updates between two evaluations. 0: only at the end."""
    checkpoint_every: int
    """Updates between two checkpoints. 0: only at the end."""
    seed: int = 0
    accumulate: int = 1
    """Batches per update."""
    clip_norm: float = 1.0
    """Maximum norm of the gradients. 0: no clipping."""
    eval_batches: int = 8
    """How many fixed batches an evaluation averages over."""
    keep: int = 3
    """How many checkpoints are kept."""
    compile: bool = False
    """Whether to use torch.compile."""
    watch_every: int = 100
    """Updates between two readings of tensors. 0: no readings and no rules."""
    optimizer: str = OPTIMIZERS[0]
    """The name of the optimizer, for tasks that do not make their own."""
    predict: bool = False
    """Whether readings also measure what MXFP8, MXFP4 and NVFP4 would do, for predictions."""
    parallel: str = "auto"
    """How the model is distributed over several ranks: fsdp (shards), ddp (copies) or auto (by its size)."""
    fit: str = ""
    """The memory budget that steps are fitted into, such as 80GB or 0.9 of the GPU's memory. Empty: none."""
    log: str = registry.DEFAULT
    """The trackers that receive the metrics, separated by commas, or none."""

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
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"--optimizer {self.optimizer}: expected {' or '.join(OPTIMIZERS)}")
        registry.parse_names(self.log)
        if self.seed >= 2**63:
            raise UsageError(f"--seed {self.seed}: expected a number below 2**63")
        check_learning_rate(self.learning_rate)
        if not (math.isfinite(self.clip_norm) and self.clip_norm >= 0):
            raise UsageError(f"--clip {self.clip_norm}: expected a positive number, or 0 for no clipping")
        if self.warmup > self.steps:
            raise UsageError(f"--warmup {self.warmup} is longer than the run of {self.steps} steps; make it shorter")


def check_learning_rate(rate: float) -> None:
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"--lr {rate}: expected a positive number such as 3e-4")


def make_settings(task: Task, *, recipe: str, device: str, **given: Any) -> Settings:
    """Make settings, with defaults from the task and the length of the run.

    Args:
        task: The task that is trained.
        recipe: The text of the recipe.
        device: cpu, cuda or cuda:N.
        **given: Fields of ``Settings``. None means: use the default.

    Raises:
        UsageError: A value is out of range.
    """
    known = {name: value for name, value in given.items() if value is not None}
    steps = known.setdefault("steps", task.steps)
    known.setdefault("learning_rate", task.learning_rate)
    known.setdefault("eval_batches", task.eval_batches)
    known.setdefault("warmup", max(1, min(100, max(20, steps // 10), steps // 2)))  # Adam needs some twenty steps
    # Four times in a short run. In a long run often enough to lose little, and rarely enough to cost little.
    known.setdefault("eval_every", max(1, min(1000, steps // 4)))
    known.setdefault("checkpoint_every", max(1, min(1000, steps // 4)))
    known.setdefault("watch_every", max(1, min(100, steps // 4)))
    known.setdefault("compile", device != "cpu")
    return Settings(recipe=recipe, device=device, **known)


def restore_settings(saved: Mapping[str, Any], **changes: Any) -> Settings:
    """Make the settings that are saved in run.json, with ``changes``."""
    names = {field.name for field in dataclasses.fields(Settings)}
    try:
        return Settings(**{name: value for name, value in saved.items() if name in names} | changes)
    except TypeError as error:
        raise UsageError(f"the run's settings cannot be read ({error}); another version wrote them") from None
