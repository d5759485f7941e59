"""Entry statistics against two passes in long double and closed forms; one pass, any scale, any offset, any cut."""

from __future__ import annotations

import threading
import tracemalloc
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diffract_dask import moments as module
from diffract_dask.errors import MatrixError
from diffract_dask.moments import Moments, MomentsStream, moments


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut matrices of a few hundred entries as real ones of millions are."""
    monkeypatch.setattr(module, "PIECE", 64)
    monkeypatch.setattr(module, "ROW", 16)
    monkeypatch.setattr(module, "_scratch", threading.local())


def reference(w: NDArray[Any]) -> Moments:
    """Two passes in long double over the finite entries of one matrix."""
    x = np.asarray(w).astype(np.longdouble).ravel()
    finite = x[np.isfinite(x)]
    n = np.longdouble(finite.size)
    mean = finite.sum() / n
    d = finite - mean
    m2, m4 = (d**2).sum() / n, (d**4).sum() / n
    constant = finite.min() == finite.max()
    values = (
        np.sqrt((x**2).sum()) if finite.size == x.size else np.nan,
        mean,
        0.0 if constant else np.sqrt(m2),
        finite.min(),
        finite.max(),
        np.abs(finite).max(),
        np.mean(finite == 0),
        1 - n / x.size,
        np.nan if constant else m4 / m2**2 - 3,
    )
    return Moments(*(np.float64(value) for value in values))


def agree(result: Moments, expected: Moments, rel: float = 1e-13) -> None:
    for name, got, want in zip(Moments._fields, result, expected, strict=True):
        scale = {"mean": expected.absmax, "excess_kurtosis": 3.0 + np.abs(expected.excess_kurtosis)}.get(name, want)
        assert np.shape(got) == np.shape(want)
        assert np.allclose(got, want, rtol=0, atol=rel * np.abs(np.nan_to_num(scale)), equal_nan=True), name


def entries(*shape: int, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape)


BESTIARY: dict[str, NDArray[Any]] = {
    "gaussian": entries(13, 17),
    "row": entries(1, 40),
    "column": entries(40, 1),
    "sparse": np.where(entries(20, 20, seed=1) > 1, entries(20, 20), 0.0),
    "negative zeros": np.array([[-0.0, 0.0], [1.0, -2.0]]),
    "positive": np.abs(entries(9, 9)) + 0.5,
    "offset": 5.0 + 0.01 * entries(30, 30),
    "offset by row": np.arange(30.0)[:, None] + 1e-3 * entries(30, 40),
    "two values": np.array([[1.0, 3.0]]),
    "heavy tail": entries(25, 25) ** 7,
    "integers": np.arange(12.0).reshape(3, 4),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", BESTIARY)
@pytest.mark.parametrize("cut", [False, True])
def test_agrees_with_long_double(name: str, dtype: str, cut: bool, request: pytest.FixtureRequest) -> None:
    if cut:
        request.getfixturevalue("small_pieces")
    w = BESTIARY[name].astype(dtype)
    agree(moments(w), reference(w))
    stream = MomentsStream()
    state = stream.update(stream.start(w.shape, w.dtype), w)
    agree(Moments(*stream.finish(state, lambda: iter(()), {})), reference(w))


def test_closed_forms() -> None:
    result = moments(np.tile([-1.0, 1.0], (100, 50)))
    assert result.frob_norm == 100.0
    assert result.mean == 0.0
    assert result.std == 1.0
    assert result.excess_kurtosis == pytest.approx(-2.0, abs=1e-13)
    n = 60000
    uniform = moments(np.arange(n, dtype=np.float64).reshape(300, 200))
    assert uniform.mean == pytest.approx((n - 1) / 2, rel=1e-15)
    assert uniform.std == pytest.approx(np.sqrt((n * n - 1) / 12), rel=1e-14)
    assert uniform.excess_kurtosis == pytest.approx(-1.2 * (n * n + 1) / (n * n - 1), rel=1e-13)
    assert uniform.zero_fraction == pytest.approx(1 / n)


@pytest.mark.parametrize("size", [(3, 5), (70, 700), (181, 181)])
def test_constant_and_zero(size: tuple[int, int]) -> None:
    for value in (0.1, -7.0, 1e-300, 1e300, 5e-324):
        result = moments(np.full(size, value))
        assert (result.mean, result.std, result.min, result.max, result.absmax) == (value, 0, value, value, abs(value))
        assert np.isnan(result.excess_kurtosis)
        assert result.frob_norm == pytest.approx(abs(value) * np.sqrt(size[0] * size[1]), rel=1e-14)
    for dtype in (np.float64, np.float32):
        zero = moments(np.zeros(size, dtype))
        assert (zero.frob_norm, zero.mean, zero.std, zero.absmax, zero.zero_fraction) == (0, 0, 0, 0, 1)
        assert np.isnan(zero.excess_kurtosis)


@pytest.mark.parametrize("shape", [(30, 20), (250, 300)])
@pytest.mark.parametrize("exponent", [-1000, -990, -600, -201, 201, 600, 990, 1000])
def test_scale_does_not_matter(exponent: int, shape: tuple[int, int]) -> None:
    w = entries(*shape)
    w[0, 0] = 0.0
    plain, scaled = moments(w), moments(np.ldexp(w, exponent))
    for name in ("frob_norm", "mean", "std", "min", "max", "absmax"):
        want = np.ldexp(getattr(plain, name), exponent)
        assert getattr(scaled, name) == pytest.approx(want, rel=1e-13, abs=1e-13 * np.ldexp(plain.std, exponent))
    assert scaled.excess_kurtosis == pytest.approx(plain.excess_kurtosis, rel=1e-11)
    assert scaled.zero_fraction == plain.zero_fraction


@pytest.mark.usefixtures("small_pieces")
def test_pieces_of_different_scale() -> None:
    for scales in ([1e-300, 1e-290, 1e-300], [1e-300, 0.0, 1.0], [0.0, 1e-310, 0.0], [1e300, 1.0, 1e-300]):
        w = np.concatenate([scale * entries(10, 20, seed=i) for i, scale in enumerate(scales)])
        agree(moments(w), reference(w), 1e-12)


def test_subnormals_and_limits() -> None:
    tiny = moments(np.array([[5e-324, 0.0], [0.0, 0.0]]))
    assert (tiny.max, tiny.frob_norm) == (5e-324, 5e-324)
    assert tiny.excess_kurtosis == pytest.approx(moments([[1.0, 0.0], [0.0, 0.0]]).excess_kurtosis)
    largest = np.finfo(np.float64).max
    assert moments(np.array([[largest, -largest]])).std == largest
    single = np.finfo(np.float32).max
    result = moments(np.array([[single, -single, single, single]], np.float32))
    assert result.frob_norm == pytest.approx(2 * float(single), rel=1e-15)
    subnormal = np.array([[1e-45, 0.0, 3e-45]], np.float32)
    agree(moments(subnormal), reference(subnormal))


def test_one_ulp_of_spread() -> None:
    w = np.where(np.arange(400).reshape(20, 20) % 2, 1.0, np.nextafter(1.0, 2.0))
    result = moments(w)
    assert result.std == pytest.approx(np.finfo(float).eps / 2, rel=1e-12)
    assert result.excess_kurtosis == pytest.approx(-2.0, abs=1e-11)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("shape", [(8, 9), (300, 200)])
def test_entries_that_are_not_finite_are_left_out(dtype: str, shape: tuple[int, int]) -> None:
    batch = (2.0 + entries(4, *shape)).astype(dtype)
    clean = moments(batch)
    batch[1, 2, 3], batch[1, 4, 5], batch[1, 7, 8] = np.nan, np.inf, -np.inf
    batch[3] = np.nan
    result = moments(batch)
    for name in Moments._fields:
        assert np.array_equal(getattr(result, name)[[0, 2]], getattr(clean, name)[[0, 2]])
    agree(Moments(*(value[1] for value in result)), reference(batch[1]), 1e-12)
    assert np.isnan(result.frob_norm[1])
    assert result.nonfinite_fraction.tolist() == [0.0, 3 / (shape[0] * shape[1]), 0.0, 1.0]
    assert all(np.isnan(getattr(result, name)[3]) for name in Moments._fields if name != "nonfinite_fraction")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    cols=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
    offset=st.sampled_from([0.0, 0.3, -40.0, 1e5]),
    dtype=st.sampled_from(["float64", "float32"]),
    data=st.data(),
)
def test_invariants(rows: int, cols: int, seed: int, offset: float, dtype: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((rows, cols)) + offset).astype(dtype)
    expected = moments(w)
    rel = 1e-12 * max(1.0, abs(offset))
    agree(moments(w.T), expected, rel)
    agree(moments(rng.permutation(w.ravel()).reshape(w.shape)), expected, rel)
    doubled = moments(np.ldexp(w, 3))
    assert doubled.frob_norm == pytest.approx(8 * expected.frob_norm, rel=1e-15)
    assert doubled.std == pytest.approx(8 * expected.std, rel=1e-14)
    stream = MomentsStream()
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=6))})
    states = [stream.update(stream.start(w.shape, w.dtype), w[a:b]) for a, b in pairwise(cuts)]
    while len(states) > 1:
        i = data.draw(st.integers(0, len(states) - 2))
        states[i : i + 2] = [stream.merge(states[i], states[i + 1])]
    result = Moments(*stream.finish(states[0], lambda: iter(()), {}))
    if expected.std > 0:
        agree(result, expected, rel)
    assert (result.min, result.max, result.zero_fraction) == (expected.min, expected.max, expected.zero_fraction)


def test_batches_equal_single_matrices() -> None:
    for shape in ((2, 3, 5, 7), (500, 16, 16), (3, 200, 130)):
        batch = entries(*shape).astype(np.float32)
        result = moments(batch)
        for i in list(np.ndindex(*shape[:-2]))[:7]:
            agree(Moments(*(value[i] for value in result)), moments(batch[i]), 1e-14)
        assert result.mean.shape == shape[:-2]
        assert all(value.dtype == np.float64 for value in result)


def test_orders_and_views() -> None:
    w = entries(300, 260)
    expected = moments(w)
    agree(moments(np.asfortranarray(w)), expected)
    agree(moments(w[::-1, ::-1]), expected)
    agree(moments(np.repeat(w, 2, axis=1)[:, ::2]), expected)
    stacked = np.stack([w, 2 * w], axis=-1)
    agree(Moments(*(value[0] for value in moments(np.moveaxis(stacked, -1, 0)))), expected)
    before = w.copy()
    moments(w)
    assert np.array_equal(w, before)


def test_other_real_types() -> None:
    integers = np.array([[-3, 0], [4, 0]])
    for dtype in (np.int8, np.int64, np.uint8, bool, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.longdouble):
        w = np.abs(integers).astype(dtype)
        agree(moments(w), reference(w.astype(np.float64)))
    assert moments(integers.tolist()).frob_norm == 5.0


def test_empty() -> None:
    result = moments(np.zeros((3, 0, 4)))
    assert result.frob_norm.tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(result.mean).all()
    assert np.isnan(result.nonfinite_fraction).all()
    assert moments(np.zeros((0, 3, 4))).mean.shape == (0,)
    stream = MomentsStream()
    w = entries(4, 4)
    state = stream.update(stream.start(w.shape, w.dtype), w[:0])
    state = stream.merge(state, stream.update(stream.start(w.shape, w.dtype), w))
    agree(Moments(*stream.finish(state, lambda: iter(()), {})), moments(w))


def test_what_is_no_real_matrix_is_refused() -> None:
    with pytest.raises(MatrixError, match="reshape"):
        moments([1.0, 2.0])
    with pytest.raises(MatrixError, match="complex64"):
        moments(np.zeros((2, 2), np.complex64))


def test_memory_is_a_few_pieces() -> None:
    w = entries(2000, 1000).astype(np.float32)
    moments(w[:300, :300])
    allowed, _ = MomentsStream().workspace(w.shape, w.dtype)
    tracemalloc.start()
    try:
        moments(w)
        assert tracemalloc.get_traced_memory()[1] <= allowed
    finally:
        tracemalloc.stop()


def test_threads_do_not_share_their_buffers() -> None:
    matrices = [entries(400, 300, seed=i) for i in range(8)]
    expected = [moments(w) for w in matrices]
    results: dict[int, list[Moments]] = {}

    def work(i: int) -> None:
        results[i] = [moments(matrices[i]) for _ in range(10)]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(result == expected[i] for i in range(8) for result in results[i])
