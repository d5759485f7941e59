"""Adding a model: written where nobody sees it, then published in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffract_dask import catalog
from diffract_dask.catalog import Checkpoint, Parameters
from diffract_dask.fields import MISSING
from diffract_dask.store.lock import new_staging
from diffract_dask.store.objects import Objects
from diffract_dask.store.tables import Header, content_of, parameter_objects, read_parameters, text_column
from diffract_dask.store.values import (
    Commit,
    commit_stages,
    read_arrays,
    read_failures,
    read_packed,
    scalar_objects,
    write_stages,
)
from diffract_dask.store.weights import check_linkable, copy_weights

__all__ = ["Added", "carry_over", "write_model"]


@dataclass(frozen=True, eq=False)
class Added:
    """What :meth:`Store.add_model` did.

    Attributes
    ----------
    model_id : str
    parameters : Parameters
    same_as : list of str
        Models that have the same content, as far as it is known.
    """

    model_id: str
    parameters: Parameters
    same_as: list[str]


def write_model(
    objects: Objects,
    prefix: str,
    model_id: str,
    checkpoint: Checkpoint,
    overrides: Mapping[str, Mapping[str, Any]] | None,
    *,
    link: bool,
) -> tuple[Parameters, str]:
    """Write all of a model but its group's metadata below `prefix`; return its table and content hash."""
    parameters = catalog.describe(checkpoint, model_id, overrides)
    fresh = objects.root is not None
    if link:
        check_linkable(checkpoint)
    else:
        n = len(parameters)
        parameters.path, parameters.header = text_column([""] * n, n), text_column([""] * n, n)
        parameters.offset, parameters.size, parameters.mtime_ns = (np.full(n, -1) for _ in range(3))
        copy_weights(objects, prefix, checkpoint, parameters, fresh=fresh)
    made = {**parameter_objects(parameters), **scalar_objects(parameters.name)}
    objects.set_many({f"{prefix}/{key}": data for key, data in made.items()}, fresh=fresh)
    return parameters, content_of(parameters, link=link)


def carry_over(objects: Objects, old: Header, prefix: str, new: Header, parameters: Parameters) -> None:
    """Copy the results of a model that is being replaced, where the weights are the same, into the new one."""
    before = read_parameters(objects, old.prefix, old.model_id)
    source, target = _matches(before, parameters)
    if not len(source):
        return
    packed = read_packed(objects, old.prefix, len(before))
    commit = Commit(new.model_id, attrs=dict(packed.attrs))
    for name, value, status in zip(packed.fields, packed.value, packed.status, strict=True):
        held = status[source] != MISSING
        if held.any():
            commit.values[name] = (target[held], value[source[held]], status[source[held]])
            dims = packed.attrs.get(name, {}).get("dims")
            if dims:
                arrays = read_arrays(objects, old.prefix, before, name, dims, source[held])
                commit.arrays[name] = (target[held], list(arrays))
    for kernel, keys in zip(packed.kernels, packed.key, strict=True):
        held = keys[source] != 0
        if held.any():
            commit.keys[kernel] = (target[held], keys[source[held]])
    if _analysed(before) == _analysed(parameters):
        pairs = zip(packed.fields, packed.model_value, packed.model_status, strict=True)
        commit.model_values = {name: (float(v), int(s)) for name, v, s in pairs if s != MISSING}
        commit.model_keys = {k: int(key) for k, key in zip(packed.kernels, packed.model_key, strict=True) if key}
    names = dict(zip(before.name[source], parameters.name[target], strict=True))
    failures = read_failures(objects, old.prefix)
    commit.failures = {(names[name], kernel): why for (name, kernel), why in failures.items() if name in names}
    stages, _ = commit_stages(objects, new, len(parameters), lambda: parameters, commit, prefix)
    write_stages(objects, stages[1:-1], new_staging)


def _matches(before: Parameters, after: Parameters) -> tuple[Any, Any]:
    """Return positions (old, new) of analysed parameters of equal content, of the same name if there is one."""
    by_digest: dict[str, int] = {}
    for i in np.flatnonzero(before.analysed & (before.digest != "")):
        by_digest.setdefault(before.digest[i], int(i))
    by_name = {name: i for i, name in enumerate(before.name)}
    pairs = []
    for i in np.flatnonzero(after.analysed & (after.digest != "")):
        own = by_name.get(after.name[i], -1)
        same = own >= 0 and before.digest[own] == after.digest[i] and before.analysed[own]
        found = own if same else by_digest.get(after.digest[i], -1)
        if found >= 0:
            pairs.append((found, int(i)))
    table = np.array(pairs, np.intp).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _analysed(parameters: Parameters) -> dict[str, str]:
    """Return the digests of what is analysed; a name that has none is equal to nothing."""
    chosen = np.flatnonzero(parameters.analysed)
    return {parameters.name[i]: parameters.digest[i] or f"{id(parameters)}" for i in chosen}
