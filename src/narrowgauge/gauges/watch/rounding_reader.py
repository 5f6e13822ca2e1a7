"""RoundingReader: measures what block formats do to the operands of linear layers, in an update that is read.

    a run with an emulated recipe   every operand as it was rounded, all of its values: with its Hadamard transform and
                                    stochastic rounding where the recipe has them
    a prediction (``--predict``)    the operands that MXFP8, MXFP4 and NVFP4 would round, in a run in FP32 or BF16:
                                    512 blocks of 32 values for each operand of each product, to nearest

A block is rounded by itself, so a sample of whole blocks has the shares and the noise of the tensor up to the error of
sampling: about 0.5% of the values for a share of 50%, and 0.1 dB where blocks are alike. Only NVFP4's tensor scale
needs the whole tensor: its largest magnitude is read. Samples are at multiples of the golden ratio, which fall evenly
on rows and columns whatever the shape, and use no random numbers, so that training does not change.

Samples of 32 tensors are rounded at once, in some 150 small kernels; reading a tensor takes twenty more. Nothing waits
for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge import events
from narrowgauge.gauges.transforms import unwrap_transforms
from narrowgauge.gauges.watch.rounding_readings import Key
from narrowgauge.nn.products.emulated import Emulation, find_layers, list_rounded
from narrowgauge.nn.products.linear import has_transposed_weight
from narrowgauge.optim.sharded import to_local
from narrowgauge.recipe import EMULATED, NAMED, Recipe
from narrowgauge.scaling.block_error import measure_rounding
from narrowgauge.scaling.block_quantize import INPUTS, QuantizedBlocks, quantize_blocks

BLOCK = 32
"""Values of a sample that are in one block; NVFP4 has two blocks in them."""
SAMPLES = 512
_TOGETHER = 32
"""Tensors whose samples are rounded at once."""
_GOLDEN = 0.6180339887498949
_PRODUCTS = {
    "input": ("output", "grad_weight"),
    "gradient": ("grad_input", "grad_weight"),
    "weight": ("output", "grad_input"),
}
"""By operand, the products that read it: first the one that sums its last dimension, then the one that sums its first
dimension."""


@dataclass(frozen=True)
class PredictedFormats:
    """The formats that a run is measured for, with the layers that each of them would round."""

    layers: tuple[tuple[Emulation, frozenset[str]], ...]

    @staticmethod
    def of(model: nn.Module, recipe: Recipe) -> PredictedFormats:
        """Find the layers of a model. A recipe that emulates a format, or is not in FP32 or BF16, predicts none."""
        if recipe.emulate != "none" or recipe.compute not in ("fp32", "tf32", "bf16"):
            return PredictedFormats(())
        emulated = [NAMED[name].replace(keep=recipe.keep) for name in EMULATED]
        found = [(Emulation.of(one), frozenset(list_rounded(find_layers(model, one), one))) for one in emulated]
        return PredictedFormats(tuple(found))

    @property
    def paths(self) -> frozenset[str]:
        """The layers that at least one format rounds."""
        return frozenset(path for _, paths in self.layers for path in paths)


class RoundingReader(events.Listener):
    """Measures operands during one update, and keeps the numbers on the device."""

    def __init__(self, recipe: Recipe, predicted: PredictedFormats | None = None) -> None:
        self.emulation = Emulation.of(recipe) if recipe.emulate != "none" else None
        self.predicted = predicted or PredictedFormats(())
        self.paths = self.predicted.paths
        self._keys: list[Key | None] = []
        self._rows: list[Tensor] = []
        self._waiting: list[tuple[str, str, str, Tensor, Tensor]] = []
        self._gradients_of: dict[str, str] = {}
        """By layer of fused code, the product at which its gradient is read: the first one in backward."""

    def report_rounding(self, operand: str, product: str, path: str, x: Tensor, blocks: QuantizedBlocks) -> None:
        if not x.numel() or self.emulation is None:
            return
        f, rule, rounding = self.emulation.get_format(operand)
        with _apart():
            self._rows.append(measure_rounding(x, blocks).unsqueeze(0))
        self._keys.append((f.name, rule, rounding, operand, product, path))

    def report_operands(self, product: str, path: str, operands: Sequence[Any]) -> None:
        if path not in self.paths:
            return
        first = getattr(operands[0], "hp", None)
        if product == "output":
            self.add("input", path, first)
        elif self._gradients_of.setdefault(path, product) == product:
            self.add("gradient", path, first)

    def read_layer(self, path: str, inputs: Any, output: Any) -> None:
        """Read the input of a layer that hooks see, and its gradient when backward computes it."""
        if path not in self.paths or not inputs:
            return
        self.add("input", path, inputs[0])
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: self.add("gradient", path, grad))

    def read_weights(self, model: nn.Module) -> None:
        """Read the weights of all layers."""
        for path in sorted(self.paths):
            module = model.get_submodule(path)
            weight = to_local(module.get_parameter("weight").detach())
            self.add("weight", path, weight.t() if has_transposed_weight(module) else weight)

    def add(self, operand: str, path: str, tensor: Any) -> None:
        """Take samples of an operand for the two products that read it."""
        if not isinstance(tensor, Tensor):
            return
        tensor = unwrap_transforms(tensor).detach()
        if tensor.dtype not in INPUTS or not tensor.numel() or tensor.ndim < 1:
            return
        with _apart():
            x = tensor.reshape(-1, tensor.shape[-1])
            low, high = torch.aminmax(x)
            amax = torch.maximum(-low, high)
            for product, matrix in zip(_PRODUCTS[operand], (x.t(), x), strict=True):
                sample = sample_blocks(matrix)
                if operand != "weight":  # the emulation rounds inputs and gradients to BF16 first
                    sample, amax = sample.bfloat16(), amax.bfloat16()
                self._waiting.append((operand, product, path, sample.float(), amax.float()))
        if len(self._waiting) >= _TOGETHER:
            self._measure_samples()

    def collect(self) -> tuple[list[Key | None], Tensor | None]:
        """Return the keys of all rows (None: a row without a meaning), and the rows [n, 6]; None if there are none."""
        self._measure_samples()
        return self._keys, torch.cat(self._rows) if self._rows else None

    def _measure_samples(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        with _apart():
            x = torch.stack([sample for *_, sample, _ in waiting])  # [T, SAMPLES, BLOCK]
            amax = torch.stack([amax for *_, amax in waiting]).view(-1, 1, 1)
            for emulation, paths in self.predicted.layers:
                # The named recipes round all operands alike: E4M3 for gradients as well.
                f, rule, rounding = emulation.get_format("input")
                blocks = quantize_blocks(x, f, scale_rule=rule, amax=amax if f.tensor_scale else None)
                self._rows.append(measure_rounding(x, blocks, dimensions=2))
                for operand, product, path, *_ in waiting:
                    key = (f.name, rule, rounding, operand, product, path)
                    self._keys.append(key if path in paths else None)


def sample_blocks(x: Tensor, count: int = SAMPLES) -> Tensor:
    """Return ``count`` blocks of a matrix [K, N] along its first dimension, as [count, BLOCK].

    All blocks if there are fewer, and zeros for the others. A shorter last block is padded with zeros.
    """
    length, width = x.shape
    total = -(-length // BLOCK) * width
    taken = min(count, total)
    place = torch.arange(taken, dtype=torch.float64, device=x.device)
    index = place.long() if total <= count else (place * _GOLDEN % 1 * total).long().clamp_(max=total - 1)
    rows = (index // width).unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=x.device)
    found = x[rows.clamp(max=length - 1), (index % width).unsqueeze(1)]
    return F.pad(torch.where(rows < length, found, 0.0), (0, 0, 0, count - taken))


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Compute outside of the training step: without gradients, and unseen by modes that read or change functions."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
