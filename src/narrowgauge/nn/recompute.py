"""Activation checkpointing: blocks of the model discard their activations and recompute them in backward.

``full`` saves only a block's input. ``selective`` also saves the results of matrix products and attention, which are
expensive, and recomputes norms, activations and casts, which are cheap. Blocks are the members of every ModuleList
whose members share one class, the layers of a transformer, and of such a Sequential or ModuleDict. Recomputation uses
the same autocast and random state as the first forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from narrowgauge import events
from narrowgauge.errors import UsageError
from narrowgauge.nn.call_size import CallSize
from narrowgauge.nn.module_changes import Change, apply_change, original_class
from narrowgauge.nn.recordable import repeatable
from narrowgauge.nn.side_effects import StateBefore
from narrowgauge.scaling.tensor import TensorScales

aten = torch.ops.aten
KEPT_OPS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._grouped_mm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)

LENGTH_BEFORE = "length_before"
"""Attribute of a row of blocks that was shortened: its number of blocks before."""


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by path: the members of lists with several modules of one class."""
    blocks: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if _is_row(module) and not any(path.startswith(f"{outer}.") for outer in blocks):
            blocks |= {f"{path}.{name}" if path else name: block for name, block in module._modules.items() if block}
    return blocks


def _is_row(module: nn.Module) -> bool:
    """Whether a module is a list of blocks; members of a Sequential or a ModuleDict must be more than single layers."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return False
    members = list(module._modules.values())
    if len(members) < 2 or None in members or len(set(map(original_class, members))) > 1:
        return False
    return isinstance(module, nn.ModuleList) or (
        not original_class(members[0]).__module__.startswith("torch.")
        and sum(bool(part._parameters) for part in members[0].modules()) > 1
    )


def count_blocks(model: nn.Module) -> dict[str, int]:
    """Return the number of repeated blocks in each row, by its path; of a shortened row, the number before."""
    rows = Counter(path.rpartition(".")[0] for path in find_blocks(model))
    return {row: getattr(model.get_submodule(row), LENGTH_BEFORE, count) for row, count in rows.items()}


def shorten_row(blocks: nn.ModuleList | nn.Sequential, count: int) -> None:
    """Delete all blocks but the first ones. Formats are still chosen as for the whole row."""
    setattr(blocks, LENGTH_BEFORE, len(blocks))
    del blocks[count:]


Context = contextlib.AbstractContextManager[Any]


def checkpoint_blocks(
    model: nn.Module,
    mode: str,
    blocks: Sequence[str] | None = None,
    context: Callable[[], Context] | None = None,
    optional: bool = False,
    scales: TensorScales | None = None,
) -> list[str]:
    """Make blocks recompute their activations; return their paths.

    Args:
        model: The model to change.
        mode: "none", "selective" or "full".
        blocks: Paths of the blocks; None searches for them.
        context: Makes a context manager for recomputation. torch restores autocast itself.
        optional: Leave a model without blocks unchanged instead of raising an error.
        scales: The model's FP8 scales, for which a recomputation records nothing.
    """
    if mode == "none":
        return []
    found = find_blocks(model) if blocks is None else {path: _module_at(model, path) for path in blocks}
    if not found and optional and blocks is None:
        return []
    if not found:
        raise UsageError(
            f"recipe: checkpoint={mode} found no repeated blocks (a ModuleList or Sequential of one class) in "
            f"{type(model).__name__}; name them with Engine(..., blocks=[...])"
        )
    for path, block in found.items():
        apply_change(block, Recomputed(mode, context, path, scales=scales))
    return list(found)


@dataclass
class Recomputed(Change):
    """A block that discards its activations and recomputes them in backward."""

    mode: str
    context: Callable[[], Context] | None
    path: str = ""
    """Path of the block in the model, for event listeners."""
    size: CallSize | None = None
    """Only if memory is planned: torch.compile would compile again when it changes."""
    scales: TensorScales | None = None
    """The FP8 scales of the block's tensors."""
    differentiable_twice = False

    def run(self, module: Any, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        mode = self.mode
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if self.size is not None:
            mode = "full" if self.size.exceeds_plan(given) else mode
        compute = functools.partial(events.run_in_scope, self.path, inner) if events.is_listening() else inner
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        if mode == "none" or any(cache.get_seq_length() for cache in caches):
            return compute(*args, **kwargs)
        # A cache would get the keys a second time in backward. transformers passes one in training, too.
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if torch.compiler.is_compiling():
            return self._run_and_discard(compute, mode, self._list_contexts(None), {}, args, kwargs)
        state = StateBefore(module)
        with repeatable(module, torch.device("cpu") if given is None else given.device) as repetition:
            contexts = [*self._list_contexts(state), *repetition.contexts]
            made = self._run_and_discard(compute, mode, contexts, repetition.options, args, kwargs)
        state.forget_unchanged()
        return made

    def _run_and_discard(
        self, compute: Callable[..., Any], mode: str, contexts: list[Callable[[], Context]], options: dict[str, Any],
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        if contexts:
            options = {**options, "context_fn": functools.partial(_make_contexts, mode, contexts)}
        elif mode == "selective":
            options = {**options, "context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
        return checkpoint(compute, *args, use_reentrant=False, **options, **kwargs)

    def _list_contexts(self, state: StateBefore | None) -> list[Callable[[], Context]]:
        """Return what makes the contexts of a recomputation.

        A graph of torch.compile, which has no state, has no place for others than the first: values that FP8 flushes or
        saturates count twice there.
        """
        found = [] if self.context is None else [self.context]
        if state is None:
            return found
        found.append(state.again)
        scales = self.scales
        if scales is not None:
            found.append(lambda: scales.unrecorded(scales.delayed))
        return found


def _is_cache(value: Any) -> bool:
    """Whether an argument holds the keys and values of earlier tokens, as in transformers."""
    return callable(getattr(value, "get_seq_length", None))


def _make_contexts(mode: str, opened: list[Callable[[], Context]]) -> tuple[Context, Context]:
    """Return the contexts of the first forward and of recomputation, which autograd runs outside of any mode."""
    if mode == "selective":
        saving, reusing = create_selective_checkpoint_contexts(_policy)
        return saving, _NestedContexts([*opened, lambda: reusing])
    return contextlib.nullcontext(), _NestedContexts(opened)


class _NestedContexts(contextlib.AbstractContextManager[None]):
    """Nested contexts, entered at each recomputation (twice with ``retain_graph``)."""

    def __init__(self, makers: list[Callable[[], Context]]) -> None:
        self._makers = makers
        self._open: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            self._open.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _module_at(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UsageError(f"blocks: {type(model).__name__} has no module {path!r}") from None
