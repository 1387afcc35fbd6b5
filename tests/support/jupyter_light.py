"""Stands in for a single-user server where a test is about the spawner: it starts in a moment and tells who it is.

It listens where the hub told it, answers every path with its facts, and ends when it is told to by ``?exit=CODE``.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


def facts() -> dict[str, object]:
    """Who runs here."""
    mask = os.umask(0o077)
    os.umask(mask)
    return {
        "pid": os.getpid(),
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": os.getgroups(),
        "umask": mask,
        "cwd": str(Path.cwd()),
        "env": dict(os.environ),
    }


class Handler(BaseHTTPRequestHandler):
    """Every path is the same."""

    def do_GET(self) -> None:
        """Facts, or the end."""
        code = parse_qs(urlsplit(self.path).query).get("exit")
        if code is not None:
            print(f"told to end with {code[0]}", flush=True)
            os._exit(int(code[0]))
        body = json.dumps(facts()).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""


if __name__ == "__main__":
    if os.environ["JUPYTERHUB_USER"].startswith("unlucky"):
        sys.exit("no luck today")
    HTTPServer(("127.0.0.1", urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"]).port or 0), Handler).serve_forever()
