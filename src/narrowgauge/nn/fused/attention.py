"""Attention inside a fused block: from the output of the input projections to the input of the output projection.

    plain    torch's fused attention on views of qkv; of packed documents, each by itself
    rotary   the same, with queries and keys normed and rotated by one kernel
    own      the model's own code, whatever it does: the block's forward is called with its first norm and its input
             projections replaced by the tensors that exist already, and ends when it reaches the output projection

Forward runs attention in its own autograd graph, with leaves for what it reads. Backward asks that graph for the
gradients of the leaves. So masks, caches, windows, soft-capping, dropout and relative positions need no code here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge import events
from narrowgauge.kernels import rotary
from narrowgauge.kernels.document_attention import attend_documents
from narrowgauge.nn.blocks import multihead
from narrowgauge.nn.blocks.angles import expand_angles, read_angles
from narrowgauge.nn.blocks.multihead import is_self_attention
from narrowgauge.nn.blocks.projections import find_called, find_projection
from narrowgauge.nn.blocks.spec import AttentionSpec, BlockSpec
from narrowgauge.nn.fused.casts import cast_grad_output, cast_heads_grad, cast_heads_input, cast_input
from narrowgauge.nn.fused.documents import Documents
from narrowgauge.nn.fused.plan import BlockPlan, BlockTensors
from narrowgauge.nn.module_changes import Change
from narrowgauge.nn.products.gemm import Fp8Caster, is_graph_retained
from narrowgauge.nn.side_effects import StateBefore
from narrowgauge.scaling.operand import Operand

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Names of arguments that hold the keys and values of earlier tokens."""
_active = threading.local()


Answers = dict[int, Callable[[tuple[Any, ...], dict[str, Any]], Any]]
"""What modules return instead of computing, from their arguments, by the modules' ids."""


class OutputReached(Exception):
    """The model's code has called the output projection, with this tensor."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class OutputNotReached(RuntimeError):
    """The model's code has not called the output projection: this time it skips attention, perhaps at random."""


class PartOfBlock(Change):
    """A norm or projection of a fused block. While the model's own attention runs, it returns what exists already."""

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        answers: Answers | None = getattr(_active, "answers", None)
        answer = None if answers is None else answers.get(id(module))
        return inner(*args, **kwargs) if answer is None else answer(args, kwargs)


@dataclass
class BlockCall:
    """One call of a block: the module, its own forward, and the arguments besides the hidden state."""

    module: nn.Module
    inner: Callable[..., Any]
    name: str
    """The hidden state's name."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    """The dtype of autocast around the call, in which the model's own code runs."""
    documents: Documents | None = None
    """In place of a mask that says the same."""
    recomputation: Callable[[], AbstractContextManager[Any]] | None = None
    """Makes the context of a forward that backward runs again."""
    before: StateBefore | None = None
    """What modules held before the model's own code ran, if backward runs it again: only in a call for that."""

    @property
    def differentiable(self) -> list[Tensor]:
        """The arguments that need gradients, such as a position bias."""
        return [value for value in self.kwargs.values() if isinstance(value, Tensor) and value.requires_grad]

    def invoke(self, x: Tensor, replaced: list[Tensor]) -> Any:
        """Call the block's own forward, with these tensors for the differentiable arguments."""
        others = iter(replaced)
        kwargs = {
            name: next(others) if isinstance(value, Tensor) and value.requires_grad else value
            for name, value in self.kwargs.items()
        }
        return self.inner(**{self.name: x}, **kwargs)

    def find_mask(self, spec: AttentionSpec) -> Tensor | None:
        """Return the mask that the fast forms of attention read."""
        return None if spec.mask is None else self.kwargs.get(spec.mask)

    def get_cache_number(self, spec: BlockSpec) -> int | None:
        """Return the layer's number in a cache of keys and values, as its attention module holds it."""
        called = [spec.get_called(path) for path in (spec.output, spec.inputs[0])]
        owners = [self.module.get_submodule(path.rpartition(".")[0]) for path in called]
        numbers = [getattr(owner, "layer_idx", None) for owner in owners]
        return next((number for number in numbers if isinstance(number, int)), None)

    def has_filled_cache(self, spec: BlockSpec) -> bool:
        """Whether a cache was passed that holds keys already, or whose entry for this layer is unknown."""
        caches = [self.kwargs[name] for name in CACHES if self.kwargs.get(name) is not None]
        number = self.get_cache_number(spec)
        crossed = [getattr(cache, "is_updated", None) for cache in caches]  # of cross-attention, by layer
        if any(isinstance(updated, dict) and updated.get(number) for updated in crossed):
            return True
        return any(number is None or cache.get_seq_length(number) for cache in caches)

    def has_cache(self) -> bool:
        """Whether a cache was passed."""
        return any(self.kwargs.get(name) is not None for name in CACHES)

    def without_cache(self) -> BlockCall:
        """Return the call without the caches, to which another run must not write."""
        kwargs = {name: None if name in CACHES else value for name, value in self.kwargs.items()}
        return replace(self, kwargs=kwargs)

    def for_recomputation(self, before: StateBefore | None) -> BlockCall:
        """Return the call as backward runs it again; None if it does not run the model's own code."""
        return replace(self.without_cache(), before=before)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Context manager for the model's own code: if it runs again, it computes as before and leaves nothing."""
        with ExitStack() as stack:
            if self.before is not None:
                stack.enter_context(self.before.again())
                if self.recomputation is not None:
                    stack.enter_context(self.recomputation())
            yield

    def fill_cache(self, spec: BlockSpec, keys: Tensor, values: Tensor) -> None:
        """Write keys and values to an empty cache that was passed along, as the model's own attention does."""
        for name in CACHES:
            cache = self.kwargs.get(name)
            if cache is not None:
                cache = getattr(cache, "self_attention_cache", cache)  # of an encoder and a decoder
                cache.update(keys.detach(), values.detach(), self.get_cache_number(spec))


@dataclass
class Attended:
    """Attention's result, and what its backward needs."""

    mixed: Tensor
    """[B, H, T, S], or rows of tokens from the model's own code."""
    leaves: tuple[Tensor, ...] = ()
    """Leaves of attention's autograd graph: queries, keys and values, or qkv; then differentiable arguments."""
    rotated: tuple[Tensor, ...] = ()
    """cos, sin, 1 / rms and, with norms, qkv."""
    recorded: bool = False
    """Part of a CUDA graph, which runs again: backward must not free anything."""


def attend(
    plan: BlockPlan, qkv: Tensor, call: BlockCall, tensors: BlockTensors, needed: bool, dropout: float = 0.0
) -> Attended:
    """Run attention on qkv [B, T, O]."""
    spec = plan.spec.attention
    if spec.kind == "own":
        return _attend_by_own_code(plan.spec, qkv, call, tensors, needed)
    heads = rotary.Heads(spec.heads, spec.kv_heads, _get_head_size(plan, qkv), spec.pairs)
    rotated: tuple[Tensor, ...] = ()
    front = qkv
    if spec.kind == "rotary":
        given = read_angles(call.kwargs)
        assert given is not None
        angles = expand_angles(given, spec.angles, spec.pairs)
        q_weight, k_weight, eps = _get_norms(plan, tensors)
        saves = plan.activations != "bf16" or plan.checkpoint == "full"
        spare = q_weight is None and needed and saves and not events.wants_tensors()
        front, rstd = rotary.rotate(qkv, *angles, heads, q_weight, k_weight, eps, in_place=spare)
        rotated = (*angles, rstd, *([qkv] if q_weight is not None else []))
    batch, length, _ = qkv.shape
    counts = (heads.queries, heads.keys, heads.keys)
    sources = (front, front, qkv)
    parts, start = [], 0
    for count, source in zip(counts, sources, strict=True):
        view = source[..., start : start + count * heads.size].view(batch, length, count, heads.size).transpose(1, 2)
        parts.append(view.detach().requires_grad_(needed))
        start += count * heads.size
    q, k, v = parts
    call.fill_cache(plan.spec, k, v)
    mask, grouped, documents = call.find_mask(spec), heads.queries != heads.keys, call.documents
    causal = documents is not None or (spec.causal and mask is None)
    with torch.set_grad_enabled(needed):
        if documents is not None and documents.bounds is not None:
            mixed = attend_documents(q, k, v, documents.bounds, documents.longest, dropout, spec.scale)
        else:
            mixed = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal, scale=spec.scale, enable_gqa=grouped
            )
    return Attended(mixed, tuple(parts), rotated)


def attend_backward(
    plan: BlockPlan,
    attended: Attended,
    grad: Tensor,
    shape: torch.Size,
    tensors: BlockTensors,
    caster: Fp8Caster | None,
    needs_own: tuple[bool, ...],
) -> tuple[Operand, list[Tensor | None], list[Tensor | None]]:
    """Return qkv's gradient as products read it, and the gradients of own parameters and differentiable arguments.

    ``grad`` is the gradient of the output projection's input, as rows; ``shape`` is that of the hidden state.
    """
    spec, again = plan.spec.attention, is_graph_retained() or attended.recorded
    if spec.kind == "own":
        own = [p for p, needs in zip(tensors.own, needs_own, strict=True) if needs and p is not None]
        wanted = [*attended.leaves, *own]
        found = torch.autograd.grad(
            attended.mixed, wanted, grad.view(attended.mixed.shape).to(attended.mixed.dtype), retain_graph=again,
            allow_unused=True,
        )  # fmt: skip
        count = len(attended.leaves)
        of_qkv = found[0]
        assert of_qkv is not None
        of_own = iter(found[count:])
        rows = of_qkv.reshape(-1, of_qkv.shape[-1])
        return (
            cast_grad_output(plan.qkv, rows, caster),
            [
                next(of_own) if needs and p is not None else None
                for p, needs in zip(tensors.own, needs_own, strict=True)
            ],
            list(found[1:count]),
        )
    batch, length, _ = shape
    size = attended.mixed.shape[-1]
    grad = grad.view(batch, length, spec.heads, size).transpose(1, 2).to(attended.mixed.dtype)
    parts = torch.autograd.grad(attended.mixed, attended.leaves, grad, retain_graph=again)
    grads_own: list[Tensor | None] = [None] * len(tensors.own)
    if spec.kind == "rotary":
        heads = rotary.Heads(spec.heads, spec.kv_heads, size, spec.pairs)
        cos, sin, rstd, *source = attended.rotated
        q_weight, k_weight, _ = _get_norms(plan, tensors)
        front, of_q, of_k = rotary.rotate_backward(
            parts[0], parts[1], source[0] if source else _join_shape(parts, batch, length), cos, sin, heads,
            q_weight, k_weight, rstd,
        )  # fmt: skip
        if of_q is not None:
            grads_own = _place_norm_grads(plan, of_q, of_k)
        cut = front.view(batch, length, spec.heads + spec.kv_heads, size).transpose(1, 2)
        parts = (cut[:, : spec.heads], cut[:, spec.heads :], parts[2])
    return cast_heads_grad(parts, plan.qkv, caster), grads_own, []


def make_operand_of(plan: BlockPlan, attended: Attended, caster: Fp8Caster | None, needed: bool) -> Operand:
    """Return attention's output in the formats of the output projection, one row per token."""
    mixed, reader = attended.mixed.detach(), plan.out
    if plan.spec.attention.kind != "own":
        return cast_heads_input(mixed, reader, caster, needed)
    return cast_input(reader, mixed.reshape(-1, mixed.shape[-1]), caster, needed)


def _attend_by_own_code(spec: BlockSpec, qkv: Tensor, call: BlockCall, tensors: BlockTensors, needed: bool) -> Attended:
    module = call.module
    leaf = qkv.detach().requires_grad_(needed)
    others = [argument.detach() for argument in call.differentiable]
    if call.autocast is not None:  # a position bias is often transposed in memory: 16-bit kernels do not read it so
        others = [argument.contiguous() for argument in others]
    others = [argument.requires_grad_(needed) for argument in others]
    x = qkv.new_empty(()).expand(*qkv.shape[:-1], find_projection(module, spec.output).shape[0])
    with torch.set_grad_enabled(needed):
        try:
            run_with_answers(call, x, _make_answers(spec, module, leaf), others)
        except OutputReached as reached:
            return Attended(reached.value, (leaf, *others))
    raise OutputNotReached("the block's forward no longer reaches its output projection")


def run_with_answers(call: BlockCall, x: Tensor, answers: Answers, others: list[Tensor] | None = None) -> Any:
    """Call the block's own forward while its parts answer; ``others`` replace the differentiable arguments."""
    before, _active.answers = getattr(_active, "answers", None), answers
    dtype, fast_path = call.autocast, torch.backends.mha.get_fastpath_enabled()
    # in evaluation nn.TransformerEncoderLayer may call one kernel for everything, and none of its modules
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            call.repeating(),
            torch.autocast(x.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None),
        ):
            return call.invoke(x, call.differentiable if others is None else others)
    finally:
        _active.answers = before
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _make_answers(spec: BlockSpec, module: nn.Module, qkv: Tensor) -> Answers:
    """Return what the modules around attention answer: what exists already, and the output projection stops."""
    answers: Answers = {}
    if spec.order != "post" and spec.norm1 is not None:
        answers[id(module.get_submodule(spec.norm1.path))] = get_first
    sources = [find_projection(module, path) for path in spec.inputs]
    if is_self_attention(sources[0].owner):
        owner = sources[0].owner

        def attend_and_stop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            raise OutputReached(multihead.attend(owner, qkv, multihead.read_arguments(owner, args, kwargs)))

        answers[id(owner)] = attend_and_stop
        return answers
    parts = qkv.split([source.shape[0] for source in sources], -1) if len(sources) > 1 else (qkv,)
    for path, part in zip(spec.inputs, parts, strict=True):
        answers[id(find_called(module, spec, path))] = (
            lambda args, kwargs, part=part: part.view(  # type: ignore[misc]
                *get_first(args, kwargs).shape[:-1], -1
            )
        )
    answers[id(find_called(module, spec, spec.output))] = stop
    return answers


def get_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a module's first argument, as the answer of a norm."""
    first: Tensor = args[0] if args else next(iter(kwargs.values()))
    return first


def stop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """End the model's own code, as the answer of an output projection."""
    raise OutputReached(get_first(args, kwargs))


def _get_head_size(plan: BlockPlan, qkv: Tensor) -> int:
    spec = plan.spec.attention
    return qkv.shape[-1] // (spec.heads + 2 * spec.kv_heads)


def _get_norms(plan: BlockPlan, tensors: BlockTensors) -> tuple[Tensor | None, Tensor | None, float]:
    spec = plan.spec.attention
    if spec.q_norm is None or spec.k_norm is None:
        return None, None, 0.0
    by_name = dict(zip(plan.own, tensors.own, strict=True))
    weights = []
    for norm in (spec.q_norm, spec.k_norm):
        weight = by_name[norm.parameters[0]]
        assert weight is not None
        weights.append(weight.detach() + norm.offset if norm.offset else weight.detach())
    return weights[0], weights[1], spec.q_norm.eps


def _place_norm_grads(plan: BlockPlan, of_q: Tensor, of_k: Tensor | None) -> list[Tensor | None]:
    spec = plan.spec.attention
    assert spec.q_norm is not None and spec.k_norm is not None
    found = {spec.q_norm.parameters[0]: of_q, spec.k_norm.parameters[0]: of_k}
    return [found.get(name) for name in plan.own]


def _join_shape(parts: tuple[Tensor, ...], batch: int, length: int) -> Tensor:
    """Return a tensor that has only the shape and dtype of qkv, which a backward without norms does not read."""
    width = sum(part.shape[1] for part in parts) * parts[0].shape[3]
    return parts[0].new_empty(()).expand(batch, length, width)
