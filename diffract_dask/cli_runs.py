"""The commands ``diffract-dask runs …`` and ``diffract-dask lineage``: what is declared, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from diffract_dask import cli_artifacts, cli_chains
from diffract_dask.cli_where import (
    RunsGroup,
    Where,
    cell,
    entry_rows,
    note_outdated,
    print_forest,
    print_side_by_side,
    print_table,
    run_of,
    where_options,
)
from diffract_dask.errors import UnknownNameError
from diffract_dask.terminal import format_table

__all__ = ["lineage", "runs"]


@click.group(cls=RunsGroup)
def runs() -> None:
    """Ask about runs: pipelines, variants, forks, chains.

    A RUN is named by pipeline/variant/fingerprint, by pipeline/variant (its newest), or by the start of a
    fingerprint. Exit status: 1 where something is not found or has failed, 2 for a mistake in the call.

    \b
    Examples:
      diffract-dask runs scan
      diffract-dask runs list
      diffract-dask runs scoreboard
    """


@runs.command()
@click.option("--import", "importing", is_flag=True, help="Import each module, in a process of its own, and note it.")
@where_options
@click.pass_context
def scan(ctx: click.Context, where: Where, importing: bool) -> None:
    """List the modules that declare pipelines, variants or chains; nothing is executed.

    With --import each is imported once, in a process of its own, so that variants are known before the first run.
    Exit status 1 if one cannot be.

    \b
    Examples:
      diffract-dask runs scan --scan-root src
      diffract-dask runs scan --import
    """
    from diffract_dask.runs.discovery import discover, scan_import

    if not where.scan_root.is_dir():
        raise UnknownNameError(f"there is no folder {where.scan_root} to scan")
    errors = scan_import(where.scan_root, where.root) if importing else {}
    rows: list[dict[str, Any]] = []
    for item in discover(where.scan_root):
        error = errors.get(item.module) or item.error
        if error is None and item.runs_at_import and not importing:
            error = "runs something when it is imported"
        rows.append(
            {
                "module": item.module,
                "file": item.path.relative_to(where.scan_root.absolute()).as_posix(),
                "pipelines": [_forked(name, parent) for name, parent in item.pipelines.items()],
                "chains": [_forked(name, parent) for name, parent in item.chains.items()],
                "variants": len(item.variants),
                "error": error,
            }
        )

    def show() -> None:
        shown = [
            {
                **row,
                "pipelines": ", ".join(row["pipelines"]),
                "chains": ", ".join(row["chains"]),
                "error": (row["error"] or "").strip().rpartition("\n")[2],
            }
            for row in rows
        ]
        columns = ["module", "file", "pipelines", "chains", "variants"]
        columns += ["error"] if any(row["error"] for row in rows) else []
        print_table(shown, columns, f"no module under {where.scan_root} declares anything")

    where.answer(rows, show)
    ctx.exit(1 if any(errors.values()) else 0)


def _forked(name: str, parent: str | None) -> str:
    return name if parent is None else f"{name} (fork of {parent})"


@runs.command("list")
@click.argument("pipeline", required=False)
@click.option("--runs", "records", is_flag=True, help="List the runs instead.")
@click.option("--status", metavar="STATUS", help="With --runs: only these (done, failed, running, interrupted, …).")
@where_options
def list_(where: Where, pipeline: str | None, records: bool, status: str | None) -> None:
    """List the pipelines as a fork forest; of one PIPELINE its variants; with --runs the runs.

    \b
    Examples:
      diffract-dask runs list
      diffract-dask runs list mysim_v2
      diffract-dask runs list --runs --status failed
    """
    if records:
        _list_runs(where, pipeline, status)
    elif pipeline is None:
        print_forest(where, "pipelines")
    else:
        _list_variants(where, pipeline)


def _list_variants(where: Where, pipeline: str) -> None:
    catalog = where.catalog
    info = catalog.pipeline(pipeline)
    runs_of = {name: [one.where for one in catalog.runs.list_runs(info.name, name)] for name in info.variants}
    rows = [
        {
            "variant": variant.name,
            "base": variant.base,
            "forks_of": variant.forks_of,
            "fingerprint": variant.fingerprint[:12],
            "runs": len(runs_of[name]),
        }
        for name, variant in info.variants.items()
    ]
    where.answer(
        [{**vars(variant), "runs": runs_of[name]} for name, variant in info.variants.items()],
        lambda: print_table(rows, list(rows[0]) if rows else [], f"no variant of {info.name} is known"),
    )
    note_outdated(info.outdated)


def _list_runs(where: Where, pipeline: str | None, status: str | None) -> None:
    found = where.runs.list_runs(pipeline, status=status)
    if pipeline is not None and not found:
        where.catalog.pipeline(pipeline)
    rows = [
        {
            "run": record.where,
            "status": record.status,
            "started": (record.started or "")[:19],
            "chains": ", ".join(f"{at.get('chain')}/{at.get('variation')}" for at in record.memberships),
        }
        for record in found
    ]
    where.answer(found, lambda: print_table(rows, ["run", "status", "started", "chains"], "no runs"))


@runs.command()
@click.argument("pipeline")
@click.argument("variant")
@where_options
def describe(where: Where, pipeline: str, variant: str) -> None:
    """Print a variant: its layers, its merged configuration, its runs.

    \b
    Examples:
      diffract-dask runs describe mysim jitter
      diffract-dask runs describe mysim jitter --json
    """
    from diffract_dask.runs.differences import describe as ask
    from diffract_dask.runs.differences import leaves

    found = ask(where.catalog, pipeline, variant)

    def show() -> None:
        heads = {
            "variant": f"{found.pipeline}/{found.variant}",
            "module": found.module,
            "fingerprint": found.fingerprint,
            "base": found.base,
            "forks of": found.forks_of,
            "runs": ", ".join(found.runs) or "none",
        }
        for name, value in heads.items():
            if value is not None:
                click.echo(f"{name:<12} {value}")
        click.echo()
        own = set(leaves(found.overrides))
        rows = [
            {"key": key, "value": cell(value), "from": "own" if key in own else "base"}
            for key, value in leaves(found.config).items()
        ]
        print_table(rows, ["key", "value", "from"], "the configuration is empty")

    where.answer(found, show)
    note_outdated(found.outdated)


@runs.command()
@click.argument("pipeline")
@click.argument("variant")
@where_options
def overrides(where: Where, pipeline: str, variant: str) -> None:
    """Print what a variant adds to its base.

    \b
    Examples:
      diffract-dask runs overrides mysim jitter
    """
    from diffract_dask.runs.differences import overrides as ask

    found = ask(where.catalog, pipeline, variant)
    rows = entry_rows(found.entries, ("base", "variant"))
    where.answer(found, lambda: print_table(rows, ["key", "kind", "base", "variant"], "nothing is added to the base"))


# ------------------------------------------------------------------------------------------- what differs


@runs.command()
@click.argument("pipeline")
@where_options
def diff(where: Where, pipeline: str) -> None:
    """Print how the variants and stages of a pipeline differ from its parent's.

    \b
    Examples:
      diffract-dask runs diff mysim_v2
    """
    from diffract_dask.runs.differences import variant_diff

    found = variant_diff(where.catalog, pipeline)

    def show() -> None:
        rows: list[dict[str, Any]] = []
        for match in found.variants:
            first = {"variant": match.variant, "parent_variant": match.parent_variant, "kind": match.kind}
            if match.forks_of_unresolved:
                first["kind"] = f"{match.kind}; forks_of {match.forks_of_unresolved!r} is no variant of the parent"
            entries = entry_rows(match.entries)
            rows += [{**first, **{k: e[k] for k in ("key", "parent", "child")}} for e in entries] or [first]
        columns = ["variant", "parent_variant", "kind", "key", "parent", "child"]
        print_table(rows, columns, f"no variant of {found.pipeline} is known")
        if found.stages:
            stages = [{"stage": s.stage, "kind": s.kind, "changed": ", ".join(s.changed)} for s in found.stages]
            click.echo("\n" + format_table(stages))
        if found.orphan:
            click.echo(f"note: nothing is known of the parent {found.parent!r}", err=True)
        elif found.parent is None:
            click.echo(f"note: {found.pipeline} is no fork", err=True)

    where.answer(found, show)


@runs.command("source-diff")
@click.argument("name")
@click.option("--chain", "kind", flag_value="chain", default=None, help="NAME is a chain.")
@where_options
def source_diff(where: Where, name: str, kind: str | None) -> None:
    """Print how the source of a pipeline (or chain) differs from its parent's.

    \b
    Examples:
      diffract-dask runs source-diff mysim_v2
      diffract-dask runs source-diff ptycho_v2 --chain
    """
    from diffract_dask.runs.differences import source_diff as ask

    found = ask(where.catalog, name, kind=kind or "pipeline")

    def show() -> None:
        click.echo(found.diff, nl=False)
        if found.parent is None:
            click.echo(f"note: {found.name} is no fork", err=True)
        elif found.missing:
            click.echo(f"note: there is no source of {', '.join(found.missing)}", err=True)
        elif not found.diff:
            click.echo("note: the sources are equal", err=True)

    where.answer(found, show)


@runs.command()
@click.argument("pipelines", nargs=-1, required=True, metavar="PIPELINE...")
@click.option("--variant", "-v", "variants", multiple=True, required=True, help="One for all, or one for each in turn.")
@where_options
def compare(where: Where, pipelines: Sequence[str], variants: Sequence[str]) -> None:
    """Print the configurations of a variant of several pipelines side by side; a star marks keys that differ.

    \b
    Examples:
      diffract-dask runs compare mysim mysim_v2 mysim_v3 --variant base
      diffract-dask runs compare mysim mysim_v2 -v jitter -v jitter_renamed
    """
    from diffract_dask.runs.differences import compare as ask

    found = ask(where.catalog, pipelines, variants[0] if len(variants) == 1 else variants)
    where.answer(found, lambda: print_side_by_side(found.columns, found.rows))


@runs.command()
@click.argument("a", metavar="RUN")
@click.argument("b", metavar="RUN")
@click.option("--source", is_flag=True, help="Print the differences of the sources too.")
@where_options
def why(where: Where, a: str, b: str, source: bool) -> None:
    """Print why two runs differ: in configuration, code or upstream, stage by stage.

    \b
    Examples:
      diffract-dask runs why mysim/base mysim_v2/base --source
      diffract-dask runs why 3f1c 90ab
    """
    from diffract_dask.runs.explain import why as ask

    registry = where.runs
    found = ask(registry, run_of(registry, a), run_of(registry, b))

    def show() -> None:
        click.echo(f"a  {found.a}\nb  {found.b}")
        click.echo(f"differ in: {', '.join(found.reasons)}" if found.reasons else "nothing differs")
        if found.entries:
            click.echo("\n" + format_table(entry_rows(found.entries, ("a", "b"))))
        named = ("code", "bound", "config", "inputs", "upstream")
        stages = [
            {
                "stage": s.stage,
                "kind": s.kind,
                "changed": ", ".join(name for name in named if getattr(s, f"{name}_changed")),
                "outputs": ", ".join(s.outputs[:5]) + ", …" * (len(s.outputs) > 5),
            }
            for s in found.stages
        ]
        click.echo("\n" + format_table(stages, ["stage", "kind", "changed", "outputs"]))
        for one in found.upstream:
            click.echo(f"\nupstream {one.step}: {one.a_run or '-'} and {one.b_run or '-'}")
        for change in found.sources:
            click.echo(f"\n{change.module}: source {change.kind}" + (f"\n{change.diff}" if source else ""))

    where.answer(found, show)


# ------------------------------------------------------------------------------------------- runs and models


@runs.command()
@click.argument("query")
@where_options
@click.pass_context
def find(ctx: click.Context, where: Where, query: str) -> None:
    """Find runs, variants and chains by fingerprint, name, or value of the configuration.

    \b
    Examples:
      diffract-dask runs find 3f1c
      diffract-dask runs find jitter
      diffract-dask runs find 'scan.step<=1e-8'
    """
    from diffract_dask.runs.finding import find as ask

    found = ask(where.catalog, query)
    rows = [
        {
            "kind": one.kind,
            "name": one.name,
            "by": one.by,
            "fingerprint": (one.fingerprint or "")[:12],
            "status": one.status or "",
            "started": (one.started or "")[:19],
        }
        for one in found
    ]
    columns = ["kind", "name", "by", "fingerprint", "status", "started"]
    where.answer(found, lambda: print_table(rows, columns, f"nothing is found by {query!r}", keys=2))
    ctx.exit(0 if found else 1)


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def lineage(store: Path, as_json: bool) -> None:
    """Print which models of a store were made from which, and by which runs.

    \b
    Examples:
      diffract-dask lineage diffract.zarr
      diffract-dask lineage diffract.zarr --json
    """
    if not store.exists():
        raise click.ClickException(f"there is no store at {store}")
    from diffract_dask.runs.weights import lineage as ask

    found = ask(store)
    if as_json:
        from diffract_dask.runs.encoding import dumps

        click.echo(dumps(found.as_dict()), nl=False)
        return
    rows = []
    in_cycles = {model_id for group in found.cycles for model_id in group}
    for depth, model in found.walk():
        notes = [f"parent {parent!r} is not in the store" for parent in model.missing_parents]
        notes += ["its own ancestor"] if model.model_id in in_cycles else []
        notes += [f"also from {', '.join(model.parents[1:])}"] if len(model.parents) > 1 else []
        notes += [f"replaced {model.replaced} times"] if model.replaced else []
        run = model.run or {}
        rows.append(
            {
                "model": "  " * depth + model.model_id,
                "step": model.step,
                "run": run.get("path") or "",
                "note": "; ".join(notes),
            }
        )
    columns = ["model", "step", "run"] + ["note"] * any(row["note"] for row in rows)
    print_table(rows, columns, "the store has no models")


for command in (*cli_chains.COMMANDS, *cli_artifacts.COMMANDS):
    runs.add_command(command)
