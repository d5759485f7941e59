"""``xr.open_dataset(store, engine="diffract_dask")``: the results of a store as a Dataset; weights on request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from dask.delayed import delayed
from numpy.typing import NDArray
from xarray.backends import BackendEntrypoint

from diffract_dask.errors import FieldNotFoundError, ModelNotFoundError, did_you_mean
from diffract_dask.fields import MISSING
from diffract_dask.store import Store
from diffract_dask.view import View

__all__ = ["DiffractBackendEntrypoint"]


class DiffractBackendEntrypoint(BackendEntrypoint):
    """Opens a store (a directory, a URL or a :class:`Store`) as one Dataset over (model_id, name)."""

    description = "Open a diffract_dask store: results by model and parameter, weights on request"
    open_dataset_parameters = ("filename_or_obj", "drop_variables", "fields", "models", "weights")

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        fields: Sequence[str] | None = None,
        models: Sequence[str] | None = None,
        weights: bool = False,
    ) -> xr.Dataset:
        """Return the results of a store.

        Parameters
        ----------
        filename_or_obj : str, path or Store
        drop_variables : str or iterable of str, optional
        fields : sequence of str, optional
            Scalar and array fields; default: all scalar ones. Array fields are lazy, padded with NaN at the end, and
            have their length in ``<field>_size``.
        models : sequence of str, optional
            Default: all, by (step, added).
        weights : bool
            Add the weights of what is analysed, lazily: one variable ``weights_<rows>x<cols>`` for each shape, over
            the names that have it anywhere; NaN where a model has no such parameter.

        Raises
        ------
        FieldNotFoundError, ModelNotFoundError, StoreError
        """
        store = filename_or_obj if isinstance(filename_or_obj, Store) else Store.open(filename_or_obj, mode="r")
        view = store.view()
        chosen = view.order if models is None else _positions(view, models)
        columns = np.flatnonzero(view.present[chosen].any(axis=0))
        scalar = [*view.values, *view.model_values]
        arrays = [name for name in view.status if name not in view.values]
        wanted = scalar if fields is None else list(dict.fromkeys(fields))
        for name in wanted:
            if name not in scalar and name not in arrays:
                known = [*scalar, *arrays]
                raise FieldNotFoundError(f"the store does not hold the field {name!r}.{did_you_mean(name, known)}")
        dataset = view.to_dataset([f for f in wanted if f in scalar], models=chosen, columns=columns)
        for name in wanted:
            if name in arrays:
                dataset = dataset.assign(_array_field(store, view, name, chosen, columns))
        if weights:
            dataset = dataset.assign(_weights(store, view, chosen))
        dropped = [drop_variables] if isinstance(drop_variables, str) else list(drop_variables or ())
        return dataset.drop_vars(dropped, errors="ignore")

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Return whether a local directory is a store."""
        if not isinstance(filename_or_obj, str | os.PathLike):
            return isinstance(filename_or_obj, Store)
        return os.path.isfile(os.path.join(filename_or_obj, "generation", "zarr.json"))


def _positions(view: View, models: Sequence[str]) -> NDArray[np.intp]:
    place = {model_id: i for i, model_id in enumerate(view.model_ids)}
    for model_id in models:
        if model_id not in place:
            raise ModelNotFoundError(f"no model {model_id!r} in the store.{did_you_mean(model_id, place)}")
    return np.array([place[model_id] for model_id in models], np.intp)


def _array_field(
    store: Store, view: View, name: str, models: NDArray[np.intp], columns: NDArray[np.intp]
) -> dict[str, Any]:
    """Return an array field, one task per model, and the length of its entries."""
    at = np.ix_(models, columns)
    have = view.status[name][at] != MISSING
    rows, cols = view.rows[at], view.cols[at]
    dims = view.dims[name]
    size = {"sval": np.minimum(rows, cols), "row": rows, "col": cols}
    inner = tuple(int(size[dim][have].max(initial=0)) for dim in dims)
    shape = (1, len(columns), *inner)
    blocks = []
    for i, model in enumerate(models):
        place = (view.row[model, columns], np.flatnonzero(have[i]), inner)
        blocks.append(_lazy(_read_arrays, (store, view.model_ids[model], name, *place), shape, np.dtype(float)))
    found: dict[str, Any] = {name: (("model_id", "name", *dims), _joined(blocks, 0), view.attrs[name])}
    if len(dims) == 1:
        labels = {"long_name": f"Number of values of {name}", "units": "1"}
        found[f"{name}_size"] = (("model_id", "name"), np.where(have, size[dims[0]], 0), labels)
    return found


def _lazy(read: Callable[..., Any], args: tuple[Any, ...], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return a Dask array of one chunk."""
    return da.from_delayed(delayed(read, pure=False)(*args), shape, dtype)  # type: ignore[no-untyped-call]


def _joined(blocks: list[Any], axis: int) -> Any:
    return da.concatenate(blocks, axis)  # type: ignore[no-untyped-call]


def _read_arrays(
    store: Store, model_id: str, name: str, rows: NDArray[Any], at: NDArray[np.intp], inner: tuple[int, ...]
) -> NDArray[np.float64]:
    out = np.full((1, len(rows), *inner), np.nan)
    for i, array in zip(at, store.arrays(model_id, name, rows[at]), strict=True):
        out[(0, i, *(slice(0, n) for n in array.shape))] = array
    return out


def _weights(store: Store, view: View, models: NDArray[np.intp]) -> dict[str, Any]:
    """Return the weights, one variable for each shape, one task for each slice."""
    found: dict[str, Any] = {}
    use = view.analysed & view.present
    there = use[models]
    shapes = sorted(set(zip(view.rows[models][there].tolist(), view.cols[models][there].tolist(), strict=True)))
    for rows, cols in shapes:
        mine = use & (view.rows == rows) & (view.cols == cols)
        columns = np.flatnonzero(mine[models].any(axis=0))
        label = f"{rows}x{cols}"
        cells = [(m, c) for m in models.tolist() for c in columns.tolist()]
        stored = {store.parameters(view.model_ids[m]).dtype[view.row[m, c]] for m, c in cells if mine[m, c]}
        dtype = np.result_type(*(store.slice_dtype(name) for name in stored))
        lines = []
        for m in models.tolist():
            places = [(view.model_ids[m], int(view.row[m, c]) if mine[m, c] else -1) for c in columns.tolist()]
            blocks = [
                _lazy(_read_slice, (store, *place, (rows, cols), dtype), (1, 1, rows, cols), dtype) for place in places
            ]
            lines.append(_joined(blocks, 1))
        dims = ("model_id", f"name_{label}", f"row_{rows}", f"col_{cols}")
        attrs = {"long_name": f"Weights of {rows} × {cols}", "units": "1"}
        found[f"weights_{label}"] = (dims, _joined(lines, 0), attrs)
        names = np.empty(len(columns), object)
        names[:] = [view.names[c] for c in columns]
        found[f"name_{label}"] = ((f"name_{label}",), names)
    return found


def _read_slice(store: Store, model_id: str, row: int, shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return one slice with two leading axes, NaN for a parameter (-1) that the model has not."""
    if row < 0:
        return np.full((1, 1, *shape), np.nan, dtype)
    return store.slices(model_id, [row]).load()[np.newaxis].astype(dtype, copy=False)
