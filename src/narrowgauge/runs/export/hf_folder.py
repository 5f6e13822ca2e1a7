"""Writes a checkpoint as a Hugging Face folder, which ``from_pretrained`` loads.

    config.json                  that of the source model, with the dtype of the weights
    model*.safetensors           the FP32 master weights, each rounded once to the dtype (to nearest even)
    tokenizer, chat template, generation_config.json             copied from the source model

Tied weights are stored once, under the name that transformers uses. One tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.runs import atomic_files
from narrowgauge.runs.checkpoints.tensor_reader import WeightReader
from narrowgauge.runs.export.source_model import SourceModel
from narrowgauge.runs.export.tensor_files import TensorFiles, TensorForm

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class WrittenFolder:
    """What was written."""

    path: Path
    weights: dict[str, int]
    """The size in bytes of each file with weights."""
    copied: list[str]
    """The files that were copied from the source model."""
    tensors: int
    facts: dict[str, Any] = field(default_factory=dict)


def write_hf_folder(
    saved: WeightReader, source: SourceModel, path: Path, dtype: torch.dtype, most_bytes: int = MAX_SHARD_BYTES
) -> WrittenFolder:
    """Write the weights of a checkpoint in one dtype.

    Args:
        saved: The checkpoint.
        source: The model that it has the weights of.
        path: The folder to write. It must not exist, or be empty.
        dtype: BF16, FP16 or FP32.
        most_bytes: Maximum size of a file.

    Raises:
        UsageError: The folder cannot be written, or a weight is too large for FP16.
    """

    def make_forms(name: str, stored: str, like: Tensor) -> list[TensorForm]:
        return [TensorForm(stored, _choose_dtype(source, name, dtype, like), tuple(like.shape))]

    def convert(name: str, stored: str, values: Tensor) -> Iterable[tuple[str, Tensor]]:
        yield stored, round_to(values, _choose_dtype(source, name, dtype, values), stored)

    return write_folder(saved, source, path, dtype, most_bytes, make_forms, convert)


def write_folder(
    saved: WeightReader,
    source: SourceModel,
    path: Path,
    dtype: torch.dtype,
    most_bytes: int,
    make_forms: Callable[[str, str, Tensor], list[TensorForm]],
    convert: Callable[[str, str, Tensor], Iterable[tuple[str, Tensor]]],
    **config: Any,
) -> WrittenFolder:
    """Write a folder whose tensors are made by ``convert`` from the master weights.

    Args:
        saved: The checkpoint.
        source: The model that it has the weights of.
        path: The folder to write.
        dtype: The dtype in config.json.
        most_bytes: Maximum size of a file.
        make_forms: Returns dtypes and shapes of what ``convert`` will return, from a tensor without values.
        convert: Returns names and tensors to store, from a weight's name, its name in the file, and its values.
        config: Further fields of config.json.
    """
    names = [name for name in saved.shapes if name not in source.tied]
    forms: list[TensorForm] = []
    for name, like in source.model.state_dict().items():
        if name not in source.tied:
            for stored, part in source.to_file_layout(name, like).items():
                forms += make_forms(name, stored, part)
    for name, original in source.tied.items():
        _refuse_untied(saved, name, original)
    with atomic_files.create_folder(path) as folder:
        files = TensorFiles(folder, forms, most_bytes)
        for name in names:
            for stored, part in source.to_file_layout(name, saved.read_weight(name)).items():
                for key, values in convert(name, stored, part):
                    files.write(key, values)
        source.write_config(folder, dtype, **config)
        copied = source.copy_files(folder)
        return WrittenFolder(path, files.finish(), copied, len(forms))


def round_to(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Round a weight to nearest even. Refuse one that is finite, and infinite in FP16."""
    rounded = values.to(dtype)
    if dtype is torch.float16 and not torch.equal(rounded.isinf(), values.isinf()):
        largest = values[values.isfinite()].abs().max().item()
        raise UsageError(f"--dtype fp16: {name} has a value of {largest:.4g}, and FP16 ends at 65504; use --dtype bf16")
    return rounded


def _choose_dtype(source: SourceModel, name: str, dtype: torch.dtype, like: Tensor) -> torch.dtype:
    """Buffers of integers keep their dtype."""
    return source.choose_dtype(name, dtype) if like.is_floating_point() else like.dtype


def _refuse_untied(saved: WeightReader, name: str, original: str) -> None:
    """Refuse a checkpoint in which weights differ that the model ties: one of them would be lost."""
    stored_once = name not in saved.shapes or saved.are_one_tensor(name, original)
    if not stored_once and not torch.equal(saved.read_weight(name), saved.read_weight(original)):
        raise UsageError(
            f"the run has trained {name} and {original} apart, and config.json ties them; give a source folder with "
            '"tie_word_embeddings": false with --model'
        )
