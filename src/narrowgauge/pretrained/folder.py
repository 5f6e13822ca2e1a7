"""Opens the folder of a Hugging Face model: reads config.json and the headers of its .safetensors files, no weights.

A .safetensors file is 8 bytes with the length of its header, the header (JSON: dtype, shape and place of each tensor),
and the tensors. So a few kilobytes show whether the files are complete and fit together, before a model is made.

    model.safetensors                        all tensors
    model.safetensors.index.json             or: which of several files (shards) has which tensor

Other files with weights are never opened: reading a pickle can run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowgauge import files
from narrowgauge.errors import UsageError, one_line

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5")
"""Files with weights that are not read."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library as well."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names of dtypes in a header."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor is in a file, and what it is."""

    name: str
    file: Path
    offset: int
    """Where its first byte is in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    scale: StoredScale | None = None
    """For FP8 weights: what the stored numbers are multiplied by."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def locate(self, start: int, stop: int) -> Iterator[tuple[Path, int, int]]:
        """Yield file, position of the first byte and number of bytes of values ``start`` to ``stop``."""
        size = self.dtype.itemsize
        yield self.file, self.offset + start * size, (stop - start) * size


@dataclass(frozen=True, kw_only=True)
class StoredScale:
    """The scales of an FP8 weight."""

    tensor: StoredTensor
    block: tuple[int, int]
    """How many rows and columns have one scale."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How the weights of a folder are quantized."""

    method: str
    """fp8 (blocks with ``weight_scale_inv``), compressed-tensors, or another name of transformers."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """``quantization_config`` of config.json."""


@dataclass(frozen=True, kw_only=True)
class PretrainedFolder:
    """The folder of a model, whose files are complete and fit together."""

    path: Path
    option: str
    """What the user wrote, for error messages."""
    config: Mapping[str, Any]
    """The content of config.json."""
    tensors: Mapping[str, StoredTensor]
    """What is in the files, by name."""
    quantization: Quantization | None
    """None: the weights are ordinary numbers."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_folder(path: str | Path, option: str | None = None) -> PretrainedFolder:
    """Open the folder of a model. Only config.json and the headers of the files with weights are read.

    Args:
        path: The folder.
        option: How error messages name it. Default: the path.

    Raises:
        UsageError: Something is missing, damaged or inconsistent, or the weights are not in .safetensors files.
    """
    folder = files.expand_path(str(path))
    option = option or str(path)
    config = read_config(folder, option)
    tensors = _list_tensors(folder, option)
    return PretrainedFolder(
        path=folder, option=option, config=config, tensors=tensors, quantization=find_quantization(config, tensors)
    )


def read_config(folder: Path, option: str) -> dict[str, Any]:
    """Read the config.json of a folder.

    Args:
        folder: The folder.
        option: How error messages name it.

    Raises:
        UsageError: There is no such folder or file, or it is not a JSON object.
    """
    path = folder / "config.json"
    if not files.exists(folder):
        raise UsageError(
            f"{option}: there is no such folder; give one with a config.json, ORG/NAME on the Hub, or "
            "transformers:CLASS"
        )
    if not files.is_folder(folder):
        raise UsageError(
            f"{option}: it is not a folder; give one with a config.json, transformers:CLASS or file.py:Class"
        )
    if files.exists(folder / "adapter_config.json"):
        raise UsageError(
            f"{option}: the folder holds an adapter, not a model; give its model, and the adapter with --lora"
        )
    if not files.exists(path):
        raise UsageError(f"{option}: the folder has no config.json; give the folder of a Hugging Face model")
    return _read_object(path, option)


def find_quantization(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor] | None = None
) -> Quantization | None:
    """Return how the weights are quantized, by config.json or by the tensors themselves; None if they are not."""
    stored = config.get("quantization_config")
    if stored:
        known = stored if isinstance(stored, dict) else {}
        return Quantization(method=one_line(str(known.get("quant_method", "unknown")), 80), config=known)
    if any(tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point for tensor in (tensors or {}).values()):
        return Quantization(method="fp8")
    return None


def find_pickled(folder: Path) -> list[Path]:
    """Return the files with weights in formats that are not read."""
    return [path for pattern in PICKLED for path in sorted(folder.glob(pattern))]


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights in .safetensors files."""
    return any(folder.glob("*.safetensors")) or files.exists(folder / INDEX)


def refuse_pickled(folder: Path, option: str) -> None:
    """Refuse a folder whose only weights are in a format that is not read."""
    others = find_pickled(folder)
    if others and not has_weights(folder):
        raise UsageError(
            f"{option}: its weights are in {others[0].name}, and only .safetensors files are read, as they cannot run "
            "code; convert them (model.save_pretrained), or remove them to use random weights"
        )


def _read_object(path: Path, option: str) -> dict[str, Any]:
    """Read a file that holds a JSON object."""
    try:
        stored = files.parse_json(files.read(path))
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    except ValueError as error:
        raise UsageError(f"{option}: {path.name} is not JSON ({one_line(error)})") from None
    if not isinstance(stored, dict):
        raise UsageError(f"{option}: {path.name} is not a JSON object")
    return stored


def _list_tensors(folder: Path, option: str) -> dict[str, StoredTensor]:
    refuse_pickled(folder, option)
    if files.exists(folder / WEIGHTS):
        return read_header(folder / WEIGHTS, option)
    if not files.exists(folder / INDEX):
        raise UsageError(f"{option}: the folder has no weights; expected {WEIGHTS}, or {INDEX} and its files")
    places = _read_object(folder / INDEX, option).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UsageError(f'{option}: {INDEX} has no "weight_map" from tensors to files')
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UsageError(
                f"{option}: {INDEX} names the file {one_line(repr(name), 80)}; expected a .safetensors file beside it"
            )
        if not files.exists(folder / name):
            raise UsageError(f"{option}: {INDEX} names {one_line(name)}, which is not there; download it again")
        for tensor in read_header(folder / name, option).values():
            if tensor.name not in places:
                raise UsageError(
                    f"{option}: {name} has the tensor {one_line(tensor.name)}, which {INDEX} does not list"
                )
            if places[tensor.name] == name:
                found[tensor.name] = tensor
    lost = next((name for name in places if name not in found), None)
    if lost is not None:
        raise UsageError(f"{option}: {INDEX} says that {one_line(lost)} is in {places[lost]}, but it is not")
    return found


def read_header(path: Path, option: str) -> dict[str, StoredTensor]:
    """Read the header of a .safetensors file, and compare the sizes in it with that of the file.

    Args:
        path: The file.
        option: How error messages name its folder.

    Raises:
        UsageError: The file is damaged.
    """
    damaged = f"{option}: {path.name} cannot be loaded"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise UsageError(f"{damaged}: it is truncated or not a .safetensors file; download it again")
            text = file.read(length)
    except OSError as error:
        raise UsageError(f"{damaged}: {files.get_reason(error)}") from None
    try:
        header = files.parse_json(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        found = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{damaged}: its header is damaged ({one_line(error, 120)})") from None
    end = 8 + length
    for tensor in sorted(found.values(), key=lambda one: (one.offset, one.nbytes)):
        if tensor.offset != end:
            raise UsageError(f"{damaged}: its header is damaged: {one_line(tensor.name)} is not where it should be")
        end += tensor.nbytes
    if size != end:
        what = "it is truncated" if size < end else "it is longer than its header says"
        raise UsageError(f"{damaged}: {what} ({size:,} bytes, expected {end:,}); download it again")
    return found


def _parse_entry(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    shape, (begin, end), dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, begin, end)):
        raise ValueError(f"{name} has a wrong shape or place")
    tensor = StoredTensor(name=name, file=path, offset=start + begin, dtype=DTYPES[dtype], shape=tuple(shape))
    if tensor.nbytes != end - begin:
        raise ValueError(f"{name} has {end - begin:,} bytes, but its shape needs {tensor.nbytes:,}")
    return tensor
