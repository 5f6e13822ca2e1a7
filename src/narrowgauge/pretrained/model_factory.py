"""A model with weights in a folder, with LoRA adapters or without, as the ``model`` of a Task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from narrowgauge import hardware
from narrowgauge.pretrained import adapters
from narrowgauge.pretrained.fingerprint import compute_fingerprint
from narrowgauge.pretrained.folder import PretrainedFolder, open_folder
from narrowgauge.pretrained.load import fill, load_matched
from narrowgauge.pretrained.lora_options import CONFIG, WEIGHTS, LoraOptions
from narrowgauge.pretrained.match import Match, match_weights
from narrowgauge.pretrained.tensor_readers import DryReader
from narrowgauge.pretrained.transformers_model import FoundModel
from narrowgauge.recipe import Recipe
from narrowgauge.task import ModelLoader


@dataclass(frozen=True)
class PretrainedModel(ModelLoader):
    """Makes the model of a folder: in FP32 by calling it, in the form of a recipe by ``load``."""

    found: FoundModel
    """The class, the configuration and the folder."""
    lora: LoraOptions | None = None
    """The adapters to train; None: all weights are trained."""

    @property
    def reloads_frozen(self) -> bool:
        """Whether a checkpoint needs only what is trained, because ``load`` gives all other weights their values."""
        return self.lora is not None and self.found.weights is not None

    def __call__(self) -> nn.Module:
        """Make the model in FP32 on torch's default device; without weights on the meta device or a simulated GPU."""
        device = torch.get_default_device()
        without = hardware.is_assumed() or device.type == "meta"
        if not without and self._is_quantized:
            return self.load("fp32", device)
        model = replace(self.found, weights=None).make() if without else self.found.make()
        return self._add_adapters(model, device, without)

    @property
    def _is_quantized(self) -> bool:
        """Whether transformers would not load the weights in FP32."""
        weights = self.found.weights
        return weights is not None and open_folder(weights, self.found.option).quantization is not None

    def match(self) -> Match:
        """Compare the files with the model, and add adapters to it, without reading weights.

        Raises:
            UsageError: The files are damaged, the weights are not those of the model, or an adapter does not fit it.
        """
        assert self.found.weights is not None
        match = match_weights(self.found, open_folder(self.found.weights, self.found.option))
        if self.lora is not None:
            adapters.inject(match.model, self.lora)
            if self.lora.folder is not None:
                adapters.match_weights(match.model, self.lora.folder, self.lora.option)
        return match

    def list_sources(self, folder: PretrainedFolder) -> dict[str, dict[str, str]]:
        """Return the folders that a run with adapters reads again when it is resumed, with their fingerprints.

        Args:
            folder: The opened folder of the model.
        """
        found = {"base": describe_source(folder)}
        if self.lora is not None and self.lora.folder is not None:
            own = self.lora.folder
            fingerprint = compute_fingerprint([own / CONFIG, own / WEIGHTS], self.lora.option)
            found["adapter"] = {"folder": str(own), "fingerprint": fingerprint}
        return found

    def load(
        self, recipe: str | Recipe, device: torch.device | str, notify: Callable[[str], None] | None = None
    ) -> nn.Module:
        """Load the model in the form in which a recipe trains it. See ``load_model``."""
        match = self.match()
        model = load_matched(match, recipe, device, notify)
        return self._add_adapters(model, torch.device(device), injected=match.conversion is None)

    def _add_adapters(
        self, model: nn.Module, device: torch.device, without_values: bool = False, injected: bool = False
    ) -> nn.Module:
        """Add adapters, if there are any, and give them memory and values."""
        if self.lora is not None:
            if not injected:
                adapters.inject(model, self.lora)
            adapters.allocate(model, device)
            if not without_values:
                adapters.initialize(model, self.lora)
        return model

    def prepare_dry_run(self) -> Callable[[str | Recipe, torch.device | str], nn.Module]:
        """Return a function that does what ``load`` does on a simulated GPU, and reads no weights. Call it once."""
        match = self.match()

        def dry_run(recipe: str | Recipe, device: torch.device | str) -> nn.Module:
            target = torch.device(device)
            if match.conversion is not None:
                with target:
                    made = replace(self.found, weights=None).make()
            else:
                made = fill(match, recipe, target, DryReader(target), lambda line: None)
            return self._add_adapters(made, target, without_values=True, injected=match.conversion is None)

        return dry_run


def describe_source(folder: PretrainedFolder) -> dict[str, str]:
    """Return the path of a model's folder, and the fingerprint of its configuration and weights."""
    paths = {folder.path / "config.json", *(tensor.file for tensor in folder.tensors.values())}
    return {"folder": str(folder.path), "fingerprint": compute_fingerprint(paths, folder.option)}
