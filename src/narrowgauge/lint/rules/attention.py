"""The rule about attention by hand, where a fused kernel would do."""

from __future__ import annotations

import ast

from narrowgauge.findings import WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.observer import Operand
from narrowgauge.lint.interpreter.syntax import nodes_of
from narrowgauge.lint.interpreter.tensors import PASS_THROUGH
from narrowgauge.lint.interpreter.values import Module, Tensor, Value
from narrowgauge.lint.rule import PYTORCH, Rule
from narrowgauge.lint.verdicts import Verdicts

MANUAL_ATTENTION = Rule(
    name="manual-attention",
    severity=WARNING,
    about="attention by hand: softmax(q @ k.T) @ v",
    why="the scores of all pairs are written to memory, read again, and kept for backward; in FP16 they can overflow",
    fix="use F.scaled_dot_product_attention(q, k, v, attn_mask=..., is_causal=...), which selects a fused kernel",
    url=f"{PYTORCH}/generated/torch.nn.functional.scaled_dot_product_attention.html",
    advice=True,
)
FUSED = ("scaled_dot_product_attention", "flash_attn", "memory_efficient_attention", "flex_attention")
"""Parts of names that show that the script uses fused kernels."""


class ManualAttention(Detector):
    """Checks products of attention weights and values.

    A script that also uses a fused kernel has no finding, nor has a function that uses the weights for anything else:
    fused kernels do not return them.
    """

    def __init__(self, context: Context, verdicts: Verdicts) -> None:
        super().__init__(context, verdicts)
        self._products: list[tuple[str, ast.AST]] = []
        """Products of weights and values, with the function they are in."""
        self._reads: dict[ast.AST, str] = {}
        """Where weights are read, with the function."""
        self._consumed: set[ast.AST] = set()
        """Reads of weights that lead to the product."""
        self._names: dict[str, set[str]] = {}
        """Names that had attention weights as value, by function."""

    def on_name_bound(self, target: ast.Name, value: Value | None) -> None:
        if isinstance(value, Tensor) and value.role == "probs":
            self._names.setdefault(self.context.frames[-1], set()).add(target.id)

    def on_name_read(self, node: ast.Name, value: Value | None) -> None:
        if isinstance(value, Tensor) and value.role == "probs":
            self._reads[node] = self.context.frames[-1]

    def on_operation(self, call: Call, op: str, operands: list[Operand]) -> None:
        if op in PASS_THROUGH:
            self._consumed.add(operands[0][0])

    def on_cast(self, call: Call, dtype: str) -> None:
        if call.receiver_node is not None and not isinstance(call.receiver, Module):
            self._consumed.add(call.receiver_node)

    def on_attention(self, node: ast.AST, weights: ast.expr) -> None:
        self._consumed.add(weights)
        self._products.append((self.context.frames[-1], node))

    def on_end(self) -> None:
        if not self._products or any(part in name for name in self.context.words for part in FUSED):
            return
        used = {frame for node, frame in self._reads.items() if node not in self._consumed} | self._returned()
        for frame, node in self._products:
            if frame not in used:
                detail = "softmax of q @ k.transpose is multiplied with v, and the scores are written to memory"
                self.judge(MANUAL_ATTENTION, node, True, detail)

    def _returned(self) -> set[str]:
        """Return the functions that return attention weights in a tuple."""
        found: set[str] = set()
        for function in nodes_of(self.context.tree):
            if isinstance(function, ast.FunctionDef):
                frame = f"{function.name}:{function.lineno}"
                names = self._names.get(frame, set())
                ends = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
                given = [one for end in ends if isinstance(end, ast.Tuple) for one in end.elts]
                if any(isinstance(one, ast.Name) and one.id in names for one in given):
                    found.add(frame)
        return found
