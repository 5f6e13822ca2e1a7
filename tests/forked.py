"""Starts processes that have imported torch and narrowgauge already: forks of one server for each process of pytest.

A new interpreter spends five seconds on imports before it does anything. A fork starts in milliseconds, and is a new
process in everything that these tests ask for: signals, descriptors, exit codes, kills. Tests of the start or of the
end of an interpreter itself use ``child_processes`` instead.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import keyword
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import DupFd
from typing import IO, Any, NoReturn

import torch

from narrowgauge.cli import VERBS

PRELOAD = [
    "forked", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.debug", "tensorboard.compat.proto.event_pb2", "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer", "narrowgauge.runs.trackers.tensorboard", "narrowgauge.runs.train",
    "narrowgauge.tasks.language", "narrowgauge.models.gpt", "narrowgauge.cli.progress", "narrowgauge.validate.run",
    "pytest", "transformers.models.olmoe.modeling_olmoe",
    *(f"narrowgauge.cli.{verb}{'_' * keyword.iskeyword(verb)}" for verb in VERBS),
]  # fmt: skip
DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGCHLD: signal.SIG_DFL,
}
LIMIT_S = 30
"""How long the kernel may take to end a process that was killed."""


def get_context() -> Any:
    """Return the multiprocessing context of the server. Only the first preload counts, so all tests use this one."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class Child:
    """A forked process with the interface of ``subprocess.Popen``."""

    def __init__(self, process: Any, stdout: IO[Any] | None, stderr: IO[Any] | None) -> None:
        self._process = process
        self.pid: int = process.pid
        self.stdout, self.stderr = stdout, stderr

    @property
    def returncode(self) -> int | None:
        exitcode: int | None = self._process.exitcode
        return exitcode

    poll = returncode.fget

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[Any, Any]:
        """Read both streams to their end, and wait for the process."""
        with ThreadPoolExecutor(2) as readers:
            texts = [stream and readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            finally:
                self.kill()
        out, err = (text and text.result() for text in texts)
        return out, err


def start_cli(argv: Sequence[str], **options: Any) -> contextlib.AbstractContextManager[Child]:
    """Start ``narrowgauge ARGV`` in the current folder. The end of the block kills it. Options: those of ``start``."""
    return start(run_verb, argv, **options)


@contextlib.contextmanager
def start(
    main: Callable[[list[str]], int],
    argv: Sequence[str],
    *,
    stdout: int | IO[Any] = subprocess.DEVNULL,
    stderr: int | IO[Any] = subprocess.DEVNULL,
    text: bool = False,
    ignored: Sequence[int] = (),
    terminal: bool = False,
    env: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Start a program in the current folder. The end of the block kills it.

    Args:
        main: Runs the program and returns its exit code: ``run_verb``, ``run_script`` or another of this file.
        argv: Its arguments.
        stdout: A file, or ``subprocess.PIPE`` or ``DEVNULL``.
        stderr: The same, or ``subprocess.STDOUT``.
        text: Whether pipes are read as text.
        ignored: Signals that the process ignores from its start, as nohup makes it.
        terminal: Whether ``stdout`` becomes its controlling terminal and its standard input, as in a new shell.
        env: Its environment; without it, the current one.
    """
    with contextlib.ExitStack() as stack:
        ours: list[IO[Any] | None] = []
        theirs: list[int] = []
        for wanted in (stdout, stderr):
            reader = None
            if wanted == subprocess.PIPE:
                read, number = os.pipe()
                reader = stack.enter_context(open(read, "r" if text else "rb"))  # noqa: PTH123
            elif wanted == subprocess.STDOUT:
                number = os.dup(theirs[0])
            elif wanted == subprocess.DEVNULL:
                number = os.open(os.devnull, os.O_WRONLY)
            else:
                number = os.dup(wanted.fileno())  # type: ignore[union-attr]
            ours.append(reader)
            theirs.append(number)
        environment = dict(os.environ if env is None else env)
        process = get_context().Process(
            target=_run,
            args=(main, [*argv], _Streams(theirs), str(os.getcwd()), environment, [*ignored], terminal),  # noqa: PTH109
        )
        process.start()
        for number in theirs:
            os.close(number)
        child = Child(process, *ours)
        try:
            yield child
        finally:
            process.kill()
            process.join(LIMIT_S)


class _Streams:
    """Descriptors that become the standard output and error of a child."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _receive, tuple(DupFd(number) for number in self.numbers)


def _receive(*sent: Any) -> _Streams:
    return _Streams([one.detach() for one in sent])


def run_verb(argv: list[str]) -> int:
    """As ``python -m narrowgauge``."""
    from narrowgauge.cli import main

    sys.argv = ["narrowgauge", *argv]
    return main(argv)


def run_script(argv: list[str]) -> int:
    """As ``python SCRIPT``. An exception gives exit code 1."""
    sys.argv = argv
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def run_forking_script(argv: list[str]) -> int:
    """As ``run_script``, for a script that spawns processes: they are forks, which need no imports."""
    get_context = multiprocessing.get_context

    def get_fork(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = get_fork  # type: ignore[assignment]
    return run_script(argv)


def finish_script(
    argv: Sequence[str], timeout: float, *, main: Callable[[list[str]], int] = run_script, **env: str
) -> tuple[int, str, str]:
    """Run a script to its end, with these additions to the environment. Returns its exit code, output and errors."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start(main, argv, env={**os.environ, **env}, **streams) as child:
        out, err = child.communicate(timeout)
        assert child.returncode is not None
        return child.returncode, out, err


def run_pytest(argv: list[str]) -> int:
    """As ``python -m pytest``."""
    import pytest

    return int(pytest.main(argv))


def _run(
    main: Callable[[list[str]], int],
    argv: list[str],
    streams: _Streams,
    folder: str,
    environment: dict[str, str],
    ignored: list[int],
    terminal: bool,
) -> None:
    """Become a process that looks as if a new interpreter had started it."""
    assert "narrowgauge.runs.train" in sys.modules, "the server failed to import it, so every child would"
    for target, number in enumerate(streams.numbers, 1):
        os.dup2(number, target)
        os.close(number)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]  # noqa: SIM115
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    for number, handler in DEFAULTS.items():
        signal.signal(number, signal.SIG_IGN if number in ignored else handler)
    if terminal:
        os.setsid()
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        os.dup2(1, 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    torch.set_num_threads(1)
    code = main(argv)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End as an interpreter does: wait for threads, call exit functions, flush the streams, 120 if that fails.

    Only the modules are not taken apart: with those of the server that takes a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            code = 120
    os._exit(code)
