"""Writes safetensors files one tensor at a time: split into files of limited size, with the index of transformers.

A safetensors file is the length of its header (8 bytes), the header (JSON: dtype, shape and offsets of each tensor),
and the numbers. The library's own writer takes all tensors of a file at once. Here the header is written first, from
the shapes alone, and then each tensor at its offset, in any order.

    model.safetensors                                             if everything fits into one file, else
    model-00001-of-00002.safetensors, ...                         and
    model.safetensors.index.json                                  the file of each tensor, and the size of all
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The names of the dtypes in a header."""


class TensorForm(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFiles:
    """The files of a model's tensors. Every tensor has to be written once before ``finish``."""

    def __init__(self, folder: Path, forms: Sequence[TensorForm], most_bytes: int) -> None:
        """Create the files with their headers.

        Args:
            folder: An existing folder.
            forms: All tensors, in the order in which they are distributed to files.
            most_bytes: Maximum size of the tensors of a file. A larger tensor has a file of its own.
        """
        parts = split(forms, most_bytes)
        count = len(parts)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        self.folder, self.names = folder, names if count > 1 else ["model.safetensors"]
        self.total_bytes = sum(form.size_bytes for form in forms)
        self._forms = {form.name: form for form in forms}
        self._places: dict[str, tuple[str, int]] = {}
        self._missing = set(self._forms)
        for file, part in zip(self.names, parts, strict=True):
            # Wide dtypes first, as the library does: every tensor is then aligned to its dtype.
            ordered = sorted(part, key=lambda form: -form.dtype.itemsize)
            header, offsets = _make_header(ordered)
            (folder / file).write_bytes(header)
            self._places |= {form.name: (file, offset) for form, offset in zip(ordered, offsets, strict=True)}

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, which must have the dtype and the shape that were planned."""
        form, (file, offset) = self._forms[name], self._places[name]
        if tensor.dtype is not form.dtype or tuple(tensor.shape) != form.shape:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and was planned as {form}")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        with (self.folder / file).open("r+b") as opened:
            opened.seek(offset)
            opened.write(data.data)
        self._missing.discard(name)

    def finish(self) -> dict[str, int]:
        """Write the index, if there are several files.

        Returns:
            The size in bytes of each file with tensors.

        Raises:
            ValueError: A tensor was not written.
        """
        if self._missing:
            raise ValueError(f"{len(self._missing)} tensors were not written: {min(self._missing)}")
        if len(self.names) > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": {name: self._places[name][0] for name in sorted(self._places)},
            }
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        return {name: (self.folder / name).stat().st_size for name in self.names}


def split(forms: Sequence[TensorForm], most_bytes: int) -> list[list[TensorForm]]:
    """Distribute tensors to files in order. A file is closed before the tensor that would make it too large."""
    parts: list[list[TensorForm]] = [[]]
    size_bytes = 0
    for form in forms:
        if parts[-1] and size_bytes + form.size_bytes > most_bytes:
            parts.append([])
            size_bytes = 0
        parts[-1].append(form)
        size_bytes += form.size_bytes
    return parts


def _make_header(forms: Sequence[TensorForm]) -> tuple[bytes, list[int]]:
    """Return the length and the header of a file, and the offset of each tensor from the beginning of the file."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    first, starts = 0, []
    for form in forms:
        span = [first, first + form.size_bytes]
        table[form.name] = {"dtype": DTYPE_NAMES[form.dtype], "shape": list(form.shape), "data_offsets": span}
        starts.append(first)
        first = span[1]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts]
