"""Splits nested dicts, lists, tuples, plain values and tensors into JSON and named tensors, and restores them exactly.

Each value that JSON cannot represent exactly becomes an object with one key that names its type:

    {"tensor": name}   {"tuple": [...]}   {"dict": {...}}   {"items": [[key, value], ...]}   {"float": "inf"}
    {"bytes": "00ff"}
    {"complex": name}  complex128, which safetensors does not support, as pairs of real numbers
    {"sparse": [indices, values, shape]}

A dict whose keys are not all strings (an optimizer's state has integer keys) is written as items. Tensors that share
memory (tied weights) are stored once. Every place refers to the stored one and gets the same tensor back.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

RESERVED = "__metadata__"
"""The one name that the safetensors format reserves."""


class Flattener:
    """Flattens nested values to JSON and collects their tensors on the CPU under unique names."""

    def __init__(self, aliased: bool = True) -> None:
        """Start without tensors.

        Args:
            aliased: Store tensors that share memory once; otherwise store each under its own path.
        """
        self._aliased = aliased
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        """For tied tensors: the path of each further place, and the name the tensor is stored under."""
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def flatten(self, value: Any, path: str = "") -> Any:
        """Return the JSON for a value. Its tensors are added to ``tensors``, named by their path in the value.

        Raises:
            TypeError: The value has an object or tensor layout that cannot be saved.
        """
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, Tensor):
            return self._flatten_tensor(value.detach(), path)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, Mapping):
            parts = [(key, self.flatten(item, _join(path, key))) for key, item in value.items()]
            if all(isinstance(key, str) for key in value):
                return {"dict": dict(parts)}
            return {"items": [[self.flatten(key, f"{path}/key"), item] for key, item in parts]}
        if isinstance(value, list):
            return [self.flatten(item, _join(path, index)) for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"tuple": [self.flatten(item, _join(path, index)) for index, item in enumerate(value)]}
        raise TypeError(f"{path or 'the state'} is a {type(value).__name__}, which cannot be saved without pickle")

    def _flatten_tensor(self, tensor: Tensor, path: str) -> Any:
        if tensor.layout == torch.sparse_coo:
            held = tensor.coalesce()
            parts = (held.indices(), held.values(), list(held.shape))
            return {"sparse": [self.flatten(part, _join(path, index)) for index, part in enumerate(parts)]}
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"{path or 'the state'} is a tensor of layout {tensor.layout}, which cannot be saved")
        if tensor.dtype == torch.complex128:
            return {"complex": self._store(torch.view_as_real(tensor.resolve_conj()), path)}
        return {"tensor": self._store(tensor, path)}

    def _store(self, tensor: Tensor, path: str) -> str:
        identity = None
        if tensor.numel() > 0 and self._aliased:
            layout = (tensor.dtype, tuple(tensor.shape), tensor.stride())
            identity = (tensor.device, tensor.data_ptr(), *layout)
            if identity in self._names:
                self.aliases[path] = self._names[identity]
                return self._names[identity]
        name = path
        while name in self.tensors or name in ("", RESERVED):
            name += "'"  # 0 and "0" can both be keys of one dict
        held = tensor.cpu().contiguous()
        storage = held.untyped_storage()
        # safetensors refuses tensors that share memory, so a view of something larger is copied out of it.
        if storage.data_ptr() in self._storages or storage.nbytes() != held.numel() * held.element_size():
            held = held.clone()
        self._storages.add(held.untyped_storage().data_ptr())
        self.tensors[name] = held
        if identity is not None:
            self._names[identity] = name
        return name


def unflatten(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore a value from its JSON and its tensors.

    Raises:
        ValueError: The JSON has an unknown type.
        KeyError: A tensor is missing.
    """
    if isinstance(data, list):
        return [unflatten(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "complex":
        return torch.view_as_complex(tensors[content])
    if kind == "sparse":
        indices, values, shape = (unflatten(part, tensors) for part in content)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()
    if kind == "dict":
        return {key: unflatten(item, tensors) for key, item in content.items()}
    if kind == "items":
        return {unflatten(key, tensors): unflatten(item, tensors) for key, item in content}
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "float":
        return float(content)
    raise ValueError(f"unknown kind {kind!r} in a saved state")


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to aligned memory of torch: those from safetensors may be mapped from the file at any offset."""
    return {name: torch.clone(tensor) for name, tensor in tensors.items()}


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of the umask. An existing file or link is replaced."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    mode = os.fstat(descriptor).st_mode
    os.close(descriptor)
    save_file(dict(tensors), path, dict(metadata) if metadata is not None else None)
    path.chmod(mode & 0o777)  # safetensors makes files readable by the owner only
