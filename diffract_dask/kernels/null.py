"""The null of a slice: its entries in random places, which leaves their distribution and takes all structure away."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import linalg, shuffle
from diffract_dask.fields import Field, Status
from diffract_dask.kernel import kernel
from diffract_dask.kernels.spectral import esd as to_esd
from diffract_dask.kernels.workspace import scalars, spectra
from diffract_dask.options import check_whole

__all__ = [
    "esd_rand",
    "esd_rand_max",
    "esd_rand_min",
    "max_weights_rand_sval",
    "min_weights_rand_sval",
    "rand_replicas",
    "rand_seed",
    "rand_singular_values",
    "rand_singular_vectors",
    "weights_rand",
]

_NON_FINITE = "the weights hold NaN or infinity"
_LARGEST_SEED = 2**53
Array = NDArray[np.float64]


def _check_seed(*, seed: Any) -> None:
    check_whole("seed", seed, 0)


def _check_replicas(*, replicas: Any) -> None:
    check_whole("replicas", replicas, 2)


@kernel(
    rand_seed=Field(
        long_name="Seed of the null",
        formula=r"\mathrm{seed}",
        reference="martin2021implicit",
        dtype="int64",
        valid_range=(0.0, float(_LARGEST_SEED)),
        nan="never",
    ),
    version=1,
    workspace=scalars(1),
    check=_check_seed,
)
def rand_seed(shape: ArrayLike, *, seed: int = 42) -> NDArray[np.int64]:
    r"""Seed of the permutation of the null: the one place where it is set.

    Parameters
    ----------
    shape : array_like of int (..., 2)
        Rows and columns.
    seed : int
        From 0 to 2**53.

    Returns
    -------
    int64 array (...,)

    Notes
    -----
    .. math:: \mathrm{seed}

    Slices of the same shape are permuted in the same way, as in Diffract. Diffract's ``seed=-1`` takes a seed from the
    operating system; here a seed is always given, so that what is stored can be computed again.

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> int(rand_seed((24, 16)))
    42
    """
    _check_seed(seed=seed)
    return np.full(np.shape(shape)[:-1], seed, np.int64)


def _shuffled(weights: NDArray[Any], seeds: ArrayLike) -> NDArray[Any]:
    """Return the null of each matrix, each with its own seed."""
    each = np.broadcast_to(np.asarray(seeds, np.float64), weights.shape[:-2])
    known = np.unique(each)
    if len(known) == 1:
        return shuffle.permuted(weights, int(known[0]))
    result = np.empty_like(weights, order="C")
    for seed in known:
        result[each == seed] = shuffle.permuted(weights[each == seed], int(seed))
    return result


def _weights_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    return shuffle.workspace(n, rows, cols, itemsize) + 2 * n * rows * cols * itemsize + 1024 * n


def _values_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    null = _weights_workspace(n, rows, cols, itemsize)
    return null + linalg.values_workspace(n, rows, cols, itemsize)


def _vectors_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    return linalg.vectors_workspace(n, rows, cols, 8) + 2 * 8 * n * cols * min(rows, cols)


def _replicas_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    return _values_workspace(n, rows, cols, itemsize) + 8 * n * (12 * min(rows, cols) + 8)


@kernel(
    weights_rand=Field(
        long_name="Shuffled weights",
        formula=r"\mathrm{vec}(W_r) = P\, \mathrm{vec}(W),\; P \text{ a random permutation}",
        reference="martin2021implicit,sandelius1962simple",
        dims=("row", "col"),
        persist=False,
        nan="as many entries as are NaN in the weights",
    ),
    version=1,
    workspace=_weights_workspace,
)
def weights_rand(weights: ArrayLike, rand_seed: ArrayLike) -> NDArray[Any]:
    r"""The entries of a matrix in random places.

    Parameters
    ----------
    weights : array_like (..., m, n)
        Matrices, any floating dtype.
    rand_seed : array_like of int (...,)
        Seeds of the permutations.

    Returns
    -------
    array (..., m, n)
        In the dtype of `weights`.

    Notes
    -----
    .. math:: \mathrm{vec}(W_r) = P\, \mathrm{vec}(W)

    Diffract's permutation up to 2**24 entries; a two-pass scatter beyond (:mod:`diffract_dask.shuffle`). Fields that
    are computed from the null do not need it as a whole.

    References
    ----------
    martin2021implicit, sandelius1962simple

    Examples
    --------
    >>> weights_rand(np.arange(6.0).reshape(2, 3), 42).tolist()
    [[3.0, 2.0, 5.0], [4.0, 1.0, 0.0]]
    """
    return _shuffled(np.asarray(weights), rand_seed)


def null_status(*outputs: Array) -> NDArray[np.uint8]:
    """Return NON_FINITE where a spectrum of the null is NaN."""
    spectrum = outputs[0]
    return np.where(np.isnan(spectrum).any(axis=-1), Status.NON_FINITE, Status.OK).astype(np.uint8)


class NullStream:
    """The null's singular values for a slice that is read in spans (see :class:`diffract_dask.kernel.Streamed`).

    A permutation needs the entries in their order, so that all work is in `finish`, which reads the slice once more:
    into memory up to ``shuffle.SEQUENTIAL_ENTRIES`` entries, into a temporary file beyond.
    """

    rereads = True

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[tuple[int, int], np.dtype[Any]]:
        """Return what there is to remember."""
        return shape, dtype

    def update(self, state: Any, block: NDArray[Any]) -> Any:
        """Return `state`."""
        return state

    def merge(self, first: Any, second: Any) -> Any:
        """Return `first`."""
        return first

    def finish(
        self, state: Any, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the singular values."""
        return (self.spectrum(state, reread, int(params["rand_seed"])),)

    def spectrum(self, state: Any, reread: Callable[[], Iterator[NDArray[Any]]], seed: int) -> Array:
        """Return the singular values of the null of one seed."""
        import dask.config

        shape, dtype = state
        stream = linalg.SpectrumStream()
        directory = dask.config.get("temporary-directory", None)

        def permuted() -> Iterator[NDArray[Any]]:
            return shuffle.permuted_blocks(shape, dtype, reread(), seed, directory)

        gathered = stream.start(shape, dtype)
        for block in permuted():
            gathered = stream.update(gathered, block)
        values: Array = stream.finish(gathered, permuted, {})[0]
        return values

    def workspace(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return no bytes while spans are read, and those of permutation and spectrum in finish."""
        return 0, shuffle.blocks_workspace(shape, dtype) + sum(linalg.SpectrumStream().workspace(shape, dtype))

    def route(self, shape: tuple[int, int], dtype: np.dtype[Any], params: Mapping[str, Any]) -> str:
        """Return how entries are permuted, and the route of the singular values that is tried first."""
        way = "shuffle" if math.prod(shape) <= shuffle.SEQUENTIAL_ENTRIES else "scatter through a temporary file"
        return f"{way}, {linalg.choose_route(shape, dtype, streamed=True)}"


class ReplicasStream(NullStream):
    """The twin of :func:`rand_replicas`."""

    def finish(
        self, state: Any, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return means and spreads over the replicas."""
        count, seed, spectrum = params["replicas"], int(params["rand_seed"]), np.asarray(params["esd"])
        _check_replicas(replicas=count)
        longer = max(state[0])
        drawn = (to_esd(self.spectrum(state, reread, seed + i), longer) for i in range(count))
        return _mean_and_spread(drawn, spectrum)

    def workspace(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return no bytes while spans are read, and those of one replica and the sums in finish."""
        state, finish = super().workspace(shape, dtype)
        return state, finish + 8 * 12 * min(shape)


@kernel(
    weights_rand_svals=Field(
        long_name="Singular values of the null",
        formula=r"\sigma_1 \le \dots \le \sigma_k \text{ of } W_r",
        reference="martin2021implicit",
        dims=("sval",),
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    blocks=NullStream(),
    workspace=_values_workspace,
    status=null_status,
)
def rand_singular_values(weights: ArrayLike, rand_seed: ArrayLike) -> Array:
    r"""Singular values of the shuffled matrix, ascending.

    Parameters
    ----------
    weights : array_like (..., m, n)
        Matrices, any floating dtype; shuffled in it, decomposed in float64.
    rand_seed : array_like of int (...,)
        Seeds of the permutations.

    Returns
    -------
    float64 array (..., k)
        In units of the weights, in error by at most the rounding unit of their dtype times the greatest one.

    Notes
    -----
    .. math:: \sigma_1 \le \dots \le \sigma_k \text{ of } W_r

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> rand_singular_values(np.diag([2.0, 2.0]), 42).tolist()
    [2.0, 2.0]
    """
    return linalg.singular_values(_shuffled(np.asarray(weights), rand_seed)).values


@kernel(
    weights_rand_lsvs=Field(
        long_name="Left singular vectors of the null",
        formula=r"U_r",
        reference="martin2021implicit",
        dims=("row", "sval"),
        persist=False,
        valid_range=(-1.0, 1.0),
        nan=_NON_FINITE,
    ),
    weights_rand_rsvs=Field(
        long_name="Right singular vectors of the null",
        formula=r"V_r",
        reference="martin2021implicit",
        dims=("col", "sval"),
        persist=False,
        valid_range=(-1.0, 1.0),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=_vectors_workspace,
)
def rand_singular_vectors(weights_rand: ArrayLike) -> tuple[Array, Array]:
    r"""Left and right singular vectors of the shuffled matrix, in the order of its ascending singular values.

    Parameters
    ----------
    weights_rand : array_like (..., m, n)
        Shuffled matrices.

    Returns
    -------
    weights_rand_lsvs : float64 array (..., m, k)
    weights_rand_rsvs : float64 array (..., n, k)
        Orthonormal columns with fixed signs.

    Notes
    -----
    .. math:: W_r = U_r \,\mathrm{diag}(\sigma)\, V_r^T

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> u, v = rand_singular_vectors(np.diag([3.0, 1.0]))
    >>> v.tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    lsvs, _, rsvs, *_ = linalg.svd(np.asarray(weights_rand))
    return lsvs, rsvs


def _end_field(title: str, formula: str) -> Field:
    return Field(title, formula, "martin2021implicit", valid_range=(0.0, math.inf), nan=_NON_FINITE)


@kernel(
    max_weights_rand_sval=_end_field("Greatest singular value of the null", r"\sigma_{\max}(W_r)"),
    version=1,
    workspace=scalars(1),
)
def max_weights_rand_sval(weights_rand_svals: ArrayLike) -> Array:
    r"""Greatest singular value of the shuffled matrix.

    Parameters
    ----------
    weights_rand_svals : array_like (..., k)
        Singular values of the null, ascending.

    Returns
    -------
    float64 array (...,)
        In units of the weights.

    Notes
    -----
    .. math:: \sigma_{\max}(W_r)

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(max_weights_rand_sval([1.0, 2.0]))
    2.0
    """
    return np.array(np.asarray(weights_rand_svals, np.float64)[..., -1])


@kernel(
    min_weights_rand_sval=_end_field("Smallest singular value of the null", r"\sigma_{\min}(W_r)"),
    version=1,
    workspace=scalars(1),
)
def min_weights_rand_sval(weights_rand_svals: ArrayLike) -> Array:
    r"""Smallest singular value of the shuffled matrix.

    Parameters
    ----------
    weights_rand_svals : array_like (..., k)
        Singular values of the null, ascending.

    Returns
    -------
    float64 array (...,)
        In units of the weights.

    Notes
    -----
    .. math:: \sigma_{\min}(W_r)

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(min_weights_rand_sval([1.0, 2.0]))
    1.0
    """
    return np.array(np.asarray(weights_rand_svals, np.float64)[..., 0])


@kernel(
    esd_rand=Field(
        long_name="Empirical spectral density of the null",
        formula=r"\lambda_i = \sigma_i(W_r)^2 / N",
        reference="martin2021implicit",
        dims=("sval",),
        persist=False,
        valid_range=(0.0, math.inf),
        nan=_NON_FINITE,
    ),
    version=1,
    workspace=spectra(0),
)
def esd_rand(weights_rand_svals: ArrayLike, greater_dim: ArrayLike) -> Array:
    r"""Eigenvalues of the correlation matrix of the shuffled matrix, ascending.

    Parameters
    ----------
    weights_rand_svals : array_like (..., k)
        Singular values of the null, ascending.
    greater_dim : array_like (...,)
        The greater dimension N of the matrix.

    Returns
    -------
    float64 array (..., k)
        In squared units of the weights.

    Notes
    -----
    .. math:: \lambda_i = \sigma_i(W_r)^2 / N

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> esd_rand([1.0, 2.0], 2).tolist()
    [0.5, 2.0]
    """
    return to_esd(weights_rand_svals, greater_dim)


@kernel(
    esd_rand_max=_end_field("Greatest eigenvalue of the null", r"\lambda_{\max}(W_r)"),
    version=1,
    workspace=scalars(1),
)
def esd_rand_max(esd_rand: ArrayLike) -> Array:
    r"""Greatest eigenvalue of the shuffled matrix.

    Parameters
    ----------
    esd_rand : array_like (..., k)
        Eigenvalues of the null, ascending.

    Returns
    -------
    float64 array (...,)
        In squared units of the weights.

    Notes
    -----
    .. math:: \lambda_{\max}(W_r)

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(esd_rand_max([0.5, 2.0]))
    2.0
    """
    return np.array(np.asarray(esd_rand, np.float64)[..., -1])


@kernel(
    esd_rand_min=_end_field("Smallest eigenvalue of the null", r"\lambda_{\min}(W_r)"),
    version=1,
    workspace=scalars(1),
)
def esd_rand_min(esd_rand: ArrayLike) -> Array:
    r"""Smallest eigenvalue of the shuffled matrix.

    Parameters
    ----------
    esd_rand : array_like (..., k)
        Eigenvalues of the null, ascending.

    Returns
    -------
    float64 array (...,)
        In squared units of the weights.

    Notes
    -----
    .. math:: \lambda_{\min}(W_r)

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(esd_rand_min([0.5, 2.0]))
    0.5
    """
    return np.array(np.asarray(esd_rand, np.float64)[..., 0])


def _mean_and_spread(drawn: Iterator[Array], esd: Array) -> tuple[Array, ...]:
    """Return means and sample standard deviations of spectra ``(..., k)``, of their ends and distances to `esd`."""
    sums: list[Array] = []
    count = 0
    for values in drawn:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
            distance = np.mean(np.abs(values - esd), axis=-1) / np.mean(esd, axis=-1)
            numbers = (values, values[..., -1], distance)
            if not count:
                sums = [part for number in numbers for part in (np.array(number), np.zeros_like(number))]
            count += 1
            for i, number in enumerate(numbers):  # Welford's sums, which lose no digits
                step = number - sums[2 * i]
                sums[2 * i] = sums[2 * i] + step / count
                sums[2 * i + 1] = sums[2 * i + 1] + step * (number - sums[2 * i])
    spread = [np.sqrt(squares / (count - 1)) for squares in sums[1::2]]
    return tuple(np.asarray(part) for pair in zip(sums[::2], spread, strict=True) for part in pair)


def _replica_field(title: str, formula: str, nan: str = _NON_FINITE, **more: Any) -> Field:
    reference = "martin2021implicit"
    return Field(title, formula, reference, persist=False, valid_range=(0.0, math.inf), nan=nan, **more)


_NO_MEAN = "the weights hold NaN or infinity, or are all zero"


@kernel(
    esd_rand_mean=_replica_field("Mean spectrum of the null", r"\frac{1}{R} \sum_r \lambda_i(W_r)", dims=("sval",)),
    esd_rand_std=_replica_field(
        "Spread of the spectrum of the null", r"\mathrm{std}_r\, \lambda_i(W_r)", dims=("sval",)
    ),
    esd_rand_max_mean=_replica_field("Mean greatest eigenvalue of the null", r"\frac{1}{R} \sum_r \lambda_{\max}(W_r)"),
    esd_rand_max_std=_replica_field("Spread of the greatest eigenvalue", r"\mathrm{std}_r\, \lambda_{\max}(W_r)"),
    w1_rand_distance_mean=_replica_field(
        "Mean distance from the null", r"\frac{1}{R} \sum_r W_1(\lambda, \lambda(W_r)) / \bar\lambda", _NO_MEAN
    ),
    w1_rand_distance_std=_replica_field(
        "Spread of the distance from the null", r"\mathrm{std}_r\, W_1(\lambda, \lambda(W_r)) / \bar\lambda", _NO_MEAN
    ),
    version=1,
    blocks=ReplicasStream(),
    check=_check_replicas,
    workspace=_replicas_workspace,
)
def rand_replicas(weights: ArrayLike, rand_seed: ArrayLike, esd: ArrayLike, *, replicas: int = 16) -> tuple[Array, ...]:
    r"""Mean and spread of the null over several permutations.

    Parameters
    ----------
    weights : array_like (..., m, n)
        Matrices, any floating dtype.
    rand_seed : array_like of int (...,)
        Seed of the first permutation, which is that of all other fields of the null; the others have the next ones.
    esd : array_like (..., k)
        Eigenvalues of the weights themselves.
    replicas : int
        Number of permutations R, from 2 on.

    Returns
    -------
    esd_rand_mean, esd_rand_std : float64 arrays (..., k)
        Of the i-th smallest eigenvalue, in squared units of the weights.
    esd_rand_max_mean, esd_rand_max_std : float64 arrays (...,)
        Of the greatest eigenvalue.
    w1_rand_distance_mean, w1_rand_distance_std : float64 arrays (...,)
        Of the relative Wasserstein distance between the eigenvalues and those of the null.

    Notes
    -----
    .. math:: \bar x = \frac{1}{R} \sum_r x_r, \quad
              \mathrm{std}_r\, x = \sqrt{\tfrac{1}{R - 1} \sum_r (x_r - \bar x)^2}

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> w = np.random.default_rng(0).standard_normal((20, 5))
    >>> mean, spread, *_ = rand_replicas(w, 42, np.ones(5), replicas=4)
    >>> bool(np.isclose(mean.sum(), np.square(w).sum() / 20)), bool((spread < 0.3).all())
    (True, True)
    """
    array, seeds = np.asarray(weights), np.asarray(rand_seed)
    longer = max(array.shape[-2:])
    _check_replicas(replicas=replicas)
    nulls = (_shuffled(array, seeds + i) for i in range(replicas))
    drawn = (to_esd(linalg.singular_values(null).values, longer) for null in nulls)
    return _mean_and_spread(drawn, np.asarray(esd, np.float64))
