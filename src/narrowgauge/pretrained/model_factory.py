"""A model with weights in a folder, as the ``model`` of a Task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from narrowgauge import hardware
from narrowgauge.pretrained.folder import open_folder
from narrowgauge.pretrained.load import DryReader, fill, load_matched
from narrowgauge.pretrained.match import Match, match_weights
from narrowgauge.pretrained.transformers_model import FoundModel
from narrowgauge.recipe import Recipe
from narrowgauge.task import ModelLoader


@dataclass(frozen=True)
class PretrainedModel(ModelLoader):
    """Makes the model of a folder: in FP32 by calling it, in the form of a recipe by ``load``."""

    found: FoundModel
    """The class, the configuration and the folder."""

    def __call__(self) -> nn.Module:
        """Make the model in FP32 on torch's default device; without weights on the meta device or a simulated GPU."""
        without = hardware.is_assumed() or torch.get_default_device().type == "meta"
        if without:
            return replace(self.found, weights=None).make()
        assert self.found.weights is not None
        if open_folder(self.found.weights, self.found.option).quantization is not None:
            return self.load("fp32", torch.get_default_device())
        return self.found.make()

    def match(self) -> Match:
        """Compare the files with the model, without reading weights.

        Raises:
            UsageError: The files are damaged, or the weights are not those of the model.
        """
        assert self.found.weights is not None
        return match_weights(self.found, open_folder(self.found.weights, self.found.option))

    def load(
        self, recipe: str | Recipe, device: torch.device | str, notify: Callable[[str], None] | None = None
    ) -> nn.Module:
        """Load the model in the form in which a recipe trains it. See ``load_model``."""
        return load_matched(self.match(), recipe, device, notify)

    def prepare_dry_run(self) -> Callable[[str | Recipe, torch.device | str], nn.Module]:
        """Return a function that does what ``load`` does on a simulated GPU, and reads no weights. Call it once."""
        match = self.match()

        def dry_run(recipe: str | Recipe, device: torch.device | str) -> nn.Module:
            target = torch.device(device)
            if match.conversion is not None:
                with target:
                    return replace(self.found, weights=None).make()
            return fill(match, recipe, target, DryReader(target), lambda line: None)

        return dry_run
