"""Rule about moving averages of weights that are stored in 16 bits."""

from __future__ import annotations

import ast
import re

from narrowgauge.findings import WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.values import Cast, Const, Params, heap
from narrowgauge.lint.rule import Rule

EMA_16BIT = Rule(
    name="ema-16bit",
    severity=WARNING,
    about="a moving average of weights is stored in 16 bits",
    why="an update of 0.01% of a weight is smaller than half a step of the format (0.2% in BF16, 0.02% in FP16), and "
    "is rounded away: the average does not move",
    fix="keep the averaged model in FP32, and cast a copy of it for inference",
)
_AVERAGE = re.compile(r"ema|avg|average|shadow|teacher|decay|momentum|slow", re.IGNORECASE)


class MovingAverage(Detector):
    """Checks in-place averages of parameters: ``lerp_``, and ``mul_(decay).add_(...)``."""

    def on_call(self, call: Call) -> None:
        if call.method not in ("mul_", "lerp_") or not isinstance(call.receiver, Params):
            return
        factor = call.arg(0)
        is_close = isinstance(factor, Const) and isinstance(factor.value, float) and 0.9 <= factor.value < 1
        text = ast.unparse(call.node)
        if call.method == "mul_" and not (is_close or _AVERAGE.search(text)):
            return
        for site in call.receiver.models:
            cast = call.state.env.get(heap(site, "!cast"))
            if cast is None and isinstance(site, str):
                continue  # a model of the caller: unknown
            is_bad = isinstance(cast, Cast)
            bits = cast.dtype.upper() if isinstance(cast, Cast) else ""
            detail = f"the average is {bits}: line {getattr(getattr(cast, 'node', None), 'lineno', 0)} casts it"
            self.judge(EMA_16BIT, call.node, is_bad, detail)
