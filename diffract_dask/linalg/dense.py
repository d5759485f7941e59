"""LAPACK on matrices in memory, by another routine where one does not converge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import scipy.linalg

from diffract_dask.blas import Array
from diffract_dask.linalg.routes import CODE, Routes, roots

__all__ = ["FAILURES", "gesdd", "gesvd", "values", "vectors"]


INT32 = 2**31 - 1
"""Numbers that a LAPACK with 32-bit integers can count in a workspace; ``gesdd`` with vectors needs 4 k² + 7 k."""


FAILURES = (np.linalg.LinAlgError, ValueError)
"""What a routine that does not converge raises; the latter SciPy, where a workspace is too large to be counted."""


def gesdd(block: Array) -> Array:
    values: Any = np.linalg.svd(block, compute_uv=False)
    return cast(Array, values)


def gesvd(matrix: Array) -> Array:
    values: Array = scipy.linalg.svd(
        matrix, compute_uv=False, overwrite_a=True, check_finite=False, lapack_driver="gesvd"
    )
    return values


def values(block: Array) -> tuple[Array, Routes]:
    """Return values and route of finite matrices ``(g, N, k)`` by LAPACK, one by one where it fails."""
    try:
        return gesdd(block)[:, ::-1], np.full(len(block), CODE["gesdd"], np.int8)
    except np.linalg.LinAlgError:
        results = [_values_one(matrix) for matrix in block]
    return np.array([values for values, _ in results]), np.array([CODE[name] for _, name in results], np.int8)


def _values_one(matrix: Array) -> tuple[Array, str]:
    attempts: dict[str, Callable[[], Array]] = {
        "gesdd": lambda: gesdd(matrix)[::-1],
        "gesvd": lambda: gesvd(matrix.copy())[::-1],
        "scaled_gram": lambda: roots(np.linalg.eigvalsh(matrix.T @ matrix)),
    }
    for name, attempt in attempts.items():
        try:
            return attempt(), name
        except FAILURES:
            continue
    return np.full(matrix.shape[1], np.nan), "none"


def vectors(matrix: Array) -> tuple[Array, Array, Array, str]:
    """Return left vectors, ascending values, right vectors of a finite tall matrix, and the name of the route."""
    long, k = matrix.shape
    attempts: dict[str, Callable[[], tuple[Array, Array, Array]]] = {
        "gesdd": lambda: gesdd_vectors(matrix),
        "gesvd": lambda: gesvd_vectors(matrix),
        "scaled_gram": lambda: gram_vectors(matrix),
    }
    for name, attempt in attempts.items():
        if name == "gesdd" and 4 * k * k + 7 * k > INT32:
            continue
        try:
            return *attempt(), name
        except FAILURES:
            continue
    return np.full((long, k), np.nan), np.full(k, np.nan), np.full((k, k), np.nan), "none"


def gram_vectors(block: Array) -> tuple[Array, Array, Array]:
    """Return left vectors, ascending values and right vectors from the Gram matrix."""
    eigenvalues, right = np.linalg.eigh(np.matmul(block.swapaxes(-1, -2), block))
    left, triangle = np.linalg.qr(np.matmul(block, right[..., ::-1]))
    left *= np.where(np.diagonal(triangle, axis1=-2, axis2=-1) < 0, -1.0, 1.0)[..., None, :]
    return left[..., ::-1], roots(eigenvalues), right


def gesdd_vectors(matrix: Array) -> tuple[Array, Array, Array]:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return u[:, ::-1], s[::-1], vt[::-1].T


def gesvd_vectors(matrix: Array) -> tuple[Array, Array, Array]:
    u, s, vt = scipy.linalg.svd(matrix, full_matrices=False, check_finite=False, lapack_driver="gesvd")
    return u[:, ::-1], s[::-1], vt[::-1].T
