"""Stores of every kind with small models in them, for the tests of the store."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from diffract_dask import catalog
from diffract_dask.sources import open_checkpoint
from diffract_dask.store import Commit, Store

KINDS: dict[str, Callable[[Path], Any]] = {
    "directory": lambda tmp: tmp / "s.zarr",
    "memory": lambda tmp: None,
    "zarr memory": lambda tmp: zarr.storage.MemoryStore(),
    "url": lambda tmp: f"memory://{uuid.uuid4().hex}/s.zarr",
    "object store": lambda tmp: zarr.storage.FsspecStore.from_url(
        f"local://{tmp}/s.zarr", storage_options={"auto_mkdir": True}
    ),
}


def arrays(seed: int = 0, n: int = 3, shape: tuple[int, ...] = (6, 4)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {f"h.{i}.weight": rng.standard_normal(shape).astype(np.float32) for i in range(n)}
    return {**made, "ln.bias": rng.standard_normal(5).astype(np.float32)}


def add(store: Store, model_id: str = "m", tensors: Any = None, **options: Any) -> catalog.Parameters:
    return store.add_model(model_id, open_checkpoint(arrays() if tensors is None else tensors), **options).parameters


def scalar(store: Store, model_id: str, field: str = "f", value: float = 1.0, key: int = 7) -> Commit:
    """A commit of one field for all analysed parameters, made by the kernel of the same name."""
    at = np.flatnonzero(store.parameters(model_id).analysed)
    return Commit(
        model_id,
        values={field: (at, value + np.arange(len(at)), np.zeros(len(at), np.uint8))},
        keys={field: (at, np.full(len(at), key, np.uint64))},
        attrs={field: {"long_name": field.upper(), "units": "1", "kernel": field}},
    )


def cells(store: Store, model_id: str, field: str = "f") -> tuple[list[float], list[int], list[int]]:
    """Values, statuses and keys of a field in the view, in the order of the model's parameters."""
    view = store.view()
    model = view.model_ids.index(model_id)
    at = np.argsort(np.where(view.row[model] < 0, 10**6, view.row[model]))[: int(view.present[model].sum())]
    if field not in view.values:
        return [], [], []
    key = view.keys[field][model, at] if field in view.keys else np.zeros(len(at), np.uint64)
    return view.values[field][model, at].tolist(), view.status[field][model, at].tolist(), key.tolist()
