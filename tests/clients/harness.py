"""A real server on loopback, for those who talk to it: started as anybody starts it, killed, stopped, started again.

    server = Server(folder)                    # makes a tiny model there, once
    with server: httpx.get(server.url + "/v1/models")

It needs no torch and no regard: what is tried here is what goes over the wire.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
START_SECONDS = 300.0
"""That a server may take to start: a machine may be busy with other things."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """That of a server with a home of its own: one thread for each product, for two cores are shared with its clients."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("REGARD_", "OPENAI_"))}
    own = {
        "REGARD_HOME": str(folder / "home"), "REGARD_STORE": str(folder / "people.db"), "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    return kept | own | more


def run(folder: Path, *command: str) -> str:
    """What a command of the project's own environment printed; it must end well."""
    done = subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def regard(folder: Path, *arguments: str) -> str:
    return run(folder, str(BIN / "regard"), *arguments)


class Server:
    """`regard serve`, with its home, store and log in `folder`."""

    def __init__(self, folder: Path, *flags: str, model: str | None = None, port: int | None = None, **env: str) -> None:
        self.folder, self.flags, self.env = folder, flags, env
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.model = model or str(tiny(folder))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        command = [
            str(BIN / "regard"),
            "serve",
            "--model",
            self.model,
            "--port",
            str(self.port),
            *self.flags,
        ]
        with self.log.open("ab") as log:
            env = environment(self.folder, **self.env)
            self.process = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        until = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        return self

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """As a power cut does, as far as a process can tell."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self, seconds: float = 90.0) -> int:
        """Ask it to go, once: a second time would stop what it is finishing. Its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def resident(self) -> int:
        """Bytes of memory that it holds."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()


def tiny(folder: Path) -> Path:
    """A model of 256 tokens, one per byte, that can chat; made where it is not there yet."""
    made = folder / "tiny"
    if not made.exists():
        run(folder, str(BIN / "python"), str(ROOT / "tests" / "clients" / "tiny.py"), str(made))
    return made


__all__ = ["BIN", "ROOT", "Server", "environment", "free_port", "regard", "run", "tiny"]
