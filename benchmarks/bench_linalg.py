"""Singular values: batched, single, and streamed, against a plain Gram matrix and ``eigvalsh``."""

from __future__ import annotations

import numpy as np

from diffract_dask import linalg
from diffract_dask.blas import blas_threads

Shape = tuple[int, int, int]


class InCore:
    """A batch of slices in memory, with one BLAS thread as in a task."""

    params = ([(20000, 16, 16), (25, 384, 384), (1, 4096, 1024), (1, 1024, 4096)], ["float32", "float64"])
    tiny = ([(5, 4, 3), (1, 6, 8)], ["float32", "float64"])
    param_names = ("shape", "dtype")

    def setup(self, shape: Shape, dtype: str) -> None:
        self.weights = np.random.default_rng(0).standard_normal(shape).astype(dtype)

    def time_singular_values(self, shape: Shape, dtype: str) -> None:
        with blas_threads(1):
            linalg.singular_values(self.weights)

    def time_plain_numpy(self, shape: Shape, dtype: str) -> None:
        with blas_threads(1):
            a = self.weights.astype(np.float64)
            a = a if a.shape[-2] >= a.shape[-1] else a.swapaxes(-1, -2)
            np.linalg.eigvalsh(a.swapaxes(-1, -2) @ a)


class Vectors:
    """Singular vectors of one slice."""

    params = ([(1024, 256), (4096, 512)], ["float32", "float64"])
    tiny = ([(6, 4)], ["float32", "float64"])
    param_names = ("shape", "dtype")

    def setup(self, shape: tuple[int, int], dtype: str) -> None:
        self.weights = np.random.default_rng(0).standard_normal(shape).astype(dtype)

    def time_svd(self, shape: tuple[int, int], dtype: str) -> None:
        linalg.svd(self.weights)

    def time_plain_numpy(self, shape: tuple[int, int], dtype: str) -> None:
        np.linalg.svd(self.weights.astype(np.float64), full_matrices=False)


class Streamed:
    """One slice in blocks of rows, as it arrives from a file."""

    params = ([(16384, 1024), (8192, 2048)],)
    tiny = ([(40, 6)],)
    param_names = ("shape",)
    blocks = 8

    def setup(self, shape: tuple[int, int]) -> None:
        self.weights = np.random.default_rng(0).standard_normal(shape, np.float32)

    def spectrum(self, shape: tuple[int, int]) -> None:
        twin = linalg.SpectrumStream()
        state = twin.start(shape, self.weights.dtype)
        for block in np.array_split(self.weights, self.blocks):
            state = twin.update(state, block)
        twin.finish(state, lambda: iter(np.array_split(self.weights, self.blocks)), {"rtol": None})

    def time_spectrum(self, shape: tuple[int, int]) -> None:
        self.spectrum(shape)

    def peakmem_spectrum(self, shape: tuple[int, int]) -> None:
        self.spectrum(shape)


class Lazy:
    """A Dask array in chunks along both axes, on threads, against Dask's own decompositions."""

    params = ([(20000, 512), (512, 20000)], ["float32", "float64"])
    tiny = ([(40, 6), (6, 40)], ["float32", "float64"])
    param_names = ("shape", "dtype")

    def setup(self, shape: tuple[int, int], dtype: str) -> None:
        import dask.array as da

        weights = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        self.weights = da.from_array(weights, chunks=(2048, 256) if shape[0] > shape[1] else (256, 2048))
        self.whole_rows = self.weights.rechunk({int(shape[0] > shape[1]): -1})

    def time_singular_values(self, shape: tuple[int, int], dtype: str) -> None:
        linalg.singular_values(self.weights).values.compute()

    def time_svd(self, shape: tuple[int, int], dtype: str) -> None:
        import dask

        dask.compute(*linalg.svd(self.weights)[1:3])

    def time_leading_svd(self, shape: tuple[int, int], dtype: str) -> None:
        linalg.leading_svd(self.weights, min(16, *shape)).s.compute()

    def time_moments(self, shape: tuple[int, int], dtype: str) -> None:
        linalg.moments(self.weights).frob_norm.compute()

    def time_dask_svd(self, shape: tuple[int, int], dtype: str) -> None:
        import dask.array as da

        da.linalg.svd(self.whole_rows)[1].compute()

    def peakmem_singular_values(self, shape: tuple[int, int], dtype: str) -> None:
        linalg.singular_values(self.weights).values.compute()


class Routes:
    """The routes to the singular values of one matrix, side by side."""

    params = ([(4096, 512), (1024, 1024)], ["gram", "tsqr", "gesdd"])
    tiny = ([(8, 6)], ["gram", "tsqr", "gesdd"])
    param_names = ("shape", "route")

    def setup(self, shape: tuple[int, int], route: str) -> None:
        self.weights = np.random.default_rng(0).standard_normal(shape)

    def time_singular_values(self, shape: tuple[int, int], route: str) -> None:
        linalg.singular_values(self.weights, method=route)
