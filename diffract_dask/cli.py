"""The command ``diffract-dask``: argv to :class:`diffract_dask.Session` and back to the terminal, and no more."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diffract_dask import __version__
from diffract_dask.cli_options import (
    Files,
    Output,
    compute_options,
    fields_argument,
    file_options,
    format_option,
    open_session,
    output_options,
    refuse_unreadable,
    scope_options,
    store_options,
)
from diffract_dask.errors import (
    DiffractError,
    DuplicateContentWarning,
    NothingAnalysedWarning,
    StaleValuesWarning,
    UnsupportedSourceError,
)

if TYPE_CHECKING:
    from diffract_dask.session import Session

__all__ = ["ANALYZE_FIELDS", "cli", "main"]

ANALYZE_FIELDS = (
    "frob_norm",
    "l2_norm",
    "nuclear_norm",
    "stable_rank",
    "effective_rank",
    "hard_rank",
    "esd_max",
    "esd_min",
    "weights_mean",
    "weights_std",
    "nonfinite_fraction",
)
"""What ``analyze`` computes."""

INTERRUPTED = 130
_ELSEWHERE = ("lineage", "runs")


class _Commands(click.Group):
    """The group of commands; the only place where errors become lines on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ELSEWHERE:
            found: click.Command = getattr(import_module("diffract_dask.cli_runs"), cmd_name)
            return found
        return super().get_command(ctx, cmd_name)

    def main(self, args: Sequence[str] | None = None, *more: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        run: Any = super().main
        if not standalone_mode:
            return run(args, *more, standalone_mode=False, **extra)
        try:
            with _plain_warnings():
                code = run(args, *more, standalone_mode=False, **extra)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "diffract-dask"
            _fail(f"{error.format_message()} See '{command} --help'.")
        except click.ClickException as error:
            _fail(error.format_message())
        except DiffractError as error:
            _fail(str(error))
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        except click.Abort:
            click.echo("interrupted; what was stored stays, and the same command goes on from there", err=True)
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    click.echo(f"error: {_said_here(message)}", err=True)
    sys.exit(2)


def _said_here(message: str) -> str:
    """Return a message in one line, with ``replace=True`` and its like as the options that they are here."""
    options = re.sub(r"\b([a-z]+(?:_[a-z]+)*)=True\b", lambda found: f"--{found[1].replace('_', '-')}", message)
    return " ".join(options.split())


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show the package's own warnings as one line each, without file and line."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        click.echo(f"warning: {_said_here(str(message))}", err=True)

    with warnings.catch_warnings():
        for category in (DuplicateContentWarning, NothingAnalysedWarning, StaleValuesWarning):
            warnings.simplefilter("always", category)
        warnings.showwarning = show
        yield


# ------------------------------------------------------------------------------------------ results as rows

Row = dict[str, Any]

_COLUMNS = {"model_id": "model_id", "parameter_name": "name", "parameter_type": "type", "meta_shape": "shape"}


def _stored_fields(session: Session) -> list[str]:
    """Return the scalar fields that the store holds."""
    return [str(name) for name in session.results.dataset().data_vars]


def _split_by_level(session: Session, fields: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return which of the fields have a value per parameter and which per model."""
    registry = session.compute.registry
    per_model = [name for name in fields if name in registry.fields and registry.producer(name).level != "slice"]
    return [name for name in fields if name not in per_model], per_model


def _parameter_rows(session: Session, fields: Sequence[str]) -> list[Row]:
    """Return a row per parameter that has any of the fields: model_id, step, name, type, shape and the fields."""
    rows = []
    steps = {model_id: session.models.attrs(model_id).get("step") for model_id in session.models.list()}
    for record in session.results.export_metrics(*fields, export_format="list"):
        if any(field in record for field in fields):
            row = {short: record.get(long) for long, short in _COLUMNS.items()}
            row["step"] = steps.get(str(row["model_id"]))
            rows.append(row | {field: record.get(field) for field in fields})
    return rows


def _model_rows(session: Session, fields: Sequence[str]) -> list[Row]:
    """Return a row per model."""
    rows: dict[str, Row] = {}
    for aggregate in session.results.export_aggregates(*fields, export_format="list"):
        model = ", ".join(aggregate["context_models"])
        row = rows.setdefault(model, {"model_id": model, **dict.fromkeys(fields)})
        row[aggregate["field"]] = aggregate["value"]
    return list(rows.values())


def _print_rows(rows: Sequence[Row], columns: Sequence[str], format: str, *, keys: int = 1) -> None:
    """Print rows as an aligned table, as CSV, or as a JSON list."""
    from diffract_dask.export import plain_cell, plain_json
    from diffract_dask.terminal import format_table

    if format == "json":
        click.echo(json.dumps(plain_json([{c: row.get(c) for c in columns} for row in rows]), indent=2))
    elif format == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([plain_cell(row.get(column)) for column in columns] for row in rows)
        click.echo(text.getvalue(), nl=False)
    else:
        click.echo(format_table(rows, columns, keys=keys))


def _arranged(rows: Sequence[Row], output: Output) -> Sequence[Row]:
    from diffract_dask.terminal import filter_rows, sort_rows

    return sort_rows(filter_rows(rows, output.conditions), output.sort)


def _print_results(session: Session, fields: Sequence[str], output: Output) -> int:
    """Print stored values, those of model level in a table of their own; return the number of rows."""
    per_parameter, per_model = _split_by_level(session, fields)
    if per_parameter and per_model and output.format != "table":
        raise click.ClickException(
            f"{per_model[0]} has one value per model, {per_parameter[0]} one per parameter; print them one at a time"
        )
    count = 0
    rows: Sequence[Row]
    if per_parameter:
        rows = _arranged(_parameter_rows(session, per_parameter), output)
        one_model = output.format == "table" and len({row["model_id"] for row in rows}) <= 1
        columns = ["name", "shape", *per_parameter] if one_model else ["model_id", "name", "shape", *per_parameter]
        _print_rows(rows, columns, output.format, keys=1 if one_model else 2)
        _say_why_nan(rows, per_parameter)
        count += len(rows)
    if per_model:
        rows = _model_rows(session, per_model)
        if per_parameter:
            click.echo()
        else:
            rows = _arranged(rows, output)
        _print_rows(rows, ["model_id", *per_model], output.format)
        count += len(rows)
    return count


def _say_why_nan(rows: Sequence[Row], fields: Sequence[str]) -> None:
    count = sum(isinstance(row[field], float) and math.isnan(row[field]) for row in rows for field in fields)
    if count:
        click.echo(f"\nnan: {count} values cannot be measured; 'diffract-dask status FIELD' says why", err=True)


# ------------------------------------------------------------------------------------------ adding files


def _fingerprint(path: Path) -> dict[str, Any]:
    """Return what tells whether a file (or a folder of them) is still the one that was added."""
    whole = path if path.is_dir() else path.parent if path.name.endswith(".index.json") else None
    stats = [file.stat() for file in (sorted(whole.glob("*")) if whole else [path]) if file.is_file()]
    return {
        "file": str(path.resolve()),
        "file_size": sum(stat.st_size for stat in stats),
        "file_mtime_ns": max((stat.st_mtime_ns for stat in stats), default=0),
    }


def _add_file(session: Session, path: Path, files: Files, *, link: bool, replace: bool) -> str:
    options: dict[str, Any] = {
        "step": files.step_of(path),
        "parent": files.parent,
        "attrs": _fingerprint(path),
        "replace": replace,
    }
    if not link:
        return session.models.add(path, files.default_id(path), **options)
    try:
        return session.models.add(path, files.default_id(path), link=True, **options)
    except UnsupportedSourceError as error:
        added = session.models.add(path, files.default_id(path), **options)
        click.echo(f"note: {path} is copied, not linked: {error}", err=True)
        return added


def _added_before(session: Session, path: Path, model_id: str) -> bool:
    """Return whether the model was added from this very file; refuse to take another file for it."""
    if model_id not in session.models.list():
        return False
    recorded = session.models.attrs(model_id)
    if recorded.get("file") != str(path.resolve()):
        raise click.ClickException(
            f"the store has a model {model_id!r} from {recorded.get('file', 'elsewhere')}, not from {path}; "
            "name this one with --id"
        )
    return all(recorded.get(key) == value for key, value in _fingerprint(path).items())


def _print_skipped(session: Session, model_id: str) -> None:
    reasons = [str(reason) for reason in session.models.parameters(model_id)["skip_reason"].values]
    counts = Counter(reason for reason in reasons if reason)
    skipped = f"{counts.total()} skipped"
    if counts:
        skipped += ": " + ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    click.echo(f"{model_id}: {len(reasons) - counts.total()} parameters analysed, {skipped}")


# ------------------------------------------------------------------------------------------ the commands


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@store_options
@click.version_option(__version__, prog_name="diffract-dask")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Spectral metrics of neural-network weights, from checkpoints of any size.

    \b
    Examples:
      diffract-dask demo
      diffract-dask analyze model.safetensors
      diffract-dask show stable_rank --sort -stable_rank
      diffract-dask fields stable_rank
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command()
@file_options
@click.option("--field", "-f", "more", multiple=True, metavar="FIELD", help="Compute and show this too. Repeatable.")
@click.option("--copy", is_flag=True, help="Copy the weights into the store instead of reading them from the file.")
@output_options
@store_options
def analyze(files: Files, more: Sequence[str], copy: bool, output: Output) -> None:
    """Add checkpoints, compute the usual metrics and print them.

    The weights stay in the file where its format allows it. On the same file again, what is stored is used.

    \b
    Examples:
      diffract-dask analyze model.safetensors
      diffract-dask analyze runs/step-*.safetensors --step auto
      diffract-dask analyze model.pt --id baseline -f weights_kurtosis --sort -stable_rank
      diffract-dask analyze model.safetensors --filter 'stable_rank<5' --format csv
    """
    refuse_unreadable(files.paths)
    session = open_session(mode="a")
    ids = [files.default_id(path) for path in files.paths]
    for path, model_id in zip(files.paths, ids, strict=True):
        if files.replace or not _added_before(session, path, model_id):
            _add_file(session, path, files, link=not copy, replace=model_id in session.models.list())
    fields = list(dict.fromkeys([*ANALYZE_FIELDS, *more]))
    chosen = session.filter(model_ids=ids)
    summary = chosen.compute.apply(*fields)
    click.echo(str(summary), err=True)
    _print_results(chosen, fields, output)
    if output.format == "table":
        click.echo()
        for model_id in dict.fromkeys(ids):
            _print_skipped(chosen, model_id)


@cli.command()
@file_options
@click.option("--link", is_flag=True, help="Leave the weights in the file instead of copying them.")
@store_options
def add(files: Files, link: bool) -> None:
    """Add checkpoints without computing anything.

    \b
    Examples:
      diffract-dask add model.safetensors --id base
      diffract-dask add runs/step-*.safetensors --step auto --link
      diffract-dask add tuned.pt --parent base
    """
    refuse_unreadable(files.paths)
    session = open_session(mode="a")
    for path in files.paths:
        model_id = _add_file(session, path, files, link=link, replace=files.replace)
        _print_skipped(session, model_id)


@cli.command()
@format_option
@store_options
def models(format: str) -> None:
    """List the models of the store.

    \b
    Examples:
      diffract-dask models
      diffract-dask models --store runs.zarr --format json
    """
    session = open_session()
    rows = []
    for model_id in session.models.list():
        attrs = session.models.attrs(model_id)
        reasons = session.models.parameters(model_id)["skip_reason"].values
        rows.append(
            {
                "model_id": model_id,
                "step": attrs.get("step"),
                "parameters": len(reasons),
                "analysed": sum(not reason for reason in reasons),
                "parent": attrs.get("parent") or None,
                "added": str(attrs.get("added", ""))[:19],
                "source": attrs.get("file") or attrs.get("source"),
            }
        )
    _print_rows(rows, ["model_id", "step", "parameters", "analysed", "parent", "added", "source"], format)


@cli.command()
@compute_options
@click.option("--retry-failed", is_flag=True, help="Try again what failed before.")
@store_options
@click.pass_context
def compute(ctx: click.Context, fields: Sequence[str], params: Any, scope: Any, retry_failed: bool) -> None:
    """Compute fields: only what is missing or out of date. Exit code 1 if a kernel failed somewhere.

    \b
    Examples:
      diffract-dask compute stable_rank effective_rank
      diffract-dask compute hard_rank --param hard_rank.rtol=1e-9
      diffract-dask compute weights_svals --model 'run-1*' --name '*.attn.*'
    """
    summary = open_session(scope, mode="a").compute.apply(*fields, params=params, retry_failed=retry_failed)
    click.echo(str(summary))
    ctx.exit(1 if summary.failed else 0)


@cli.command()
@compute_options
@store_options
def plan(fields: Sequence[str], params: Any, scope: Any) -> None:
    """Print what compute would run, and why.

    On how many slices each kernel would run, by which route and in how much memory; nothing is computed.

    \b
    Examples:
      diffract-dask plan stable_rank
      diffract-dask plan hard_rank --param hard_rank.rtol=1e-9 --model base
    """
    click.echo(open_session(scope).compute.plan(*fields, params=params).explain())


@cli.command()
@fields_argument
@scope_options
@output_options
@store_options
def show(fields: Sequence[str], scope: Any, output: Output) -> None:
    """Print stored values; without FIELD all scalar ones. Nothing is computed.

    A dash is a value that was never computed, nan one that cannot be measured ('status' says why).

    \b
    Examples:
      diffract-dask show
      diffract-dask show stable_rank hard_rank --sort -stable_rank
      diffract-dask show stable_rank --filter 'stable_rank>5' --name '*.attn.*'
      diffract-dask show param_norm --format json
    """
    session = open_session(scope)
    chosen = list(fields) or _stored_fields(session)
    if not fields and output.format != "table":  # one table has either rows of parameters or rows of models
        chosen = _split_by_level(session, chosen)[0]
    if not chosen or not _print_results(session, chosen, output):
        click.echo("no values; 'diffract-dask status' says what is stored", err=True)


@cli.command()
@fields_argument
@scope_options
@store_options
def status(fields: Sequence[str], scope: Any) -> None:
    """Count the fresh, stale, missing and failed values.

    With the reasons, also those of values that cannot be measured.

    \b
    Examples:
      diffract-dask status
      diffract-dask status stable_rank --model base
    """
    from diffract_dask.terminal import format_table

    found = open_session(scope).results.status(*fields)
    counts: list[Row] = []
    reasons: list[Row] = []
    for field in found["field"].values:
        one = found.sel(field=field)
        pairs = Counter(
            (state, text)
            for state, text in zip(one["state"].values.flat, one["reason"].values.flat, strict=True)
            if state
        )
        row: Row = {"field": str(field)}
        for (state, text), count in pairs.items():
            row[state] = row.get(state, 0) + count
            if text and state != "skipped":
                reasons.append({"field": str(field), "values": count, "state": state, "reason": text})
        counts.append(row)
    states = [s for s in ("fresh", "stale", "missing", "failed", "ingested") if any(s in row for row in counts)]
    click.echo(format_table(counts, ["field", *states]) if counts else "nothing is stored yet")
    if reasons:
        click.echo("\n" + format_table(reasons))


@cli.command()
@click.argument("name", required=False)
@click.option("--find", metavar="TEXT", help="Only fields with this in their name or title.")
@format_option
@store_options
def fields(name: str | None, find: str | None, format: str) -> None:
    """List the fields, or print the whole definition of one.

    \b
    Examples:
      diffract-dask fields
      diffract-dask fields --find rank
      diffract-dask fields stable_rank
    """
    from diffract_dask.session import Session

    config_path = click.get_current_context().ensure_object(dict).get("config")
    registry = Session(profile="ram", config_path=config_path).compute.registry
    if name is not None:
        click.echo(_definition(registry, name))
        return
    rows = [
        {
            "field": field,
            "level": registry.producer(field).level,
            "value": "x".join(declared.dims) or "scalar",
            "kernel": registry.producer(field).name,
            "title": declared.long_name,
        }
        for field, declared in registry.fields.items()
        if find is None or find.lower() in f"{field} {declared.long_name}".lower()
    ]
    _print_rows(rows, ["field", "level", "value", "kernel", "title"], format)


def _definition(registry: Any, name: str) -> str:
    import inspect

    from diffract_dask.definitions import definition

    entries = definition(registry, name)
    lines = [name, *(f"  {label:<11} {text}" for label, text in entries.items())]
    doc = inspect.getdoc(registry.producer(name).function)
    return "\n".join([*lines, *(["", doc] if doc else [])])


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@fields_argument
@scope_options
@click.option("--format", "export_format", metavar="FORMAT", help="json, csv, netcdf, …. Default: after the suffix.")
@click.option(
    "--sources",
    type=click.Choice(["metrics", "aggregates", "all"]),
    default="all",
    show_default=True,
    help="Values per parameter, per model, or both.",
)
@store_options
def export(path: Path, fields: Sequence[str], scope: Any, export_format: str | None, sources: str) -> None:
    """Write stored values to a file; without FIELD all scalar ones.

    \b
    Examples:
      diffract-dask export results.csv
      diffract-dask export results.nc stable_rank weights_svals
      diffract-dask export results.json stable_rank --model 'run-*'
    """
    session = open_session(scope)
    chosen = list(fields) or _stored_fields(session)
    if not chosen:
        raise click.ClickException("no values are stored yet; 'diffract-dask compute FIELD' makes some")
    session.results.export(*chosen, sources=sources, export_format=export_format, path=path)
    click.echo(f"wrote {path}")


@cli.command()
@fields_argument
@scope_options
@click.option("--dependents", is_flag=True, help="Erase what was computed from these fields too.")
@click.option("--whole-models", is_flag=True, help="Without FIELD: remove the models of --model altogether.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@store_options
def erase(fields: Sequence[str], scope: Any, dependents: bool, whole_models: bool, yes: bool) -> None:
    """Erase stored values of fields, or whole models.

    \b
    Examples:
      diffract-dask erase hard_rank --dependents
      diffract-dask erase stable_rank --model run-1
      diffract-dask erase --whole-models --model run-1 --model 'old-*' --yes
    """
    if bool(fields) == whole_models or (whole_models and set(scope) != {"model_ids"}):
        raise click.UsageError("name either the fields to erase, or models with --whole-models --model ID.")
    session = open_session(scope, mode="a")
    ids = session.models.list()
    if whole_models and not ids:
        raise click.ClickException(
            f"no model is called {' or '.join(scope['model_ids'])}; 'diffract-dask models' lists them"
        )
    what = ", ".join(fields) if fields else "everything"
    if not yes:
        _ask(f"Erase {what} of {len(ids)} models ({', '.join(ids[:5])}{', …' * (len(ids) > 5)})?")
    if fields:
        erased = session.results.erase(*fields, dependents=dependents)
        click.echo(f"erased {', '.join(erased.fields) or 'nothing'} of {len(erased.affected_uids)} parameters")
    else:
        erased = session.models.erase(*ids)
        click.echo(f"erased {', '.join(erased.models)}")


def _ask(question: str) -> None:
    try:
        agreed = click.confirm(question)
    except click.Abort:
        raise click.ClickException("nobody answered, so nothing was erased; give --yes to erase unasked") from None
    if not agreed:
        raise click.ClickException("nothing was erased")


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path), default="diffract-demo")
def demo(folder: Path) -> None:
    """Train a small network, analyse it, write a report.

    A minute of work in FOLDER, without any download: checkpoints at numbered steps of two training runs, a store
    with their metrics, a table, and a self-contained page in HTML.

    \b
    Examples:
      diffract-dask demo
      diffract-dask demo /tmp/demo
    """
    from diffract_dask.demo import run

    run(folder)


def main() -> None:
    """Run the command: what ``diffract-dask`` and ``python -m diffract_dask`` call."""
    cli(prog_name="diffract-dask")
