"""The one-pass statistics, against one ``np.linalg.norm``."""

from __future__ import annotations

import numpy as np

from diffract_dask.moments import moments


class OnePass:
    """Arrays from what fits in a cache to what does not, and a batch of small ones."""

    params = ([(1, 384, 384), (1, 1536, 384), (1, 30522, 384), (20000, 16, 16)], ["float32", "float64", "float16"])
    tiny = ([(1, 6, 5), (4, 3, 2)], ["float32", "float64", "float16"])
    param_names = ("shape", "dtype")

    def setup(self, shape: tuple[int, int, int], dtype: str) -> None:
        self.weights = np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)

    def time_moments(self, shape: tuple[int, int, int], dtype: str) -> None:
        moments(self.weights)

    def time_plain_norm(self, shape: tuple[int, int, int], dtype: str) -> None:
        np.sqrt((self.weights.astype(np.float32) ** 2).sum((-2, -1)))

    def peakmem_moments(self, shape: tuple[int, int, int], dtype: str) -> None:
        moments(self.weights)
