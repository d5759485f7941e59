"""Every field against its entry in the table of definitions, and what must not change it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import dask
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import FITS, KNOWN_SPECTRA, TABLE, Entry
from test_kernels import CASES, REGISTRY, evaluate

from diffract_dask import Session, testing
from diffract_dask.kernel import WEIGHTS

EPS = float(np.finfo(np.float64).eps)
SLICED = {name: entry for name, entry in TABLE.items() if entry.level == "slice"}
examples = settings(max_examples=15, deadline=None, derandomize=True)  # counts may differ at a tie, which is no fault


@st.composite
def generic(draw: Any) -> NDArray[np.float64]:
    """Draw a matrix as layers are: noise, heavy-tailed noise, noise and signals, a power law; of any shape."""
    m, n = draw(st.integers(4, 24)), draw(st.integers(4, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["gauss", "student", "spiked", "power"]))
    if kind == "power":
        return testing.matrix_with_spectrum(testing.power_law_svals(min(m, n), 1.0), m, n, int(rng.integers(2**16)))
    w = rng.standard_t(3, (m, n)) if kind == "student" else rng.standard_normal((m, n))
    return w + 3 * np.outer(rng.standard_normal(m), rng.standard_normal(n)) if kind == "spiked" else w


def assert_close(
    got: Any, want: Any, entry: Entry, name: str, norm: float, relative: float, scale: float = 1.0
) -> None:
    """Compare within `relative` of the value's size and, unless only that counts, the norm to the field's power."""
    allowed = relative * (np.abs(want) + (0.0 if entry.own_size else (norm ** (entry.power or 0)) * scale))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
    assert np.all(np.abs(np.subtract(got, want)) <= allowed, where=~np.isnan(want)), (name, got, want)


def same(w: NDArray[Any], other: NDArray[Any], change: str) -> None:
    """Check that a change of `w` into `other` leaves the fields that it should."""
    names = [name for name, entry in SLICED.items() if change in entry.kept_by]
    one, two, norm = evaluate(w, names), evaluate(other, names), float(np.linalg.norm(w, 2))
    for name in names:
        assert_close(two[name], one[name], SLICED[name], name, norm, 1e-10)


def test_every_field_has_an_entry() -> None:
    assert set(TABLE) == set(REGISTRY.fields), "describe new fields in tests/reference.py"
    assert {name for name, entry in TABLE.items() if entry.level == "model"} == {
        name for name in REGISTRY.fields if REGISTRY.producer(name).level == "model"
    }
    # errors and routes by spectra that are known (test_linalg), vectors by what they rebuild (test_kernels), bootstrap
    # p-values by samples of known families and replicas made one by one (test_powerlaw, test_heavy_tailed)
    judged_otherwise = {"weights_svals_error", "weights_svals_route", "pl_p_value", "tpl_p_value", "expon_p_value"}
    judged_otherwise |= {name for name in TABLE if name.endswith("svs")}
    assert {name for name, entry in TABLE.items() if entry.value is None} == judged_otherwise


@pytest.mark.parametrize("shape", [(19, 12), (12, 19), (14, 14)])
def test_each_field_is_what_its_definition_says(shape: tuple[int, int]) -> None:
    w = np.random.default_rng(1).standard_t(4, shape)
    norm, values = float(np.linalg.norm(w, 2)), evaluate(w, SLICED)
    for name, entry in SLICED.items():
        if entry.value is not None:
            assert_close(values[name], entry.value(w), entry, name, norm, 1e-11)


WITHOUT_A_TAIL = ["zero", "constant", "identity", "orthogonal", "rank_2", "one_row", "lauchli", "1e300", "1e-300"]


@pytest.mark.parametrize("case", WITHOUT_A_TAIL)
def test_spectra_without_a_tail_are_what_the_definitions_say(case: str) -> None:
    values = evaluate(CASES[case], FITS)
    for name, value in FITS.items():
        with np.errstate(over="ignore"):
            assert float(values[name]) == pytest.approx(value(CASES[case]), rel=1e-10, abs=1e-323, nan_ok=True), name
    assert np.isnan(values["pl_alpha"])


def test_each_model_level_field_is_what_its_definition_says() -> None:
    rng = np.random.default_rng(2)
    model = [rng.standard_normal(shape) for shape in ((15, 9), (8, 12), (10, 10), (6, 4))]
    for producer in REGISTRY.kernels.values():
        if producer.level == "model":
            inputs = [np.array([evaluate(w, [needed])[needed] for w in model]) for needed in producer.inputs]
            for name, got in zip(producer.outputs, np.atleast_1d(producer.function(*inputs)), strict=True):
                value = TABLE[name].value
                assert value is not None
                assert got == pytest.approx(value(model), rel=1e-12), name
                assert not name.endswith("_skipped") or got == 1  # the slice of four eigenvalues


@pytest.mark.parametrize("case", KNOWN_SPECTRA)
def test_known_spectra(case: str) -> None:
    w, spectrum = KNOWN_SPECTRA[case]
    svals = np.sort(spectrum())
    values = evaluate(w, ["weights_svals", "nuclear_norm", "l2_norm", "frob_norm", "esd_max", "effective_rank"])
    np.testing.assert_allclose(values["weights_svals"], svals, atol=16 * EPS * svals[-1], rtol=0)
    share = svals / svals.sum()
    want = {
        "nuclear_norm": svals.sum(),
        "l2_norm": svals[-1],
        "frob_norm": np.sqrt((svals**2).sum()),
        "esd_max": svals[-1] ** 2 / max(w.shape),
        "effective_rank": np.exp(-(share * np.log(share)).sum()),
    }
    for name, value in want.items():
        assert values[name] == pytest.approx(value, rel=1e-12), name


@examples
@given(generic())
def test_transpose(w: NDArray[np.float64]) -> None:
    same(w, w.T, "transpose")


@examples
@given(generic(), st.integers(0, 2**32))
def test_permutation_of_rows_and_columns(w: NDArray[np.float64], seed: int) -> None:
    rng = np.random.default_rng(seed)
    same(w, w[rng.permutation(len(w))][:, rng.permutation(w.shape[1])], "permutation")


@examples
@given(generic(), st.integers(0, 2**16))
def test_rotation(w: NDArray[np.float64], seed: int) -> None:
    m, n = w.shape
    left, right = (testing.matrix_with_spectrum(np.ones(k), k, k, seed) for k in (m, n))
    same(w, left @ w @ right, "rotation")


@examples
@given(generic(), st.floats(-30, 30))
def test_scale(w: NDArray[np.float64], exponent: float) -> None:
    factor = 10**exponent
    names = [name for name, entry in SLICED.items() if entry.power is not None]
    one, two, norm = evaluate(w, names), evaluate(factor * w, names), float(np.linalg.norm(w, 2))
    for name in names:
        power = SLICED[name].power or 0
        scale = factor**power
        assert_close(two[name], one[name] * scale, SLICED[name], name, norm, 1e-10, scale)


@examples
@given(st.integers(4, 12), st.integers(4, 12), st.integers(1, 4), st.integers(0, 2**32))
def test_a_batch_is_its_slices(m: int, n: int, count: int, seed: int) -> None:
    batch = np.random.default_rng(seed).standard_normal((count, m, n))
    together = evaluate(batch, SLICED)
    for i, w in enumerate(batch):
        alone, norm = evaluate(w, SLICED), float(np.linalg.norm(w, 2))
        for name, entry in SLICED.items():
            if entry.power is not None:
                assert_close(together[name][i], alone[name], entry, name, norm, 1e-12)


@examples
@given(generic())
def test_float32_within_the_tolerance_of_the_table(w: NDArray[np.float64]) -> None:
    single = w.astype(np.float32)
    names = [name for name, entry in SLICED.items() if entry.power is not None]
    one, two = evaluate(single.astype(np.float64), names), evaluate(single, names)
    for name in names:
        assert_close(two[name], one[name], SLICED[name], name, float(np.linalg.norm(w, 2)), SLICED[name].float32)


# Chunks


def spans(w: NDArray[Any], cuts: list[int]) -> Iterator[NDArray[Any]]:
    edges = [0, *sorted({cut % len(w) for cut in cuts}), len(w)]
    return (w[a:b] for a, b in pairwise(edges))


@examples
@given(generic(), st.lists(st.integers(0, 1000), max_size=5), st.integers(0, 1000))
def test_streamed_in_any_blocks_is_in_memory(w: NDArray[np.float64], cuts: list[int], merge: int) -> None:
    tall, norm = (w if w.shape[0] >= w.shape[1] else w.T), float(np.linalg.norm(w, 2))
    whole = evaluate(w, SLICED)
    for declared in REGISTRY.kernels.values():
        if declared.blocks is None:
            continue
        stream, half = declared.blocks, merge % len(tall)
        states = []
        for part in (tall[:half], tall[half:]):
            state = stream.start(w.shape, w.dtype)
            for block in spans(part, cuts) if len(part) else ():
                state = stream.update(state, block)
            states.append(state)
        known = {name: whole[name] for name in declared.inputs if name != WEIGHTS}
        made = stream.finish(stream.merge(*states), lambda: spans(tall, cuts), {**declared.defaults, **known})
        for name, value in zip(declared.outputs, made, strict=True):
            if SLICED[name].power is not None:
                assert_close(value, whole[name], SLICED[name], name, norm, 1e-10)


@pytest.mark.parametrize("shape", [(300, 20), (20, 300)])
def test_a_session_gives_the_same_by_either_route(shape: tuple[int, int]) -> None:
    names = [name for name in SLICED if not REGISTRY.field(name).dims and SLICED[name].power is not None]
    w = np.random.default_rng(3).standard_normal(shape)
    found = []
    for settings_of in ({}, {"diffract_dask.stream-above": "1 kB", "diffract_dask.read-size": "4 kiB"}):
        with dask.config.set(settings_of), Session(profile="ram") as session:
            session.models.add({"w.weight": w}, "m")
            assert ("streamed in" in session.compute.plan(*names).explain()) == bool(settings_of)
            assert not session.compute.apply(*names).failed
            found.append(session.results.dataset(*names))
    for name in names:
        whole, streamed = (float(one[name].item()) for one in found)
        assert_close(streamed, whole, SLICED[name], name, float(np.linalg.norm(w, 2)), 1e-10)
