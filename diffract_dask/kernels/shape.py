"""Dimensions of a slice; known before its weights are read."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask.fields import Field
from diffract_dask.kernel import kernel
from diffract_dask.kernels.workspace import scalars

__all__ = ["aspect_ratio", "greater_dim", "lower_dim"]


@kernel(
    greater_dim=Field(
        long_name="Greater dimension",
        formula=r"N = \max(m, n)",
        reference="martin2021implicit",
        dtype="int64",
        valid_range=(1.0, math.inf),
        nan="never",
    ),
    version=1,
    workspace=scalars(1),
)
def greater_dim(shape: ArrayLike) -> NDArray[np.int64]:
    r"""Greater dimension of a matrix.

    Parameters
    ----------
    shape : array_like of int (..., 2)
        Rows and columns.

    Returns
    -------
    int64 array (...,)

    Notes
    -----
    .. math:: N = \max(m, n)

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> int(greater_dim((24, 16)))
    24
    """
    return np.asarray(np.max(np.asarray(shape, np.int64), axis=-1))


@kernel(
    lower_dim=Field(
        long_name="Lower dimension",
        formula=r"M = \min(m, n)",
        reference="martin2021implicit",
        dtype="int64",
        valid_range=(1.0, math.inf),
        nan="never",
    ),
    version=1,
    workspace=scalars(1),
)
def lower_dim(shape: ArrayLike) -> NDArray[np.int64]:
    r"""Lower dimension of a matrix: the number of its singular values.

    Parameters
    ----------
    shape : array_like of int (..., 2)
        Rows and columns.

    Returns
    -------
    int64 array (...,)

    Notes
    -----
    .. math:: M = \min(m, n)

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> lower_dim([(24, 16), (10, 64)]).tolist()
    [16, 10]
    """
    return np.asarray(np.min(np.asarray(shape, np.int64), axis=-1))


@kernel(
    aspect_ratio=Field(
        long_name="Aspect ratio",
        formula=r"Q = N / M",
        reference="martin2021implicit",
        valid_range=(1.0, math.inf),
        nan="never",
    ),
    version=1,
    workspace=scalars(2),
)
def aspect_ratio(greater_dim: ArrayLike, lower_dim: ArrayLike) -> NDArray[np.float64]:
    r"""Ratio of the greater to the lower dimension, at least 1.

    Parameters
    ----------
    greater_dim, lower_dim : array_like (...,)
        Dimensions of the matrix.

    Returns
    -------
    float64 array (...,)

    Notes
    -----
    .. math:: Q = N / M

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(aspect_ratio(24, 16))
    1.5
    """
    return np.asarray(np.divide(greater_dim, lower_dim, dtype=np.float64))
