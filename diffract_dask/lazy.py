"""A plan as a lazy xarray Dataset: nothing is computed until the user asks, and then only what is selected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import dask.array as da
import numpy as np
import xarray as xr
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from numpy.typing import NDArray

from diffract_dask import graph
from diffract_dask.kernel import Kernel
from diffract_dask.modellevel import evaluate
from diffract_dask.plan import Plan, field_attrs
from diffract_dask.view import public_attrs

if TYPE_CHECKING:
    from diffract_dask.store import Store

__all__ = ["lazy_dataset"]

Place = tuple[NDArray[np.intp], NDArray[np.intp]]
Lazy = tuple[tuple[str, ...], str, tuple[tuple[int, ...], ...]]
"""Dimensions, layer and chunks of one lazy variable."""


def lazy_dataset(plan: Plan, store: Store) -> xr.Dataset:
    """Return the requested fields as lazy arrays over (model_id, name).

    Stored values are read, missing ones computed, in one graph with a layer per kernel; a `scatter` task per
    model puts them in place. Nothing is stored.
    """
    view, cells = plan.view, plan.cells
    token = uuid4().hex[:8]
    keep = {name: tuple(step.kernel.outputs) for name, step in plan.steps.items()}
    fields = _needed_fields(plan)
    keep = {name: tuple(f for f in outputs if f in fields) for name, outputs in keep.items()}
    layers: dict[str, dict[Any, Any]] = {}
    places: dict[int, dict[tuple[str, int], Place]] = {}
    order = np.argsort(cells.of, kind="stable")
    edges = np.searchsorted(cells.of[order], np.arange(cells.n_classes + 1))
    for block in graph.blocks(plan, store, token=token, keep=keep):
        for key, task in block.tasks.items():
            layers.setdefault(key[0], {})[key] = task
        for i, label in enumerate(block.classes):
            for cell in order[edges[label] : edges[label + 1]]:
                table = places.setdefault(int(cells.model[cell]), {})
                at, index = table.setdefault(block.key, (np.empty(0, np.intp), np.empty(0, np.intp)))
                table[block.key] = (np.append(at, cells.name[cell]), np.append(index, i))
    models = np.flatnonzero(np.isin(np.arange(len(view.model_ids)), cells.model[plan.scope]))
    widths = {name: _width(plan, name) for name in fields}
    scatter = f"scatter-{token}"
    layers[scatter] = {}
    for row, model in enumerate(models):
        here = places.get(int(model), {})
        held = {name: _held(plan, store, name, int(model)) for name in fields}
        key = (scatter, row)
        layers[scatter][key] = Task(
            key,
            _scatter,
            len(view.names),
            widths,
            held,
            plan.scope[cells.lookup[model]] & (cells.lookup[model] >= 0),
            tuple(here.values()),
            *(TaskRef(block) for block in here),
        )
    arrays = _slice_arrays(plan, layers, scatter, widths, len(models))
    arrays |= _model_arrays(plan, layers, scatter, models)
    dependencies = _dependencies(layers)
    whole = HighLevelGraph({name: MaterializedLayer(layer) for name, layer in layers.items()}, dependencies)
    variables = {}
    for name, (dims, layer, chunks) in arrays.items():
        kernel = plan.registry.producer(name)
        params = (plan.steps.get(kernel.name) or plan.model_steps[kernel.name]).params
        array = da.Array(whole, layer, chunks, np.float64)  # type: ignore[no-untyped-call]
        variables[name] = (dims, array, public_attrs(field_attrs(kernel, name, params)))
    coords = {
        "model_id": np.array([view.model_ids[i] for i in models], object),
        "name": np.array(view.names, object),
        "step": ("model_id", view.step[models]),
    }
    used = np.zeros(len(view.names), bool)
    used[cells.name[plan.scope]] = True
    dataset = xr.Dataset(variables, coords)
    return dataset if used.all() else dataset.isel(name=np.flatnonzero(used))


def _needed_fields(plan: Plan) -> list[str]:
    """Return the slice-level fields to scatter: those requested, and inputs of requested model-level kernels."""
    fields = [name for name in plan.fields if plan.registry.producer(name).level == "slice"]
    for step in plan.model_steps.values():
        inputs = [name for name in step.kernel.inputs if name in plan.registry.fields]
        fields += [name for name in inputs if plan.registry.producer(name).level == "slice"]
    return list(dict.fromkeys(fields))


def _width(plan: Plan, name: str) -> tuple[int, ...]:
    """Return the padded inner shape of a field over all cells in scope."""
    dims = plan.registry.field(name).dims
    labels = np.unique(plan.cells.of[plan.scope])
    rows, cols = plan.cells.rows[labels], plan.cells.cols[labels]
    size = {"sval": np.minimum(rows, cols), "row": rows, "col": cols}
    return tuple(int(size[dim].max(initial=0)) for dim in dims)


def _held(plan: Plan, store: Store, name: str, model: int) -> tuple[NDArray[np.intp], Any]:
    """Return what the store holds of a field for one model: positions and values (array fields: how to read them)."""
    step = plan.steps[plan.registry.producer(name).name]
    cells = plan.cells.of_model(model, step.source[plan.cells.of] >= 0)
    at = plan.cells.name[cells]
    source = step.source[plan.cells.of[cells]]
    if not len(cells):
        return at, ()
    if plan.registry.field(name).dims:
        models, names = plan.cells.model[source], plan.cells.name[source]
        rows = plan.view.row[models, names]
        return at, _Stored(store, name, [plan.view.model_ids[i] for i in models], rows)
    return at, plan.view.values[name][plan.cells.model[source], plan.cells.name[source]]


class _Stored:
    """Array values to be read from the store inside a task."""

    def __init__(self, store: Store, name: str, models: list[str], rows: NDArray[Any]) -> None:
        self.store, self.name, self.models, self.rows = store, name, models, rows

    def read(self) -> list[NDArray[Any]]:
        """Return one array per position."""
        return [self.store.arrays(model, self.name, self.rows[i : i + 1])[0] for i, model in enumerate(self.models)]


def _scatter(
    n: int,
    widths: Mapping[str, tuple[int, ...]],
    held: Mapping[str, tuple[NDArray[np.intp], Any]],
    scope: NDArray[np.bool_],
    places: tuple[Place, ...],
    *bundles: graph.Bundle,
) -> dict[str, NDArray[np.float64]]:
    """Return the fields of one model as rows of shape (1, n, …), NaN where there is nothing."""
    rows: dict[str, NDArray[np.float64]] = {}
    for name, inner in widths.items():
        row = np.full((n, *inner), np.nan)
        at, stored = held[name]
        values = stored.read() if isinstance(stored, _Stored) else stored
        for position, value in zip(at, values, strict=True):
            _place(row, position, value)
        for (to, index), bundle in zip(places, bundles, strict=True):
            if name in bundle.values:
                for position, i in zip(to, index, strict=True):
                    _place(row, position, bundle.values[name][i])
        row[~scope] = np.nan
        rows[name] = row[np.newaxis]
    return rows


def _place(row: NDArray[np.float64], position: int, value: Any) -> None:
    value = np.asarray(value)
    place: tuple[Any, ...] = (position, *(slice(0, size) for size in value.shape))
    row[place] = value


def _slice_arrays(
    plan: Plan, layers: dict[str, dict[Any, Any]], scatter: str, widths: Mapping[str, tuple[int, ...]], m: int
) -> dict[str, Lazy]:
    arrays: dict[str, Lazy] = {}
    n = len(plan.view.names)
    for name in plan.fields:
        declared = plan.registry.field(name)
        if plan.registry.producer(name).level != "slice":
            continue
        layer = f"{name}-{scatter}"
        layers[layer] = {}
        for row in range(m):
            key = (layer, row, 0, *(0 for _ in declared.dims))
            layers[layer][key] = Task(key, _pick, name, TaskRef((scatter, row)))
        chunks = ((1,) * m, (n,), *((size,) for size in widths[name]))
        arrays[name] = (("model_id", "name", *declared.dims), layer, chunks)
    return arrays


def _pick(name: str, rows: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    return rows[name]


def _model_arrays(
    plan: Plan, layers: dict[str, dict[Any, Any]], scatter: str, models: NDArray[np.intp]
) -> dict[str, Lazy]:
    arrays: dict[str, Lazy] = {}
    cells = plan.cells
    where: dict[str, str] = {}
    for step in plan.model_steps.values():
        layer = f"{step.kernel.name}-{scatter}"
        layers[layer] = {}
        for row, model in enumerate(models):
            names = cells.name[cells.of_model(int(model), cells.canonical & (plan.whole_models | plan.scope))]
            refs = [
                TaskRef((where[name], row)) if name in where else TaskRef((scatter, row)) for name in step.kernel.inputs
            ]
            key = (layer, row)
            layers[layer][key] = Task(key, _evaluate_row, step.kernel, dict(step.params), names, *refs)
        for output in step.kernel.outputs:
            where[output] = layer
            if output in plan.fields:
                picked = f"{output}-pick-{scatter}"
                layers[picked] = {
                    (picked, row): Task((picked, row), _pick, output, TaskRef((layer, row)))
                    for row in range(len(models))
                }
                arrays[output] = (("model_id",), picked, ((1,) * len(models),))
    return arrays


def _evaluate_row(
    kernel: Kernel, params: dict[str, Any], names: NDArray[np.intp], *sources: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Return the outputs of a model-level kernel for one model, each of shape (1,)."""
    inputs: list[Any] = []
    for name, source in zip(kernel.inputs, sources, strict=True):
        values = source[name]
        inputs.append(float(values[0]) if values.ndim == 1 else values[0, names])
    return {name: np.array([result[0]]) for name, result in evaluate(kernel, params, inputs).items()}


def _dependencies(layers: Mapping[str, Mapping[Any, Any]]) -> dict[str, set[str]]:
    """Return which layers each layer's tasks take their inputs from."""
    return {
        name: {key[0] for task in layer.values() for key in task.dependencies} - {name}
        for name, layer in layers.items()
    }
