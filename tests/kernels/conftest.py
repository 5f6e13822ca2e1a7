"""Kernel tests run on a GPU where there is one, and in Triton's interpreter where there is none."""

import pytest
import torch

from narrowgauge import kernels


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(kernels, "interpreting", not torch.cuda.is_available())


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter():
    """Let the interpreter replace triton.language once per launch and module, and not in every device function call.

    Each call of a device function searches all of triton.language for builtins, to replace what the launch has
    replaced already; that took a third of the time.
    """
    if not kernels.HAVE_TRITON or torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    launch, replace, replaced = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch_anew(self, *args, **kwargs):
        replaced.clear()  # the launch before has restored the originals
        return launch(self, *args, **kwargs)

    def replace_once(function):
        module = function.__globals__["__name__"]
        if module in replaced:
            return interpreter._LangPatchScope()
        scope = replace(function)
        replaced.add(module)
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield
