"""How one block is computed: its description, the formats of its projections, and its tensors in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.spec import AttentionSpec, BlockSpec
from narrowgauge.nn.fused.casts import NormWeights, Projection
from narrowgauge.nn.module_changes import original_class
from narrowgauge.nn.products.gemm import Fp8Caster
from narrowgauge.nn.products.weight_casts import BoundWeight
from narrowgauge.scaling.tensor import TensorScales


@dataclass(frozen=True)
class BlockPlan:
    """A block's description with the formats that conversion chose."""

    spec: BlockSpec
    qkv: Projection
    out: Projection
    up: Projection
    down: Projection
    scales: TensorScales | None = None
    checkpoint: str = "none"
    path: str = ""
    """Path of the block in the model, for event listeners."""
    own: tuple[str, ...] = ()
    """Names of the parameters that only the model's own attention uses."""
    classes: tuple[tuple[str, type[Any]], ...] = ()
    """Paths and classes of the block's modules when it was converted."""

    def caster(self, record: bool, evaluating: bool = False) -> Fp8Caster | None:
        return Fp8Caster(self.scales, record, evaluating) if self.scales is not None else None

    def with_own_attention(self) -> BlockPlan:
        """Return the plan for a call with arguments that the fast form of attention does not know."""
        return replace(self, spec=replace(self.spec, attention=AttentionSpec()))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tensors each field of ``BlockTensors`` has."""
        inputs, ups = len(self.spec.inputs), len(self.spec.ups)
        return (1, 1, inputs, inputs, 1, 1, 1, 1, ups, ups, 1, 1, 1, 1, len(self.own))


class Dropout(NamedTuple):
    """Probabilities in one call: of attention's branch, of the MLP's branch, and of attention's weights."""

    branch1: float = 0.0
    branch2: float = 0.0
    attention: float = 0.0


NO_DROPOUT = Dropout()
Some = tuple[Tensor | None, ...]


class BlockTensors(NamedTuple):
    """The parameters of a block, or their gradients; each field is a tuple, with None for what does not exist."""

    norm1: Some
    norm1_bias: Some
    inputs: Some
    input_biases: Some
    out: Some
    out_bias: Some
    norm2: Some
    norm2_bias: Some
    ups: Some
    up_biases: Some
    down: Some
    down_bias: Some
    post1: Some
    post2: Some
    own: Some

    def flatten(self) -> tuple[Tensor | None, ...]:
        return tuple(tensor for group in self for tensor in group)

    @staticmethod
    def unflatten(plan: BlockPlan, flat: Sequence[Tensor | None]) -> BlockTensors:
        groups, start = [], 0
        for size in plan.sizes:
            groups.append(tuple(flat[start : start + size]))
            start += size
        return BlockTensors(*groups)


class BlockParts:
    """The submodules of one block, looked up once. A call only checks that they are in place and have no hooks."""

    def __init__(self, module: nn.Module, plan: BlockPlan) -> None:
        spec = self.spec = plan.spec
        self._slots: list[list[tuple[dict[str, Any], str]]] = []
        self._edges: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
        self._is_same = list_classes(module) == plan.classes
        if not self._is_same:
            return
        self._edges = [
            (parent._modules, name, child)
            for parent in module.modules()
            for name, child in parent._modules.items()
            if child is not None
        ]
        post1, post2 = (None if norm is None else norm.path for norm in (spec.post1, spec.post2))
        groups: list[list[tuple[str | None, str]]] = [
            [(spec.norm1.path, "weight")], [(spec.norm1.path, "bias")],
            [(path, "weight") for path in spec.inputs], [(path, "bias") for path in spec.inputs],
            [(spec.output, "weight")], [(spec.output, "bias")],
            [(spec.norm2.path, "weight")], [(spec.norm2.path, "bias")],
            [(path, "weight") for path in spec.ups], [(path, "bias") for path in spec.ups],
            [(spec.down, "weight")], [(spec.down, "bias")],
            [(post1, "weight")], [(post2, "weight")], [_split(name) for name in plan.own],
        ]  # fmt: skip
        self._slots = [
            [(_NOTHING if path is None else module.get_submodule(path)._parameters, name) for path, name in group]
            for group in groups
        ]

    def are_intact(self) -> bool:
        """Whether no submodule was replaced, hooked, or given a forward of its own since conversion."""
        if not self._is_same:
            return False
        for siblings, name, child in self._edges:
            state = child.__dict__
            if siblings.get(name) is not child or "forward" in state:
                return False
            if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"]:
                return False
            if state["_backward_pre_hooks"]:
                return False
        return True

    def gather(self) -> BlockTensors:
        """Return the block's parameters in the order of its plan."""
        return BlockTensors(*(tuple(owner.get(name) for owner, name in group) for group in self._slots))


_NOTHING: dict[str, Any] = {}


def _split(name: str) -> tuple[str, str]:
    owner, _, last = name.rpartition(".")
    return owner, last


_parts: WeakKeyDictionary[nn.Module, BlockParts] = WeakKeyDictionary()


def get_parts(plan: BlockPlan, module: nn.Module) -> BlockParts:
    """Return the parts of a block; a copy of a model has its own."""
    found = _parts.get(module)
    if found is None or found.spec.linears != plan.spec.linears:
        found = _parts[module] = BlockParts(module, plan)
    return found


def list_classes(module: nn.Module) -> tuple[tuple[str, type[Any]], ...]:
    """Return the paths and the original classes of a block's modules."""
    return tuple((path, original_class(part)) for path, part in module.named_modules() if path)


def list_own_parameters(module: nn.Module, spec: BlockSpec) -> tuple[str, ...]:
    """Return the names of parameters that belong to no norm and no projection of the description."""
    known = {f"{path}.{name}" for path in (*spec.linears, *(n.path for n in spec.norms)) for name in ("weight", "bias")}
    return tuple(name for name, _ in module.named_parameters() if name not in known)


class BlockWeights(NamedTuple):
    """The weights of a block's projections for one forward and its backward."""

    qkv: BoundWeight
    out: BoundWeight
    up: BoundWeight
    down: BoundWeight


def bind_weights(plan: BlockPlan, tensors: BlockTensors, needed: bool, again: bool = False) -> BlockWeights:
    """Bind the projections' weights; without ``needed`` no site records them."""
    kept = needed and (again or plan.checkpoint != "full")
    options: dict[str, Any] = {"record": needed, "seen": again, "backward": kept}
    groups = zip(
        (plan.qkv, plan.out, plan.up, plan.down),
        (tensors.inputs, tensors.out, tensors.ups, tensors.down),
        strict=True,
    )
    return BlockWeights(*(part.weight.use(*_present(weights), **options) for part, weights in groups))


def _present(group: Some) -> list[Tensor]:
    return [tensor for tensor in group if tensor is not None]


def bind_norm(spec: Any, weight: Some, bias: Some = (None,)) -> NormWeights:
    (w,), (b,) = weight, bias
    assert w is not None
    return NormWeights.of(spec, w, b)


def join_biases(biases: Some, weights: Some, dtype: torch.dtype, transposed: bool) -> Tensor | None:
    """Return the biases of stacked projections as one, with zeros for a projection without; None if none has one."""
    if all(bias is None for bias in biases):
        return None
    if len(biases) == 1:
        (only,) = biases
        assert only is not None
        return only.detach().to(dtype)
    parts = []
    for bias, weight in zip(biases, weights, strict=True):
        assert weight is not None
        size = weight.shape[1 if transposed else 0]
        parts.append(weight.new_zeros(size, dtype=dtype) if bias is None else bias.detach().to(dtype))
    return torch.cat(parts)
