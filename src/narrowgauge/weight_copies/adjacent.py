"""Weights that are used as one (query, key and value; gate and up) lie next to each other in memory.

Each of them has a storage of its own there. As views of one storage, they would be taken for tied weights by libraries
that compare storages: safetensors' ``save_model`` would refuse the model, and Accelerate's would leave weights out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn


class _Joint:
    """Weights as one tensor. Alive as long as the storage of one of them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _CudaBytes:
    """A part of a joint tensor as ``torch.as_tensor`` reads it, without a copy; the new storage keeps this object."""

    def __init__(self, part: Tensor, joint: _Joint) -> None:
        self.joint = joint
        shape = (part.numel() * part.element_size(),)
        self.__cuda_array_interface__ = {
            "data": (part.data_ptr(), False), "shape": shape, "strides": None, "typestr": "|u1", "version": 2,
        }  # fmt: skip


_joints: WeakValueDictionary[int, _Joint] = WeakValueDictionary()
"""By address. An entry exists only while its memory is in use, so no other tensor can have this address."""


def store_contiguously(weights: Sequence[nn.Parameter]) -> None:
    """Move parameters that are used as one into one buffer, so that they are cast as one, and need no stacked copy."""
    same = len({(weight.dtype, weight.device, weight.shape[1:]) for weight in weights}) == 1
    if len(weights) > 1 and same and view_as_one(weights) is None:
        set_parts(weights, torch.cat([weight.detach() for weight in weights]))


def set_parts(weights: Sequence[nn.Parameter], tensor: Tensor) -> None:
    """Let parameters be the rows of one tensor, in their order."""
    tensor = tensor.detach()
    parts = tensor.split([len(weight) for weight in weights])
    if len(parts) > 1 and _has_memory(tensor) and tensor.is_contiguous() and all(part.numel() for part in parts):
        joint = _Joint(tensor)
        parts = tuple(_own_storage(part, joint) for part in parts)
        _joints[tensor.data_ptr()] = joint
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part


def view_as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that are adjacent in memory as one tensor, or None if they are not adjacent."""
    first = parts[0].detach()
    dtype, shape = first.dtype, (sum(len(part) for part in parts), *first.shape[1:])
    if any(part.dtype is not dtype or not part.is_contiguous() for part in parts):
        return None
    if _has_memory(first) and (joint := _joints.get(first.data_ptr())) is not None:
        end = first.data_ptr()
        for part in parts:
            if part.data_ptr() != end:
                return None
            end += part.numel() * dtype.itemsize
        tensor = joint.tensor.view(dtype)
        return tensor[: shape[0]] if tensor.shape[1:] == shape[1:] and len(tensor) >= shape[0] else None
    offset, storage = first.storage_offset(), first.untyped_storage()._cdata
    for part in parts:
        if part.untyped_storage()._cdata != storage or part.storage_offset() != offset:
            return None
        offset += part.numel()
    return first.as_strided(shape, first.stride())


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has an address: it is not fake, nor on the meta device, which a forecast shows as a GPU."""
    return type(tensor) is Tensor and tensor.device.type in ("cpu", "cuda") and tensor.data_ptr() != 0


def _own_storage(part: Tensor, joint: _Joint) -> Tensor:
    """Return the same memory as a tensor with its own storage, which keeps the joint tensor alive."""
    if part.device.type == "cuda":
        own = torch.as_tensor(_CudaBytes(part, joint), device=part.device)
    else:
        memory: Any = (ctypes.c_char * (part.numel() * part.element_size())).from_address(part.data_ptr())
        memory.joint = joint
        own = torch.frombuffer(memory, dtype=torch.uint8)
    return own.view(part.dtype).view(part.shape)
