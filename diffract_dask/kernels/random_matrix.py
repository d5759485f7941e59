"""How far a spectrum is from that of noise: the Marchenko–Pastur bulk, its Tracy–Widom edge, the distance to the null.

All counts and ratios are those of the eigenvalues over the squared scale of the noise, so that none of them depends on
the scale of the weights.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import randommatrix
from diffract_dask.fields import Field, Status
from diffract_dask.kernel import kernel
from diffract_dask.kernels.workspace import scalars, spectra
from diffract_dask.options import check_number

__all__ = [
    "marchenko_pastur_fit",
    "mp_concentration",
    "mp_ks",
    "mp_num_spikes",
    "mp_presence",
    "mp_soft_rank",
    "mp_sval_max",
    "tw_esd_bound",
    "tw_num_spikes",
    "w1_rand_distance",
]

_NO_NOISE = (
    "the weights hold NaN or infinity, are all equal, or are a single row or column; or the eigenvalues leave "
    "the range of float64"
)
Array = NDArray[np.float64]


def degenerate_where_nan(*outputs: Array) -> NDArray[np.uint8]:
    """Return DEGENERATE where there is no value; where the weights are not finite, their own status comes first."""
    return np.where(np.isnan(outputs[0]), Status.DEGENERATE, Status.OK).astype(np.uint8)


def _check_without_bulk(*, without_bulk: Any) -> None:
    if without_bulk is not None:
        check_number("without_bulk", without_bulk, lambda value: 0.0 <= value <= 1.0, "a number from 0 to 1, or None")


def _check_threshold(*, p_value_threshold: Any) -> None:
    meaning = "a probability from 1e-11 to 1 - 1e-11"
    check_number("p_value_threshold", p_value_threshold, lambda value: 1e-11 <= value <= 1.0 - 1e-11, meaning)


def _column(value: ArrayLike) -> Array:
    return np.asarray(value, np.float64)[..., np.newaxis]


@kernel(
    mp_esd_max=Field(
        long_name="Upper edge of the Marchenko–Pastur bulk",
        formula=r"\lambda_+ = \min\left(s_b^2 (1 + Q^{-1/2})^2, \lambda_{\max}\right)",
        reference="marchenko1967distribution,martin2021implicit",
        valid_range=(0.0, math.inf),
        nan=_NO_NOISE,
    ),
    mp_esd_min=Field(
        long_name="Lower edge of the Marchenko–Pastur bulk",
        formula=r"\lambda_- = s_b^2 (1 - Q^{-1/2})^2",
        reference="marchenko1967distribution,martin2021implicit",
        valid_range=(0.0, math.inf),
        nan=_NO_NOISE,
    ),
    mp_bulk_std=Field(
        long_name="Scale of the noise",
        formula=r"s_b = s \text{ or } \sqrt{\tfrac{1}{M} \sum_i \lambda_i(W_r)},\; "
        r"\lambda_i(W_r) \le s^2 (1 + Q^{-1/2})^2",
        reference="martin2021implicit",
        valid_range=(0.0, math.inf),
        nan=_NO_NOISE,
    ),
    version=2,
    workspace=spectra(4),
    status=degenerate_where_nan,
)
def marchenko_pastur_fit(
    esd_rand: ArrayLike, esd_max: ArrayLike, weights_std: ArrayLike, aspect_ratio: ArrayLike
) -> tuple[Array, Array, Array]:
    r"""Marchenko–Pastur law of the noise in a matrix, from its shuffled twin.

    Parameters
    ----------
    esd_rand : array_like (..., k)
        Eigenvalues of the null.
    esd_max : array_like (...,)
        Greatest eigenvalue of the matrix itself.
    weights_std : array_like (...,)
        Standard deviation s of the entries.
    aspect_ratio : array_like (...,)
        Q = N / M.

    Returns
    -------
    mp_esd_max, mp_esd_min : float64 arrays (...,)
        Edges of the bulk, in squared units of the weights; the upper one is at most `esd_max`.
    mp_bulk_std : float64 array (...,)
        Scale of the noise, in units of the weights: s where the law of s holds all eigenvalues of the null, else
        that of the eigenvalues of the null below its edge.

    Notes
    -----
    .. math:: \lambda_\pm = s_b^2 (1 \pm Q^{-1/2})^2

    All three are NaN for entries that are all equal, which hold no noise, for a single row or column, of which one
    eigenvalue says nothing, and where eigenvalues overflow or all underflow. Diffract gives
    edges of 0 and of that eigenvalue there.

    References
    ----------
    marchenko1967distribution, martin2021implicit

    Examples
    --------
    >>> [float(x) for x in marchenko_pastur_fit([0.5, 1.0, 2.0], 3.0, 1.0, 4.0)]
    [2.25, 0.25, 1.0]
    """
    null, ratio = np.asarray(esd_rand, np.float64), 1.0 / np.asarray(aspect_ratio, np.float64)
    scale = np.asarray(weights_std, np.float64)
    greatest = np.maximum(null[..., -1], esd_max)
    within_range = (greatest >= np.finfo(np.float64).tiny) & (greatest < np.inf)
    measurable = (scale > 0.0) & (null.shape[-1] > 1) & within_range
    scale = np.where(measurable, randommatrix.noise_scale(null, scale, ratio), np.nan)
    lower, upper = randommatrix.mp_edges(ratio, scale)
    return np.minimum(upper, esd_max), lower, scale


@kernel(
    mp_sval_max=Field(
        long_name="Upper edge of the bulk as a singular value",
        formula=r"\sqrt{\lambda_+ N}",
        reference="marchenko1967distribution",
        valid_range=(0.0, math.inf),
        nan=_NO_NOISE,
    ),
    version=1,
    workspace=scalars(2),
)
def mp_sval_max(mp_esd_max: ArrayLike, greater_dim: ArrayLike) -> Array:
    r"""Singular value at the upper edge of the Marchenko–Pastur bulk.

    Parameters
    ----------
    mp_esd_max : array_like (...,)
        Upper edge.
    greater_dim : array_like (...,)
        The greater dimension N of the matrix.

    Returns
    -------
    float64 array (...,)
        In units of the weights.

    Notes
    -----
    .. math:: \sqrt{\lambda_+ N}

    References
    ----------
    marchenko1967distribution

    Examples
    --------
    >>> float(mp_sval_max(2.25, 4))
    3.0
    """
    return np.asarray(np.sqrt(np.asarray(mp_esd_max, np.float64)) * np.sqrt(np.asarray(greater_dim, np.float64)))


@kernel(
    mp_ks=Field(
        long_name="Distance from the Marchenko–Pastur law",
        formula=r"\max_i \max\left(\tfrac{i}{n} - G(\lambda_i), G(\lambda_i) - \tfrac{i-1}{n}\right),\; "
        r"G = \frac{F - F(\lambda_-)}{F(\lambda_+) - F(\lambda_-)},\; \lambda_- \le \lambda_i < \lambda_+",
        reference="marchenko1967distribution,massey1951kolmogorov",
        valid_range=(0.0, 1.0),
        nan=f"no eigenvalue lies within the edges; or {_NO_NOISE}",
    ),
    version=1,
    workspace=spectra(20),
    status=degenerate_where_nan,
    check=_check_without_bulk,
)
def mp_ks(
    aspect_ratio: ArrayLike,
    mp_bulk_std: ArrayLike,
    esd: ArrayLike,
    mp_esd_max: ArrayLike,
    mp_esd_min: ArrayLike,
    *,
    without_bulk: float | None = None,
) -> Array:
    r"""Kolmogorov–Smirnov distance of the eigenvalues within the edges from the Marchenko–Pastur law.

    Parameters
    ----------
    aspect_ratio : array_like (...,)
        Q = N / M; the law is that of the ratio 1 / Q.
    mp_bulk_std : array_like (...,)
        Scale of the noise.
    esd : array_like (..., k)
        Eigenvalues, ascending.
    mp_esd_max, mp_esd_min : array_like (...,)
        Edges.
    without_bulk : float, optional
        Value where no eigenvalue lies within the edges. Default: NaN; Diffract's is 1.

    Returns
    -------
    float64 array (...,)

    Notes
    -----
    .. math:: D = \max_i \max\left(\tfrac{i}{n} - G(\lambda_i), G(\lambda_i) - \tfrac{i-1}{n}\right)

    over the n eigenvalues with :math:`\lambda_- \le \lambda_i < \lambda_+`, with G the law conditioned on that range.
    Diffract evaluates the law at the ratio 1 / (Q + 1e-8), and leaves out eigenvalues of exactly 0 in a square matrix,
    though not those of 1e-32 that rounding makes of them; here they count in either form.

    References
    ----------
    marchenko1967distribution, massey1951kolmogorov

    Examples
    --------
    >>> round(float(mp_ks(1.0, 1.0, [0.1, 0.6, 2.0], 4.0, 0.0)), 6)
    0.200475
    >>> float(mp_ks(1.0, 1.0, [9.0], 4.0, 0.0)), float(mp_ks(1.0, 1.0, [9.0], 4.0, 0.0, without_bulk=1.0))
    (nan, 1.0)
    """
    _check_without_bulk(without_bulk=without_bulk)
    values = np.asarray(esd, np.float64)
    lower, upper, ratio, scale = _column(mp_esd_min), _column(mp_esd_max), 1.0 / _column(aspect_ratio), mp_bulk_std
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        inside = (values >= lower) & (values < upper)
        rank, count = np.cumsum(inside, axis=-1), _column(np.count_nonzero(inside, axis=-1))
        mass = randommatrix.mp_cdf(upper, ratio, _column(scale))
        law = randommatrix.mp_cdf(values, ratio, _column(scale)) / mass
        gap = np.maximum(rank / count - law, law - (rank - 1) / count)
        distance = np.max(np.where(inside, gap, 0.0), axis=-1)
    known = ~np.isnan(values).any(axis=-1) & ~np.isnan(mass[..., 0])
    empty = (count[..., 0] == 0) | ~(mass[..., 0] > 0.0)
    distance = np.where(empty, np.nan if without_bulk is None else without_bulk, distance)
    return np.asarray(np.where(known, distance, np.nan))


@kernel(
    mp_concentration=Field(
        long_name="Share of the eigenvalues in the bulk",
        formula=r"\#\{\lambda_- \le \lambda_i \le \lambda_+\} / M",
        reference="martin2021implicit",
        valid_range=(0.0, 1.0),
        nan=_NO_NOISE,
    ),
    version=1,
    workspace=spectra(2),
)
def mp_concentration(esd: ArrayLike, mp_esd_max: ArrayLike, mp_esd_min: ArrayLike) -> Array:
    r"""Share of the eigenvalues that lie within the edges of the Marchenko–Pastur bulk.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    mp_esd_max, mp_esd_min : array_like (...,)
        Edges.

    Returns
    -------
    float64 array (...,)

    Notes
    -----
    .. math:: \#\{\lambda_- \le \lambda_i \le \lambda_+\} / M

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(mp_concentration([0.5, 1.0, 2.0, 4.0], 2.0, 0.75))
    0.5
    """
    values = np.asarray(esd, np.float64)
    inside = (values >= _column(mp_esd_min)) & (values <= _column(mp_esd_max))
    known = ~np.isnan(values).any(axis=-1) & ~np.isnan(mp_esd_max) & ~np.isnan(mp_esd_min)
    return np.asarray(np.where(known, np.mean(inside, axis=-1), np.nan))


@kernel(
    mp_presence=Field(
        long_name="Share of the spectrum's range that is bulk",
        formula=r"\mathrm{clip}\left(\frac{\lambda_+ - \lambda_-}{\lambda_{\max} - \lambda_{\min}}, 0, 1\right)",
        reference="martin2021implicit",
        valid_range=(0.0, 1.0),
        nan=_NO_NOISE,
    ),
    version=1,
    workspace=scalars(6),
)
def mp_presence(esd_min: ArrayLike, esd_max: ArrayLike, mp_esd_max: ArrayLike, mp_esd_min: ArrayLike) -> Array:
    r"""Width of the Marchenko–Pastur bulk over that of the spectrum.

    Parameters
    ----------
    esd_min, esd_max : array_like (...,)
        Ends of the spectrum.
    mp_esd_max, mp_esd_min : array_like (...,)
        Edges of the bulk.

    Returns
    -------
    float64 array (...,)
        Between 0 and 1; 1 for a spectrum of a single value within the edges.

    Notes
    -----
    .. math:: \mathrm{clip}\left(\frac{\lambda_+ - \lambda_-}{\lambda_{\max} - \lambda_{\min}}, 0, 1\right)

    Diffract adds 1e-16 to the denominator, which is felt where the eigenvalues are small.

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(mp_presence(0.0, 4.0, 2.0, 1.0)), float(mp_presence(1.0, 1.0, 1.0, 0.0))
    (0.25, 1.0)
    """
    bulk = np.asarray(np.subtract(mp_esd_max, mp_esd_min, dtype=np.float64))
    with np.errstate(invalid="ignore"):
        width = np.subtract(esd_max, esd_min, dtype=np.float64)
        covered = bulk >= width  # also where the width is 0, be it exactly or but for rounding
        share = np.divide(bulk, width, out=np.where(covered, 1.0, np.nan), where=~covered & (width > 0.0))
    return np.asarray(np.where(np.isnan(bulk) | np.isnan(width), np.nan, np.clip(share, 0.0, 1.0)))


@kernel(
    mp_num_spikes=Field(
        long_name="Eigenvalues above the bulk",
        formula=r"\#\{\lambda_i > \lambda_+\}",
        reference="baik2005phase",
        dtype="int64",
        valid_range=(0.0, math.inf),
        nan=_NO_NOISE,
    ),
    version=1,
    workspace=spectra(1),
)
def mp_num_spikes(esd: ArrayLike, mp_esd_max: ArrayLike) -> Array:
    r"""Number of eigenvalues above the upper edge of the Marchenko–Pastur bulk.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    mp_esd_max : array_like (...,)
        Upper edge.

    Returns
    -------
    float64 array (...,)

    Notes
    -----
    .. math:: \#\{\lambda_i > \lambda_+\}

    The edge is that of infinitely large matrices; `tw_num_spikes` allows for the noise of the edge itself.

    References
    ----------
    baik2005phase

    Examples
    --------
    >>> float(mp_num_spikes([0.5, 1.0, 2.0, 4.0], 1.5))
    2.0
    """
    return _above(esd, mp_esd_max)


def _above(esd: ArrayLike, bound: ArrayLike) -> Array:
    values = np.asarray(esd, np.float64)
    known = ~np.isnan(values).any(axis=-1) & ~np.isnan(bound)
    return np.asarray(np.where(known, np.count_nonzero(values > _column(bound), axis=-1), np.nan))


@kernel(
    mp_soft_rank=Field(
        long_name="Marchenko–Pastur soft rank",
        formula=r"\lambda_+ / \lambda_{\max}",
        reference="martin2021implicit",
        valid_range=(0.0, 1.0),
        nan=_NO_NOISE,
    ),
    version=1,
    workspace=scalars(2),
)
def mp_soft_rank(mp_esd_max: ArrayLike, esd_max: ArrayLike) -> Array:
    r"""Upper edge of the bulk over the greatest eigenvalue: 1 for pure noise.

    Parameters
    ----------
    mp_esd_max : array_like (...,)
        Upper edge.
    esd_max : array_like (...,)
        Greatest eigenvalue.

    Returns
    -------
    float64 array (...,)

    Notes
    -----
    .. math:: \lambda_+ / \lambda_{\max}

    Diffract adds 1e-16 to the denominator, which is felt where the eigenvalues are small.

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(mp_soft_rank(1.0, 4.0))
    0.25
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.divide(mp_esd_max, esd_max, dtype=np.float64))


@kernel(
    tw_esd_bound=Field(
        long_name="Tracy–Widom bound of the bulk",
        formula=r"\frac{s_b^2}{N} \left(L^2 + L \left(\tfrac{1}{\sqrt{N-1}} + \tfrac{1}{\sqrt{M}}\right)^{1/3} "
        r"F_1^{-1}(1 - p)\right),\; L = \sqrt{N - 1} + \sqrt{M}",
        reference="johnstone2001distribution,tracy1996orthogonal",
        valid_range=(0.0, math.inf),
        nan=_NO_NOISE,
    ),
    version=1,
    workspace=scalars(8),
    check=_check_threshold,
)
def tw_esd_bound(
    greater_dim: ArrayLike, lower_dim: ArrayLike, mp_bulk_std: ArrayLike, *, p_value_threshold: float = 0.005
) -> Array:
    r"""Eigenvalue that the greatest one of pure noise exceeds with a small probability.

    Parameters
    ----------
    greater_dim, lower_dim : array_like (...,)
        N and M.
    mp_bulk_std : array_like (...,)
        Scale of the noise :math:`s_b`.
    p_value_threshold : float
        The probability p, from 1e-11 to 1 - 1e-11.

    Returns
    -------
    float64 array (...,)
        In squared units of the weights.

    Notes
    -----
    .. math:: \frac{s_b^2}{N} \left(L^2 + L \left(\tfrac{1}{\sqrt{N-1}} + \tfrac{1}{\sqrt{M}}\right)^{1/3}
              F_1^{-1}(1 - p)\right), \quad L = \sqrt{N - 1} + \sqrt{M}

    with :math:`F_1` the Tracy–Widom law of real matrices. Diffract's quantiles come from a differential equation and
    an interpolation, and are in error by 8e-10 at the default; these by 1e-11 at most for p up to 0.999.

    References
    ----------
    johnstone2001distribution, tracy1996orthogonal

    Examples
    --------
    >>> round(float(tw_esd_bound(24, 16, 0.715890573033852)), 8)
    2.00293834
    """
    _check_threshold(p_value_threshold=p_value_threshold)
    quantile = float(randommatrix.tracy_widom_isf(p_value_threshold))
    longer, shorter = np.sqrt(np.asarray(greater_dim, np.float64) - 1.0), np.sqrt(np.asarray(lower_dim, np.float64))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        both = longer + shorter
        standard = both**2 + both * np.cbrt(1.0 / longer + 1.0 / shorter) * quantile
        return np.asarray(np.square(mp_bulk_std) * (standard / np.asarray(greater_dim, np.float64)))


@kernel(
    tw_num_spikes=Field(
        long_name="Eigenvalues above the Tracy–Widom bound",
        formula=r"\#\{\lambda_i > \lambda_{TW}\}",
        reference="johnstone2001distribution",
        dtype="int64",
        valid_range=(0.0, math.inf),
        nan=_NO_NOISE,
    ),
    version=1,
    workspace=spectra(1),
)
def tw_num_spikes(esd: ArrayLike, tw_esd_bound: ArrayLike) -> Array:
    r"""Number of eigenvalues that are too large for noise.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    tw_esd_bound : array_like (...,)
        Tracy–Widom bound.

    Returns
    -------
    float64 array (...,)

    Notes
    -----
    .. math:: \#\{\lambda_i > \lambda_{TW}\}

    References
    ----------
    johnstone2001distribution

    Examples
    --------
    >>> float(tw_num_spikes([0.5, 1.0, 2.0, 4.0], 3.0))
    1.0
    """
    return _above(esd, tw_esd_bound)


@kernel(
    w1_rand_distance=Field(
        long_name="Distance from the null",
        formula=r"\frac{1}{M} \sum_i |\lambda_i(W) - \lambda_i(W_r)| \,/\, \bar\lambda",
        reference="villani2009optimal",
        valid_range=(0.0, math.inf),
        nan="the weights hold NaN or infinity, or are all zero",
    ),
    version=1,
    workspace=spectra(3),
    status=degenerate_where_nan,
)
def w1_rand_distance(esd: ArrayLike, esd_rand: ArrayLike) -> Array:
    r"""Wasserstein distance between the eigenvalues and those of the null, over their mean.

    Parameters
    ----------
    esd, esd_rand : array_like (..., k)
        Eigenvalues of the matrix and of the null, ascending.

    Returns
    -------
    float64 array (...,)
        NaN for a zero matrix (Diffract: 0).

    Notes
    -----
    .. math:: \frac{1}{M} \sum_i |\lambda_i(W) - \lambda_i(W_r)| \,/\, \bar\lambda

    which is the distance :math:`W_1` between the two spectra as distributions. Permuting keeps the mean
    :math:`\bar\lambda`.

    References
    ----------
    villani2009optimal

    Examples
    --------
    >>> float(w1_rand_distance([0.0, 4.0], [1.0, 3.0]))
    0.5
    """
    values, null = np.asarray(esd, np.float64), np.asarray(esd_rand, np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        return np.asarray(np.mean(np.abs(values - null), axis=-1) / np.mean(values, axis=-1))
