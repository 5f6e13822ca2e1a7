"""Tensors: what functions, methods and operators make of them, and their part in softmax, attention and losses."""

from __future__ import annotations

import ast
import contextlib
import re
from dataclasses import replace

from narrowgauge.lint.interpreter.call import NOT_HANDLED, Call, Handled
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.modules import cast_dtype
from narrowgauge.lint.interpreter.names import DTYPES, LOSS_FUNCTIONS, words
from narrowgauge.lint.interpreter.observer import Observer, Operand
from narrowgauge.lint.interpreter.signs import Signs
from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.syntax import dotted
from narrowgauge.lint.interpreter.values import Const, LossFunction, Module, Params, Ref, ScaleNumber, Tensor, Value

PASS_THROUGH = frozenset(
    words(
        "contiguous clone detach view reshape squeeze unsqueeze type_as nan_to_num expand mean flatten clamp clamp_min "
        "cpu cuda requires_grad_ masked_select dropout dropout_"
    )
)
"""Operations that keep a tensor's part in the computation."""
AUTOCAST_FP32 = frozenset(
    words(
        "log_softmax softmax softmin log log10 log2 log1p exp expm1 pow prod sum cumsum cumprod norm dist cdist renorm "
        "rsqrt reciprocal softplus sinh cosh tan acos asin erfinv layer_norm group_norm"
    )
)
"""Operations that CUDA's autocast computes in FP32, with an FP32 result."""
_OWN_ROLE = frozenset(words("softmax log exp sum"))
"""Those with a part in softmax, which are handled on their own."""
_TURNED = {(-2, -1), (-1, -2), (1, 2), (2, 1), (2, 3), (3, 2)}
_TURNED_ALL = {(0, 2, 1), (0, 1, 3, 2), (0, 2, 3, 1)}
_CHANNELS = ("c", "ch", "channel", "channels", "n_channels", "num_channels", "in_channels", "inner_channels", "c_in")
_NOT_FLOATS = frozenset(
    words(
        "size dim numel argmax argmin long int bool nonzero element_size stride eq ne gt lt ge le any all isnan isinf "
        "isfinite tolist numpy argsort is_contiguous"
    )
)
"""Methods whose result is not a tensor of the same format."""
_SAVED_DTYPES = ("orig_dtype", "original_dtype", "input_dtype", "in_dtype", "x_dtype", "hidden_dtype")
_PLAIN = ("torch.", "torch.nn.functional.", "torch.special.")


class Tensors:
    """Handles calls and operators on tensors."""

    def __init__(self, context: Context) -> None:
        self.context, self._signs = context, Signs(context.tree)

    def call(self, call: Call) -> Handled:
        """Return the tensor that a call computes."""
        dtype = cast_dtype(call)
        if dtype is not None and not isinstance(call.receiver, Module | Ref | Params) and not call.name:
            self.context.notify(Observer.on_cast, call, dtype)
            base = call.receiver if isinstance(call.receiver, Tensor) else Tensor()
            return True, replace(base, dtype=dtype, like="")
        like = _format_of_another(call)
        if like and isinstance(call.receiver, Tensor) and _is_cast_matter(call.receiver):
            return True, replace(call.receiver, dtype=None, like=like)
        if isinstance(call.target, LossFunction):
            return True, self._loss(call, call.target.name, call.target.summed)
        if call.name in LOSS_FUNCTIONS:
            return True, self._loss(call, call.name, call.arg(-1, "reduction") == Const("sum"))
        if isinstance(call.target, Module) and call.method != "forward":
            return self._layer(call, call.target.name.split(".")[-1])
        first = call.arg(0, "input")
        if call.name == "einops.rearrange" and _ends_with_pixels(call.arg(1, "pattern")):
            return True, Tensor(under=call.state.casting, role="channels")
        if call.name:
            prefix, _, op = call.name.rpartition(".")
            if f"{prefix}." not in _PLAIN:
                return NOT_HANDLED
            operands = list(zip(call.node.args, call.args, strict=True))
            if not operands:
                return NOT_HANDLED
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
            return NOT_HANDLED
        return self._operation(call, op, operands)

    def _loss(self, call: Call, name: str, summed: bool) -> Value | None:
        self.context.notify(Observer.on_loss, call, name)
        given = [value for value in call.values if isinstance(value, Tensor)]
        under = call.state.casting or next((value.under for value in given if value.under is not None), None)
        makers = tuple(dict.fromkeys(site for value in given for site in value.makers))
        return Tensor(under=under, loss="summed" if summed else name.split(".")[-1], makers=makers)

    def _layer(self, call: Call, kind: str) -> Handled:
        """Handle a call of a layer without parameters: dropout, softmax, identity."""
        operands = list(zip(call.node.args, call.args, strict=True))
        if not operands or kind not in ("Dropout", "Softmax", "Identity"):
            return NOT_HANDLED
        return self._operation(call, "softmax" if kind == "Softmax" else "dropout", operands)

    def _operation(self, call: Call, op: str, operands: list[Operand]) -> Handled:
        self.context.notify(Observer.on_operation, call, op, operands)
        node, given = operands[0]
        tensor = given if isinstance(given, Tensor) else Tensor()
        rest = operands[1:]
        wide = call.state.casting is not None and op in AUTOCAST_FP32
        tensor = replace(tensor, product=False) if wide else tensor
        if tensor.role == "one-hot" and op in ("view", "reshape") and len(rest) != 2:
            tensor = replace(tensor, role="")  # the first dimension may be another one
        plain = replace(tensor, role="", key="")
        if op in ("pow", "square", "float_power") and not wide and (op == "square" or _is_two(rest)):
            return True, replace(plain, role="square")
        if op == "exp" and self._signs.of(node) < 0:
            return True, plain
        if op == "exp":
            role = "exp-shifted" if tensor.role == "shifted" else "exp"
            return True, replace(tensor, role=role, key=ast.unparse(node))
        if op in AUTOCAST_FP32 and call.state.casting is not None and op not in _OWN_ROLE:
            return True, replace(plain, dtype="fp32", under=tensor.under or call.state.casting)
        if op == "sum" and tensor.role.startswith("exp"):
            return True, replace(tensor, role="exp-sum")
        if op in ("max", "amax"):
            return True, replace(plain, role="max")
        if op == "log_softmax" and (tensor.dtype is not None or "dtype" in call.keywords):
            return True, replace(plain, dtype=_asked_dtype(call, tensor.dtype))
        if op == "softmax":
            role = "probs" if tensor.role == "scores" and _is_last(call) else "softmax"
            return True, replace(plain, role=role, dtype=_asked_dtype(call, tensor.dtype))
        if op == "one_hot":
            classes = call.written(1, "num_classes")
            text = ast.unparse(classes) if classes is not None else ""
            return True, Tensor(role="one-hot", key=text) if not _is_turned(node) else None
        if tensor.role == "one-hot" and op == "sum" and _dim(call) not in (0, None):
            return True, tensor  # over the k choices of each token: still a mask
        if op == "sigmoid":
            return True, replace(plain, role="sigmoid")
        if op == "log":
            return True, plain
        if op == "normalize" and tensor.role == "channels":
            return True, tensor
        if op in ("view", "reshape") and _is_over_channels([one for one, _ in rest]):
            return True, replace(plain, role="channels")
        if op in ("transpose", "swapaxes", "permute") and tensor.role == "channels":
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
            return True, tensor if tensor.role == "scores" else plain
        if op == "div" and rest:
            return True, self._divide(call.node, tensor, rest[0][1])
        if op == "where" and len(rest) == 2:
            return True, next((v for _, v in rest if isinstance(v, Tensor) and v.role == "scores"), None)
        if op == "detach" and isinstance(given, Tensor):
            return True, replace(given, makers=())
        if op in PASS_THROUGH:
            return (True, tensor) if isinstance(given, Tensor) else NOT_HANDLED
        if op == "item":
            self.context.notify(Observer.on_number_read, call, tensor)
            self.read_number(call)
            return True, None
        known = tensor.under is not None or tensor.loss or tensor.makers or tensor.dtype == "fp16"
        if isinstance(given, Tensor) and known and op not in _NOT_FLOATS:
            return True, plain
        return NOT_HANDLED

    def _product(self, at: ast.AST, left: Operand, right: Operand, state: State) -> Value | None:
        first, second = left[1], right[1]
        if isinstance(first, Tensor) and first.role == "probs":
            self.context.notify(Observer.on_attention, at, left[0])
            return Tensor(under=state.casting)
        turned = isinstance(second, Tensor) and second.role == "transposed"
        if turned and not (isinstance(first, Tensor) and first.role in ("transposed", "channels")):
            wide = any(isinstance(one, Tensor) and one.dtype == "fp32" for one in (first, second))
            return Tensor(dtype="fp32" if wide else None, under=state.casting, role="scores", product=not wide)
        return Tensor(under=state.casting, product=True) if state.casting is not None else None

    def _einsum(self, call: Call, equation: str, operands: list[Operand]) -> Value | None:
        inputs, _, output = equation.replace(" ", "").partition("->")
        first, _, second = inputs.partition(",")
        summed = set(first) & set(second) - set(output)
        if len(summed) != 1 or not first or not second or "." in equation:
            return None
        (index,) = summed
        weights = operands[0][1]
        if first[-1] == index and isinstance(weights, Tensor) and weights.role == "probs":
            self.context.notify(Observer.on_attention, call.node, operands[0][0])
            return None
        return Tensor(under=call.state.casting, role="scores") if first[-1] == second[-1] == index else None

    def _divide(self, at: ast.AST, left: Tensor, right: Value | None) -> Value | None:
        self.context.notify(Observer.on_division, at, left, right)
        if is_softmax(left, right):
            return replace(left, role="softmax", key="")
        if left.role == "scores":
            return left
        return replace(left, role="", divided=True) if left.loss or left.under or left.makers else None

    def binary(self, node: ast.BinOp, left: Value | None, right: Value | None, state: State) -> Value | None:
        """Return the value of a binary operator."""
        self.context.notify(Observer.on_binary, node, left, right)
        if isinstance(node.op, ast.MatMult):
            return self._product(node, (node.left, left), (node.right, right), state)
        if isinstance(left, Const) and isinstance(right, Const):
            return _fold(node.op, left.value, right.value)
        first, second = (one if isinstance(one, Tensor) and not _is_vague(one) else None for one in (left, right))
        if first is None and second is None:
            return ScaleNumber() if isinstance(left, ScaleNumber) or isinstance(right, ScaleNumber) else None
        if isinstance(node.op, ast.Div) and first is not None:
            return self._divide(node, first, right)
        if isinstance(node.op, ast.Sub) and second is not None and second.role == "max":
            return replace(first or Tensor(), role="shifted", key="")
        if isinstance(node.op, ast.Add) and first is not None and isinstance(right, Const):
            return first
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            return _combine(node, first, second)
        if isinstance(node.op, ast.Pow) and first is not None:
            square = isinstance(right, Const) and right.value == 2 and state.casting is None
            if square or first.makers:
                return replace(first, role="square" if square else "", key="", product=first.product and square)
        return None

    def attribute(self, owner: Tensor, name: str) -> Value | None:
        """Return the value of a tensor's attribute."""
        if name == "mT":
            return replace(owner, role="transposed", key="")
        if name in ("shape", "device", "dtype", "grad", "requires_grad", "T"):
            return None
        if owner.output and name == "loss":
            return replace(owner, loss="model")
        return owner if owner.output or name in ("values", "data") else None

    def read_float(self, call: Call) -> Value | None:
        """Return the value of ``float(...)`` of a literal; of a tensor, record that it is read."""
        given = call.arg(0)
        if isinstance(given, Tensor):
            self.context.notify(Observer.on_number_read, call, given)
            self.read_number(call)
        if isinstance(given, Const) and isinstance(given.value, int | float | str):
            with contextlib.suppress(ValueError, OverflowError):
                return Const(float(given.value))
        return None

    def read_number(self, call: Call) -> None:
        """Record that the script reads a tensor's value, with ``item()`` or ``float()``."""
        owner = call.receiver_node if call.method == "item" else call.node.args[0]
        if owner is not None:
            self.context.event("item", call.node, text=ast.unparse(owner))


def is_softmax(left: Tensor, right: Value | None) -> bool:
    """Return whether a division is exp(x) by the sum of the same exp(x)."""
    divisor = right if isinstance(right, Tensor) and right.role == "exp-sum" else None
    return left.role in ("exp", "exp-shifted") and divisor is not None and divisor.key == left.key


def _format_of_another(call: Call) -> str:
    """Return the format that a method casts to, if it is that of another tensor: ``x.dtype``, ``input_dtype``."""
    if call.method == "type_as" and call.node.args:
        return f"{ast.unparse(call.node.args[0])}.dtype"
    if call.method not in ("to", "type"):
        return ""
    given = [*call.node.args, *(one.value for one in call.node.keywords if one.arg == "dtype")]
    for one in given:
        name = dotted(one) or ""
        if (isinstance(one, ast.Attribute) and one.attr == "dtype") or name.split(".")[-1] in _SAVED_DTYPES:
            return ast.unparse(one)
    return ""


def _is_cast_matter(tensor: Tensor) -> bool:
    """Return whether a rule asks what a tensor was cast to: probabilities in FP32, one-hot masks."""
    return tensor.role == "one-hot" or (tensor.role in ("softmax", "sigmoid") and tensor.dtype == "fp32")


def _is_vague(tensor: Tensor) -> bool:
    """Return whether the format of a tensor is unknown, and its part matters to operations on it alone."""
    return bool(tensor.like) or (tensor.role == "one-hot" and tensor.dtype is None)


def _asked_dtype(call: Call, otherwise: str | None) -> str | None:
    """Return the format that ``dtype=`` asks for, None if unknown; ``otherwise`` if the call does not have it."""
    if "dtype" not in call.keywords:
        return otherwise
    wanted = call.keywords["dtype"]
    return DTYPES.get(wanted.name) if isinstance(wanted, Ref) else None


def _dim(call: Call) -> object:
    """Return the dimension of a sum, if it is a literal; None if it is not, or if there are none or several."""
    dim = call.arg(1 if call.name else 0, "dim")
    return dim.value if isinstance(dim, Const) else None


def _is_turned(node: ast.expr) -> bool:
    """Return whether indices were transposed: their first dimension may then be the k choices of each token."""
    words = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return not words.isdisjoint(("t", "T", "mT", "transpose", "permute", "swapaxes"))


def _is_over_channels(shape: list[ast.expr]) -> bool:
    """Return whether a new shape is (..., channels, pixels): attention over it relates channels, not positions."""
    if len(shape) < 3:
        return False
    name = (dotted(shape[-2]) or "").split(".")[-1].lower()
    last = ast.unparse(shape[-1]).replace(" ", "").lower()
    is_flat = last == "-1" or set(last.split("*")) in ({"h", "w"}, {"height", "width"})
    return is_flat and name in _CHANNELS


def _ends_with_pixels(pattern: Value | None) -> bool:
    """Return whether a pattern of einops ends with channels and pixels: ``b (head c) h w -> b head c (h w)``."""
    if not isinstance(pattern, Const) or not isinstance(pattern.value, str):
        return False
    *_, channels, pixels = ["", "", *re.findall(r"\([^)]*\)|\S+", pattern.value.partition("->")[2])]
    return pixels in ("(h w)", "(x y)", "(height width)") and channels.lower() in (*_CHANNELS, "d")


def _is_last(call: Call) -> bool:
    """Return whether a softmax may run over the last dimension."""
    dim = call.arg(0 if call.method == "softmax" and not call.name else 1, "dim")
    return not isinstance(dim, Const) or dim.value in (-1, 2, 3, None)


def _combine(node: ast.BinOp, first: Tensor | None, second: Tensor | None) -> Value | None:
    """Return the sum or product of a tensor with any value."""
    main = first if first is not None and (first.role == "scores" or first.loss or second is None) else second or first
    assert main is not None
    is_product = isinstance(node.op, ast.Mult)
    if main.role == "scores":
        other = node.right if main is first else node.left
        return None if is_product and "mask" in ast.unparse(other) else main
    makers = tuple(dict.fromkeys(site for one in (first, second) if one for site in one.makers))
    if is_product and first is not None and first == second and ast.dump(node.left) == ast.dump(node.right):
        return replace(first, role="square", key="", divided=True, multiplied=True)
    if first is not None and second is not None and first.dtype == second.dtype == "fp16" and not main.loss:
        return replace(main, role="", key="", makers=makers)
    if main.loss or main.under is not None or makers:
        both = first is not None and second is not None
        under = main.under if not both or (first and second and first.under == second.under) else None
        divided = main.divided or bool(first and first.divided) or bool(second and second.divided) or is_product
        multiplied = main.multiplied or is_product
        other = node.right if main is first else node.left
        product = bool(first and second and first.product and second.product) or (
            main.product and not both and isinstance(other, ast.Constant)
        )
        main = replace(main, role="", key="", under=under, divided=divided, multiplied=multiplied, makers=makers)
        return replace(main, product=product)
    return None


def _is_two(rest: list[Operand]) -> bool:
    """Return whether an exponent is 2."""
    return bool(rest) and isinstance(rest[0][1], Const) and rest[0][1].value == 2


def _fold(op: ast.operator, left: object, right: object) -> Value | None:
    """Compute arithmetic on literals, such as ``4 * 768``."""
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return None
    if isinstance(op, ast.Mult):
        return Const(left * right)
    if isinstance(op, ast.Pow) and abs(left) <= 1024 and 0 <= right <= 64:
        return Const(left**right)
    return Const(left + right) if isinstance(op, ast.Add) else Const(left - right) if isinstance(op, ast.Sub) else None
