"""Model-level kernels, evaluated on the client from the values of a model's slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from diffract_dask.fields import Status
from diffract_dask.kernel import GIVEN, SHAPE, Kernel
from diffract_dask.plan import Plan

if TYPE_CHECKING:
    from diffract_dask.store import Store

__all__ = ["evaluate", "evaluate_models"]

Result = tuple[float, int, str]


def evaluate_models(plan: Plan, store: Store) -> dict[str, dict[int, Result]]:
    """Return (value, status, reason of a failure) by field and position of the model.

    The values are over all analysed slices of a model, tied ones once; under a parameter filter over those in
    scope.
    """
    cells, view = plan.cells, plan.view
    chosen = cells.canonical if plan.whole_models else cells.canonical & plan.scope
    results: dict[str, dict[int, Result]] = {}
    for step in plan.model_steps.values():
        for model in np.flatnonzero(step.run):
            mine = cells.of_model(int(model), chosen)
            inputs: list[Any] = []
            for name in step.kernel.inputs:
                if int(model) in results.get(name, {}):
                    inputs.append(results[name][int(model)][0])
                elif name == SHAPE:
                    inputs.append(np.stack([cells.rows, cells.cols], axis=-1)[cells.of[mine]])
                elif name not in GIVEN and plan.registry.producer(name).level == "model":
                    inputs.append(float(view.model_values[name][model]))
                elif plan.registry.field(name).dims:
                    rows = view.row[model, cells.name[mine]]
                    inputs.append(store.arrays(view.model_ids[model], name, rows))
                else:
                    inputs.append(view.values[name][model, cells.name[mine]])
            for name, result in evaluate(step.kernel, step.params, inputs).items():
                results.setdefault(name, {})[int(model)] = result
    return results


def evaluate(kernel: Kernel, params: dict[str, Any], inputs: list[Any]) -> dict[str, Result]:
    """Return (value, status, reason of a failure) of each output for one model's inputs."""
    try:
        with np.errstate(all="ignore"):
            made = kernel.function(*inputs, **params)
        values = [float(x) for x in (made if isinstance(made, tuple) else (made,))]
        if len(values) != len(kernel.outputs):
            raise ValueError(f"returned {len(values)} values, declared are {len(kernel.outputs)}")
    except Exception as error:  # a user's kernel may raise anything; the other fields must still come
        return {name: (np.nan, int(Status.FAILED), f"{type(error).__name__}: {error}") for name in kernel.outputs}
    return {
        name: (value, int(Status.UNDEFINED if np.isnan(value) else Status.OK), "")
        for name, value in zip(kernel.outputs, values, strict=True)
    }
