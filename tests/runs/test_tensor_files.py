"""Safetensors files that are written tensor by tensor are exact, aligned, and of limited size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from narrowgauge.runs.export.tensor_files import DTYPE_NAMES, TensorFiles, TensorForm


def make_tensors() -> dict[str, torch.Tensor]:
    tensors = {}
    for number, dtype in enumerate(DTYPE_NAMES):
        values = (torch.arange(30) % (number + 2)).to(dtype)
        for shape in ((), (0,), (3,), (5, 6), (2, 3, 5)):
            tensors[f"{number}.{shape}"] = values[: torch.Size(shape).numel()].reshape(shape)
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], most_bytes: int) -> dict[str, int]:
    forms = [TensorForm(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    files = TensorFiles(folder, forms, most_bytes)
    for name in reversed(tensors):
        files.write(name, tensors[name])
    return files.finish()


@pytest.mark.parametrize("most_bytes", [1, 100, 1000, 10**9])
def test_files_hold_the_tensors_within_the_size(tmp_path: Path, most_bytes: int) -> None:
    tensors = make_tensors()
    sizes = write(tmp_path, tensors, most_bytes)
    assert sizes == {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(sizes) > 1) and (list(sizes) == ["model.safetensors"]) == (len(sizes) == 1)
    loaded = {}
    for number, name in enumerate(sizes):
        part = load_file(tmp_path / name)
        assert not loaded.keys() & part.keys() and (len(sizes) == 1 or f"-{number + 1:05d}-of-" in name)
        filled = [tensor.nbytes for tensor in part.values() if tensor.nbytes]
        assert sum(filled) <= most_bytes or len(filled) == 1
        loaded |= part
        header = (tmp_path / name).read_bytes()
        length = int.from_bytes(header[:8], "little")
        table = json.loads(header[8 : 8 + length])
        assert length % 8 == 0 and table.pop("__metadata__") == {"format": "pt"}
        assert all(place["data_offsets"][0] % tensors[key].element_size() == 0 for key, place in table.items())
        if len(sizes) > 1:
            weight_map = json.loads(index.read_text())["weight_map"]
            assert all(weight_map[key] == name for key in part)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


def test_what_was_not_planned_or_not_written_is_an_error(tmp_path: Path) -> None:
    files = TensorFiles(tmp_path, [TensorForm("a", torch.float32, (2,)), TensorForm("b", torch.float32, (2,))], 100)
    files.write("a", torch.ones(2))
    for wrong in (torch.ones(3), torch.ones(2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="was planned as"):
            files.write("b", wrong)
    with pytest.raises(ValueError, match="1 tensors were not written: b"):
        files.finish()
