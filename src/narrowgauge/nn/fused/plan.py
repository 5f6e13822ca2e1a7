"""How one block is computed: its description, the formats of its projections, and its tensors in a fixed order."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.nn.blocks.output_capturing import is_idle
from narrowgauge.nn.blocks.projections import find_projection
from narrowgauge.nn.blocks.settings import Settings, WatchedSettings, read_settings
from narrowgauge.nn.blocks.spec import AttentionSpec, BlockSpec, NormSpec
from narrowgauge.nn.fused.casts import NormWeights, Projection
from narrowgauge.nn.module_changes import original_class
from narrowgauge.nn.products.gemm import Fp8Caster
from narrowgauge.scaling.tensor import TensorScales
from narrowgauge.weight_copies.casts import BoundWeight


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
    holds_gradients: bool = False
    """Whether gradients of parameters stay until the optimizer's step; not if they are released in backward."""
    path: str = ""
    """Path of the block in the model, for event listeners."""
    own: tuple[str, ...] = ()
    """Names of the parameters that only the model's own attention uses."""
    classes: tuple[tuple[str, type[Any]], ...] = ()
    """Paths and classes of the block's modules when it was converted."""
    cross: tuple[Projection, ...] = ()
    """Cross-attention's projections: of the query, of key and value, and of the output."""
    settings: Settings = ()
    """What the block's modules held when it was described."""
    activations: str = "bf16"
    """What is kept for backward: bf16, normalized, 8bit or recompute, as in a recipe."""
    tile_rows: int | None = None
    """Rows of a tile of the MLP, where backward runs it again (``tiles``); 0: no tiles; None: chosen by memory."""
    offload: bool = False
    """Whether the input of a block that is recomputed waits for backward in host memory (``offload``)."""

    @property
    def keeps_normalized(self) -> bool:
        """Whether norms keep normalized rows in BF16, where they can."""
        return self.activations in ("normalized", "8bit")

    def caster(self, record: bool, evaluating: bool = False) -> Fp8Caster | None:
        return Fp8Caster(self.scales, record, evaluating) if self.scales is not None else None

    @functools.cached_property
    def without_fp8(self) -> BlockPlan:
        """The plan with BF16 in place of FP8, where weights are not stored in FP8."""
        qkv, out, up, down, *cross = (
            part if part.weight.stored_scale is not None else replace(part, choice=part.choice.without_fp8)
            for part in self.projections
        )
        return replace(self, qkv=qkv, out=out, up=up, down=down, cross=tuple(cross))

    def for_first_step(self) -> BlockPlan:
        """Return the plan for a step whose scales are not known yet: kernels cannot write FP8 directly then, so the
        block is recomputed, and no later step takes more memory."""
        scales = self.scales
        if not self.keeps_normalized or scales is None or scales.mode != "delayed" or scales.delayed:
            return self
        return replace(self, checkpoint="full")

    def with_own_attention(self) -> BlockPlan:
        """Return the plan for a call with arguments that the fast form of attention does not know."""
        return replace(self, spec=replace(self.spec, attention=AttentionSpec()))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tensors each field of ``BlockTensors`` has."""
        inputs, ups, cross = len(self.spec.inputs), len(self.spec.ups), self.spec.cross
        of_cross = (1, 1, 1, 1, len(cross.inputs), len(cross.inputs), 1, 1) if cross is not None else (0,) * 8
        adapters = (len(self.spec.adapters),) * 2
        return (1, 1, inputs, inputs, 1, 1, 1, 1, ups, ups, 1, 1, 1, 1, 1, 1, len(self.own), *of_cross, *adapters)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All projections, in the order of ``list_groups``."""
        return self.qkv, self.out, self.up, self.down, *self.cross

    def without_frozen(self, tensors: BlockTensors) -> BlockPlan:
        """Return the plan for a call with these parameters: without gradients of projections that are frozen."""
        pairs = list(zip(self.projections, list_groups(tensors), strict=False))
        present = [[weight for weight in group if weight is not None] for _, group in pairs]
        trained = [not group or any(weight.requires_grad for weight in group) for group in present]
        if all(trained):
            return self
        qkv, out, up, down, *cross = [
            part if is_trained else part.frozen for part, is_trained in zip(self.projections, trained, strict=True)
        ]
        return replace(self, qkv=qkv, out=out, up=up, down=down, cross=tuple(cross))


class Dropout(NamedTuple):
    """Probabilities in one call: of attention's branch, of the MLP's branch, of attention's weights, after the
    activation, and of cross-attention's branch; the modules that drop whole branches; and the probabilities of all
    adapters, or none if they are 0."""

    branch1: float = 0.0
    branch2: float = 0.0
    attention: float = 0.0
    mlp: float = 0.0
    cross: float = 0.0
    depth1: nn.Module | None = None
    depth2: nn.Module | None = None
    adapters: tuple[float, ...] = ()


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
    scale1: Some
    scale2: Some
    own: Some
    cross_norm: Some = ()
    cross_norm_bias: Some = ()
    query: Some = ()
    query_bias: Some = ()
    source: Some = ()
    """Of key and value, which read an encoder's output."""
    source_biases: Some = ()
    cross_out: Some = ()
    cross_out_bias: Some = ()
    adapters_a: Some = ()
    adapters_b: Some = ()

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

    watched: WatchedSettings
    """What the block's modules hold."""

    def __init__(self, module: nn.Module, plan: BlockPlan) -> None:
        spec = self.spec = plan.spec
        self.settings = plan.settings
        self._module = weakref.ref(module)
        self._slots: list[list[tuple[dict[str, Any], str]]] = []
        self._edges: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
        self._is_same = list_classes(module) == plan.classes
        if not self._is_same:
            return
        self._edges = [
            (parent._modules, name, child)
            for path, parent in module.named_modules()
            for name, child in parent._modules.items()
            if child is not None and not _is_inside(f"{path}.{name}" if path else name, spec.mlp)
        ]
        norms = (spec.norm1, spec.norm2, spec.branch1.norm, spec.branch2.norm)
        norm1, norm2, post1, post2 = ((None, None) if n is None else n.parameters for n in norms)
        inputs, (out,), ups, (down,) = (
            [_name_parameters(module, path) for path in group]
            for group in (spec.inputs, (spec.output,), spec.ups, (spec.down or None,))
        )
        groups: list[Sequence[str | None]] = [
            norm1[:1], norm1[1:], [names[0] for names in inputs], [names[1] for names in inputs], out[:1], out[1:],
            norm2[:1], norm2[1:], [names[0] for names in ups], [names[1] for names in ups], down[:1], down[1:],
            post1[:1], post2[:1], [spec.branch1.scale], [spec.branch2.scale], plan.own,
        ]  # fmt: skip
        if spec.cross is not None:
            norm = spec.cross.norm.parameters
            groups += [norm[:1], norm[1:]]
            for group in spec.cross_products:
                weights, biases = zip(*(_name_parameters(module, path) for path in group), strict=True)
                groups += [weights, biases]
        groups += [()] * (len(BlockTensors._fields) - 2 - len(groups))
        groups += [[f"{one.a}.weight" for one in spec.adapters], [f"{one.b}.weight" for one in spec.adapters]]
        self._slots = [[_find_slot(module, name) for name in group] for group in groups]
        self.watched = WatchedSettings(module, plan.settings)

    def __reduce__(self) -> Any:
        """Leave no parts of this block in copies of whatever holds them."""
        return type(None), ()

    def are_those_of(self, module: nn.Module, plan: BlockPlan) -> bool:
        """Whether these are the parts of a module as its plan knows them."""
        same = self.spec.linears == plan.spec.linears and self.settings is plan.settings
        return same and self._module() is module

    def are_intact(self) -> bool:
        """Whether no submodule was replaced, hooked, or given a forward of its own since conversion."""
        if not self._is_same:
            return False
        for siblings, name, child in self._edges:
            state = child.__dict__
            if siblings.get(name) is not child or "forward" in state:
                return False
            if state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
                return False
            if state["_forward_hooks"] and not all(map(is_idle, state["_forward_hooks"].values())):
                return False
        return True

    def gather(self) -> BlockTensors:
        """Return the block's parameters in the order of its plan."""
        return BlockTensors(*(tuple(owner.get(name) for owner, name in group) for group in self._slots))


def _is_inside(path: str, mlp: str) -> bool:
    """Whether a module is the MLP of a "half", or inside of it: that runs as a module."""
    return bool(mlp) and f"{path}.".startswith(f"{mlp}.")


_NOTHING: dict[str, Any] = {}


def _name_parameters(module: nn.Module, path: str | None) -> tuple[str | None, str | None]:
    """Return the names of weight and bias of a norm or a projection."""
    return (None, None) if path is None else find_projection(module, path).parameters


def _find_slot(module: nn.Module, name: str | None) -> tuple[dict[str, Any], str]:
    """Return the dictionary that holds a parameter, and its key."""
    if name is None:
        return _NOTHING, ""
    owner, _, last = name.rpartition(".")
    return module.get_submodule(owner)._parameters, last


def list_classes(module: nn.Module) -> tuple[tuple[str, type[Any]], ...]:
    """Return the paths and the original classes of a block's modules."""
    return tuple((path, original_class(part)) for path, part in module.named_modules() if path)


def list_own_parameters(module: nn.Module, spec: BlockSpec) -> tuple[str, ...]:
    """Return the names of parameters that belong to no norm and no projection of the description."""
    paths = [*spec.linears]
    paths += [path for adapter in spec.adapters for path in (adapter.a, adapter.b)]
    known = {name for path in paths for name in find_projection(module, path).parameters}
    known |= {name for norm in spec.norms for name in norm.parameters}
    known |= {branch.scale for branch in (spec.branch1, spec.branch2) if branch.scale is not None}
    return tuple(name for name, _ in module.named_parameters() if name not in known and not _is_inside(name, spec.mlp))


def list_settings(module: nn.Module, spec: BlockSpec, ignored: Collection[str] = ()) -> Settings:
    """Return what a block's modules hold, apart from what calls read anew, and from modules that run as they are."""
    cross = None if spec.cross is None else spec.cross.dropout
    read = [spec.branch1.dropout, spec.branch2.dropout, spec.dropout, spec.attention.dropout, cross]
    read += [adapter.dropout for adapter in spec.adapters]
    run = [path for path in (spec.mlp, spec.branch1.depth, spec.branch2.depth) if path]
    return read_settings(module, run, read, ignored)


class BlockWeights(NamedTuple):
    """The weights of a block's projections for one forward and its backward."""

    qkv: BoundWeight
    out: BoundWeight
    up: BoundWeight
    down: BoundWeight
    cross: tuple[BoundWeight, ...] = ()
    """As in ``BlockPlan.cross``."""

    def flatten(self) -> tuple[BoundWeight, ...]:
        return self.qkv, self.out, self.up, self.down, *self.cross

    @staticmethod
    def unflatten(uses: Sequence[BoundWeight]) -> BlockWeights:
        qkv, out, up, down, *cross = uses
        return BlockWeights(qkv, out, up, down, tuple(cross))


def bind_weights(plan: BlockPlan, tensors: BlockTensors, needed: bool, again: bool = False) -> BlockWeights:
    """Bind the projections' weights; without ``needed`` no site records them."""
    kept = needed and (again or plan.checkpoint != "full")
    uses = []
    for part, weights in zip(plan.projections, list_groups(tensors), strict=False):
        seen = again and part.choice.output == "fp8"  # if not, backward is the first to cast it to FP8
        uses.append(part.weight.use(*_present(weights), record=needed, seen=seen, backward=kept))
    return BlockWeights.unflatten(uses)


def list_groups(tensors: BlockTensors) -> tuple[Some, ...]:
    """Return the weights of each projection; those of cross-attention, which may not exist, at the end."""
    return tensors.inputs, tensors.out, tensors.ups, tensors.down, tensors.query, tensors.source, tensors.cross_out


def _present(group: Some) -> list[Tensor]:
    return [tensor for tensor in group if tensor is not None]


def bind_norm(spec: NormSpec | None, weight: Some, bias: Some = (None,)) -> NormWeights | None:
    """Return a norm with its parameters, or None for a block without it."""
    (w,), (b,) = weight, bias
    return None if spec is None or w is None else NormWeights.of(spec, w, b)


def _bind_without_weight(spec: NormSpec, like: Tensor) -> NormWeights:
    """Return a norm without weight: kernels multiply by ones, and nobody reads their gradient."""
    return NormWeights(spec, torch.ones(spec.width, device=like.device), None)


def bind_norms(spec: BlockSpec, tensors: BlockTensors) -> tuple[NormWeights | None, NormWeights | None]:
    """Return a block's two norms with their parameters."""
    like = next(tensor for tensor in tensors.flatten() if tensor is not None)
    pairs = ((spec.norm1, tensors.norm1, tensors.norm1_bias), (spec.norm2, tensors.norm2, tensors.norm2_bias))
    first, second = (
        _bind_without_weight(norm, like) if norm is not None and norm.width else bind_norm(norm, weight, bias)
        for norm, weight, bias in pairs
    )
    return first, second


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
