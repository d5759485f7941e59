"""Models, weights and results in Zarr; the only code that knows the store's paths."""

from __future__ import annotations

from diffract_dask.store.adding import Added
from diffract_dask.store.opening import upgrade
from diffract_dask.store.slices import Pieces, Slices
from diffract_dask.store.store import Store
from diffract_dask.store.values import Commit

__all__ = ["Added", "Commit", "Pieces", "Slices", "Store", "upgrade"]
