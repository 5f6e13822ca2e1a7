"""Advice for an op that produced inf or NaN: one line per family of ops."""

from __future__ import annotations

from narrowgauge.gauges.replay.nonfinite_flow import Origin

PRECISION = "finite in FP32: keep this module in FP32 (keep=PATTERN in the recipe), or use bf16, which has its range"
_FAMILIES: list[tuple[tuple[str, ...], str]] = [
    (("logsoftmax", "crossentropy", "nllloss", "headloss"), "make sure that at least one target is not ignored; keep "
     "logits small (lower learning rate, soft capping) and the loss in FP32"),
    (("softmax", "attention"), "softmax of a fully masked row is NaN: leave one position unmasked, or mask with a "
     "large finite number; in 16 bits, also scale the queries down"),
    (("logsigmoid",), "use binary_cross_entropy_with_logits instead of a sigmoid and a log"),
    (("log",), "log of 0 or a negative number: clamp the argument (x.clamp_min(1e-12)), or use log1p, log_softmax or "
     "logsumexp"),
    (("layernorm", "batchnorm", "groupnorm", "rmsnorm"), "check the range of the input; norms need FP32 statistics and "
     "an epsilon that the format can represent"),
    (("gradient norm",), "find the layer whose gradients explode, and lower the learning rate"),
    (("sqrt", "norm", "cdist"), "the derivative of a square root is infinite at 0: add an epsilon inside the root, not "
     "outside"),
    (("exp", "sinh", "cosh"), "exp overflows FP16 at 11.1 and FP32 at 88.7: subtract the largest value first, or "
     "clamp"),
    (("pow",), "a fractional power of a negative base is NaN, and a negative power of 0 is inf: clamp the base away "
     "from 0"),
    (("div", "reciprocal"), "division by 0, or by a number too small for the format (FP16 flushes below 6e-8): add an "
     "epsilon that the format can represent"),
    (("acos", "asin", "atan", "acosh", "erfinv"), "the derivative is infinite at the edge of the domain: clamp the "
     "argument inside it"),
    (("var", "std"), "the variance of one value is 0/0: use more values, or correction=0"),
    (("mm", "matmul", "dot", "conv", "linear", "einsum", "block"), "the result exceeds the range of the format: scale "
     "the inputs or weights down, normalize before, or lower the learning rate"),
    (("sum", "mean", "cumsum", "prod", "add", "mul", "accumulategrad"), "the result exceeds the range of the "
     "format: compute it in FP32, or scale the inputs down"),
    (("copy", "cast", "to"), "the value exceeds the range of the target format: leave it in FP32, or scale it first"),
]  # fmt: skip
SOURCES = {
    "input": "fix the data: the batch is not finite before the model sees it",
    "parameter": "the weights were not finite before this step: resume from an earlier checkpoint and capture an "
    "earlier step",
    "buffer": "the buffer was not finite before this step: resume from an earlier checkpoint and capture an "
    "earlier step",
    "unseen": "check what writes this tensor: a kernel that bypasses the dispatcher, NumPy, an attribute of the module",
}


def advise(op: str, origin: Origin, survives: bool) -> str:
    """Return one line of advice.

    Args:
        op: The op as it is shown to the user.
        origin: Where the inf or NaN comes from.
        survives: Whether the op or the step is finite in FP32.
    """
    if origin.op in SOURCES:
        return SOURCES[origin.op]
    if origin.deliberate:
        return "this value was set on purpose and reached the loss or a gradient: check the mask"
    if any(0 in entry.get("shape", ()) for entry in origin.inputs) and origin.kind == "nan":
        return "the mean of an empty tensor is 0/0: a selection is empty"
    if origin.kind == "nan" and any("inf" in entry for entry in origin.inputs) and "softmax" not in origin.op:
        return "inf - inf and 0 * inf are NaN: apply the mask after this op, or mask with a large finite number"
    narrow = any(entry.get("dtype") in ("float16", "bfloat16") for entry in [*origin.inputs, origin.output])
    lines = [PRECISION] if survives and narrow else []
    for text in (op, origin.op.removeprefix("aten.")):
        plain = text.lower().replace("_", "")
        family = next((line for names, line in _FAMILIES if any(name in plain for name in names)), None)
        if family is not None:
            return "; ".join([*lines, family])
    return "; ".join(lines) or "check the ranges of its inputs: one of them is outside the domain of the op"
