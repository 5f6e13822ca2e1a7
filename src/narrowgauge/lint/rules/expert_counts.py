"""The rule about numbers of tokens per expert that are counted in 16 bits.

BF16 has every integer up to 256, FP16 up to 2,048. Measured with 16,384 tokens and 8 experts in BF16, on a CPU: all
sums of a one-hot mask are wrong, by up to 5 tokens; 69% of the positions that cumsum gives are wrong, so tokens share a
place in an expert's buffer; and index_add_ of ones stops at 256. A mean is wrong by at most 0.2%, and is not reported.
"""

from __future__ import annotations

from narrowgauge.findings import NOTE, SERIOUS, WARNING
from narrowgauge.lint import expert_names
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.expert_buffers import COUNTS, is_vector_of_experts, rounded_by_cast
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.modules import LOW
from narrowgauge.lint.interpreter.names import DTYPES
from narrowgauge.lint.interpreter.observer import Operand
from narrowgauge.lint.interpreter.values import Const, Ref, Seq, Tensor
from narrowgauge.lint.rule import PYTORCH, Rule

COUNTS_16BIT = Rule(
    name="counts-16bit",
    severity=WARNING,
    about="tokens per expert are counted in 16 bits",
    why="BF16 has every integer up to 256 only, FP16 up to 2,048 (and none above 65,504): larger counts are rounded, "
    "positions from cumsum are equal for several tokens, and adding 1 has no effect",
    fix="count integers, and cast the result: F.one_hot(index, num_experts).sum(0), or torch.bincount",
    url=f"{PYTORCH}/generated/torch.bincount.html",
)
_COUNT_INTEGERS = "create it with dtype=torch.long: a cast of the model leaves integers as they are"
_LARGEST = {"bf16": "256", "fp16": "2,048"}


class MaskSums(Detector):
    """Checks sums of one-hot masks over tokens. Under autocast sums are in FP32."""

    def on_operation(self, call: Call, op: str, operands: list[Operand]) -> None:
        mask = operands[0][1]
        if op not in ("sum", "cumsum") or not isinstance(mask, Tensor) or mask.role != "one-hot":
            return
        given = call.keywords.get("dtype")
        asked = DTYPES.get(given.name) if isinstance(given, Ref) else None
        low = asked if "dtype" in call.keywords else mask.dtype
        like = mask.like if "dtype" not in call.keywords else ""
        is_low = low in LOW or bool(like)
        if not is_low or call.state.casting is not None or not _is_over_tokens(call, op):
            return
        is_of_experts = expert_names.is_count_text(mask.key) or expert_names.is_about_experts(self.context, call.node)
        if expert_names.only_runs(self.context) or not is_of_experts:
            return
        what = "positions of tokens in their experts" if op == "cumsum" else "tokens per expert"
        if like:
            detail = f"{what} are counted in {like}: if that is BF16, it has every integer up to 256"
            self.judge(COUNTS_16BIT, call.node, True, detail, severity=NOTE)
        else:
            detail = f"{what} are counted in {str(low).upper()}, which has every integer up to {_LARGEST[str(low)]}"
            self.judge(COUNTS_16BIT, call.node, True, detail, severity=SERIOUS if op == "cumsum" else "")


class StoredCounts(Detector):
    """Checks tensors with a count for each expert that are created in 16 bits."""

    def on_call(self, call: Call) -> None:
        given = call.keywords.get("dtype")
        dtype = DTYPES.get(given.name) if isinstance(given, Ref) else None
        if dtype not in LOW or not is_vector_of_experts(call.node) or expert_names.only_runs(self.context):
            return
        name = expert_names.name_given(expert_names.place_of(self.context, call.node).statement)
        if any(part in name for part in COUNTS):
            detail = f"{name} is in {str(dtype).upper()}: adding 1 to {_LARGEST[str(dtype)]} has no effect"
            self.judge(COUNTS_16BIT, call.node, True, detail, _COUNT_INTEGERS)

    def on_cast(self, call: Call, dtype: str) -> None:
        for buffer in rounded_by_cast(self.context, call) if dtype in LOW else ():
            if buffer.is_count:
                detail = f"the cast of the model to {dtype.upper()} casts {buffer.name} of {buffer.owner} too"
                self.judge(COUNTS_16BIT, call.node, True, detail, _COUNT_INTEGERS)


def _is_over_tokens(call: Call, op: str) -> bool:
    """Return whether a sum runs over tokens; over dimension 1 it may run over the few choices of each token."""
    position = 1 if call.name else 0
    dim = call.arg(position, "dim")
    numbers = [one.value for one in (dim.items if isinstance(dim, Seq) else (dim,)) if isinstance(one, Const)]
    if op == "cumsum":
        return len(numbers) == 1 and numbers[0] != -1
    return call.written(position, "dim") is None or 0 in numbers
