"""Results in other shapes: a table of formats, each a function from a :class:`Table` to an object, a text or a file."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from diffract_dask.errors import ConfigurationError, MissingExtraError, did_you_mean
from diffract_dask.table import Aggregate, ParameterRow, Sources, Table, tabulate

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import xarray as xr

__all__ = [
    "EXPORTS",
    "Aggregate",
    "Export",
    "ParameterRow",
    "Sources",
    "Table",
    "export_table",
    "formats",
    "plain_cell",
    "plain_json",
    "register_formatter",
    "tabulate",
]

Format = Callable[..., Any]
"""``(table, path, **options) -> object``: `path` is None unless a file is to be written."""


@dataclass(frozen=True, slots=True)
class Export:
    """Declaration of one format.

    Parameters
    ----------
    name : str
        What ``export_format=`` takes.
    function : callable
        ``(table, path, **options)``. Returns the object; or, where `path` is given, writes it and returns None.
    doc : str
        One sentence for the reference page.
    suffixes : tuple of str
        File names that select this format by themselves (``".csv"``). Empty: it never goes to a file.
    file_only : bool
        There is no object to return: a path is required.
    """

    name: str
    function: Format
    doc: str = ""
    suffixes: tuple[str, ...] = ()
    file_only: bool = False


# ---------------------------------------------------------------------------------------- records and columns


def _address(aggregate: Aggregate, names: Mapping[str, set[str]]) -> str:
    """Return ``field@models[a,b]@params[p]``; without the parameters where they are all those of the models."""
    models, params = aggregate["context_models"], aggregate["context_params"]
    text = f"{aggregate['field']}@models[{','.join(models)}]"
    everything = set().union(*(names.get(model, set()) for model in models))
    return text if set(params) >= everything else f"{text}@params[{','.join(params)}]"


def _expanded(table: Table) -> Table:
    """Return a table of metrics in which each aggregate is one more field of every parameter it was taken over."""
    if table.sources != "all":
        return table
    names: dict[str, set[str]] = {}
    by_model: dict[str, list[ParameterRow]] = {}
    rows: list[ParameterRow] = []
    for row in table.parameters:
        copied: ParameterRow = {**row, "fields": dict(row["fields"])}
        rows.append(copied)
        by_model.setdefault(row["model_id"], []).append(copied)
        names.setdefault(row["model_id"], set()).add(row["name"])
    addresses: list[str] = []
    for aggregate in table.aggregates:
        address = _address(aggregate, names)
        addresses.append(address)
        params = set(aggregate["context_params"])
        for model in aggregate["context_models"]:
            for row in by_model.get(model, []):
                if row["name"] in params:
                    row["fields"][address] = aggregate["value"]
    metrics = [name for name in table.fields if not _only_aggregated(name, table)]
    return replace(table, parameters=rows, fields=tuple(dict.fromkeys([*metrics, *addresses])), sources="metrics")


def _only_aggregated(field: str, table: Table) -> bool:
    """Whether a requested field has one value per model or pair, so that it is no column of the parameters."""
    if field in table.dataset.variables:
        return "name" not in table.dataset[field].dims
    return any(a["field"] == field for a in table.aggregates) and not any(
        field in r["fields"] for r in table.parameters
    )


def _columns(table: Table) -> dict[str, list[Any]]:
    """Return the records of a table by column; None where a record lacks the column."""
    if table.sources == "aggregates":
        keys = ("field", "context_models", "context_params", "value")
        return {key: [aggregate[key] for aggregate in table.aggregates] for key in keys}  # type: ignore[literal-required]
    table = _expanded(table)
    rows = table.parameters
    columns: dict[str, list[Any]] = {
        "parameter_uid": [row["uid"] for row in rows],
        "model_id": [row["model_id"] for row in rows],
        "parameter_name": [row["name"] for row in rows],
        "parameter_type": [row["parameter_type"] for row in rows],
    }
    for key in dict.fromkeys(key for row in rows for key in row["metadata"]):
        columns[f"meta_{key}"] = [row["metadata"].get(key) for row in rows]
    for field in table.fields:
        if not _only_aggregated(field, table):
            columns[field] = [row["fields"].get(field) for row in rows]
    return columns


def to_list(table: Table, path: Path | None = None) -> list[dict[str, Any]]:
    """Return flat records: ``parameter_uid, model_id, parameter_name, parameter_type, meta_*``, then the fields."""
    if table.sources == "aggregates":
        return [dict(aggregate) for aggregate in table.aggregates]
    table = _expanded(table)
    return [
        {
            "parameter_uid": row["uid"],
            "model_id": row["model_id"],
            "parameter_name": row["name"],
            "parameter_type": row["parameter_type"],
            **{f"meta_{key}": value for key, value in row["metadata"].items()},
            **{field: row["fields"][field] for field in table.fields if field in row["fields"]},
        }
        for row in table.parameters
    ]


def to_dict(table: Table, path: Path | None = None) -> dict[str, dict[str, Any]] | list[Aggregate]:
    """Return ``{uid: {"metadata": {…}, "fields": {…}}}``, or the list of aggregates.

    Identity wins: an attribute of the user that is called ``name``, ``model_id`` or ``parameter_type`` does not
    replace the real one.
    """
    if table.sources == "aggregates":
        return list(table.aggregates)
    table = _expanded(table)
    return {
        row["uid"]: {
            "metadata": {
                "name": row["name"],
                "model_id": row["model_id"],
                "parameter_type": row["parameter_type"],
                **{k: v for k, v in row["metadata"].items() if k not in ("name", "model_id", "parameter_type")},
            },
            "fields": {field: row["fields"][field] for field in table.fields if field in row["fields"]},
        }
        for row in table.parameters
    }


# ---------------------------------------------------------------------------------------- text


def to_json(table: Table, path: Path | None = None, *, indent: int | None = 2, allow_nan: bool = False) -> str | None:
    """Return what :func:`to_dict` gives, as JSON text.

    NaN and infinity are not JSON: they are written as ``null``, so that every parser reads the text. A field that
    was never computed is absent, so ``null`` always means "not measurable". ``allow_nan=True`` writes the
    literals ``NaN`` and ``Infinity`` instead, which Python reads back (and Diffract wrote).
    """
    text = json.dumps(plain_json(to_dict(table), allow_nan), indent=indent, allow_nan=allow_nan, ensure_ascii=False)
    return _deliver(text + "\n" if path else text, path)


def plain_json(value: Any, allow_nan: bool = False) -> Any:
    """Return a value as what JSON has: arrays and tuples as lists, NaN and infinity as None unless allowed."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item, allow_nan) for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return plain_json(value.tolist(), allow_nan)
    if isinstance(value, (list, tuple)):
        return [plain_json(item, allow_nan) for item in value]
    if isinstance(value, float):
        return value if allow_nan or math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def to_csv(table: Table, path: Path | None = None) -> str | None:
    """Return the records as CSV text with a header line.

    Numbers have all their digits. An empty cell was never computed, ``nan`` is not measurable. Arrays, shapes,
    contexts and other nested values are JSON in one cell.
    """
    columns = _columns(table)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([plain_cell(value) for value in record] for record in zip(*columns.values(), strict=True))
    return _deliver(buffer.getvalue(), path)


def plain_cell(value: Any) -> Any:
    """Return a value as one cell of a CSV file: floats with all digits, nested values as JSON text."""
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    if isinstance(value, (np.ndarray, list, tuple, dict)):
        return json.dumps(plain_json(value, True), ensure_ascii=False)
    return value


def _deliver(text: str, path: Path | None) -> str | None:
    if path is None:
        return text
    with _replacing(path) as partial:
        partial.write_text(text, encoding="utf8")
    return None


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to that becomes `path` when all went well, so that a failed export leaves no half file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------- frames


def to_pandas(table: Table, path: Path | None = None) -> pd.DataFrame:
    """Return the records as a pandas DataFrame; array fields are columns of arrays."""
    pandas = _optional("pandas")
    columns = _columns(table)
    frame: pd.DataFrame = pandas.DataFrame({name: _series(pandas, column) for name, column in columns.items()})
    return frame


def _series(pandas: Any, column: list[Any]) -> Any:
    if any(isinstance(value, (np.ndarray, list, tuple, dict)) for value in column):
        cells = np.empty(len(column), object)
        for i, value in enumerate(column):  # one by one: a slice assignment would try to broadcast the arrays
            cells[i] = value
        return pandas.Series(cells)
    return pandas.Series(column)


def to_polars(table: Table, path: Path | None = None) -> pl.DataFrame:
    """Return the records as a polars DataFrame: null was never computed, NaN is not measurable.

    Vectors are ``List`` columns; a column of mixed kinds, or of matrices, is an ``Object`` column.
    """
    polars = _optional("polars")
    frame: pl.DataFrame = polars.DataFrame(
        [_polars_series(polars, name, column) for name, column in _columns(table).items()]
    )
    return frame


def _polars_series(polars: Any, name: str, column: list[Any]) -> Any:
    kinds = {_kind(value) for value in column if value is not None}
    if kinds <= {"number", "integer"} and "number" in kinds:
        return polars.Series(name, [None if v is None else float(v) for v in column], dtype=polars.Float64)
    if kinds == {"vector"}:
        lists = [None if v is None else np.asarray(v, np.float64).tolist() for v in column]
        return polars.Series(name, lists, dtype=polars.List(polars.Float64))
    if kinds in ({"texts"}, {"integers"}):
        dtype = polars.List(polars.String if kinds == {"texts"} else polars.Int64)
        return polars.Series(name, [None if v is None else list(v) for v in column], dtype=dtype)
    if len(kinds) == 1 and kinds <= {"integer", "boolean", "text"}:
        (kind,) = kinds
        dtype = {"integer": polars.Int64, "boolean": polars.Boolean, "text": polars.String}[kind]
        return polars.Series(name, column, dtype=dtype)
    return polars.Series(name, column, dtype=polars.Object) if kinds else polars.Series(name, column, polars.Float64)


def _kind(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "boolean"
    if isinstance(value, (int, np.integer)):
        return "integer"
    if isinstance(value, (float, np.floating)):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "fiub":
        return "vector"
    if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        return "integers"
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return "texts"
    return "other"


def _optional(package: str) -> Any:
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtraError(
            f"this export needs {package}, which is not installed: "
            f"pip install 'diffract_dask[{package}]' or pip install {package}"
        ) from error


# ---------------------------------------------------------------------------------------- labelled arrays


def to_xarray(table: Table, path: Path | None = None) -> xr.Dataset:
    """Return the labelled Dataset: fields per parameter, per model, or both."""
    dataset = table.dataset
    if table.sources == "all":
        return dataset
    per_parameter = table.sources == "metrics"
    keep = [name for name, variable in dataset.data_vars.items() if ("name" in variable.dims) == per_parameter]
    return dataset[keep]


_NETCDF_ENGINES = {"netcdf4": ("netCDF4",), "h5netcdf": ("h5netcdf", "h5py")}


def to_netcdf(table: Table, path: Path | None = None, *, engine: str | None = None) -> None:
    """Write the Dataset as netCDF-4; it reads back equal.

    What netCDF has no type for is changed first: float16 becomes float32 (exactly), texts that are missing become
    empty, and among attributes None is left out, booleans become 0 or 1 and mappings become JSON text.
    """
    if path is None:
        raise ConfigurationError("export_format='netcdf' writes a file; give path='results.nc'")
    if engine is None:
        engine = next((name for name, needs in _NETCDF_ENGINES.items() if all(map(find_spec, needs))), None)
    if engine is None:
        raise MissingExtraError(
            "writing netCDF needs netCDF4 (or h5netcdf with h5py), which is not installed: pip install netCDF4"
        )
    dataset = _netcdf_ready(to_xarray(table))
    with _replacing(path) as partial:
        dataset.to_netcdf(partial, engine="h5netcdf" if engine == "h5netcdf" else "netcdf4")


def _netcdf_ready(dataset: xr.Dataset) -> xr.Dataset:
    dataset = dataset.drop_encoding()
    changed: dict[str, Any] = {}
    for name, variable in dataset.variables.items():
        if variable.dtype == np.float16:
            changed[str(name)] = variable.astype(np.float32)
        elif variable.dtype == object:
            texts = np.array(["" if _is_missing(x) else str(x) for x in variable.values.ravel()], object)
            changed[str(name)] = variable.copy(data=texts.reshape(variable.shape))
    dataset = dataset.assign({k: v for k, v in changed.items() if k in dataset.data_vars}).assign_coords(
        {k: v for k, v in changed.items() if k in dataset.coords}
    )
    dataset.attrs = _netcdf_attrs(dataset.attrs)
    for name in dataset.variables:
        dataset[name].attrs = _netcdf_attrs(dataset[name].attrs)
    return dataset


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _netcdf_attrs(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    ready: dict[str, Any] = {}
    for key, value in attrs.items():
        if value is None:
            continue
        if key == "dtype":  # readers of netCDF would take it for the encoding and cast the values
            key = "value_dtype"
        if isinstance(value, (bool, np.bool_)):
            value = int(value)
        elif isinstance(value, (list, tuple)) and not value:
            value = ""
        elif isinstance(value, Mapping) or (
            isinstance(value, (list, tuple)) and len({isinstance(item, str) for item in value}) > 1
        ):
            value = json.dumps(plain_json(value, True), ensure_ascii=False)
        elif not isinstance(value, (str, int, float, np.ndarray, np.generic, list, tuple)):
            value = str(value)
        ready[str(key)] = value
    return ready


# ---------------------------------------------------------------------------------------- the table of formats

_DECLARED = (
    Export("dict", to_dict, "Mapping from uid to metadata and fields; the aggregates as a list."),
    Export("list", to_list, "Flat records, one per parameter."),
    Export("json", to_json, "The mapping as strict JSON text; NaN is null.", (".json",)),
    Export("csv", to_csv, "The records as CSV text.", (".csv",)),
    Export("pandas", to_pandas, "The records as a pandas DataFrame."),
    Export("polars", to_polars, "The records as a polars DataFrame."),
    Export("xarray", to_xarray, "The labelled Dataset."),
    Export("netcdf", to_netcdf, "The Dataset as a netCDF-4 file.", (".nc", ".nc4", ".netcdf"), file_only=True),
)

EXPORTS: dict[str, Export] = {declared.name: declared for declared in _DECLARED}
"""Every format by name; :func:`register_formatter` and the entry points ``diffract_dask.exports`` add to it."""

ENTRY_POINTS = "diffract_dask.exports"


def register_formatter(
    name: str, function: Format, *, suffixes: Sequence[str] = (), doc: str = "", replace: bool = False
) -> None:
    """Add a format: ``function(table, path, **options)`` gets a :class:`Table` and returns anything.

    Raises
    ------
    ConfigurationError
        The name is taken and ``replace=True`` was not given.

    Examples
    --------
    >>> def names(table, path=None):
    ...     return [row["name"] for row in table.parameters]
    >>> register_formatter("names", names, replace=True)
    """
    if name in formats() and not replace:
        raise ConfigurationError(f"an export format {name!r} exists already; pass replace=True to replace it")
    summary = doc or (function.__doc__ or "").strip().partition("\n")[0]
    EXPORTS[name] = Export(name, function, summary, tuple(suffixes))


@cache
def _installed_formats() -> Mapping[str, EntryPoint]:
    return MappingProxyType({point.name: point for point in entry_points(group=ENTRY_POINTS)})


def formats() -> list[str]:
    """Return the names of all formats, those of installed packages included."""
    return [*EXPORTS, *(name for name in _installed_formats() if name not in EXPORTS)]


def _find(name: str) -> Export:
    if name in EXPORTS:
        return EXPORTS[name]
    point = _installed_formats().get(name)
    if point is None:
        raise ConfigurationError(
            f"no export format {name!r}; there are {', '.join(formats())}.{did_you_mean(name, formats())}"
        )
    loaded = point.load()
    EXPORTS[name] = loaded if isinstance(loaded, Export) else Export(name, loaded, (loaded.__doc__ or "").strip())
    return EXPORTS[name]


def _format_of(path: Path) -> str:
    known = {suffix: name for name in formats() for suffix in _find(name).suffixes}
    if path.suffix.lower() not in known:
        raise ConfigurationError(
            f"{path.name!r} does not say which format to write: end it in {', '.join(sorted(known))} "
            "or give export_format="
        )
    return known[path.suffix.lower()]


def export_table(
    table: Table,
    export_format: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    default: str | None = None,
    **options: Any,
) -> Any:
    """Return a table in one of the :data:`EXPORTS`, or write it to `path`.

    Parameters
    ----------
    table : Table
        What to export.
    export_format : str, optional
        Name of a format. Default: what the suffix of `path` says, else `default`.
    path : path, optional
        File to write; it is replaced in one step.
    default : str, optional
        Format where neither says; without it the setting ``export-format``.
    **options
        Of the format, for example ``allow_nan=True`` for ``json``.

    Returns
    -------
    object
        What the format makes, or the Path that was written.

    Raises
    ------
    ConfigurationError
        Unknown format, a format that cannot be written to a file, or one that has to be.
    MissingExtraError
        The format needs a package that is not installed.
    """
    target = None if path is None else Path(path).expanduser()
    if export_format is None:
        from diffract_dask import config

        export_format = _format_of(target) if target is not None else default or str(config.get("export-format"))
    chosen = _find(export_format)
    if target is None:
        return chosen.function(table, None, **options)
    if not chosen.suffixes:
        writable = [name for name in formats() if _find(name).suffixes]
        raise ConfigurationError(
            f"export_format={export_format!r} is an object, not a file; to write {str(target)!r} choose "
            + ", ".join(writable)
        )
    chosen.function(table, target, **options)
    return target
