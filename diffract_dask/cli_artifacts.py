"""The commands about artifacts and what runs take on disk; previews and differences as a terminal shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from diffract_dask.cli_where import Where, print_table, run_of, size_text, where_options
from diffract_dask.terminal import format_table

if TYPE_CHECKING:
    from diffract_dask.runs.artifact_diffs import ArtifactDiff
    from diffract_dask.runs.previews import Preview

__all__ = ["COMMANDS"]

_VALUES = 10
_ROWS = 200


@click.command()
@click.argument("run")
@click.argument("artifact", required=False)
@click.option("--dataset", metavar="ADDRESS", help="Of an ARTIFACT with several: which array to show.")
@where_options
def artifacts(where: Where, run: str, artifact: str | None, dataset: str | None) -> None:
    """List the artifacts of a run, or print what one of them holds.

    \b
    Examples:
      diffract-dask runs artifacts mysim/base
      diffract-dask runs artifacts mysim/base sim/field.h5 --dataset group/values
    """
    from diffract_dask.runs import artifacts as of_runs

    registry = where.runs
    record = run_of(registry, run)
    if artifact is not None:
        shown = of_runs.preview_run_artifact(registry, record, artifact, dataset)
        where.answer(shown.as_dict(), lambda: show_preview(shown))
        return
    found = of_runs.list_artifacts(registry, record)
    models = {entry.get("source"): entry["model_id"] for entry in record.checkpoints}
    rows = [
        {
            "artifact": one.address,
            "kind": one.kind or "-",
            "size": size_text(one.size),
            "files": one.files,
            "note": "missing" if one.missing else "link" if one.link else "",
            "model": models.get(one.path, ""),
        }
        for one in found
    ]
    columns = ["artifact", "kind", "size", "files"]
    columns += [name for name in ("model", "note") if any(row[name] for row in rows)]
    where.answer(found, lambda: print_table(rows, columns, f"{record.where} has no artifacts"))


@click.command("artifact-diff")
@click.argument("a", metavar="RUN")
@click.argument("b", metavar="RUN")
@click.argument("artifact")
@click.argument("artifact_b", required=False)
@click.option("--dataset", metavar="ADDRESS", help="Of artifacts with several: which array, or which model.")
@click.option("--dataset-b", metavar="ADDRESS", help="Its address in the second, if that is another.")
@where_options
def artifact_diff(
    where: Where,
    a: str,
    b: str,
    artifact: str,
    artifact_b: str | None,
    dataset: str | None,
    dataset_b: str | None,
) -> None:
    """Print how an artifact of one run differs from the matching one of another.

    \b
    Examples:
      diffract-dask runs artifact-diff mysim/base mysim_v2/base sim/field.npy
      diffract-dask runs artifact-diff train/base train/decay train/final.safetensors
    """
    from diffract_dask.runs.artifacts import diff_run_artifacts

    registry = where.runs
    records = run_of(registry, a), run_of(registry, b)
    found = diff_run_artifacts(registry, *records, artifact, artifact_b, dataset=dataset, dataset_b=dataset_b)
    where.answer(found.as_dict(), lambda: show_diff(found))


@click.command()
@where_options
def disk(where: Where) -> None:
    """Print what the runs take on disk.

    \b
    Examples:
      diffract-dask runs disk
    """
    from diffract_dask.runs.disk import disk_usage

    found = disk_usage(where.runs)

    def show() -> None:
        rows = [
            {"run": o.run, "size": size_text(o.size), "not_shared": size_text(o.own), "files": o.files}
            for o in found.runs
        ]
        print_table(rows, ["run", "size", "not_shared", "files"], "no runs")
        shares = ", ".join(f"{name} {size_text(size)}" for name, size in found.pipelines.items())
        click.echo(f"\n{size_text(found.total)} in all" + f": {shares}" * bool(shares))

    where.answer(found, show)


@click.command()
@click.option("--status", multiple=True, help="Runs of this status go.  [default: failed, interrupted]")
@click.option("--pipeline", help="Only of this pipeline.")
@click.option("--variant", help="Only of variants of this name.")
@click.option("--older-than", type=float, metavar="DAYS", help="Only those that started longer ago.")
@click.option("--keep-last", type=int, metavar="N", help="Of each variant, done runs but the newest N go too.")
@click.option("--yes", "-y", is_flag=True, help="Remove them; without it they are listed only.")
@where_options
def prune(
    where: Where,
    status: Sequence[str],
    pipeline: str | None,
    variant: str | None,
    older_than: float | None,
    keep_last: int | None,
    yes: bool,
) -> None:
    """List the runs that could go, and with --yes remove them.

    A run that another one was computed from stays, and so does one that is being worked on.

    \b
    Examples:
      diffract-dask runs prune
      diffract-dask runs prune --keep-last 3 --older-than 30 --yes
    """
    from diffract_dask.runs.disk import prune as ask

    found = ask(
        where.runs,
        status=status or ("failed", "interrupted"),
        pipeline=pipeline,
        variant=variant,
        older_than_days=older_than,
        keep_last=keep_last,
        dry_run=not yes,
    )

    def show() -> None:
        rows = [
            {
                "run": one.run,
                "size": size_text(one.size),
                "reason": one.reason,
                "result": f"kept: {one.kept}" if one.kept else "removed" if one.removed else "would be removed",
            }
            for one in found
        ]
        print_table(rows, ["run", "size", "reason", "result"], "no run would be removed")
        if rows and not yes:
            click.echo("\nnothing was removed; --yes removes them", err=True)

    where.answer(found, show)


def show_preview(shown: Preview) -> None:
    """Print what an artifact holds."""
    data = shown.data
    click.echo(f"{shown.name}: {shown.kind}" + (f", {shown.dataset}" if shown.dataset else ""))
    if shown.attrs:
        click.echo(_text({key: value for key, value in shown.attrs.items() if key != "models"}))
    if "text" in data:
        click.echo(data["text"].rstrip("\n"))
    elif "document" in data:
        click.echo(_text(data["document"]))
    elif "columns" in data:
        columns = data["columns"]
        rows = [dict(zip(columns, row, strict=True)) for row in data["rows"]]
        click.echo(format_table(rows, columns, keys=0) if rows else f"columns: {', '.join(columns)}")
        click.echo(f"\n{data['total_rows']} rows")
    elif "shape" in data:
        _show_array(data)
    elif "hex" in data:
        click.echo(f"{data['size']} bytes: {data['hex']}")
    elif shown.datasets:
        click.echo(format_table(shown.datasets, ["address", "shape", "dtype"]))
    for note in shown.notes:
        click.echo(f"note: {note}", err=True)


def _show_array(data: Mapping[str, Any]) -> None:
    click.echo(
        f"{data['dtype']} array of shape {tuple(data['shape'])}" + (f", {data['part']}" if "part" in data else "")
    )
    if data.get("index"):
        click.echo(f"plane {data['index']}")
    if "stats" in data:
        click.echo("\n" + format_table([data["stats"]], keys=0))
    if "sampled" in data:
        click.echo(f"note: figures of {data['sampled']}", err=True)
    if "first" in data:
        click.echo(f"first values: {_text(data['first'][:_VALUES], indent=None)}")
    if data.get("note"):
        click.echo(f"note: {data['note']}", err=True)


def _text(value: Any, indent: int | None = 1) -> str:
    from diffract_dask.runs.previews import plain

    return json.dumps(plain(value), indent=indent, ensure_ascii=False)


def show_diff(found: ArtifactDiff) -> None:
    """Print how two artifacts differ."""
    state = {True: "equal", False: "they differ", None: "not everything can be compared"}[found.equal]
    click.echo(f"{found.name_a} and {found.name_b} ({found.kind}): {state}")
    data = found.data
    if "diff" in data:
        click.echo(data["diff"])
    elif "entries" in data:
        _show_rows(data["entries"], ["path", "kind", "a", "b"])
    elif "models" in data:
        _show_weights(data)
    elif "datasets" in data:
        for side in ("a", "b"):
            if data[f"only_in_{side}"]:
                click.echo(f"only in {side}: {', '.join(data[f'only_in_{side}'])}")
        rows = [{**one, **one.get("stats", {})} for one in data["datasets"]]
        _show_rows(rows, ["address", "equal", "shape_a", "differing", "abs_max", "rms", "rel_norm", "note"])
        _show_rows(data["attrs"], ["path", "kind", "a", "b"])
    elif "fields" in data:
        rows = [{"field": name, **one, **one.get("stats", {})} for name, one in data["fields"].items()]
        _show_rows(rows, ["field", "equal", "differing", "abs_max", "rms", "note"])
    elif "stats" in data:
        figures = {**data["stats"], "abs_max_at": str(data["stats"].get("abs_max_at") or "-")}
        click.echo("\n" + format_table([figures], keys=0))
        for one in data.get("first", []):
            click.echo(f"{one['at']}: {one['a']!r} and {one['b']!r}")
    for note in [*found.notes, *([data["note"]] if data.get("note") else [])]:
        click.echo(f"note: {note}", err=True)


def _show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    used = [column for column in columns if any(row.get(column) is not None for row in rows)]
    if rows:
        shown = [{c: _cell(row.get(c)) for c in used} for row in rows[:_ROWS]]
        click.echo("\n" + format_table(shown, used))
    if len(rows) > _ROWS:
        click.echo(f"… and {len(rows) - _ROWS} more; --json has them all")


def _cell(value: Any) -> Any:
    return _text(value, indent=None)[:80] if isinstance(value, dict) else value


def _show_weights(data: Mapping[str, Any]) -> None:
    for side in ("a", "b"):
        if data[f"models_only_in_{side}"]:
            click.echo(f"models only in {side}: {', '.join(data[f'models_only_in_{side}'])}")
    for pair in data["models"]:
        if pair["model_a"] or pair["model_b"]:
            click.echo(f"\n{pair['model_a'] or 'the checkpoint'} → {pair['model_b'] or 'the checkpoint'}")
        for side in ("a", "b"):
            if pair[f"only_in_{side}"]:
                click.echo(f"only in {side}: {', '.join(pair[f'only_in_{side}'])}")
        for one in pair["shapes"]:
            click.echo(f"{one['name']}: shape {one['a']} → {one['b']}")
        _show_rows(pair["parameters"], ["name", "shape", "equal", "rel_norm", "abs_max", "rms", "differing", "note"])
        _show_rows(pair["metrics"], ["field", "parameter", "a", "b", "delta", "relative"])


COMMANDS = (artifacts, artifact_diff, disk, prune)
"""For the group ``runs``."""
