"""A real JupyterHub with its proxy, and somebody at a browser who uses it.

``Hub`` runs in a directory of its own and can be killed and started again; ``Browser`` logs in, spawns a server, opens
a kernel and runs code in it through the websocket, over HTTP and through the proxy only.
"""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from support.cli_daemon import Person, free_port
from support.hostile_accounts import Account
from support.waiting import until

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 100.0
_BIN = "node_modules/.bin/configurable-http-proxy"
_IMPORTS = Path(__file__).parent / "jupyter_imports"

CONFIG = """
c.JupyterHub.spawner_class = "everdeck"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.Authenticator.allowed_users = {users!r}
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_bind_url = "http://{address}:{hub_port}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api_port}"
c.ConfigurableHTTPProxy.should_start = False
c.JupyterHub.allow_named_servers = True
c.JupyterHub.cookie_secret = bytes.fromhex({secret!r})
c.JupyterHub.services = [{{"name": "tester", "api_token": {token!r}}}]
c.JupyterHub.load_roles = [{{"name": "tester", "scopes": ["admin:users", "admin:servers"], "services": ["tester"]}}]
c.Spawner.http_timeout = 90
c.Spawner.start_timeout = 90
"""


def proxy_program() -> str:
    """Where configurable-http-proxy is; a test that needs it is skipped without."""
    for package in ("jupyterhub", "jupyterlab"):  # whose single-user server is spawned; looked for, not loaded
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    ours = Path(sys.prefix, "npm", _BIN)
    found = str(ours) if ours.exists() else shutil.which("configurable-http-proxy")
    if found is None or shutil.which("node") is None:
        pytest.skip("needs node and configurable-http-proxy; with npm on the machine `make setup` installs it")
    return found


def for_every_account(scripts: Path, account: Account | None) -> list[str]:
    """What stands before a command so that every account can run this interpreter, and this one does.

    An interpreter may be below a directory that only root can pass (``/root``). A mount namespace of the hub's own has
    an open directory there, with nothing in it but what Python needs.
    """
    lower = [] if account is None else ["setpriv", f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups"]
    if os.geteuid() != 0:
        return lower
    interpreter = Path(os.path.realpath(scripts / "python"))
    needed = [interpreter.parents[1], scripts.parent, ROOT]
    steps = []
    for closed in sorted({closed for path in needed if (closed := _closed_above(path)) is not None}):
        inside = [path for path in needed if path.is_relative_to(closed)]
        steps += [f"mkdir -p $t/{n} && mount --bind {path} $t/{n}" for n, path in enumerate(inside)]
        steps += [f"mount -t tmpfs -o mode=755 everdeck-test {closed}"]
        steps += [f"mkdir -p {path} && mount --bind $t/{n} {path}" for n, path in enumerate(inside)]
    if not steps:
        return lower
    script = "set -e; t=/mnt; mount -t tmpfs everdeck-test $t; " + "; ".join(steps) + '; exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *lower]


def _closed_above(path: Path) -> Path | None:
    """The outermost directory on the way there that others may not pass."""
    return next((above for above in reversed(path.parents) if not above.stat().st_mode & 0o001), None)


class Hub:
    """One hub in one directory. ``more`` is added to its configuration; servers reach it at ``address``."""

    def __init__(
        self,
        directory: Path,
        more: str = "",
        *,
        account: Account | None = None,
        scripts: Path | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.directory = directory
        self.address = address
        self.scripts = scripts or Path(sys.executable).parent
        self.state = directory / ".everdeck"
        self.port = free_port()
        self.token = secrets.token_hex(16)
        self.users = {"alice", "bob"}
        self._account = account
        self._process: subprocess.Popen[bytes] | None = None
        self._proxy: subprocess.Popen[bytes] | None = None
        self._more = more
        self._ports = (free_port(), free_port())
        self._secret = secrets.token_hex(32)

    @property
    def url(self) -> str:
        """Where browsers go."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The hub's."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers through its proxy."""
        self.launch()
        try:
            until(self.answers, "the hub answers", seconds=PATIENCE_SECONDS)
        except AssertionError as error:
            error.add_note(self.log()[-3000:])
            raise

    def launch(self) -> None:
        """Start it and wait for nothing. Its proxy is a program of its own, which outlives it, as is recommended."""
        if self._proxy is None:
            self._proxy = self._started_proxy()
        config = CONFIG.format(
            users=self.users,
            port=self.port,
            address=self.address,
            hub_port=self._ports[0],
            api_port=self._ports[1],
            secret=self._secret,
            token=self.token,
        )
        (self.directory / "jupyterhub_config.py").write_text(config + self._more)
        keep = {key: value for key, value in os.environ.items() if not key.startswith(("EVERDECK_", "JUPYTER"))}
        path = f"{self.scripts}:{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        env = keep | {"PATH": path, "CONFIGPROXY_AUTH_TOKEN": self.token, "PYTHONPATH": str(_IMPORTS)}
        if self._account is not None:
            env |= {"HOME": str(self.directory), "USER": self._account.name}
        command = [str(self.scripts / "python"), "-m", "jupyterhub"]
        with (self.directory / "hub.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*for_every_account(self.scripts, self._account), *command],
                cwd=self.directory,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def answers(self) -> bool:
        """Does it answer?"""
        assert self._process is not None
        assert self._process.poll() is None, f"the hub ended:\n{self.log()[-3000:]}"
        with socket.socket() as probe:
            if probe.connect_ex((self.address, self._ports[0])) != 0:
                return False
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/hub/api/", timeout=PATIENCE_SECONDS).status_code == httpx.codes.OK
        return False

    def log(self) -> str:
        """What the hub printed."""
        return (self.directory / "hub.log").read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to the hub itself, and to nobody else."""
        assert self._process is not None
        self._process.kill()
        self.ended()

    def stop_politely(self) -> None:
        """SIGTERM, upon which a hub stops its servers unless it was told otherwise."""
        assert self._process is not None
        self._process.terminate()
        self.ended()

    def ended(self) -> int:
        """Wait for its end."""
        assert self._process is not None
        return self._process.wait(PATIENCE_SECONDS)

    def ask(self, method: str, path: str, expect: int | None = None, **options: Any) -> Any:
        """The hub's API as an administrator."""
        headers = {"authorization": f"token {self.token}"}
        answer = httpx.request(method, f"{self.url}/hub/api/{path}", headers=headers, timeout=60, **options)
        assert expect is None or answer.status_code == expect, answer.text
        if "json" not in answer.headers.get("content-type", "json"):
            answer.raise_for_status()  # the proxy's own answer: the hub is not there
        return answer.json() if answer.content else None

    def leave(self) -> None:
        """End the hub, its proxy and every server."""
        for process in (self._process, self._proxy):
            if process is not None:
                process.kill()
                process.wait(PATIENCE_SECONDS)
        Person(self.state).leaves()

    def _started_proxy(self) -> "subprocess.Popen[bytes]":
        hub = f"http://{self.address}:{self._ports[0]}"
        places = {"port": self.port, "api-port": self._ports[1], "default-target": hub}
        words = [word for name, value in places.items() for word in (f"--{name}", str(value))]
        with (self.directory / "proxy.log").open("wb") as log:
            return subprocess.Popen(
                [proxy_program(), "--ip", "127.0.0.1", *words, "--log-level", "warn"],
                env={**os.environ, "CONFIGPROXY_AUTH_TOKEN": self.token},
                stdout=log,
                stderr=log,
            )


@contextlib.contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """A hub that leaves nothing behind; what it said is shown if the test fails."""
    try:
        hub.start()
        yield hub
    except BaseException:
        print(hub.log()[-6000:])
        raise
    finally:
        hub.leave()


class Browser:
    """Somebody who uses a hub over HTTP."""

    def __init__(self, hub: Hub, user: str) -> None:
        self.hub = hub
        self.user = user
        self._client = httpx.Client(base_url=hub.url, follow_redirects=True, timeout=PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def logs_in(self) -> httpx.Response:
        """By the form of the login page; the hub goes on to spawn the server, as for everybody who logs in."""
        self._client.get("/hub/login")
        form = {"username": self.user, "password": "x", "_xsrf": self._xsrf("/hub/")}
        return self._client.post("/hub/login", data=form)

    def spawns(self) -> httpx.Response:
        """Ask for the server, as the button does."""
        return self._client.get(f"/hub/spawn/{self.user}")

    def progress(self) -> list[dict[str, Any]]:
        """What the page of a pending spawn shows, until the server is there or failed."""
        events = []
        params = {"_xsrf": self._xsrf("/hub/")}
        with self._client.stream("GET", f"/hub/api/users/{self.user}/server/progress", params=params) as stream:
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    events.append(json.loads(line.removeprefix("data:")))
        return events

    def gets_in(self) -> None:
        """Open JupyterLab, with the login by OAuth on the way, once the server is there."""

        def is_in() -> bool:
            answer = self._client.get(f"/user/{self.user}/lab")
            if answer.status_code == httpx.codes.OK and "jupyter-config-data" in answer.text:
                return True
            self.progress()  # ends with the spawn
            return False

        until(is_in, f"{self.user} sees JupyterLab", seconds=PATIENCE_SECONDS)

    def opens_kernel(self) -> str:
        """A new kernel's id."""
        base = f"/user/{self.user}/"
        answer = self._client.post(f"{base}api/kernels", headers={"x-xsrftoken": self._xsrf(base)}, json={})
        assert answer.status_code == httpx.codes.CREATED, answer.text
        return str(answer.json()["id"])

    def computes(self, kernel: str, code: str) -> str:
        """Run code in a kernel, through the websocket; what it printed or answered."""
        websocket = pytest.importorskip("websocket")
        path = f"/user/{self.user}/api/kernels/{kernel}/channels"
        cookies = self._client.build_request("GET", path).headers["cookie"]
        connection = websocket.create_connection(
            f"ws://127.0.0.1:{self.hub.port}{path}", cookie=cookies, timeout=PATIENCE_SECONDS
        )
        try:
            return _executed(connection, code)
        finally:
            connection.close()

    def _xsrf(self, path: str) -> str:
        request = self._client.build_request("GET", path)
        found = re.search(r"_xsrf=([^;]+)", request.headers.get("cookie", ""))
        return found[1].strip('"') if found else ""


def _executed(connection: Any, code: str) -> str:
    asked = uuid.uuid4().hex
    header = {"msg_id": asked, "msg_type": "execute_request", "session": asked, "username": "", "version": "5.3"}
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    connection.send(json.dumps(message))
    said, idle, replied = "", False, False
    while not (idle and replied):
        answer = json.loads(connection.recv())
        if answer["parent_header"].get("msg_id") != asked:
            continue
        match answer["msg_type"]:
            case "stream":
                said += answer["content"]["text"]
            case "execute_result":
                said += answer["content"]["data"]["text/plain"]
            case "error":
                said += "\n".join(answer["content"]["traceback"])
            case "status":
                idle = answer["content"]["execution_state"] == "idle"
            case "execute_reply":
                replied = True
    return said.strip()
