"""Shared by all tests: child processes find the package and have default signals; kernels can be interpreted."""

import atexit
import dataclasses
import functools
import gc
import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

from sampling import pytest_addoption, pytest_collection_modifyitems  # noqa: F401

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated: before the imports below decorate some

from narrowgauge import hardware, kernels
from narrowgauge.tasks import language

# `make test` gives the same answer each time. `HYPOTHESIS_PROFILE=search pytest` looks for new failing examples.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
SOURCE = Path(__file__).parent.parent / "src"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
if not torch.cuda.is_available():
    # torch.manual_seed would keep the call for a GPU that may come later, each time with the stack as text: 1 ms.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None
gc.disable()  # while tests are imported and collected, where it takes 4 s and finds nothing
language.SAMPLE_TOKENS = 10  # of 200: writing the sample takes longer than a short training
language.EVAL_BATCHES = 4  # of 8: most of the time of a run of a few steps; 4 ranks can share them


def pytest_collection_finish():
    """Look for garbage seldom, as a test leaves little, and never in what was imported: that takes 0.3 s each time."""
    gc.set_threshold(50_000, 20, 20)
    gc.freeze()
    atexit.register(gc.unfreeze)  # or else Triton's bindings list all that is left
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    """Leave what a file has imported and cached out of garbage collection as well: libraries collect after each run.

    Late in a worker's life each of these collections took a second otherwise, and trainers of libraries make several.
    """
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_configure(config):
    # Models of tests are small, so FP8 does not make them faster on a GPU. Tests of the warning turn it on again.
    config.addinivalue_line("filterwarnings", "ignore::narrowgauge.errors.SlowRecipeWarning")


def pytest_terminal_summary(terminalreporter):
    if not torch.cuda.is_available():
        terminalreporter.write_line("no CUDA device: the tests in tests/gpu were not run")


@pytest.fixture(autouse=True)
def accelerate_forgets():
    """Reset the state that Accelerate has in a process: all others would get the precision of a first Accelerator."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state()
        state.GradientState._reset_state()


@pytest.fixture(scope="session", autouse=True)
def children_have_default_signals():
    """Give child processes default signal handling, also where the suite was started with signals ignored.

    A shell ignores SIGINT for ``make test &``, and nohup ignores SIGHUP. A new program inherits an ignored signal,
    but not a handler. So a handler that does nothing keeps the signal from this process, and not from its children.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter():
    """Leave out what Triton's interpreter does for nothing, which is two thirds of its time.

    Each call of a device function searches all of triton.language for builtins, to replace what the launch has
    replaced already. For each sum and product of integers it computes whether it overflows, which is only looked at if
    ``debug`` is set. To find the type of an array it makes a table of all types.
    """
    if not kernels.HAVE_TRITON or torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    launch, replace, replaced = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()
    find, find_once = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug

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

    def find_dtype(dtype):
        return find(dtype) if dtype.scalar.is_ptr() else find_once(dtype.scalar)  # a pointer's has no hash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter, "_get_np_dtype", find_dtype)
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture
def set_cpu_formats(monkeypatch):
    """A function that sets the formats in which the CPU multiplies, whatever this machine does.

    With FP32 alone, products in 16 bits are emulated, so that recipes can be compared to the bit.
    """

    def set_formats(*names):
        monkeypatch.setattr(hardware, "native_on_cpu", lambda features: names)

    return set_formats


@pytest.fixture
def modules_are_not_collected():
    """Leave out of garbage collection also what tests have imported, for a test that collects several times.

    To look through the libraries of all tests takes a second. ``gc.get_objects`` does not list what is left out.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def mkldnn_stays_on():
    """Keep oneDNN on: after a BF16 product it cannot do, torch turns it off for good, which changes later rounding."""
    enabled = torch.backends.mkldnn.enabled
    yield
    if torch.backends.mkldnn.enabled != enabled:
        torch.backends.mkldnn.set_flags(enabled)
