"""QR factors of tall matrices from their row blocks (TSQR)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from diffract_dask import blas
from diffract_dask.blas import Array
from diffract_dask.errors import MatrixError
from diffract_dask.linalg.pieces import float64_pieces
from diffract_dask.moments import as_matrices

__all__ = ["tsqr_r"]


def tsqr_r(blocks: Iterable[ArrayLike]) -> Array:
    """Return the R factor ``(k, k)`` of the matrix whose row blocks ``(b, k)`` are given, in one reading.

    R is upper triangular, its diagonal of either sign; its singular values are those of the matrix.

    Raises
    ------
    MatrixError
        A block is not a real matrix, or there is none.

    Examples
    --------
    >>> np.abs(tsqr_r([[[3.0, 0.0]], [[4.0, 0.0]], [[0.0, 2.0]]])).tolist()
    [[5.0, 0.0], [0.0, 2.0]]
    """
    triangle: Array | None = None
    for block in blocks:
        rows = as_matrices(block)
        if triangle is None:
            triangle = np.zeros((rows.shape[1],) * 2, order="F")
        for piece in float64_pieces(rows):
            blas.add_rows(triangle, np.array(piece, order="F"))
    if triangle is None:
        raise MatrixError("tsqr_r needs at least one block of rows, found none")
    return triangle
