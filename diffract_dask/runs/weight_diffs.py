"""How two checkpoints, or models of a weight store, differ: parameters, shapes, entries, and the stored metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diffract_dask.errors import ArtifactError, did_you_mean
from diffract_dask.runs.array_diffs import diff_arrays
from diffract_dask.runs.arrays import ArrayRef
from diffract_dask.runs.readers import Content

__all__ = ["diff_metrics", "diff_weights", "is_model"]

_KEPT = ("differing", "unequal_nonfinite", "abs_max", "rms", "rel_max", "rel_norm")


def is_model(content: Content, name: str | None) -> bool:
    """Return whether `name` is a model of a weight store."""
    return name is not None and name in content.models


def diff_weights(a: Content, b: Content, model_a: str | None = None, model_b: str | None = None) -> dict[str, Any]:
    """Return how the weights of two checkpoints or stores differ.

    Parameters
    ----------
    a, b : Content
    model_a, model_b : str, optional
        Of stores: which model. Default: those of equal id, or the only one of each.

    Returns
    -------
    dict
        ``equal``; ``models_only_in_a``, ``models_only_in_b``; ``models``, one entry for each pair: ``model_a``,
        ``model_b``, ``equal``, ``only_in_a``, ``only_in_b``, ``shapes`` (parameters whose shape changed),
        ``parameters`` (each in both: ``rel_norm``, which is ‖B − A‖ / ‖A‖, and more), ``metrics`` (field, parameter,
        a, b, delta, relative: those stored of both that changed).
    """
    ours, theirs = _models(a), _models(b)
    pairs, only_a, only_b = _paired(ours, theirs, model_a, model_b)
    models = [_diff_models(x, y, ours[x], theirs[y], _metrics(a, x), _metrics(b, y)) for x, y in pairs]
    states = [one["equal"] for one in models]
    equal = False if only_a or only_b or False in states else None if None in states else True
    return {"equal": equal, "models_only_in_a": only_a, "models_only_in_b": only_b, "models": models}


def _models(content: Content) -> dict[str, dict[str, ArrayRef]]:
    """Return the parameters by name, by model; a checkpoint is one model without a name."""
    found: dict[str, dict[str, ArrayRef]] = {model: {} for model in content.models} or {"": {}}
    for ref in content.arrays:
        found[ref.attrs.get("model", "")][ref.attrs["parameter"]] = ref
    return found


def _paired(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], model_a: str | None, model_b: str | None
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    chosen_a, chosen_b = (_chosen(one, name) for one, name in ((ours, model_a), (theirs, model_b)))
    if len(chosen_a) == len(chosen_b) == 1:
        return [(chosen_a[0], chosen_b[0])], [], []
    if model_a is not None or model_b is not None or "" in (*chosen_a, *chosen_b):
        many = chosen_a if len(chosen_a) > 1 else chosen_b
        raise ArtifactError(f"one model against {len(many)}: name one of {', '.join(many[:20])} as the dataset")
    pairs = [(model, model) for model in ours if model in theirs]
    return pairs, [m for m in ours if m not in theirs], [m for m in theirs if m not in ours]


def _chosen(models: Mapping[str, Any], name: str | None) -> list[str]:
    if name is None:
        return list(models)
    if name not in models:
        raise ArtifactError(f"there is no model {name!r}.{did_you_mean(name, models)}")
    return [name]


def _metrics(content: Content, model: str) -> dict[str, dict[str, float]]:
    return content.metrics(model) if content.metrics is not None else {}


def _diff_models(
    model_a: str,
    model_b: str,
    ours: Mapping[str, ArrayRef],
    theirs: Mapping[str, ArrayRef],
    metrics_a: Mapping[str, Mapping[str, float]],
    metrics_b: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    only_a, only_b = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
    shapes: list[dict[str, Any]] = []
    parameters: list[dict[str, Any]] = []
    for name, ref in ours.items():
        other = theirs.get(name)
        if other is None:
            continue
        if ref.shape != other.shape:
            shapes.append({"name": name, "a": list(ref.shape), "b": list(other.shape)})
        else:
            parameters.append(_diff_parameter(name, ref, other))
    states = [one["equal"] for one in parameters]
    equal = False if only_a or only_b or shapes or False in states else None if None in states else True
    return {
        "model_a": model_a,
        "model_b": model_b,
        "equal": equal,
        "only_in_a": only_a,
        "only_in_b": only_b,
        "shapes": shapes,
        "parameters": parameters,
        "metrics": diff_metrics(metrics_a, metrics_b),
    }


def _diff_parameter(name: str, a: ArrayRef, b: ArrayRef) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name, "shape": list(a.shape), "dtype_a": a.type_name, "dtype_b": b.type_name}
    if a.attrs.get("digest") and a.attrs["digest"] == b.attrs.get("digest"):
        return told | {"equal": True} | dict.fromkeys(_KEPT, 0)
    found = diff_arrays(a, b, target=0)
    told["equal"] = found["equal"] and a.type_name == b.type_name
    stats = found.get("stats", {})
    told |= {key: stats.get(key) for key in _KEPT}
    if "note" in found:
        told["note"] = found["note"]
        told["equal"] = found["equal"]
    return told


def diff_metrics(a: Mapping[str, Mapping[str, float]], b: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the stored metrics that both have and that differ; NaN against NaN is no difference."""
    rows = []
    for name in a:
        for parameter, before in a[name].items():
            after = b.get(name, {}).get(parameter)
            if after is None or before == after or (math.isnan(before) and math.isnan(after)):
                continue
            delta = after - before
            relative = delta / abs(before) if before else math.copysign(math.inf, delta)
            rows.append(
                {"field": name, "parameter": parameter, "a": before, "b": after, "delta": delta, "relative": relative}
            )
    return rows
