"""The stated error of every route holds: against 60 digits, on matrices on which numerics break."""

from __future__ import annotations

from functools import cache
from typing import Any

import dask
import dask.array as da
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_linalg import stream

from diffract_dask import linalg
from diffract_dask.linalg import arrays, routes
from diffract_dask.testing import bestiary, matrix_with_spectrum

DTYPES = ("float64", "float32", "float16", "bfloat16")
CASES = [(name, dtype) for dtype in DTYPES for name in bestiary(dtype)]
EPS32 = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float64).smallest_subnormal)
digits = mpmath.mp.clone()
digits.dps = 60

each_case = pytest.mark.parametrize(("name", "dtype"), CASES)


@cache
def matrix(name: str, dtype: str) -> NDArray[Any]:
    return bestiary(dtype)[name]


def in_digits(w: NDArray[Any]) -> Any:
    return digits.matrix(w.astype(np.float64).tolist())


def exact(w: NDArray[Any]) -> list[Any]:
    """Singular values, ascending, in 60 digits."""
    tall = w if w.shape[0] >= w.shape[1] else w.T
    return list(digits.svd_r(in_digits(tall), compute_uv=False))[::-1]


@cache
def expected(name: str, dtype: str) -> list[Any]:
    return exact(matrix(name, dtype))


def worst(values: NDArray[Any], true: list[Any]) -> Any:
    return max((abs(digits.mpf(float(v)) - t) for v, t in zip(values, true, strict=True)), default=0)


ROUTES = {
    "auto": linalg.singular_values,
    "gram": lambda w: linalg.singular_values(w, method="gram"),
    "tsqr": lambda w: linalg.singular_values(w, method="tsqr"),
    "gesdd": lambda w: linalg.singular_values(w, method="gesdd"),
    "streamed": lambda w: stream(w, [2, 3, 7], spans=2),
    "dask": lambda w: linalg.Spectrum(*dask.compute(*linalg.singular_values(da.from_array(w, chunks=(5, 3))))),
    "dask, gram": lambda w: linalg.Spectrum(
        *dask.compute(*linalg.singular_values(da.from_array(w, chunks=(4, 6)), method="gram"))
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@each_case
def test_singular_values(monkeypatch: pytest.MonkeyPatch, route: str, name: str, dtype: str) -> None:
    monkeypatch.setattr(arrays, "WHOLE", 0)
    w, true = matrix(name, dtype), expected(name, dtype)
    values, error, code = ROUTES[route](w)
    assert worst(values, true) <= float(error) or worst(values, true) == 0
    assert (np.diff(values) >= 0).all()
    # of a narrow type the Gram matrix is enough; of float64 it is refused unless it was asked for
    tolerance = 1e-14 if dtype == "float64" and "gram" not in route else EPS32
    assert float(error) <= tolerance * float(true[-1]) + 2 * TINY
    taken = linalg.ROUTES[int(code)]
    if "gram" not in route:
        assert taken in (("gesdd", "tsqr") if dtype == "float64" else ("gram", "tsqr", "gesdd"))


@pytest.mark.parametrize("rtol", [1e-2, pytest.param(1e-6, marks=pytest.mark.slow), 1e-10])
@each_case
def test_relative_error_or_another_route(rtol: float, name: str, dtype: str) -> None:
    """With `rtol` the Gram matrix is taken only where every single value is that good."""
    w, true = matrix(name, dtype), expected(name, dtype)
    for values, error, code in (linalg.singular_values(w, rtol), linalg.singular_values(w, rtol, method="gram")):
        assert worst(values, true) <= float(error) or worst(values, true) == 0
        if linalg.ROUTES[int(code)] == "gram" and true[-1] > 1e-290:
            assert all(abs(digits.mpf(float(v)) - t) <= rtol * t for v, t in zip(values, true, strict=True))


@each_case
def test_products(name: str, dtype: str) -> None:
    """Gram matrices and products of two matrices, in the Frobenius norm of 60 digits."""
    w = matrix(name, dtype)
    tall = w if w.shape[0] >= w.shape[1] else w.T
    if not 1e-140 < float(np.abs(w.astype(np.float64)).max()) < 1e140:
        pytest.skip("products are not scaled")
    other = np.random.default_rng(1).standard_normal((len(tall), 2)).astype(w.dtype)
    for (values, error, _), true in (
        (linalg.gram(w), in_digits(tall).T * in_digits(tall)),
        (dask.compute(*linalg.gram(da.from_array(w, chunks=(3, 4)))), in_digits(tall).T * in_digits(tall)),
        (linalg.pair_product(tall, other), in_digits(tall).T * in_digits(other)),
    ):
        difference = digits.matrix(values.tolist()) - true
        assert digits.mnorm(difference, "f") <= float(error)


@each_case
def test_vectors(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    """W = U diag(s) Vᵀ to the stated error, V orthonormal, U too (of a Dask array where σ is more than rounding)."""
    monkeypatch.setattr(arrays, "WHOLE", 0)
    w, true = matrix(name, dtype), expected(name, dtype)
    exponent = int(np.frexp(float(np.abs(w.astype(np.float64)).max()))[1])
    scaled = np.ldexp(w.astype(np.float64), -exponent)
    k = min(w.shape)
    for lazy in (False, True):
        found = linalg.svd(da.from_array(w, chunks=(4, 5)) if lazy else w)
        u, s, v, error, _ = dask.compute(*found) if lazy else found
        assert worst(s, true) <= float(error) or worst(s, true) == 0
        size = np.ldexp(s, -exponent)
        slack = k * np.ldexp(1.0, min(-1074 - exponent, 0))
        assert np.linalg.norm((u * size) @ v.T - scaled, 2) <= 1e-14 * max(size[-1], 1e-300) + slack
        long, short = (u, v) if w.shape[0] >= w.shape[1] else (v, u)
        assert np.abs(short.T @ short - np.eye(k)).max() < 1e-14
        kept = np.linalg.norm(long, axis=0) > 0.5
        assert np.abs(long.T @ long - np.diag(kept * 1.0)).max() < 1e-13
        assert (kept | (size <= 1e-14 * size[-1])).all()
        assert lazy or kept.all()


@each_case
def test_qr(name: str, dtype: str) -> None:
    w = matrix(name, dtype)
    if w.shape[0] < w.shape[1]:
        w = w.T
    exponent = int(np.frexp(float(np.abs(w.astype(np.float64)).max()))[1])
    scaled = np.ldexp(w.astype(np.float64), -exponent)
    for found in (linalg.tsqr(w), dask.compute(*linalg.tsqr(da.from_array(w, chunks=(4, 5))))):
        q, r, error, _ = found
        assert np.array_equal(r, np.triu(r))
        assert (np.diagonal(r) >= 0).all()
        assert np.linalg.norm(q @ np.ldexp(r, -exponent) - scaled, 2) <= 4 * np.ldexp(float(error), -exponent) + 1e-300
        assert np.linalg.norm(q, 2) < 1 + 1e-13


def check_leading(s: NDArray[Any], errors: NDArray[Any], true: list[Any]) -> None:
    """Each value is no more than the true one of its rank, and so many true ones lie within the errors."""
    left = list(true)
    for i in reversed(range(len(s))):
        value, rounding = digits.mpf(float(s[i])), digits.mpf(2e-14) * true[-1] + TINY
        assert value <= true[i - len(s)] + rounding
        nearest = min(range(len(left)), key=lambda j: abs(left[j] - value))
        assert abs(left.pop(nearest) - value) <= digits.mpf(float(errors[i])) or not any(true)


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), 4])
@each_case
def test_leading_values(rank: int, name: str, dtype: str) -> None:
    w, true = matrix(name, dtype), expected(name, dtype)
    rank = min(rank, *w.shape)
    lazy = dask.compute(*linalg.leading_svd(da.from_array(w, chunks=(4, 5)), rank, oversample=2, passes=3))
    for u, s, v, error, code in (linalg.leading_svd(w, rank, oversample=2, passes=3), lazy):
        assert (u.shape, s.shape, v.shape) == ((w.shape[0], rank), (rank,), (w.shape[1], rank))
        check_leading(s, error, true)
        assert linalg.ROUTES[int(code)] == "leading"
        if name.startswith(("graded", "lauchli", "hilbert")):  # what decays is found, and known to be
            assert error[-1] <= 1e-3 * s[-1]
            assert abs(digits.mpf(float(s[-1])) - true[-1]) <= float(error[-1])


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 9),
    n=st.integers(1, 9),
    condition=st.floats(0, 17),
    cluster=st.integers(1, 4),
    exponent=st.integers(-1060, 1000),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["float64", "float32", "float16"]),
)
def test_drawn_matrices(m: int, n: int, condition: float, cluster: int, exponent: int, seed: int, dtype: str) -> None:
    k = min(m, n)
    svals = 10.0 ** -np.linspace(0, condition, k) if k > 1 else np.ones(1)
    svals[-cluster:] = svals[-1]
    w = matrix_with_spectrum(svals, m, n, seed)
    with np.errstate(all="ignore"):
        w = np.ldexp(w, exponent if dtype == "float64" else exponent // 100).astype(dtype)
    true = exact(w)
    for method in ("auto", "gram", "tsqr", "gesdd"):
        values, error, _ = linalg.singular_values(w, method=method)
        assert worst(values, true) <= float(error) or worst(values, true) == 0, method
    _, s, _, errors, _ = linalg.leading_svd(w, max(1, k // 2), oversample=1, passes=2)
    check_leading(s, errors, true)


def test_routes_are_numbered_once_for_all() -> None:
    """The codes are stored: none of them may change its meaning."""
    assert list(routes.ROUTES.items())[:7] == list(
        enumerate(["none", "gram", "tsqr", "gesdd", "gesvd", "scaled_gram", "leading"])
    )
