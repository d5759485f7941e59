"""Model-level kernels, evaluated on the client from the values of a model's slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.fields import Status
from diffract_dask.graph import outputs_of, real_numbers
from diffract_dask.kernel import Kernel, Keys, own_params
from diffract_dask.plan import ModelStep, Plan, model_keys

__all__ = ["Result", "evaluate", "evaluate_models", "keys_of"]

Result = tuple[float, int, str]
"""Value, status and reason of a failure."""


def evaluate_models(plan: Plan) -> dict[str, dict[int, Result]]:
    """Return the results of the model-level kernels that `plan` would run, by field and position of the model.

    The values are over all analysed slices of a model, tied ones once; under a parameter filter over those in
    scope. A model is left out if not all of these hold the values that the plan expects: it was added, replaced or
    erased in part since they were computed, and a value made of what is there would have the key of another.
    """
    cells, view = plan.cells, plan.view
    results: dict[str, dict[int, Result]] = {}
    for step in plan.model_steps.values():
        for model in map(int, np.flatnonzero(step.run)):
            if not _has_inputs(plan, step, model, results):
                continue
            names = cells.name[plan.members_of(model)]
            inputs: list[Any] = []
            for name in step.kernel.inputs:
                if model in results.get(name, {}):
                    inputs.append(results[name][model][0])
                elif plan.registry.producer(name).level == "model":
                    inputs.append(float(view.model_values[name][model]))
                else:
                    inputs.append(view.values[name][model, names])
            for name, result in evaluate(step.kernel, step.params, inputs).items():
                results.setdefault(name, {})[model] = result
    return results


def _has_inputs(plan: Plan, step: ModelStep, model: int, results: Mapping[str, Mapping[int, Result]]) -> bool:
    """Return whether all inputs of a model-level kernel are stored and fresh, or were just made."""
    mine = plan.cells.of_model(model, plan.members)
    for name in step.kernel.inputs:
        producer = plan.registry.producer(name)
        if producer.level == "model":
            if plan.model_steps[producer.name].run[model] and model not in results.get(name, {}):
                return False
        elif not plan.steps[producer.name].fresh[mine].all():
            return False
    return True


def keys_of(plan: Plan, results: Mapping[str, Mapping[int, Result]]) -> dict[str, Keys]:
    """Return the keys of all model-level kernels, now that it is known which of them failed."""
    keys: dict[str, Keys] = {}
    failed: dict[str, NDArray[np.bool_]] = {}
    unforeseen = any(status == Status.FAILED for found in results.values() for _, status, _ in found.values())
    for name, step in plan.model_steps.items():
        keys[name] = model_keys(plan, step.kernel, keys, failed) if unforeseen else step.expected
        failed[name] = step.failed.copy()
        for output in step.kernel.outputs:
            for model, (_, status, _) in results.get(output, {}).items():
                failed[name][model] = status == Status.FAILED
    return keys


def evaluate(kernel: Kernel, params: Mapping[str, Any], inputs: list[Any]) -> dict[str, Result]:
    """Return the result of each output for one model's inputs."""
    names = tuple(kernel.outputs)
    try:
        with np.errstate(all="ignore"):
            made = kernel.function(*inputs, **own_params(params))
        values = [_number(name, value) for name, value in zip(names, outputs_of(names, made), strict=True)]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's kernel may raise anything; the other fields must still come
        return {name: (np.nan, int(Status.FAILED), f"{type(error).__name__}: {error}") for name in names}
    return {
        name: (value, int(Status.UNDEFINED if np.isnan(value) else Status.OK), "")
        for name, value in zip(names, values, strict=True)
    }


def _number(name: str, value: Any) -> float:
    array = real_numbers(name, value)
    if array.ndim:
        raise ValueError(f"returned {name} of shape {array.shape}, expected one number")
    return float(array)
