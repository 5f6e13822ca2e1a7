"""The rule about routers of mixtures of experts: rounded scores change which experts are chosen.

Of 16,384 tokens with random scores (normal distribution), this many get another set of experts if the scores are
rounded to BF16 before topk chooses:

    experts     logits   softmax   sigmoid
    2 of 8        0.2%      0.4%      1.0%
    8 of 64       2.2%      1.8%      7.0%
    8 of 256      4.1%      2.5%     14.2%
"""

from __future__ import annotations

import ast

from narrowgauge.findings import NOTE, WARNING
from narrowgauge.lint import expert_names
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.expert_buffers import is_vector_of_experts, rounded_by_cast
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.modules import LOW
from narrowgauge.lint.interpreter.names import DTYPES
from narrowgauge.lint.interpreter.observer import Operand
from narrowgauge.lint.interpreter.syntax import dotted
from narrowgauge.lint.interpreter.values import Autocast, Const, Module, Ref, Site, Tensor, Value
from narrowgauge.lint.rule import PYTORCH, Rule
from narrowgauge.lint.verdicts import Verdicts

LOW_PRECISION_ROUTER = Rule(
    name="low-precision-router",
    severity=WARNING,
    about="a router's scores are rounded to 16 bits before experts are chosen",
    why="rounded scores are often equal, and other experts are chosen: with 8 of 64 experts for 2% of the tokens "
    "(softmax in BF16) to 7% (sigmoid)",
    fix="compute and choose in FP32, and cast the chosen weights: scores = logits.float().softmax(-1); weights, index "
    "= scores.topk(k); weights = weights.to(x.dtype)",
    url=f"{PYTORCH}/amp.html#cuda-ops-that-autocast-to-float32",
)
_FP32_PARAMETERS = "keep the router's parameters in FP32: it is a small part of the model"
_FP32_BIAS = "keep it in FP32, after casts of the model too: small updates of it are rounded away in 16 bits"
_WITHOUT_AUTOCAST = (
    "compute the logits without autocast: with torch.autocast('cuda', enabled=False): logits = router(x.float())"
)


class RouterScores(Detector):
    """Checks the format of scores where experts are chosen.

    Calls of a chain begin at the same place, so the verdicts of this module name what they are on (``when``).
    """

    def on_operation(self, call: Call, op: str, operands: list[Operand]) -> None:
        if op not in ("topk", "argmax", "max"):
            return
        scores = operands[0][1]
        low = scores.dtype if isinstance(scores, Tensor) and scores.dtype in LOW else None
        like = scores.like if isinstance(scores, Tensor) and scores.role != "one-hot" else ""
        if not low and not like:
            self.verdicts.judge(LOW_PRECISION_ROUTER, call.node, False, when=op)
            return
        if op == "max" and not self._is_choice(call):
            return
        if expert_names.is_about_experts(self.context, call.node) and not expert_names.only_runs(self.context):
            detail = f"scores that were computed in FP32 are cast to {like} before {op}() chooses experts"
            detail = f"{op}() chooses experts by scores in {low.upper()}" if low else detail
            self.verdicts.judge(LOW_PRECISION_ROUTER, call.node, True, detail, when=op)

    def _is_choice(self, call: Call) -> bool:
        """Return whether ``max`` gives the index of an expert: ``score, index = scores.max(-1)``."""
        dim = call.arg(1 if call.name else 0, "dim")
        statement = expert_names.place_of(self.context, call.node).statement
        target = statement.targets[0] if isinstance(statement, ast.Assign) and statement.value is call.node else None
        return isinstance(dim, Const) and isinstance(target, ast.Tuple) and len(target.elts) == 2


class RouterLayers(Detector):
    """Checks the layers that compute scores: the format of their parameters, and autocast around them."""

    def __init__(self, context: Context, verdicts: Verdicts) -> None:
        super().__init__(context, verdicts)
        self._routers: set[Site] = set()
        """Linear layers with an output for each expert."""

    def on_result(self, call: Call, value: Value | None) -> None:
        if call.name != "torch.nn.Linear" or not expert_names.is_count(call.written(1, "out_features")):
            return
        if isinstance(value, Module):
            self._routers.add(value.site)
        if not expert_names.only_runs(self.context):
            dtype = _dtype_of(call)
            detail = f"a linear layer with an output for each expert is created in {str(dtype).upper()}"
            self.verdicts.judge(LOW_PRECISION_ROUTER, call.node, dtype in LOW, detail, _FP32_PARAMETERS, when="create")

    def on_call(self, call: Call) -> None:
        if isinstance(call.target, Module) and call.target.site in self._routers and call.state.autocast:
            self._check_autocast(call, call.state.casting, call.args[:1])
        elif call.name.startswith("torch.") and _dtype_of(call) in LOW and is_vector_of_experts(call.node):
            self._check_bias(call)

    def on_operation(self, call: Call, op: str, operands: list[Operand]) -> None:
        if op == "linear" and call.state.autocast and len(operands) > 1:
            given = [value for _, value in operands[:2]]
            is_wide = all(isinstance(value, Tensor) and value.dtype == "fp32" for value in given)
            if is_wide and expert_names.is_about_experts(self.context, call.node):
                self._check_autocast(call, call.state.casting, given)

    def _check_autocast(self, call: Call, casting: Autocast | None, given: list[Value | None]) -> None:
        decorators = [one for scope in self.context.scopes for one in getattr(scope, "decorator_list", ())]
        is_kept = any("keep_fp32" in ast.unparse(one) for one in decorators)
        if (casting is not None and casting.dtype not in LOW) or self.context.without_grad or is_kept:
            return
        bits = casting.dtype.upper() if casting is not None and casting.dtype else ""
        is_wide = any(isinstance(value, Tensor) and value.dtype == "fp32" for value in given)
        detail = f"autocast computes a router's logits in {bits}" + (
            ": the cast to FP32 before has no effect" if is_wide else ""
        )
        severity = "" if is_wide else NOTE
        self.verdicts.judge(
            LOW_PRECISION_ROUTER, call.node, bool(bits), detail, _WITHOUT_AUTOCAST, severity, when="autocast"
        )

    def on_cast(self, call: Call, dtype: str) -> None:
        if dtype not in LOW or call.receiver_node is None or not expert_names.has_experts(self.context.tree):
            return
        statement = expert_names.place_of(self.context, call.node).statement
        named = expert_names.is_router(call.receiver_node)
        module = call.receiver
        if isinstance(module, Module) and module.name == "torch.nn.Linear":  # a gate may also be part of an MLP
            is_router = module.site in self._routers
        elif isinstance(module, Module):
            is_router = named or expert_names.is_router_class(module.name)
        else:
            is_router = named and module is None and _is_cast_in_place(statement, call)
        is_evaluated = "eval" in ast.unparse(statement)
        if is_router and not is_evaluated and not expert_names.only_runs(self.context):
            detail = f"a router's parameters are cast to {dtype.upper()}"
            self.judge(LOW_PRECISION_ROUTER, call.node, True, detail, _FP32_PARAMETERS)
        for buffer in rounded_by_cast(self.context, call):
            if "bias" in buffer.name:
                detail = f"the cast of the model to {dtype.upper()} casts {buffer.name} of {buffer.owner} too"
                self.judge(LOW_PRECISION_ROUTER, call.node, True, detail, _FP32_BIAS)

    def _check_bias(self, call: Call) -> None:
        """Check a buffer or parameter with a number for each expert that is added to its scores."""
        statement = expert_names.place_of(self.context, call.node).statement
        name, text = expert_names.name_given(statement), ast.unparse(statement)
        is_stored = "register_buffer(" in text or "Parameter(" in text
        if "bias" in name and is_stored and not expert_names.only_runs(self.context):
            detail = f"{name}, which is added to the scores of experts, is in {str(_dtype_of(call)).upper()}"
            self.judge(LOW_PRECISION_ROUTER, call.node, True, detail, _FP32_BIAS)


def _is_cast_in_place(statement: ast.AST, call: Call) -> bool:
    """Return whether the result of a cast is not used, or replaces an attribute: it is a module's, not a tensor's."""
    if isinstance(statement, ast.Assign) and statement.value is call.node and isinstance(call.node.func, ast.Attribute):
        name = dotted(call.node.func.value) or ""
        return name.endswith(".router") and dotted(statement.targets[0]) == name
    return isinstance(statement, ast.Expr) and statement.value is call.node


def _dtype_of(call: Call) -> str | None:
    """Return the format that ``dtype=`` names."""
    given = call.keywords.get("dtype")
    return DTYPES.get(given.name) if isinstance(given, Ref) else None
