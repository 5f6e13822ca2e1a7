"""What a run with LoRA adapters has trained: the adapters in its checkpoints, and the base in the original folder.

    peft          the adapters alone, as PEFT stores them (peft_folder.py)
    hf, fp8       base + scale * b a in FP32, from the original weights, one tensor at a time (``MergedWeights``)

The base has to be the one that the run started from: its fingerprint is in run.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.pretrained import adapters
from narrowgauge.pretrained.folder import open_folder
from narrowgauge.pretrained.lora_options import restore_lora
from narrowgauge.pretrained.match import Match, match_weights
from narrowgauge.pretrained.model_factory import describe_source
from narrowgauge.pretrained.tensor_readers import FileReader, load_values
from narrowgauge.pretrained.transformers_model import find_model
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints.tensor_reader import TensorReader
from narrowgauge.runs.sources import compare_sources

CPU = torch.device("cpu")
ONLY_PEFT = "--format peft works for it"


@dataclass(frozen=True)
class AdapterRun:
    """A run that trained adapters, and its base on the meta device."""

    run: Path
    base: Path
    config: Mapping[str, Any]
    """The fields of adapter_config.json that decide what the adapters compute."""
    match: Match
    """The base with the adapters, and where its weights are stored."""

    def check(self, saved: TensorReader) -> None:
        """Refuse a checkpoint that does not have the weights of the adapters, and no others."""
        expected = {name: tuple(weight.shape) for name, weight in adapters.get_weights(self.match.model).items()}
        if dict(saved.shapes) != expected:
            wrong = sorted(set(saved.shapes.items()) ^ set(expected.items()))[0][0]
            raise UsageError(
                f"checkpoint {saved.path} does not hold the adapters that run.json describes: see {wrong}; restore "
                f"{self.run / record.CONFIGURATION}"
            )


def read_adapter_config(run: Path) -> dict[str, Any] | None:
    """Read from run.json what the adapters of a run compute; None: it trained all weights."""
    facts = record.read_configuration(run).get("facts") if record.holds_run(run) else None
    config = facts.get("lora") if isinstance(facts, dict) else None
    return config if isinstance(config, dict) else None


def find_adapter_run(run: Path, given: str | None) -> AdapterRun | None:
    """Find the base and the adapters of a run; None: it trained all weights.

    Args:
        run: The run folder.
        given: The folder of the base, if the user gave it. Default: what run.json says.

    Raises:
        UsageError: The base is missing, or is not the one that the run started from.
    """
    config = read_adapter_config(run)
    if config is None:
        return None
    sources = record.read_configuration(run)["facts"].get("sources")
    base = sources.get("base", {}).get("folder") if isinstance(sources, dict) else None
    folder = given if given is not None else base
    if not isinstance(folder, str):
        raise UsageError(f"{run / record.CONFIGURATION} was not written by narrowgauge train; restore it")
    option = f"--model {folder}" if given is not None else f"{run} trained adapters of {folder}"
    opened = open_folder(folder, option)
    where = "give the folder of the original model with --model"
    compare_sources(sources, {"base": describe_source(opened)}, where)
    match = match_weights(find_model(folder, {}, option, quantized=True), opened)
    adapters.inject(match.model, restore_lora(config, str(run / record.CONFIGURATION)))
    return AdapterRun(run, opened.path, config, match)


class MergedWeights:
    """The weights of a base with its adapters merged into it, with the methods of a ``TensorReader``."""

    def __init__(self, saved: TensorReader, trained: AdapterRun) -> None:
        """Find the stored tensor of each weight.

        Raises:
            UsageError: The weights cannot be read one by one, or an adapter's weight is tied to one without it.
        """
        match = trained.match
        if match.conversion is not None:
            raise UsageError(
                f"{trained.run}: adapters cannot be merged into {type(match.model).__name__}, because "
                f"{match.conversion}; {ONLY_PEFT}"
            )
        trained.check(saved)
        self.path, self.step = saved.path, saved.step
        self.shapes = {name: tuple(tensor.shape) for name, tensor in match.expected.items()}
        self._saved, self._layers = saved, adapters.find_layers(match.model)
        self._option = match.folder.option
        self._places = {id(match.expected[name]): tensor for name, tensor in match.stored.items()}
        self._ids = {name: id(tensor) for name, tensor in match.expected.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in match.expected.items()}
        names = list(self._ids.values())
        for path in self._layers:
            if names.count(self._ids[f"{path}.weight"]) > 1:
                raise UsageError(
                    f"{trained.run}: the adapter of {path} cannot be merged, because its weight is tied to another "
                    f"layer's; {ONLY_PEFT}"
                )

    @torch.no_grad()
    def read_weight(self, name: str) -> Tensor:
        """Read a weight of the base in FP32, and add what its adapter adds."""
        dtype = torch.float32 if self._dtypes[name].is_floating_point else self._dtypes[name]
        with FileReader(CPU, self._option) as reader:
            values = load_values(self._places[self._ids[name]], dtype, CPU, reader)
        layer = self._layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layer is not None:
            a, b = (self._saved.read_weight(f"{name.removesuffix('weight')}{part}") for part in _PARTS)
            values += adapters.compute_update(layer, a, b)
        return values

    def are_one_tensor(self, name: str, other: str) -> bool:
        """Whether two names stand for one tensor."""
        return self._ids[name] == self._ids[other]

    def read_engine_state(self, name: str) -> Any:
        """Read one entry of the engine's state, with the names that the layers have without adapters."""
        state = self._saved.read_engine_state(name)
        if name == "tensor_scales" and state:
            state = {**state, "sites": [site.replace(".base_layer.", ".") for site in state["sites"]]}
        return state


_PARTS = tuple(f"{part}.{adapters.NAME}.weight" for part in ("lora_A", "lora_B"))
