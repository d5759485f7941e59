"""Statistics of the entries of a slice: everything that one pass over the weights gives."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import moments
from diffract_dask.fields import Field, Status
from diffract_dask.kernel import kernel

__all__ = ["entry_statistics"]

_NO_ENTRY = "no entry is finite"


def _workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    pieces = rows * cols // moments.PIECE + 1
    return moments.workspace_bytes(itemsize) + 2048 * pieces + 512 * n


def entry_status(*outputs: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return NON_FINITE where entries had to be left out."""
    nonfinite_fraction = outputs[7]
    return np.where(np.asarray(nonfinite_fraction) > 0.0, Status.NON_FINITE, Status.OK).astype(np.uint8)


@kernel(
    frob_norm=Field(
        long_name="Frobenius norm",
        formula=r"\|W\|_F = \sqrt{\sum_{ij} w_{ij}^2}",
        reference="golub2013matrix",
        valid_range=(0.0, math.inf),
        nan="the weights hold NaN or infinity",
    ),
    weights_mean=Field(
        long_name="Mean of the weights",
        formula=r"\bar w = \frac{1}{n_f} \sum_{ij} w_{ij}",
        reference="pebay2008formulas",
        nan=_NO_ENTRY,
    ),
    weights_std=Field(
        long_name="Standard deviation of the weights",
        formula=r"\sqrt{m_2},\; m_k = \frac{1}{n_f} \sum_{ij} (w_{ij} - \bar w)^k",
        reference="pebay2008formulas",
        valid_range=(0.0, math.inf),
        nan=_NO_ENTRY,
    ),
    weights_min=Field(
        long_name="Smallest weight", formula=r"\min_{ij} w_{ij}", reference="david2003order", nan=_NO_ENTRY
    ),
    weights_max=Field(
        long_name="Greatest weight", formula=r"\max_{ij} w_{ij}", reference="david2003order", nan=_NO_ENTRY
    ),
    weights_absmax=Field(
        long_name="Greatest absolute weight",
        formula=r"\max_{ij} |w_{ij}|",
        reference="golub2013matrix",
        valid_range=(0.0, math.inf),
        nan=_NO_ENTRY,
    ),
    zero_fraction=Field(
        long_name="Fraction of zero weights",
        formula=r"\#\{w_{ij} = 0\} / n_f",
        reference="hoefler2021sparsity",
        valid_range=(0.0, 1.0),
        nan=_NO_ENTRY,
    ),
    nonfinite_fraction=Field(
        long_name="Fraction of non-finite weights",
        formula=r"1 - n_f / (m n)",
        reference="ieee2019arithmetic",
        valid_range=(0.0, 1.0),
        nan="never",
    ),
    weights_kurtosis=Field(
        long_name="Excess kurtosis of the weights",
        formula=r"m_4 / m_2^2 - 3,\; m_k = \frac{1}{n_f} \sum_{ij} (w_{ij} - \bar w)^k",
        reference="joanes1998comparing",
        valid_range=(-2.0, math.inf),
        nan="all finite entries are equal, or no entry is finite",
    ),
    version=1,
    blocks=moments.MomentsStream(),
    workspace=_workspace,
    status=entry_status,
)
def entry_statistics(weights: ArrayLike) -> tuple[NDArray[np.float64], ...]:
    r"""Frobenius norm, moments, extremes and counts of the entries, in one pass and without any decomposition.

    Parameters
    ----------
    weights : array_like (..., m, n)
        Matrices, any floating dtype.

    Returns
    -------
    frob_norm, weights_mean, weights_std, weights_min, weights_max, weights_absmax, zero_fraction, \
    nonfinite_fraction, weights_kurtosis : float64 arrays (...,)
        All but `frob_norm` and `nonfinite_fraction` are over the :math:`n_f` finite entries; `frob_norm` is NaN
        if any entry is not finite. Norm, mean, standard deviation and extremes are in units of the weights.

    Notes
    -----
    .. math:: m_k = \frac{1}{n_f} \sum_{ij} (w_{ij} - \bar w)^k

    The standard deviation is that of the population, :math:`\sqrt{m_2}`, and the kurtosis is the excess
    :math:`m_4 / m_2^2 - 3`, neither corrected for the number of entries.

    References
    ----------
    golub2013matrix, pebay2008formulas, joanes1998comparing, david2003order, hoefler2021sparsity, ieee2019arithmetic

    Examples
    --------
    >>> frob_norm, mean, *_ = entry_statistics(np.array([[3.0, 0.0], [0.0, 4.0]]))
    >>> float(frob_norm), float(mean)
    (5.0, 1.75)
    """
    return moments.moments(np.asarray(weights))
