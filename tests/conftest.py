"""Shared by all tests: child processes find the package and have default signals; kernels can be interpreted."""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch

from narrowgauge.tasks import language

SOURCE = Path(__file__).parent.parent / "src"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated; only tests/kernels needs it
    # torch.manual_seed would keep the call for a GPU that may come later, each time with the stack as text: 1 ms.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None
gc.disable()  # while tests are imported and collected, where it takes 4 s and finds nothing
language.SAMPLE_TOKENS = 10  # of 200: writing the sample takes longer than a short training
language.EVAL_BATCHES = 4  # of 8: most of the time of a run of a few steps; 4 ranks can share them


def pytest_collection_finish():
    """Look for garbage seldom: to look through all of torch takes 0.3 s, and a test leaves little."""
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    if not torch.cuda.is_available():
        terminalreporter.write_line("no CUDA device: the tests in tests/gpu were not run")


@pytest.fixture(scope="session", autouse=True)
def children_have_default_signals():
    """Give child processes default signal handling, also where the suite was started with signals ignored.

    A shell ignores SIGINT for ``make test &``, and nohup ignores SIGHUP. A new program inherits an ignored signal,
    but not a handler. So a handler that does nothing keeps the signal from this process, and not from its children.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture
def modules_are_not_collected():
    """Leave everything imported so far out of garbage collection, which a benchmark starts several times.

    A collection of all of torch takes 0.3 s.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def mkldnn_stays_on():
    """Keep oneDNN on: after a BF16 product it cannot do, torch turns it off for good, which changes later rounding."""
    enabled = torch.backends.mkldnn.enabled
    yield
    if torch.backends.mkldnn.enabled != enabled:
        torch.backends.mkldnn.set_flags(enabled)
