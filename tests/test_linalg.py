"""Singular values and vectors against mpmath, LAPACK in float64 and closed forms; errors must be within the bound."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import dask
import ml_dtypes
import mpmath
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diffract_dask import Session, blas, linalg
from diffract_dask.errors import MatrixError
from diffract_dask.linalg import dense, pieces

EPS32 = float(np.finfo(np.float32).eps)


@pytest.fixture(autouse=True)
def _one_blas_thread() -> Iterator[None]:
    with linalg.blas_threads(1):
        yield


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut matrices of a few thousand entries as real ones of millions are."""
    monkeypatch.setattr(pieces, "PIECE", 1 << 13)
    monkeypatch.setattr(pieces, "GROUP", 1 << 12)
    monkeypatch.setattr(pieces, "MIN_ROWS", 16)


def lauchli(e: float) -> NDArray[Any]:
    return np.array([[1.0, 1.0], [e, 0.0], [0.0, e]])


def hilbert(n: int) -> NDArray[Any]:
    i = np.arange(n)
    return 1.0 / (i[:, None] + i + 1)


def kahan(n: int, theta: float = 1.2) -> NDArray[Any]:
    upper = np.eye(n) - np.cos(theta) * np.triu(np.ones((n, n)), 1)
    return np.diag(np.sin(theta) ** np.arange(n)) @ upper


def frank(n: int) -> NDArray[Any]:
    i = np.arange(1, n + 1)
    return np.where(i[None, :] >= i[:, None] - 1, n + 1.0 - np.maximum(i[:, None], i[None, :]), 0.0)


def gaussian(*shape: int, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape)


def low_rank(rows: int, cols: int, rank: int) -> NDArray[Any]:
    """A matrix of small integers of exactly this rank: exact in float32, and its zero singular values are zero."""
    rng = np.random.default_rng(1)
    return (rng.integers(-7, 8, (rows, rank)) @ rng.integers(-7, 8, (rank, cols))).astype(np.float64)


BESTIARY: dict[str, NDArray[Any]] = {
    "lauchli": lauchli(1e-9),
    "hilbert": hilbert(10),
    "kahan": kahan(12),
    "frank": frank(10),
    "rank 4": low_rank(14, 11, 4),
    "identity": np.eye(6),
    "orthogonal": np.linalg.qr(gaussian(9, 9))[0],
    "constant": np.full((7, 5), 0.3),
    "zero": np.zeros((4, 3)),
    "graded": gaussian(8, 8) * np.logspace(0, -7, 8),
    "row": gaussian(1, 9),
    "column": gaussian(9, 1),
    "one entry": np.array([[-2.5]]),
    "wide": gaussian(5, 17),
    "offset": 1.0 + 1e-3 * gaussian(9, 6),
    "one large": np.where(np.arange(48).reshape(8, 6) == 7, 1e4, gaussian(8, 6)),
}


def exact(matrix: NDArray[Any]) -> NDArray[np.float64]:
    """Singular values, ascending, by mpmath with 60 digits."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    with mpmath.workdps(60):
        values = mpmath.svd_r(mpmath.matrix(tall.astype(np.float64).tolist()), compute_uv=False)
        return np.array([float(value) for value in values])[::-1]


def stream(matrix: NDArray[Any], cuts: list[int], spans: int = 1, rtol: float | None = None) -> linalg.Spectrum:
    """The spectrum by SpectrumStream, from blocks between `cuts` of the long axis, in so many spans."""
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    edges = [0, *sorted({c for c in cuts if 0 < c < len(tall)}), len(tall)]
    blocks = [tall[a:b] for a, b in pairwise(edges)]
    twin = linalg.SpectrumStream()
    total = None
    for part in np.array_split(np.arange(len(blocks)), spans):
        state = twin.start(matrix.shape, matrix.dtype)
        for i in part:
            state = twin.update(state, blocks[i])
        total = state if total is None else twin.merge(total, state)
    return linalg.Spectrum(*twin.finish(total, lambda: iter(blocks), {"rtol": rtol}))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", BESTIARY)
def test_singular_values_are_within_their_stated_error(name: str, dtype: str) -> None:
    matrix = BESTIARY[name].astype(dtype)
    expected = exact(matrix)
    tolerance = (1e-14 if dtype == "float64" else EPS32) * expected[-1]
    for values, error, route in (linalg.singular_values(matrix), stream(matrix, [2, 3, 7], spans=2)):
        assert values.shape == expected.shape
        assert np.abs(values - expected).max() <= error
        assert error <= tolerance
        assert linalg.ROUTES[int(route)] in (("gesdd", "tsqr") if dtype == "float64" else ("gram",))


@pytest.mark.parametrize("exponent", [-1000, -900, -498, -100, 100, 498, 900, 1000])
def test_scale_of_float64_does_not_matter(exponent: int) -> None:
    for name in ("hilbert", "lauchli", "wide", "rank 4"):
        matrix = np.ldexp(BESTIARY[name], exponent)
        expected = np.ldexp(exact(BESTIARY[name]), exponent)
        for values, error, _ in (linalg.singular_values(matrix), stream(matrix, [1, 2], spans=2)):
            assert np.abs(values - expected).max() <= error <= 1e-14 * expected[-1]
        s = linalg.svd(matrix).s
        assert np.abs(s - expected).max() <= 1e-14 * expected[-1]


@pytest.mark.parametrize("exponent", [-140, -120, 100])
def test_scale_of_float32_does_not_matter(exponent: int) -> None:
    matrix = np.ldexp(np.float32(low_rank(20, 9, 6)), exponent).astype(np.float32)
    expected = np.ldexp(np.linalg.svd(low_rank(20, 9, 6), compute_uv=False)[::-1], exponent)
    values, error, _ = linalg.singular_values(matrix)
    assert np.abs(values - expected).max() <= error <= EPS32 * expected[-1]


def test_subnormal_and_mixed_scales() -> None:
    tiny = np.array([[5e-324, 0.0], [0.0, 3 * 5e-324]])
    assert linalg.singular_values(tiny).values.tolist() == [5e-324, 3 * 5e-324]
    for mixed in (np.diag([1e-300, 1e300]), np.diag([1e300, 1e-300]), np.diag([0.0, 1e-310]), np.diag([1e-310, 1.0])):
        expected = np.sort(np.diag(mixed))
        for values, error, _ in (linalg.singular_values(mixed), stream(mixed, [1], spans=2)):
            assert np.abs(values - expected).max() <= error


def test_error_covers_the_rounding_of_subnormal_values() -> None:
    values, error, _ = linalg.singular_values(np.array([[5e-324, 5e-324], [0.0, 5e-324]]))
    golden = (1 + np.sqrt(5)) / 2
    assert (np.abs(np.ldexp(values, 1074) - [golden - 1, golden]) <= np.ldexp(error, 1074)).all()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("exponents", [(301, 305), (305, 301), (-305, -302), (-305, 0)])
def test_pieces_of_different_scale(exponents: tuple[int, int]) -> None:
    scale = np.repeat(np.ldexp(1.0, exponents), 30)[:, None]
    w = gaussian(60, 40) * scale
    expected = np.ldexp(np.linalg.svd(np.ldexp(w, -max(exponents)), compute_uv=False)[::-1], max(exponents))
    for result in (linalg.singular_values(w, rtol=1e-6), stream(w, [10, 35], spans=2), linalg.singular_values(w)):
        assert np.abs(result.values - expected).max() <= result.error <= 1e-12 * expected[-1]
    if abs(exponents[0] - exponents[1]) < 10:
        assert linalg.ROUTES[int(linalg.singular_values(w, rtol=1e-6).route)] == "gram"


def test_lauchli_is_lost_by_the_gram_matrix_alone() -> None:
    e = 1e-9
    assert linalg.singular_values(lauchli(e)).values == pytest.approx([e, np.sqrt(2 + e * e)], rel=1e-6)
    assert np.linalg.eigvalsh(linalg.gram(lauchli(e)).values)[0] < 1e-20


@pytest.mark.parametrize("shape", [(20, 20), (300, 30), (250, 60), (60, 250), (90, 90)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("small_pieces")
def test_error_bound_holds_at_sizes_that_are_cut_into_pieces(shape: tuple[int, int], dtype: str) -> None:
    rng = np.random.default_rng(2)
    rank = min(shape) // 2
    for matrix in (
        gaussian(*shape),
        gaussian(*shape) * np.logspace(0, -8, shape[1]),
        rng.integers(-9, 10, (shape[0], rank)) @ rng.integers(-9, 10, (rank, shape[1])) * 1.0,
    ):
        w = matrix.astype(dtype)
        expected = np.linalg.svd(w.astype(np.float64), compute_uv=False)[::-1]
        slack = 1e-13 * expected[-1]  # of the reference itself
        for values, error, _ in (linalg.singular_values(w), stream(w, [10, 11, 47, 80], spans=3)):
            assert np.abs(values - expected).max() <= error + slack
            assert error <= (EPS32 if dtype == "float32" else 2e-14) * expected[-1]


def test_error_bound_holds_for_exact_rank() -> None:
    # integers times one large odd integer per row: the zero singular values stay zero, and squares are rounded
    rng = np.random.default_rng(3)
    for rows, cols in ((20000, 12), (3000, 100), (600, 400)):
        w = low_rank(rows, cols, cols // 2) * rng.integers(1, 2**20, rows)[:, None]
        gram = np.zeros((cols, cols), order="F")
        blas.add_gram(gram, w)
        eigenvalues = blas.eigenvalues(gram)
        zero = np.abs(eigenvalues[: cols // 2]).max()
        assert zero <= linalg.relative_error(rows, cols) * eigenvalues[-1]
        values, error, _ = linalg.singular_values(w)
        assert values[: cols // 2].max() <= error


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    decay=st.floats(0, 10),
    dtype=st.sampled_from(["float64", "float32", "float16"]),
    exponent=st.integers(-8, 8),
    data=st.data(),
)
def test_invariants(
    rows: int, cols: int, seed: int, decay: float, dtype: str, exponent: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((rows, cols)) * np.logspace(0, -decay, cols)).astype(dtype)
    values, error, _ = linalg.singular_values(w)
    assert (np.diff(values) >= 0).all()
    permuted = w[rng.permutation(rows)][:, rng.permutation(cols)]
    cuts = data.draw(st.lists(st.integers(1, 12), max_size=5))
    spans = data.draw(st.integers(1, 3))
    for other in (
        linalg.singular_values(w.T),
        linalg.singular_values(permuted),
        linalg.singular_values(-w),
        stream(w, cuts, spans),
        stream(np.asfortranarray(w), cuts, spans),
        stream(w[::-1], cuts, spans),
    ):
        assert np.abs(other.values - values).max() <= error + other.error
    if dtype != "float16":  # whose subnormals would be rounded
        scaled = linalg.singular_values(np.ldexp(w, exponent))
        assert np.abs(np.ldexp(scaled.values, -exponent) - values).max() <= 2 * error


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batches_equal_single_matrices(dtype: str) -> None:
    batch = gaussian(3, 5, 9, 7).astype(dtype)
    values, error, route = linalg.singular_values(batch)
    assert values.shape == (3, 5, 7)
    assert error.shape == route.shape == (3, 5)
    assert route.dtype == np.int8
    assert values.dtype == error.dtype == np.float64
    for i in np.ndindex(3, 5):
        single = linalg.singular_values(batch[i])
        assert np.abs(single.values - values[i]).max() <= 1e-14 * values[i].max()
        assert single.error == pytest.approx(error[i], rel=1e-6)
    swapped = linalg.singular_values(batch.swapaxes(-1, -2))
    assert np.abs(swapped.values - values).max() <= 2 * error.max()


def test_many_small_matrices_are_cut_into_groups() -> None:
    batch = gaussian(3000, 8, 16).astype(np.float32)
    expected = np.linalg.svd(batch.astype(np.float64), compute_uv=False)[..., ::-1]
    values, error, _ = linalg.singular_values(batch)
    assert (np.abs(values - expected).max(axis=-1) <= error + 1e-14 * expected[:, -1]).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_matrix_does_not_touch_the_others(dtype: str, bad: float) -> None:
    batch = gaussian(6, 5, 4).astype(dtype)
    clean = linalg.singular_values(batch)
    batch[2, 3, 1] = bad
    values, error, route = linalg.singular_values(batch)
    good = np.arange(6) != 2
    assert np.isnan(values[2]).all()
    assert np.isnan(error[2])
    assert route.tolist() == [0 if i == 2 else clean.route[i] for i in range(6)]
    assert np.array_equal(values[good], clean.values[good])
    u, s, v, _, route = linalg.svd(batch)
    assert np.isnan(u[2]).all()
    assert np.isnan(s[2]).all()
    assert np.isnan(v[2]).all()
    assert route[2] == 0
    assert not np.isnan(u[good]).any()
    for spans in (1, 2):
        values, error, route = stream(batch[2], [1, 2, 3], spans)
        assert np.isnan(values).all()
        assert np.isnan(error)
        assert route == 0


@pytest.mark.usefixtures("small_pieces")
def test_large_matrices_with_a_bad_entry() -> None:
    for dtype in ("float32", "float64"):
        for shape in ((100, 40), (60, 60)):
            w = gaussian(*shape).astype(dtype)
            w[-1, -1] = np.nan
            values, error, route = linalg.singular_values(w)
            assert np.isnan(values).all()
            assert np.isnan(error)
            assert route == 0


def test_rtol_is_met_by_another_route() -> None:
    w = np.diag([1.0, 1e-6]).astype(np.float32)
    exact_values = np.sort(np.diag(w).astype(np.float64))
    assert linalg.ROUTES[int(linalg.singular_values(w).route)] == "gram"
    for result, route in ((linalg.singular_values(w, rtol=1e-8), "gesdd"), (stream(w, [1], rtol=1e-8), "tsqr")):
        assert np.abs(result.values / exact_values - 1).max() <= 1e-8
        assert linalg.ROUTES[int(result.route)] == route
        assert result.error <= 1e-8 * exact_values[0]
    nearly = linalg.singular_values(1000 * np.diag([1.0, 1e-6]).astype(np.float32), rtol=1e-2)
    assert linalg.ROUTES[int(nearly.route)] == "gram"
    assert 5e-4 * nearly.values[0] < nearly.error < 1e-2 * nearly.values[0]
    good = gaussian(30, 10).astype(np.float32)
    for result in (linalg.singular_values(good, rtol=1e-8), stream(good, [7], rtol=1e-8)):
        assert linalg.ROUTES[int(result.route)] == "gram"
        assert result.error <= 1e-8 * result.values[0]
    batch = np.stack([w, np.eye(2, dtype=np.float32), np.full((2, 2), np.nan, np.float32)])
    assert [linalg.ROUTES[int(r)] for r in linalg.singular_values(batch, rtol=1e-8).route] == ["gesdd", "gram", "none"]
    assert linalg.ROUTES[int(linalg.singular_values(np.eye(3), rtol=1e-6).route)] == "gram"
    large = (gaussian(4000, 150) * np.logspace(0, -6, 150)).astype(np.float32)
    tight = linalg.singular_values(large, rtol=1e-7)
    expected = np.linalg.svd(large.astype(np.float64), compute_uv=False)[::-1]
    assert linalg.ROUTES[int(tight.route)] == "tsqr"
    assert np.abs(tight.values / expected - 1).max() <= 1e-7


def test_choose_route() -> None:
    assert linalg.choose_route((60000, 4096), "float32") == "gram"
    assert linalg.choose_route((4096, 60000), np.float16) == "gram"
    assert linalg.choose_route((8, 8), ml_dtypes.bfloat16) == "gram"
    assert linalg.choose_route((1000, 1000), np.float64) == "gesdd"
    assert linalg.choose_route((100000, 100), np.float64) == "tsqr"
    assert linalg.choose_route((10, 10), np.float64, streamed=True) == "tsqr"
    assert linalg.choose_route((10, 10), np.float32, 1e-15) == "gesdd"
    assert linalg.choose_route((10, 10), np.int64) == "gesdd"
    twin = linalg.SpectrumStream()
    assert twin.route((10, 10), np.dtype("float32"), {"rtol": None}) == "gram"
    assert twin.route((10, 10), np.dtype("float32"), {"rtol": 1e-15}) == "tsqr"


def failing(*_: Any, **__: Any) -> Any:
    raise np.linalg.LinAlgError("did not converge")


@pytest.mark.parametrize("gesvd_fails", [False, True])
def test_lapack_failure_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch, gesvd_fails: bool) -> None:
    batch = gaussian(3, 6, 4)
    expected = np.linalg.svd(batch, compute_uv=False)[..., ::-1]
    route = "scaled_gram" if gesvd_fails else "gesvd"
    monkeypatch.setattr(dense, "gesdd", failing)
    monkeypatch.setattr(dense, "gesdd_vectors", failing)
    monkeypatch.setattr(blas, "svdvals", failing)
    if gesvd_fails:
        monkeypatch.setattr(dense, "gesvd", failing)
        monkeypatch.setattr(dense, "gesvd_vectors", failing)
    result = linalg.singular_values(batch)
    assert (np.abs(result.values - expected).max(axis=-1) <= result.error).all()
    assert [linalg.ROUTES[int(r)] for r in result.route] == [route] * 3
    single = stream(batch[0], [1, 4], spans=2)
    assert np.abs(single.values - expected[0]).max() <= single.error
    assert linalg.ROUTES[int(single.route)] == route
    u, s, v, _, routes = linalg.svd(batch)
    assert np.abs((u * s[..., None, :]) @ v.swapaxes(-1, -2) - batch).max() < 1e-13
    assert [linalg.ROUTES[int(r)] for r in routes] == [route] * 3


def test_everything_failing_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gesdd", "gesvd", "gesdd_vectors", "gesvd_vectors", "gram_vectors"):
        monkeypatch.setattr(dense, name, failing)
    monkeypatch.setattr(np.linalg, "eigvalsh", failing)
    monkeypatch.setattr(blas, "svdvals", failing)
    monkeypatch.setattr(blas, "eigenvalues", failing)
    for dtype in ("float32", "float64"):
        w = gaussian(2, 5, 4).astype(dtype)
        for values, error, route in (linalg.singular_values(w), stream(w[0], [2])):
            assert np.isnan(values).all()
            assert np.isnan(error).all()
            assert not np.any(route)
        assert np.isnan(linalg.svd(w).u).all()


def test_gram_eigenvalues_failing_falls_back_to_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    w = gaussian(7, 4).astype(np.float32)
    expected = linalg.singular_values(w).values
    monkeypatch.setattr(np.linalg, "eigvalsh", failing)
    monkeypatch.setattr(blas, "eigenvalues", failing)
    for result, route in ((linalg.singular_values(w), "gesdd"), (stream(w, [3]), "tsqr")):
        assert result.values == pytest.approx(expected, rel=1e-6)
        assert linalg.ROUTES[int(result.route)] == route


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", BESTIARY)
def test_vectors(name: str, dtype: str) -> None:
    w = BESTIARY[name].astype(dtype)
    m, n = w.shape
    k = min(m, n)
    u, s, v, error, _ = linalg.svd(w)
    assert (u.shape, s.shape, v.shape) == ((m, k), (k,), (n, k))
    assert np.abs(u.T @ u - np.eye(k)).max() < 1e-13
    assert np.abs(v.T @ v - np.eye(k)).max() < 1e-13
    assert np.abs((u * s) @ v.T - w.astype(np.float64)).max() <= 1e-14 * max(s[-1], 0) * k
    assert (np.diff(s) >= 0).all()
    assert np.abs(s - exact(w)).max() <= error
    assert (v[np.abs(v).argmax(axis=0), np.arange(k)] > 0).all()


def test_vectors_of_batches_and_large_matrices() -> None:
    batch = gaussian(2, 3, 6, 9).astype(np.float32)
    u, s, v, error, route = linalg.svd(batch)
    assert u.shape == (2, 3, 6, 6)
    assert v.shape == (2, 3, 9, 6)
    assert error.shape == route.shape == (2, 3)
    for i in np.ndindex(2, 3):
        single = linalg.svd(batch[i])
        assert np.abs(single.u - u[i]).max() < 1e-12
        assert np.abs(single.v - v[i]).max() < 1e-12
    large = gaussian(150, 2000).astype(np.float32)
    u, s, v, *_ = linalg.svd(large)
    assert np.abs((u * s) @ v.T - large).max() < 1e-12


@pytest.mark.usefixtures("small_pieces")
def test_gram() -> None:
    for shape in ((7, 3), (3, 7), (5, 5), (2, 4, 6, 3), (1, 1), (0, 4, 3)):
        w = gaussian(*shape)
        tall = w if shape[-2] >= shape[-1] else w.swapaxes(-1, -2)
        expected = tall.swapaxes(-1, -2) @ tall
        assert np.allclose(linalg.gram(w).values, expected, rtol=1e-14, atol=1e-14)
        for order in ("C", "F"):
            out = np.full(expected.shape, np.nan, order=order)
            assert linalg.gram(w, out=out).values is out
            assert np.allclose(out, expected, rtol=1e-14, atol=1e-14)
    for large in (gaussian(120, 70), gaussian(70, 120), gaussian(120, 70)[::-1, ::2]):
        result, error, _ = linalg.gram(large.astype(np.float32))
        tall = (large if large.shape[0] >= large.shape[1] else large.T).astype(np.float32)
        tall = tall.astype(np.float64)
        assert np.array_equal(result, result.T)
        assert 1e-13 < error < 1e-9
        assert np.allclose(result, tall.T @ tall, rtol=1e-12, atol=1e-10)


def test_tsqr_r() -> None:
    w = gaussian(3000, 20)
    r = linalg.tsqr_r(w[i : i + 700] for i in range(0, 3000, 700))
    assert np.array_equal(r, np.triu(r))
    assert np.abs(np.abs(r) - np.abs(np.linalg.qr(w, mode="r"))).max() < 1e-11
    assert np.abs(linalg.tsqr_r([w[:5]]).T @ linalg.tsqr_r([w[:5]]) - w[:5].T @ w[:5]).max() < 1e-13
    with pytest.raises(MatrixError, match="at least one block"):
        linalg.tsqr_r([])


@pytest.mark.usefixtures("small_pieces")
def test_streams_in_wide_panels_and_strided_blocks() -> None:
    for dtype in ("float32", "float64"):
        wide = gaussian(50, 500).astype(dtype)
        expected = np.linalg.svd(wide.astype(np.float64), compute_uv=False)[::-1]
        twin = linalg.SpectrumStream()
        state = twin.start(wide.shape, wide.dtype)
        for i in range(0, 500, 120):
            panel = wide[:, i : i + 120].T if i % 240 else np.ascontiguousarray(wide[:, i : i + 120]).T
            before = panel.copy()
            state = twin.update(state, panel)
            assert np.array_equal(panel, before)
        values, error, _ = twin.finish(state, lambda: iter(()), {})
        assert np.abs(values - expected).max() <= error + 1e-13 * expected[-1]


def test_merging_with_an_empty_span() -> None:
    twin = linalg.SpectrumStream()
    for dtype in ("float32", "float64"):
        w = gaussian(9, 4).astype(dtype)
        expected = linalg.singular_values(w).values
        for order in (1, -1):
            full = twin.update(twin.start(w.shape, w.dtype), w)
            empty = twin.start(w.shape, w.dtype)
            values, *_ = twin.finish(twin.merge(*[full, empty][::order]), lambda: iter(()), {})
            assert values == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_states_that_came_from_another_process(dtype: str) -> None:
    w = gaussian(9, 4).astype(dtype)
    twin = linalg.SpectrumStream()

    def sent(state: Any) -> Any:
        received = pickle.loads(pickle.dumps(state))
        received.matrix.flags.writeable = False
        return received

    state, other = (sent(twin.update(sent(twin.start(w.shape, w.dtype)), part)) for part in (w[:5], w[5:]))
    values, *_ = twin.finish(sent(twin.merge(state, other)), lambda: iter(()), {})
    assert values == pytest.approx(linalg.singular_values(w).values, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_stream_allocates_no_more_than_it_projects(dtype: str) -> None:
    k, rows = 500, 400
    block = gaussian(rows, k).astype(dtype)
    twin = linalg.SpectrumStream()
    shape = (5 * rows, k)
    projected, beyond = twin.workspace(shape, np.dtype(dtype))

    def reread() -> Iterator[NDArray[Any]]:
        raise AssertionError("must not be read again")

    tracemalloc.start()
    try:
        state = twin.start(shape, np.dtype(dtype))
        for _ in range(5):
            state = twin.update(state, block)
        held, peak = tracemalloc.get_traced_memory()
        assert 8 * k * k <= held <= 8 * k * k + 20000
        assert peak <= projected
        tracemalloc.reset_peak()
        twin.finish(state, reread, {})
        assert tracemalloc.get_traced_memory()[1] <= held + beyond
        assert beyond < 16 << 20
    finally:
        tracemalloc.stop()


def test_other_real_types_are_accepted() -> None:
    integers = np.array([[3, 0], [4, 0], [0, 2]])
    assert linalg.singular_values(integers).values == pytest.approx([2.0, 5.0], rel=1e-15)
    assert linalg.singular_values(integers.astype(bool)).values == pytest.approx([1.0, np.sqrt(2)], rel=1e-15)
    assert linalg.singular_values(integers.tolist()).values == pytest.approx([2.0, 5.0], rel=1e-15)
    half = integers.astype(ml_dtypes.bfloat16)
    assert linalg.singular_values(half).values == pytest.approx([2.0, 5.0], rel=1e-7)
    assert linalg.singular_values(integers.astype(np.longdouble)).values == pytest.approx([2.0, 5.0], rel=1e-15)


def test_empty_matrices_and_batches() -> None:
    assert linalg.singular_values(np.zeros((0, 5))).values.shape == (0,)
    assert linalg.singular_values(np.zeros((3, 5, 0))).error.tolist() == [0.0, 0.0, 0.0]
    assert linalg.singular_values(np.zeros((0, 5, 4), np.float32)).values.shape == (0, 4)
    u, s, v, *_ = linalg.svd(np.zeros((2, 3, 0)))
    assert (u.shape, s.shape, v.shape) == ((2, 3, 0), (2, 0), (2, 0, 0))


@pytest.mark.parametrize("function", [linalg.singular_values, linalg.svd, linalg.gram, lambda w: linalg.tsqr_r([w])])
def test_what_is_no_real_matrix_is_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(MatrixError, match=r"found shape \(3,\)"):
        function(np.zeros(3))
    with pytest.raises(MatrixError, match="complex128"):
        function(np.zeros((2, 2), complex))
    with pytest.raises(ValueError, match="real numbers"):
        function(np.array([["a", "b"]]))


def test_workspaces_are_bounded_by_the_route() -> None:
    assert linalg.values_workspace(20000, 16, 16, 4) < 8 << 20
    square = linalg.values_workspace(1, 4096, 4096, 4)
    assert 8 * 4096**2 < square < 8 * 4096**2 + (48 << 20)
    assert linalg.values_workspace(1, 4096, 4096, 8) >= 16 * 4096**2
    assert linalg.values_workspace(1, 10**6, 64, 8) < 24 << 20
    assert linalg.vectors_workspace(1, 1000, 500, 4) > 8 * 5 * 1000 * 500


def test_gesdd_is_skipped_where_its_workspace_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK counts 4 k² + 7 k numbers in 32 bits: up to k = 23169. Shapes alone are looked at before it is called."""
    tried: list[str] = []

    def noted(name: str) -> Any:
        def attempt(matrix: NDArray[Any]) -> Any:
            tried.append(name)
            return np.empty((len(matrix), 0)), np.empty(0), np.empty((0, 0))

        return attempt

    for name in ("gesdd", "gesvd"):
        monkeypatch.setattr(dense, f"{name}_vectors", noted(name))
    for k, route in ((23169, "gesdd"), (23170, "gesvd")):
        assert (4 * k * k + 7 * k <= 2**31 - 1) == (route == "gesdd")
        assert dense.vectors(np.broadcast_to(0.0, (2 * k, k)))[-1] == route
    assert tried == ["gesdd", "gesvd"]


def test_scipys_refusal_of_a_workspace_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ValueError(
            "Too large work array required -- computation cannot be performed with standard 32-bit LAPACK."
        )

    w = gaussian(6, 4)
    monkeypatch.setattr(dense, "gesdd_vectors", failing)
    monkeypatch.setattr(scipy.linalg, "svd", refused)
    u, s, v, _, route = linalg.svd(w)
    assert linalg.ROUTES[int(route)] == "scaled_gram"
    assert np.abs((u * s) @ v.T - w).max() < 1e-13
    monkeypatch.setattr(dense, "gesdd", failing)
    values, error, route = linalg.singular_values(w)
    assert linalg.ROUTES[int(route)] == "scaled_gram"
    assert np.abs(values - np.linalg.svd(w, compute_uv=False)[::-1]).max() <= error


@pytest.mark.parametrize(
    ("dtype", "params", "options", "route"),
    [
        ("float32", {}, {}, "gram"),
        ("float64", {}, {}, "gesdd"),
        ("float64", {"rtol": 1e-6}, {}, "gram"),
        ("float32", {"rtol": 1e-15}, {}, "gesdd"),
        ("float32", {}, {"diffract_dask.stream-above": "1 kB"}, "gram, streamed in"),
        ("float64", {}, {"diffract_dask.stream-above": "1 kB"}, "tsqr, streamed in"),
    ],
)
def test_the_choice_shows_in_the_plan(
    dtype: str, params: dict[str, float], options: dict[str, Any], route: str, no_compute: list[str]
) -> None:
    session = Session()
    session.models.add({"w.weight": gaussian(60, 40).astype(dtype)}, "m")
    with dask.config.set(options):
        explained = session.compute.plan("weights_svals", params={"singular_values": params}).explain()
    (line,) = [line for line in explained.splitlines() if "singular_values" in line]
    assert f"  {route}  " in line or ("streamed" in route and f"  {route}" in line), explained
