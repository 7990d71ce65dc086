"""schemathesis over the server's own OpenAPI document: whatever it makes up, nothing breaks, and every response is one that is documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
from harness import Server

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method", "ignored_auth",
)  # fmt: skip
"""All but those that take the document for all there is to say: a body that fits it may still ask for what is not here."""
CONFIG = Path(__file__).resolve().parent / "schemathesis.toml"
EXAMPLES = 8
SEED = 20261117


def test_nothing_that_can_be_made_up_breaks_the_server(server: Server, http: httpx.Client, tmp_path: Path) -> None:
    http.post("/v1/identities", json={"id": "mara"})
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "st"), "--config-file", str(CONFIG), "run", server.url + "/openapi.json", "--checks", ",".join(CHECKS), "--phases",
            "examples,coverage,fuzzing,stateful", "--max-examples", str(EXAMPLES), "--seed", str(SEED), "--request-timeout", "60",
            "--continue-on-failure", "--no-color",
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert "Traceback" not in server.log.read_text()
    assert http.get("/ready").status_code == 200
