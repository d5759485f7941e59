"""The null, its spectrum and the laws of noise, against a plain shuffle and the spectrum of the weights themselves."""

from __future__ import annotations

import numpy as np

from diffract_dask import kernels, linalg, randommatrix, shuffle
from diffract_dask.blas import blas_threads

Shape = tuple[int, int, int]


class Null:
    """A batch of slices in memory, with one BLAS thread as in a task."""

    params = ([(60, 64, 64), (25, 384, 384), (1, 4096, 1024), (1, 6000, 4096)], ["float32", "float64"])
    tiny = ([(3, 6, 4), (1, 9, 4)], ["float32", "float64"])
    param_names = ("shape", "dtype")

    def setup(self, shape: Shape, dtype: str) -> None:
        self.weights = np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)

    def time_permuted(self, shape: Shape, dtype: str) -> None:
        shuffle.permuted(self.weights)

    def time_plain_shuffle(self, shape: Shape, dtype: str) -> None:
        rng = np.random.default_rng(42)
        for w in self.weights:
            rng.shuffle(w.reshape(-1).copy())

    def time_singular_values_of_the_null(self, shape: Shape, dtype: str) -> None:
        with blas_threads(1):
            kernels.rand_singular_values(self.weights, 42)

    def time_singular_values(self, shape: Shape, dtype: str) -> None:
        with blas_threads(1):
            linalg.singular_values(self.weights)

    def peakmem_singular_values_of_the_null(self, shape: Shape, dtype: str) -> None:
        kernels.rand_singular_values(self.weights, 42)


class Noise:
    """The fields of noise of many slices at once, from their spectra."""

    params = ([(60, 64), (2000, 384), (4, 4096)],)
    tiny = ([(3, 6)],)
    param_names = ("spectra",)

    def setup(self, spectra: tuple[int, int]) -> None:
        count, k = spectra
        rng = np.random.default_rng(0)
        self.esd, self.null = (np.sort(rng.exponential(size=(count, k))) for _ in range(2))
        self.std, self.ratio = np.ones(count), np.full(count, 2.0)

    def time_noise(self, spectra: tuple[int, int]) -> None:
        upper, lower, scale = kernels.marchenko_pastur_fit(self.null, self.esd[:, -1], self.std, self.ratio)
        kernels.mp_ks(self.ratio, scale, self.esd, upper, lower)
        kernels.mp_concentration(self.esd, upper, lower)
        kernels.mp_num_spikes(self.esd, upper)
        bound = kernels.tw_esd_bound(2 * self.esd.shape[1], self.esd.shape[1], scale)
        kernels.tw_num_spikes(self.esd, bound)
        kernels.w1_rand_distance(self.esd, self.null)

    def time_law(self, spectra: tuple[int, int]) -> None:
        randommatrix.mp_cdf(self.esd, 0.5, 1.0)


class TracyWidom:
    """One quantile that was not asked for before."""

    params = ([1, 2],)
    tiny = ([1],)
    param_names = ("beta",)

    def setup(self, beta: int) -> None:
        self.p = 0.1

    def time_quantile(self, beta: int) -> None:
        self.p = self.p * 0.999 + 1e-6
        randommatrix.tracy_widom_ppf(self.p, beta)
