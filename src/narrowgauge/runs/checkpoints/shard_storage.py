"""A storage for torch.distributed.checkpoint: the shards of several ranks in safetensors, their table in JSON.

    shard-0.safetensors    the chunks that rank 0 wrote, each named by its number; shard-1: rank 1, and so on
    shards.json            for each tensor its dtype, its shape, and its chunks: offset, size, file, number in the file

torch's own storage writes its table as a pickle (.metadata), which can run arbitrary code when it is read. These files
cannot: they are JSON or raw numbers. A file with unexpected content is refused with one line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from narrowgauge.errors import UsageError
from narrowgauge.runs import atomic_files
from narrowgauge.runs.checkpoints.layout import SHARD_TABLE
from narrowgauge.serialization import Flattener, write_tensors

FORMAT = 1
_FILE = re.compile(r"shard-\d+\.safetensors")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class ShardWriter(StorageWriter):
    """Writes the chunks of each rank to one file per rank. Rank 0 writes the table when all ranks are done."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=f"shard-{rank}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name: str = plan.storage_data
        flattener = Flattener(aliased=False)  # each chunk by its number, even if two share memory
        results = []
        for number, item in enumerate(plan.items):
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} is not a tensor, and cannot be saved without pickle")
            value = planner.resolve_data(item)
            assert isinstance(value, Tensor)
            flattener.flatten(value.detach(), str(number))
            size_bytes = value.numel() * value.element_size()
            results.append(WriteResult(item.index, size_bytes, {"file": name, "number": number}))
        write_tensors(flattener.tensors, self.folder / name)
        atomic_files.sync(self.folder / name)
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # A rank that has no part of a tensor writes an empty chunk, whose offset may equal that of a real chunk. The
        # results are sorted by size, so that the real chunk wins.
        all_results = sorted((result for part in results for result in part), key=lambda r: r.size_in_bytes)
        places = {result.index: result.storage_data for result in all_results}
        tensors = {}
        for name, kind in metadata.state_dict_metadata.items():
            assert isinstance(kind, TensorStorageMetadata)
            chunks = [
                {"offset": list(c.offsets), "size": list(c.sizes), **places[MetadataIndex(name, c.offsets)]}
                for c in kind.chunks
                if math.prod(c.sizes) or not math.prod(kind.size)
            ]
            dtype = str(kind.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(kind.size), "chunks": chunks}
        (self.folder / SHARD_TABLE).write_text(json.dumps({"format": FORMAT, "tensors": tensors}))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class ShardReader(StorageReader):
    """Reads the chunks that a rank needs, from any number of ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            path = self.folder / SHARD_TABLE
            try:
                self._metadata = _parse(json.loads(path.read_text()))
            except OSError as error:
                raise UsageError(f"checkpoint {self.folder}: {SHARD_TABLE} cannot be read ({error.strerror})") from None
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UsageError(f"{path} is not a table of shards ({error!r}); use an earlier checkpoint") from None
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = self.read_metadata().storage_data
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[places[item.storage_index]["file"]].append(item)
        for name, items in by_file.items():
            try:
                with safe_open(self.folder / name, "pt") as file:
                    for item in items:
                        value = _slice(file, str(places[item.storage_index]["number"]), item)
                        target = planner.resolve_tensor(item).detach()
                        if target.dtype == torch.complex128 and value.shape[-1:] == (2,):
                            value = torch.view_as_complex(value)
                        if value.shape != target.shape or value.dtype != target.dtype:
                            raise UsageError(
                                f"{self.folder / name} does not match {SHARD_TABLE}: {item.storage_index.fqn} is "
                                f"{value.dtype} {tuple(value.shape)} there; use an earlier checkpoint"
                            )
                        target.copy_(value)
                        planner.commit_tensor(item, target)
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{self.folder / name} cannot be read ({error}); use an earlier checkpoint") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _slice(file: Any, number: str, item: ReadItem) -> Tensor:
    if not item.lengths:
        whole: Tensor = file.get_tensor(number)
        return whole
    ranges = zip(item.storage_offsets, item.lengths, strict=True)
    part: Tensor = file.get_slice(number)[tuple(slice(first, first + length) for first, length in ranges)]
    return part


def _parse(table: Any) -> Metadata:
    """Convert the table to torch's Metadata. Raises ValueError if it is inconsistent."""
    if table["format"] != FORMAT:
        raise ValueError(f"its format is {table['format']}, this version reads {FORMAT}")
    kinds: dict[str, Any] = {}
    places = {}
    for name, tensor in table["tensors"].items():
        shape = torch.Size(tensor["shape"])
        chunks = []
        for chunk in tensor["chunks"]:
            offset, size = torch.Size(chunk["offset"]), torch.Size(chunk["size"])
            fits = len(offset) == len(size) == len(shape) and all(
                first >= 0 and length >= 0 and first + length <= most
                for first, length, most in zip(offset, size, shape, strict=True)
            )
            if not fits or not _FILE.fullmatch(chunk["file"]) or not isinstance(chunk["number"], int):
                raise ValueError(f"a chunk of {name} is outside the tensor, or not in a shard file")
            chunks.append(ChunkStorageMetadata(offset, size))
            places[MetadataIndex(name, offset)] = {"file": chunk["file"], "number": chunk["number"]}
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
            raise ValueError(f"the chunks of {name} do not cover the tensor")
        kinds[name] = TensorStorageMetadata(TensorProperties(_DTYPES[tensor["dtype"]]), shape, chunks)
    return Metadata(kinds, storage_data=places)
