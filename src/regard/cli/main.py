"""The console script `regard`. It starts without any extra, so that it can say which one is missing."""

from __future__ import annotations

import sys

NEEDS = {
    "generate": "cli,models", "models": "cli,models", "chat": "cli,models,identity", "imprint": "cli,models,identity",
    "sleep": "cli,models,identity", "identity": "cli,models,identity", "study": "cli,figures,models,identity,train", "explain": "cli",
    "serve": "cli,models,identity,serve", "studio": "cli,models,identity,serve", "bench": "cli", "train": "cli,train",
    "view": "cli,models,identity",
}  # fmt: skip
"""The extras that each verb needs, all of them, so that nobody installs one to learn of the next."""


def main() -> None:
    try:
        from .app import app

        app()
    except ImportError as error:
        package, extra = (error.name or "").partition(".")[0], getattr(error, "extra", "cli")
        if package in ("", "regard"):
            raise
        verb = next((word for word in sys.argv[1:] if word in NEEDS), "")
        extras = ",".join(dict.fromkeys([*NEEDS.get(verb, "cli").split(","), extra]))
        print(f"error: `{f'regard {verb}'.strip()}` needs {package}: pip install 'regard[{extras}]'", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
