"""What to do about an op that made inf or NaN: one line for each family of ops."""

from __future__ import annotations

from narrowgauge.gauges.replay.nonfinite_flow import Event

PRECISION = (
    "FP32 survives it: keep this module in FP32 (keep=PATTERN in the recipe) or take bf16, which has FP32's range"
)
_FAMILIES: list[tuple[tuple[str, ...], str]] = [
    (("logsoftmax", "crossentropy", "nllloss", "headloss"), "leave one target that is not ignored; keep logits "
     "small (a lower learning rate, soft capping), and the loss in FP32"),
    (("softmax", "attention"), "a row with every score masked has no softmax: leave one position unmasked, or mask "
     "with a large finite number; in 16 bits also scale the queries down"),
    (("logsigmoid",), "use the loss with logits (binary_cross_entropy_with_logits) instead of a sigmoid and a log"),
    (("log",), "log of 0 or less: clamp the argument (x.clamp_min(1e-12)), or use log1p, log_softmax or logsumexp"),
    (("layernorm", "batchnorm", "groupnorm", "rmsnorm"), "look at the input's range; norms need FP32 statistics and an "
     "epsilon the format can hold"),
    (("gradient norm",), "look for the layer whose gradients explode, and lower the learning rate"),
    (("sqrt", "norm", "cdist"), "the slope of a root is infinite at 0: add an epsilon under the root, not behind it"),
    (("exp", "sinh", "cosh"), "exp leaves FP16 at 11.1 and FP32 at 88.7: subtract the largest value first, or clamp"),
    (("pow",), "a negative base has no fractional power, and 0 no negative one: clamp the base away from 0"),
    (("div", "reciprocal"), "division by 0, or by a number too small for the format (FP16 flushes below 6e-8): add an "
     "epsilon the format can hold"),
    (("acos", "asin", "atan", "acosh", "erfinv"), "the slope is infinite at the edge of the domain: clamp the argument "
     "inside it"),
    (("var", "std"), "the variance of one value is 0/0: take more values, or correction=0"),
    (("mm", "matmul", "dot", "conv", "linear", "einsum", "block"), "the sum of products left the format's range: scale "
     "the inputs or weights down, normalise before, or lower the learning rate"),
    (("sum", "mean", "cumsum", "prod", "add", "mul", "accumulategrad"), "the result left the format's range: compute "
     "it in FP32, or scale the inputs down"),
    (("copy", "cast", "to"), "the value does not fit the format it was cast to: leave it in FP32, or scale it first"),
]  # fmt: skip
SOURCES = {
    "input": "mend the data: the batch is not finite before the model sees it",
    "parameter": "the weights were bad before this step: go back to an earlier checkpoint, and capture an earlier step",
    "buffer": "the buffer was bad before this step: go back to an earlier checkpoint, and capture an earlier step",
    "unseen": "look at what writes this tensor: a kernel past the dispatcher, NumPy, an attribute of the module",
}


def advise(op: str, event: Event, survives: bool) -> str:
    """One line: what to do."""
    if event.op in SOURCES:
        return SOURCES[event.op]
    if event.deliberate:
        return "the number was put there on purpose and reached the loss or a gradient: check the mask"
    if any(0 in entry.get("shape", ()) for entry in event.inputs) and event.kind == "nan":
        return "the mean of nothing is 0/0: a selection came out empty"
    if event.kind == "nan" and any("inf" in entry for entry in event.inputs) and "softmax" not in event.op:
        return "inf - inf and 0 * inf have no value: put the infinities in after this op, or take a large finite number"
    narrow = any(entry.get("dtype") in ("float16", "bfloat16") for entry in [*event.inputs, event.output])
    lines = [PRECISION] if survives and narrow else []
    for text in (op, event.op.removeprefix("aten.")):
        plain = text.lower().replace("_", "")
        family = next((line for names, line in _FAMILIES if any(name in plain for name in names)), None)
        if family is not None:
            return "; ".join([*lines, family])
    return "; ".join(lines) or "look at the ranges of its inputs: one of them is outside of what the op can take"
