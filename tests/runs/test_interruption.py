"""The first signal requests a stop, the same signal again quits, and an ignored SIGINT or SIGHUP stays ignored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from narrowgauge.runs.interruption import SIGNALS, Interruption


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:  # the defaults of a new process
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_one_signal_requests_a_stop(number: signal.Signals) -> None:
    with Interruption() as stop:
        assert not stop.wanted
        send(number)
        assert stop.wanted and stop.name == number.name
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_same_signal_again_quits(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), Interruption():
        send(number)
        send(number)


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGHUP, signal.SIGHUP, signal.SIGHUP),  # a shell and the kernel both send it
        (signal.SIGTERM, signal.SIGHUP),  # as systemd does
        (signal.SIGHUP, signal.SIGTERM),
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    ],
)
def test_several_signals_together_request_one_stop(numbers: tuple[signal.Signals, ...]) -> None:
    with Interruption() as stop:
        send(*numbers)
        assert stop.wanted and stop.name == numbers[0].name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ignored_signals_stay_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with Interruption() as stop:
        send(number, number)
        assert not stop.wanted
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(number) is signal.SIG_IGN


def test_sigterm_always_stops() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Interruption() as stop:
        send(signal.SIGTERM)
        assert stop.wanted and stop.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_handlers_do_not_change_in_another_thread() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    seen: list[bool] = []

    def work() -> None:
        with Interruption() as stop:
            seen.append(stop.wanted)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False] and before == {number: signal.getsignal(number) for number in SIGNALS}
