"""Finds a task by its name: a built-in one, ``gpt:8x1024``, ``moe:8x1024x16``, or a user's ``file.py:function``."""

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
    "moe-tiny": "mixture of 4 layers x 128, 8 experts of which each token gets 2, 3.5M parameters, on bytes",
    "olmoe-1b-7b": "OLMoE's shape: 16 layers x 2048, 64 experts of which each token gets 8, 6.9B parameters, T=2048",
}
OTHERS = {"digits": "small convolutional network on scikit-learn's 8x8 images of digits: trains in seconds on a CPU"}
ANY_SIZE = {
    "gpt:LAYERSxWIDTH": "a GPT of any size, such as gpt:8x4096",
    "moe:LAYERSxWIDTHxEXPERTS": "a mixture of any size, such as moe:8x1024x16, or moe:8x1024x16+1 with a shared expert",
}
FINETUNE = "finetune"
"""The task of ``train --model PATH --data FILE``."""


def names() -> list[tuple[str, str]]:
    """List every built-in task with a one-line description. Does not import torch."""
    return [*LANGUAGE.items(), *ANY_SIZE.items(), *OTHERS.items()]


def default(device_kind: str) -> str:
    """Return the name of the default task for a type of device ("cpu", "cuda")."""
    return "gpt2-124m" if device_kind == "cuda" else "gpt-tiny"


def find(spec: str, **options: Any) -> Task:
    """Make a task from its name.

    Args:
        spec: A built-in task, ``gpt:LAYERSxWIDTH``, ``moe:LAYERSxWIDTHxEXPERTS``, or ``path/to/file.py:function``.
        **options: Options of the task. None means: not given. The language tasks take ``batch``, ``context``, ``data``,
            ``seed``, ``vocab``, ``packages``, ``tokenizer``, ``field`` and ``max_tokens``. ``digits`` takes ``batch``
            and ``seed``. A user's function takes the options that it has parameters for.

    Returns:
        The task.

    Raises:
        UsageError: There is no such task, or it does not take an option.
    """
    if spec in LANGUAGE or spec.startswith(("gpt:", "moe:")):
        from narrowgauge.tasks import language

        build = functools.partial(language.make, spec)
        return build(**task.select_options(build, options, spec))
    if spec == "digits":
        from narrowgauge.tasks import digits

        return digits.make(**task.select_options(digits.make, options, spec))
    if spec == FINETUNE:
        from narrowgauge.tasks import finetune

        return finetune.make(**task.select_options(finetune.make, options, spec))
    if ":" in spec:
        return task.load(spec, options)
    known = [*LANGUAGE, *ANY_SIZE, *OTHERS]
    near = difflib.get_close_matches(spec.lower(), known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"there is no task {spec!r}; {hint}The tasks are {', '.join(known)} and file.py:function")
