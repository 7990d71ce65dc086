"""The documentation as a site: `python docs/build_site.py build` or `serve`. Needs the packages of the extra `docs`, not torch.

The sources are Markdown that reads well where it lies: README.md and its neighbours at the root, guides under docs/. A site wants one folder
in which every link leads to a page of it. So the sources are copied to build/docs, their links turned to where the targets now lie,
notebooks become pages, and Zensical builds build/site from that. What it says of the sources as a warning is an error here, and the pages
that came out are then read once more: every link and anchor has to lead somewhere, and nothing may be loaded from another host.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
STAGE = Path("build/docs")
SITE = Path("build/site")

PLACES = {
    "README.md": "index.md",
    "README.ja.md": "ja.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "benchmarks/results/identity/evidence.md": "measured/identity.md",
}
"""Sources outside of docs/, and where they lie in the site."""

FOLDERS = {"docs/mechanisms": "choosing.md", "benchmarks/results/identity": "measured/identity.md"}
"""A link to a folder lists files where the sources lie; in the site it leads to the page that stands for them."""

FENCE = re.compile(r"^( *)(```+).*?^\1\2`*[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<open>\]\(\s*<?|\b(?:src|srcset|href)=\")(?P<target>[^)\s>\"]+)")
PICTURE = re.compile(
    r"<picture>\s*<source[^>]*prefers-color-scheme: dark[^>]*srcset=\"(?P<dark>[^\"]+)\"[^>]*>\s*"
    r"<img[^>]*src=\"(?P<light>[^\"]+)\"[^>]*alt=\"(?P<alt>[^\"]*)\"[^>]*>\s*</picture>",
    re.DOTALL,
)
TABLE_CODE = re.compile(r"^ *\|.*`.*$", re.MULTILINE)
NAVIGATION = re.compile(r"^\s*- (?:[^#\n]*: )?[\"']?(\S+\.md)[\"']?\s*$", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LOADED = {
    "script": "src",
    "img": "src",
    "source": "srcset",
    "iframe": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
}
"""Attributes that make a browser fetch something. A `link` does so by what its rel says."""
LOADED_BY_REL = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "modulepreload",
    "preconnect",
    "dns-prefetch",
    "manifest",
    "apple-touch-icon",
}
FETCHED_IN_STYLE = re.compile(r"(?:@import\s+(?:url\()?|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)")
FETCHED_IN_SCRIPT = re.compile(
    r"(?:\bfetch\(|\bimport\(|\bimportScripts\(|\bnew\s+(?:Worker|SharedWorker|WebSocket|EventSource)\(|\.src\s*=|\bopen\(\s*[\"'][A-Z]+[\"']\s*,)"
    r"\s*[\"'`]((?:https?:|wss?:)?//[^\"'`]+)"
)


class SiteError(Exception):
    """The site is not as it should be; the message lists what is wrong, one line each."""


def sources(root: Path = ROOT) -> dict[Path, Path]:
    """Every file of the site and its place in it, both relative. A notebook's place is the page that it becomes."""
    found = {Path(source): Path(place) for source, place in PLACES.items() if (root / source).exists()}
    for path in sorted((root / "docs").rglob("*")):
        if path.is_file() and path.suffix in {".md", ".png", ".svg", ".css", ".ipynb"}:
            place = path.relative_to(root / "docs")
            found[path.relative_to(root)] = place.with_suffix(".md") if path.suffix == ".ipynb" else place
    return found


def prose(text: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, each with whether it is prose; a fenced block of code is not."""
    at = 0
    for block in FENCE.finditer(text):
        yield True, text[at : block.start()]
        yield False, block.group()
        at = block.end()
    yield True, text[at:]


def outside_code(text: str, change: Callable[[str], str]) -> str:
    return "".join(change(piece) if is_prose else piece for is_prose, piece in prose(text))


def relocated(text: str, source: Path, places: dict[Path, Path]) -> str:
    """The text with each relative link led to where its target lies in the site."""
    here = places[source].parent

    def turn(match: re.Match[str]) -> str:
        address = urlsplit(match["target"])
        if address.scheme or address.netloc or not address.path:
            return match.group()
        target = Path(os.path.normpath(source.parent / unquote(address.path)))
        place = places.get(target) or (Path(FOLDERS[target.as_posix()]) if target.as_posix() in FOLDERS else None)
        if place is None:
            if not (ROOT / target).exists():
                raise SiteError(f"{source}: {match['target']} leads nowhere; there is no {target}")
            raise SiteError(f"{source}: {match['target']} leads out of the site; add {target} to PLACES or FOLDERS")
        moved = Path(os.path.relpath(place, here)).as_posix()
        return match["open"] + moved + (f"#{address.fragment}" if address.fragment else "")

    def bare_pipes(match: re.Match[str]) -> str:
        # GitHub wants `a \| b` in a table's code, and shows it without the backslash; Python-Markdown shows the backslash and needs none.
        return re.sub(r"`[^`\n]+`", lambda code: code.group().replace("\\|", "|"), match.group())

    def both_schemes(match: re.Match[str]) -> str:
        alt = match["alt"].replace("[", "(").replace("]", ")")
        return f"![{alt}]({match['light']}#only-light)\n![{alt}]({match['dark']}#only-dark)"

    return outside_code(text, lambda piece: LINK.sub(turn, PICTURE.sub(both_schemes, TABLE_CODE.sub(bare_pipes, piece))))


def notebook_page(text: str, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"]).strip("\n")
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}-{len(pictures)}.png"
                pictures[file] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![A figure that the cell above draws]({file})")
            else:
                said = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{said.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def stage(root: Path = ROOT, to: Path | None = None) -> list[Path]:
    """Lay the sources out as the site has them; only what changed is written. Returns the pages."""
    folder = to or root / STAGE
    places = sources(root)
    made: dict[Path, bytes] = {}
    for source, place in places.items():
        raw = (root / source).read_bytes()
        if source.suffix == ".ipynb":
            page, pictures = notebook_page(raw.decode(), source.stem)
            made |= {place.parent / file: data for file, data in pictures.items()}
            # Pictures of the notebook are new and lie beside the page: they keep their links.
            beside = {source.parent / file: place.parent / file for file in pictures}
            made[place] = relocated(page, source, places | beside).encode()
        elif source.name == "LICENSE":
            made[place] = f"# Licence\n\n```text\n{raw.decode().rstrip()}\n```\n".encode()
        elif source.suffix == ".md":
            made[place] = relocated(raw.decode(), source, places).encode()
        else:
            made[place] = raw
    for path in folder.rglob("*") if folder.exists() else ():
        if path.is_file() and path.relative_to(folder) not in made:
            path.unlink()
    for place, content in made.items():
        path = folder / place
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return sorted(p for p in made if p.suffix == ".md")


def navigation(root: Path = ROOT) -> list[Path]:
    """The pages that mkdocs.yml lists, in order."""
    return [Path(p) for p in NAVIGATION.findall((root / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1])]


def check_navigation(pages: list[Path], root: Path = ROOT) -> None:
    listed = navigation(root)
    wrong = [f"mkdocs.yml: nav lists {p}, which does not exist" for p in listed if p not in pages]
    wrong += [f"mkdocs.yml: nav does not list {p}, so nobody finds it" for p in pages if p not in listed]
    wrong += [f"mkdocs.yml: nav lists {p} more than once" for p in sorted(set(listed)) if listed.count(p) > 1]
    if wrong:
        raise SiteError("\n".join(wrong))


def check_built(pages: list[Path], site: Path) -> None:
    """A page whose Markdown cannot be rendered is left out by the generator without a word."""
    built = {p: site / (p.parent if p.name == "index.md" else p.with_suffix("")) / "index.html" for p in pages}
    if wrong := [
        f"{p}: was not built; its Markdown or a docstring in it cannot be rendered"
        for p, at in built.items()
        if not at.exists()
    ]:
        raise SiteError("\n".join(wrong))


class Page(HTMLParser):
    """What a built page loads, where it leads, and the anchors that it offers."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.anchors: set[str] = set()
        self.styles: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.styles.append(given.get("style", ""))
        if tag == "meta" and given.get("http-equiv", "").lower() == "content-security-policy":
            self.policy = given.get("content", "")
        if tag == "a" and "href" in given:
            self.leads.append(given["href"])
        if tag == "link" and LOADED_BY_REL & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "style":
            self.styles.append(data)
        elif self._inside == "script":
            self.scripts.append(data)


def external(page: Page) -> list[str]:
    """Addresses on other hosts that a browser would fetch to show the page."""
    wrong = [a for a in page.loads if urlsplit(a).netloc]
    wrong += [a for style in page.styles for a in FETCHED_IN_STYLE.findall(style)]
    return wrong + [a for script in page.scripts for a in FETCHED_IN_SCRIPT.findall(script)]


def check_site(site: Path) -> int:
    """Read every file of the built site. Raises with all that is wrong; returns how many links were followed."""
    pages = {p: Page(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html"))}
    wrong: list[str] = []
    followed = 0
    for path, page in pages.items():
        name = path.relative_to(site)
        wrong += [f"{name}: loads {a} from another host" for a in external(page)]
        # The theme's own script names hosts that it would load from if a page had diagrams; the policy makes browsers refuse.
        if "default-src 'self'" not in page.policy or "//" in page.policy:
            wrong.append(f"{name}: has no Content-Security-Policy that keeps it to its own host")
        for address in page.leads + page.loads:
            parts = urlsplit(address)
            # The page for what is missing is served under any address, and links from the root.
            if parts.scheme or parts.netloc or (not parts.path and not parts.fragment) or name.name == "404.html":
                continue
            followed += 1
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                wrong.append(f"{name}: {address} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors | {"__top"}:
                wrong.append(f"{name}: {address} names an anchor that is not there")
    for path in sorted([*site.rglob("*.css"), *site.rglob("*.js")]):
        pattern = FETCHED_IN_STYLE if path.suffix == ".css" else FETCHED_IN_SCRIPT
        text = path.read_text(encoding="utf-8")
        wrong += [f"{path.relative_to(site)}: loads {a} from another host" for a in pattern.findall(text)]
    if wrong:
        raise SiteError("\n".join(sorted(set(wrong))))
    return followed


def exported(module: str, root: Path = ROOT) -> list[str]:
    """The names in a module's __all__ that are not modules themselves, read without importing it."""
    path = root / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level and not n.module for a in n.names}
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [n for n in ast.literal_eval(node.value) if n not in modules]
    return []


def check_reference(site: Path, root: Path = ROOT) -> None:
    """Every exported name of every module that has a page stands in the reference, under this path or another that leads to it."""
    pages = {p.parent.name: Page(p.read_text(encoding="utf-8")).anchors for p in (site / "api").glob("*/index.html")}
    last = {anchor.rpartition(".")[2] for anchors in pages.values() for anchor in anchors if anchor.startswith("regard.")}
    wrong: list[str] = []
    for page, anchors in sorted(pages.items()):
        module = "regard" if page == "regard" else f"regard.{page}"
        for name in exported(module, root):
            if f"{module}.{name}" not in anchors and name not in last:
                wrong.append(f"docs/api/{page}.md: {module}.{name} is exported and not listed; list it, or give it a docstring")
    if wrong:
        raise SiteError("\n".join(wrong))


def zensical(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("zensical")), *arguments]


def build() -> None:
    began = time.perf_counter()
    pages = stage()
    check_navigation(pages)
    shutil.rmtree(ROOT / SITE, ignore_errors=True)
    run = subprocess.run(zensical("build", "--clean", "--strict"), cwd=ROOT, capture_output=True, text=True, check=False)
    said = COLOUR.sub("", run.stdout + run.stderr)
    if run.returncode or re.search(r"^\s*(warning|error)\b", said, re.IGNORECASE | re.MULTILINE):
        raise SiteError(said.split("Traceback")[0].strip() or f"zensical ended with {run.returncode}")
    check_built(pages, ROOT / SITE)
    followed = check_site(ROOT / SITE)
    check_reference(ROOT / SITE)
    spent = time.perf_counter() - began
    print(f"{len(pages)} pages in {SITE}, {followed} links followed, nothing from another host ({spent:.0f} s).")


def free_port(first: int) -> int:
    for port in range(first, first + 50):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise SiteError(f"no free port from {first} to {first + 49}")


def serve(first_port: int) -> None:
    """Serve the site, and lay a page out again whenever its source changes, until interrupted."""
    build()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` stops the server too
    port = free_port(first_port)
    print(f"Serving at http://localhost:{port}/ (Ctrl-C stops it)", flush=True)
    server = subprocess.Popen(zensical("serve", "--dev-addr", f"localhost:{port}"), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            time.sleep(1)
            try:
                stage()
            except (SiteError, OSError, ValueError) as error:
                print(error, file=sys.stderr)
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
        server.wait()


def main(arguments: list[str]) -> int:
    what, port = (arguments + ["build", "8000"][len(arguments) :])[:2]
    try:
        if what == "serve":
            serve(int(port))
        elif what == "build":
            build()
        else:
            raise SiteError(f"{what!r} is neither build nor serve")
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
