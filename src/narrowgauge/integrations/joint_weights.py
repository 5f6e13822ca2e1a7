"""Saves and loads models with Accelerate whose query, key and value weights lie in one buffer.

Fused blocks move weights that are used as one into one buffer (weight_copies/adjacent.py). Accelerate takes tensors in
one buffer for one tied tensor: it saves the first of them only, and safetensors refuses to load the model.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from narrowgauge.errors import UsageError


def save_joint_weights(accelerator: Any) -> None:
    """Let an Accelerator save and load every weight of a buffer: ``save_state``, ``save_model`` and ``load_state``."""
    get_state_dict = accelerator.get_state_dict

    @functools.wraps(get_state_dict)
    def get_separate(*args: Any, **kwargs: Any) -> Any:
        state = get_state_dict(*args, **kwargs)
        state.update({name: value.clone() for name, value in state.items() if _is_part(value)})
        return state

    accelerator.get_state_dict = get_separate
    accelerator.register_load_state_pre_hook(_load)


def _is_part(value: Any) -> bool:
    return isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.numel() * value.element_size()


def _load(models: list[nn.Module], folder: str) -> None:
    """Load models from safetensors files, and leave nothing to Accelerate, if one has weights in one buffer."""
    files = [Path(folder) / f"model{f'_{i}' if i else ''}.safetensors" for i in range(len(models))]
    joint = any(_is_part(parameter) for model in models for parameter in model.parameters())
    if joint and all(file.is_file() for file in files):
        for model, file in zip(models, files, strict=True):
            _load_file(model, file)
        models.clear()


def _load_file(model: nn.Module, file: Path) -> None:
    from safetensors.torch import load_file

    weights = model.state_dict(keep_vars=True)
    stored = load_file(file)
    tied = {id(weights[name]) for name in stored if name in weights}  # tied weights are stored once
    missing = [name for name, weight in weights.items() if name not in stored and id(weight) not in tied]
    if missing or not stored.keys() <= weights.keys():
        other = missing or sorted(stored.keys() - weights.keys())
        text = "does not have" if missing else "has, and the model does not have,"
        raise UsageError(f"{file} {text} {other[0]} and {len(other) - 1} more weights; load the state of this model")
    model.load_state_dict(stored, strict=False)
