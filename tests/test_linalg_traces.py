"""The Schatten 4-norm from panels of the Gram matrix: in any blocks, of any scale, where k × k does not fit."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise
from typing import Any

import dask
import dask.array as da
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diffract_dask import Session, linalg
from diffract_dask.errors import OverBudgetError
from diffract_dask.linalg import pieces, traces
from diffract_dask.testing import bestiary

DTYPES = ("float64", "float32", "float16", "bfloat16")


@pytest.fixture
def narrow_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small matrices into several panels, and work on every matrix in panels."""
    monkeypatch.setattr(traces, "PANEL", 8)
    monkeypatch.setattr(pieces, "GROUP", 0)


def exact(w: NDArray[Any]) -> Any:
    """The norm in 60 digits, from the entries of the Gram matrix."""
    with mpmath.workdps(60):
        tall = mpmath.matrix((w if w.shape[0] >= w.shape[1] else w.T).astype(np.float64).tolist())
        return mpmath.mnorm(tall.T * tall, "f") ** 0.5


def streamed(w: NDArray[Any], cuts: list[int]) -> float:
    tall = w if w.shape[0] >= w.shape[1] else w.T
    blocks = [tall[a:b] for a, b in pairwise([0, *sorted({cut % len(tall) for cut in cuts} - {0}), len(tall)])]
    twin, half = linalg.SchattenStream(), len(blocks) // 2
    states = []
    for part in (blocks[:half], blocks[half:]):
        state = twin.start(w.shape, w.dtype)
        for block in part:
            state = twin.update(state, block)
        states.append(state)
    return float(twin.finish(twin.merge(*states), lambda: iter(blocks), {})[0])


@pytest.mark.parametrize("panels", ["one", "several"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_matrices_on_which_numerics_break(request: pytest.FixtureRequest, dtype: str, panels: str) -> None:
    if panels == "several":
        request.getfixturevalue("narrow_panels")
    for name, w in bestiary(dtype).items():
        true = exact(w)
        lazy = linalg.schatten_4_norm(da.from_array(w, chunks=(4, 5))).compute()
        for found in (linalg.schatten_4_norm(w), streamed(w, [2, 3, 7]), lazy):
            allowed = linalg.relative_error(*w.shape) * true + np.finfo(np.float64).smallest_subnormal
            assert abs(mpmath.mpf(float(found)) - true) <= allowed, name


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32), st.lists(st.integers(0, 99), max_size=4),
    st.integers(1, 4000), st.integers(-1000, 900),
)  # fmt: skip
def test_any_blocks_any_panels(m: int, n: int, seed: int, cuts: list[int], panel: int, exponent: int) -> None:
    w = np.random.default_rng(seed).standard_normal((m, n))
    want = float((np.linalg.svd(w, compute_uv=False) ** 4).sum() ** 0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "PANEL", panel)
        assert streamed(w, cuts) == pytest.approx(want, rel=1e-12)
        assert streamed(np.ldexp(w, exponent), cuts) == pytest.approx(math.ldexp(want, exponent), rel=1e-12)


def test_stacks_and_empty_matrices() -> None:
    w = np.random.default_rng(0).standard_normal((3, 2, 7, 5))
    want = (np.linalg.svd(w, compute_uv=False) ** 4).sum(-1) ** 0.25
    np.testing.assert_allclose(linalg.schatten_4_norm(w), want, rtol=1e-13)
    np.testing.assert_allclose(linalg.schatten_4_norm(da.from_array(w, chunks=(2, 1, 3, 4))), want, rtol=1e-13)
    assert linalg.schatten_4_norm(np.zeros((2, 0, 5))).tolist() == [0.0, 0.0]
    assert linalg.schatten_4_norm(np.zeros((4, 3))) == 0.0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_entry_gives_nan(request: pytest.FixtureRequest, dtype: str, bad: float) -> None:
    w = np.ones((2, 30, 8), dtype)
    w[1, 29, 7] = bad
    assert np.isnan(linalg.schatten_4_norm(w)).tolist() == [False, True]
    request.getfixturevalue("narrow_panels")
    assert np.isnan(linalg.schatten_4_norm(w)).tolist() == [False, True]
    assert math.isnan(streamed(w[1], [10]))


@pytest.mark.parametrize("shape", [(1400, 700), (700, 1400)])
@pytest.mark.parametrize("panel", [1 << 16, 1 << 19, 1 << 23])
def test_workspace_is_an_upper_bound(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], panel: int) -> None:
    monkeypatch.setattr(traces, "PANEL", panel)
    monkeypatch.setattr(pieces, "PIECE", 1 << 18)
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    tracemalloc.start()
    linalg.schatten_4_norm(w)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    projected = linalg.schatten_workspace(1, *shape, 4)
    assert 0.4 * projected <= peak <= projected


@pytest.mark.parametrize("k", [1, 100, 1024, 1025, 4096, 16384, 70000])
def test_panels_are_few(k: int) -> None:
    words = linalg.SchattenStream().route((2 * k, k), np.dtype("float32"), {}).split()
    count = int(words[2])
    assert words == ["gram", "in", str(count), "panel" if count == 1 else "panels"]
    assert count <= 18
    assert (count == 1) == (8 * k * k <= traces.PANEL)
    state, _ = linalg.SchattenStream().workspace((2 * k, k), np.dtype("float32"))
    assert k < 4096 or state < 0.5 * 8 * k * k


def test_it_comes_where_the_spectrum_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PANEL", 1 << 16)
    monkeypatch.setattr(pieces, "PIECE", 1 << 14)
    monkeypatch.setattr(pieces, "MIN_ROWS", 4)
    w = np.random.default_rng(0).standard_normal((1000, 800)).astype(np.float32)
    session = Session()
    session.models.add({"big.weight": w}, "m")
    tight = {"diffract_dask.memory-budget": "3 MB", "diffract_dask.read-size": "64 kB", "diffract_dask.threads": 1}
    names = ("schatten_4_norm", "participation_ratio", "frob_norm")
    with dask.config.set(tight):
        with pytest.raises(OverBudgetError):
            session.compute.apply("l2_norm")
        plan = session.compute.plan(*names)
        assert "panels, streamed in 1 span" in plan.explain()
        assert plan.peak_bytes < 3_000_000 < 8 * 800**2
        assert not session.compute.apply(*names).failed
    found = session.results.dataset(*names)
    squares = np.linalg.svd(w.astype(np.float64), compute_uv=False) ** 2
    assert float(found.schatten_4_norm[0, 0]) == pytest.approx(np.sum(squares**2) ** 0.25, rel=1e-12)
    assert float(found.participation_ratio[0, 0]) == pytest.approx(squares.sum() ** 2 / np.sum(squares**2), rel=1e-12)
