"""Writes the adapters of a checkpoint as a folder that ``PeftModel.from_pretrained`` loads.

adapter_config.json          what the adapters compute, and the folder of their base
adapter_model.safetensors    the FP32 master weights, each rounded once to the dtype (to nearest even)
tokenizer, chat template                                     copied from the base
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from narrowgauge.pretrained import adapters
from narrowgauge.pretrained.lora_options import CONFIG, WEIGHTS
from narrowgauge.runs import atomic_files
from narrowgauge.runs.checkpoints.tensor_reader import TensorReader
from narrowgauge.runs.export.adapter_run import AdapterRun
from narrowgauge.runs.export.hf_folder import WrittenFolder, round_to
from narrowgauge.runs.export.source_model import SourceModel
from narrowgauge.serialization import write_tensors


def write_peft_folder(
    saved: TensorReader, trained: AdapterRun, source: SourceModel, path: Path, dtype: torch.dtype
) -> WrittenFolder:
    """Write the adapters of a checkpoint.

    Args:
        saved: The checkpoint.
        trained: What the run trained.
        source: Its base.
        path: The folder to write. It must not exist, or be empty.
        dtype: BF16, FP16 or FP32.

    Raises:
        UsageError: The folder cannot be written, or a weight is too large for FP16.
    """
    trained.check(saved)
    with atomic_files.create_folder(path) as folder:
        stored = {}
        for name in saved.shapes:
            stored[adapters.to_file_name(name)] = round_to(saved.read_weight(name), dtype, name).contiguous()
        write_tensors(stored, folder / WEIGHTS, {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(_make_config(trained), indent=2) + "\n")
        copied = source.copy_files(folder)
        return WrittenFolder(path, {WEIGHTS: (folder / WEIGHTS).stat().st_size}, copied, len(stored))


def _make_config(trained: AdapterRun) -> dict[str, Any]:
    """Make the content of adapter_config.json, as PEFT would write it."""
    import peft

    own = {name: value for name, value in trained.config.items() if name != "peft_type"}
    model: Any = trained.match.model
    config = peft.LoraConfig(
        **own,
        task_type="CAUSAL_LM" if model.can_generate() else None,
        base_model_name_or_path=str(trained.base),
        inference_mode=True,
    ).to_dict()
    return {name: _to_json(value) for name, value in sorted(config.items())}


def _to_json(value: Any) -> Any:
    """Return sets as sorted lists, and the names of PEFT's enumerations as text."""
    if isinstance(value, set):
        return sorted(value)
    return str(value.value) if hasattr(value, "value") else value
