"""Validation: does a recipe train as good a model as FP32? Paired runs, their statistics, and a verdict.

The package is callable, because ``ng.validate`` is the package or the function of the same name, depending on which was
imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.validate.run import Validation


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Validation:
        from narrowgauge.validate.run import validate

        return validate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
