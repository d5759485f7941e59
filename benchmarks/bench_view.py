"""Opening a store, loading its table, and making the table anew."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from benchmarks.workloads import ONE_PASS, SPECTRAL, matrices
from diffract_dask import Session

FIELDS = tuple(dict.fromkeys([*SPECTRAL, *ONE_PASS]))


class View:
    """Models of 50 names with every scalar field of two families."""

    params = ([10, 100],)
    tiny = ([2],)
    param_names = ("models",)

    def setup(self, models: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.path = str(self.folder / "store.zarr")
        session = Session(self.path)
        for i in range(models):
            session.models.add(matrices(50, 8, 6, seed=i), f"model-{i}", step=i)
        session.compute.apply(*FIELDS)

    def teardown(self, models: int) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def time_open_and_load(self, models: int) -> None:
        Session(self.path).results.dataset(*FIELDS).load()

    def time_plain_xarray(self, models: int) -> None:
        import xarray as xr

        xr.open_zarr(self.path, group="view")[list(FIELDS)].load()

    def time_rebuild(self, models: int) -> None:
        shutil.rmtree(Path(self.path) / "view")
        Session(self.path).store.refresh_view()
