"""Shards in safetensors with a table in JSON are exact for every dtype and shape; an inconsistent table is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from narrowgauge.errors import UsageError
from narrowgauge.runs.checkpoints import sharded
from narrowgauge.runs.checkpoints.layout import SHARD_TABLE
from narrowgauge.runs.checkpoints.shard_storage import ShardReader, ShardWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.complex64, torch.complex128,
]  # fmt: skip


def save(folder: Path, tensors: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    dcp.save(tensors, storage_writer=ShardWriter(folder), no_dist=True)


def load(folder: Path) -> dict[str, torch.Tensor]:
    kinds: dict[str, Any] = ShardReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    try:
        dcp.load(tensors, storage_reader=ShardReader(folder), no_dist=True)
    except BaseException as error:
        raise sharded.unwrap_error(error) from error
    return tensors


def test_every_dtype_and_shape_round_trips_exactly(tmp_path: Path) -> None:
    base = torch.arange(24)
    tensors = {}
    for dtype in DTYPES:
        for shape in ((), (0,), (24,), (4, 6), (2, 0, 3), (2, 3, 4)):
            tensors[f"{dtype}/{shape}"] = base[: int(torch.Size(shape).numel())].reshape(shape).to(dtype)
    shared = torch.randn(6, 4)
    tensors |= {"view": shared.t(), "tied": shared, "also tied": shared, "a/b": shared[1:3], "__metadata__": shared[0]}
    save(tmp_path / "one", tensors)
    back = load(tmp_path / "one")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape, name
        assert back[name].reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8)), name
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["shard-0.safetensors", SHARD_TABLE]


def test_a_value_that_is_not_a_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="without pickle"):
        save(tmp_path / "one", {"x": torch.ones(2), "y": object()})
    assert not (tmp_path / "one" / SHARD_TABLE).exists()


def chunk(**changes: Any) -> dict[str, Any]:
    return {"offset": [0, 0], "size": [2, 3], "file": "shard-0.safetensors", "number": 0, **changes}


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": [chunk(offset=[1, 0])]},
        {"chunks": [chunk(offset=[-1, 0])]},
        {"chunks": [chunk(size=[1, 3])]},
        {"chunks": []},
        {"chunks": [chunk(file="../../secret.safetensors")]},
        {"chunks": [chunk(file="/etc/passwd")]},
        {"chunks": [chunk(number="0; import os")]},
        {"chunks": [chunk(number=17)]},
        {"chunks": None},
        {"dtype": "load"},
        {"dtype": "__builtins__"},
        {"dtype": "int64"},
        {"shape": "wide"},
        {"shape": [3, 2]},
    ],
    ids=str,
)
def test_an_inconsistent_table_is_a_one_line_error(tmp_path: Path, change: dict[str, Any]) -> None:
    save(tmp_path / "one", {"x": torch.randn(2, 3)})
    path = tmp_path / "one" / SHARD_TABLE
    table = json.loads(path.read_text())
    assert table["tensors"]["x"] == {"dtype": "float32", "shape": [2, 3], "chunks": [chunk()]}
    table["tensors"]["x"] |= change
    path.write_text(json.dumps(table))
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "one")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": 2}', '{"format": 1}', "[" * 100_000])
def test_an_unreadable_table_is_a_one_line_error(tmp_path: Path, text: str) -> None:
    (tmp_path / SHARD_TABLE).write_text(text)
    with pytest.raises(UsageError, match="is not a table of shards"):
        ShardReader(tmp_path).read_metadata()
