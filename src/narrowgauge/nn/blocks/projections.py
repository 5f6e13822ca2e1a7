"""Finds the weight and bias of a block's projection by its path.

A projection is a linear layer, or a parameter of nn.MultiheadAttention: the path ``self_attn.in_proj`` stands for the
parameters ``in_proj_weight`` and ``in_proj_bias`` of the module ``self_attn``.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from narrowgauge.nn.blocks.multihead import is_self_attention
from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.products.linear import has_transposed_weight, is_linear


class ProjectionSource(NamedTuple):
    """The module that holds a projection's parameters, and their names there."""

    path: str
    owner: nn.Module
    weight_name: str = "weight"
    bias_name: str = "bias"

    @property
    def weight(self) -> nn.Parameter:
        found = self.owner._parameters[self.weight_name]
        assert found is not None
        return found

    @property
    def is_transposed(self) -> bool:
        return has_transposed_weight(self.owner)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        first, second = self.weight.shape
        return (second, first) if self.is_transposed else (first, second)

    @property
    def parameters(self) -> tuple[str, str]:
        """The names of weight and bias, from the root."""
        return f"{self.path}.{self.weight_name}", f"{self.path}.{self.bias_name}"


def find_projection(root: nn.Module, path: str) -> ProjectionSource:
    """Return the parameters of a projection."""
    parent, _, last = path.rpartition(".")
    owner = root.get_submodule(parent)
    if not path or last in owner._modules:  # no path: the root is the layer itself
        return ProjectionSource(path, root.get_submodule(path))
    return ProjectionSource(parent, owner, f"{last}_weight", f"{last}_bias")


def find_called(root: nn.Module, spec: BlockSpec, path: str) -> nn.Module:
    """Return the module that a block calls for a projection: its linear layer, or the one that adds an adapter."""
    called = spec.get_called(path)
    return root.get_submodule(called) if called != path else find_projection(root, path).owner


def count_projections(module: nn.Module) -> int:
    """Return how many linear layers a module has; nn.MultiheadAttention counts as two."""
    return sum(2 * is_self_attention(part) or is_linear(part) for part in module.modules())
