"""`regard study`: every claim with its experiment, controls, figure and verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import fail, progress, table, verb

app = typer.Typer(help="Test every claim: run studies, and report their verdicts.", no_args_is_help=True)
Out = Annotated[Path, typer.Option("--out", help="the folder of measured lines, figures and summaries")]


@app.command("list")
@verb
def list_(out: Out = Path("studies")) -> None:
    """Every study, its verdict where the folder has one, and its claim."""
    from ..study.frame.report import judged_studies
    from ..study.frame.results import Results
    from ..study.frame.study import studies

    listed = studies()
    said = {e.study.name: f"{e.verdict.kind} ({e.size})" for e in judged_studies(Results(out))}
    needs = {name: f"needs {', '.join(s.lacking)}" for name, s in listed.items() if s.lacking}
    table(("study", "verdict", "claim"), [(n, said.get(n, needs.get(n, "not measured")), s.claim) for n, s in listed.items()])


@app.command()
@verb
def run(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="studies, or `all`")],
    out: Out = Path("studies"),
    quick: Annotated[
        bool, typer.Option("--quick", help="fewer seeds and smaller sizes: all within ten minutes on two cores")
    ] = False,
    workers: Annotated[int, typer.Option(help="seeds measured side by side, one thread each")] = 2,
    engine: Annotated[
        str, typer.Option(help="processes of this machine, or `ray` (RAY_ADDRESS names a cluster)")
    ] = "processes",
) -> None:
    """Measure what is missing in the folder; broken off, the same command goes on, study by study and seed by seed.

    \b
    regard study run scaling_saturation
    regard study run all --quick
    regard study run all --workers 16 --engine ray
    """
    from ..study.frame.report import judged_studies, summarise
    from ..study.frame.results import Results
    from ..study.frame.run import Failure, missing
    from ..study.frame.run import run as measure
    from ..study.frame.study import studies, study

    chosen = list(studies().values()) if "all" in names else [study(name) for name in dict.fromkeys(names)]
    for each in chosen:
        if each.lacking:
            typer.echo(f"note: {each.name} is left out: it needs {', '.join(each.lacking)}", err=True)
    results, size = Results(out), "quick" if quick else "full"
    total, failures = len(missing(chosen, size, results)), list[Failure]()
    with progress() as tell:
        tell(f"{total} seeds to measure", 0.0)
        for n, line in enumerate(measure(chosen, size, results, workers, engine)):
            if isinstance(line, Failure):
                failures.append(line)
                typer.echo(f"{line.seed.study}, seed {line.seed.seed}: {line.why}", err=True)
            else:
                tell(f"{line['study']}, seed {line['seed']}", (n + 1) / total)
        for each in judged_studies(results, chosen):
            tell(f"drawing {each.study.name}", None)
            summarise(each, out)
            typer.echo(f"{each.study.name}: {each.verdict}")
    if failures:
        fail(f"{len(failures)} of {total} seeds failed; what was measured is in {out}, and the same command tries them again")


@app.command()
@verb
def report(
    out: Out = Path("studies"),
    fill: Annotated[
        list[Path] | None, typer.Option("--fill", help="a page whose marked tables are filled too; repeatable")
    ] = None,
) -> None:
    """Draw every figure again, and write the report: a Markdown page beside the folder, one HTML page in it."""
    import os

    from ..study.frame.report import fill as fill_page
    from ..study.frame.report import report as write
    from ..study.frame.results import Results

    with progress() as tell:
        every = write(Results(out), tell)
        for page in fill or []:
            fill_page(page, every, Path(os.path.relpath(out.with_suffix(".md"), page.parent)).as_posix())
    table(("study", "verdict"), [(e.study.name, str(e.verdict)) for e in every])
    typer.echo(f"{out.with_suffix('.md')}, {out / 'index.html'}", err=True)


@app.command()
@verb
def show(name: Annotated[str, typer.Argument(help="a study")], out: Out = Path("studies")) -> None:
    """One study: its claim, how it is tested, and what was measured."""
    from ..study.frame.report import judged_studies
    from ..study.frame.results import Results
    from ..study.frame.study import study

    s = study(name)
    typer.echo(f"{s.name}\n\nClaim: {s.claim}\nSource: {s.source}\nHow: {s.protocol}\nControls: {'; '.join(s.controls)}")
    for each in judged_studies(Results(out), [s]):
        typer.echo(f"\nVerdict: {each.verdict}\nBecause: {each.verdict.because}\n")
        for check in each.verdict.checks:
            typer.echo(f"  {'passed' if check.passed else 'failed'}  {check}")
        for p in each.statements:
            typer.echo(f"  {'contradicted' if p['contradicted'] else 'confirmed'}  {p['statement']}: printed {p['printed']}; measured {p['measured']}")  # fmt: skip
        typer.echo(f"\nFigure: {out / f'{name}.png'}; {s.caption}\n{each.origin}")
        return
    typer.echo(f"\nNot measured in {out} yet: regard study run {name} --out {out}")
