"""Predicts memory, time and cost of a training run before it starts: ``ng.forecast(task, ...)``.

The package and the function have the same name. The package is callable, so ``ng.forecast(...)`` works whichever of the
two was imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.forecast.run import Forecast


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Forecast:
        from narrowgauge.forecast.run import forecast

        return forecast(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
