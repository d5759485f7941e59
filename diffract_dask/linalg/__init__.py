"""Singular values and vectors of matrices and of stacks of them, in memory and streamed, with a stated error.

A matrix W is m × n, k = min(m, n), and computing is in float64 whatever the dtype of W. Three ways lead to its
singular values: the eigenvalues of the k × k Gram matrix (fast, reads W once in pieces, and loses small singular
values below sqrt(ε)·σ₁); the same of the R factor of W, made from row blocks (TSQR: as exact as LAPACK, also one
reading); LAPACK's dense routines. The Gram matrix in float64 is exact enough for weights stored in float32 or less.
"""

from __future__ import annotations

from diffract_dask.blas import blas_threads
from diffract_dask.linalg.arrays import (
    gram,
    leading_svd,
    moments,
    pair_product,
    schatten_4_norm,
    shuffle,
    singular_values,
    svd,
    tsqr,
)
from diffract_dask.linalg.randomised import LeadingStream
from diffract_dask.linalg.routes import (
    QR,
    ROUTES,
    Decomposition,
    Product,
    Spectrum,
    choose_route,
    relative_error,
)
from diffract_dask.linalg.spectrum import values_workspace
from diffract_dask.linalg.streams import SpectrumStream
from diffract_dask.linalg.traces import SchattenStream, schatten_workspace
from diffract_dask.linalg.triangles import tsqr_r
from diffract_dask.linalg.vectors import vectors_workspace

__all__ = [
    "QR",
    "ROUTES",
    "Decomposition",
    "LeadingStream",
    "Product",
    "SchattenStream",
    "Spectrum",
    "SpectrumStream",
    "blas_threads",
    "choose_route",
    "gram",
    "leading_svd",
    "moments",
    "pair_product",
    "relative_error",
    "schatten_4_norm",
    "schatten_workspace",
    "shuffle",
    "singular_values",
    "svd",
    "tsqr",
    "tsqr_r",
    "values_workspace",
    "vectors_workspace",
]
