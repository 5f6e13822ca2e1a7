"""Loads a checkpoint into a run that is resumed; a task that is not the one it was saved from costs one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from narrowgauge import random_state
from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.ranks.world import World
from narrowgauge.runs.checkpoints import checkpoint, sharded


def load(path: Path, engine: Engine, world: World) -> dict[str, Any]:
    """Load the engine and the random generators, and return the rest of the state.

    The generators of another number of ranks do not fit: then what is drawn from here on is drawn afresh.
    """
    with world.together():
        saved = checkpoint.read(path, engine)
        changed = _difference(saved.weights, engine)
        if changed is not None:
            raise _refuse(path, changed)
        state: dict[str, Any] = saved.state
        try:
            engine.load_state_dict({**state["engine"], "model": saved.weights})
            generators = state.get("random") if world.alone else None
            if checkpoint.is_ranked(path):
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
        f"checkpoint {path} does not fit the task, which has changed since: {changed}; "
        "resume with the task as it was, or start a new run"
    )


def _difference(saved: Mapping[str, Any], engine: Engine) -> str | None:
    """How the weights that were saved differ from the model's in name, shape or order; None where they do not.

    Order matters because an optimizer's state counts parameters: two of one shape would get each other's moments.
    """
    own = engine.inner.state_dict()
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
            return f"{name} has shape {tuple(value.shape)}, and had {tuple(saved[name].shape)}"
    if list(own) != list(saved):
        moved = next(name for name, before in zip(own, saved, strict=True) if name != before)
        return f"its parameters come in another order, from {moved} on"
    return None
