"""Traces of a forward pass (TorchLens and the like), by their shape: they tell which parameters are used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from diffract_dask.catalog import Checkpoint
from diffract_dask.sources.arrays import array_tensor

__all__ = ["is_trace", "open_trace"]


def _records(model: Any) -> list[Any]:
    params = getattr(model, "params", None)
    if isinstance(params, str) or not isinstance(params, Iterable) or iter(params) is params:
        return []
    return list(params.values() if isinstance(params, Mapping) else params)


def is_trace(model: Any) -> bool:
    """Return whether ``model.params`` are records with ``address`` and ``used_by_ops``."""
    records = _records(model)
    return bool(records) and all(hasattr(r, "address") and hasattr(r, "used_by_ops") for r in records)


def open_trace(model: Any) -> Checkpoint:
    """Open a trace: an object whose `params` have ``address``, ``value`` and ``used_by_ops``.

    ``all_addresses`` (more names of a shared parameter) and ``module_address`` are taken if they are there.
    """
    tensors = []
    for record in _records(model):
        module = getattr(record, "module_address", "") or ""
        for name in dict.fromkeys([record.address, *(getattr(record, "all_addresses", None) or ())]):
            tensor = array_tensor(name, getattr(record, "value", None))
            own = module if name == record.address else ""
            tensors.append(replace(tensor, module=own, used=bool(record.used_by_ops)))
    return Checkpoint(tensors, f"{type(model).__module__}.{type(model).__qualname__}", "torch")
