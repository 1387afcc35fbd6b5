"""The agent of one chat, started by ``telegram_agents.py``. Put your model here.

It is an ordinary program: it listens on ``$PORT`` and keeps its notes in the directory it runs in, which is its own.
"""

import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Agent(BaseHTTPRequestHandler):
    """A text comes in, an answer goes out."""

    def do_POST(self) -> None:
        with Path("notes.txt").open("a+") as notes:
            notes.write(self.rfile.read(int(self.headers["content-length"])).decode() + "\n")
            notes.seek(0)
            known = len(notes.readlines())
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"Noted. I know {known} things about you.".encode())


HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Agent).serve_forever()
