"""Reads stored tensors piece by piece: from files, or for a forecast as the memory alone that this takes.

Files are read, not mapped: the host holds one piece, and a file that ends too early is an error rather than a crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.optim.weight_checksums import GROUP
from narrowgauge.pretrained.fp8_weights import apply_scale
from narrowgauge.pretrained.stacked_tensors import AnyTensor, StackedTensor

PIECE = 1 << 20
"""Values that are converted at once: 4 MB in FP32. A multiple of the groups that checksums are for."""
assert PIECE % GROUP == 0


class Reader(Protocol):
    """Reads consecutive values of a stored tensor."""

    def list_pieces(self, tensor: AnyTensor) -> Iterator[tuple[int, int]]:
        """Yield the pieces to read, as start and stop."""

    def read(self, tensor: AnyTensor, start: int, stop: int) -> Tensor:
        """Return values ``start`` to ``stop``, flat, on the device. They are valid until the next call."""


class FileReader:
    """Reads values from files through one buffer of the size of a piece."""

    def __init__(self, device: torch.device, option: str) -> None:
        self.device, self.option = device, option
        self._buffer = torch.empty(PIECE * 8, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._scales = "", torch.empty(0)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def list_pieces(self, tensor: AnyTensor) -> Iterator[tuple[int, int]]:
        """Yield the pieces to read, as start and stop."""
        for start in range(0, tensor.numel, PIECE):
            yield start, min(start + PIECE, tensor.numel)

    def read(self, tensor: AnyTensor, start: int, stop: int) -> Tensor:
        """Return values ``start`` to ``stop``, flat, on the device. They are valid until the next call."""
        scales = self._read_scales(tensor)  # before: both use the buffer
        part = self._buffer[: (stop - start) * tensor.dtype.itemsize]
        done = 0
        for file, offset, size in tensor.locate(start, stop):
            try:
                self._read_into(file, offset, part[done : done + size].numpy().data)
            except OSError as error:
                what = f"{self.option}: {file.name} cannot be loaded"
                raise UsageError(f"{what}: {files.get_reason(error)}") from None
            done += size
        values = part.view(tensor.dtype).to(self.device)
        if scales is None or isinstance(tensor, StackedTensor):
            return values
        return apply_scale(values, tensor, scales, start)

    def _read_scales(self, tensor: AnyTensor) -> Tensor | None:
        """Return all scales of a tensor in FP32, if it has any; those of the last tensor are kept."""
        if tensor.scale is None:
            return None
        source, (name, values) = tensor.scale.tensor, self._scales
        if name != source.name:
            pieces = [self.read(source, *piece).float() for piece in self.list_pieces(source)]
            name, values = self._scales = source.name, torch.cat(pieces)
        return values

    def _read_into(self, path: Path, offset: int, target: memoryview) -> None:
        if path != self._path:
            if self._file is not None:
                self._file.close()
            self._path, self._file = path, path.open("rb", buffering=0)
        assert self._file is not None
        self._file.seek(offset)
        done = 0
        while done < len(target):
            got = self._file.readinto(target[done:])  # type: ignore[attr-defined]
            if not got:
                raise OSError(None, "it became shorter while it was read")
            done += got


class DryReader:
    """Allocates on a simulated device what ``FileReader`` would, and reads nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def list_pieces(self, tensor: AnyTensor) -> Iterator[tuple[int, int]]:
        """Yield the first piece only: the others would allocate the same again."""
        yield 0, min(PIECE, tensor.numel)

    def read(self, tensor: AnyTensor, start: int, stop: int) -> Tensor:
        """Return a tensor for values ``start`` to ``stop``, flat, on the device."""
        dtype = tensor.dtype if tensor.scale is None else torch.float32
        return torch.empty(stop - start, dtype=dtype, device=self.device)


def load_values(tensor: AnyTensor, dtype: torch.dtype, device: torch.device, reader: Reader) -> Tensor:
    """Load a tensor in a dtype, rounded to nearest even, piece by piece."""
    loaded = torch.empty(tensor.shape, dtype=dtype, device=device)
    for start, stop in reader.list_pieces(tensor):
        loaded.view(-1)[start:stop].copy_(reader.read(tensor, start, stop))
    return loaded
