"""What a fused block returns besides the hidden state: an argument that it passes on, or attention weights.

T5's blocks pass a position bias from block to block. The first block is called without it, and computes it. Its fused
form does that before it runs, with the model's own code and zeros in place of products, and has it as an argument then.

Some blocks return attention's weights although their model does not read them. Their place is taken by an object that
raises an error if somebody does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.nn.blocks.projections import find_called, find_projection
from narrowgauge.nn.blocks.spec import WEIGHTS, BlockSpec
from narrowgauge.nn.fused.attention import Answers, BlockCall, get_first, run_with_answers
from narrowgauge.random_state import get_random_state, set_random_state


class NotComputed:
    """Stands for attention weights."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            "a fused block does not return attention weights; pass output_attentions=True to the model, or fused=False "
            "to the engine"
        )


def list_returned(spec: BlockSpec, call: BlockCall) -> list[Any]:
    """Return what follows the hidden state in the block's output."""
    found: list[Any] = []
    for name in spec.returned:
        found.append(None if name is None else NotComputed() if name == WEIGHTS else call.kwargs[name])
    return found


def list_passed_on(spec: BlockSpec) -> list[str]:
    """Return the names of arguments that the block returns."""
    return [name for name in spec.returned if name is not None and name != WEIGHTS]


def complete_arguments(spec: BlockSpec, call: BlockCall, x: Tensor) -> BlockCall:
    """Return the call with all arguments that the block returns; its own code computes those that are missing."""
    missing = [name for name in list_passed_on(spec) if call.kwargs.get(name) is None]
    if not missing:
        return call
    answers: Answers = {}
    for path in spec.linears:
        outputs = find_projection(call.module, path).shape[0]
        answers[id(find_called(call.module, spec, path))] = (
            lambda args, kwargs, size=outputs: x.new_zeros(()).expand(  # type: ignore[misc]
                *get_first(args, kwargs).shape[:-1], size
            )
        )
    for norm in spec.norms:
        answers[id(call.module.get_submodule(norm.path))] = get_first
    before = get_random_state(x.device)  # dropout of zeros must not change what the block draws
    try:
        output = run_with_answers(call.without_cache(), x.new_zeros(()).expand(x.shape), answers)
    finally:
        set_random_state(before, x.device)
    made = {name: output[spec.returned.index(name) + 1] for name in missing}
    return replace(call, kwargs={**call.kwargs, **made})
