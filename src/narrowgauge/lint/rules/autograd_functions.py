"""The rule about autograd Functions of the script: autocast is off in their backward unless they are decorated.

Only Functions that multiply matrices in backward are reported. There a 16-bit gradient meets an FP32 weight, and the
product fails or runs in another format than forward did. Elementwise operations promote, and are correct.
"""

from __future__ import annotations

import ast

from narrowgauge.findings import WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.syntax import words_of
from narrowgauge.lint.interpreter.values import Class
from narrowgauge.lint.rule import PYTORCH, Rule

CUSTOM_OP = Rule(
    name="custom-op",
    severity=WARNING,
    about="an autograd Function multiplies matrices, and autocast does not apply to its backward",
    why="under autocast forward gets 16-bit inputs and FP32 weights; backward runs without autocast, and fails on the "
    "mix or computes in another format than forward",
    fix="decorate forward with torch.amp.custom_fwd(device_type='cuda') and backward with torch.amp.custom_bwd, or "
    "use narrowgauge.keep_fp32",
    url=f"{PYTORCH}/notes/amp_examples.html#functions-with-multiple-inputs-or-autocastable-ops",
)
_PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "linear", "conv1d", "conv2d", "conv3d",
             "conv1d_input", "conv2d_input", "conv1d_weight", "conv2d_weight", "conv_transpose2d"}  # fmt: skip
_CHOOSES_FORMAT = {"dtype", "float", "half", "bfloat16", "to", "type_as", "autocast", "is_autocast_enabled"}
"""A Function that uses one of these names chooses its formats itself."""


class CustomOp(Detector):
    """Checks every autograd Function of a script that computes in low precision."""

    def on_end(self) -> None:
        seen = self.observations
        if not any(cast.active for cast in seen.autocasts) and not seen.formats:
            return
        uses: dict[ast.ClassDef, list[str]] = {}
        for event in seen.of("apply"):
            if isinstance(event.value, Class):
                uses.setdefault(event.value.node, []).append(event.text)
        for node, value in self.context.classes.items():
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
            if missing and _multiplies(backward) and not set(words_of(node)) & _CHOOSES_FORMAT:
                detail = f"{node.name}.backward multiplies matrices, without {' and '.join(missing)}"
                self.judge(CUSTOM_OP, node, True, detail)


def _multiplies(method: ast.FunctionDef) -> bool:
    has_operator = any(isinstance(node, ast.MatMult) for node in ast.walk(method))
    return has_operator or not _PRODUCTS.isdisjoint(words_of(method))
