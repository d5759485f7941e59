"""Ranks: how many directions a slice uses. None of them changes when the slice is multiplied by a number."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr

from diffract_dask.errors import ConfigurationError
from diffract_dask.fields import Field
from diffract_dask.kernel import kernel
from diffract_dask.kernels.workspace import scalars, spectra

__all__ = ["effective_rank", "hard_rank", "stable_rank"]

_UNDEFINED = "the matrix is zero, or its weights hold NaN or infinity"


def _relative(weights_svals: ArrayLike) -> NDArray[np.float64]:
    """Return σ / σ_max, all NaN where that is undefined: ratios neither overflow nor underflow when squared."""
    svals = np.asarray(weights_svals, np.float64)
    with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        return np.asarray(svals / svals[..., -1:])


@kernel(
    effective_rank=Field(
        long_name="Effective rank",
        formula=r"\exp\left(-\sum_i p_i \ln p_i\right),\; p_i = \sigma_i / \sum_j \sigma_j",
        reference="roy2007effective",
        valid_range=(1.0, math.inf),
        nan=_UNDEFINED,
    ),
    version=1,
    workspace=spectra(2),
)
def effective_rank(weights_svals: ArrayLike) -> NDArray[np.float64]:
    r"""Exponential of the entropy of the normalised singular values.

    Parameters
    ----------
    weights_svals : array_like (..., k)
        Singular values, ascending.

    Returns
    -------
    float64 array (...,)
        Between 1 and k; NaN for a zero matrix and for a NaN spectrum.

    Notes
    -----
    .. math:: \exp\left(-\sum_i p_i \ln p_i\right), \quad p_i = \sigma_i / \sum_j \sigma_j

    With :math:`r_i = \sigma_i / \sigma_{\max}` and :math:`S = \sum_i r_i` the entropy is
    :math:`\ln S - \frac{1}{S} \sum_i r_i \ln r_i`, whose terms are all non-negative, at any scale of the weights.

    References
    ----------
    roy2007effective

    Examples
    --------
    >>> round(float(effective_rank([1.0, 1.0, 1.0])), 12)
    3.0
    >>> float(effective_rank([0.0, 0.0, 1e-300]))
    1.0
    """
    ratio = _relative(weights_svals)
    total = np.sum(ratio, axis=-1)
    with np.errstate(invalid="ignore", under="ignore"):
        entropy = np.log(total) + np.sum(entr(ratio), axis=-1) / total
    return np.asarray(np.exp(entropy))


@kernel(
    stable_rank=Field(
        long_name="Stable rank",
        formula=r"\|W\|_F^2 / \|W\|_2^2",
        reference="rudelson2007sampling",
        valid_range=(1.0, math.inf),
        nan=_UNDEFINED,
    ),
    version=1,
    workspace=scalars(4),
)
def stable_rank(frob_norm: ArrayLike, l2_norm: ArrayLike) -> NDArray[np.float64]:
    r"""Squared ratio of the Frobenius to the spectral norm.

    Parameters
    ----------
    frob_norm, l2_norm : array_like (...,)
        Norms of the matrix.

    Returns
    -------
    float64 array (...,)
        Between 1 and the rank; NaN for a zero matrix and where a norm is NaN.

    Notes
    -----
    .. math:: \|W\|_F^2 / \|W\|_2^2

    The ratio is squared, not the norms, so that no scale of the weights overflows.

    References
    ----------
    rudelson2007sampling

    Examples
    --------
    >>> float(stable_rank(2.0, 1.0))
    4.0
    >>> float(stable_rank(0.0, 0.0))
    nan
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.divide(frob_norm, l2_norm, dtype=np.float64)
    # The Frobenius norm is never the smaller one; the two are computed apart, so rounding can make it so.
    return np.asarray(np.maximum(np.square(ratio), 1.0))


@kernel(
    hard_rank=Field(
        long_name="Hard rank",
        formula=r"\#\{i : \sigma_i^2 > \mathrm{rtol} \cdot \sigma_{\max}^2\}",
        reference="golub2013matrix",
        dtype="int64",
        valid_range=(0.0, math.inf),
        nan="the weights hold NaN or infinity",
    ),
    version=1,
    workspace=spectra(2),
)
def hard_rank(weights_svals: ArrayLike, *, rtol: float = 1e-5) -> NDArray[np.float64]:
    r"""Number of eigenvalues of :math:`W^T W` above a fraction of the greatest.

    Parameters
    ----------
    weights_svals : array_like (..., k)
        Singular values, ascending.
    rtol : float
        Fraction of the greatest eigenvalue, in [0, 1). The default counts singular values above 0.3 % of the
        greatest one; below the squared rounding unit of the stored dtype, rounding errors are counted too.

    Returns
    -------
    float64 array (...,)
        A count; 0 for a zero matrix, NaN for a NaN spectrum, and for one of which the leading part alone is known
        where all of that counts.

    Raises
    ------
    ConfigurationError
        `rtol` is not in [0, 1).

    Notes
    -----
    .. math:: \#\{i : \sigma_i^2 > \mathrm{rtol} \cdot \sigma_{\max}^2\}

    Same as counting eigenvalues of the ESD, but from ratios of singular values, which do not underflow.

    References
    ----------
    golub2013matrix

    Examples
    --------
    >>> float(hard_rank([1e-4, 0.5, 1.0]))
    2.0
    >>> float(hard_rank([1e-4, 0.5, 1.0], rtol=1e-9))
    3.0
    """
    if not 0.0 <= rtol < 1.0:
        raise ConfigurationError(f"hard_rank: rtol is {rtol!r}; it must be at least 0 and less than 1")
    ratio = _relative(weights_svals)
    with np.errstate(invalid="ignore", under="ignore"):
        count = np.count_nonzero(np.square(ratio) > rtol, axis=-1)
    known = np.count_nonzero(~np.isnan(ratio), axis=-1)
    greatest = np.asarray(weights_svals, np.float64)[..., -1]
    cut_short = (known < ratio.shape[-1]) & (count == known) & (greatest > 0)
    return np.where(np.isfinite(greatest) & ~cut_short, count, np.nan)
