"""Reads single tensors of a checkpoint, so that a large model never has to be in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from narrowgauge.errors import UsageError, one_line
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.runs.checkpoints.layout import STATE, TENSORS, WEIGHTS
from narrowgauge.serialization import unflatten


class WeightReader(Protocol):
    """Trained weights whose tensors are read one at a time."""

    path: Path
    step: int
    shapes: dict[str, tuple[int, ...]]
    """The shape of each tensor of the model's state dict."""

    def read_weight(self, name: str) -> Tensor:
        """Read one tensor of the model's state dict, parameters in FP32."""

    def are_one_tensor(self, name: str, other: str) -> bool:
        """Whether two names of the state dict stand for one stored tensor."""

    def read_engine_state(self, name: str) -> Any:
        """Read one entry of the engine's state; None if there is none."""


class TensorReader:
    """A verified checkpoint, written by one process or by several ranks, whose tensors are read one at a time."""

    def __init__(self, path: Path) -> None:
        """Read the table of contents.

        Args:
            path: The checkpoint folder. It must have been verified (``checkpoint.verify``).

        Raises:
            UsageError: The files do not have the expected content.
        """
        self.path = path
        with self._explain_errors():
            self.step = checkpoint.read_step(path)
            trees = json.loads((path / STATE).read_text())
            self._engine: dict[str, Any] = trees["state"]["dict"]["engine"]["dict"]
            places: dict[str, Any] = trees["weights"]["dict"]
            sharded = checkpoint.is_sharded(path)
            self._weights: _Lazy = _Shards(path, "weights") if sharded else _Plain(path / WEIGHTS)
            self._rest: _Lazy = _Shards(path, "state") if sharded else _Plain(path / TENSORS)
            self._places = {name: str(place["tensor"]) for name, place in places.items()}
            self.shapes = {name: self._weights.shapes[place] for name, place in self._places.items()}
            """The shape of each tensor of the model's state dict."""

    def read_weight(self, name: str) -> Tensor:
        """Read one tensor of the model's state dict. Parameters are in FP32, the master weights of every recipe."""
        with self._explain_errors():
            return self._weights[self._places[name]]

    def are_one_tensor(self, name: str, other: str) -> bool:
        """Whether two names of the state dict stand for one stored tensor."""
        return self._places[name] == self._places[other]

    def read_engine_state(self, name: str) -> Any:
        """Read one entry of the engine's state: ``recipe`` or ``tensor_scales``, for example; None if there is none."""
        with self._explain_errors():
            return unflatten(self._engine.get(name), self._rest)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except UsageError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = one_line(f"{type(error).__name__}: {error}", 200)
            raise UsageError(
                f"checkpoint {self.path} was not written by narrowgauge ({reason}); use an earlier one"
            ) from error


class _Lazy(Mapping[str, Tensor]):
    """Tensors that are read when they are looked up."""

    shapes: dict[str, tuple[int, ...]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class _Plain(_Lazy):
    """The tensors of one safetensors file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with safe_open(file, "pt") as opened:
            self.shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file, "pt") as opened:
            return torch.clone(opened.get_tensor(name))  # the original may be mapped from the file at any offset


class _Shards(_Lazy):
    """The tensors of one part of a sharded checkpoint, put together from the chunks of all ranks."""

    def __init__(self, folder: Path, part: str) -> None:
        from narrowgauge.runs.checkpoints.shard_storage import ShardReader

        self._folder, self._part = folder, part
        self._table = ShardReader(folder).read_metadata()
        kinds: dict[str, Any] = dict(self._table.state_dict_metadata)
        self._kinds = {n.removeprefix(f"{part}/"): kind for n, kind in kinds.items() if n.startswith(f"{part}/")}
        self.shapes = {name: tuple(kind.size) for name, kind in self._kinds.items()}

    def __getitem__(self, name: str) -> Tensor:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        kind = self._kinds[name]
        whole = torch.empty(kind.size, dtype=kind.properties.dtype)
        for chunk in kind.chunks:
            place = self._table.storage_data[MetadataIndex(f"{self._part}/{name}", chunk.offsets)]
            with safe_open(self._folder / place["file"], "pt") as opened:
                values = opened.get_tensor(str(place["number"]))
            if tuple(values.shape) != tuple(chunk.sizes) or values.dtype != whole.dtype:
                raise ValueError(f"a chunk of {name} is {values.dtype} {tuple(values.shape)} in {place['file']}")
            ranges = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(first, first + size) for first, size in ranges)] = values
        return whole
