"""A server that speaks as much of the Hugging Face Hub's protocol as downloading models needs, for tests."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

GATED = "tiny/gated"


def make_commit(number):
    return hashlib.sha1(str(number).encode()).hexdigest()


class Hub:
    """Models by name: their commits, oldest first, each a dictionary from file names to bytes."""

    def __init__(self):
        self.models, self.requests, self.url = {}, [], ""

    def push(self, name, folder):
        """Make a commit of all files of a folder; return its hash."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        commits = self.models.setdefault(name, {})
        commit = make_commit((name, len(commits)))
        commits[commit] = files
        return commit

    def resolve(self, name, revision):
        commits = self.models[name]
        return list(commits)[-1] if revision == "main" else revision if revision in commits else None


def start(hub):
    """Serve a hub on a free port of this machine until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            parts = path.removeprefix("/api/models").strip("/").split("/")
            if len(parts) < 4:
                return self.fail(404, "EntryNotFound")
            org, name, kind, revision, *rest = parts
            name = f"{org}/{name}"
            if name == GATED:
                return self.fail(403, "GatedRepo")
            if name not in hub.models:
                return self.fail(404, "RepoNotFound")
            commit = hub.resolve(name, revision)
            if commit is None:
                return self.fail(404, "RevisionNotFound")
            files = hub.models[name][commit]
            if kind == "revision":
                siblings = [{"rfilename": file} for file in files]
                return self.send(json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())
            if kind == "tree":
                entries = [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in files.items()
                ]
                return self.send(json.dumps(entries).encode())
            file = "/".join(rest)
            if file not in files:
                return self.fail(404, "EntryNotFound")
            return self.send(files[file], commit)

        def send(self, content, commit=None):
            total, begin, end = len(content), 0, len(content)
            wanted = self.headers.get("Range")
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                begin, end = int(first), min(total, int(last) + 1 if last else total)
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{total}")
            if commit is not None:
                self.send_header("X-Repo-Commit", commit)
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content[begin:end])

        def fail(self, status, code):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    @contextlib.contextmanager
    def serving():
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            server.server_close()
            thread.join(10)

    return serving()
