"""Is a recipe as good as FP32? Paired runs, their statistics, and a verdict. ``ng.validate(task, ...)`` asks it.

The package is named as the function is, and is called in its place: ``ng.validate`` is either, whichever was imported
first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.validate.run import Validation


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Validation:
        from narrowgauge.validate.run import validate

        return validate(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
