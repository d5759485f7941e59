"""The whole way: add, plan, compute and store, on threads."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from benchmarks.workloads import ONE_PASS, SPECTRAL, Weights, matrices, transformer
from diffract_dask import Session

CHECKPOINTS = {
    "many-small": (2000, 16, 16),
    "one-shape": (50, 384, 384),
    "few-tiny": (6, 8, 5),
}


def weights_of(name: str) -> Weights:
    """Return a synthetic checkpoint by name."""
    if name == "transformer":
        return transformer(256, 4, 4000)
    return matrices(*CHECKPOINTS[name])


class Compute:
    """A checkpoint of which nothing is computed, on disk."""

    params = ([*CHECKPOINTS, "transformer"], ["spectral", "one-pass"])
    tiny = (["few-tiny"], ["spectral", "one-pass"])
    param_names = ("checkpoint", "fields")
    number = 1  # each run needs a store in which nothing is computed

    def setup(self, checkpoint: str, fields: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.fields = SPECTRAL if fields == "spectral" else ONE_PASS
        self.session = Session(str(self.folder / "store.zarr"))
        self.session.models.add(weights_of(checkpoint), "model")

    def teardown(self, checkpoint: str, fields: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def time_apply(self, checkpoint: str, fields: str) -> None:
        self.session.compute.apply(*self.fields)

    def peakmem_apply(self, checkpoint: str, fields: str) -> None:
        self.session.compute.apply(*self.fields)

    def time_plan(self, checkpoint: str, fields: str) -> None:
        self.session.compute.plan(*self.fields)

    def time_lazy(self, checkpoint: str, fields: str) -> None:
        self.session.compute.lazy(*self.fields)


class NothingToDo:
    """A store in which everything is computed."""

    params = ([10, 100],)
    tiny = ([2],)
    param_names = ("models",)

    def setup(self, models: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.session = Session(str(self.folder / "store.zarr"))
        for i in range(models):
            self.session.models.add(matrices(20, 8, 6, seed=i), f"model-{i}")
        self.session.compute.apply(*SPECTRAL, *ONE_PASS)

    def teardown(self, models: int) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def time_apply(self, models: int) -> None:
        self.session.compute.apply(*SPECTRAL, *ONE_PASS)
