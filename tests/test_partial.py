"""Spectra that do not fit: refused, or their leading part with a status; what needs no spectrum comes all the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from numpy.typing import NDArray

from diffract_dask import Session, errors, linalg
from diffract_dask.linalg import randomised, traces
from diffract_dask.testing import matrix_with_spectrum, write_safetensors

TIGHT = {"diffract_dask.memory-budget": "5.2 MB", "diffract_dask.read-size": "32 kB", "diffract_dask.threads": 1}
FIELDS = ("weights_svals", "weights_svals_error", "weights_svals_route", "l2_norm", "stable_rank", "nuclear_norm",
          "effective_rank", "hard_rank", "esd_min", "frob_norm", "weights_std", "schatten_4_norm",
          "participation_ratio")  # fmt: skip
LOST = {"nuclear_norm", "effective_rank", "esd_min"}


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffract_dask.linalg import pieces

    monkeypatch.setattr(pieces, "PIECE", 1 << 16)
    monkeypatch.setattr(pieces, "MIN_ROWS", 4)
    monkeypatch.setattr(traces, "PANEL", 1 << 14)
    monkeypatch.setattr(randomised, "LEADING", 12)
    monkeypatch.setattr(randomised, "OVERSAMPLE", 6)


@cache
def matrix(shape: tuple[int, int] = (880, 800), dtype: str = "float32") -> NDArray[Any]:
    return matrix_with_spectrum(3.0 * np.arange(1.0, min(shape) + 1) ** -1.2, *shape, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "link"),
    [
        ((880, 800), False),
        ((800, 880), True),
        pytest.param((880, 800), True, marks=pytest.mark.slow),
        pytest.param((800, 880), False, marks=pytest.mark.slow),
    ],
)
def test_the_leading_part(tmp_path: Path, shape: tuple[int, int], link: bool) -> None:
    w = matrix(shape)
    path = write_safetensors(tmp_path / "m.safetensors", {"big.weight": w, "small.weight": w[:20, :10].copy()})
    session = Session(str(tmp_path / "s.zarr"))
    session.models.add(path, "m", link=link)
    want = np.linalg.svd(w.astype(np.float64), compute_uv=False)[::-1]
    budget = 5_200_000 + link * w.nbytes  # a file's digest needs so much more
    with dask.config.set({**TIGHT, "diffract_dask.memory-budget": budget}):
        with pytest.raises(errors.OverBudgetError, match="partial=True"):
            session.compute.apply(*FIELDS)
        plan = session.compute.plan(*FIELDS, partial=True)
        assert "leading 12 by at most 8 passes, streamed in" in plan.explain()
        assert plan.peak_bytes <= budget
        summary = session.compute.apply(*FIELDS, partial=True)
        assert not summary.failed
        assert session.compute.plan(*FIELDS, partial=True).nothing_to_do
    found = session.results.dataset(*FIELDS).sel(model_id="m")
    big = found.sel(name="big.weight")
    svals, error = big.weights_svals.values, float(big.weights_svals_error)
    assert np.isnan(svals[:-12]).all()
    assert (np.abs(svals[-12:] - want[-12:]) <= error).all()
    assert error < 0.02 * want[-1]
    assert linalg.ROUTES[int(big.weights_svals_route)] == "leading"
    np.testing.assert_allclose(big.l2_norm, want[-1], rtol=1e-6)
    np.testing.assert_allclose(big.stable_rank, (np.linalg.norm(w.astype(np.float64)) / want[-1]) ** 2, rtol=1e-5)
    np.testing.assert_allclose(big.frob_norm, np.linalg.norm(w.astype(np.float64)), rtol=1e-12)
    np.testing.assert_allclose(big.schatten_4_norm, (want**4).sum() ** 0.25, rtol=1e-12)
    np.testing.assert_allclose(big.participation_ratio, (want**2).sum() ** 2 / (want**4).sum(), rtol=1e-11)
    for name in LOST:
        assert np.isnan(big[name]), name
        assert np.isfinite(found[name].sel(name="small.weight"))
    status = session.results.status(*FIELDS).sel(model_id="m", name="big.weight")
    assert (status.state == "fresh").all()
    for name in (*LOST, "weights_svals"):
        assert status.reason.sel(field=name) == "only the leading part of the spectrum is known"


def test_the_whole_is_computed_as_soon_as_it_fits(tmp_path: Path) -> None:
    """Leading parts have the key of what they should be, but do not pass for it; nor does what was made of them."""
    w = matrix()
    session = Session(str(tmp_path / "s.zarr"))
    session.models.add({"big.weight": w}, "m")
    fields = (*FIELDS, "log_spectral_norm")
    with dask.config.set(TIGHT):
        session.compute.apply(*fields, partial=True)
    assert not session.compute.plan(*fields).nothing_to_do
    assert session.compute.plan("frob_norm").nothing_to_do
    session.compute.apply(*fields)
    assert session.compute.plan(*fields).nothing_to_do
    found = session.results.dataset(*fields).sel(model_id="m", name="big.weight")
    want = np.linalg.svd(w.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(found.nuclear_norm, want.sum(), rtol=1e-6)
    np.testing.assert_allclose(found.log_spectral_norm, 2 * np.log10(want[0]), rtol=1e-6)
    assert (session.results.status(*FIELDS).reason == "").all()
    with dask.config.set(TIGHT):
        assert session.compute.plan(*fields, partial=True).nothing_to_do


def test_hard_rank_of_a_leading_part() -> None:
    """Known where the leading part reaches below the tolerance, else not."""
    from diffract_dask.kernels import hard_rank

    spectra = np.array([[np.nan, np.nan, 1e-4, 0.5, 1.0], [np.nan, 0.2, 0.3, 0.5, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(hard_rank(spectra), [2, np.nan, 0])
    np.testing.assert_array_equal(hard_rank(np.full((1, 3), np.nan)), [np.nan])


def test_a_bad_entry_in_a_leading_part() -> None:
    w = matrix().copy()
    w[870, 7] = np.inf
    session = Session()
    session.models.add({"big.weight": w}, "m")
    with dask.config.set(TIGHT):
        session.compute.apply("stable_rank", partial=True)
    assert "NaN or infinity" in str(session.results.status("stable_rank").reason.values.ravel()[0])


def test_what_has_no_leading_part_is_still_refused(no_compute: list[str]) -> None:
    session = Session()
    session.models.add({"big.weight": matrix()}, "m")
    with dask.config.set(TIGHT), pytest.raises(errors.OverBudgetError, match="singular_vectors"):
        session.compute.apply("weights_lsvs", partial=True)


def test_lazy_leading_part() -> None:
    session = Session()
    session.models.add({"big.weight": matrix()}, "m")
    with dask.config.set(TIGHT):
        found = session.compute.lazy("l2_norm", "nuclear_norm", partial=True)
    assert abs(float(found.l2_norm[0, 0]) - 3.0) < 1e-5
    assert np.isnan(float(found.nuclear_norm[0, 0]))
