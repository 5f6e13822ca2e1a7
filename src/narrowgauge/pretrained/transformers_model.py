"""Finds a model of transformers by its class name or by a local folder, and makes it. No code from a file is ever run.

    transformers:CLASS    the class, with its default configuration and the fields of ``--config``; random weights
    FOLDER                the class and the configuration that its config.json names; weights from .safetensors files,
                          if there are any, else random weights
    ORG/NAME[@REVISION]   the same for a model on the Hub, whose files are downloaded once (hub.py)

A folder can ask for code of its own in three ways, and all of them are refused: ``auto_map`` (Python files beside the
weights), attention or expert kernels from the hub, and pickled weights. Weights are downloaded after these checks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge import files
from narrowgauge.errors import UsageError, one_line
from narrowgauge.pretrained import folder as model_folder
from narrowgauge.pretrained import hub
from narrowgauge.pretrained.fp8_weights import explain_unreadable
from narrowgauge.pretrained.hub_headers import outline_weights

PREFIX = "transformers:"
IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""Fields that choose code by name, with the names that stand for code of transformers itself. Others, also
flash_attention_2 where it is not installed, are downloaded from the hub and run."""
ACCEPTED = {"num_labels", "attn_implementation", "experts_implementation", "output_attentions"}
"""Fields of every configuration that its constructor does not list."""
LEGACY_ROPE = {"rope_theta", "rope_scaling"}
"""Former fields of configurations that now have rope_parameters."""


@dataclass(frozen=True)
class FoundModel:
    """A class of transformers with its configuration, and where its weights are."""

    option: str
    """What the user wrote, for error messages."""
    cls: Any
    config: Any
    weights: Path | None
    """The folder with .safetensors files; None: random weights."""

    @property
    def name(self) -> str:
        return str(self.cls.__name__)

    def count_parameters(self) -> int:
        """Return the number of parameters. The model is made without memory for them."""
        return sum(parameter.numel() for parameter in self.make_on_meta().parameters())

    def make_on_meta(self) -> nn.Module:
        """Make the model on the meta device: with shapes, but without weights or memory for them."""
        with torch.device("meta"):
            return dataclasses.replace(self, weights=None).make()

    def make(self, strict: bool = False) -> nn.Module:
        """Make the model in FP32 on torch's default device, in training mode.

        Args:
            strict: Refuse weights of which some are missing or left over; else these are initialized and ignored.
        """
        with quiet():
            try:
                if self.weights is None:
                    made = self.cls(copy.deepcopy(self.config))
                else:
                    made, info = self.cls.from_pretrained(
                        self.weights, config=copy.deepcopy(self.config), dtype=torch.float32, use_safetensors=True,
                        local_files_only=True, trust_remote_code=False, output_loading_info=True,
                    )  # fmt: skip
                    for kind in ("missing_keys", "unexpected_keys") if strict else ():
                        if info[kind]:
                            raise ValueError(f"{kind.replace('_', ' ')}: {', '.join(sorted(info[kind])[:3])}")
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                what = "has weights that cannot be loaded" if self.weights else "cannot be made"
                why = describe_error(error)
                raise UsageError(f"{self.option}: {self.name} {what}: {why}; check --config") from error
        model: nn.Module = made.float().train()
        return model


def find_model(
    spec: str,
    fields: Mapping[str, Any],
    option: str | None = None,
    *,
    quantized: bool = False,
    headers_only: bool = False,
) -> FoundModel:
    """Find the class and make the configuration of a model.

    Args:
        spec: ``transformers:CLASS``, a folder, or a name on the Hub.
        fields: Fields of the configuration that the user gave.
        option: How error messages name the model. Default: ``--model`` and the spec.
        quantized: Whether FP8 weights are accepted; the configuration is then that of the model without quantization.
        headers_only: Of a model on the Hub, read the headers of the weights, but do not download the weights.

    Raises:
        UsageError: There is no such class or folder, or the configuration is wrong.
    """
    option = option or f"--model {spec}"
    remote = None if spec.startswith(PREFIX) else hub.find_remote(spec, option)
    folder = None if spec.startswith(PREFIX) else files.expand_path(spec) if remote is None else remote.folder
    stored = {} if folder is None else model_folder.read_config(folder, option)
    found = model_folder.find_quantization(stored)
    if found is not None:
        reason = explain_unreadable(found) if quantized else "its weights are quantized; give the original model"
        if reason is not None:
            raise UsageError(f"{option}: {reason}")
        stored = {name: value for name, value in stored.items() if name != "quantization_config"}
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"{option}: transformers is not installed; pip install transformers, or give file.py:Class")
    if folder is None:
        cls = find_class(spec.removeprefix(PREFIX), option)
    else:
        cls = _find_stored_class(stored, folder, option)
    _check_fields(cls.config_class, fields, "--config")
    for source, what in ((stored, f"{option}: config.json"), (fields, "--config")):
        _refuse_downloaded_code(source, what)
    config = _make_config(cls, {**stored, **fields}, option if not fields else f"{option}, --config")
    if remote is not None and headers_only:
        folder = outline_weights(remote)
    elif remote is not None:
        remote.fetch_weights()
    has_weights = folder is not None and model_folder.has_weights(folder)
    return FoundModel(option, cls, config, folder if has_weights else None)


def find_class(name: str, option: str) -> Any:
    """Return the model class of transformers with this name."""
    import transformers

    try:
        found = getattr(transformers, name)
    except AttributeError:
        models = [one for one in dir(transformers) if "For" in one or "Model" in one]
        near = difflib.get_close_matches(name, models, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{option}: transformers {transformers.__version__} has no class {name!r}{hint}") from None
    except Exception as error:  # transformers imports a class on first use, with everything that it needs
        raise UsageError(f"{option}: transformers cannot import {name}: {describe_error(error)}") from None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model or getattr(found, "config_class", None) is None:
        raise UsageError(f"{option}: {name} is not a model class; name one such as Qwen3ForCausalLM, or give a folder")
    return found


def parse_fields(text: str) -> dict[str, Any]:
    """Parse the value of ``--config``: a JSON object."""
    example = """such as --config '{"num_hidden_layers": 4}'"""
    try:
        fields = files.parse_json(text.encode("utf-8", "surrogateescape"))
    except json.JSONDecodeError as error:
        raise UsageError(f"--config is not JSON ({error}): give an object, {example}") from None
    except ValueError as error:
        raise UsageError(f"--config is not JSON ({one_line(error)}): give an object, {example}") from None
    if not isinstance(fields, dict):
        raise UsageError(f"--config is JSON of type {type(fields).__name__}: give an object, {example}")
    return fields


def _find_stored_class(stored: Mapping[str, Any], folder: Path, option: str) -> Any:
    """Return the class that a config.json names."""
    names = stored.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if _find_values(stored, "auto_map"):
        raise UsageError(
            f"{option}: config.json asks for Python code from the folder (auto_map), which is never run; if "
            f"transformers has the same model, use --model {PREFIX}CLASS --config '{{...}}'"
        )
    if not isinstance(name, str):
        raise UsageError(
            f'{option}: config.json names no class in "architectures"; add it, or use --model {PREFIX}CLASS'
        )
    model_folder.refuse_pickled(folder, option)
    return find_class(name, option)


def _refuse_downloaded_code(source: Mapping[str, Any], what: str) -> None:
    """Refuse implementations that transformers would download and run."""
    for field, known in IMPLEMENTATIONS.items():
        for key in (field, f"_{field}", f"_{field}_internal"):
            for value in _find_values(source, key):
                named = value.values() if isinstance(value, dict) else [value]
                if any(one is not None and one not in known for one in named):
                    raise UsageError(
                        f"{what}: {key} is {one_line(repr(value), 80)}, which may be code from the hub, and "
                        f"is never run; expected one of {', '.join(known)}"
                    )


def _find_values(data: Any, key: str) -> list[Any]:
    """Return the values of a key at any depth of JSON data."""
    if isinstance(data, Mapping):
        own = [data[key]] if key in data else []
        return own + [found for value in data.values() for found in _find_values(value, key)]
    return [found for value in data for found in _find_values(value, key)] if isinstance(data, list) else []


def _check_fields(config_class: Any, fields: Mapping[str, Any], option: str) -> None:
    """Refuse fields that a configuration does not have: transformers would store them, and nothing would read them."""
    known = set(inspect.signature(config_class.__init__).parameters) - {"self", "kwargs"}
    known |= set(getattr(config_class, "attribute_map", {})) | ACCEPTED
    if "rope_parameters" in known:
        known |= LEGACY_ROPE
    for name, value in fields.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(_list_own(config_class)))}"
            raise UsageError(f"{option}: {config_class.__name__} has no field {one_line(repr(name), 80)}; {hint}")
        inner = getattr(config_class, "sub_configs", {}).get(name)
        if isinstance(value, dict) and hasattr(inner, "attribute_map"):
            _check_fields(inner, value, f"{option}, {name}")


def _list_own(config_class: Any) -> set[str]:
    """Return the names of the fields that a configuration adds to those of all configurations."""
    from transformers import PreTrainedConfig

    return set(inspect.signature(config_class.__init__).parameters) - set(
        inspect.signature(PreTrainedConfig.__init__).parameters
    )


def _make_config(cls: Any, values: dict[str, Any], option: str) -> Any:
    ignored = ("architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype")
    given = {name: value for name, value in values.items() if name not in ignored}
    try:
        with quiet():
            return cls.config_class(**given)
    except Exception as error:
        raise UsageError(f"{option}: not a configuration of {cls.__name__}: {describe_error(error)}") from None


def describe_error(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the advice and the progress bars of transformers."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
