"""The rules of the linter, one module per family. A rule and its detectors are in the same module.

To add a rule, declare a ``Rule`` and a ``Detector`` (for scripts) or a ``ModelCheck`` (for models and recipes) in a
module of this folder. They are found here.
"""

from __future__ import annotations

import importlib
import pkgutil

from narrowgauge.lint.detector import Detector, ModelCheck
from narrowgauge.lint.rule import Rule

RULES: dict[str, Rule] = {}
"""All rules by name."""
DETECTORS: list[type[Detector]] = []
"""What checks scripts."""
MODEL_CHECKS: list[type[ModelCheck]] = []
"""What checks models, optimizers and recipes."""

for _module in pkgutil.iter_modules(__path__):
    for _value in vars(importlib.import_module(f"{__name__}.{_module.name}")).values():
        if isinstance(_value, Rule):
            RULES.setdefault(_value.name, _value)
        elif isinstance(_value, type) and _value.__module__ == f"{__name__}.{_module.name}":
            if issubclass(_value, Detector):
                DETECTORS.append(_value)
            elif issubclass(_value, ModelCheck):
                MODEL_CHECKS.append(_value)
