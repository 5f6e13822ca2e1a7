"""The rule about weights that two modules share, and of which one gets another format."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from narrowgauge.findings import NOTE, SERIOUS, Finding
from narrowgauge.lint.detector import Detector, ModelCheck, TrainingSetup
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.syntax import dotted
from narrowgauge.lint.interpreter.values import Module
from narrowgauge.lint.rule import Rule

TIED_FORMATS = Rule(
    name="tied-formats",
    severity=SERIOUS,
    about="two modules share a weight, and one of them gets another format",
    why="a shared weight has one format: casting one module casts the other, or the weights are no longer shared, "
    "without an error",
    fix="give both the same format, or keep both in FP32",
)


class SharedWeights(Detector):
    """Checks casts of modules whose weight was assigned to another module."""

    def on_assignment(self, node: ast.Assign, target: ast.expr) -> None:
        pair = [one.value for one in (target, node.value) if isinstance(one, ast.Attribute) and one.attr == "weight"]
        names = [(dotted(owner) or "").split(".")[-1] for owner in pair]
        if len(names) == 2 and all(names):
            self.context.event("tie", node, text=" ".join(names))

    def on_cast(self, call: Call, dtype: str) -> None:
        part = (dotted(call.receiver_node) if call.receiver_node else None) or ""
        if "." in part and (call.receiver is None or isinstance(call.receiver, Module)):
            self.context.event("cast-part", call.node, text=f"{part.split('.')[-1]} {dtype}")

    def on_end(self) -> None:
        casts = self.observations.of("cast-part")
        for tie in self.observations.of("tie"):
            first, second = tie.text.split()
            for event in casts:
                name, dtype = event.text.split()
                other = {first: second, second: first}.get(name)
                low = dtype in ("fp16", "bf16")
                if other is not None and low and all(one.text != f"{other} {dtype}" for one in casts):
                    detail = f"{name} is cast to {dtype.upper()}, and shares its weight with {other} (line {tie.line})"
                    self.judge(TIED_FORMATS, event.node, True, detail)


class KeptSharedWeights(ModelCheck):
    """Checks shared weights of which the recipe keeps one user in FP32."""

    def check(self, setup: TrainingSetup) -> Iterator[Finding]:
        users: dict[int, list[str]] = {}
        for path, module in setup.model.named_modules():
            for parameter in module.parameters(recurse=False):
                users.setdefault(id(parameter), []).append(path)
        for paths in users.values():
            kept = [path for path in paths if setup.keeps_in_fp32(path)]
            if len(paths) > 1 and kept and len(kept) < len(paths):
                other = next(path for path in paths if path not in kept)
                detail = (
                    f"{kept[0]} is kept in FP32 and shares its weight with {other}, which is not: the weight is FP32 "
                    "for both, and only one computes in FP32"
                )
                yield TIED_FORMATS.finding(kept[0], detail, f"keep={'+'.join(paths)}, or neither", NOTE)
