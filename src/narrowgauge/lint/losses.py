"""Rules about losses: in which format they are computed, and from what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.findings import NOTE
from narrowgauge.lint.names import BCE
from narrowgauge.lint.values import Tensor, Value

if TYPE_CHECKING:
    from narrowgauge.lint.evaluate import Call, Evaluator

_LOW = ("fp16", "bf16")
_KINDS = {"softmax": "softmax", "probs": "softmax", "sigmoid": "sigmoid"}


class Losses:
    """Looks at loss functions and at what they are given."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.notebook = evaluator, evaluator.notebook

    def compute(self, call: Call, name: str, summed: bool) -> Value | None:
        """A loss function is called."""
        given = [value for value in call.values if isinstance(value, Tensor)]
        casting = call.state.casting
        short = name.split(".")[-1]
        cast = next((value.dtype for value in given if value.dtype in _LOW), None)
        outputs = [value for value in given if value.output and value.dtype is None and value.under is not None]
        if self.evaluator.follower.without_grad:
            pass  # what is only looked at may be rough
        elif casting is None and cast is not None:
            detail = f"{short} gets numbers that were cast to {cast.upper()}"
            self.notebook.judge("half-loss", call.node, True, detail)
        elif casting is None and outputs and outputs[0].under is not None and outputs[0].under.dtype in _LOW:
            detail = (
                f"{short} runs after the autocast block, on what the model gave inside of it: "
                f"{outputs[0].under.dtype.upper()}, unless the model widens its output itself"
            )
            self.notebook.judge("half-loss", call.node, True, detail, severity=NOTE)
        if name in BCE and casting is not None and casting.device == "cuda":
            self.notebook.judge("bce-autocast", call.node, True, f"{short} is called under CUDA's autocast")
        under = casting or next((value.under for value in given if value.under is not None), None)
        makers = tuple(dict.fromkeys(site for value in given for site in value.makers))
        return Tensor(under=under, loss="summed" if summed else short, makers=makers)

    def narrowed(self, call: Call, tensor: Tensor, dtype: str) -> None:
        """A tensor is cast: a loss should not be."""
        if tensor.loss and dtype in _LOW:
            self.notebook.judge("half-loss", call.node, True, f"the loss itself is cast to {dtype.upper()}")

    def logarithm(self, call: Call, tensor: Tensor) -> None:
        """log() of probabilities."""
        if tensor.role in _KINDS:
            self.notebook.judge("log-softmax", call.node, True, f"log() is taken of a {_KINDS[tensor.role]}")
