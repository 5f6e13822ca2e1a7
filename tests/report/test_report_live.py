"""The live page: updates are sent once, only to this machine; signals stop the server with exit code 0."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import example_run
import pytest

import child_processes
from narrowgauge.errors import UsageError
from narrowgauge.report import live
from narrowgauge.runs import record


@pytest.fixture
def server(tmp_path: Path) -> Iterator[live.Server]:
    made = live.serve([example_run.write_run(tmp_path / "run", 40, tensors=2, every=10, end=False)], 0)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def ask(server: live.Server | int, path: str, **headers: str) -> tuple[int, str]:
    port = server if isinstance(server, int) else int(server.server_address[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_updates_are_sent_once(server: live.Server, tmp_path: Path) -> None:
    status, page = ask(server, "/")
    assert status == 200 and 'data-live="true"' in page and "connect-src 'self'" in page
    assert json.loads(ask(server, "/data.json?have=1")[1]) == {"version": 1}
    with record.Record(tmp_path / "run") as book:
        book.append("step", 41, loss=1.5, lr=0.1, grad_norm=1.0, loss_scale=1.0, applied=True, tokens_per_s=1.0)
    news = json.loads(ask(server, "/data.json?have=1")[1])
    assert news["version"] == 2 and news["data"]["runs"][0]["step"] == 41
    assert news["data"]["runs"][0]["state"] == "running"
    assert json.loads(ask(server, "/data.json?have=2")[1]) == {"version": 2}
    assert "data" in json.loads(ask(server, "/data.json?have=nonsense")[1])


def test_only_this_machine_gets_answers(server: live.Server) -> None:
    assert ask(server, "/data.json", Host="evil.example:80")[0] == 403
    assert ask(server, "/../../etc/passwd")[0] == 404
    assert server.server_address[0] == "127.0.0.1"


def test_taken_port_is_refused(server: live.Server, tmp_path: Path) -> None:
    port = int(server.server_address[1])
    with pytest.raises(UsageError, match="cannot listen"):
        live.serve([tmp_path / "run"], port)
    with pytest.raises(UsageError, match="expected a port"):
        live.serve([tmp_path / "run"], 70000)


IGNORING = """
import signal, sys
for name in sys.argv.pop(1).split():
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from narrowgauge.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("ignored", "survived", "stopped_by"),
    [
        ("", [], signal.SIGINT),
        ("", [], signal.SIGHUP),
        ("SIGINT", [signal.SIGINT], signal.SIGHUP),  # as `command &` in a script starts it
        ("SIGINT SIGHUP SIGTERM", [signal.SIGINT, signal.SIGHUP], signal.SIGTERM),  # as nohup, and more
    ],
)
def test_signals_stop_the_server(
    tmp_path: Path, ignored: str, survived: list[signal.Signals], stopped_by: signal.Signals
) -> None:
    run = example_run.write_run(tmp_path / "run", 5)
    command = [sys.executable, "-c", IGNORING, ignored, "report", str(run), "--serve", "0"]
    with child_processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:") and "Ctrl-C" in line
        port = int(line.split("/")[2].split(":")[1])
        for number in survived:
            process.send_signal(number)
            assert ask(port, "/data.json")[0] == 200
        process.send_signal(stopped_by)
        rest, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and rest == "stopped\n" and errors == ""
