"""Gram matrices."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from diffract_dask import blas
from diffract_dask.blas import Array
from diffract_dask.linalg import pieces
from diffract_dask.linalg.pieces import chunks, flat_matrices, float64_pieces

__all__ = ["gram"]


def gram(w: ArrayLike, out: Array | None = None) -> Array:
    """Return the Gram matrix over the longer side: WᵀW of a tall matrix, W·Wᵀ of a wide one.

    Parameters
    ----------
    w : (..., m, n) array
        Converted to float64 in pieces. Nothing is scaled: squares of float64 entries beyond 1e±150 leave the range.
    out : (..., k, k) float64 array, optional
        Overwritten with the result, which saves making it.

    Returns
    -------
    (..., k, k) float64 array

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.

    Examples
    --------
    >>> gram([[3.0, 0.0], [4.0, 0.0], [0.0, 2.0]]).tolist()
    [[25.0, 0.0], [0.0, 4.0]]
    """
    flat, lead = flat_matrices(w)
    k = flat.shape[2]
    result = np.empty((*lead, k, k)) if out is None else out
    stack = result.reshape(-1, k, k) if result.flags.c_contiguous else np.empty((len(flat), k, k))
    with np.errstate(all="ignore"):
        for chunk in chunks(flat):
            if 8 * flat[chunk][0].size <= pieces.PIECE:
                block = flat[chunk].astype(np.float64)
                np.matmul(block.swapaxes(1, 2), block, out=stack[chunk])
            else:
                (target,) = stack[chunk]
                target[...] = 0.0
                for piece in float64_pieces(flat[chunk][0]):
                    blas.add_gram(target.T, piece)
                mirror(target)
    if not np.may_share_memory(stack, result):
        result[...] = stack.reshape(result.shape)
    return result


def mirror(matrix: Array) -> None:
    """Copy the upper triangle of a C-ordered matrix to the lower one."""
    for i in range(0, len(matrix), pieces.MIN_ROWS):
        j = i + pieces.MIN_ROWS
        matrix[i:j, :i] = matrix[:i, i:j].T
        diagonal = matrix[i:j, i:j]
        diagonal[...] = np.triu(diagonal) + np.triu(diagonal, 1).T
