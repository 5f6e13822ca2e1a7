"""Loads the weights that transformers stores under other names when a Trainer resumes, such as stacks of experts.

``save_pretrained`` splits stacked experts [E, 2F, D] into the matrices that the model's files on the Hub have.
``from_pretrained`` stacks them again, but a Trainer that resumes does not (transformers 5.22, its issue 43701): it
warns of missing keys, and trains the experts of a new model with the optimizer's state of the old ones. The same is
true for the best model, which it loads at the end. So an adapted Trainer loads what is missing with
``from_pretrained``.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from narrowgauge.nn.module_changes import original_class

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_all_weights(trainer: Any) -> None:
    """Let a Trainer load all weights of its checkpoints.

    Args:
        trainer: A ``transformers.Trainer``.
    """
    trainer._load_from_checkpoint = _then_load_missing(
        trainer._load_from_checkpoint, trainer, lambda folder, *args: folder
    )
    trainer._load_best_model = _then_load_missing(
        trainer._load_best_model, trainer, lambda *args: trainer.state.best_model_checkpoint
    )


def _then_load_missing(load: Callable[..., Any], trainer: Any, find_folder: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_and_complete(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        folder = find_folder(*args, *kwargs.values())
        if folder is not None:
            load_missing(trainer.model, Path(folder))
        return result

    return load_and_complete


@torch.no_grad()
def load_missing(model: nn.Module, folder: Path) -> list[str]:
    """Load the weights of a model that a checkpoint does not have by their names; return these names.

    Args:
        model: A model whose other weights are loaded. One that is not transformers', or has adapters, is left alone.
        folder: The folder of a checkpoint.
    """
    load = getattr(original_class(model), "from_pretrained", None)
    stored = _list_stored(folder)
    if load is None or not stored or hasattr(model, "peft_config"):
        return []
    weights = model.state_dict(keep_vars=True)
    loaded = {id(weights[name]) for name in stored if name in weights}  # tied weights are stored once
    missing = [name for name, weight in weights.items() if name not in stored and id(weight) not in loaded]
    if not missing or stored <= weights.keys():
        return []
    others = load(folder, dtype=torch.float32).state_dict()
    found = [name for name in missing if name in others and others[name].shape == weights[name].shape]
    for name in found:
        weights[name].copy_(others[name])
    if found:
        text = (
            "%s stores %d weights in another form, such as %s: they are loaded, though the Trainer reports them missing"
        )
        logging.getLogger("narrowgauge").warning(text, folder, len(found), found[-1])
    return found


def _list_stored(folder: Path) -> set[str]:
    """Return the names of the weights in a folder."""
    if (folder / _INDEX).is_file():
        return set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / _FILE).is_file():
        return set()
    with safe_open(folder / _FILE, "pt") as file:
        return set(file.keys())
