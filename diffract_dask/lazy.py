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
from diffract_dask.plan import Plan, field_attrs, labels
from diffract_dask.stored import StoredArrays

if TYPE_CHECKING:
    from diffract_dask.store import Store

__all__ = ["lazy_dataset"]

Place = tuple[NDArray[np.intp], NDArray[np.intp]]
Lazy = tuple[tuple[str, ...], str, tuple[tuple[int, ...], ...]]
"""Dimensions, layer and chunks of one lazy variable."""


def lazy_dataset(plan: Plan, store: Store) -> xr.Dataset:
    """Return the requested fields as lazy arrays over (model_id, name).

    Stored values are read, missing ones computed, in one graph with a layer per kernel; one task per field and model
    puts them in place. What is selected runs, and nothing else. Nothing is stored.
    """
    view, cells = plan.view, plan.cells
    tokens = uuid4().hex[:8], f"scatter-{uuid4().hex[:8]}"  # of the kernels' layers, and of those that put in place
    layers: dict[str, dict[Any, Any]] = {}
    places: dict[int, dict[int, Place]] = {}
    kernels: dict[int, tuple[str, ...]] = {}
    order = np.argsort(cells.of, kind="stable")
    edges = np.searchsorted(cells.of[order], np.arange(cells.n_classes + 1))
    for block in graph.blocks(plan, store, token=tokens[0], keep={}):
        number = block.key[1]
        kernels[number] = block.group.kernels
        for key, task in block.tasks.items():
            if key != block.key:
                layers.setdefault(key[0], {})[key] = task
        for i, label in enumerate(block.classes):
            for cell in order[edges[label] : edges[label + 1]]:
                table = places.setdefault(int(cells.model[cell]), {})
                at, index = table.get(number, (np.empty(0, np.intp), np.empty(0, np.intp)))
                table[number] = (np.append(at, cells.name[cell]), np.append(index, i))
    models = view.order[np.isin(view.order, cells.model[plan.scope])]
    arrays: dict[str, Lazy] = {}
    for name in _needed_fields(plan):
        producer = plan.registry.producer(name).name
        dims, widths = plan.registry.field(name).dims, _width(plan, name)
        layer = f"{name}-{tokens[1]}"
        layers[layer] = {}
        for row, model in enumerate(map(int, models)):
            scope = plan.scope[cells.lookup[model]] & (cells.lookup[model] >= 0)
            here = {number: at for number, at in places.get(model, {}).items() if producer in kernels[number]}
            refs = [TaskRef((f"{producer}-{tokens[0]}", number)) for number in here]
            held = _held(plan, store, name, model)
            key = (layer, row, 0, *(0 for _ in dims))
            layers[layer][key] = Task(key, _scatter, name, widths, held, scope, tuple(here.values()), *refs)
        chunks = ((1,) * len(models), (len(view.names),), *((size,) for size in widths))
        if name in plan.fields:
            arrays[name] = (("model_id", "name", *dims), layer, chunks)
    arrays |= _model_arrays(plan, layers, tokens, models)
    return _dataset(plan, layers, {name: arrays[name] for name in plan.fields}, models)


def _dataset(
    plan: Plan, layers: dict[str, dict[Any, Any]], arrays: Mapping[str, Lazy], models: NDArray[np.intp]
) -> xr.Dataset:
    view, cells = plan.view, plan.cells
    whole = HighLevelGraph({name: MaterializedLayer(layer) for name, layer in layers.items()}, _dependencies(layers))
    there = cells.lookup >= 0
    there[there] = plan.scope[cells.lookup[there]]
    used = there.any(axis=0)
    size = {"sval": np.minimum(view.rows, view.cols), "row": view.rows, "col": view.cols}
    variables: dict[str, Any] = {}
    for name, (dims, layer, chunks) in arrays.items():
        kernel = plan.registry.producer(name)
        params = (plan.steps.get(kernel.name) or plan.model_steps[kernel.name]).params
        array = da.empty(tuple(map(sum, chunks)))  # without models: Dask has no chunks of no blocks
        if len(models):
            array = da.Array(whole, layer, chunks, np.float64)  # type: ignore[no-untyped-call]
        variables[name] = (dims, array, labels(field_attrs(kernel, name, params)))
        if len(dims) == 3:
            about = {"long_name": f"Number of values of {name}", "units": "1"}
            variables[f"{name}_size"] = (dims[:2], np.where(there, size[dims[2]], 0)[models], about)
    every = xr.Dataset(variables, {"name": np.array(view.names, object)})
    columns = np.flatnonzero(used)
    chosen = every if used.all() else every.isel(name=columns)
    return chosen.assign_coords(xr.Coordinates(view.coordinates(models, columns)))


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
        stored = StoredArrays(plan, store, name, source)
        return at, stored.read() if store.in_memory else stored  # workers could not reach it there
    return at, plan.view.values[name][plan.cells.model[source], plan.cells.name[source]]


def _scatter(
    name: str,
    widths: tuple[int, ...],
    held: tuple[NDArray[np.intp], Any],
    scope: NDArray[np.bool_],
    places: tuple[Place, ...],
    *bundles: graph.Bundle,
) -> NDArray[np.float64]:
    """Return one field of one model as a row of shape (1, n, …), NaN where there is nothing."""
    row = np.full((len(scope), *widths), np.nan)
    at, stored = held
    values = stored.read() if isinstance(stored, StoredArrays) else stored
    for position, value in zip(at, values, strict=True):
        _place(row, position, value)
    for (to, index), bundle in zip(places, bundles, strict=True):
        if bundle.error is not None:
            raise bundle.error
        for position, i in zip(to, index, strict=True):
            _place(row, position, bundle.values[name][i])
    row[~scope] = np.nan
    return row[np.newaxis]


def _place(row: NDArray[np.float64], position: int, value: Any) -> None:
    value = np.asarray(value)
    place: tuple[Any, ...] = (position, *(slice(0, size) for size in value.shape))
    row[place] = value


def _pick(name: str, rows: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    return rows[name]


def _model_arrays(
    plan: Plan, layers: dict[str, dict[Any, Any]], tokens: tuple[str, str], models: NDArray[np.intp]
) -> dict[str, Lazy]:
    arrays: dict[str, Lazy] = {}
    token, scatter = tokens
    cells = plan.cells
    where: dict[str, str] = {}
    for step in plan.model_steps.values():
        layer = f"{step.kernel.name}-{token}"
        layers[layer] = {}
        for row, model in enumerate(map(int, models)):
            key = (layer, row)
            if not step.run[model]:
                stored = [name for name in step.kernel.outputs if name in plan.view.model_values]
                known = {name: plan.view.model_values[name][model : model + 1] for name in stored}
                layers[layer][key] = Task(key, dict, known)
                continue
            names = cells.name[plan.members_of(model)]
            refs = [
                TaskRef((where[name], row) if name in where else (f"{name}-{scatter}", row, 0))
                for name in step.kernel.inputs
            ]
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
    kernel: Kernel, params: dict[str, Any], names: NDArray[np.intp], *sources: Any
) -> dict[str, NDArray[np.float64]]:
    """Return the outputs of a model-level kernel for one model, each of shape (1,).

    A source is a row of a slice-level field, or the outputs of a model-level kernel.
    """
    inputs = [
        float(source[name][0]) if isinstance(source, Mapping) else source[0, names]
        for name, source in zip(kernel.inputs, sources, strict=True)
    ]
    return {name: np.array([result[0]]) for name, result in evaluate(kernel, params, inputs).items()}


def _dependencies(layers: Mapping[str, Mapping[Any, Any]]) -> dict[str, set[str]]:
    """Return which layers each layer's tasks take their inputs from."""
    return {
        name: {key[0] for task in layer.values() for key in task.dependencies} - {name}
        for name, layer in layers.items()
    }
