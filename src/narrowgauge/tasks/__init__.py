"""The tasks a run can be asked for: built in, ``gpt:LAYERSxWIDTH``, or ``path/to/file.py:function`` of the user's."""

from __future__ import annotations

import difflib
import functools
from typing import Any

from narrowgauge import task
from narrowgauge.errors import UsageError
from narrowgauge.task import Task

LANGUAGE = {
    "gpt-tiny": "GPT of 6 layers x 384, 10.8M parameters, on bytes: learns in two minutes on a CPU",
    "gpt2-124m": "GPT-2 of 12 layers x 768, 124M parameters, T=1024",
    "gpt2-350m": "GPT-2 of 24 layers x 1024, 355M parameters, T=1024",
    "gpt-1.3b": "GPT of 24 layers x 2048, 1.3B parameters, T=2048",
    "llama-1b": "Llama of 16 layers x 2048 with 8 key-value heads, 1.1B parameters, T=2048",
    "llama-7b": "Llama of 32 layers x 4096, 6.7B parameters, T=2048",
    "llama-70b": "Llama of 80 layers x 8192 with 8 key-value heads, 70.6B parameters, T=8192: to forecast",
    "llama-405b": "Llama of 126 layers x 16384 with 8 key-value heads, 405.9B parameters, T=8192: to forecast",
}
OTHERS = {"digits": "small convolutional network on scikit-learn's 8x8 images of digits: no language, seconds on a CPU"}
ANY_GPT = "gpt:LAYERSxWIDTH"


def names() -> list[tuple[str, str]]:
    """Every built-in task with a line about it. Answers without importing torch."""
    return [*LANGUAGE.items(), (ANY_GPT, "a GPT of any size, such as gpt:8x4096"), *OTHERS.items()]


def default(device_kind: str) -> str:
    """The task that is useful on a kind of device ("cpu", "cuda")."""
    return "gpt2-124m" if device_kind == "cuda" else "gpt-tiny"


def find(spec: str, **options: Any) -> Task:
    """Make the task of a name. Options that are None were not given; one that the task does not take is refused.

    The language tasks take ``batch``, ``context``, ``data``, ``seed``, ``vocab`` and ``packages``; ``digits`` takes
    ``batch`` and ``seed``; a user's function takes what it has parameters for.
    """
    if spec in LANGUAGE or spec.startswith("gpt:"):
        from narrowgauge.tasks import language

        build = functools.partial(language.make, spec)
        return build(**task.select_options(build, options, spec))
    if spec == "digits":
        from narrowgauge.tasks import digits

        return digits.make(**task.select_options(digits.make, options, spec))
    if ":" in spec:
        return task.load(spec, options)
    known = [*LANGUAGE, ANY_GPT, *OTHERS]
    near = difflib.get_close_matches(spec.lower(), known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"there is no task {spec!r}; {hint}There are {', '.join(known)} and file.py:function")
