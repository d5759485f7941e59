"""Quality: what the exponents of the fitted tails say about a slice, and about a model.

Slices without a value are skipped in the figures of a model, and how many were is a field of its own.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask.fields import Field
from diffract_dask.kernel import kernel
from diffract_dask.kernels.workspace import scalars, spectra

__all__ = [
    "model_pl_alpha",
    "model_pl_alpha_norm",
    "model_pl_alpha_weighted",
    "model_tpl_alpha_norm",
    "pl_alpha_norm",
    "pl_alpha_weighted",
    "tpl_alpha_norm",
]

Array = NDArray[np.float64]

_NO_FIT = "there is no fit, or the weights hold NaN or infinity"
_OUT_OF_RANGE = f"{_NO_FIT}, or the sum leaves the range of float64"
_NONE_MEASURABLE = "no slice of the model has a value"


def _alpha_norm(esd: ArrayLike, alpha: ArrayLike) -> Array:
    values = np.asarray(esd, np.float64)
    with np.errstate(all="ignore"):
        total = np.sum(values ** np.asarray(alpha, np.float64)[..., np.newaxis], axis=-1)
        return np.where(np.isfinite(total) & (total > 0.0), total, np.nan)


def _mean_and_skipped(values: Array) -> tuple[np.float64, np.float64]:
    """Return the mean over what is not NaN, in an order that does not depend on that of the slices, and what is."""
    known = np.sort(values[~np.isnan(values)])
    mean = np.float64(np.mean(known)) if known.size else np.float64(np.nan)
    return mean, np.float64(values.size - known.size)


def _mean_log(norms: ArrayLike) -> tuple[np.float64, np.float64]:
    values = np.asarray(norms, np.float64).ravel()
    with np.errstate(divide="ignore", invalid="ignore"):
        return _mean_and_skipped(np.where(values > 0.0, np.log10(values), np.nan))


def _skipped(of: str) -> Field:
    return Field(
        long_name=f"Slices without {of}, left out of the model's mean",
        formula=r"\#\{l : x_l \text{ is NaN}\}",
        reference="martin2021predicting",
        dtype="int64",
        valid_range=(0.0, math.inf),
        nan="never",
    )


@kernel(
    pl_alpha_norm=Field(
        long_name="Alpha-norm of the power law",
        formula=r"\sum_i \lambda_i^{\alpha}",
        reference="martin2021predicting",
        valid_range=(0.0, math.inf),
        nan=_OUT_OF_RANGE,
    ),
    version=1,
    workspace=spectra(2),
)
def pl_alpha_norm(esd: ArrayLike, pl_alpha: ArrayLike) -> Array:
    r"""Sum of the eigenvalues raised to the power-law exponent.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    pl_alpha : array_like (...,)
        Exponent of the power law.

    Returns
    -------
    float64 array (...,)
        NaN where there is no fit and where the sum overflows or underflows.

    Notes
    -----
    .. math:: \sum_i \lambda_i^{\alpha}

    References
    ----------
    martin2021predicting

    Examples
    --------
    >>> float(pl_alpha_norm([1.0, 2.0], 2.0))
    5.0
    """
    return _alpha_norm(esd, pl_alpha)


@kernel(
    tpl_alpha_norm=Field(
        long_name="Alpha-norm of the truncated power law",
        formula=r"\sum_i \lambda_i^{\alpha}",
        reference="martin2021predicting",
        valid_range=(0.0, math.inf),
        nan=_OUT_OF_RANGE,
    ),
    version=1,
    workspace=spectra(2),
)
def tpl_alpha_norm(esd: ArrayLike, tpl_alpha: ArrayLike) -> Array:
    r"""Sum of the eigenvalues raised to the exponent of the truncated power law.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    tpl_alpha : array_like (...,)
        Exponent of the truncated power law.

    Returns
    -------
    float64 array (...,)
        NaN where there is no fit and where the sum overflows or underflows.

    Notes
    -----
    .. math:: \sum_i \lambda_i^{\alpha}

    References
    ----------
    martin2021predicting

    Examples
    --------
    >>> float(tpl_alpha_norm([1.0, 2.0], 1.0))
    3.0
    """
    return _alpha_norm(esd, tpl_alpha)


@kernel(
    pl_alpha_weighted=Field(
        long_name="Weighted power-law exponent",
        formula=r"\alpha \log_{10} \lambda_{\max}",
        reference="martin2021predicting",
        nan=_NO_FIT,
    ),
    version=1,
    workspace=scalars(4),
)
def pl_alpha_weighted(esd_max: ArrayLike, pl_alpha: ArrayLike) -> Array:
    r"""Power-law exponent times the logarithm of the greatest eigenvalue ("alpha-hat").

    Parameters
    ----------
    esd_max : array_like (...,)
        Greatest eigenvalue.
    pl_alpha : array_like (...,)
        Exponent of the power law.

    Returns
    -------
    float64 array (...,)
        Depends on the scale of the weights. The eigenvalue is that of the ESD, :math:`\sigma^2 / N`.

    Notes
    -----
    .. math:: \alpha \log_{10} \lambda_{\max}

    References
    ----------
    martin2021predicting

    Examples
    --------
    >>> float(pl_alpha_weighted(100.0, 2.5))
    5.0
    """
    top = np.asarray(esd_max, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.asarray(pl_alpha, np.float64) * np.where(top > 0.0, np.log10(top), np.nan))


@kernel(
    model_pl_alpha_norm=Field(
        long_name="Mean log alpha-norm of the power laws",
        formula=r"\langle \log_{10} \sum_i \lambda_i^{\alpha} \rangle",
        reference="martin2021predicting",
        nan=_NONE_MEASURABLE,
    ),
    model_pl_alpha_norm_skipped=_skipped("a power-law alpha-norm"),
    version=1,
    level="model",
    workspace=scalars(6),
)
def model_pl_alpha_norm(pl_alpha_norm: ArrayLike) -> tuple[np.float64, np.float64]:
    r"""Mean over the slices of a model of the log of their power-law alpha-norm.

    Parameters
    ----------
    pl_alpha_norm : array_like (L,)
        Alpha-norms of the slices of one model.

    Returns
    -------
    model_pl_alpha_norm : float64
        Over the slices that have one; NaN if none has.
    model_pl_alpha_norm_skipped : float64
        How many have none.

    Notes
    -----
    .. math:: \langle \log_{10} \sum_i \lambda_i^{\alpha} \rangle

    References
    ----------
    martin2021predicting

    Examples
    --------
    >>> [float(value) for value in model_pl_alpha_norm([10.0, 1000.0, np.nan])]
    [2.0, 1.0]
    """
    return _mean_log(pl_alpha_norm)


@kernel(
    model_tpl_alpha_norm=Field(
        long_name="Mean log alpha-norm of the truncated power laws",
        formula=r"\langle \log_{10} \sum_i \lambda_i^{\alpha} \rangle",
        reference="martin2021predicting",
        nan=_NONE_MEASURABLE,
    ),
    model_tpl_alpha_norm_skipped=_skipped("a truncated power-law alpha-norm"),
    version=1,
    level="model",
    workspace=scalars(6),
)
def model_tpl_alpha_norm(tpl_alpha_norm: ArrayLike) -> tuple[np.float64, np.float64]:
    r"""Mean over the slices of a model of the log of their truncated power-law alpha-norm.

    Parameters
    ----------
    tpl_alpha_norm : array_like (L,)
        Alpha-norms of the slices of one model.

    Returns
    -------
    model_tpl_alpha_norm : float64
        Over the slices that have one; NaN if none has.
    model_tpl_alpha_norm_skipped : float64
        How many have none.

    Notes
    -----
    .. math:: \langle \log_{10} \sum_i \lambda_i^{\alpha} \rangle

    References
    ----------
    martin2021predicting

    Examples
    --------
    >>> [float(value) for value in model_tpl_alpha_norm([10.0, 1000.0])]
    [2.0, 0.0]
    """
    return _mean_log(tpl_alpha_norm)


@kernel(
    model_pl_alpha=Field(
        long_name="Mean power-law exponent",
        formula=r"\langle \alpha \rangle",
        reference="martin2021predicting",
        nan=_NONE_MEASURABLE,
    ),
    model_pl_alpha_skipped=_skipped("a power-law exponent"),
    version=1,
    level="model",
    workspace=scalars(6),
)
def model_pl_alpha(pl_alpha: ArrayLike) -> tuple[np.float64, np.float64]:
    r"""Mean over the slices of a model of the power-law exponent.

    Parameters
    ----------
    pl_alpha : array_like (L,)
        Exponents of the slices of one model.

    Returns
    -------
    model_pl_alpha : float64
        Over the slices that have one; NaN if none has.
    model_pl_alpha_skipped : float64
        How many have none.

    Notes
    -----
    .. math:: \langle \alpha \rangle

    References
    ----------
    martin2021predicting

    Examples
    --------
    >>> [float(value) for value in model_pl_alpha([2.0, 4.0, np.nan])]
    [3.0, 1.0]
    """
    return _mean_and_skipped(np.asarray(pl_alpha, np.float64).ravel())


@kernel(
    model_pl_alpha_weighted=Field(
        long_name="Mean weighted power-law exponent",
        formula=r"\langle \alpha \log_{10} \lambda_{\max} \rangle",
        reference="martin2021predicting",
        nan=_NONE_MEASURABLE,
    ),
    model_pl_alpha_weighted_skipped=_skipped("a weighted power-law exponent"),
    version=1,
    level="model",
    workspace=scalars(6),
)
def model_pl_alpha_weighted(pl_alpha_weighted: ArrayLike) -> tuple[np.float64, np.float64]:
    r"""Mean over the slices of a model of the weighted power-law exponent.

    Parameters
    ----------
    pl_alpha_weighted : array_like (L,)
        Weighted exponents of the slices of one model.

    Returns
    -------
    model_pl_alpha_weighted : float64
        Over the slices that have one; NaN if none has.
    model_pl_alpha_weighted_skipped : float64
        How many have none.

    Notes
    -----
    .. math:: \langle \alpha \log_{10} \lambda_{\max} \rangle

    References
    ----------
    martin2021predicting

    Examples
    --------
    >>> [float(value) for value in model_pl_alpha_weighted([np.nan, -1.0])]
    [-1.0, 1.0]
    """
    return _mean_and_skipped(np.asarray(pl_alpha_weighted, np.float64).ravel())
