"""Ranks: how many directions a slice uses. None of them changes when the slice is multiplied by a number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr

from diffract_dask.fields import Field
from diffract_dask.kernel import kernel
from diffract_dask.kernels.workspace import scalars, spectra
from diffract_dask.options import check_number

__all__ = ["effective_rank", "hard_rank", "numerical_rank", "participation_ratio", "stable_rank"]

_UNDEFINED = "the matrix is zero, or its weights hold NaN or infinity"


def _relative(weights_svals: ArrayLike) -> NDArray[np.float64]:
    """Return σ / σ_max, all NaN where that is undefined: ratios neither overflow nor underflow when squared."""
    svals = np.asarray(weights_svals, np.float64)
    with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        return np.asarray(svals / svals[..., -1:])


def _check_rtol(*, rtol: Any) -> None:
    check_number("rtol", rtol, lambda value: 0.0 <= value < 1.0, "at least 0 and less than 1")


def _check_factor(*, factor: Any) -> None:
    check_number("factor", factor, lambda value: 0.0 <= value < math.inf, "at least 0 and finite")


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
    participation_ratio=Field(
        long_name="Participation ratio",
        formula=r"\left(\sum_i \sigma_i^2\right)^2 / \sum_i \sigma_i^4",
        reference="gao2017theory",
        valid_range=(1.0, math.inf),
        nan=_UNDEFINED,
    ),
    version=1,
    workspace=scalars(4),
)
def participation_ratio(frob_norm: ArrayLike, schatten_4_norm: ArrayLike) -> NDArray[np.float64]:
    r"""How many equal eigenvalues of the Gram matrix would have the same ratio of trace to Frobenius norm.

    Parameters
    ----------
    frob_norm, schatten_4_norm : array_like (...,)
        Norms of the matrix.

    Returns
    -------
    float64 array (...,)
        Between 1 and the rank; NaN for a zero matrix and where a norm is NaN.

    Notes
    -----
    .. math:: \frac{\left(\sum_i \sigma_i^2\right)^2}{\sum_i \sigma_i^4} = \left(\|W\|_F / \|W\|_{S_4}\right)^4

    Needs no spectrum.

    References
    ----------
    gao2017theory

    Examples
    --------
    >>> round(float(participation_ratio(2.0, 4.0**0.25)), 9)
    4.0
    >>> float(participation_ratio(0.0, 0.0))
    nan
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.divide(frob_norm, schatten_4_norm, dtype=np.float64)
    # As of the stable rank: the Frobenius norm is never the smaller one but for rounding.
    return np.asarray(np.maximum(np.square(np.square(ratio)), 1.0))


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
    check=_check_rtol,
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
    _check_rtol(rtol=rtol)
    ratio = _relative(weights_svals)
    with np.errstate(invalid="ignore", under="ignore"):
        count = np.count_nonzero(np.square(ratio) > rtol, axis=-1)
    known = np.count_nonzero(~np.isnan(ratio), axis=-1)
    greatest = np.asarray(weights_svals, np.float64)[..., -1]
    cut_short = (known < ratio.shape[-1]) & (count == known) & (greatest > 0)
    return np.where(np.isfinite(greatest) & ~cut_short, count, np.nan)


@kernel(
    numerical_rank=Field(
        long_name="Numerical rank",
        formula=r"\#\{i : \lambda_i > \lambda_0\}",
        reference="golub2013matrix",
        dtype="int64",
        valid_range=(0.0, math.inf),
        nan="the weights hold NaN or infinity",
    ),
    esd_zero=Field(
        long_name="Numerical zero of the ESD",
        formula=r"\lambda_0 = \max((c\,(u\,\|W\|_F + \delta + 2^{-53} N \sigma_{\max}))^2 / N, 2^{-1022})",
        reference="golub2013matrix",
        valid_range=(0.0, math.inf),
        nan="the weights hold NaN or infinity",
    ),
    version=2,
    workspace=spectra(4),
    check=_check_factor,
)
def numerical_rank(
    weights_svals: ArrayLike,
    weights_svals_error: ArrayLike,
    greater_dim: ArrayLike,
    rounding: ArrayLike,
    *,
    factor: float = 1.0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    r"""Rank to the precision of the stored weights, and the eigenvalue of the ESD at or below which one counts as zero.

    Parameters
    ----------
    weights_svals : array_like (..., k)
        Singular values, ascending.
    weights_svals_error : array_like (...,)
        Bound of their error, :math:`\delta`, in units of the weights.
    greater_dim : array_like (...,)
        The greater dimension N of the matrix.
    rounding : array_like (...,)
        Unit roundoff u of the stored dtype: 6e-8 for float32, 4e-3 for bfloat16, 0 for integers.
    factor : float
        c, at least 0. With 0 only what is exactly zero counts as zero, as in Diffract.

    Returns
    -------
    numerical_rank : float64 array (...,)
        A count; 0 for a zero matrix.
    esd_zero : float64 array (...,)
        In squared units of the weights. Fits of the ESD use the eigenvalues above it.

    Raises
    ------
    ConfigurationError
        `factor` is not a finite number from 0 on.

    Notes
    -----
    .. math:: \lambda_0 = \max((c\,(u\,\|W\|_F + \delta + 2^{-53} N \sigma_{\max}))^2 / N, 2^{-1022}),
              \quad \#\{i : \sigma_i > c\,(\dots)\}

    Rounding to nearest moves a weight by at most u times its size, hence the matrix by at most :math:`u\|W\|_F`, and no
    singular value by more (Weyl). What lies below cannot be told from zero. The error :math:`\delta` is that of sums
    whose roundings are independent; those of equal numbers are not, and in a matrix of equal entries they all go one
    way: hence the third term, the usual worst case. Eigenvalues below
    :math:`2^{-1022}` lack digits, which singular values of that rank may well have; they are left out of the fits too.

    References
    ----------
    golub2013matrix

    Examples
    --------
    >>> rank, zero = numerical_rank([1e-9, 0.5, 1.0], 1e-15, 4, 2.0**-24)
    >>> float(rank), bool(1e-16 < zero < 1e-14)
    (2.0, True)
    """
    _check_factor(factor=factor)
    svals = np.asarray(weights_svals, np.float64)
    with np.errstate(divide="ignore", invalid="ignore", under="ignore", over="ignore"):
        frobenius = svals[..., -1] * np.sqrt(np.sum(np.square(_relative(svals)), axis=-1))
        frobenius = np.where(svals[..., -1] == 0.0, 0.0, frobenius)
        longer = np.asarray(greater_dim, np.float64)
        aligned = longer * 2.0**-53 * svals[..., -1]
        bound = np.asarray(rounding, np.float64) * frobenius + np.asarray(weights_svals_error, np.float64) + aligned
        bound = factor * bound
        count = np.count_nonzero(svals > bound[..., np.newaxis], axis=-1)
        zero = np.square(bound / np.sqrt(longer))
        zero = np.where(bound > 0.0, np.maximum(zero, np.finfo(np.float64).tiny), zero)
    return np.where(np.isnan(bound), np.nan, count), np.asarray(zero)
