"""How much of the spectrum the fitted tails take, and the tail whose determinant is one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask.fields import Field, Status
from diffract_dask.kernel import kernel
from diffract_dask.kernels.workspace import scalars, spectra
from diffract_dask.options import check_number

__all__ = [
    "detx",
    "expon_concentration",
    "expon_presence",
    "expon_scale",
    "pl_concentration",
    "pl_presence",
    "tpl_concentration",
    "tpl_presence",
    "tpl_scale",
]

Array = NDArray[np.float64]

MIN_SPREAD = 0.03
"""Eigenvalues that all lie within so much of the smallest one are taken for equal by default, as in the fits."""

_NO_FIT = "there is no fit, or the weights hold NaN or infinity"


def _share(esd: ArrayLike, xmin: ArrayLike) -> Array:
    values, lower = np.asarray(esd, np.float64), np.asarray(xmin, np.float64)
    share = np.count_nonzero(values >= lower[..., np.newaxis], axis=-1) / values.shape[-1]
    return np.where(np.isnan(lower) | np.isnan(values).any(axis=-1), np.nan, share)


def _presence(esd_min: ArrayLike, esd_max: ArrayLike, xmin: ArrayLike) -> Array:
    low, high = np.asarray(esd_min, np.float64), np.asarray(esd_max, np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(high > low, (high - np.asarray(xmin, np.float64)) / (high - low), np.nan)


def _scale(esd_max: ArrayLike, rate: ArrayLike) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.multiply(esd_max, rate, dtype=np.float64)


def _check_spread(*, min_spread: Any) -> None:
    check_number("min_spread", min_spread, lambda value: 0.0 <= value < math.inf, "at least 0 and finite")


@kernel(
    pl_concentration=Field(
        long_name="Share of eigenvalues in the power-law tail",
        formula=r"\#\{i : \lambda_i \ge \lambda_{\min}\} / M",
        reference="martin2021implicit",
        valid_range=(0.0, 1.0),
        nan=_NO_FIT,
    ),
    version=1,
    workspace=spectra(1),
)
def pl_concentration(esd: ArrayLike, pl_esd_xmin: ArrayLike) -> Array:
    r"""Share of all M eigenvalues that lie in the power-law tail.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    pl_esd_xmin : array_like (...,)
        Lower end of the tail.

    Returns
    -------
    float64 array (...,)
        Between 0 and 1; NaN where there is no fit.

    Notes
    -----
    .. math:: \#\{i : \lambda_i \ge \lambda_{\min}\} / M

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(pl_concentration([1.0, 2.0, 3.0, 4.0], 3.0))
    0.5
    """
    return _share(esd, pl_esd_xmin)


@kernel(
    pl_presence=Field(
        long_name="Share of the spectrum's width in the power-law tail",
        formula=r"(\lambda_{\max} - \lambda_{\mathrm{xmin}}) / (\lambda_{\max} - \lambda_1)",
        reference="martin2021implicit",
        valid_range=(0.0, math.inf),
        nan=_NO_FIT,
    ),
    version=1,
    workspace=scalars(4),
)
def pl_presence(esd_min: ArrayLike, esd_max: ArrayLike, pl_esd_xmin: ArrayLike) -> Array:
    r"""Share of the distance from the smallest to the greatest eigenvalue that the power-law tail takes.

    Parameters
    ----------
    esd_min, esd_max : array_like (...,)
        Smallest and greatest eigenvalue.
    pl_esd_xmin : array_like (...,)
        Lower end of the tail.

    Returns
    -------
    float64 array (...,)
        Between 0 and 1, unless the lower end was given and lies below the spectrum; NaN where there is no fit.

    Notes
    -----
    .. math:: (\lambda_{\max} - \lambda_{\mathrm{xmin}}) / (\lambda_{\max} - \lambda_1)

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(pl_presence(1.0, 5.0, 3.0))
    0.5
    """
    return _presence(esd_min, esd_max, pl_esd_xmin)


@kernel(
    tpl_concentration=Field(
        long_name="Share of eigenvalues in the truncated power-law tail",
        formula=r"\#\{i : \lambda_i \ge \lambda_{\min}\} / M",
        reference="martin2021implicit",
        valid_range=(0.0, 1.0),
        nan=_NO_FIT,
    ),
    version=1,
    workspace=spectra(1),
)
def tpl_concentration(esd: ArrayLike, tpl_esd_xmin: ArrayLike) -> Array:
    r"""Share of all M eigenvalues that lie in the truncated power-law tail.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    tpl_esd_xmin : array_like (...,)
        Lower end of the tail.

    Returns
    -------
    float64 array (...,)
        Between 0 and 1; NaN where there is no fit.

    Notes
    -----
    .. math:: \#\{i : \lambda_i \ge \lambda_{\min}\} / M

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(tpl_concentration([1.0, 2.0, 3.0, 4.0], 3.0))
    0.5
    """
    return _share(esd, tpl_esd_xmin)


@kernel(
    tpl_presence=Field(
        long_name="Share of the spectrum's width in the truncated power-law tail",
        formula=r"(\lambda_{\max} - \lambda_{\mathrm{xmin}}) / (\lambda_{\max} - \lambda_1)",
        reference="martin2021implicit",
        valid_range=(0.0, math.inf),
        nan=_NO_FIT,
    ),
    version=1,
    workspace=scalars(4),
)
def tpl_presence(esd_min: ArrayLike, esd_max: ArrayLike, tpl_esd_xmin: ArrayLike) -> Array:
    r"""Share of the distance from the smallest to the greatest eigenvalue that the truncated power-law tail takes.

    Parameters
    ----------
    esd_min, esd_max : array_like (...,)
        Smallest and greatest eigenvalue.
    tpl_esd_xmin : array_like (...,)
        Lower end of the tail.

    Returns
    -------
    float64 array (...,)
        Between 0 and 1, unless the lower end was given and lies below the spectrum; NaN where there is no fit.

    Notes
    -----
    .. math:: (\lambda_{\max} - \lambda_{\mathrm{xmin}}) / (\lambda_{\max} - \lambda_1)

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(tpl_presence(1.0, 5.0, 3.0))
    0.5
    """
    return _presence(esd_min, esd_max, tpl_esd_xmin)


@kernel(
    expon_concentration=Field(
        long_name="Share of eigenvalues in the exponential tail",
        formula=r"\#\{i : \lambda_i \ge \lambda_{\min}\} / M",
        reference="martin2021implicit",
        valid_range=(0.0, 1.0),
        nan=_NO_FIT,
    ),
    version=1,
    workspace=spectra(1),
)
def expon_concentration(esd: ArrayLike, expon_esd_xmin: ArrayLike) -> Array:
    r"""Share of all M eigenvalues that lie in the exponential tail.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    expon_esd_xmin : array_like (...,)
        Lower end of the tail.

    Returns
    -------
    float64 array (...,)
        Between 0 and 1; NaN where there is no fit.

    Notes
    -----
    .. math:: \#\{i : \lambda_i \ge \lambda_{\min}\} / M

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(expon_concentration([1.0, 2.0, 3.0, 4.0], 3.0))
    0.5
    """
    return _share(esd, expon_esd_xmin)


@kernel(
    expon_presence=Field(
        long_name="Share of the spectrum's width in the exponential tail",
        formula=r"(\lambda_{\max} - \lambda_{\mathrm{xmin}}) / (\lambda_{\max} - \lambda_1)",
        reference="martin2021implicit",
        valid_range=(0.0, math.inf),
        nan=_NO_FIT,
    ),
    version=1,
    workspace=scalars(4),
)
def expon_presence(esd_min: ArrayLike, esd_max: ArrayLike, expon_esd_xmin: ArrayLike) -> Array:
    r"""Share of the distance from the smallest to the greatest eigenvalue that the exponential tail takes.

    Parameters
    ----------
    esd_min, esd_max : array_like (...,)
        Smallest and greatest eigenvalue.
    expon_esd_xmin : array_like (...,)
        Lower end of the tail.

    Returns
    -------
    float64 array (...,)
        Between 0 and 1, unless the lower end was given and lies below the spectrum; NaN where there is no fit.

    Notes
    -----
    .. math:: (\lambda_{\max} - \lambda_{\mathrm{xmin}}) / (\lambda_{\max} - \lambda_1)

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(expon_presence(1.0, 5.0, 3.0))
    0.5
    """
    return _presence(esd_min, esd_max, expon_esd_xmin)


@kernel(
    tpl_scale=Field(
        long_name="Greatest eigenvalue in units of the truncated power-law decay",
        formula=r"\lambda_{\max} \Lambda",
        reference="martin2021implicit",
        nan=_NO_FIT,
    ),
    version=1,
    workspace=scalars(2),
)
def tpl_scale(esd_max: ArrayLike, tpl_lambda: ArrayLike) -> Array:
    r"""Greatest eigenvalue times the rate of the truncated power-law tail: how far the decay is felt.

    Parameters
    ----------
    esd_max : array_like (...,)
        Greatest eigenvalue.
    tpl_lambda : array_like (...,)
        Rate of the tail.

    Returns
    -------
    float64 array (...,)
        Does not depend on the scale of the weights.

    Notes
    -----
    .. math:: \lambda_{\max} \Lambda

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(tpl_scale(5.0, 2.0))
    10.0
    """
    return _scale(esd_max, tpl_lambda)


@kernel(
    expon_scale=Field(
        long_name="Greatest eigenvalue in units of the exponential decay",
        formula=r"\lambda_{\max} \Lambda",
        reference="martin2021implicit",
        nan=_NO_FIT,
    ),
    version=1,
    workspace=scalars(2),
)
def expon_scale(esd_max: ArrayLike, expon_lambda: ArrayLike) -> Array:
    r"""Greatest eigenvalue times the rate of the exponential tail: how far the decay is felt.

    Parameters
    ----------
    esd_max : array_like (...,)
        Greatest eigenvalue.
    expon_lambda : array_like (...,)
        Rate of the tail.

    Returns
    -------
    float64 array (...,)
        Does not depend on the scale of the weights.

    Notes
    -----
    .. math:: \lambda_{\max} \Lambda

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(expon_scale(5.0, 2.0))
    10.0
    """
    return _scale(esd_max, expon_lambda)


def detx_status(num: Array, lower: Array) -> NDArray[np.uint8]:
    """Return that a spectrum without such a tail is degenerate; one of NaN has the reason of what it is made of."""
    return np.where(np.isnan(num), Status.DEGENERATE, Status.OK).astype(np.uint8)


@kernel(
    detx_num=Field(
        long_name="Eigenvalues in the tail of determinant below one",
        formula=r"\min \{k : \sum_{i > M - k} \ln (\lambda_i / \bar\lambda) < 0\}",
        reference="martin2025setol",
        dtype="int64",
        valid_range=(1.0, math.inf),
        nan="all eigenvalues are equal, nearly so, or zero, or the weights hold NaN or infinity",
    ),
    detx_esd_xmin=Field(
        long_name="Lower end of the tail of determinant below one",
        formula=r"\lambda_{M - k + 1},\; k = \min \{k : \sum_{i > M - k} \ln (\lambda_i / \bar\lambda) < 0\}",
        reference="martin2025setol",
        valid_range=(0.0, math.inf),
        nan="all eigenvalues are equal, nearly so, or zero, or the weights hold NaN or infinity",
    ),
    version=2,
    workspace=spectra(5),
    status=detx_status,
    check=_check_spread,
)
def detx(esd: ArrayLike, esd_zero: ArrayLike, *, min_spread: float = MIN_SPREAD) -> tuple[Array, Array]:
    r"""Smallest upper tail whose eigenvalues, in units of their mean over the spectrum, have a product below one.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues, ascending.
    esd_zero : array_like (...,)
        At or below it they count as zero.
    min_spread : float
        There is no such tail if the largest eigenvalue is at most 1 + `min_spread` times the smallest.

    Returns
    -------
    detx_num : float64 array (...,)
        Number of eigenvalues in that tail.
    detx_esd_xmin : float64 array (...,)
        The smallest of them, in squared units of the weights; 0 where it counts as zero.

    Notes
    -----
    .. math:: \min \{k : \sum_{i > M - k} \ln (\lambda_i / \bar\lambda) < 0\}

    The condition det X = 1 of the trace-log theory. Sums of logarithms instead of products, which leave the range of
    numbers for some thousand eigenvalues.

    References
    ----------
    martin2025setol

    Examples
    --------
    >>> num, lower = detx([0.1, 0.2, 0.7, 3.0], 0.0)
    >>> float(num), float(lower)
    (3.0, 0.2)
    """
    _check_spread(min_spread=min_spread)
    values = np.asarray(esd, np.float64)
    values = np.where(values <= np.asarray(esd_zero, np.float64)[..., np.newaxis], 0.0, values)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        relative = values / values[..., -1:]
        logs = np.log(relative) - np.log(relative.mean(axis=-1, keepdims=True))
        below = np.cumsum(logs[..., ::-1], axis=-1) < 0.0
    num = np.argmax(below, axis=-1) + 1
    found = below.any(axis=-1) & (values[..., -1] > (1.0 + min_spread) * values[..., 0])
    lower = np.take_along_axis(values, (values.shape[-1] - num)[..., np.newaxis], axis=-1)[..., 0]
    return np.where(found, num, np.nan), np.where(found, lower, np.nan)
