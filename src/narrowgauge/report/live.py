"""Serves the page of a run in progress on 127.0.0.1. The page polls for new data every two seconds.

    /            the page with the current data
    /data.json   ?have=N: {"version": N} if nothing has changed, else {"version", "data"}

Only new events of the record are read. Requests with another Host header are refused, so that no web page can read a
run through the user's browser (DNS rebinding).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from narrowgauge.errors import UsageError
from narrowgauge.report import inputs, pages

HOST = "127.0.0.1"
PORT = 6016
POLL_S = 0.1


class LiveData:
    """The current data of the page, with a version that counts its changes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._inputs = inputs.open_inputs(paths)
        self._lock = threading.Lock()
        self._version = 1
        self._data: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        """Reads new events and returns the page data with their version."""
        with self._lock:
            # A list, because any() over a generator would stop at the first run that has changed.
            changed = [run.update() for run in self._inputs.runs]
            if self._data is None or any(changed):
                self._version += self._data is not None
                self._data = {**pages.collect(self._inputs), "version": self._version}
            return self._data


class Server(ThreadingHTTPServer):
    """The HTTP server of a live page; ``url`` is its address."""

    daemon_threads = True

    def __init__(self, live: LiveData, port: int) -> None:
        self.live = live
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def serve_until(self, stopped: Callable[[], bool]) -> None:
        """Answer requests until ``stopped()``, which is called at least every ``POLL_S`` seconds."""
        self.timeout = POLL_S
        while not stopped():
            self.handle_request()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(403, "text/plain", "this server only answers requests from its own machine")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            self._answer(200, "text/html", pages.render(self.server.live.read(), live=True))
        elif address.path == "/data.json":
            data = self.server.live.read()
            is_current = parse_qs(address.query).get("have", [""])[0] == str(data["version"])
            update = {"version": data["version"]} if is_current else {"version": data["version"], "data": data}
            self._answer(200, "application/json", pages.to_inline_json(update))
        else:
            self._answer(404, "text/plain", "not found: this server has / and /data.json")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the browser has closed the page

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: the terminal only shows the address of the page."""


def serve(paths: Sequence[Path], port: int | None) -> Server:
    """Creates a server for the page of some runs.

    Args:
        paths: Run folders and saved results.
        port: The port to listen on; 0 for any free port; None for the default port, or any free one if it is taken.

    Returns:
        A server that is bound to its port; call ``serve_forever`` to run it.

    Raises:
        UsageError: If the port is invalid or taken.
    """
    if port is not None and not 0 <= port < 65536:
        raise UsageError(f"--serve {port}: expected a port from 1 to 65535, or 0 for any free port")
    live = LiveData(paths)
    for wanted in (PORT, 0) if port is None else (port,):
        try:
            return Server(live, wanted)
        except OSError as error:
            problem = error
    raise UsageError(f"--serve {port}: cannot listen on this port: {problem.strerror}; omit it or choose another")
