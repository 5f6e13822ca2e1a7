"""Tensors with one number for each expert: a bias that is added to scores, counts of tokens.

A cast of the model casts its buffers too. Optimizers have FP32 copies of parameters, but nothing has of buffers.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from narrowgauge.lint.expert_names import is_count, only_runs, place_of
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.syntax import dotted, nodes_of
from narrowgauge.lint.interpreter.values import Module

_CREATES = ("zeros", "ones", "empty", "full")
_WIDE = ("torch.float32", "torch.float")
COUNTS = ("count", "load", "usage", "freq", "tokens_per", "num_tokens", "assigned", "hits")
"""Parts of names of what is counted for each expert."""


@dataclass(frozen=True)
class Buffer:
    """A buffer in FP32, and the class that registers it."""

    name: str
    owner: str

    @property
    def is_count(self) -> bool:
        """Whether it counts tokens."""
        return any(part in self.name for part in COUNTS)


def is_vector_of_experts(node: ast.expr) -> bool:
    """Return whether a call creates a tensor with one number for each expert."""
    if not isinstance(node, ast.Call) or (dotted(node.func) or "").split(".")[-1] not in _CREATES or not node.args:
        return False
    shape = node.args[0]
    if isinstance(shape, ast.Tuple | ast.List):
        return len(shape.elts) == 1 and is_count(shape.elts[0])
    is_full = (dotted(node.func) or "").endswith("full")
    return len(node.args) == 1 + is_full and is_count(shape)


def rounded_by_cast(context: Context, call: Call) -> list[Buffer]:
    """Return the buffers that the cast of a model to 16 bits rounds, in a script that trains the model."""
    module = call.receiver
    if not isinstance(module, Module) or module.definition is None or only_runs(context):
        return []
    words = ast.unparse(place_of(context, call.node).statement)
    if "eval" in words or "deepcopy" in words or not {"backward", "fit"} & context.words:
        return []
    restored = _restored_in(context.tree)
    return [one for one in _buffers_of(context, module.definition, set()) if one.name not in restored]


def _buffers_of(context: Context, definition: ast.ClassDef, seen: set[ast.ClassDef]) -> Iterator[Buffer]:
    """Yield the buffers of a class of the script, and of the classes of the script that it creates objects of."""
    if definition in seen:
        return
    seen.add(definition)
    if any(isinstance(child, ast.FunctionDef) and child.name == "_apply" for child in definition.body):
        return  # it decides itself what a cast does
    classes = {one.name: one for one in context.classes}
    for node in ast.walk(definition):
        if not isinstance(node, ast.Call):
            continue
        name = (dotted(node.func) or "").split(".")[-1]
        if name in classes:
            yield from _buffers_of(context, classes[name], seen)
        if name == "register_buffer" and len(node.args) > 1 and isinstance(node.args[0], ast.Constant):
            made = node.args[1]
            given = [one.value for one in getattr(made, "keywords", ()) if one.arg == "dtype"]
            if is_vector_of_experts(made) and all(dotted(one) in _WIDE for one in given):
                yield Buffer(str(node.args[0].value), definition.name)


@functools.lru_cache(maxsize=2)
def _restored_in(tree: ast.Module) -> frozenset[str]:
    """Return the names that the script casts back to FP32: ``router.expert_bias = router.expert_bias.float()``."""
    casts = (node for node in nodes_of(tree) if isinstance(node, ast.Assign) and "float" in ast.unparse(node.value))
    names = (dotted(node.targets[0]) or "" for node in casts)
    return frozenset(name.removesuffix(".data").split(".")[-1] for name in names)
