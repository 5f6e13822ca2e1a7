"""Weights that are stored in FP8 with scales: finds the scales in the files, and computes the values.

    X.weight              float8_e4m3fn [O, I]
    X.weight_scale_inv    one number per block of 128 x 128 (DeepSeek-V3, Qwen3-FP8), or
    X.weight_scale        one number, one per row, or one per block (compressed-tensors)

    value = stored number * scale

Scales of activations (``input_scale`` and the like) are left out: training computes its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from narrowgauge.errors import UsageError, one_line
from narrowgauge.pretrained.folder import PretrainedFolder, Quantization, StoredScale, StoredTensor

READABLE = ("fp8", "compressed-tensors")
"""Methods of quantization whose weights are numbers in FP8 with scales."""
SCALES = ("_scale_inv", "_scale")
"""What is added to a weight's name for its scale."""
OF_ACTIVATIONS = ("input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale", "prob_scale")
BLOCK = (128, 128)


def explain_unreadable(quantization: Quantization | None) -> str | None:
    """Return why weights that are quantized by a method cannot be loaded; None if they can, or are not quantized."""
    if quantization is None or quantization.method in READABLE:
        return None
    return (
        f"its weights are quantized ({quantization.method}), and only FP8 weights of fp8 and compressed-tensors can be "
        "loaded; give the original model"
    )


def attach_scales(folder: PretrainedFolder) -> dict[str, StoredTensor]:
    """Return the tensors of a folder without its scales, which are attached to the weights they belong to.

    Raises:
        UsageError: Some weights are quantized in another way, or have no scale.
    """
    if folder.quantization is None:
        return dict(folder.tensors)
    reason = explain_unreadable(folder.quantization)
    packed = next((name for name in folder.tensors if name.endswith("weight_packed")), None)
    if reason is None and packed is not None:
        reason = f"{one_line(packed)} is packed, and only FP8 weights can be loaded; give the original model"
    if reason is not None:
        raise UsageError(f"{folder.option}: {reason}")
    found = {name: _attach(tensor, folder) for name, tensor in folder.tensors.items()}
    used = {tensor.scale.tensor.name for tensor in found.values() if tensor.scale is not None}
    return {
        name: tensor
        for name, tensor in found.items()
        if name not in used and name.rpartition(".")[2] not in OF_ACTIVATIONS
    }


def _attach(tensor: StoredTensor, folder: PretrainedFolder) -> StoredTensor:
    if tensor.dtype.itemsize > 1 or not tensor.dtype.is_floating_point or tensor.dtype is torch.float8_e8m0fnu:
        return tensor
    name = one_line(tensor.name)
    if tensor.dtype is not torch.float8_e4m3fn or len(tensor.shape) != 2:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UsageError(f"{folder.option}: {name} is {kind} {list(tensor.shape)}; expected E4M3 of two dimensions")
    scale = next((folder.tensors[tensor.name + end] for end in SCALES if tensor.name + end in folder.tensors), None)
    if scale is None:
        raise UsageError(f"{folder.option}: {name} is in FP8, but has no scale ({one_line(tensor.name + SCALES[1])})")
    block = _find_block(tensor.shape, scale.shape, folder.quantization)
    if block is None or not scale.dtype.is_floating_point:
        raise UsageError(
            f"{folder.option}: {one_line(scale.name)} is {list(scale.shape)}, which is no scale of a weight "
            f"{list(tensor.shape)}"
        )
    return replace(tensor, scale=StoredScale(tensor=scale, block=block))


def _find_block(
    shape: tuple[int, ...], scales: tuple[int, ...], quantization: Quantization | None
) -> tuple[int, int] | None:
    """Return how many rows and columns have one scale; None if the shape of the scales fits no such number."""
    outputs, inputs = shape
    if scales in ((), (1,), (1, 1)):
        return outputs, inputs
    if scales in ((outputs,), (outputs, 1)):
        return 1, inputs
    config: Mapping[str, object] = quantization.config if quantization is not None else {}
    given = config.get("weight_block_size")
    whole = isinstance(given, list) and len(given) == 2 and all(isinstance(size, int) and size > 0 for size in given)
    rows, columns = given if isinstance(given, list) and whole else BLOCK
    return (rows, columns) if scales == (-(-outputs // rows), -(-inputs // columns)) else None


def apply_scale(values: Tensor, tensor: StoredTensor, scales: Tensor, start: int) -> Tensor:
    """Return the values of consecutive stored numbers in FP32.

    Args:
        values: Stored numbers, flat.
        tensor: The tensor they are from.
        scales: All its scales, in FP32.
        start: The place of the first number in the tensor.
    """
    assert tensor.scale is not None
    (rows, columns), width = tensor.scale.block, tensor.shape[1]
    if scales.numel() == 1:
        return values.float() * scales.reshape(())
    places = torch.arange(start, start + values.numel(), device=values.device)
    across = -(-width // columns)
    return values.float() * scales.reshape(-1)[(places // width // rows) * across + places % width // columns]
