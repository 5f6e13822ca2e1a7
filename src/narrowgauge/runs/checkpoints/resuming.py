"""Loads a checkpoint into the engine of a resumed run, and refuses one that does not fit the task in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from narrowgauge import random_state
from narrowgauge.engine import Engine
from narrowgauge.engine.state import list_trained
from narrowgauge.errors import UsageError
from narrowgauge.ranks.world import World
from narrowgauge.runs.checkpoints import checkpoint, sharded


def restore(path: Path, engine: Engine, world: World, trained_only: bool = False) -> dict[str, Any]:
    """Load a checkpoint into the engine and the random generators.

    The generators are only restored on the same number of ranks. On another number they keep their seeds, so random
    numbers differ from here on.

    Args:
        path: The checkpoint folder, verified.
        engine: The engine of the run.
        world: The ranks of the run.
        trained_only: Whether the checkpoint has only the parameters that are trained.

    Returns:
        The rest of the state: the counters of the run, its examiner and its recorder.

    Raises:
        UsageError: The checkpoint does not fit the model of the task.
    """
    with world.fail_together():
        saved = checkpoint.read(path, engine)
        changed = _find_difference(saved.weights, engine, trained_only)
        if changed is not None:
            raise _refuse(path, changed)
        state: dict[str, Any] = saved.state
        try:
            engine.load_state_dict({**state["engine"], "model": saved.weights})
            generators = state.get("random") if world.is_single else None
            if checkpoint.is_sharded(path):
                generators = sharded.read_random(path, world.rank, world.size)
            if generators is not None:
                random_state.restore(generators)
        except (UsageError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise _refuse(path, f"{type(error).__name__}: {error}".splitlines()[0][:200]) from error
    return state


def _refuse(path: Path, changed: str) -> UsageError:
    return UsageError(
        f"checkpoint {path} does not fit the task, which has changed since it was saved: {changed}; "
        "resume with the original task, or start a new run"
    )


def _find_difference(saved: Mapping[str, Any], engine: Engine, trained_only: bool) -> str | None:
    """Compare the saved weights with the model's by name, shape and order. None: they match.

    Order matters because an optimizer numbers its parameters: two of the same shape would swap their moments.
    """
    own = engine.inner.state_dict()
    if trained_only:
        trained = list_trained(engine.inner)
        own = {name: value for name, value in own.items() if name in trained}
    for name in saved:
        if name not in own:
            return f"its model has no {name}"
    for name, value in own.items():
        if name not in saved:
            return f"its model has a {name}, which was not saved"
        if (
            isinstance(value, torch.Tensor)
            and isinstance(saved[name], torch.Tensor)
            and value.shape != saved[name].shape
        ):
            return f"{name} has shape {tuple(value.shape)}, and was saved with {tuple(saved[name].shape)}"
    if list(own) != list(saved):
        moved = next(name for name, before in zip(own, saved, strict=True) if name != before)
        return f"its parameters have another order, starting with {moved}"
    return None
