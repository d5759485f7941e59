"""Dask arrays: every chunking gives what NumPy gives, nothing runs before it is asked for, memory is as planned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from dask.highlevelgraph import HighLevelGraph
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diffract_dask import linalg
from diffract_dask.errors import MatrixError, OverBudgetError
from diffract_dask.linalg import arrays, folding, pieces

SHAPES = [(60, 9), (9, 60), (20, 20), (1, 7), (7, 1), (1, 1)]
CHUNKS: list[Any] = [(-1, -1), (7, -1), (-1, 4), (5, 3), (1, -1), ((4, 3), (2, 1))]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int8", "bool"]


# A third of all combinations in which every two of shape, chunks and dtype meet; the others are marked slow.
COMBINED = [
    pytest.param(shape, chunks, dtype, marks=[pytest.mark.slow] if (i + j + k) % 3 else [])
    for i, shape in enumerate(SHAPES)
    for j, chunks in enumerate(CHUNKS)
    for k, dtype in enumerate(DTYPES)
]


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read small arrays as large ones are."""
    monkeypatch.setattr(arrays, "WHOLE", 0)
    monkeypatch.setattr(pieces, "PIECE", 1 << 9)


def gaussian(*shape: int, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape)


def chunked(w: NDArray[Any], chunks: Any) -> Any:
    if isinstance(chunks[0], tuple):  # ragged: the rest is one more chunk
        chunks = tuple(
            (*own, size - sum(own)) if size > sum(own) else (size,) for own, size in zip(chunks, w.shape, strict=True)
        )
    return da.from_array(w, chunks=chunks)


def as_dtype(w: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype in ("int8", "bool"):
        return np.round(10 * w).astype(dtype)
    return w.astype(getattr(ml_dtypes, dtype, dtype))


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize(("shape", "chunks", "dtype"), COMBINED, ids=str)
def test_every_chunking_gives_what_numpy_gives(shape: tuple[int, int], chunks: Any, dtype: str) -> None:
    w = as_dtype(gaussian(*shape), dtype)
    lazy = chunked(w, chunks)
    wide = w.astype(np.float64)
    tall = wide if shape[0] >= shape[1] else wide.T
    want = np.linalg.svd(wide, compute_uv=False)[::-1]
    scale, k = max(want[-1], 1e-300), min(shape)
    other = gaussian(shape[0], 3, seed=1)
    found = {
        "singular_values": linalg.singular_values(lazy),
        "gram": linalg.gram(lazy),
        "svd": linalg.svd(lazy),
        "tsqr": linalg.tsqr(lazy if shape[0] >= shape[1] else lazy.T),
        "moments": linalg.moments(lazy),
        "pair": linalg.pair_product(lazy, other),
        "leading": linalg.leading_svd(lazy, max(1, k // 2)),
    }
    (got,) = dask.compute(found)
    values, error, route = got["singular_values"]
    assert np.abs(values - want).max() <= error + 1e-14 * scale
    assert linalg.ROUTES[int(route)] == ("gram" if dtype in ("float32", "float16", "bfloat16") else "tsqr")
    gram, error, _ = got["gram"]
    assert np.linalg.norm(gram - tall.T @ tall, 2) <= error
    assert np.array_equal(gram, gram.T)
    u, s, v, _, _ = got["svd"]
    assert np.abs((u * s) @ v.T - wide).max() <= 1e-13 * scale
    assert np.abs(v.T @ v - np.eye(k)).max() < 1e-13 or shape[0] < shape[1]
    q, r, _, _ = got["tsqr"]
    assert np.abs(q @ r - tall).max() <= 1e-13 * scale
    plain = linalg.moments(w)
    for one, two in zip(got["moments"], plain, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-15 * scale)
    product, error, _ = got["pair"]
    assert np.linalg.norm(product - wide.T @ other, 2) <= error
    u, s, v, error, _ = got["leading"]
    assert (np.abs(s - want[-len(s) :]) <= error + 1e-14 * scale).all()
    now = linalg.leading_svd(w, max(1, k // 2))
    np.testing.assert_allclose(s, now.s, atol=1e-9 * scale)


@pytest.mark.usefixtures("in_blocks")
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    cols=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    spans=st.integers(1, 4),
    block=st.integers(1, 400),
    float32=st.booleans(),
)
def test_any_chunks_any_spans(rows: list[int], cols: list[int], spans: int, block: int, float32: bool) -> None:
    w = gaussian(sum(rows), sum(cols)).astype("float32" if float32 else "float64")
    lazy = da.from_array(w, chunks=(tuple(rows), tuple(cols)))
    want = np.linalg.svd(w.astype(np.float64), compute_uv=False)[::-1]
    with pytest.MonkeyPatch.context() as patch, dask.config.set({"diffract_dask.threads": spans}):
        patch.setattr(folding, "BLOCK", block)
        patch.setattr(pieces, "MIN_ROWS", 2)
        values, error, _ = dask.compute(*linalg.singular_values(lazy))
    assert np.abs(values - want).max() <= error + 1e-14 * want[-1]


def test_nothing_runs_before_it_is_asked_for(no_compute: list[str]) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a chunk was made")

    lazy = da.map_blocks(refuse, chunks=((50, 50), (30, 30)), dtype="float32", meta=np.empty((0, 0), "float32"))
    stack = da.map_blocks(refuse, chunks=((2, 2), (5,), (4,)), dtype="float64", meta=np.empty((0, 0, 0)))
    for result in (
        *linalg.singular_values(lazy),
        *linalg.singular_values(lazy, method="gesdd"),
        *linalg.svd(lazy),
        *linalg.gram(lazy),
        *linalg.tsqr(lazy),
        *linalg.moments(lazy),
        *linalg.leading_svd(lazy, 3),
        *linalg.pair_product(lazy, lazy),
        *linalg.singular_values(stack),
        *linalg.svd(stack),
    ):
        assert isinstance(result, da.Array)


def test_stacks() -> None:
    w = gaussian(4, 6, 5)
    lazy = da.from_array(w, chunks=(2, 3, 4))
    want = linalg.singular_values(w)
    for one, two in zip(dask.compute(*linalg.singular_values(lazy)), want, strict=True):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(dask.compute(*linalg.svd(lazy.transpose(0, 2, 1))), linalg.svd(w.swapaxes(1, 2)), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-12)
    np.testing.assert_allclose(linalg.gram(lazy).values.compute(), linalg.gram(w).values, rtol=1e-13)
    np.testing.assert_allclose(linalg.moments(lazy).frob_norm, linalg.moments(w).frob_norm)


class Counted:
    """An array that notes what is read of it, and how much is held at once."""

    def __init__(self, w: NDArray[Any]) -> None:
        self.w, self.shape, self.dtype, self.ndim = w, w.shape, w.dtype, w.ndim
        self.read: list[tuple[Any, ...]] = []
        self.lock = threading.Lock()

    def __getitem__(self, index: Any) -> NDArray[Any]:
        if index[0] != slice(0, 0, None):  # Dask looks at the type
            with self.lock:
                self.read.append(index)
        return self.w[index]

    def __dask_tokenize__(self) -> int:
        return id(self)


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("wide", [False, True])
def test_every_entry_is_read_once(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks that are parts of large chunks, where the source can be read in parts."""
    monkeypatch.setattr(folding, "BLOCK", 4000)
    monkeypatch.setattr(pieces, "MIN_ROWS", 10)
    source = Counted(gaussian(*((20, 400) if wide else (400, 20))).astype("float32"))
    lazy = da.from_array(source, chunks=(10, 200) if wide else (200, 10), asarray=False)
    linalg.singular_values(lazy).values.compute()
    sizes = [np.zeros(source.shape)[index].size for index in source.read]
    assert sum(sizes) == 8000
    assert max(sizes) <= 500


@pytest.mark.usefixtures("in_blocks")
def test_what_blocks_share_is_made_once() -> None:
    calls: list[int] = []

    def expensive(block: NDArray[Any]) -> NDArray[Any]:
        calls.append(1)
        return block

    shift = da.from_array(np.arange(6.0), chunks=-1).map_blocks(expensive, meta=np.empty(0))
    lazy = (
        da.from_array(gaussian(200, 6), chunks=(10, 3))
        - shift
        - da.from_array(gaussian(200, 6), chunks=(13, 6)).mean(axis=0)
    )
    want = np.linalg.svd(lazy.compute(scheduler="sync"), compute_uv=False)[::-1]
    calls.clear()
    values, error, _ = dask.compute(*linalg.singular_values(lazy), scheduler="threads")
    assert np.abs(values - want).max() <= error + 1e-14 * want[-1]
    assert len(calls) == 1


@pytest.mark.usefixtures("in_blocks")
def test_one_task_and_one_state_for_each_worker() -> None:
    """Not a task per chunk, and not a tree of k × k matrices."""
    lazy = da.random.default_rng(0).standard_normal((4000, 8), chunks=(100, 4))
    with dask.config.set({"diffract_dask.threads": 3}):
        values = linalg.singular_values(lazy).values
    assert isinstance(values.dask, HighLevelGraph)
    graph = dict(dask.optimize(values)[0].dask)
    spans = [key for key in graph if isinstance(key, tuple) and "span" in str(key[0])]
    assert len(spans) == 3
    assert sum(type(node).__name__ == "Task" for node in graph.values()) <= 2 * len(spans) + 1
    state, _ = linalg.SpectrumStream().workspace((4000, 8), np.dtype("float64"))
    with dask.config.set({"diffract_dask.threads": 3}):
        tight = linalg.singular_values(lazy, budget=2 * state + 2 * 3 * 6400).values
    assert len([key for key in dict(tight.dask) if "span" in str(key[0])]) == 2


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_bad_entry_gives_nan(dtype: str) -> None:
    for bad in (np.nan, np.inf):
        w = gaussian(40, 5).astype(dtype)
        w[33, 2] = bad
        lazy = da.from_array(w, chunks=(7, 3))
        found = dask.compute({
            "values": linalg.singular_values(lazy), "svd": linalg.svd(lazy), "leading": linalg.leading_svd(lazy, 2),
            "tsqr": linalg.tsqr(lazy), "now": linalg.leading_svd(w, 2), "qr": linalg.tsqr(w),
        })[0]  # fmt: skip
        assert np.isnan(found["values"].values).all()
        assert found["values"].route == found["svd"].route == found["leading"].route == 0
        for name in ("svd", "leading", "now"):
            assert np.isnan(found[name].s).all(), name
            assert np.isnan(found[name].u).all(), name
        for name in ("tsqr", "qr"):
            assert np.isnan(found[name].r).all()
            assert np.isnan(found[name].q).all()


def test_empty_arrays() -> None:
    lazy = da.zeros((0, 5))
    assert linalg.singular_values(lazy).values.compute().shape == (0,)
    assert linalg.svd(da.zeros((5, 0))).u.compute().shape == (5, 0)


@pytest.mark.usefixtures("in_blocks")
def test_over_budget_is_refused_before_anything_runs(no_compute: list[str]) -> None:
    lazy = da.ones((10**5, 20_000), chunks=(100, -1), dtype="float32")
    for call in (linalg.singular_values, linalg.svd, linalg.gram, linalg.tsqr):
        with pytest.raises(
            OverBudgetError, match=r"100000 × 20000 float32 needs .* GiB; the budget is 1 GiB"
        ) as caught:
            call(lazy, budget="1 GiB")
        assert "leading_svd" in str(caught.value)
    with pytest.raises(OverBudgetError, match="in one task"):
        linalg.svd(lazy, method="gesdd", budget="1 GiB")
    assert linalg.leading_svd(lazy, 10, budget="1 GiB").s.shape == (10,)
    assert linalg.moments(lazy, budget="100 MiB").frob_norm.shape == ()


@pytest.mark.parametrize(
    "call",
    [linalg.singular_values, linalg.gram, linalg.svd, linalg.tsqr, linalg.moments, lambda w: linalg.leading_svd(w, 1)],
)
def test_what_is_no_real_matrix_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(MatrixError, match="complex128"):
        call(da.zeros((4, 3), dtype=complex))
    unknown = da.from_array(gaussian(20, 3), chunks=(5, 3))
    with pytest.raises(MatrixError, match="compute_chunk_sizes"):
        call(unknown[unknown[:, 0] > 0])


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="Did you mean"):
        linalg.singular_values(np.eye(2), method="gramm")
    with pytest.raises(ValueError, match="known are"):
        linalg.svd(np.eye(2), method="gram")
    with pytest.raises(ValueError, match="reduced"):
        linalg.tsqr(np.eye(2), "full")
    with pytest.raises(MatrixError, match="as many rows as columns"):
        linalg.tsqr(np.ones((2, 3)))
    with pytest.raises(MatrixError, match="as many rows"):
        linalg.pair_product(np.ones((2, 3)), np.ones((3, 3)))
    for rank in (0, 4):
        with pytest.raises(MatrixError, match="rank"):
            linalg.leading_svd(np.eye(3), rank)


def test_pair_products_of_stacks() -> None:
    a, b = gaussian(3, 8, 4), gaussian(8, 2, seed=1).astype("float32")
    values, error, route = linalg.pair_product(a, b)
    np.testing.assert_allclose(values, a.swapaxes(1, 2) @ b, rtol=1e-12)
    assert error.shape == route.shape == (3,)


@pytest.mark.usefixtures("in_blocks")
def test_the_gram_route_is_left_where_it_is_not_good_enough() -> None:
    """A second reading, by TSQR, in the task that finds out."""
    w = (gaussian(300, 8) * np.logspace(0, -6, 8)).astype("float32")
    source = Counted(w)
    lazy = da.from_array(source, chunks=(50, 8), asarray=False)
    values, _, route = dask.compute(*linalg.singular_values(lazy, rtol=1e-9))
    assert linalg.ROUTES[int(route)] == "tsqr"
    want = np.linalg.svd(w.astype(np.float64), compute_uv=False)[::-1]
    assert np.abs(values / want - 1).max() <= 1e-9
    assert len(source.read) == 12


@pytest.mark.usefixtures("in_blocks")
def test_on_a_cluster() -> None:
    from distributed import Client, LocalCluster

    w = gaussian(500, 12).astype("float32")
    want = np.linalg.svd(w.astype(np.float64), compute_uv=False)[::-1]
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        lazy = da.from_array(w, chunks=(60, 5))
        for source in (lazy, lazy.persist(), lazy - lazy.mean(axis=0) + lazy.mean(axis=0)):
            values, error, _ = dask.compute(*linalg.singular_values(source))
            assert np.abs(values - want).max() <= error + 1e-6
        u, s, v, _, _ = dask.compute(*linalg.svd(lazy))
        assert np.abs((u * s) @ v.T - w).max() < 1e-12
        assert abs(float(linalg.leading_svd(lazy, 2).s[-1].compute()) - want[-1]) < 1e-3
