"""The Hugging Face model that a run trained: its configuration, the layout of its files, its tokenizer.

A run knows only its weights by name. What they are the weights of is in the folder that the training started from: in
run.json as the option ``model``, or given with ``--model``. The model is made without memory for its weights, and so
tells which names and shapes are right, which weights are tied, and how transformers names them in a file.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import files
from narrowgauge.errors import UsageError
from narrowgauge.pretrained import hub, transformers_model
from narrowgauge.runs import record

COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "*.tiktoken", "tekken.json", "chat_template.*",
    "additional_chat_templates/*.jinja", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files next to the weights that a model needs to be used. Weights, code and other files are not copied."""
NEVER_COPIED = {".py", ".bin", ".pt", ".pth", ".pkl", ".safetensors"}
ELSEWHERE = "--format safetensors works for every run"


@dataclass(frozen=True)
class SourceModel:
    """A Hugging Face folder, and its model without values."""

    folder: Path
    config: dict[str, Any]
    """config.json, with the changes that the run made."""
    model: nn.Module
    """The model on the meta device."""

    @property
    def tied(self) -> dict[str, str]:
        """The names of weights that are not stored, with the name of the weight that each is tied to."""
        return dict(getattr(self.model, "all_tied_weights_keys", {}))

    @property
    def head(self) -> str | None:
        """The path of the layer that computes the logits."""
        find: Any = getattr(self.model, "get_output_embeddings", lambda: None)
        head = find()
        return next((path for path, module in self.model.named_modules() if head is not None and module is head), None)

    def check(self, shapes: Mapping[str, tuple[int, ...]], run: Path) -> None:
        """Refuse weights that are not those of the model, and a model that cannot be written tensor by tensor."""
        state = self.model.state_dict()
        expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
        kind = type(self.model).__name__
        wrong = [name for name in expected if name in shapes and shapes[name] != expected[name]]
        missing = [name for name in expected if name not in shapes]
        unknown = [name for name in shapes if name not in expected]
        if not (wrong or missing or unknown):
            one_by_one = {stored for name, tensor in state.items() for stored in self._to_file_layout({name: tensor})}
            if one_by_one != set(self._to_file_layout(state)):
                raise UsageError(
                    f"transformers stores several weights of {kind} as one, which export cannot do; {ELSEWHERE}"
                )
            return
        if wrong:
            name = wrong[0]
            what = f"{name} is {list(shapes[name])} in the run, and {list(expected[name])} in the model"
        elif missing:
            what = f"the run has no {missing[0]}" + (f" (but {unknown[0]})" if unknown else "")
        else:
            what = f"the run has {unknown[0]}, which the model has not"
        count = len(wrong) + len(missing) + len(unknown)
        more = f" ({count} such differences)" if count > 1 else ""
        raise UsageError(
            f"{run} did not train the {kind} that {self.folder / 'config.json'} describes: {what}{more}; give the "
            f"folder of its model with --model; {ELSEWHERE}"
        )

    def choose_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter: the given one, except where the model demands FP32 (as in transformers)."""
        kept: set[str] = set()
        if dtype in (torch.float16, torch.bfloat16):
            kept |= set(getattr(self.model, "_keep_in_fp32_modules_strict", None) or ())
        if dtype is torch.float16:
            kept |= set(getattr(self.model, "_keep_in_fp32_modules", None) or ())
        found = any(re.search(pattern.replace("*", ".*"), name) for pattern in kept)
        return torch.float32 if found else dtype

    def to_file_layout(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return a tensor under the names, and in the parts, in which files have it.

        transformers fuses some weights while it loads them (the experts of a layer, for example), and splits them
        when it saves them.
        """
        return self._to_file_layout({name: tensor})

    def _to_file_layout(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError:  # versions before 5 load what is in the file
            return dict(state)
        stored: dict[str, Tensor] = revert_weight_conversion(self.model, dict(state))
        return stored

    def write_config(self, folder: Path, dtype: torch.dtype, **fields: Any) -> None:
        """Write config.json with the dtype of the weights, and with ``fields``."""
        name = str(dtype).removeprefix("torch.")
        config = {**_set_dtype(self.config, name), "dtype": name, **fields}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def copy_files(self, folder: Path) -> list[str]:
        """Copy tokenizer, chat template and generation settings. Return their names."""
        found = [path for pattern in COPIED for path in sorted(self.folder.glob(pattern))]
        copied = []
        for path in dict.fromkeys(found):
            if path.suffix in NEVER_COPIED or not files.is_file(path):
                continue
            if why := files.explain_unreadable(path):
                raise UsageError(f"cannot read {path}: {why}")
            name = path.relative_to(self.folder)
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
            copied.append(name.as_posix())
        return copied


def find_source(run: Path, given: str | None) -> SourceModel:
    """Find the model that a run trained.

    Args:
        run: The run folder.
        given: The model's folder, if the user gave it. Default: what run.json says.

    Raises:
        UsageError: The run does not say which model it trained, or the folder is not one of a model.
    """
    configuration = record.read_configuration(run) if record.holds_run(run) else {}
    options = configuration.get("options")
    options = options if isinstance(options, dict) else {}
    spec = given if given is not None else options.get("model")
    if not isinstance(spec, str):
        task = configuration.get("task")
        what = f"trained {task}, and" if isinstance(task, str) else "has no run.json that"
        raise UsageError(f"{run} {what} names no Hugging Face model; give the model's folder with --model; {ELSEWHERE}")
    folder = hub.find_folder(spec, f"--model {spec}")
    if not files.is_folder(folder):
        origin = "--model" if given is not None else f"{run} trained the model in"
        hint = "give the folder of its config.json" + ("" if given is not None else " with --model")
        raise UsageError(f"{origin} {spec}: there is no such folder; {hint}")
    fields = (
        _read_fields(options, run) if isinstance(options.get("model"), str) else {}
    )  # else options of a user's task
    found = transformers_model.find_model(str(folder), fields)
    with torch.device("meta"):
        model = dataclasses.replace(found, weights=None).make()
    stored: dict[str, Any] = files.parse_json(files.read(folder / "config.json"))
    return SourceModel(folder, {**stored, **fields}, model)


def _read_fields(options: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return the fields of the configuration that the run has changed."""
    fields = options.get("config") or {}
    fields = transformers_model.parse_fields(fields) if isinstance(fields, str) else fields
    if not isinstance(fields, dict):
        raise UsageError(f"{run / record.CONFIGURATION} was not written by narrowgauge train; restore it")
    return fields


def _set_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration with another dtype, also in the configurations of its parts."""
    return dict(_replace_dtypes(config, name))


def _replace_dtypes(config: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            yield key, name
        else:
            yield key, _set_dtype(value, name) if isinstance(value, dict) else value
