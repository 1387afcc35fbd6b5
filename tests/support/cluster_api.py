"""A real API server on loopback, without nodes: Debian's etcd, and the server out of the cache of scripts/cluster."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from support.cli_daemon import free_port

CACHE = Path(os.environ.get("EVERDECK_CACHE") or Path.home() / ".cache" / "everdeck")
SERVER = CACHE / "kubernetes-1.20.2" / "bin" / "kube-apiserver"
MISSING = (
    None
    if SERVER.exists() and shutil.which("etcd") and os.geteuid() == 0
    else "needs root and the cache of `scripts/cluster build`"
)
READY_SECONDS = 120.0


class ApiServer:
    """Where it is, and who may ask."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.authority = folder / "pki" / "apiserver.crt"
        self.kubeconfig = folder / "kubeconfig"
        self._token = os.urandom(16).hex()

    @contextlib.contextmanager
    def running(self) -> Iterator["ApiServer"]:
        """Both processes, ended afterwards."""
        etcd, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        (self.folder / "pki").mkdir()
        (self.folder / "tokens.csv").write_text(f"{self._token},admin,admin,system:masters\n")
        key = self.folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        store = [
            *(
                "etcd",
                "--data-dir",
                self.folder / "etcd",
                "--listen-client-urls",
                etcd,
                "--advertise-client-urls",
                etcd,
            ),
            *(
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                f"default={peer}",
            ),
            "--unsafe-no-fsync",
        ]
        server = [
            *(SERVER, f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", f"--secure-port={self.port}"),
            *(f"--cert-dir={self.folder / 'pki'}", "--service-cluster-ip-range=10.96.0.0/16"),
            *("--service-account-issuer=https://kubernetes.default.svc", f"--service-account-signing-key-file={key}"),
            *(f"--service-account-key-file={key}", f"--token-auth-file={self.folder / 'tokens.csv'}"),
            *("--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount"),
        ]
        with contextlib.ExitStack() as undo:
            for name, words in (("etcd", store), ("server", server)):
                log = undo.enter_context((self.folder / f"{name}.log").open("wb"))
                process = subprocess.Popen([str(word) for word in words], stdout=log, stderr=log)
                undo.callback(process.wait)
                undo.callback(process.kill)
                self._server = process
            self._write_kubeconfig()
            self._wait()
            yield self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It is there, and does nothing."""
        self._server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.send_signal(signal.SIGCONT)

    def _write_kubeconfig(self) -> None:
        cluster = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        told = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": self._token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "admin"}}],
        }
        self.kubeconfig.write_text(json.dumps(told))

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        headers = {"Authorization": f"Bearer {self._token}"}
        with httpx.Client(verify=False, headers=headers, timeout=5) as client:  # noqa: S501 - our own, on loopback
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"https://127.0.0.1:{self.port}/readyz").is_success:
                        return
                assert time.monotonic() < deadline, (self.folder / "server.log").read_text()[-2000:]
                time.sleep(0.2)
