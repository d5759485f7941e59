"""Definitions of the fields, written apart from the package: one matrix at a time, slow, in 50 digits where it helps.

``TABLE`` has an entry for every field of the registry: what it is, and what must not change it. Tests and benchmarks
run over it; a field without an entry fails a test. To add fields, write their definitions as a dictionary like
``NULL`` and join it to ``TABLE`` with :func:`_entries`.

``SLICE[field](w)`` is the value for one float64 matrix, ``NULL[field](w)`` that of a field that is judged by the
shuffled matrix, ``FITS[field](w)`` that of a field of a tail (``reference_tails.py``), ``MODEL[field](matrices)`` and
``MODEL_FITS[field](matrices)`` those for the slices of a model. Singular values come from LAPACK's dense
routine on the matrix scaled to order one; everything after them, and the moments, are in mpmath.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
from numpy.typing import NDArray
from reference_tails import TAILS, mean_and_skipped

from diffract_dask import testing

__all__ = ["FITS", "KNOWN_SPECTRA", "MODEL", "MODEL_FITS", "NULL", "SLICE", "TABLE", "Entry", "svals"]

Matrix = NDArray[np.float64]
mp = mpmath.mp.clone()
mp.dps = 50


def svals(w: Matrix) -> Matrix:
    """Return the singular values, ascending; NaN if an entry is not finite."""
    k = min(w.shape)
    if not np.isfinite(w).all():
        return np.full(k, np.nan)
    exponent = math.frexp(float(np.abs(w).max()))[1]
    return np.ldexp(np.linalg.svd(np.ldexp(w, -exponent), compute_uv=False)[::-1], exponent)


def _finite(w: Matrix) -> list[Any]:
    return [mp.mpf(float(x)) for x in w.ravel() if math.isfinite(x)]


def _moment(w: Matrix, order: int) -> Any:
    x = _finite(w)
    mean = mp.fsum(x) / len(x)
    return mp.fsum((value - mean) ** order for value in x) / len(x)


def _kurtosis(w: Matrix) -> float:
    variance = _moment(w, 2)
    return float(_moment(w, 4) / variance**2 - 3) if variance > 0 else math.nan


def _frob(w: Matrix) -> Any:
    return mp.sqrt(mp.fsum(x**2 for x in _finite(w))) if np.isfinite(w).all() else mp.nan


def _mp_svals(w: Matrix) -> list[Any]:
    return [mp.mpf(float(s)) for s in svals(w)]


def _effective_rank(w: Matrix) -> float:
    s = _mp_svals(w)
    total = mp.fsum(s)
    if not total > 0:
        return math.nan
    return float(mp.exp(-mp.fsum(x / total * mp.log(x / total) for x in s if x > 0)))


def _stable_rank(w: Matrix) -> float:
    greatest = _mp_svals(w)[-1]
    return float((_frob(w) / greatest) ** 2) if greatest > 0 else math.nan


def _schatten_4(w: Matrix) -> Any:
    return mp.fsum(s**4 for s in _mp_svals(w)) ** 0.25


def _participation(w: Matrix) -> float:
    norm = _schatten_4(w)
    return float((_frob(w) / norm) ** 4) if norm > 0 else math.nan


def _hard_rank(w: Matrix) -> float:
    s = _mp_svals(w)
    return math.nan if mp.isnan(s[-1]) else float(sum(x**2 > mp.mpf(1e-5) * s[-1] ** 2 for x in s))


def _esd(w: Matrix) -> Matrix:
    return np.array([float(s**2 / max(w.shape)) for s in _mp_svals(w)])


SLICE: dict[str, Callable[[Matrix], Any]] = {
    "greater_dim": lambda w: max(w.shape),
    "lower_dim": lambda w: min(w.shape),
    "aspect_ratio": lambda w: max(w.shape) / min(w.shape),
    "frob_norm": lambda w: float(_frob(w)),
    "weights_mean": lambda w: float(mp.fsum(_finite(w)) / len(_finite(w))),
    "weights_std": lambda w: float(mp.sqrt(_moment(w, 2))),
    "weights_min": lambda w: min(x for x in w.ravel().tolist() if math.isfinite(x)),
    "weights_max": lambda w: max(x for x in w.ravel().tolist() if math.isfinite(x)),
    "weights_absmax": lambda w: max(abs(x) for x in w.ravel().tolist() if math.isfinite(x)),
    "zero_fraction": lambda w: sum(x == 0 for x in _finite(w)) / len(_finite(w)),
    "nonfinite_fraction": lambda w: 1 - len(_finite(w)) / w.size,
    "weights_kurtosis": _kurtosis,
    "weights_svals": svals,
    "max_weights_sval": lambda w: svals(w)[-1],
    "min_weights_sval": lambda w: svals(w)[0],
    "esd": _esd,
    "esd_max": lambda w: _esd(w)[-1],
    "esd_min": lambda w: _esd(w)[0],
    "nuclear_norm": lambda w: float(mp.fsum(_mp_svals(w))),
    "l2_norm": lambda w: svals(w)[-1],
    "effective_rank": _effective_rank,
    "stable_rank": _stable_rank,
    "hard_rank": _hard_rank,
    "schatten_4_norm": lambda w: float(_schatten_4(w)),
    "participation_ratio": _participation,
}


# The null and the laws of noise

TRACY_WIDOM_UPPER_HALF_PERCENT = 2.42232658589634  # where F_1 is 0.995, by a determinant in 30 digits


def _null(w: Matrix, seed: int = 42) -> Matrix:
    """Return the permutation as Diffract writes it."""
    index = np.arange(w.size)
    np.random.default_rng(seed).shuffle(index)
    return w.copy().reshape(-1)[index].reshape(w.shape)


def _esd_rand(w: Matrix, seed: int = 42) -> Matrix:
    return _esd(_null(w, seed))


def mp_law(x: Any, ratio: Any, scale: Any = 1) -> Any:
    """Return the Marchenko–Pastur distribution function in its usual form."""
    r, z = mp.mpf(ratio), mp.mpf(x) / mp.mpf(scale) ** 2
    a, b = (1 - mp.sqrt(r)) ** 2, (1 + mp.sqrt(r)) ** 2
    if z <= a or z >= b:
        return mp.mpf(z >= b)
    first = mp.sqrt((z - a) * (b - z)) + (1 + r) * mp.asin((2 * z - a - b) / (b - a)) + mp.pi * r
    return (first - (1 - r) * mp.asin(((a + b) * z - 2 * a * b) / (z * (b - a)))) / (2 * mp.pi * r)


def _noise(w: Matrix) -> tuple[float, float, float]:
    """Return the edges of the bulk, the upper one first, and the scale of the noise."""
    finite = np.isfinite(w).all()
    if not finite or min(w.shape) == 1 or w.min() == w.max():
        return math.nan, math.nan, math.nan
    long, short = mp.mpf(max(w.shape)), mp.mpf(min(w.shape))
    variance, null = _moment(w, 2), [mp.mpf(float(x)) for x in _esd_rand(w)]
    edge = variance * (1 + mp.sqrt(short / long)) ** 2
    if any(x > edge for x in null):
        variance = mp.fsum(x for x in null if x <= edge) / short
        edge = variance * (1 + mp.sqrt(short / long)) ** 2
    lower = variance * (1 - mp.sqrt(short / long)) ** 2
    return float(min(edge, mp.mpf(float(_esd(w)[-1])))), float(lower), float(mp.sqrt(variance))


def _mp_ks(w: Matrix) -> float:
    upper, lower, scale = _noise(w)
    inside = sorted(x for x in _esd(w) if lower <= x < upper)
    if not inside:
        return math.nan
    n, ratio = len(inside), mp.mpf(min(w.shape)) / max(w.shape)
    law = [mp_law(x, ratio, scale) / mp_law(upper, ratio, scale) for x in inside]
    return float(max(max((i + 1) / mp.mpf(n) - g, g - i / mp.mpf(n)) for i, g in enumerate(law)))


def _count(w: Matrix, bound: float) -> float:
    return math.nan if math.isnan(bound) else float(sum(x > bound for x in _esd(w)))


def _concentration(w: Matrix) -> float:
    upper, lower, _ = _noise(w)
    return math.nan if math.isnan(upper) else sum(lower <= x <= upper for x in _esd(w)) / min(w.shape)


def _presence(w: Matrix) -> float:
    (upper, lower, _), spectrum = _noise(w), _esd(w)
    if math.isnan(upper):
        return math.nan
    width = spectrum[-1] - spectrum[0]
    return 1.0 if upper - lower >= width else max(0.0, (upper - lower) / width)


def _tw_bound(w: Matrix) -> float:
    long, short, scale = max(w.shape), min(w.shape), _noise(w)[2]
    if math.isnan(scale):
        return math.nan
    both = math.sqrt(long - 1) + math.sqrt(short)
    spread = both * (1 / math.sqrt(long - 1) + 1 / math.sqrt(short)) ** (1 / 3)
    return scale**2 / long * (both**2 + spread * TRACY_WIDOM_UPPER_HALF_PERCENT)


def _w1(w: Matrix, seed: int = 42) -> float:
    mine, null = _esd(w), _esd_rand(w, seed)
    if not np.isfinite(mine).all() or not mine.any():
        return math.nan
    return float(mp.fsum(abs(mp.mpf(a) - mp.mpf(b)) for a, b in zip(mine, null, strict=True)) / mp.fsum(mine))


def _over_replicas(value: Callable[[Matrix, int], Any], ddof: int | None = None) -> Callable[[Matrix], Any]:
    """Return the mean of the value over 16 seeds, or its standard deviation."""

    def reduced(w: Matrix) -> Any:
        drawn = np.array([value(w, 42 + i) for i in range(16)])
        return drawn.mean(axis=0) if ddof is None else drawn.std(axis=0, ddof=ddof)

    return reduced


NULL: dict[str, Callable[[Matrix], Any]] = {
    "rand_seed": lambda w: 42,
    "weights_rand": _null,
    "weights_rand_svals": lambda w: svals(_null(w)),
    "max_weights_rand_sval": lambda w: svals(_null(w))[-1],
    "min_weights_rand_sval": lambda w: svals(_null(w))[0],
    "esd_rand": _esd_rand,
    "esd_rand_max": lambda w: _esd_rand(w)[-1],
    "esd_rand_min": lambda w: _esd_rand(w)[0],
    "esd_rand_mean": _over_replicas(_esd_rand),
    "esd_rand_std": _over_replicas(_esd_rand, 1),
    "esd_rand_max_mean": _over_replicas(lambda w, seed: _esd_rand(w, seed)[-1]),
    "esd_rand_max_std": _over_replicas(lambda w, seed: _esd_rand(w, seed)[-1], 1),
    "w1_rand_distance_mean": _over_replicas(_w1),
    "w1_rand_distance_std": _over_replicas(_w1, 1),
    "mp_esd_max": lambda w: _noise(w)[0],
    "mp_esd_min": lambda w: _noise(w)[1],
    "mp_bulk_std": lambda w: _noise(w)[2],
    "mp_sval_max": lambda w: math.sqrt(_noise(w)[0] * max(w.shape)),
    "mp_ks": _mp_ks,
    "mp_concentration": _concentration,
    "mp_presence": _presence,
    "mp_num_spikes": lambda w: _count(w, _noise(w)[0]),
    "mp_soft_rank": lambda w: _noise(w)[0] / _esd(w)[-1] if _esd(w)[-1] > 0 else math.nan,
    "tw_esd_bound": _tw_bound,
    "tw_num_spikes": lambda w: _count(w, _tw_bound(w)),
    "w1_rand_distance": _w1,
}


def _logs(norms: Sequence[Any]) -> list[Any]:
    return [mp.log10(x) for x in norms if x > 0]


def _mean(values: Sequence[Any]) -> float:
    return float(mp.fsum(values) / len(values)) if values else math.nan


def _sum(values: Sequence[Any]) -> float:
    return float(mp.fsum(values)) if values else math.nan


MODEL: dict[str, Callable[[Sequence[Matrix]], float]] = {
    "log_norm": lambda model: _mean([2 * x for x in _logs([_frob(w) for w in model])]),
    "log_spectral_norm": lambda model: _mean([2 * x for x in _logs([_mp_svals(w)[-1] for w in model])]),
    "log_prod_frob_norm": lambda model: _sum(_logs([_frob(w) for w in model])),
    "log_prod_spectral_norm": lambda model: _sum(_logs([_mp_svals(w)[-1] for w in model])),
    "param_norm": lambda model: _sum([_frob(w) ** 2 for w in model]),
}


# Heavy tails: of the spectrum above what counts as zero


def _doubt(w: Matrix) -> Any:
    """Return by how much float64 weights, and LAPACK as `linalg.relative_error` states it, may move singular values."""
    k = min(w.shape)
    lapack = (20 + 2 * mp.sqrt(k) + mp.sqrt(max(w.shape)) / 16 + k / mp.mpf(4)) * mp.mpf(2) ** -52 * _mp_svals(w)[-1]
    aligned = max(w.shape) * mp.mpf(2) ** -53 * _mp_svals(w)[-1]
    return mp.mpf(2) ** -53 * _frob(w) + lapack + aligned


def _numerical_rank(w: Matrix) -> float:
    return sum(s > _doubt(w) for s in _mp_svals(w)) if np.isfinite(w).all() else math.nan


def _esd_zero(w: Matrix) -> float:
    doubt = _doubt(w)
    return float(max(doubt**2 / max(w.shape), mp.mpf(2) ** -1022)) if doubt > 0 else float(doubt)


def _of_spectrum(definition: Callable[[Matrix, float], float]) -> Callable[[Matrix], float]:
    return lambda w: definition(_esd(w), _esd_zero(w))


FITS: dict[str, Callable[[Matrix], float]] = {
    "numerical_rank": _numerical_rank,
    **{f"{p}_bounded": lambda w, p=p: 0.0 * FITS[f"{p}_ks"](w) for p in ("pl", "expon")},
    "esd_zero": _esd_zero,
    **{name: _of_spectrum(definition) for name, definition in TAILS.items()},
}


def _log10(value: float) -> float:
    return math.nan if math.isnan(value) else float(mp.log10(value))


def _mean_of(name: str, log: bool = False) -> dict[str, Callable[[Sequence[Matrix]], float]]:
    def found(model: Sequence[Matrix]) -> tuple[float, int]:
        values = [FITS[name](w) for w in model]
        return mean_and_skipped([_log10(value) for value in values] if log else values)

    return {f"model_{name}": lambda model: found(model)[0], f"model_{name}_skipped": lambda model: found(model)[1]}


MODEL_FITS: dict[str, Callable[[Sequence[Matrix]], float]] = {
    **_mean_of("pl_alpha"),
    **_mean_of("pl_alpha_weighted"),
    **_mean_of("pl_alpha_norm", log=True),
    **_mean_of("tpl_alpha_norm", log=True),
}


# The table


@dataclass(frozen=True)
class Entry:
    """How one field is judged.

    Attributes
    ----------
    value : callable, optional
        The definition: of one matrix, or of the matrices of a model. None: judged by what it rebuilds.
    power : int, optional
        p, where weights that are c > 0 times as large have a value that is c**p times as large. None: no such p.
    kept_by : frozenset of str
        What leaves the value as it is, of ``transpose``, ``permutation`` (of rows and of columns), ``rotation``.
    float32 : float
        How far the value from float32 weights may be from that of the same weights in float64, relative to its size
        and to the spectral norm to the power p.
    level : str
        ``slice`` or ``model``.
    own_size : bool
        Differences are judged by the size of the value alone, not by the spectral norm to the power p too.
    """

    value: Callable[[Any], Any] | None
    power: int | None = 0
    kept_by: frozenset[str] = frozenset()
    float32: float = 1e-6
    level: str = "slice"
    own_size: bool = False


_ANY = frozenset({"transpose", "permutation", "rotation"})
_PLACES = frozenset({"transpose", "permutation"})
_CLOSED, _SOLVED = ("pl", "expon"), ("tpl", "lognormal")  # families whose estimates are in closed form, and others


def _entries(
    names: Iterable[str],
    values: dict[str, Any],
    power: int | None = 0,
    kept_by: frozenset[str] = frozenset(),
    float32: float = 1e-6,
    level: str = "slice",
    own_size: bool = False,
) -> dict[str, Entry]:
    return {name: Entry(values.get(name), power, kept_by, float32, level, own_size) for name in names}


TABLE: dict[str, Entry] = {
    # shapes and entries
    **_entries(("greater_dim", "lower_dim", "aspect_ratio"), SLICE, 0, _ANY, 0.0),
    **_entries(("frob_norm",), SLICE, 1, _ANY, 1e-13),
    **_entries(
        ("weights_mean", "weights_std", "weights_min", "weights_max", "weights_absmax"), SLICE, 1, _PLACES, 1e-13
    ),
    **_entries(("zero_fraction", "nonfinite_fraction"), SLICE, 0, _PLACES, 0.0),
    **_entries(("weights_kurtosis",), SLICE, 0, _PLACES, 1e-12),
    # spectrum, norms, ranks
    **_entries(
        ("weights_svals", "max_weights_sval", "min_weights_sval", "nuclear_norm", "l2_norm"), SLICE, 1, _ANY, 1e-6
    ),
    **_entries(("weights_svals_error", "weights_svals_route"), {}, None),
    **_entries(("weights_lsvs", "weights_rsvs"), {}, None),
    **_entries(("esd", "esd_max", "esd_min"), SLICE, 2, _ANY),
    **_entries(("schatten_4_norm",), SLICE, 1, _ANY, 1e-12),
    **_entries(("participation_ratio",), SLICE, 0, _ANY, 1e-12),
    **_entries(("effective_rank", "stable_rank", "hard_rank"), SLICE, 0, _ANY, 1e-5),
    # the null: where entries go depends on where they are
    **_entries(("rand_seed",), NULL, 0, _ANY, 0.0),
    **_entries(("weights_rand",), NULL, 1, frozenset(), 0.0),
    **_entries(("weights_rand_lsvs", "weights_rand_rsvs"), {}, None),
    **_entries(("weights_rand_svals", "max_weights_rand_sval", "min_weights_rand_sval"), NULL, 1),
    **_entries(("esd_rand", "esd_rand_max", "esd_rand_min"), NULL, 2),
    **_entries(("esd_rand_mean", "esd_rand_std", "esd_rand_max_mean", "esd_rand_max_std"), NULL, 2),
    **_entries(("w1_rand_distance", "w1_rand_distance_mean", "w1_rand_distance_std"), NULL, 0),
    # noise
    **_entries(("mp_bulk_std", "mp_sval_max"), NULL, 1),
    **_entries(("mp_esd_max", "mp_esd_min", "tw_esd_bound"), NULL, 2),
    **_entries(("mp_ks", "mp_concentration", "mp_presence", "mp_soft_rank"), NULL, 0, frozenset(), 1e-5),
    **_entries(("mp_num_spikes", "tw_num_spikes"), NULL, 0, frozenset(), 0.0),
    # heavy tails; what counts as zero depends on the dtype and on the route of the singular values, nothing else does
    **_entries(("esd_zero",), FITS, 2, frozenset(), math.inf, own_size=True),
    **_entries(("numerical_rank",), FITS, 0, _ANY, 0.0),
    **_entries([f"{p}_{n}" for p in (*_CLOSED, *_SOLVED) for n in ("n_used", "n_tail")], FITS, 0, _ANY, 0.0),
    **_entries(("pl_bounded", "expon_bounded"), FITS, 0, _ANY, 0.0),
    **_entries([f"{p}_esd_xmin" for p in (*_CLOSED, *_SOLVED)], FITS, 2, _ANY, 1e-6, own_size=True),
    **_entries([f"{p}_{n}" for p in _CLOSED for n in ("ks", "ks_two_sided")], FITS, 0, _ANY, 1e-6),
    **_entries([f"{p}_{n}" for p in _SOLVED for n in ("ks", "ks_two_sided")], FITS, 0, _ANY, 1e-5),
    **_entries(("pl_alpha", "pl_alpha_error", "expon_scale"), FITS, 0, _ANY, 1e-5),
    **_entries(("expon_lambda", "expon_lambda_error"), FITS, -2, _ANY, 1e-5, own_size=True),
    **_entries(("tpl_alpha", "tpl_alpha_error", "tpl_scale", "lognormal_sigma"), FITS, 0, _ANY, 1e-4),
    **_entries(("tpl_lambda", "tpl_lambda_error"), FITS, -2, _ANY, 1e-4),
    **_entries([f"{p}_concentration" for p in ("pl", "tpl", "expon")], FITS, 0, _ANY, 0.0),
    **_entries([f"{p}_presence" for p in ("pl", "tpl", "expon")], FITS, 0, _ANY, 1e-6),
    **_entries(
        [f"pl_{p}_{n}" for p in ("expon", "lognormal", "tpl") for n in ("ratio", "p_value")], FITS, 0, _ANY, 1e-4
    ),
    **_entries(("detx_num",), FITS, 0, _ANY, 0.0),
    **_entries(("detx_esd_xmin",), FITS, 2, _ANY, 1e-6, own_size=True),
    # a logarithm of the scale, or a power of it that is itself estimated
    **_entries(("lognormal_mu", "pl_alpha_weighted", "pl_alpha_norm", "tpl_alpha_norm"), FITS, None, _ANY, 1e-4),
    # shares of random samples
    **_entries([f"{p}_p_value" for p in ("pl", "tpl", "expon")], {}, 0, _ANY, 1e-3),
    # models: logarithms move by a constant, and their sum by as many as there are slices
    **_entries(("param_norm",), MODEL, 2, _ANY, 1e-12, "model"),
    **_entries(
        ("log_norm", "log_spectral_norm", "log_prod_frob_norm", "log_prod_spectral_norm"),
        MODEL,
        None,
        _ANY,
        1e-6,
        "model",
    ),
    **_entries([name for name in MODEL_FITS if name.endswith("_skipped")], MODEL_FITS, 0, _ANY, 0.0, "model"),
    **_entries(("model_pl_alpha",), MODEL_FITS, 0, _ANY, 1e-5, "model"),
    **_entries(
        ("model_pl_alpha_weighted", "model_pl_alpha_norm", "model_tpl_alpha_norm"),
        MODEL_FITS,
        None,
        _ANY,
        1e-4,
        "model",
    ),
}


def _hadamard(order: int) -> Matrix:
    w = np.ones((1, 1))
    for _ in range(order):
        w = np.block([[w, w], [w, -w]])
    return w


def _tridiagonal(n: int) -> Matrix:
    return 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)


def _mp_spectrum(w: Matrix) -> Matrix:
    with mp.workdps(60):
        return np.array(sorted(float(x) for x in mp.svd_r(mp.matrix(w.tolist()), compute_uv=False)))


def _hilbert_spectrum(n: int) -> Matrix:
    with mp.workdps(60):
        exact = mp.matrix([[mp.mpf(1) / (i + j + 1) for j in range(n)] for i in range(n)])
        return np.array(sorted(float(abs(x)) for x in mp.eigsy(exact, eigvals_only=True)))


KNOWN_SPECTRA: dict[str, tuple[Matrix, Callable[[], Matrix]]] = {
    "hadamard": (_hadamard(4), lambda: np.full(16, 4.0)),
    "tridiagonal": (
        _tridiagonal(12),
        lambda: np.array([float(2 - 2 * mp.cos(k * mp.pi / 13)) for k in range(1, 13)]),
    ),
    "hilbert": (testing.hilbert(9), lambda: _hilbert_spectrum(9)),
    "kahan": (testing.kahan(12), lambda: _mp_spectrum(testing.kahan(12))),
}
"""Matrices whose singular values are known: in closed form, or in 60 digits."""
