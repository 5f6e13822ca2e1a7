"""Rules about computations that lose precision or overflow: softmax by hand, logarithms, losses, masks."""

from __future__ import annotations

import ast
import math
import re
from typing import TypeGuard

from narrowgauge.findings import NOTE, SERIOUS, WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.observer import Operand
from narrowgauge.lint.interpreter.tensors import is_softmax
from narrowgauge.lint.interpreter.values import Const, Tensor, Value
from narrowgauge.lint.rule import PYTORCH, Rule

MANUAL_SOFTMAX = Rule(
    name="manual-softmax",
    severity=WARNING,
    about="softmax by hand: exp(x) / exp(x).sum()",
    why="exp overflows above 11 in FP16 and above 88 in FP32 and BF16: inf / inf is NaN",
    fix="use torch.softmax(x, dim), which subtracts the maximum first and runs in FP32 under autocast",
    url=f"{PYTORCH}/generated/torch.softmax.html",
)
LOG_SOFTMAX = Rule(
    name="log-softmax",
    severity=WARNING,
    about="the logarithm of a softmax",
    why="a probability that was rounded to zero (below 6e-8 in FP16) gives -inf, and an epsilon against that is "
    "rounded to zero as well",
    fix="use torch.log_softmax(x, dim) (F.logsigmoid for a sigmoid), or F.cross_entropy on the logits",
    url=f"{PYTORCH}/generated/torch.nn.functional.log_softmax.html",
)
HALF_LOSS = Rule(
    name="half-loss",
    severity=WARNING,
    about="the loss is computed from 16-bit numbers outside autocast",
    why="sums over classes and samples keep two to three digits, and a large sum overflows FP16",
    fix="cast to FP32 first, loss_fn(logits.float(), targets), or compute the loss inside autocast, which does that",
    url=f"{PYTORCH}/amp.html#cuda-ops-that-autocast-to-float32",
)
NAN_MASK = Rule(
    name="nan-mask",
    severity=SERIOUS,
    about="a mask is filled with a number that FP16 cannot represent",
    why="the largest FP16 number is 65,504: masked_fill raises RuntimeError: value cannot be converted to type Half "
    "without overflow; torch.where and an assignment store -inf, and softmax of a fully masked row is then NaN",
    fix="fill with float('-inf') or torch.finfo(scores.dtype).min",
)
HALF_VARIANCE = Rule(
    name="half-variance",
    severity=WARNING,
    about="a mean of squares is computed in FP16: a variance or RMSNorm by hand",
    why="the square of 256 is above the largest FP16 number, so the mean is inf and the normalized output 0 or NaN",
    fix="square in FP32: x.float().pow(2).mean(-1, keepdim=True), or use nn.RMSNorm or nn.LayerNorm under autocast",
    url=f"{PYTORCH}/generated/torch.nn.RMSNorm.html",
)
LARGEST_FP16 = 65504.0
_LOW = ("fp16", "bf16")
_KINDS = {"softmax": "softmax", "probs": "softmax", "sigmoid": "sigmoid"}


_LOG_PROBABILITIES = ("nllloss", "nll_loss", "kldivloss", "kl_div", "ctcloss", "ctc_loss")
"""Losses of log-probabilities: autocast computes log_softmax, the last operation of such a model, in FP32."""
_METRICS = re.compile(r"(^|_)(eval|evaluate|val|valid|validate|validation|test|metrics?|psnr|accuracy|score|predict)")


def _is_metric(context: Context, call: Call) -> bool:
    """Return whether a loss function computes a number to be shown: in an evaluation, or read at once."""
    functions = [frame.partition(":")[0] for frame in context.frames]
    return any(_METRICS.search(name.lower()) for name in functions) or call.node in context.read_at_once


class ManualSoftmax(Detector):
    """Checks divisions of exp by its sum."""

    def on_division(self, node: ast.AST, left: Tensor, right: Value | None) -> None:
        if is_softmax(left, right):
            shifted = left.role == "exp-shifted"
            detail = "exp() is divided by its own sum" + (", after subtracting the maximum by hand" if shifted else "")
            self.judge(MANUAL_SOFTMAX, node, True, detail, severity=NOTE if shifted else "")


class LogSoftmax(Detector):
    """Checks logarithms of probabilities, in scripts that compute in low precision."""

    def on_operation(self, call: Call, op: str, operands: list[Operand]) -> None:
        given = operands[0][1]
        if op == "log" and isinstance(given, Tensor) and given.role in _KINDS:
            self.judge(LOG_SOFTMAX, call.node, True, f"log() is called on a {_KINDS[given.role]}")

    def on_end(self) -> None:
        if not self.observations.computes_low:
            self.verdicts.clear(LOG_SOFTMAX)


class HalfVariance(Detector):
    """Checks means of squares."""

    def on_operation(self, call: Call, op: str, operands: list[Operand]) -> None:
        given = operands[0][1]
        if op == "mean" and isinstance(given, Tensor) and given.role == "square":
            self.judge(HALF_VARIANCE, call.node, given.is_fp16, "the mean of squares of a tensor in FP16")


class HalfLoss(Detector):
    """Checks the formats that loss functions get."""

    def on_loss(self, call: Call, name: str) -> None:
        if self.context.without_grad or call.state.casting is not None:
            return  # without gradients, precision is not critical
        given = [value for value in call.values if isinstance(value, Tensor)]
        short = name.split(".")[-1]
        cast = next((value.dtype for value in given if value.dtype in _LOW), None)
        if _is_metric(self.context, call):
            return
        outputs = [value for value in given if value.output and value.dtype is None and value.under is not None]
        if cast is not None:
            self.judge(HALF_LOSS, call.node, True, f"{short} gets numbers that were cast to {cast.upper()}")
        elif (
            outputs
            and short.lower() not in _LOG_PROBABILITIES
            and outputs[0].under is not None
            and outputs[0].under.dtype in _LOW
        ):
            detail = (
                f"{short} runs after the autocast block, on the output of a model inside of it: "
                f"{outputs[0].under.dtype.upper()}, unless the model casts its output to FP32 itself"
            )
            self.judge(HALF_LOSS, call.node, True, detail, severity=NOTE)

    def on_cast(self, call: Call, dtype: str) -> None:
        if isinstance(call.receiver, Tensor) and call.receiver.loss and dtype in _LOW:
            self.judge(HALF_LOSS, call.node, True, f"the loss is cast to {dtype.upper()}")


def _is_too_large(value: object) -> TypeGuard[float]:
    """Return whether a number is finite, but not in FP16."""
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) > LARGEST_FP16


def _is_fp16_scores(value: Value | None) -> bool:
    """Return whether a tensor is certainly FP16: by a cast, or as the scores of attention under autocast."""
    if not isinstance(value, Tensor) or value.dtype not in (None, "fp16"):
        return False
    is_under = value.under is not None and value.under.dtype == "fp16" and value.role == "scores"
    return value.dtype == "fp16" or is_under


class NanMask(Detector):
    """Checks fill values of masks, in scripts that compute in FP16."""

    def on_item_assigned(self, target: ast.Subscript, owner: Value | None, value: Value | None) -> None:
        if _is_fp16_scores(owner) and isinstance(value, Const) and _is_too_large(value.value):
            detail = f"masked scores are set to {value.value:g}, which is -inf in FP16"
            self.judge(NAN_MASK, target, True, detail, severity=NOTE)

    def on_operation(self, call: Call, op: str, operands: list[Operand]) -> None:
        fill, state = call.arg(1, "value"), call.state
        if op == "where" and any(_is_fp16_scores(value) for value in call.args):
            for value in call.args:
                if isinstance(value, Const) and _is_too_large(value.value):
                    detail = f"torch.where sets masked scores to {value.value:g}, which is -inf in FP16"
                    self.judge(NAN_MASK, call.node, True, detail, severity=NOTE)
        if op not in ("masked_fill", "masked_fill_") or not isinstance(fill, Const):
            return
        if not isinstance(fill.value, int | float):
            return
        tensor, number = operands[0][1], float(fill.value)
        is_fp32 = isinstance(tensor, Tensor) and tensor.dtype == "fp32"
        is_off = bool(state.autocast) and state.casting is None
        is_bf16 = state.casting is not None and state.casting.dtype == "bf16"
        if math.isfinite(number) and abs(number) > LARGEST_FP16 and not (is_fp32 or is_off or is_bf16):
            self.judge(NAN_MASK, call.node, True, f"masked scores are set to {number:g}")

    def on_end(self) -> None:
        if "fp16" not in self.observations.formats:
            self.verdicts.clear(NAN_MASK)
