"""Adding models: by copy, by link, and many small ones."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from benchmarks.workloads import matrices, write_safetensors
from diffract_dask import Session


class AddFile:
    """One safetensors file."""

    params = ([(20000, 1024), (2000, 512)],)
    tiny = ([(20, 6)],)
    param_names = ("shape",)
    number = 1  # an id can be added once

    def setup(self, shape: tuple[int, int]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.file = self.folder / "model.safetensors"
        write_safetensors(self.file, *shape)
        self.session = Session(str(self.folder / "store.zarr"))

    def teardown(self, shape: tuple[int, int]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def time_copy(self, shape: tuple[int, int]) -> None:
        self.session.models.add(str(self.file), "copied")

    def time_link(self, shape: tuple[int, int]) -> None:
        self.session.models.add(str(self.file), "linked", link=True)

    def peakmem_copy(self, shape: tuple[int, int]) -> None:
        self.session.models.add(str(self.file), "copied")


class AddSmall:
    """One more model of 100 names, to a store that has some."""

    params = ([10, 200],)
    tiny = ([2],)
    param_names = ("models",)
    number = 1  # an id can be added once

    def setup(self, models: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.session = Session(str(self.folder / "store.zarr"))
        for i in range(models):
            self.session.models.add(matrices(100, 8, 6, seed=i), f"model-{i}", step=i)
        self.weights = matrices(100, 8, 6, seed=models)

    def teardown(self, models: int) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def time_add(self, models: int) -> None:
        self.session.models.add(self.weights, "one-more", step=models)
