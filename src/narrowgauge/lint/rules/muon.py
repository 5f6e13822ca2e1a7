"""Rules about Muon: embeddings among its matrices, and a learning rate that was chosen for another rule.

Muon orthogonalizes the update of each matrix. A row of an embedding has a gradient only if its token occurs, so an
orthogonalized update moves rare tokens as far as frequent ones. torch.optim.Muon refuses vectors, but an embedding is a
matrix, which nothing refuses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from narrowgauge.errors import UsageError
from narrowgauge.findings import NOTE, WARNING, Finding
from narrowgauge.lint.detector import Detector, ModelCheck, TrainingSetup, more_like_it
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.syntax import dotted, nodes_of
from narrowgauge.lint.interpreter.values import Const
from narrowgauge.lint.rule import PYTORCH, Rule

URL = f"{PYTORCH}/generated/torch.optim.Muon.html"
MUON_EMBEDDING = Rule(
    name="muon-embedding",
    severity=WARNING,
    about="Muon gets all matrices of a model, embeddings and the head included",
    why="orthogonalized updates move the rows of rare tokens as far as those of frequent ones: the model learns worse "
    "than with AdamW for these matrices",
    fix="give Muon the matrices of the blocks, and AdamW the rest: ng.optim.Muon(ng.optim.split_for_muon(model))",
    url=URL,
)
MUON_LEARNING_RATE = Rule(
    name="muon-learning-rate",
    severity=NOTE,
    about="the learning rate of Muon does not suit its adjust_lr_fn",
    why="by default a rate of 0.02 is usual, and AdamW's rates give updates 5 to 13 times smaller than AdamW's; with "
    '"match_rms_adamw" it is the other way round',
    fix='adjust_lr_fn="match_rms_adamw" for a rate that is good for AdamW; lr=0.02 without it',
    url=URL,
)
_ADAMW_RATE, _MUON_RATE = 1e-3, 0.01
"""Rates up to the first are AdamW's, rates from the second on are Muon's own."""
_CLASSES = ("torch.optim.Muon", "narrowgauge.optim.Muon")
_MODEL = re.compile(r"(self\.)?(\w+_)?(model|net|network|gpt|lm|llm)(_\w+)?", re.IGNORECASE)
"""Names of whole models; ``blocks.parameters()`` is what Muon is for."""
_EMBEDDINGS = frozenset({"Embedding", "wte", "embed_tokens", "AutoModel", "AutoModelForCausalLM", "from_pretrained"})
_HARMLESS = frozenset({"ndim", "dim", "requires_grad", "shape", "size", "len"})
"""What a filter may read that tells an embedding and a matrix of a block not apart."""


class MuonArguments(Detector):
    """Checks calls of Muon, also of classes of this name that others wrote."""

    def on_call(self, call: Call) -> None:
        if (dotted(call.node.func) or "").split(".")[-1] != "Muon":
            return
        given = call.written(0, "params")
        if given is not None and _EMBEDDINGS & self.context.words and self._is_whole_model(given):
            self.judge(MUON_EMBEDDING, call.node, True, f"Muon gets {ast.unparse(given)}, with its embeddings")
        if call.name in _CLASSES:
            self._check_rate(call)

    def _check_rate(self, call: Call) -> None:
        rate, written, adjust = call.arg(1, "lr"), call.written(8, "adjust_lr_fn"), call.arg(8, "adjust_lr_fn")
        if not isinstance(rate, Const) or not isinstance(rate.value, float | int) or isinstance(rate.value, bool):
            return
        if (written is not None and not isinstance(adjust, Const)) or any(k.arg is None for k in call.node.keywords):
            return
        matches = isinstance(adjust, Const) and adjust.value == "match_rms_adamw"
        if matches and rate.value >= _MUON_RATE:
            detail = f"lr={rate.value:g} with match_rms_adamw: updates are those of AdamW at this rate"
            fix = f"a rate that is good for AdamW, such as 6e-4, or no adjust_lr_fn with lr={rate.value:g}"
            self.judge(MUON_LEARNING_RATE, call.node, True, detail, fix, WARNING)
        elif not matches and 0 < rate.value <= _ADAMW_RATE:
            self.judge(MUON_LEARNING_RATE, call.node, True, f"lr={rate.value:g} without match_rms_adamw")

    def _is_whole_model(self, node: ast.expr, depth: int = 3) -> bool:
        """Whether an expression is all parameters of a model, or all of its matrices."""
        if isinstance(node, ast.Name) and depth:
            values = [
                one.value
                for one in nodes_of(self.context.tree)
                if isinstance(one, ast.Assign) and any(isinstance(t, ast.Name) and t.id == node.id for t in one.targets)
            ]
            return len(values) == 1 and self._is_whole_model(values[0], depth - 1)
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            (part, *more) = node.generators
            read = {word for test in part.ifs for word in _list_attributes(test)}
            return not more and read <= _HARMLESS and self._is_whole_model(part.iter, depth)
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("parameters", "named_parameters"):
            return not node.args and bool(_MODEL.fullmatch(dotted(node.func.value) or ""))
        wraps = isinstance(node.func, ast.Name) and node.func.id in ("list", "iter") and len(node.args) == 1
        return wraps and self._is_whole_model(node.args[0], depth)


def _list_attributes(test: ast.expr) -> Iterator[str]:
    """Yield what a condition reads: attributes and functions; "?" for text, which compares names."""
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif (isinstance(node, ast.Constant) and isinstance(node.value, str)) or isinstance(node, ast.In | ast.NotIn):
            yield "?"


def _is_orthogonalized(group: Mapping[str, Any]) -> bool:
    from narrowgauge.optim.muon_groups import read_rule

    try:
        return read_rule(group) in (None, "muon")
    except UsageError:  # the options of a class that others wrote
        return False


class MuonMatrices(ModelCheck):
    """Checks that no group that Muon orthogonalizes has an embedding."""

    def check(self, setup: TrainingSetup) -> Iterator[Finding]:
        from torch import nn

        if setup.optimizer is None or type(setup.optimizer).__name__ != "Muon":
            return
        groups = [group for group in setup.optimizer.param_groups if _is_orthogonalized(group)]
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        found = [
            path
            for path, module in setup.model.named_modules()
            if isinstance(module, nn.Embedding) and id(module.weight) in stepped
        ]
        if found:
            yield MUON_EMBEDDING.finding(found[0], f"Muon steps the embedding{more_like_it(len(found))}")
