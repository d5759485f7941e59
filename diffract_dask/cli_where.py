"""What the commands about runs share: where runs lie, how they are named, and how answers are printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from diffract_dask.cli_options import gathered
from diffract_dask.errors import ArtifactNotFoundError, DiffractError, RunNotFoundError, UnknownNameError
from diffract_dask.terminal import format_table

if TYPE_CHECKING:
    from diffract_dask.runs.catalog import Catalog
    from diffract_dask.runs.listing import RunRegistry
    from diffract_dask.runs.records import RunRecord

__all__ = [
    "RunsGroup",
    "Where",
    "cell",
    "entry_rows",
    "note_outdated",
    "print_forest",
    "print_side_by_side",
    "print_table",
    "run_of",
    "size_text",
    "where_options",
]

_NOT_FOUND = (UnknownNameError, RunNotFoundError, ArtifactNotFoundError)
_CELL = 60

Row = Mapping[str, Any]


class RunsGroup(click.Group):
    """The group of commands about runs: exit code 1 for what is not found."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DiffractError as error:
            click.echo("error: " + " ".join(str(error).split()), err=True)
            ctx.exit(1 if isinstance(error, _NOT_FOUND) else 2)


class Where(NamedTuple):
    """Where runs and sources lie, and how to answer."""

    root: Path
    scan_root: Path
    as_json: bool

    @property
    def registry(self) -> RunRegistry:
        """The runs, which may be none."""
        from diffract_dask.runs.listing import RunRegistry

        return RunRegistry(self.root)

    @property
    def runs(self) -> RunRegistry:
        """The runs; RunNotFoundError where the folder is missing."""
        if not self.root.is_dir():
            raise RunNotFoundError(f"there is no folder of runs at {self.root}; name one with --root")
        return self.registry

    @property
    def catalog(self) -> Catalog:
        """What manifests and sources declare."""
        from diffract_dask.runs.catalog import Catalog

        if not self.scan_root.is_dir():
            raise UnknownNameError(f"there is no folder {self.scan_root} to look for sources in; see --scan-root")
        return Catalog(self.registry, self.scan_root, live=False)

    def answer(self, answer: Any, show: Callable[[], None]) -> None:
        """Print an answer as JSON, or as `show` does."""
        if self.as_json:
            from diffract_dask.runs.answers import as_json
            from diffract_dask.runs.encoding import dumps

            click.echo(dumps(as_json(answer)), nl=False)
        else:
            show()


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--root``, ``--scan-root`` and ``--json``."""
    return gathered(
        command,
        "where",
        Where,
        click.option(
            "--root", type=click.Path(path_type=Path), default="runs", show_default=True, help="Folder of the runs."
        ),
        click.option(
            "--scan-root",
            type=click.Path(path_type=Path),
            default=".",
            show_default=True,
            help="Folder of the sources; they are read, not run.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    )


# ------------------------------------------------------------------------------------------- rows and cells


def cell(value: Any) -> Any:
    """Return a value of a configuration or metric as a table shows it."""
    if isinstance(value, dict) and len(value) == 1 and "$float" in value:
        return str(value["$float"])
    if isinstance(value, bool | str) or value is None:
        return {True: "true", False: "false", None: "null"}.get(value, value)  # type: ignore[arg-type]
    if isinstance(value, int | float):
        return value
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _CELL else text[: _CELL - 1] + "…"


def print_table(rows: Iterable[Row], columns: Sequence[str], nothing: str, *, keys: int = 1) -> None:
    rows = list(rows)
    if rows:
        click.echo(format_table(rows, columns, keys=keys))
    else:
        click.echo(nothing, err=True)


def entry_rows(entries: Iterable[Any], heads: tuple[str, str] = ("parent", "child")) -> list[Row]:
    return [
        {
            "key": entry.path,
            "kind": entry.kind,
            heads[0]: "-" if entry.kind == "added" else cell(entry.parent),
            heads[1]: "-" if entry.kind == "removed" else cell(entry.child),
        }
        for entry in entries
    ]


def print_side_by_side(columns: Sequence[Any], rows: Sequence[Any]) -> None:
    """Print configurations side by side, keys that differ first and marked."""
    names = [column.label for column in columns]
    labels = [name if names.count(name) == 1 else f"{name} {i}" for i, name in enumerate(names, 1)]
    shown = [{"key": "(variant)", "": "", **{name: c.variant for name, c in zip(labels, columns, strict=True)}}]
    for row in sorted(rows, key=lambda row: bool(row.equal)):
        cells = [cell(v) if there else "-" for v, there in zip(row.values, row.present, strict=True)]
        shown.append({"key": row.path, "": "" if row.equal else "*", **dict(zip(labels, cells, strict=True))})
    click.echo(format_table(shown, ["key", "", *labels]))
    for column in columns:
        if column.error:
            click.echo(f"note: {column.error}", err=True)


def note_outdated(outdated: bool) -> None:
    if outdated:
        click.echo(
            "note: a source is newer than what is known of it; run it, or 'diffract-dask runs scan --import'", err=True
        )


def run_of(registry: RunRegistry, text: str) -> RunRecord:
    """Return a run by ``pipeline/variant/fingerprint``, ``pipeline/variant`` (its newest), or a fingerprint's start."""
    parts = text.strip("/").split("/")
    if len(parts) == 3:
        try:
            return registry.at("/".join(parts))
        except RunNotFoundError:
            return registry.get(*parts)
    if len(parts) == 2:
        found = registry.list_runs(*parts)
    else:
        found = registry.find(text)
        if len(found) > 1:
            raise RunNotFoundError(
                f"{len(found)} runs start with {text!r}: {', '.join(one.where for one in found[:5])}; name one"
            )
    if not found:
        raise RunNotFoundError(
            f"there is no run {text!r} under {registry.root}; give pipeline/variant/fingerprint, pipeline/variant, or "
            "the start of a fingerprint. 'diffract-dask runs list --runs' lists them"
        )
    return found[0]


def size_text(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def print_forest(where: Where, kind: str) -> None:
    from diffract_dask.runs.forks import forest

    found = forest(where.catalog)
    roots = getattr(found, kind)
    names = ("variants", "stages") if kind == "pipelines" else ("variations", "steps")

    def walk(nodes: Sequence[Any], depth: int) -> Iterable[Row]:
        for node in nodes:
            notes = [f"fork of {node.parent}, which is not known"] if node.orphan else []
            notes += ["forked from itself"] if node.cycle else []
            notes += ["source is newer"] if node.outdated else []
            notes += [node.error.strip().rpartition("\n")[2]] if node.error else []
            yield {
                kind[:-1]: "  " * depth + node.name,
                names[0]: node.count,
                names[1]: ", ".join(node.members),
                "runs": node.runs,
                "note": "; ".join(notes),
            }
            yield from walk(node.children, depth + 1)

    def show() -> None:
        rows = list(walk(roots, 0))
        columns = [kind[:-1], *names, "runs"] + (["note"] if any(row["note"] for row in rows) else [])
        print_table(rows, columns, f"no {kind} are known; 'diffract-dask runs scan' looks for them")

    where.answer({kind: roots, "errors": found.errors}, show)
