"""Imports point one way: parts ← operator ← models ← identity ← study, serve ← command line, and no lazy import hides a cycle."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
LAYERS = (
    ("compiled", "errors", "files", "part", "scope", "state", "values"),
    ("geometry", "selection", "position"),
    ("attention",),
    ("nn", "abstention"),
    ("models",),
    ("identity", "train"),
    ("study", "serve"),
    ("cli",),
)
"""Lower layers first; what stands side by side may not know each other, except the parts, which share their base classes."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name."""
    found: dict[str, Path] = {}
    for path in (SOURCE / "regard").rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(name: str, path: Path) -> Iterator[str]:
    """The modules of ours that this one imports anywhere, functions included; what only a type checker reads does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
            continue
        start = package[: len(package) - node.level + 1] if node.level else []
        target = ".".join([*start, *([node.module] if node.module else [])])
        if target.split(".")[0] == "regard":
            for alias in node.names:
                inner = f"{target}.{alias.name}"
                yield inner if inner in MODULES else target


GRAPH = {name: set(imports(name, path)) - {name, "regard"} for name, path in MODULES.items()}


def test_imports_point_down_the_layers_only() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, targets in GRAPH.items()
        for target in targets
        if name != "regard" and LEVEL[target.split(".")[1]] > LEVEL[name.split(".")[1]]
    ]
    assert wrong == []


def test_packages_side_by_side_do_not_know_each_other() -> None:
    apart = {"identity": "train", "train": "identity", "study": "serve"}
    wrong = [
        f"{name} imports {target}"
        for name, targets in GRAPH.items()
        for target in targets
        if name != "regard" and apart.get(name.split(".")[1]) == target.split(".")[1]
    ]
    assert wrong == []


def test_every_package_of_the_library_has_its_layer() -> None:
    assert {name.split(".")[1] for name in MODULES if name != "regard"} == set(LEVEL)


def test_no_module_reaches_itself_through_its_imports() -> None:
    # A package's own __init__ gathers what is below it, and what is below may be asked for by the package's name.
    graph = {name: {t for t in targets if not name.startswith(f"{t}.")} for name, targets in GRAPH.items()}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [" → ".join([*path[path.index(name) :], name])]
        if name in done:
            return []
        cycles = [cycle for target in sorted(graph[name]) for cycle in walk(target, (*path, name))]
        done.add(name)
        return cycles

    assert [cycle for name in sorted(graph) for cycle in walk(name, ())] == []


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"regard.cli.__main__"}))
def test_importing_a_module_gives_a_module(name: str) -> None:
    """No function of a package hides the module of its name: `import regard.x.y as m` is that module."""
    module = importlib.import_module(name)
    parent, _, last = name.rpartition(".")
    if parent:
        assert getattr(importlib.import_module(parent), last) is module
