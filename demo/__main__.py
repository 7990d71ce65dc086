"""`python -m demo demo [folder]` and `python -m demo docs [folder]`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from demo.screen import Screen


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("what", choices=("demo", "docs"), help="demo: a page of figures; docs: the pictures of the docs")
    parser.add_argument("folder", nargs="?", type=Path, help="where to write (default: out, or docs/images)")
    given = parser.parse_args(arguments)
    screen, start = Screen(), time.perf_counter()
    try:
        if given.what == "demo":
            from demo.demo import build

            page = build(given.folder or Path("out"), screen)
            screen.say(f"Open {page} in a browser. ({time.perf_counter() - start:.0f} s in all)")
            screen.say("Then ask, look and turn the knobs yourself: .venv/bin/regard studio")
        else:
            from demo.pictures import build_all

            count = build_all(given.folder or Path("docs/images"), screen)
            screen.say(f"{count} pictures in {time.perf_counter() - start:.0f} s")
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
