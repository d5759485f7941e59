"""Routines called through SciPy's C pointers: right, in place, without the interpreter lock; and thread counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from diffract_dask import blas
from diffract_dask.blas import blas_threads
from diffract_dask.errors import MatrixError


def threads_in_use() -> set[int]:
    return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.parametrize("k", [1, 2, 33, 70])
def test_gram_and_eigenvalues(k: int) -> None:
    rows = np.random.default_rng(k).standard_normal((90, k))
    gram = np.zeros((k, k), order="F")
    blas.add_gram(gram, rows[:40])
    blas.add_gram(gram, np.asfortranarray(rows[40:]))
    expected = rows.T @ rows
    assert np.allclose(np.tril(gram), np.tril(expected), rtol=1e-13, atol=1e-13)
    assert np.array_equal(np.triu(gram, 1), np.zeros((k, k)))
    assert np.allclose(blas.eigenvalues(gram), np.linalg.eigvalsh(expected), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("k", [1, 2, 33, 70])
def test_rows_and_triangles(k: int) -> None:
    rows = np.random.default_rng(k).standard_normal((90, k))
    first, second = (np.zeros((k, k), order="F") for _ in range(2))
    blas.add_rows(first, np.array(rows[:40], order="F"))
    blas.add_rows(second, np.array(rows[40:], order="F"))
    blas.add_rows(first, second, triangular=True)
    assert np.array_equal(first, np.triu(first))
    assert np.allclose(first.T @ first, rows.T @ rows, rtol=1e-12, atol=1e-12)
    assert np.allclose(blas.svdvals(first), np.linalg.svd(rows, compute_uv=False), rtol=1e-12)


def test_failure_is_an_error() -> None:
    with pytest.raises(np.linalg.LinAlgError, match="dgesdd"):
        blas.svdvals(np.full((3, 3), np.nan, order="F"))


def test_what_would_be_read_out_of_bounds_is_refused() -> None:
    square, rows = np.zeros((4, 4), order="F"), np.ones((6, 4), order="F")
    fixed = square.copy(order="F")
    fixed.flags.writeable = False
    for bad in (np.zeros((4, 4)), fixed, np.zeros((4, 3), order="F"), np.zeros((4, 4), np.float32, order="F")):
        for call in (
            blas.eigenvalues,
            blas.svdvals,
            lambda m: blas.add_gram(m, rows),
            lambda m: blas.add_rows(m, rows),
        ):
            with pytest.raises(MatrixError, match="writable square"):
                call(bad)
    for bad in (np.ones((6, 3)), np.ones((6, 4), np.float32), np.ones(4)):
        with pytest.raises(MatrixError, match="rows of 4"):
            blas.add_gram(square, bad)
    with pytest.raises(MatrixError, match="contiguous"):
        blas.add_gram(square, np.ones((6, 8))[:, ::2])
    with pytest.raises(MatrixError, match="Fortran"):
        blas.add_rows(square, np.ones((6, 4)))


def gram_of(k: int) -> Any:
    rows = np.random.default_rng(0).standard_normal((k, k))
    gram = np.zeros((k, k), order="F")
    blas.add_gram(gram, rows)
    return gram


@pytest.mark.parametrize(
    "work",
    [
        lambda: blas.eigenvalues(gram_of(900)),
        lambda: blas.svdvals(np.asfortranarray(np.random.default_rng(0).standard_normal((600, 600)))),
        lambda: [blas.add_gram(np.zeros((1500, 1500), order="F"), np.ones((1500, 1500))) for _ in range(2)],
        lambda: blas.add_rows(np.zeros((800, 800), order="F"), np.ones((1600, 800), order="F")),
    ],
    ids=["eigenvalues", "svdvals", "add_gram", "add_rows"],
)
def test_other_threads_run_meanwhile(work: Callable[[], Any]) -> None:
    stop, ticks = threading.Event(), []

    def tick() -> None:
        while not stop.is_set():
            time.sleep(0.001)
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        with blas_threads(1):
            begin = time.perf_counter()
            work()
            end = time.perf_counter()
    finally:
        stop.set()
        ticker.join()
    inside = [begin, *(t for t in ticks if begin < t < end), end]
    longest = max(b - a for a, b in pairwise(inside))
    assert longest < 0.6 * (end - begin)


def test_blas_threads_nest_and_come_back() -> None:
    before = threads_in_use()
    with blas_threads(1):
        assert threads_in_use() == {1}
        with blas_threads(2):
            assert threads_in_use() == {1}
        assert threads_in_use() == {1}
    assert threads_in_use() == before
    with blas_threads(2):
        assert threads_in_use() == {2}
        with blas_threads(1):
            assert threads_in_use() == {1}
        assert threads_in_use() == {2}
    assert threads_in_use() == before


def test_blas_threads_leave_in_any_order() -> None:
    before = threads_in_use()
    # threadpoolctl gives OpenBLAS to one thread: the main one, here, on purpose
    threadpoolctl.threadpool_limits(limits=max(before), user_api="blas")
    first, second = blas_threads(1), blas_threads(2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert threads_in_use() == {2}
    second.__exit__(None, None, None)
    assert threads_in_use() == before


def test_blas_threads_come_back_after_an_error_and_many_threads() -> None:
    before = threads_in_use()

    def fail() -> None:
        with blas_threads(1):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert threads_in_use() == before
    seen: list[set[int]] = []

    def enter_and_leave() -> None:
        for _ in range(50):
            with blas_threads(1):
                pass
        with blas_threads(1):
            seen.append(threads_in_use())

    workers = [threading.Thread(target=enter_and_leave) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == [{1}] * 8
    assert threads_in_use() == before


def test_blas_threads_in_other_threads() -> None:
    before = threads_in_use()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with blas_threads(1):
            inside.set()
            leave.wait(10)

    worker = threading.Thread(target=hold)
    worker.start()
    inside.wait(10)
    with blas_threads(2):
        assert threads_in_use() == {1}
        leave.set()
        worker.join()
        assert threads_in_use() == {2}
    assert threads_in_use() == before


class OpenMP:
    """A library whose number of threads belongs to the calling thread."""

    def __init__(self) -> None:
        self.local = threading.local()

    def get_num_threads(self) -> int:
        return getattr(self.local, "n", 8)

    def set_num_threads(self, n: int) -> None:
        self.local.n = n


def test_libraries_on_openmp_are_set_in_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    library = OpenMP()
    monkeypatch.setattr(blas, "_libraries", lambda: ([], [library]))
    seen = []

    def other() -> None:
        with blas_threads(1), blas_threads(3):
            seen.append(library.get_num_threads())
        seen.append(library.get_num_threads())

    with blas_threads(2):
        worker = threading.Thread(target=other)
        worker.start()
        worker.join()
        assert library.get_num_threads() == 2
    assert seen == [3, 8]
    assert library.get_num_threads() == 8
