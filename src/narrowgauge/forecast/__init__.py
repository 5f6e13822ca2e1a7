"""What a training run will take, before it is run: memory, time and cost. ``ng.forecast(task, ...)`` asks it.

The package is named as the function is, and is called in its place: ``ng.forecast`` is either, whichever was imported
first.
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
