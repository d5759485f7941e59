"""Artifacts: differences and previews of arrays, against plain NumPy on the whole arrays."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np

from diffract_dask.runs.artifact_diffs import diff_artifacts
from diffract_dask.runs.previews import preview


class Arrays:
    """Two float32 matrices in .npy files; the largest have 256 MB each."""

    params = ([2048, 8192],)
    tiny = ([16],)
    param_names = ("side",)

    def setup(self, side: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        rng = np.random.default_rng(0)
        for name in ("a", "b"):
            np.save(self.folder / f"{name}.npy", rng.standard_normal((side, side), dtype=np.float32))
        self.paths = self.folder / "a.npy", self.folder / "b.npy"

    def teardown(self, side: int) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def time_diff(self, side: int) -> None:
        diff_artifacts(*self.paths)

    def peakmem_diff(self, side: int) -> None:
        diff_artifacts(*self.paths)

    def time_preview(self, side: int) -> None:
        preview(self.paths[0])

    def time_plain_difference(self, side: int) -> None:
        a, b = (np.load(path) for path in self.paths)
        np.abs(b - a).max()
