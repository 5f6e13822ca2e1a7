"""The rule about autograd Functions of a script's own: autocast is off in their backward unless they say otherwise.

Only those that multiply matrices in backward are named. There a 16-bit gradient meets an FP32 weight, and the product
fails or runs in another format than forward did; elementwise ones promote, and are fine.
"""

from __future__ import annotations

import ast

from narrowgauge.lint.flow import Follower
from narrowgauge.lint.values import Class

_PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "linear", "conv1d", "conv2d", "conv3d",
             "conv1d_input", "conv2d_input", "conv1d_weight", "conv2d_weight", "conv_transpose2d"}  # fmt: skip
_CARES = {"dtype", "float", "half", "bfloat16", "to", "type_as", "autocast", "is_autocast_enabled"}
"""A Function whose code says one of these chooses its formats itself."""


def unseen_functions(follower: Follower) -> None:
    """Judge every autograd Function of the script."""
    book = follower.notebook
    if not any(cast.active for cast in book.autocasts) and not book.formats:
        return
    uses: dict[ast.ClassDef, list[str]] = {}
    for event in book.of("apply"):
        if isinstance(event.value, Class):
            uses.setdefault(event.value.node, []).append(event.text)
    for node, value in follower.classes.items():
        if not any(base.startswith("torch.autograd.") and base.endswith("Function") for base in value.bases):
            continue
        methods = {child.name: child for child in node.body if isinstance(child, ast.FunctionDef)}
        forward, backward = methods.get("forward"), methods.get("backward")
        if forward is None or backward is None or all(use == "off" for use in uses.get(node, [])):
            continue
        missing = [
            wanted
            for method, wanted in ((forward, "custom_fwd"), (backward, "custom_bwd"))
            if not any(wanted in ast.unparse(decorator) for decorator in method.decorator_list)
        ]
        if missing and _multiplies(backward) and not _words(node) & _CARES:
            detail = f"{node.name}.backward multiplies matrices; {' and '.join(missing)} missing"
            book.judge("custom-op", node, True, detail)


def _multiplies(method: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.MatMult) for node in ast.walk(method)) or bool(_words(method) & _PRODUCTS)


def _words(node: ast.AST) -> set[str]:
    attributes = {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
    return attributes | {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
