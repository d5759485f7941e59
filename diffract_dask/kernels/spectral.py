"""Singular values and vectors of a slice, and its empirical spectral density (ESD)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import linalg
from diffract_dask.fields import Field, Status
from diffract_dask.kernel import kernel
from diffract_dask.kernels.workspace import scalars, spectra
from diffract_dask.options import check_number

__all__ = ["esd", "esd_max", "esd_min", "max_weights_sval", "min_weights_sval", "singular_values", "singular_vectors"]

_NON_FINITE = "the weights hold NaN or infinity"
_FALLBACKS = [code for code, name in linalg.ROUTES.items() if name in ("gesvd", "scaled_gram")]
(_LEADING,) = [code for code, name in linalg.ROUTES.items() if name == "leading"]


def spectrum_status(
    weights_svals: NDArray[np.float64], weights_svals_error: NDArray[np.float64], weights_svals_route: NDArray[Any]
) -> NDArray[np.uint8]:
    """Return NON_FINITE where a spectrum is NaN, LEADING_ONLY where part of it is, FELL_BACK if a method failed."""
    status = np.where(np.isin(weights_svals_route, _FALLBACKS), Status.FELL_BACK, Status.OK)
    missing = np.where(np.asarray(weights_svals_route) == _LEADING, Status.LEADING_ONLY, Status.NON_FINITE)
    return np.where(np.isnan(weights_svals).any(axis=-1), missing, status).astype(np.uint8)


def _vectors_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    signs = 2 * 8 * n * cols * min(rows, cols)  # magnitudes of all right vectors and their copy for argmax
    return linalg.vectors_workspace(n, rows, cols, itemsize) + signs


def _check_tolerance(*, rtol: Any) -> None:
    if rtol is not None:
        check_number("rtol", rtol, lambda value: 0 <= value < 1, "None, or a number from 0 to less than 1")


def _route(rows: int, cols: int, dtype: np.dtype[Any], params: Mapping[str, Any]) -> str:
    return linalg.choose_route((rows, cols), dtype, params.get("rtol"))


@kernel(
    weights_svals=Field(
        long_name="Singular values",
        formula=r"\sigma_1 \le \dots \le \sigma_k,\; W = U \,\mathrm{diag}(\sigma)\, V^T",
        reference="golub2013matrix",
        dims=("sval",),
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    weights_svals_error=Field(
        long_name="Error bound of the singular values",
        formula=r"\max_i |\delta\sigma_i|",
        reference="golub2013matrix",
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    weights_svals_route=Field(
        long_name="Route of the singular values",
        formula=r"\text{" + ", ".join(f"{code} {name}" for code, name in linalg.ROUTES.items()) + "}",
        reference="golub2013matrix",
        dtype="int64",
        valid_range=(0.0, float(max(linalg.ROUTES))),
        nan="never",
    ),
    version=2,
    blocks=linalg.SpectrumStream(),
    workspace=linalg.values_workspace,
    status=spectrum_status,
    route=_route,
    partial=linalg.LeadingStream(),
    check=_check_tolerance,
)
def singular_values(
    weights: ArrayLike, *, rtol: float | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int8]]:
    r"""Singular values, ascending, with a bound of their error and the route by which they were computed.

    Parameters
    ----------
    weights : array_like (..., m, n)
        Matrices, any floating dtype.
    rtol : float, optional
        Largest relative error of each singular value. By default the absolute error of each is at most the
        rounding unit of the dtype times the greatest one (a small multiple of that in float64): no more than the
        rounding that the weights carry.

    Returns
    -------
    weights_svals : float64 array (..., k)
        ``k = min(m, n)``, in units of the weights. NaN for a matrix with a non-finite entry; with ``partial=True``, of
        a matrix for which k × k does not fit, all but the leading ones.
    weights_svals_error : float64 array (...,)
        In units of the weights.
    weights_svals_route : int8 array (...,)
        Key of ``linalg.ROUTES``.

    Notes
    -----
    .. math:: W = U \,\mathrm{diag}(\sigma)\, V^T

    References
    ----------
    golub2013matrix

    Examples
    --------
    >>> svals, error, route = singular_values(np.diag([3.0, 1.0, 2.0]))
    >>> svals.round(12).tolist()
    [1.0, 2.0, 3.0]
    """
    return linalg.singular_values(np.asarray(weights), rtol)


@kernel(
    weights_lsvs=Field(
        long_name="Left singular vectors",
        formula=r"U",
        reference="golub2013matrix",
        dims=("row", "sval"),
        persist=False,
        valid_range=(-1.0, 1.0),
        nan=_NON_FINITE,
    ),
    weights_rsvs=Field(
        long_name="Right singular vectors",
        formula=r"V",
        reference="golub2013matrix",
        dims=("col", "sval"),
        persist=False,
        valid_range=(-1.0, 1.0),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=_vectors_workspace,
)
def singular_vectors(weights: ArrayLike, weights_svals: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    r"""Left and right singular vectors as columns, in the order of the ascending singular values.

    Parameters
    ----------
    weights : array_like (..., m, n)
        Matrices, any floating dtype.
    weights_svals : array_like (..., k)
        Their singular values; where they are NaN, so are the vectors.

    Returns
    -------
    weights_lsvs : float64 array (..., m, k)
    weights_rsvs : float64 array (..., n, k)
        V, not its transpose. Orthonormal columns with fixed signs; vectors of equal singular values span the
        right space, but which basis of it they are is arbitrary.

    Notes
    -----
    .. math:: W = U \,\mathrm{diag}(\sigma)\, V^T

    References
    ----------
    golub2013matrix

    Examples
    --------
    >>> u, v = singular_vectors(np.diag([3.0, 1.0]), [1.0, 3.0])
    >>> bool(np.allclose(u @ np.diag([1.0, 3.0]) @ v.T, np.diag([3.0, 1.0])))
    True
    """
    lsvs, _, rsvs, *_ = linalg.svd(np.asarray(weights))
    broken = np.isnan(np.asarray(weights_svals, np.float64)).any(axis=-1)
    lsvs[broken], rsvs[broken] = np.nan, np.nan
    return lsvs, rsvs


@kernel(
    max_weights_sval=Field(
        long_name="Greatest singular value",
        formula=r"\sigma_{\max}",
        reference="golub2013matrix",
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=scalars(1),
)
def max_weights_sval(weights_svals: ArrayLike) -> NDArray[np.float64]:
    r"""Greatest singular value.

    Parameters
    ----------
    weights_svals : array_like (..., k)
        Singular values, ascending.

    Returns
    -------
    float64 array (...,)
        In units of the weights.

    Notes
    -----
    .. math:: \sigma_{\max}

    References
    ----------
    golub2013matrix

    Examples
    --------
    >>> float(max_weights_sval([1.0, 2.0]))
    2.0
    """
    return np.array(np.asarray(weights_svals, np.float64)[..., -1])


@kernel(
    min_weights_sval=Field(
        long_name="Smallest singular value",
        formula=r"\sigma_{\min}",
        reference="golub2013matrix",
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=scalars(1),
)
def min_weights_sval(weights_svals: ArrayLike) -> NDArray[np.float64]:
    r"""Smallest of the min(m, n) singular values.

    Parameters
    ----------
    weights_svals : array_like (..., k)
        Singular values, ascending.

    Returns
    -------
    float64 array (...,)
        In units of the weights. For a matrix without full rank it is rounding error, of the size of
        ``weights_svals_error``.

    Notes
    -----
    .. math:: \sigma_{\min}

    References
    ----------
    golub2013matrix

    Examples
    --------
    >>> float(min_weights_sval([1.0, 2.0]))
    1.0
    """
    return np.array(np.asarray(weights_svals, np.float64)[..., 0])


@kernel(
    esd=Field(
        long_name="Empirical spectral density",
        formula=r"\lambda_i = \sigma_i^2 / N",
        reference="martin2021implicit",
        dims=("sval",),
        persist=False,
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=spectra(0),
)
def esd(weights_svals: ArrayLike, greater_dim: ArrayLike) -> NDArray[np.float64]:
    r"""Eigenvalues of the correlation matrix :math:`W^T W / N`, ascending.

    Parameters
    ----------
    weights_svals : array_like (..., k)
        Singular values, ascending.
    greater_dim : array_like (...,)
        The greater dimension N of the matrix.

    Returns
    -------
    float64 array (..., k)
        In squared units of the weights. Values beyond float64 are 0 or infinite.

    Notes
    -----
    .. math:: \lambda_i = \sigma_i^2 / N

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> esd([1.0, 2.0], 2).tolist()
    [0.5, 2.0]
    """
    svals = np.asarray(weights_svals, np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        eigenvalues = svals / np.asarray(greater_dim, np.float64)[..., np.newaxis]
        eigenvalues *= svals
    return eigenvalues


@kernel(
    esd_max=Field(
        long_name="Greatest eigenvalue of the ESD",
        formula=r"\lambda_{\max}",
        reference="martin2021implicit",
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=scalars(1),
)
def esd_max(esd: ArrayLike) -> NDArray[np.float64]:
    r"""Greatest eigenvalue of the empirical spectral density.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues, ascending.

    Returns
    -------
    float64 array (...,)
        In squared units of the weights.

    Notes
    -----
    .. math:: \lambda_{\max} = \sigma_{\max}^2 / N

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(esd_max([0.5, 2.0]))
    2.0
    """
    return np.array(np.asarray(esd, np.float64)[..., -1])


@kernel(
    esd_min=Field(
        long_name="Smallest eigenvalue of the ESD",
        formula=r"\lambda_{\min}",
        reference="martin2021implicit",
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=scalars(1),
)
def esd_min(esd: ArrayLike) -> NDArray[np.float64]:
    r"""Smallest eigenvalue of the empirical spectral density.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues, ascending.

    Returns
    -------
    float64 array (...,)
        In squared units of the weights; rounding error for a matrix without full rank.

    Notes
    -----
    .. math:: \lambda_{\min} = \sigma_{\min}^2 / N

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(esd_min([0.5, 2.0]))
    0.5
    """
    return np.array(np.asarray(esd, np.float64)[..., 0])
