"""Prefect's server and two workers on this machine, on loopback.

Each is a supervised process (its lock says whether it lives), so a second start attaches, and
`down` finds what an earlier, killed start left behind.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from deployments import DEMO, POOLS, ROOT
from draftworks.errors import DraftworksError
from draftworks.supervision.job import Job

START_SECONDS = 180.0
DEFAULT_PORT = 4200


class Stack:
    """Server and workers whose state lies in `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home.expanduser().absolute()
        self.server = Job(self.home / "services" / "server")
        self.workers = {pool: Job(self.home / "services" / f"worker-{pool}") for pool in POOLS}
        self.workspace = self.home / "workspace"
        self._port_file = self.home / "services" / "port"

    @property
    def running(self) -> bool:
        return self.server.alive()

    @property
    def url(self) -> str:
        """Address of the UI."""
        return f"http://127.0.0.1:{self._port_file.read_text()}"

    @property
    def environment(self) -> dict[str, str]:
        """For everything that talks to this server: loopback, quiet, no accounts, no telemetry."""
        return {
            **os.environ,
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_LOGGING_COLORS": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }

    def up(self, demo: str = DEMO) -> None:
        """Start what does not run, and deploy. Running it again changes nothing.

        demo: recipe or config file of the deployment `smollm2-demo`. Raises DraftworksError with
        the last words of what did not start.
        """
        fresh = not self.running
        if fresh:
            self.down()  # workers that outlived their server would look for it at its old port
        self._up_server()
        command = [sys.executable, "-m", "deployments.bootstrap", "--demo", demo]
        done = subprocess.run(
            [
                *command,
                *("--workspace", str(self.workspace)),
                # Only the workers started below can run anything on a server that was down.
                *(["--no-worker-lives"] if fresh else []),
            ],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise DraftworksError(done.stderr.strip() or done.stdout.strip())
        for pool, job in self.workers.items():
            worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
            job.launch_or_attach([*worker, "--name", f"{pool}-worker"], self.environment)

    def down(self) -> None:
        """End workers and server, and wait until they are gone."""
        for job in (*self.workers.values(), self.server):
            job.end(grace=15)

    def _up_server(self) -> None:
        if not self.running:
            self._port_file.parent.mkdir(parents=True, exist_ok=True)
            self._port_file.write_text(str(free_port()))
        host, port = "127.0.0.1", self._port_file.read_text()
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", host]
        self.server.launch_or_attach([*command, "--port", port], self.environment)
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(f"{self.url}/api/health"):
            if not self.running or time.monotonic() > deadline:
                raise DraftworksError(
                    f"the Prefect server does not answer on {self.url}. Its last words "
                    f"({self.server.log}):\n{self.server.tail()}"
                )
            time.sleep(0.2)


def free_port() -> int:
    """The usual port of Prefect, or any free one where that is taken."""
    for port in (DEFAULT_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise DraftworksError("no free port on 127.0.0.1")


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False
