"""Serves the page of a run that goes on: on this machine alone, and the page asks for what is new every two seconds.

    /            the page, with what is known by now
    /data.json   ?have=N: {"version": N} where nothing is new, else {"version", "data"}

The record is read on from where it was read to. Requests that name another host are refused, so that no page of the
web can read a run through the reader's browser.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from narrowgauge.errors import UsageError
from narrowgauge.report import pages, sources

HOST = "127.0.0.1"
PORT = 6016
POLL_S = 0.1


class Live:
    """The sources as they are now, and how often they have changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._sources = sources.open_all(paths)
        self._lock = threading.Lock()
        self._version = 1
        self._data: dict[str, Any] | None = None

    def now(self) -> dict[str, Any]:
        """The data of the page, with their version."""
        with self._lock:
            # Every story is asked: any() would stop at the first that has news.
            changed = [story.update() for story in self._sources.stories]
            if self._data is None or any(changed):
                self._version += self._data is not None
                self._data = {**pages.collect(self._sources), "version": self._version}
            return self._data


class Server(ThreadingHTTPServer):
    """Answers with what ``live`` has; ``url`` is where."""

    daemon_threads = True

    def __init__(self, live: Live, port: int) -> None:
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
            self._answer(403, "text/plain", "this server answers its own machine alone")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            self._answer(200, "text/html", pages.render(self.server.live.now(), live=True))
        elif address.path == "/data.json":
            data = self.server.live.now()
            known = parse_qs(address.query).get("have", [""])[0] == str(data["version"])
            news = {"version": data["version"]} if known else {"version": data["version"], "data": data}
            self._answer(200, "application/json", pages.as_json(news))
        else:
            self._answer(404, "text/plain", "there is / and /data.json")

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
            self.close_connection = True  # the reader has closed the page

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to the one line that says where the page is."""


def serve(paths: Sequence[Path], port: int | None) -> Server:
    """A server that is ready to run; on the port that is asked for, else on the usual one or any that is free."""
    if port is not None and not 0 <= port < 65536:
        raise UsageError(f"--serve {port}: expected a port from 1 to 65535, or 0 for any that is free")
    live = Live(paths)
    for wanted in (PORT, 0) if port is None else (port,):
        try:
            return Server(live, wanted)
        except OSError as error:
            problem = error
    raise UsageError(f"--serve {port}: cannot listen there: {problem.strerror}; leave the port out, or take another")
