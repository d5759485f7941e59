"""Synthetic matrices and models whose spectra are known, files to hold them, and Hypothesis strategies.

Public: use it to test kernels, sources and pipelines of your own. Needs NumPy only; the strategies
(:func:`matrices`, :func:`models`) import Hypothesis when they are called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask.errors import did_you_mean

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "bestiary",
    "encode",
    "frank",
    "hilbert",
    "kahan",
    "lauchli",
    "matrices",
    "matrix_with_spectrum",
    "models",
    "power_law_svals",
    "random_model",
    "write_safetensors",
]

SAFETENSORS_DTYPES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Names of dtypes, ours to those in a safetensors header."""


def matrix_with_spectrum(
    svals: ArrayLike, m: int, n: int, seed: int | Sequence[int] = 0, dtype: str = "float64"
) -> NDArray[Any]:
    """Return an m × n matrix with the given singular values and random singular vectors.

    Parameters
    ----------
    svals : array_like (r,)
        Singular values, in any order; those beyond `r` up to min(m, n) are zero.
    m, n : int
        Rows and columns.
    seed : int or sequence of int
        Of the singular vectors, which are uniformly distributed.
    dtype : str
        The result is rounded to it; the singular values move by up to ε(dtype)·σ₁·√min(m, n).

    Raises
    ------
    ValueError
        There are more singular values than min(m, n).

    Examples
    --------
    >>> w = matrix_with_spectrum([3.0, 2.0], 5, 4)
    >>> np.linalg.svd(w, compute_uv=False).round(12) + 0.0
    array([3., 2., 0., 0.])
    """
    s = np.asarray(svals, dtype=np.float64)
    if s.ndim != 1 or s.size > min(m, n):
        raise ValueError(f"svals has shape {s.shape}; expected one axis of at most min({m}, {n}) = {min(m, n)} values")
    rng = np.random.default_rng(seed)
    u, v = (_orthonormal(rng, rows, s.size) for rows in (m, n))
    return ((u * s) @ v.T).astype(dtype)


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float64]:
    q, r = np.linalg.qr(rng.standard_normal((rows, columns)))
    signs = np.where(np.diagonal(r) < 0, -1.0, 1.0)  # without this the columns are not uniformly distributed
    return np.asarray(q * signs, dtype=np.float64)


def power_law_svals(k: int, exponent: float = 1.0, largest: float = 1.0) -> NDArray[np.float64]:
    """Return `k` ascending singular values ``largest * i**-exponent``, i = k … 1.

    Examples
    --------
    >>> power_law_svals(4)
    array([0.25      , 0.33333333, 0.5       , 1.        ])
    """
    return largest * np.arange(k, 0, -1, dtype=np.float64) ** -exponent


def lauchli(n: int = 2, e: float = 1e-9) -> NDArray[np.float64]:
    """Return Läuchli's (n + 1) × n matrix: a row of ones above ``e`` times the identity.

    Notes
    -----
    Its singular values are :math:`\\sqrt{n + e^2}` once and :math:`e`, n - 1 times. In float64 with ``e = 1e-9``
    the Gram matrix rounds to one of rank 1, so that a method which forms it loses all the small ones.

    Examples
    --------
    >>> lauchli(2, 0.5)
    array([[1. , 1. ],
           [0.5, 0. ],
           [0. , 0.5]])
    """
    return np.vstack([np.ones((1, n)), e * np.eye(n)])


def hilbert(n: int) -> NDArray[np.float64]:
    """Return the n × n Hilbert matrix, 1 / (i + j + 1): symmetric, positive definite, condition about e^(3.5 n).

    Examples
    --------
    >>> hilbert(2)
    array([[1.        , 0.5       ],
           [0.5       , 0.33333333]])
    """
    i = np.arange(n, dtype=np.float64)
    return np.asarray(1.0 / (i[:, None] + i + 1.0), dtype=np.float64)


def kahan(n: int, theta: float = 1.2) -> NDArray[np.float64]:
    """Return Kahan's n × n upper triangular matrix, whose smallest singular value no diagonal entry shows.

    Notes
    -----
    Row i is :math:`s^i (0, …, 0, 1, -c, …, -c)` with :math:`s = \\sin θ`, :math:`c = \\cos θ`.

    Examples
    --------
    >>> kahan(2, np.pi / 2).round(12) + 0.0
    array([[1., 0.],
           [0., 1.]])
    """
    rows = np.triu(np.full((n, n), -np.cos(theta)), 1) + np.eye(n)
    return np.asarray(np.sin(theta) ** np.arange(n)[:, None] * rows, dtype=np.float64)


def frank(n: int) -> NDArray[np.float64]:
    """Return Frank's n × n upper Hessenberg matrix, whose determinant is 1 and whose small values are delicate.

    Examples
    --------
    >>> frank(3)
    array([[3., 2., 1.],
           [2., 2., 1.],
           [0., 1., 1.]])
    """
    i = np.arange(1.0, n + 1)
    return np.where(i[None, :] >= i[:, None] - 1, n + 1.0 - np.maximum(i[:, None], i[None, :]), 0.0)


def bestiary(dtype: str = "float64", n: int = 10) -> dict[str, NDArray[Any]]:
    """Return matrices on which numerics break, by name, rounded to a stored dtype.

    Läuchli's, Hilbert's, Kahan's, Frank's; geometric and clustered spectra of condition 1 to 1e16; exact low rank,
    graded rows, constant, zero, identity, orthogonal; scales of 1e±30 and 1e±300, subnormal numbers, entries of very
    different size; one row, one column, wide. What the dtype cannot hold is left out.

    Parameters
    ----------
    dtype : str
        A NumPy dtype name, or ``"bfloat16"`` (needs ml_dtypes).
    n : int
        Smaller side of most of them.

    Examples
    --------
    >>> sorted(set(bestiary()) - set(bestiary("float32")))
    ['mixed', 'scale 1e-300', 'scale 1e300', 'subnormal']
    """
    if dtype == "bfloat16":
        import ml_dtypes

        kind = np.dtype(ml_dtypes.bfloat16)
    else:
        kind = np.dtype(dtype)
    rng = np.random.default_rng(7)
    g = rng.standard_normal((n + 4, n))
    made = {
        "lauchli": lauchli(n, 1e-9),
        "hilbert": hilbert(n),
        "kahan": kahan(n),
        "frank": frank(n),
        "rank 3": (rng.integers(-5, 6, (n + 4, 3)) @ rng.integers(-5, 6, (3, n))).astype(np.float64),
        "graded rows": g * np.logspace(0, -7, n + 4)[:, None],
        "graded columns": g * np.logspace(0, -12, n),
        "constant": np.full((n + 2, n), 0.7),
        "zero": np.zeros((n, n - 1)),
        "identity": np.eye(n),
        "orthogonal": matrix_with_spectrum(np.ones(n), n, n),
        "offset": 1.0 + 1e-3 * g,
        "one large": np.where(np.arange(g.size).reshape(g.shape) == 7, 1e4, g),
        "mixed": g * 10.0 ** rng.integers(-150, 150, g.shape),
        "scale 1e30": 1e30 * g,
        "scale 1e-30": 1e-30 * g,
        "scale 1e300": 1e300 * g,
        "scale 1e-300": 1e-300 * g,
        "float32 subnormal": 1e-42 * g,
        "subnormal": 1e-312 * g,
        "row": g[:1],
        "column": g[:, :1],
        "entry": g[:1, :1],
        "wide": g.T.copy(),
    }
    for power in (0, 2, 4, 8, 12, 16):
        made[f"geometric 1e{power}"] = matrix_with_spectrum(np.logspace(0, -power, n), n + 3, n, power)
        made[f"clustered 1e{power}"] = matrix_with_spectrum([*[1.0] * (n // 2), *[10.0**-power] * (n // 2)], n, n)
    with np.errstate(all="ignore"):
        rounded = {name: w.astype(kind) for name, w in made.items()}
        held = {name: np.isfinite(w.astype(np.float64)).all() for name, w in rounded.items()}
    lost = {name for name, w in made.items() if w.any() and not rounded[name].any()}
    return {name: w for name, w in rounded.items() if held[name] and name not in lost}


def random_model(
    shapes: Mapping[str, Sequence[int]] | Iterable[Sequence[int]],
    seed: int = 0,
    dtype: str = "float32",
    spectrum: Callable[[int], ArrayLike] | None = None,
) -> dict[str, NDArray[Any]]:
    """Return a model as a dict of arrays.

    Parameters
    ----------
    shapes : mapping of name to shape, or iterable of shapes
        Unnamed parameters are called ``layers.0.weight``, ``layers.1.weight``, …
    seed : int
        Each parameter has a stream of its own, so that adding one leaves the others as they were.
    dtype : str
        A NumPy dtype name.
    spectrum : callable, optional
        ``k -> singular values`` of every parameter with two axes or more, read as dimension 0 × the rest.
        Default: independent Gaussian entries with variance 1 / (entries per row), one-axis parameters included.

    Examples
    --------
    >>> model = random_model([(8, 4), (3, 8)], spectrum=power_law_svals)
    >>> {name: w.shape for name, w in model.items()}
    {'layers.0.weight': (8, 4), 'layers.1.weight': (3, 8)}
    >>> float(np.linalg.norm(model["layers.0.weight"], 2).round(6))
    1.0
    """
    if not isinstance(shapes, Mapping):
        shapes = {f"layers.{i}.weight": shape for i, shape in enumerate(shapes)}
    model: dict[str, NDArray[Any]] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        shape = tuple(shape)
        if spectrum is not None and len(shape) > 1:
            rows, cols = shape[0], int(np.prod(shape[1:]))
            matrix = matrix_with_spectrum(spectrum(min(rows, cols)), rows, cols, [seed, i], dtype)
            model[name] = matrix.reshape(shape)
        else:
            per_row = max(1, int(np.prod(shape[1:])))
            entries = np.asarray(np.random.default_rng([seed, i]).standard_normal(shape))
            model[name] = np.asarray(entries / np.sqrt(per_row), dtype=dtype)
    return model


def encode(array: ArrayLike, dtype: str) -> NDArray[Any]:
    """Return `array` as a file would hold it: rounded to `dtype`, as its codes where NumPy lacks the type.

    Parameters
    ----------
    array : array_like
        Real values.
    dtype : str
        A NumPy dtype name, ``"bfloat16"`` (uint16 codes), ``"float8_e4m3fn"`` or ``"float8_e5m2"`` (uint8 codes).

    Raises
    ------
    ValueError
        The dtype is unknown.

    Notes
    -----
    To nearest, ties to even. Beyond the largest finite value: infinity, and NaN in E4M3, which has no infinity.

    Examples
    --------
    >>> encode([1.0, -2.0], "bfloat16")
    array([16256, 49152], dtype=uint16)
    >>> encode([1.0, 448.0], "float8_e4m3fn")
    array([ 56, 126], dtype=uint8)
    """
    if dtype not in SAFETENSORS_DTYPES:
        raise ValueError(f"no dtype {dtype!r}; known are {', '.join(SAFETENSORS_DTYPES)}.{_near(dtype)}")
    if dtype == "bfloat16":
        return _bfloat16(np.asarray(array, dtype=np.float32))
    if dtype.startswith("float8"):
        return _float8(np.asarray(array, dtype=np.float64), dtype)
    return np.ascontiguousarray(np.asarray(array).astype(np.dtype(dtype).newbyteorder("<")))


def _near(dtype: str) -> str:
    return did_you_mean(dtype, SAFETENSORS_DTYPES)


def _bfloat16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = x.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    # adding to a NaN's bits could carry into the sign; keep its sign and set the quiet bit
    quiet = ((bits >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16) | np.uint16(0x7FC0)
    return np.where(np.isnan(x), quiet, rounded)


@cache
def _float8_values(dtype: str) -> NDArray[np.float64]:
    """Return the finite values of the codes 0, 1, 2, …, ascending."""
    mantissa_bits, bias, finite = (3, 7, 0x7F) if dtype == "float8_e4m3fn" else (2, 15, 0x7C)
    codes = np.arange(finite)
    exponent, mantissa = codes >> mantissa_bits, codes & (2**mantissa_bits - 1)
    significand = mantissa / 2**mantissa_bits + (exponent > 0)
    return np.asarray(np.ldexp(significand, np.maximum(exponent, 1) - bias), dtype=np.float64)


def _float8(x: NDArray[np.float64], dtype: str) -> NDArray[np.uint8]:
    values = _float8_values(dtype)
    size = np.abs(x)
    above = np.searchsorted(values, size).clip(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    with np.errstate(invalid="ignore"):
        up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
        # what rounds past the largest finite value would be the next code: NaN in E4M3, infinity in E5M2
        step = values[-1] - values[-2]
        tie_up = (len(values) - 1) % 2 == 1
        over = (size > values[-1] + step / 2) | ((size == values[-1] + step / 2) & tie_up)
    codes = np.where(up, above, above - 1)
    codes = np.where(over, 0x7F if dtype == "float8_e4m3fn" else 0x7C, codes)
    codes = np.where(np.isnan(x), 0x7F if dtype == "float8_e4m3fn" else 0x7E, codes)
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def write_safetensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: str | Mapping[str, str] | None = None,
) -> Path:
    """Write arrays to a safetensors file, in the order given.

    Parameters
    ----------
    path : path
        Replaced if it exists.
    arrays : mapping of name to array_like
    metadata : mapping of str to str, optional
        The header's ``__metadata__``.
    dtype : str or mapping of name to str, optional
        Stored dtype of all arrays, or of those named; see :func:`encode`. Default: as they are.

    Returns
    -------
    Path

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_safetensors(f"{folder}/m.safetensors", {"w": np.eye(2)}, dtype="bfloat16")
    ...     path.read_bytes()[-8:].hex()
    '803f00000000803f'
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    stored: list[NDArray[Any]] = []
    offset = 0
    for name, value in arrays.items():
        own = np.asarray(value).dtype.name
        asked = own if dtype is None else dtype if isinstance(dtype, str) else dtype.get(name, own)
        raw = encode(value, asked)
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[asked],
            "shape": list(raw.shape),
            "data_offsets": [offset, offset + raw.nbytes],
        }
        offset += raw.nbytes
        stored.append(raw)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data then start at a multiple of 8 bytes
    path = Path(path)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for raw in stored:
            file.write(raw.tobytes())
    return path


def matrices(
    *,
    min_side: int = 1,
    max_side: int = 12,
    dtypes: Sequence[str] = ("float32", "float64"),
    magnitude: float = 1e3,
) -> SearchStrategy[NDArray[Any]]:
    """Return a Hypothesis strategy for finite matrices: free entries, low rank, constant, zero, orthogonal, scaled.

    Parameters
    ----------
    min_side, max_side : int
        Limits of the numbers of rows and of columns.
    dtypes : sequence of str
        One is drawn for each matrix.
    magnitude : float
        Largest absolute entry of free matrices.
    """
    from hypothesis import strategies as st
    from hypothesis.extra import numpy as hnp

    @st.composite
    def draw_matrix(draw: Callable[..., Any]) -> NDArray[Any]:
        m, n = draw(st.integers(min_side, max_side)), draw(st.integers(min_side, max_side))
        kind = draw(st.sampled_from(["free", "spectrum", "orthogonal", "constant", "zero"]))
        dtype = draw(st.sampled_from(list(dtypes)))
        if kind == "free":
            entries = st.floats(-magnitude, magnitude, allow_subnormal=False)
            free: NDArray[Any] = draw(hnp.arrays(np.float64, (m, n), elements=entries))
            return free.astype(dtype)
        if kind == "constant":
            return np.full((m, n), draw(st.floats(-1.0, 1.0, width=16)), dtype)
        if kind == "zero":
            return np.zeros((m, n), dtype)
        seed = draw(st.integers(0, 2**16))
        svals = [1.0] * min(m, n)
        if kind == "spectrum":
            svals = draw(st.lists(st.floats(1e-3, 10.0), max_size=min(m, n)))
        return matrix_with_spectrum(svals, m, n, seed, dtype)

    return draw_matrix()


def models(
    *, max_parameters: int = 4, max_side: int = 8, dtypes: Sequence[str] = ("float32", "float64")
) -> SearchStrategy[dict[str, NDArray[Any]]]:
    """Return a Hypothesis strategy for models: dicts of matrices with dotted names, some with a bias beside them."""
    from hypothesis import strategies as st

    part = st.sampled_from(["encoder", "decoder", "h", "attn", "mlp", "fc-1", "dense", "0", "1", "10"])
    names = st.lists(
        st.lists(part, min_size=1, max_size=3).map(".".join), min_size=1, max_size=max_parameters, unique=True
    )

    @st.composite
    def draw_model(draw: Callable[..., Any]) -> dict[str, NDArray[Any]]:
        model: dict[str, NDArray[Any]] = {}
        for name in draw(names):
            matrix = draw(matrices(max_side=max_side, dtypes=dtypes))
            model[f"{name}.weight"] = matrix
            if draw(st.booleans()):
                model[f"{name}.bias"] = np.zeros(matrix.shape[0], matrix.dtype)
        return model

    return draw_model()
