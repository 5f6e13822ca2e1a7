"""Rules about what is computed by hand: softmax, attention, masks, epsilons; and what becomes of tensors on the way."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from narrowgauge.findings import NOTE
from narrowgauge.lint.losses import Losses
from narrowgauge.lint.making import MINE_NOT, SMALLEST_FP16, Handled
from narrowgauge.lint.names import LOSS_FUNCTIONS, words
from narrowgauge.lint.state import State
from narrowgauge.lint.values import Const, LossFunction, Module, ScaleNumber, Tensor, Value

if TYPE_CHECKING:
    from narrowgauge.lint.evaluate import Call, Evaluator

LARGEST_FP16 = 65504.0
_KEEP = set(
    words(
        "contiguous clone detach view reshape squeeze unsqueeze type_as nan_to_num expand mean flatten clamp clamp_min "
        "cpu cuda requires_grad_ masked_select"
    )
)
"""Methods after which a tensor is still what it was, for these rules."""
_TURNED = {(-2, -1), (-1, -2), (1, 2), (2, 1), (2, 3), (3, 2)}
_TURNED_ALL = {(0, 2, 1), (0, 1, 3, 2), (0, 2, 3, 1)}
_PLAIN = ("torch.", "torch.nn.functional.", "torch.special.")


class Tensors:
    """Follows tensors through functions, methods and operators."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.notebook, self.follower = evaluator, evaluator.notebook, evaluator.follower
        self.losses = Losses(evaluator)
        self.attention: list[tuple[str, ast.AST]] = []
        """Attention by hand, and the frame it is in."""
        self._reads: dict[ast.AST, str] = {}
        self._consumed: set[ast.AST] = set()
        self._names: dict[str, set[str]] = {}
        """Names that stood for attention weights, by frame."""

    def escapes(self) -> set[str]:
        """Frames in which the weights of an attention are used for more than the sum over values."""
        returned: set[str] = set()
        for function in ast.walk(self.follower.tree):
            if isinstance(function, ast.FunctionDef):
                frame = f"{function.name}:{function.lineno}"
                names = self._names.get(frame, set())
                ends = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
                given = [one for end in ends if isinstance(end, ast.Tuple) for one in end.elts]
                if any(isinstance(one, ast.Name) and one.id in names for one in given):
                    returned.add(frame)
        return returned | {frame for node, frame in self._reads.items() if node not in self._consumed}

    def named(self, target: ast.Name, value: Value | None) -> None:
        if isinstance(value, Tensor) and value.role == "probs":
            self._names.setdefault(self.follower.frames[-1], set()).add(target.id)

    def read(self, node: ast.Name, value: Value | None) -> None:
        if isinstance(value, Tensor) and value.role == "probs":
            self._reads[node] = self.follower.frames[-1]

    def call(self, call: Call) -> Handled:
        if isinstance(call.target, LossFunction):
            return True, self.losses.compute(call, call.target.name, call.target.summed)
        if call.name in LOSS_FUNCTIONS:
            return True, self.losses.compute(call, call.name, call.arg(-1, "reduction") == Const("sum"))
        if isinstance(call.target, Module) and call.method != "forward":
            return self._layer(call, call.target.name.split(".")[-1])
        first = call.arg(0, "input")
        if call.name:
            prefix, _, op = call.name.rpartition(".")
            if f"{prefix}." not in _PLAIN:
                return MINE_NOT
            operands = list(zip(call.node.args, call.args, strict=True))
            if not operands:
                return MINE_NOT
        elif call.method and (call.receiver is None or isinstance(call.receiver, Tensor)) and call.target is None:
            op = call.method
            owner = call.receiver_node
            assert owner is not None
            operands = [(owner, call.receiver), *zip(call.node.args, call.args, strict=True)]
            if "drop" in op and isinstance(first, Tensor):
                return self._layer(call, "Dropout")
        elif "drop" in call.method and isinstance(first, Tensor):
            return self._layer(call, "Dropout")
        else:
            return MINE_NOT
        return self._operation(call, op, operands)

    def _layer(self, call: Call, kind: str) -> Handled:
        """A layer that is called: only those that do nothing but pass on or normalise."""
        operands = list(zip(call.node.args, call.args, strict=True))
        if not operands or kind not in ("Dropout", "Softmax", "Identity"):
            return MINE_NOT
        return self._operation(call, "softmax" if kind == "Softmax" else "dropout", operands)

    def _operation(self, call: Call, op: str, operands: list[tuple[ast.expr, Value | None]]) -> Handled:
        node, given = operands[0]
        tensor = given if isinstance(given, Tensor) else Tensor()
        rest = operands[1:]
        plain = replace(tensor, role="", key="")
        if op == "exp":
            role = "exp-shifted" if tensor.role == "shifted" else "exp"
            return True, replace(tensor, role=role, key=ast.unparse(node))
        if op == "sum" and tensor.role.startswith("exp"):
            return True, replace(tensor, role="exp-sum")
        if op in ("max", "amax"):
            return True, replace(plain, role="max")
        if op == "softmax":
            return True, replace(plain, role="probs" if tensor.role == "scores" and _is_last(call) else "softmax")
        if op == "sigmoid":
            return True, replace(plain, role="sigmoid")
        if op == "log":
            self.losses.logarithm(call, tensor)
            return True, plain
        if op in ("transpose", "swapaxes", "permute"):
            dims = tuple(value.value for _, value in rest if isinstance(value, Const))
            is_turned = dims in _TURNED or dims in _TURNED_ALL
            return True, replace(plain, role="transposed" if is_turned else "")
        if op in ("matmul", "bmm") and rest:
            return True, self._product(call.node, operands[0], rest[0], call.state)
        if op == "einsum" and len(rest) == 2 and isinstance(given, Const):
            return True, self._einsum(call, str(given.value), rest)
        if op in ("masked_fill", "masked_fill_"):
            self._check_mask(call, tensor)
            return True, tensor if tensor.role == "scores" else plain
        if op == "div" and rest:
            return True, self._divide(call.node, tensor, rest[0][1])
        if op == "where" and len(rest) == 2:
            return True, next((v for _, v in rest if isinstance(v, Tensor) and v.role == "scores"), None)
        if op == "detach" and isinstance(given, Tensor):
            self._consumed.add(node)
            return True, replace(given, makers=())
        if op in ("dropout", "dropout_") or op in _KEEP:
            self._consumed.add(node)
            return (True, tensor) if isinstance(given, Tensor) else MINE_NOT
        if op == "item":
            self.item(call)
            return True, None
        if isinstance(given, Tensor) and (tensor.under is not None or tensor.loss or tensor.makers):
            return True, plain
        return MINE_NOT

    def _product(
        self, at: ast.AST, left: tuple[ast.expr, Value | None], right: tuple[ast.expr, Value | None], state: State
    ) -> Value | None:
        first, second = left[1], right[1]
        if isinstance(first, Tensor) and first.role == "probs":
            self._attend(at, left[0])
            return Tensor(under=state.casting)
        turned = isinstance(second, Tensor) and second.role == "transposed"
        if turned and not (isinstance(first, Tensor) and first.role == "transposed"):
            wide = any(isinstance(one, Tensor) and one.dtype == "fp32" for one in (first, second))
            return Tensor(dtype="fp32" if wide else None, under=state.casting, role="scores")
        return None

    def _attend(self, at: ast.AST, weights: ast.expr) -> None:
        self._consumed.add(weights)
        self.attention.append((self.follower.frames[-1], at))

    def _einsum(self, call: Call, equation: str, operands: list[tuple[ast.expr, Value | None]]) -> Value | None:
        inputs, _, output = equation.replace(" ", "").partition("->")
        first, _, second = inputs.partition(",")
        summed = set(first) & set(second) - set(output)
        if len(summed) != 1 or not first or not second or "." in equation:
            return None
        (index,) = summed
        weights = operands[0][1]
        if first[-1] == index and isinstance(weights, Tensor) and weights.role == "probs":
            self._attend(call.node, operands[0][0])
            return None
        return Tensor(under=call.state.casting, role="scores") if first[-1] == second[-1] == index else None

    def _check_mask(self, call: Call, tensor: Tensor) -> None:
        fill, state = call.arg(1, "value"), call.state
        if not isinstance(fill, Const) or not isinstance(fill.value, int | float):
            return
        number = float(fill.value)
        is_off = bool(state.autocast) and state.casting is None
        is_bf16 = state.casting is not None and state.casting.dtype == "bf16"
        if math.isfinite(number) and abs(number) > LARGEST_FP16 and tensor.dtype != "fp32" and not is_off | is_bf16:
            self.notebook.judge("nan-mask", call.node, True, f"scores are filled with {number:g} where a mask says so")

    def _divide(self, at: ast.AST, left: Tensor, right: Value | None) -> Value | None:
        divisor = right if isinstance(right, Tensor) and right.role == "exp-sum" else None
        if left.role in ("exp", "exp-shifted") and divisor is not None and divisor.key == left.key:
            shifted = left.role == "exp-shifted"
            detail = "exp() is divided by its own sum" + (", its maximum taken out by hand" if shifted else "")
            self.notebook.judge("manual-softmax", at, True, detail, severity=NOTE if shifted else None)
            return replace(left, role="softmax", key="")
        if left.role == "scores":
            return left
        return replace(left, role="", divided=True) if left.loss or left.under or left.makers else None

    def binary(self, node: ast.BinOp, left: Value | None, right: Value | None, state: State) -> Value | None:
        """What an operator gives."""
        if isinstance(node.op, ast.MatMult):
            return self._product(node, (node.left, left), (node.right, right), state)
        if isinstance(left, Const) and isinstance(right, Const):
            return _fold(node.op, left.value, right.value)
        first, second = (one if isinstance(one, Tensor) else None for one in (left, right))
        if first is None and second is None:
            return ScaleNumber() if isinstance(left, ScaleNumber) or isinstance(right, ScaleNumber) else None
        if isinstance(node.op, ast.Div) and first is not None:
            return self._divide(node, first, right)
        if isinstance(node.op, ast.Sub) and second is not None and second.role == "max":
            return replace(first or Tensor(), role="shifted", key="")
        if isinstance(node.op, ast.Add):
            self._check_eps(node, first, right)
            if first is not None and isinstance(right, Const):
                return first
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            return _combine(node, first, second)
        if isinstance(node.op, ast.Pow) and first is not None and first.makers:
            return replace(first, role="", key="")
        return None

    def _check_eps(self, node: ast.BinOp, tensor: Tensor | None, eps: Value | None) -> None:
        if tensor is None or tensor.dtype != "fp16" or not isinstance(eps, Const):
            return
        if isinstance(eps.value, float) and 0 < eps.value < SMALLEST_FP16:
            detail = f"{eps.value:g} is added to a tensor that is FP16: it adds 0"
            self.notebook.judge("eps-below-format", node, True, detail)

    def cast(self, base: Tensor, dtype: str, call: Call) -> Value | None:
        """A tensor is cast."""
        if call.receiver_node is not None:
            self._consumed.add(call.receiver_node)
        self.losses.narrowed(call, base, dtype)
        return replace(base, dtype=dtype)

    def attribute(self, owner: Tensor, name: str) -> Value | None:
        if name == "mT":
            return replace(owner, role="transposed", key="")
        if name in ("shape", "device", "dtype", "grad", "requires_grad", "T"):
            return None
        return owner if owner.output or name in ("values", "data") else None

    def item(self, call: Call) -> None:
        """A number is read off the device."""
        owner = call.receiver_node if call.method == "item" else call.node.args[0]
        if owner is not None:
            self.follower.event("item", call.node, text=ast.unparse(owner))


def _is_last(call: Call) -> bool:
    """Whether a softmax runs over the last dimension, as far as one can see."""
    dim = call.arg(0 if call.method == "softmax" and not call.name else 1, "dim")
    return not isinstance(dim, Const) or dim.value in (-1, 2, 3, None)


def _combine(node: ast.BinOp, first: Tensor | None, second: Tensor | None) -> Value | None:
    """Sums and products of a tensor with anything."""
    main = first if first is not None and (first.role == "scores" or first.loss or second is None) else second or first
    assert main is not None
    is_product = isinstance(node.op, ast.Mult)
    if main.role == "scores":
        other = node.right if main is first else node.left
        return None if is_product and "mask" in ast.unparse(other) else main
    makers = tuple(dict.fromkeys(site for one in (first, second) if one for site in one.makers))
    if main.loss or main.under is not None or makers:
        both = first is not None and second is not None
        under = main.under if not both or (first and second and first.under == second.under) else None
        divided = main.divided or bool(first and first.divided) or bool(second and second.divided) or is_product
        multiplied = main.multiplied or is_product
        return replace(main, role="", key="", under=under, divided=divided, multiplied=multiplied, makers=makers)
    return None


def _fold(op: ast.operator, left: object, right: object) -> Value | None:
    """Arithmetic on literals, as in ``4 * 768``."""
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return None
    if isinstance(op, ast.Mult):
        return Const(left * right)
    return Const(left + right) if isinstance(op, ast.Add) else Const(left - right) if isinstance(op, ast.Sub) else None
