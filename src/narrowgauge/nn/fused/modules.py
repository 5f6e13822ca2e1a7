"""The module change of fused blocks: which calls run as one function, and which as they were written."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import events
from narrowgauge.kernels.document_attention import can_attend
from narrowgauge.nn.blocks import angles
from narrowgauge.nn.blocks.example import SOURCES
from narrowgauge.nn.blocks.projections import find_called
from narrowgauge.nn.blocks.spec import BlockSpec, Place
from narrowgauge.nn.call_size import CallSize
from narrowgauge.nn.fused import blocks
from narrowgauge.nn.fused.as_written import AsWritten
from narrowgauge.nn.fused.attention import CACHES, BlockCall, OutputNotReached, PartOfBlock
from narrowgauge.nn.fused.checkpointed import choose_plan, is_checkpointed
from narrowgauge.nn.fused.documents import find_documents
from narrowgauge.nn.fused.follow_settings import Describe, FormsBySettings
from narrowgauge.nn.fused.graphs import BlockGraphs
from narrowgauge.nn.fused.modular_mlp import MakeContext, repeating, run_with_mlp
from narrowgauge.nn.fused.outputs import complete_arguments, list_passed_on, list_returned
from narrowgauge.nn.fused.plan import NO_DROPOUT, BlockParts, BlockPlan, BlockTensors, Dropout
from narrowgauge.nn.module_changes import Change, apply_change, find_change, original_class
from narrowgauge.nn.products.bf16_for_now import is_bf16_for_now
from narrowgauge.nn.recompute import Recomputed
from narrowgauge.scaling.operand import WIDE

FOR_ATTENTION = frozenset({
    "attention_mask", "position_ids", "past_key_values", "past_key_value", "layer_past",
    "use_cache", "cache_position", *angles.NAMES, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "seq_idx", "attn_mask", "src_mask", "src_key_padding_mask", "is_causal", "mask", "alibi", "position_bias",
    "attention_bias", "attn_bias",
})  # fmt: skip
"""Arguments that a block passes to its attention. A call with any other runs as it was written, because the argument
may change something that was not verified: an encoder's output adds cross-attention, for example."""
FOR_CROSS = frozenset({*SOURCES, "encoder_attention_mask", "encoder_decoder_position_bias"})
"""Arguments of cross-attention, for blocks that were verified with it."""
BOTH = FOR_ATTENTION | FOR_CROSS

ANGLES = angles.NAMES
"""Arguments that some blocks add to the hidden state instead, so that a block must have been verified with them."""
NOT_READ = ("use_cache", "cache_position")
"""Arguments that matter to a cache only."""
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Where packed documents begin, for attention without a mask. TRL passes them to all models. Attention with a mask does
not read them: the mask says the same."""


COLLECTED = ("output_router_logits",)
"""Arguments that transformers passes on to all modules, and that hooks on routers act on. Blocks that read them have a
parameter with this name."""


class FusedBlock(Change):
    """A block that runs as one function; if its MLP is a module, up to that."""

    differentiable_twice = False

    def __init__(
        self,
        plan: BlockPlan,
        graphs: BlockGraphs | None = None,
        as_written: AsWritten | None = None,
        describe: Describe | None = None,
    ) -> None:
        self.plan, self.graphs = plan, graphs or BlockGraphs(False)
        self.as_written = as_written or AsWritten()
        self.forms = FormsBySettings(describe, self.as_written)
        self._parts: BlockParts | None = None
        self.size = CallSize()
        self.recomputation: MakeContext | None = None
        """Makes the context in which the model's own code is recomputed: attention, and an MLP that is a module."""

    def get_plan(self, x: Any) -> BlockPlan:
        """Return the plan of a call: a larger one than memory was planned for is recomputed."""
        plan = self.plan.without_fp8 if is_bf16_for_now() else self.plan
        return replace(plan, checkpoint="full") if self.size.exceeds_plan(x) else plan

    def get_parts(self, module: nn.Module) -> BlockParts:
        """Return the parts of the block, looked up once."""
        if self._parts is None or not self._parts.are_those_of(module, self.plan):
            self._parts = BlockParts(module, self.plan)
        return self._parts

    def has_fused_form(self, module: nn.Module) -> bool:
        """Whether a block's parts and settings are those of a verified form, whose plan is taken."""
        parts = self.get_parts(module)
        if not parts.are_intact():
            self.as_written.note(
                self.plan.path, "parts", "since a part of them was replaced, hooked, or given a forward of its own"
            )
            return False
        if parts.watched.are_same():
            return True
        plan = self.forms.find_plan(self.plan, module, parts.watched)
        self.plan = self.plan if plan is None else plan
        return plan is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        is_fused = self.has_fused_form(module)
        spec = self.plan.spec
        known = (FOR_ATTENTION if spec.cross is None else BOTH).union(spec.given, spec.masks)
        call, x = make_call(module, inner, args, self._omit_collected(module, kwargs), known)
        if is_fused and (call is None or not is_plain_batch(x)):
            self._note_call(list_unknown(module, args, kwargs, known), x)
        plan = self.get_plan(x)
        if call is None or not is_plain_batch(x) or not is_fused or call.has_filled_cache(plan.spec):
            return self._run_as_written(plan, module, inner, args, kwargs)
        unverified = [name for name in ANGLES if call.kwargs.get(name) is not None and name not in plan.spec.given]
        if unverified:
            self._note_call(unverified, x)
            return self._run_as_written(plan, module, inner, args, kwargs)
        if plan.spec.cross is not None and not is_plain_batch(call.kwargs.get(plan.spec.cross.source)):
            return inner(*args, **kwargs)
        self.as_written.note_fused(plan.path)
        call = run_call = complete_arguments(plan.spec, replace(call, recomputation=self.recomputation), x)
        tensors = self.get_parts(module).gather()
        if plan.spec.attention.kind != "own":
            if fits_fast_attention(plan.spec, call, x):
                run_call = separate_documents(plan, call, x, tensors)
            else:
                plan = plan.with_own_attention()
        dropout = _read_dropout(module, plan.spec)
        if plan.spec.mlp and plan.checkpoint != "full" and is_checkpointed():
            return inner(*args, **kwargs)
        plan, saving = choose_plan(plan)
        drawn = torch.get_rng_state() if plan.spec.attention.kind == "own" and module.training else None
        try:
            with saving:
                if plan.spec.mlp:
                    given = plan, module.get_submodule(plan.spec.mlp), x, tensors, run_call, dropout, self.recomputation
                    output = events.run_in_scope(plan.path, run_with_mlp, *given)
                else:
                    output = blocks.run_block(plan, x, tensors, run_call, dropout, self.graphs)
        except OutputNotReached:
            if drawn is None:
                raise
            torch.set_rng_state(drawn)  # the block decides once more, and in the same way
            return self._run_as_written(plan, module, inner, args, kwargs)
        return (output, *list_returned(plan.spec, call)) if plan.spec.in_tuple else output

    def _note_call(self, unknown: list[str], x: Any) -> None:
        """Note a call with arguments that no fused form knows."""
        if unknown:
            reason = f"whenever they are called with {unknown[0]}: the fused form was not verified with this argument"
            self.as_written.note(self.plan.path, unknown[0], reason)
        elif not isinstance(x, Tensor) or x.is_nested or x.dim() != 3:
            shape = f"{x.dim()} dimensions" if isinstance(x, Tensor) and not x.is_nested else "another type"
            reason = f"whenever their hidden state has {shape}: fused forms take tensors [batch, tokens, width]"
            self.as_written.note(self.plan.path, "hidden state", reason)

    def _omit_collected(self, module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments without those that say what transformers' hooks collect, if no code here reads them."""
        mlp = self.plan.spec.mlp
        if not mlp or not any(name in kwargs for name in COLLECTED):
            return kwargs
        classes: list[Any] = [original_class(part) for part in (module, module.get_submodule(mlp))]
        read = {name for cls in classes for name in _list_arguments(cls)}
        return {name: value for name, value in kwargs.items() if name not in COLLECTED or name in read}

    def _run_as_written(
        self, plan: BlockPlan, module: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that the fused form does not know; a block with experts is recomputed then, too."""
        if not plan.spec.mlp or plan.checkpoint == "none" or is_checkpointed():
            return inner(*args, **kwargs)
        context = functools.partial(repeating, plan, self.recomputation)
        return Recomputed(plan.checkpoint, context, plan.path).run(module, inner, *args, **kwargs)


def is_plain_batch(x: Any) -> bool:
    """Whether a hidden state has three dimensions, and as many tokens in each row."""
    return isinstance(x, Tensor) and not x.is_nested and x.dim() == 3 and x.numel() > 0


@functools.cache
def _list_arguments(cls: type[Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)


@functools.cache
def _get_argument_names(cls: type[Any]) -> tuple[str, ...]:
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def make_call(
    module: nn.Module,
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: frozenset[str] = FOR_ATTENTION,
) -> tuple[BlockCall | None, Any]:
    """Separate the hidden state from a block's other arguments; no call if one of those is not ``known``."""
    names = _get_argument_names(original_class(module))  # type: ignore[arg-type]
    named = dict(zip(names, args, strict=False)) | kwargs
    x = named.pop(names[0], None) if names else None
    if not isinstance(x, Tensor) or list_unknown(module, args, kwargs, known) or len(args) > len(names):
        return None, x
    autocast = None
    if torch.is_autocast_enabled(x.device.type):
        autocast = torch.get_autocast_dtype(x.device.type)
    return BlockCall(module, inner, names[0], named, autocast), x


def list_unknown(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: frozenset[str]) -> list[str]:
    """Return the names of a call's arguments, besides the hidden state, that are not ``known`` and may matter."""
    names, defaults = _get_argument_names(original_class(module)), _get_defaults(original_class(module))  # type: ignore[arg-type]
    named = dict(zip(names, args, strict=False)) | kwargs
    return [
        name
        for name, value in named.items()
        if name not in known
        and name not in names[:1]
        and value is not None
        and value is not False
        and not (isinstance(value, int | float | str) and defaults.get(name) == value)
    ]


@functools.cache
def _get_defaults(cls: type[Any]) -> dict[str, Any]:
    parameters = inspect.signature(cls.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def fits_fast_attention(spec: BlockSpec, call: BlockCall, x: Tensor) -> bool:
    """Whether a call asks for no more than the verified form of attention: its mask, at most an empty cache."""
    if spec.attention.kind == "rotary" or any(call.kwargs.get(name) is not None for name in ANGLES):
        given = angles.read_angles(call.kwargs)
        if given is None or given[0].shape[1] != x.shape[1]:
            return False
    mask = call.find_mask(spec.attention)
    if mask is not None and not _is_fast_mask(mask, spec.attention.heads, x):
        return False
    known = (*spec.given, *NOT_READ, *CACHES, spec.attention.mask, *(() if spec.cross is None else FOR_CROSS))
    known = (*known, *(() if mask is None else DOCUMENTS))
    return all(name in known or value is None or value is False for name, value in call.kwargs.items())


def _is_fast_mask(mask: Any, heads: int, x: Tensor) -> bool:
    """Whether a mask is boolean, over all queries and keys of the hidden state.

    Masks of numbers are left to the model's code: it decides in which format they are added, and whether the smallest
    number becomes minus infinity there.
    """
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.dim() != 4:
        return False
    batch, length, _ = x.shape
    return mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2:] == (length, length)


def separate_documents(plan: BlockPlan, call: BlockCall, x: Tensor, tensors: BlockTensors) -> BlockCall:
    """Return the call with packed documents in place of a mask, if that is what the mask says and a kernel takes them.

    A mask that is no more than causal is left out, so that the call is the same as one without mask.
    """
    spec = plan.spec.attention
    mask = call.find_mask(spec)
    documents = None if mask is None else find_documents(mask, len(x))
    if documents is None:
        return call
    outputs = sum(weight.numel() for weight in tensors.inputs if weight is not None) // x.shape[-1]
    head_size = outputs // (spec.heads + 2 * spec.kv_heads)
    dtype = WIDE.get(plan.qkv.choice.output, torch.bfloat16)
    if documents.bounds is not None and not can_attend(x.device, dtype, head_size):
        return call
    kwargs = {name: value for name, value in call.kwargs.items() if name != spec.mask}
    is_implied = documents.bounds is None and spec.causal
    return replace(call, kwargs=kwargs, documents=None if is_implied else documents)


def set_recomputation(model: nn.Module, context: MakeContext | None) -> None:
    """Let the model's own code inside of fused blocks be recomputed in a context."""
    for module in model.modules():
        change = find_change(module, FusedBlock)
        if change is not None:
            change.recomputation = context


def mark_parts(module: nn.Module, spec: BlockSpec) -> None:
    """Let the norm and projections around attention answer for the fused block while its own attention runs."""
    whole = bool(list_passed_on(spec)) or spec.cross is not None
    linears = spec.linears if whole else (*spec.inputs, spec.output)
    norms = spec.norms if whole else (spec.norm1,)
    owners = [find_called(module, spec, path) for path in linears]
    owners += [module.get_submodule(norm.path) for norm in norms if norm is not None]
    if spec.cross is not None:
        owners.append(module.get_submodule(spec.cross.before))
    for owner in owners:
        if find_change(owner, PartOfBlock) is None:
            apply_change(owner, PartOfBlock())


def _read_dropout(module: nn.Module, spec: BlockSpec) -> Dropout:
    """Return the current probabilities, which a user may have changed since conversion."""
    if not module.training:
        return NO_DROPOUT
    cross = None if spec.cross is None else spec.cross.dropout
    places = (spec.branch1.dropout, spec.branch2.dropout, spec.attention.dropout, spec.dropout, cross)
    found: list[Any] = [_read_probability(module, place) for place in places]
    for path in (spec.branch1.depth, spec.branch2.depth):
        part = None if path is None else module.get_submodule(path)
        found.append(part if part is not None and part.training else None)
    adapters = tuple(_read_probability(module, adapter.dropout) for adapter in spec.adapters)
    return Dropout(*found)._replace(adapters=adapters if any(adapters) else ())


def _read_probability(module: nn.Module, place: Place | None) -> float:
    part: Any = None if place is None else module.get_submodule(place[0])
    return 0.0 if place is None or not part.training else float(getattr(part, place[1]))
