"""The pictures of the docs, one per page of a mechanism and some for the guides. `python -m demo docs` writes them all again."""

from __future__ import annotations

from pathlib import Path

from demo import map as two_axis
from demo.figures import draw_eight, draw_landscape, draw_map
from demo.map import one_thread
from demo.pictures.abstention import GUIDES as ABSTENTION
from demo.pictures.geometry import PICTURES as GEOMETRY
from demo.pictures.identity import GUIDES as IDENTITY
from demo.pictures.position import PICTURES as POSITION
from demo.pictures.selection import PICTURES as SELECTION
from demo.scene import scene
from demo.screen import Screen
from demo.style import DARK, LIGHT, Draw, Theme, save

PICTURES: dict[str, tuple[Draw, tuple[float, float]]] = {**GEOMETRY, **SELECTION, **POSITION}
GUIDES: dict[str, tuple[Draw, tuple[float, float]]] = {**IDENTITY, **ABSTENTION}


def build_all(folder: Path, screen: Screen) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with one_thread():
        with screen.steps("two-axis map", two_axis.STEPS) as tick:
            places, trails = two_axis.measure(tick)
        page = folder.parent / "map.md"
        if page.exists():
            two_axis.write_table(page, places)
        whole: list[tuple[str, Draw, tuple[float, float], Theme]] = [
            (f"{name}-{theme.name}", draw, size, theme)
            for theme in (LIGHT, DARK)
            for name, draw, size in (
                ("eight", lambda f, t: draw_eight(f, t, scene()), (10, 5.6)),
                ("map", lambda f, t: draw_map(f, t, places, trails), (8.4, 5)),
                ("landscape", draw_landscape, (10, 4.2)),
            )
        ]
        whole += [(name, draw, size, LIGHT) for name, (draw, size) in {**PICTURES, **GUIDES}.items()]
        with screen.steps("pictures", len(whole)) as tick:
            for name, draw, size, theme in whole:
                save(folder / f"{name}.png", draw, size, theme)
                tick()
    return len(whole)
