"""Seeded permutations: Diffract's for most matrices, a scatter in bounded memory for large ones."""

from __future__ import annotations

import gc
import hashlib
import math
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from diffract_dask import linalg, shuffle
from diffract_dask.errors import ConfigurationError, MatrixError, OverBudgetError
from diffract_dask.linalg import folding


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scatter matrices of more than 50 entries, in blocks of 64 and bags of up to 32."""
    monkeypatch.setattr(shuffle, "SEQUENTIAL_ENTRIES", 50)
    monkeypatch.setattr(shuffle, "BLOCK", 64)
    monkeypatch.setattr(shuffle, "BAG", 32)


def diffract(w: NDArray[Any], seed: int) -> NDArray[Any]:
    """Return the permutation as Diffract writes it."""
    index = np.arange(w.size)
    np.random.default_rng(seed).shuffle(index)
    return w.copy().reshape(-1)[index].reshape(w.shape)


def lines(w: NDArray[Any], step: int) -> Iterator[NDArray[Any]]:
    """Yield a matrix as a streamed slice is read."""
    tall = w if w.shape[0] >= w.shape[1] else w.T
    return (tall[i : i + step] for i in range(0, len(tall), step))


def streamed(w: NDArray[Any], step: int, seed: int) -> NDArray[Any]:
    tall = np.concatenate(list(shuffle.permuted_blocks(w.shape, w.dtype, lines(w, step), seed)))
    return tall if w.shape[0] >= w.shape[1] else tall.T


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**53), st.sampled_from(["f2", "f4", "f8", "i1"]))
def test_it_is_diffracts_permutation(rows: int, cols: int, seed: int, dtype: str) -> None:
    w = np.arange(2 * rows * cols).reshape(2, rows, cols).astype(dtype)
    want = np.stack([diffract(one, seed) for one in w])
    for got in (shuffle.permuted(w, seed), np.stack([shuffle.permuted(one, seed) for one in w])):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(streamed(w[1], 7, seed), want[1])


def test_the_numbers_are_these_on_every_machine() -> None:
    w = np.arange(4096, dtype="<f4").reshape(128, 32)
    assert hashlib.sha256(shuffle.permuted(w).tobytes()).hexdigest()[:16] == "50767e733df1b39c"


def test_the_numbers_of_a_scatter_are_these_on_every_machine(small: None) -> None:
    w = np.arange(4096, dtype="<f4").reshape(128, 32)
    assert hashlib.sha256(shuffle.permuted(w).tobytes()).hexdigest()[:16] == "d041c2208eca8496"


@pytest.mark.parametrize("bag", [32, 4])
def test_a_scatter_does_not_depend_on_how_the_matrix_arrives(
    small: None, monkeypatch: pytest.MonkeyPatch, bag: int
) -> None:
    monkeypatch.setattr(shuffle, "BAG", bag)  # 4: more than 256 bags, so that their numbers take two bytes
    w = np.arange(41 * 53, dtype=np.int16).reshape(41, 53)
    want = shuffle.permuted(w, 3)
    assert sorted(want.ravel()) == sorted(w.ravel())
    assert not np.array_equal(want, w)
    for step in (1, 2, 10, 53):
        np.testing.assert_array_equal(streamed(w, step, 3), want)
    np.testing.assert_array_equal(shuffle.permuted(w.T, 3).T, want)
    np.testing.assert_array_equal(shuffle.permuted(w[None, None], 3)[0, 0], want)
    assert not np.array_equal(shuffle.permuted(w, 4), want)


def test_every_permutation_is_equally_likely(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "SEQUENTIAL_ENTRIES", 1)
    monkeypatch.setattr(shuffle, "BAG", 2)
    w = np.arange(4).reshape(2, 2)
    seen: dict[bytes, int] = {}
    for seed in range(4800):
        found = shuffle.permuted(w, seed).tobytes()
        seen[found] = seen.get(found, 0) + 1
    assert len(seen) == 24
    assert stats.chisquare(list(seen.values())).pvalue > 1e-3


def test_entries_go_everywhere(small: None) -> None:
    ends = np.array([np.argmax(shuffle.permuted(np.eye(1, 400), seed)) for seed in range(2000)])
    assert stats.kstest(ends / 400, "uniform").pvalue > 1e-3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_special_values_are_kept(seed: int, rows: int) -> None:
    w = np.full((rows, 3), np.nan, np.float32)
    w[0] = [np.inf, -0.0, 5e-45]
    got = shuffle.permuted(w, seed)
    assert sorted(got.tobytes()[i : i + 4] for i in range(0, got.nbytes, 4)) == sorted(
        w.tobytes()[i : i + 4] for i in range(0, w.nbytes, 4)
    )


def test_memory_is_as_stated_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "SEQUENTIAL_ENTRIES", 2**16)
    monkeypatch.setattr(shuffle, "BLOCK", 2**16)
    monkeypatch.setattr(shuffle, "BAG", 2**16)
    row = np.ones((64, 1000), np.float32)
    for count in (16, 64):
        tracemalloc.start()
        total = sum(
            float(block.sum())
            for block in shuffle.permuted_blocks((64 * count, 1000), np.float32, (row for _ in range(count)))
        )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total == 64000.0 * count
        assert peak <= shuffle.blocks_workspace((64 * count, 1000), np.float32) + 2**17


@pytest.mark.parametrize(("n", "rows", "cols"), [(1, 300, 200), (5, 100, 200), (1, 200, 900)])
@pytest.mark.parametrize("limit", [2**24, 1000])
def test_workspace_is_an_upper_bound(monkeypatch: pytest.MonkeyPatch, n: int, rows: int, cols: int, limit: int) -> None:
    monkeypatch.setattr(shuffle, "SEQUENTIAL_ENTRIES", limit)
    w = np.ones((n, rows, cols), np.float32)
    tracemalloc.start()
    out = shuffle.permuted(w)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - out.nbytes <= shuffle.workspace(n, rows, cols, 4) + 2**16


@pytest.mark.parametrize("limit", [10, 1000])
@pytest.mark.parametrize("count", [6, 8])
def test_blocks_of_another_matrix_are_refused(monkeypatch: pytest.MonkeyPatch, limit: int, count: int) -> None:
    monkeypatch.setattr(shuffle, "SEQUENTIAL_ENTRIES", limit)
    with pytest.raises((MatrixError, ValueError)):
        list(shuffle.permuted_blocks((7, 5), np.float32, (np.ones((1, 5), np.float32) for _ in range(count))))


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="from 0 to"):
        shuffle.permuted(np.eye(2), -1)


# Dask arrays


@pytest.mark.parametrize("limit", [2**24, 50])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1"])
@pytest.mark.parametrize("shape", [(41, 23), (23, 41), (16, 16), (400, 1)])
def test_every_chunking_gives_what_numpy_gives(
    small: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: str, limit: int
) -> None:
    monkeypatch.setattr(shuffle, "SEQUENTIAL_ENTRIES", limit)
    monkeypatch.setattr(folding, "BLOCK", 300)
    w = (np.arange(math.prod(shape)) % 120).reshape(shape).astype(dtype)
    want = linalg.shuffle(w, 3)
    np.testing.assert_array_equal(want, shuffle.permuted(w, 3))
    for chunks in ((-1, -1), (7, -1), (-1, 4), (5, 3), (1, -1)):
        lazy = linalg.shuffle(da.from_array(w, chunks=chunks), 3)
        assert (lazy.shape, lazy.dtype) == (shape, w.dtype)
        np.testing.assert_array_equal(lazy.compute(), want)


def test_a_large_dask_array_goes_through_a_file_that_is_deleted(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(folding, "BLOCK", 300)
    w = np.arange(2000, dtype=np.float32).reshape(100, 20)
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        lazy = linalg.shuffle(da.from_array(w, chunks=(30, 7)), 5)
        assert len(lazy.chunks[0]) > 10
        assert not list(tmp_path.iterdir())
        seen = lazy.map_blocks(lambda block: block * 0 + len(list(tmp_path.iterdir())), dtype=np.float32)
        assert float(seen.max().compute()) == 1
        np.testing.assert_array_equal(lazy[40:60, 3].compute(), shuffle.permuted(w, 5)[40:60, 3])
        assert not list(tmp_path.iterdir())


def test_stacks_of_dask_arrays_and_what_is_refused(small: None, no_compute: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="from 0 to"):
        linalg.shuffle(da.ones((3, 4)), -1)
    with pytest.raises(MatrixError, match="complex128"):
        linalg.shuffle(da.ones((30, 4), dtype=complex))
    with pytest.raises(OverBudgetError, match="shuffle of a matrix 300 × 4"):
        linalg.shuffle(da.ones((300, 4)), budget="100 B")
    with pytest.raises(OverBudgetError, match="shuffle of a matrix 3 × 4"):
        linalg.shuffle(da.ones((3, 4)), budget="100 B")


def test_stacks_of_dask_arrays(small: None) -> None:
    w = np.arange(240.0).reshape(2, 2, 6, 10)
    lazy = linalg.shuffle(da.from_array(w, chunks=(1, 2, 4, 4)), 1)
    np.testing.assert_array_equal(lazy.compute(), shuffle.permuted(w, 1))


def test_other_processes_read_the_file(small: None) -> None:
    """The copy of the handle does not delete it."""
    from diffract_dask.linalg.shuffling import ScatterStream

    stream = ScatterStream(3)
    (made,) = stream.finish(stream.update(stream.start((20, 5), np.dtype("f8")), np.ones((20, 5))), None, None)
    copy = pickle.loads(pickle.dumps(made))
    path = made.path
    del made, copy
    gc.collect()
    assert path.exists()
    path.unlink()
