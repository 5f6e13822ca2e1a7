"""Gives a model in 16 bits, as ``from_pretrained`` loads it, the weights that a recipe trains.

An update of BF16 weights alone is lost if it is smaller than their last bit. So a recipe trains FP32 weights, or under
lean recipes BF16 weights with 16-bit remainders. Both start with the loaded values, exactly: remainders start at 0, and
no FP32 copy of the model is made for them. Weights that are not trained stay as they are.

Before training there is no engine, and the model has weights in both formats. It computes under autocast until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from narrowgauge import hardware
from narrowgauge.engine.setup import find_narrowed
from narrowgauge.nn.experts.routers import find_routers
from narrowgauge.nn.keep_fp32 import find_modules
from narrowgauge.nn.module_changes import Change, apply_change
from narrowgauge.optim.masters import get_or_make_remainder, has_master, set_other_half
from narrowgauge.recipe import Recipe, is_auto, parse

NARROW = (torch.bfloat16, torch.float16)


@torch.no_grad()
def convert_weights(model: nn.Module, recipe: str | Recipe) -> int:
    """Convert the trainable 16-bit parameters of a model, in place, to the form in which a recipe trains them.

    Args:
        model: The model. Call this before its checkpoint is loaded: FP32 values do not fit into 16-bit parameters.
        recipe: The recipe that the engine will use.

    Returns:
        The number of converted parameters.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    narrow = {name: p for name, p in trained.items() if p.dtype in NARROW and not has_master(p)}
    if not narrow:
        return 0
    device = next(iter(narrow.values())).device
    found = parse(recipe, hardware.detect(str(device))) if is_auto(recipe) else parse(recipe)
    kept = [*find_modules(model, found.keep), *find_routers(model)]
    stays = set(find_narrowed(model, narrow, found, kept))
    for parameter in narrow.values():
        if parameter in stays and parameter.dtype is torch.bfloat16:
            set_other_half(parameter, *get_or_make_remainder(parameter))
        else:
            parameter.data = parameter.data.float()
    if stays or len(trained) < len(list(model.parameters())):
        apply_change(model, UnderAutocast(torch.bfloat16))
    return len(narrow)


class UnderAutocast(Change):
    """Runs a model with weights in two formats under autocast. An engine removes this change when it is made."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(module.parameters()).device.type, self.dtype):
            return inner(*args, **kwargs)
