"""The commands about chains: their variations, how far they are, what they scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from diffract_dask.cli_where import (
    Where,
    cell,
    note_outdated,
    print_forest,
    print_side_by_side,
    print_table,
    where_options,
)
from diffract_dask.terminal import format_number, format_table

__all__ = ["COMMANDS"]

_TROUBLE = ("failed", "interrupted")


@click.command()
@where_options
def chains(where: Where) -> None:
    """List the chains as a fork forest.

    \b
    Examples:
      diffract-dask runs chains
    """
    print_forest(where, "chains")


@click.command()
@click.argument("name")
@where_options
def chain(where: Where, name: str) -> None:
    """Print the steps of a chain, and its variations with the variant of each step.

    \b
    Examples:
      diffract-dask runs chain ptycho
    """
    found = where.catalog.chain(name)

    def show() -> None:
        steps = [{"step": s.name, "pipeline": s.pipeline, "consumes": ", ".join(s.consumes)} for s in found.steps]
        print_table(
            steps, ["step", "pipeline", "consumes"], f"the steps of {found.name} are not known yet: {found.error}"
        )
        names = [step.name for step in found.steps]
        rows = [
            {"variation": v.name, "base": v.base, "forks_of": v.forks_of, **v.mapping, "error": v.error}
            for v in found.variations.values()
        ]
        if rows:
            columns = ["variation", "base", "forks_of", *names] + ["error"] * any(row["error"] for row in rows)
            click.echo("\n" + format_table(rows, columns))

    where.answer(found, show)
    note_outdated(found.outdated)


@click.command("chain-diff")
@click.argument("name")
@where_options
def chain_diff(where: Where, name: str) -> None:
    """Print how the variations of a chain differ from its parent's.

    \b
    Examples:
      diffract-dask runs chain-diff ptycho_v2
    """
    from diffract_dask.runs.chaindiffs import chain_diff as ask

    found = ask(where.catalog, name)

    def show() -> None:
        rows: list[dict[str, Any]] = []
        for match in found.variations:
            kind = match.kind
            if match.forks_of_unresolved:
                kind += f"; forks_of {match.forks_of_unresolved!r} is no variation of the parent"
            first = {"variation": match.variation, "parent": match.parent_variation, "kind": match.error or kind}
            rows += [
                {**first, "step": s.step, "in_parent": s.parent, "in_child": s.child, "keys": _keys(s.entries)}
                for s in match.steps
            ] or [first]
        columns = ["variation", "parent", "kind", "step", "in_parent", "in_child", "keys"]
        print_table(rows, columns, f"{found.chain} has no variations")
        if found.parent is None or found.orphan:
            what = "is no fork" if found.parent is None else f"is a fork of {found.parent!r}, which is not known"
            click.echo(f"note: {found.chain} {what}", err=True)

    where.answer(found, show)


def _keys(entries: Sequence[Any]) -> str:
    return ", ".join(entry.path for entry in entries)


@click.command("variation-diff")
@click.argument("name", metavar="CHAIN")
@click.argument("variations", nargs=-1, required=True, metavar="VARIATION...")
@where_options
def variation_diff(where: Where, name: str, variations: Sequence[str]) -> None:
    """Print the configurations of variations of a chain side by side, step by step.

    \b
    Examples:
      diffract-dask runs variation-diff ptycho baseline jitter_low algo_dm
    """
    from diffract_dask.runs.chaindiffs import variation_diff as ask

    found = ask(where.catalog, name, variations)

    def show() -> None:
        for number, step in enumerate(found.steps):
            click.echo("\n" * bool(number) + f"step {step.step} ({step.pipeline})\n")
            print_side_by_side(step.columns, step.rows)

    where.answer(found, show)


@click.command()
@click.argument("name", metavar="CHAIN")
@click.argument("variation")
@where_options
@click.pass_context
def progress(ctx: click.Context, where: Where, name: str, variation: str) -> None:
    """Print where each step of a variation stands. Exit status 1 if one has failed.

    \b
    Examples:
      diffract-dask runs progress ptycho baseline
    """
    from diffract_dask.runs.status import progress as ask

    found = ask(where.catalog, name, variation)

    def show() -> None:
        rows = [
            {
                "step": s.step,
                "status": s.status,
                "variant": f"{s.pipeline}/{s.variant or '?'}",
                "run": (s.fingerprint or "")[:12] if s.run else "",
                "stages": ", ".join(f"{stage} {status}" for stage, status in s.stages.items()),
            }
            for s in found.steps
        ]
        print_table(rows, ["step", "status", "variant", "run", "stages"], "the chain has no steps")
        for step in found.steps:
            for stage, error in step.errors.items():
                click.echo(f"\n{step.step}, stage {stage}:\n{error.rstrip()}")
            if step.stale:
                click.echo(f"note: {step.step}: of another configuration or code: {', '.join(step.stale)}", err=True)

    where.answer(found, show)
    if found.error:
        click.echo(f"error: {found.error}", err=True)
    note_outdated(found.outdated)
    ctx.exit(1 if found.error or any(step.status in _TROUBLE for step in found.steps) else 0)


@click.command()
@click.argument("name", metavar="CHAIN")
@click.option("--baseline", "-b", metavar="VARIATION", help="Show differences to this one.")
@where_options
def scoreboard(where: Where, name: str, baseline: str | None) -> None:
    """Print the metrics of all variations of a chain, with differences to a baseline.

    \b
    Examples:
      diffract-dask runs scoreboard ptycho
      diffract-dask runs scoreboard ptycho -b baseline
    """
    from diffract_dask.runs.status import scoreboard as ask

    found = ask(where.catalog, name, baseline)

    def show() -> None:
        arrows = {"higher": " ↑", "lower": " ↓"}
        heads = {
            column.key: column.key + f" [{column.units}]" * bool(column.units) + arrows.get(column.direction or "", "")
            for column in found.metrics
        }
        rows = []
        for row in found.rows:
            cells = {heads[key]: _score(row, key) for key in row.values}
            rows.append({"variation": row.variation, "status": row.status, **cells})
        print_table(rows, ["variation", "status", *heads.values()], f"{found.chain} has no variations")

    where.answer(found, show)
    note_outdated(found.outdated)


def _score(row: Any, key: str) -> str:
    text = format_number(row.values[key]) if not isinstance(row.values[key], bool | str) else str(cell(row.values[key]))
    if key in row.deltas:
        mark = {True: " better", False: " worse"}.get(row.better.get(key), "")
        text += f" ({row.deltas[key]:+.4g}{mark})"
    return text


COMMANDS = (chains, chain, chain_diff, variation_diff, progress, scoreboard)
"""For the group ``runs``."""
