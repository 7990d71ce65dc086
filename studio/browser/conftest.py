"""A real server and a real browser: `regard studio` as it is, and Debian's Chromium through Playwright."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
SHOTS = ROOT / "build" / "screenshots"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
]  # fmt: skip
CHROMIUM = os.environ.get("REGARD_CHROMIUM", "/usr/bin/chromium")
MODEL = os.environ.get("REGARD_STUDIO_MODEL")
"""A model of the cache for pictures; a tiny random one without it."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("studio")
    command = [str(PYTHON), str(Path(__file__).parent / "prepare.py"), str(made), *([MODEL] if MODEL else [])]
    subprocess.run(command, check=True, env=ENVIRONMENT)
    return made


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[str]:
    """The address of `regard studio`, run in a folder that holds studies."""
    command = [
        str(PYTHON), "-m", "regard.cli.main", "studio", "--no-open", "--port", "0", "--store", str(folder / "people.db"), "--keys",
        str(folder / "keys.json"), "--model", (folder / "model.txt").read_text(),
    ]  # fmt: skip
    log = (folder / "server.log").open("w")
    running = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    try:
        for _ in range(600):
            found = re.search(r"its page at (http://\S+?)/? ", (folder / "server.log").read_text())
            if found:
                break
            assert running.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.2)
        else:
            raise TimeoutError((folder / "server.log").read_text())
        yield found[1]
    finally:
        running.terminate()
        running.wait(30)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


Open = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser, server: str) -> Iterator[Open]:
    """Opens pages that must end without an error on the console and without a request that leaves the server."""
    wrong: list[str] = []
    contexts: list[Any] = []

    def open_(
        path: str = "", *, language: str = "en", scheme: Any = "light", width: int = 1360, address: str | None = None
    ) -> Page:
        locale = "ja-JP" if language == "ja" else "en-US"
        context = browser.new_context(
            viewport={"width": width, "height": 860}, color_scheme=scheme, locale=locale, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()

        def said(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                wrong.append(f"console: {message.text}")

        def asked(request: Request) -> None:
            own = (server, *([address.partition("#")[0]] if address else []))
            if not request.url.startswith((*own, "data:", "blob:")):
                wrong.append(f"request: {request.url}")

        page.on("console", said)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("request", asked)
        page.goto(address or f"{server}/studio/{path}")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []
