"""Norms of a slice from its singular values, and norms of a whole model."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import linalg
from diffract_dask.fields import Field, Status
from diffract_dask.kernel import kernel
from diffract_dask.kernels.workspace import scalars, spectra

__all__ = [
    "l2_norm",
    "log_norm",
    "log_prod_frob_norm",
    "log_prod_spectral_norm",
    "log_spectral_norm",
    "nuclear_norm",
    "param_norm",
    "schatten_4_norm",
]

_NON_FINITE = "the weights hold NaN or infinity"
_NONE_MEASURABLE = "no slice of the model has a positive norm"


@kernel(
    nuclear_norm=Field(
        long_name="Nuclear norm",
        formula=r"\|W\|_* = \sum_i \sigma_i",
        reference="horn2013matrix",
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=spectra(0),
)
def nuclear_norm(weights_svals: ArrayLike) -> NDArray[np.float64]:
    r"""Sum of the singular values (Schatten 1-norm).

    Parameters
    ----------
    weights_svals : array_like (..., k)
        Singular values.

    Returns
    -------
    float64 array (...,)
        In units of the weights; 0 for a zero matrix, NaN for a NaN spectrum.

    Notes
    -----
    .. math:: \|W\|_* = \sum_i \sigma_i

    References
    ----------
    horn2013matrix

    Examples
    --------
    >>> float(nuclear_norm([1.0, 2.0, 3.0]))
    6.0
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.sum(weights_svals, axis=-1, dtype=np.float64))


@kernel(
    l2_norm=Field(
        long_name="Spectral norm",
        formula=r"\|W\|_2 = \sigma_{\max}",
        reference="horn2013matrix",
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=scalars(1),
)
def l2_norm(max_weights_sval: ArrayLike) -> NDArray[np.float64]:
    r"""Spectral norm: the greatest singular value.

    Parameters
    ----------
    max_weights_sval : array_like (...,)
        Greatest singular value.

    Returns
    -------
    float64 array (...,)
        In units of the weights; 0 for a zero matrix, NaN for a NaN spectrum.

    Notes
    -----
    .. math:: \|W\|_2 = \sigma_{\max}

    References
    ----------
    horn2013matrix

    Examples
    --------
    >>> float(l2_norm(3.0))
    3.0
    """
    return np.array(max_weights_sval, dtype=np.float64)


def schatten_status(norm: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return NON_FINITE where the norm is NaN."""
    return np.where(np.isnan(norm), Status.NON_FINITE, Status.OK).astype(np.uint8)


@kernel(
    schatten_4_norm=Field(
        long_name="Schatten 4-norm",
        formula=r"\|W\|_{S_4} = \left(\sum_i \sigma_i^4\right)^{1/4} = \left(\mathrm{tr}\, (W^T W)^2\right)^{1/4}",
        reference="horn2013matrix",
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    blocks=linalg.SchattenStream(),
    workspace=linalg.schatten_workspace,
    status=schatten_status,
)
def schatten_4_norm(weights: ArrayLike) -> NDArray[np.float64]:
    r"""Schatten 4-norm: the fourth root of the second trace moment of the Gram matrix.

    Parameters
    ----------
    weights : array_like (..., m, n)
        Matrices, any floating dtype.

    Returns
    -------
    float64 array (...,)
        In units of the weights; 0 for a zero matrix, NaN for one with an entry that is not finite.

    Notes
    -----
    .. math:: \|W\|_{S_4} = \left(\sum_i \sigma_i^4\right)^{1/4} = \|W^T W\|_F^{1/2}

    Made of products of panels of columns, without singular values and without a k × k matrix in memory; the fourth
    root, unlike the trace, has the range of the weights.

    References
    ----------
    horn2013matrix

    Examples
    --------
    >>> round(float(schatten_4_norm(np.diag([2.0, 2.0])) ** 4), 9)
    32.0
    """
    return linalg.schatten_4_norm(np.asarray(weights))


def _log10_measurable(norms: ArrayLike) -> NDArray[np.float64]:
    """Return log10 of the positive norms in ascending order, so that sums do not depend on the order of slices."""
    values = np.asarray(norms, np.float64).ravel()
    return np.log10(np.sort(values[values > 0.0]))


def _sum(values: NDArray[np.float64]) -> np.float64:
    return np.float64(np.sum(values)) if values.size else np.float64(np.nan)


def _mean(values: NDArray[np.float64]) -> np.float64:
    return np.float64(np.mean(values)) if values.size else np.float64(np.nan)


@kernel(
    log_norm=Field(
        long_name="Mean log squared Frobenius norm",
        formula=r"\langle \log_{10} \|W\|_F^2 \rangle",
        reference="martin2021implicit",
        nan=_NONE_MEASURABLE,
    ),
    version=1,
    level="model",
    workspace=scalars(4),
)
def log_norm(frob_norm: ArrayLike) -> np.float64:
    r"""Mean over the slices of a model of the log of the squared Frobenius norm.

    Parameters
    ----------
    frob_norm : array_like (L,)
        Frobenius norms of the slices of one model.

    Returns
    -------
    float64
        Over the slices whose norm is positive, the others (zero, NaN) being skipped; NaN if there is none.

    Notes
    -----
    .. math:: \frac{1}{L} \sum_l \log_{10} \|W_l\|_F^2

    Taken as :math:`2 \log_{10} \|W\|_F`, which no square can overflow or underflow.

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(log_norm([10.0, 1000.0, 0.0]))
    4.0
    """
    return np.float64(2.0 * _mean(_log10_measurable(frob_norm)))


@kernel(
    log_spectral_norm=Field(
        long_name="Mean log squared spectral norm",
        formula=r"\langle \log_{10} \|W\|_2^2 \rangle",
        reference="martin2021predicting",
        nan=_NONE_MEASURABLE,
    ),
    version=1,
    level="model",
    workspace=scalars(4),
)
def log_spectral_norm(l2_norm: ArrayLike) -> np.float64:
    r"""Mean over the slices of a model of the log of the squared spectral norm.

    Parameters
    ----------
    l2_norm : array_like (L,)
        Spectral norms of the slices of one model.

    Returns
    -------
    float64
        Over the slices whose norm is positive, the others (zero, NaN) being skipped; NaN if there is none.

    Notes
    -----
    .. math:: \frac{1}{L} \sum_l \log_{10} \|W_l\|_2^2

    Taken as :math:`2 \log_{10} \|W\|_2`, which no square can overflow or underflow.

    References
    ----------
    martin2021predicting

    Examples
    --------
    >>> float(log_spectral_norm([1e-200, 1e-200]))
    -400.0
    """
    return np.float64(2.0 * _mean(_log10_measurable(l2_norm)))


@kernel(
    log_prod_frob_norm=Field(
        long_name="Log product of Frobenius norms",
        formula=r"\sum_l \log_{10} \|W_l\|_F",
        reference="jiang2020fantastic",
        nan=_NONE_MEASURABLE,
    ),
    version=1,
    level="model",
    workspace=scalars(4),
)
def log_prod_frob_norm(frob_norm: ArrayLike) -> np.float64:
    r"""Log of the product of the Frobenius norms of the slices of a model.

    Parameters
    ----------
    frob_norm : array_like (L,)
        Frobenius norms of the slices of one model.

    Returns
    -------
    float64
        Over the slices whose norm is positive, the others (zero, NaN) being skipped; NaN if there is none.

    Notes
    -----
    .. math:: \log_{10} \prod_l \|W_l\|_F

    References
    ----------
    jiang2020fantastic

    Examples
    --------
    >>> float(log_prod_frob_norm([10.0, 100.0]))
    3.0
    """
    return _sum(_log10_measurable(frob_norm))


@kernel(
    log_prod_spectral_norm=Field(
        long_name="Log product of spectral norms",
        formula=r"\sum_l \log_{10} \|W_l\|_2",
        reference="jiang2020fantastic",
        nan=_NONE_MEASURABLE,
    ),
    version=1,
    level="model",
    workspace=scalars(4),
)
def log_prod_spectral_norm(l2_norm: ArrayLike) -> np.float64:
    r"""Log of the product of the spectral norms of the slices of a model.

    Parameters
    ----------
    l2_norm : array_like (L,)
        Spectral norms of the slices of one model.

    Returns
    -------
    float64
        Over the slices whose norm is positive, the others (zero, NaN) being skipped; NaN if there is none.

    Notes
    -----
    .. math:: \log_{10} \prod_l \|W_l\|_2

    References
    ----------
    jiang2020fantastic

    Examples
    --------
    >>> float(log_prod_spectral_norm([10.0, 0.1]))
    0.0
    """
    return _sum(_log10_measurable(l2_norm))


@kernel(
    param_norm=Field(
        long_name="Squared parameter norm",
        formula=r"\sum_l \|W_l\|_F^2",
        reference="jiang2020fantastic",
        valid_range=(0.0, math.inf),
        nan="a slice of the model holds NaN or infinity, or none is analysed",
    ),
    version=1,
    level="model",
    workspace=scalars(4),
)
def param_norm(frob_norm: ArrayLike) -> np.float64:
    r"""Sum over the slices of a model of the squared Frobenius norm.

    Parameters
    ----------
    frob_norm : array_like (L,)
        Frobenius norms of the slices of one model.

    Returns
    -------
    float64
        In squared units of the weights. NaN if any slice's norm is: a sum without it would be too small.

    Notes
    -----
    .. math:: \sum_l \|W_l\|_F^2

    References
    ----------
    jiang2020fantastic

    Examples
    --------
    >>> float(param_norm([3.0, 4.0]))
    25.0
    """
    with np.errstate(over="ignore", under="ignore"):
        return _sum(np.square(np.sort(np.asarray(frob_norm, np.float64).ravel())))
