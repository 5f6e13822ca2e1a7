"""Blocks of transformers that are too large to run on a CPU, as in a forecast: a small one of the same class.

It has the same configuration with as many heads, of a smaller size, and a smaller MLP, and the same LoRA adapters.
Where the class has other parameters with that configuration, or cannot be made, there is no small block.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from typing import Any

import torch
from torch import nn

from narrowgauge.nn.module_changes import original_class

HEAD_SIZE = 16
INNER = 64
"""Width of the MLP."""
HEADS = ("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim")
HEAD_SIZES = ("head_dim", "d_kv", "attention_head_size")
INNER_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "n_inner",
    "d_ff",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "hidden_dim",
)


def make_small(block: nn.Module) -> nn.Module | None:
    """Return a small block of the same class, or None."""
    cls = original_class(block)
    config = _find_config(block)
    if not cls.__module__.startswith("transformers.models.") or config is None:
        return None
    heads = next((getattr(config, name) for name in HEADS if isinstance(getattr(config, name, None), int)), None)
    if heads is None:
        return None
    small = copy.deepcopy(config)
    sizes = dict.fromkeys(WIDTHS, HEAD_SIZE * heads) | dict.fromkeys(HEAD_SIZES, HEAD_SIZE)
    for name, size in (sizes | dict.fromkeys(INNER_WIDTHS, INNER)).items():
        if isinstance(getattr(config, name, None), int):
            setattr(small, name, size)
    names = {name for name, _ in block.named_parameters()}
    adapted = {path: part for path, part in block.named_modules() if hasattr(part, "lora_A")}
    for arguments in _list_arguments(cls, block):
        try:
            with torch.device("cpu"):
                made: nn.Module = cls(small, **arguments)
                _add_adapters(made, adapted)
        except Exception:  # whatever its code does with such a configuration
            continue
        if {name for name, _ in made.named_parameters()} == names:
            return made
    return None


def _add_adapters(small: nn.Module, adapted: dict[str, Any]) -> None:
    """Add adapters with PEFT that compute what those of the large block do. Raises an error if that is impossible."""
    if not adapted:
        return
    import peft

    layers = list(adapted.values())
    (name,) = {active for layer in layers for active in layer.active_adapters}
    first = layers[0]
    config = peft.LoraConfig(
        target_modules=list(adapted),
        rank_pattern={re.escape(path): layer.r[name] for path, layer in adapted.items()},
        alpha_pattern={re.escape(path): layer.lora_alpha[name] for path, layer in adapted.items()},
        lora_dropout=getattr(first.lora_dropout[name], "p", 0.0),
        use_rslora=first.use_rslora[name],
        fan_in_fan_out=getattr(first, "fan_in_fan_out", False),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(config, small, name)
    for path, layer in adapted.items():
        other: Any = small.get_submodule(path)
        same = type(other) is original_class(layer) and other.scaling == layer.scaling
        same &= type(other.lora_dropout[name]) is type(layer.lora_dropout[name])
        if not same or layer.merged or layer.disable_adapters or layer.lora_variant:
            raise ValueError(f"the adapter of {path} computes something else")


def _find_config(block: nn.Module) -> Any:
    """Return the configuration that some part of the block holds."""
    held = (vars(part).get("config") for part in block.modules())
    return next((config for config in held if hasattr(config, "to_dict") and hasattr(config, "model_type")), None)


def _list_arguments(cls: type[Any], block: nn.Module) -> list[dict[str, Any]]:
    """Return what the class may have been called with, besides the configuration."""
    parameters = list(inspect.signature(cls.__init__).parameters)[2:]
    number = next((vars(part)["layer_idx"] for part in block.modules() if "layer_idx" in vars(part)), 0)
    known = {"layer_idx": number} if "layer_idx" in parameters else {}
    if "has_relative_attention_bias" in parameters:
        return [{**known, "has_relative_attention_bias": has} for has in (True, False)]
    return [known]
