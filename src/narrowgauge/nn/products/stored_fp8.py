"""Layers whose frozen weights are stored in FP8, one byte each, instead of being cast at each forward.

A layer's parameter ``weight`` becomes bytes, and the buffer ``weight_scale`` is their scale (``weight_copies.stored``).
Layers whose products are one (query, key and value; gate and up) have one scale. FP8 products read the parameter. The
transposed copy for grad_input is made in each backward, and freed after it. Wherever a layer runs as written (in
generation with a cache, for example), it computes with the wide values, made for that call. Large embeddings are stored
in the same way; a lookup widens the rows it returns.

A layer that gets another state dictionary converts the weight to its own scale: FP8 with a scale, or any wider format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import UsageError
from narrowgauge.nn.module_changes import Change, apply_change, find_change, has_own_method, original_class
from narrowgauge.nn.products.gemm import BF16
from narrowgauge.nn.products.linear import STORED_SCALE, has_transposed_weight, is_linear
from narrowgauge.parameters import is_sharded
from narrowgauge.weight_copies.adjacent import set_parts, view_as_one
from narrowgauge.weight_copies.stored import E4M3, make_stored, quantize_to_scale, widen_bytes

STORABLE = (torch.float32, torch.float16, BF16)
LARGE = 1 << 20
"""Numbers of an embedding from which on it is stored in FP8: smaller ones would save little memory."""
SCALE = STORED_SCALE


class StoredFp8(Change):
    """A linear layer as written, with its stored weight made wide for the call."""

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if module.bias is None else module.bias.to(dtype)
        return F.linear(x.to(dtype), widen_stored(module, dtype), bias)


class StoredFp8Lookup(Change):
    """An embedding whose stored rows are made wide after they are looked up."""

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
        ids: Tensor = args[0] if args else next(iter(kwargs.values()))
        return widen_bytes(module.weight[ids], module.weight_scale, BF16)


def can_store(module: nn.Module) -> bool:
    """Whether a weight can be stored in FP8: of a plain linear layer or a large embedding, frozen and not sharded."""
    weight = module._parameters.get("weight")
    if weight is None or has_transposed_weight(module) or is_sharded(weight) or weight.requires_grad:
        return False
    if not is_linear(module) and not is_large_embedding(module):
        return False
    return weight.dtype in STORABLE or is_stored(module)


def is_large_embedding(module: nn.Module) -> bool:
    """Whether a module is a plain lookup in a table that is large enough to be stored in fewer bits."""
    if not isinstance(module, nn.Embedding) or original_class(module).forward is not nn.Embedding.forward:
        return False
    return module.max_norm is None and module.weight.numel() >= LARGE and not has_own_method(module, "forward")


def is_stored(module: nn.Module) -> bool:
    """Whether a layer's weight is stored in FP8."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dtype is torch.uint8 and SCALE in module._buffers


def get_stored_scale(module: nn.Module) -> Tensor | None:
    """Return what a layer's stored weight is multiplied by; None if it is not stored in FP8."""
    return module._buffers[SCALE] if is_stored(module) else None


def widen_stored(module: Any, dtype: torch.dtype = BF16) -> Tensor:
    """Return a layer's stored weight in a wider format."""
    return widen_bytes(module.weight, module.weight_scale, dtype)


@torch.no_grad()
def store_in_fp8(modules: Sequence[nn.Module]) -> None:
    """Store the weights of layers whose products are one in FP8, with one scale, next to each other."""
    layers: list[Any] = list(modules)
    if not _are_stored_as_one(layers):
        weights = [
            widen_stored(layer, torch.float32) if is_stored(layer) else layer.weight.detach() for layer in layers
        ]
        set_stored(layers, *make_stored(weights))
    for layer in layers:
        _mark_stored(layer)


def share_stored(model: nn.Module, owners: Sequence[nn.Module]) -> None:
    """Let modules that are tied to these, whose weights are stored in FP8, compute with them as well."""
    scales = {id(owner._parameters["weight"]): get_stored_scale(owner) for owner in owners}
    for module in model.modules():
        scale = scales.get(id(module._parameters.get("weight")))
        if scale is not None and module not in owners:
            module._buffers.pop(SCALE, None)
            module.register_buffer(SCALE, scale)
            _mark_stored(module)


def _mark_stored(layer: Any) -> None:
    """Let a layer compute with its stored weight, and convert weights that are loaded."""
    kind = StoredFp8Lookup if isinstance(layer, nn.Embedding) else StoredFp8
    if find_change(layer, kind) is None:
        apply_change(layer, kind())
    hooks = layer._load_state_dict_pre_hooks.values()
    if all(getattr(hook, "hook", None) is not _convert_loaded for hook in hooks):
        layer._register_load_state_dict_pre_hook(_convert_loaded, with_module=True)


def set_stored(modules: Sequence[nn.Module], joint: Tensor, scale: Tensor) -> None:
    """Let layers have rows of one FP8 tensor as weights, in their order, and a scale."""
    layers: list[Any] = list(modules)
    set_parts([layer.weight for layer in layers], joint.view(torch.uint8))
    for layer in layers:
        layer._buffers.pop(SCALE, None)
        layer.register_buffer(SCALE, scale.detach().clone().reshape(()))


def _are_stored_as_one(layers: Sequence[Any]) -> bool:
    """Whether the weights of layers are parts of one tensor, and so have one scale."""
    return all(is_stored(layer) for layer in layers) and view_as_one([layer.weight for layer in layers]) is not None


def restore_stored(model: nn.Module) -> None:
    """Turn weights that are stored in FP8 into FP32 parameters: their values, without the bits they have lost."""
    stored: list[Any] = [module for module in model.modules() if is_stored(module)]
    for layer in stored:
        if is_stored(layer):  # not yet restored with a layer that it is tied to
            layer.weight.data = widen_stored(layer, torch.float32)
        del layer._buffers[SCALE]


def _convert_loaded(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Convert the weight in a state dictionary to the layer's scale."""
    if not is_stored(module) or f"{prefix}weight" not in state:
        return
    weight, own = state[f"{prefix}weight"], module.weight_scale
    scale = state.get(f"{prefix}{SCALE}")
    if weight.dtype.itemsize == 1:
        if scale is None:
            return  # torch reports the missing scale
        weight = weight.view(torch.uint8)
        if torch.equal(scale.to(own).reshape(()), own):
            state[f"{prefix}weight"] = weight
            return
        weight = weight.view(E4M3)
    values = weight.to(own.device).float()
    if scale is not None:
        values = values * scale.to(own)
    stored = quantize_to_scale(values, own)
    if stored is None:
        raise UsageError(
            f"{prefix}weight: the loaded weight does not fit the scale with which the engine stores it in FP8; load it "
            "before the engine is made"
        )
    state[f"{prefix}weight"], state[f"{prefix}{SCALE}"] = stored, own.clone()
