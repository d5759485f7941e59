"""The results as rows: from a labelled Dataset and the parameters in scope to what the export formats write."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from diffract_dask.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    import xarray as xr

    from diffract_dask.fields import Field

__all__ = ["Aggregate", "ParameterRow", "Sources", "Table", "tabulate"]

Sources = Literal["metrics", "aggregates", "all"]
"""Which values to export: those per parameter, those per model or pair of models, or both."""


class ParameterRow(TypedDict):
    """One parameter of one model with the values it has; a field that was never computed is absent from `fields`."""

    uid: str
    name: str
    model_id: str
    parameter_type: str
    metadata: dict[str, Any]
    fields: dict[str, Any]


class Aggregate(TypedDict):
    """One value over several parameters or models, with the models and the parameters it was taken over."""

    field: str
    context_models: tuple[str, ...]
    context_params: tuple[str, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class Table:
    """What there is to export: labelled arrays and the same values row by row.

    Parameters
    ----------
    dataset : xarray.Dataset
        The requested fields with dimensions (model_id, name, …), or (model_id,) for model-level ones.
    parameters : list of ParameterRow
        Every parameter in scope, in the order in which rows are written.
    aggregates : list of Aggregate
        Values of model and pair level.
    fields : tuple of str
        The requested fields, in the order of the request: the order of columns.
    sources : {"metrics", "aggregates", "all"}
        What of it is wanted.
    """

    dataset: xr.Dataset
    parameters: list[ParameterRow]
    aggregates: list[Aggregate]
    fields: tuple[str, ...]
    sources: Sources = "metrics"


def tabulate(
    dataset: xr.Dataset,
    parameters: Iterable[Mapping[str, Any]],
    fields: Sequence[str],
    *,
    declared: Mapping[str, Field] | None = None,
    missing: Mapping[str, NDArray[np.bool_]] | None = None,
    aggregates: Iterable[Aggregate] = (),
    sources: Sources = "metrics",
) -> Table:
    """Return the :class:`Table` of a results Dataset and the metadata of the parameters in scope.

    Parameters
    ----------
    dataset : xarray.Dataset
        Fields with dimensions (model_id, name, …) or (model_id,); array fields padded at the end, with coordinates
        ``rows`` and ``cols`` (or ``<field>_size``) from which their true lengths follow.
    parameters : iterable of mapping
        :class:`ParameterRow` without ``fields``, one for each parameter in scope.
    fields : sequence of str
        Requested fields, in the wanted order of columns.
    declared : mapping of str to Field, optional
        Declarations; a field whose ``dtype`` is ``int64`` or ``bool`` gives Python integers or booleans.
    missing : mapping of str to bool array, optional
        For a field, where its values were never computed (same shape as the outer dimensions); these are left out.
    aggregates : iterable of Aggregate, optional
        Further aggregates (ingested ones, say), after those that the Dataset's model-level fields give.
    sources : {"metrics", "aggregates", "all"}
        What of it is wanted.

    Raises
    ------
    ConfigurationError
        `sources` is none of the three.
    """
    if sources not in ("metrics", "aggregates", "all"):
        raise ConfigurationError(
            f"sources={sources!r}: choose 'metrics' (per parameter), 'aggregates' (per model or pair) or 'all'."
            f"{did_you_mean(str(sources), ('metrics', 'aggregates', 'all'))}"
        )
    declared, missing = declared or {}, missing or {}
    rows: list[ParameterRow] = [
        {
            "uid": str(p["uid"]),
            "name": str(p["name"]),
            "model_id": str(p["model_id"]),
            "parameter_type": str(p["parameter_type"]),
            "metadata": {key: _plain(value) for key, value in p.get("metadata", {}).items()},
            "fields": {},
        }
        for p in parameters
    ]
    places = _places(dataset, rows)
    per_model: list[Aggregate] = []
    for name in dict.fromkeys(fields):
        if name not in dataset.variables:
            continue
        dtype = declared[name].dtype if name in declared else str(dataset[name].attrs.get("value_dtype", "float64"))
        absent = missing.get(name)
        if dataset[name].dims[:2] == ("model_id", "name"):
            for row, place, value in zip(rows, places, _slice_values(dataset, name, places, dtype), strict=True):
                if place is not None and not (absent is not None and absent[place]):
                    row["fields"][name] = value
        elif dataset[name].dims == ("model_id",):
            per_model += _per_model(dataset, name, rows, absent, dtype)
    return Table(dataset, rows, [*per_model, *aggregates], tuple(dict.fromkeys(fields)), sources)


Place = tuple[int, int] | None


def _places(dataset: xr.Dataset, rows: Sequence[ParameterRow]) -> list[Place]:
    """Return where each row lies in the Dataset: (model, name) positions, None if it is not in it."""
    if "name" not in dataset.sizes or "model_id" not in dataset.sizes:
        return [None] * len(rows)
    models = {str(model): i for i, model in enumerate(dataset["model_id"].values)}
    names = {str(name): j for j, name in enumerate(dataset["name"].values)}
    return [
        (models[row["model_id"]], names[row["name"]]) if row["model_id"] in models and row["name"] in names else None
        for row in rows
    ]


def _slice_values(dataset: xr.Dataset, field: str, places: Sequence[Place], dtype: str) -> list[Any]:
    """Return a field's value at each place: a Python number, or an array without its padding."""
    variable = dataset[field]
    values = variable.values
    known = [place for place in places if place is not None]
    at = tuple(np.asarray(known, np.intp).reshape(-1, 2).T)
    if variable.ndim == 2:
        found = iter(_numbers(values[at], dtype))
    else:
        lengths = [_length(dataset, field, str(dim))[at] for dim in variable.dims[2:]]
        found = iter(
            [values[place][tuple(slice(int(length[i])) for length in lengths)].copy() for i, place in enumerate(known)]
        )
    return [None if place is None else next(found) for place in places]


def _length(dataset: xr.Dataset, field: str, dim: str) -> NDArray[np.int64]:
    """Return the true length of an inner dimension for every (model, name)."""
    if f"{field}_size" in dataset.variables and dataset[field].ndim == 3:
        size = dataset[f"{field}_size"].values
    elif dim in ("sval", "row", "col") and "rows" in dataset.variables and "cols" in dataset.variables:
        rows, cols = dataset["rows"].values, dataset["cols"].values
        size = {"row": rows, "col": cols}.get(dim, np.minimum(rows, cols))
    else:
        size = np.full(dataset[field].shape[:2], dataset.sizes[dim])
    return np.nan_to_num(np.asarray(size, np.float64)).astype(np.int64)


def _per_model(
    dataset: xr.Dataset, field: str, rows: Sequence[ParameterRow], absent: NDArray[np.bool_] | None, dtype: str
) -> Iterator[Aggregate]:
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["model_id"], []).append(row["name"])
    values = _numbers(dataset[field].values, dtype)
    for i, model in enumerate(dataset["model_id"].values):
        if str(model) in names and not (absent is not None and absent[i]):
            context = tuple(sorted(names[str(model)]))
            yield {"field": field, "context_models": (str(model),), "context_params": context, "value": values[i]}


def _numbers(values: NDArray[Any], dtype: str) -> list[Any]:
    """Return Python numbers; integers and booleans where the field declares them and the value is finite."""
    numbers: list[Any] = np.asarray(values).tolist()
    kind = {"int64": int, "bool": bool}.get(dtype)
    if kind is None:
        return numbers
    return [kind(x) if isinstance(x, (bool, int)) or math.isfinite(x) else x for x in numbers]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
