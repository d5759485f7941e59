"""Fields of the null and of noise: definitions, Diffract's values, degenerate input, streamed slices."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from numpy.typing import NDArray
from peak import peak_of
from reference import NULL
from test_kernels import CASES, REGISTRY, evaluate, fixture

from diffract_dask import Session, kernels, shuffle, testing
from diffract_dask.errors import ConfigurationError
from diffract_dask.fields import STATUS_MEANING, Status

DATA = Path(__file__).parent / "data"
EPS = np.finfo(np.float64).eps
SCALARS = [name for name in NULL if not REGISTRY.field(name).dims]
NOISE_FIELDS = [name for name in SCALARS if name.startswith(("mp_", "tw_"))]

FIXTURE = {
    "max_weights_rand_sval": 9.44415463022229,
    "min_weights_rand_sval": 1.42708088043995,
    "esd_rand_max": 3.71633569498121,
    "esd_rand_min": 0.0848566599715522,
    "mp_esd_max": 1.69107339379526,
    "mp_esd_min": 0.0172576480671908,
    "mp_bulk_std": 0.715890573033852,
    "mp_sval_max": 6.37069552333859,
    "mp_concentration": 0.9375,
    "mp_presence": 0.346806056093716,
    "mp_num_spikes": 1,
    "mp_soft_rank": 0.348224019543841,
    "tw_esd_bound": 2.00293833500379,
    "tw_num_spikes": 1,
    "w1_rand_distance": 0.238343666782975,
}


@pytest.mark.parametrize("name", FIXTURE)
def test_closed_form_fixture(name: str) -> None:
    assert evaluate(fixture(), [name])[name] == pytest.approx(FIXTURE[name], rel=1e-9)


def test_closed_form_fixture_of_the_law() -> None:
    values = evaluate(fixture(), ["mp_ks", "esd_rand"])
    assert (values["esd_rand"] ** 2).sum() == pytest.approx(20.8494345982, rel=1e-10)
    assert values["mp_ks"] == pytest.approx(0.178354646531328, rel=1e-7)
    assert shifted_ks(values) == pytest.approx(0.178354646531328, rel=1e-12)


def shifted_ks(values: dict[str, Any], **params: Any) -> Any:
    """Return the distance at the ratio 1 / (Q + 1e-8), which Diffract takes for 1 / Q."""
    names = ("mp_bulk_std", "esd", "mp_esd_max", "mp_esd_min")
    return kernels.mp_ks(values["aspect_ratio"] + 1e-8, *(values[name] for name in names), **params)


# Definitions


def tolerance(name: str, w: NDArray[np.float64], want: Any, unit: float = EPS) -> Any:
    """Return what a field may differ by when each singular value may by 32 `unit` times the greatest one."""
    greatest, long = float(np.linalg.norm(w, 2)), max(w.shape)
    step = 32 * unit * greatest
    if name.endswith("sval") or name.endswith("svals"):
        return step + 1e-15 * np.abs(want)
    if name.startswith("esd_rand"):
        return 4 * step * greatest / long + 1e-15 * np.abs(want)
    if name in ("mp_ks", "mp_concentration"):
        return 1e-10 if unit == EPS else 2e-4
    if name.startswith("w1_"):
        return 64 * unit * min(w.shape)
    return 256 * unit * np.abs(want)


DEFINED = [case for case in CASES if "300" not in case and case != "subnormal"]  # squares beyond float64


@pytest.mark.parametrize("case", DEFINED)
def test_each_field_is_what_its_definition_says(case: str) -> None:
    w = CASES[case]
    values = evaluate(w, NULL)
    for name, definition in NULL.items():
        got, want = values[name], definition(w)
        assert np.shape(got) == np.shape(want), name
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
        known = ~np.isnan(want)
        assert np.all(np.abs(np.subtract(got, want)) <= tolerance(name, w, want), where=known), (name, got, want)


@pytest.mark.parametrize("case", CASES)
def test_vectors_of_the_null_rebuild_it(case: str) -> None:
    values = evaluate(CASES[case], ["weights_rand", "weights_rand_svals", "weights_rand_lsvs"])
    u, s, v = (values[f"weights_rand_{x}"] for x in ("lsvs", "svals", "rsvs"))
    scale = float(np.abs(CASES[case]).max()) or 1.0
    np.testing.assert_allclose((u * (s / scale)) @ v.T, values["weights_rand"] / scale, atol=1e-13 * v.size)


@pytest.mark.parametrize("case", CASES)
def test_values_lie_in_the_range_that_is_declared(case: str) -> None:
    values = evaluate(CASES[case], NULL)
    for name in NULL:
        low, high = REGISTRY.field(name).valid_range or (-math.inf, math.inf)
        got = np.asarray(values[name])[~np.isnan(values[name])]
        assert np.all((got >= low) & (got <= high)), name


# Diffract's values

GOLDEN = json.loads((DATA / "diffract_random_matrix.json").read_text())["slices"]
ROUNDING = {
    # Constant, diagonal, or of lower rank: the smallest value of the null is 0 but for rounding.
    ("constant_32x16", "a"): {"min_weights_rand_sval", "esd_rand_min", "w1_rand_distance"},
    ("identity_32", "a"): {"min_weights_rand_sval", "esd_rand_min"},
    ("identity_32", "b"): {"min_weights_rand_sval", "esd_rand_min"},
    ("pl_exact_a2p5", "a"): {"min_weights_rand_sval", "esd_rand_min"},
    ("pl_exact_a2p5", "b"): {"min_weights_rand_sval", "esd_rand_min"},
}
# Entries that are all equal hold no noise: Diffract has edges of 0 and 11 spikes of size 1e-32 above them.
WITHOUT_NOISE = {("constant_32x16", "a")}
# No eigenvalue lies within the edges: Diffract has a distance of 1.
WITHOUT_BULK = {("identity_32", "a"), ("lowrank4_exact", "a"), ("lowrank4_exact", "b")}


@pytest.fixture(scope="module")
def golden_inputs() -> dict[str, dict[str, NDArray[Any]]]:
    loaded = {}
    for model in "ab":
        with np.load(DATA / f"diffract_{model}.npz") as archive:
            loaded[model] = {name: archive[name] for name in archive}
    return loaded


@pytest.mark.parametrize("model", ["a", "b"])
@pytest.mark.parametrize("case", GOLDEN)
def test_diffract_parity(case: str, model: str, golden_inputs: dict[str, dict[str, NDArray[Any]]]) -> None:
    w = golden_inputs[model][case].astype(np.float64)
    expected = {name: value for name, value in GOLDEN[case][model].items() if not isinstance(value, str)}
    got = evaluate(w, expected)
    for name, want in expected.items():
        if (case, model) in WITHOUT_NOISE and name in NOISE_FIELDS:
            assert math.isnan(got[name]), name
        elif name in ROUNDING.get((case, model), ()):
            assert abs(got[name] - want) <= 100 * EPS * max(1.0, evaluate(w, ["l2_norm"])["l2_norm"]), name
        elif name == "mp_ks" and (case, model) in WITHOUT_BULK:
            assert math.isnan(got[name])
            assert shifted_ks(got, without_bulk=1.0) == want
        elif name == "mp_ks":
            np.testing.assert_allclose(got[name], want, rtol=1e-6)
            np.testing.assert_allclose(shifted_ks(got), want, rtol=1e-9)
        else:
            np.testing.assert_allclose(got[name], want, rtol=1e-8, err_msg=name)


def test_diffract_parity_covers_what_diffract_has() -> None:
    found = {name for models in GOLDEN.values() for values in models.values() for name in values}
    assert found == set(FIXTURE) | {"mp_ks"}
    assert sum(not isinstance(x, str) for models in GOLDEN.values() for v in models.values() for x in v.values()) == 608


@pytest.mark.parametrize("case", [case for case in GOLDEN if "small" in case or "64" in case or "scale" in case])
def test_diffract_parity_from_float32(case: str, golden_inputs: dict[str, dict[str, NDArray[Any]]]) -> None:
    w = golden_inputs["a"][case]
    assert w.dtype == np.float32
    expected, unit = GOLDEN[case]["a"], float(np.finfo(np.float32).eps)
    got = evaluate(w, expected)
    for name, want in expected.items():
        if name in ROUNDING.get((case, "a"), ()):
            continue
        if math.isnan(got[name]):
            assert (case, "a") in (WITHOUT_BULK if name == "mp_ks" else WITHOUT_NOISE), name
            continue
        absolute = tolerance(name, w.astype(np.float64), want, unit)
        np.testing.assert_allclose(got[name], want, rtol=1e-6, atol=absolute, err_msg=name)


# Noise, and what is none


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gaussian_noise_of_any_scale(dtype: str) -> None:
    """512 × 128 × {1e-3, 1, 1e3} (WeightWatcher 55): the noise's scale is that of the entries, counts do not move."""
    gauss = np.random.default_rng(11).standard_normal((512, 128))
    seen = []
    for scale in (1e-3, 1.0, 1e3):
        w = (scale * gauss).astype(dtype)
        values = evaluate(w, NOISE_FIELDS)
        assert values["mp_bulk_std"] == pytest.approx(w.std(dtype=np.float64), rel=1e-2)
        assert values["mp_bulk_std"] / scale == pytest.approx(1.0, rel=1e-2)
        assert values["tw_num_spikes"] == 0
        assert values["mp_num_spikes"] <= 1
        assert values["mp_ks"] < 0.03
        seen.append({name: float(values[name]) for name in ("mp_num_spikes", "tw_num_spikes", "mp_concentration")})
    assert seen[0] == seen[1] == seen[2]


def test_signals_above_the_threshold_are_spikes() -> None:
    rng = np.random.default_rng(4)
    u, v = (np.linalg.qr(rng.standard_normal((n, 3)))[0] for n in (400, 100))
    # A signal is seen where its singular value is above s (N M)^(1/4) (Baik, Ben Arous, Péché 2005): 14.1 here.
    w = rng.standard_normal((400, 100)) + (u * [5.0, 40.0, 60.0]) @ v.T
    values = evaluate(w, NOISE_FIELDS)
    assert values["tw_num_spikes"] == 2
    assert values["mp_soft_rank"] < 0.3


def statuses(weights: NDArray[Any], *names: str) -> dict[str, tuple[float, str]]:
    """Return value and reason of fields as a session gives them, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Session(profile="ram") as session:
            session.models.add({"w.weight": weights}, "m")
            summary = session.compute.apply(*names)
            assert not summary.failed
            found, why = session.results.dataset(*names), session.results.status(*names).reason
    return {name: (float(found[name].item()), str(why.sel(field=name).item())) for name in names}


DEGENERATE = {
    "constant": (np.full((32, 16), 0.7, np.float32), Status.DEGENERATE),
    "zero": (np.zeros((8, 6)), Status.DEGENERATE),
    "nan": (np.where(np.eye(8) > 0, np.nan, 1.0), Status.NON_FINITE),
    "inf": (np.where(np.eye(8, 5) > 0, np.inf, 1.0), Status.NON_FINITE),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_input_has_no_value_and_a_status(case: str) -> None:
    w, status = DEGENERATE[case]
    names = [name for name in NOISE_FIELDS if name != "w1_rand_distance"]
    for name, found in statuses(w, *names).items():
        assert math.isnan(found[0]), name
        assert STATUS_MEANING[status] in found[1], name


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 1)])
def test_a_single_row_holds_no_noise_to_fit(shape: tuple[int, int]) -> None:
    values = evaluate(np.random.default_rng(0).standard_normal(shape), NOISE_FIELDS)
    for name in NOISE_FIELDS:
        assert math.isnan(values[name]), name


def test_one_bad_slice_in_a_batch() -> None:
    batch = np.random.default_rng(5).standard_normal((3, 8, 6))
    good = evaluate(batch, NULL)
    batch[1, 2, 3] = np.nan
    mixed = evaluate(batch, NULL)
    for name in NULL:
        np.testing.assert_array_equal(mixed[name][[0, 2]], good[name][[0, 2]], err_msg=name)
        assert np.isnan(mixed[name][1]).any() == (name != "rand_seed"), name


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(64, 64), (64, 48)])
def test_rounding_of_a_low_rank_makes_no_spikes(rank: int, dtype: str, shape: tuple[int, int]) -> None:
    w = testing.matrix_with_spectrum(np.linspace(3.0, 2.0, rank), *shape, dtype=dtype)
    values = evaluate(w, NOISE_FIELDS)
    assert values["tw_num_spikes"] == values["mp_num_spikes"] == rank
    noisy = evaluate(w + np.finfo(dtype).eps * w[::-1], NOISE_FIELDS)
    for name in NOISE_FIELDS:
        assert noisy[name] == pytest.approx(values[name], rel=1e-3, nan_ok=True), name


# Parameters


def test_the_seed_is_set_in_one_place() -> None:
    w = np.random.default_rng(0).standard_normal((30, 20))
    with Session(profile="ram") as session:
        session.models.add({"w.weight": w}, "m")
        session.compute.configure_kernel("rand_seed", seed=7)
        session.compute.apply("esd_rand_max", "weights_rand")
        found = session.results.dataset("esd_rand_max", "weights_rand")
    assert float(found.esd_rand_max.item()) == pytest.approx(np.linalg.norm(shuffle.permuted(w, 7), 2) ** 2 / 30)
    np.testing.assert_array_equal(found.weights_rand.values.reshape(30, 20), shuffle.permuted(w, 7))


def test_slices_may_have_seeds_of_their_own() -> None:
    w = np.random.default_rng(0).standard_normal((3, 6, 4))
    got = kernels.weights_rand(w, [5, 6, 5])
    np.testing.assert_array_equal(
        got, np.stack([shuffle.permuted(one, s) for one, s in zip(w, [5, 6, 5], strict=True)])
    )


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**60])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match="whole number"):
        kernels.rand_seed((3, 4), seed=seed)


@pytest.mark.parametrize("replicas", [1, 2.0, True])
def test_a_spread_needs_two_replicas(replicas: Any) -> None:
    with pytest.raises(ConfigurationError, match="whole number"):
        kernels.rand_replicas(np.eye(3), 42, np.ones(3), replicas=replicas)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0, math.nan, None, "x"])
def test_a_bound_needs_a_probability(threshold: Any) -> None:
    with pytest.raises(ConfigurationError, match="probability"):
        kernels.tw_esd_bound(24, 16, 1.0, p_value_threshold=threshold)


def test_the_bound_holds_in_as_many_cases_as_it_says() -> None:
    w = np.random.default_rng(6).standard_normal((1000, 50, 30))
    greatest = np.linalg.svd(w, compute_uv=False)[:, 0] ** 2 / 50
    for p in (0.05, 0.5):
        exceeded = np.mean(greatest > kernels.tw_esd_bound(50, 30, 1.0, p_value_threshold=p))
        assert abs(exceeded - p) < 4 * math.sqrt(p * (1 - p) / 1000) + 0.01


# Streamed

STREAMED = ["weights_rand_svals", "mp_num_spikes", "mp_bulk_std", "w1_rand_distance", "tw_esd_bound", "esd_rand_mean",
            "w1_rand_distance_std"]  # fmt: skip
SMALL = {"diffract_dask.stream-above": "1 kB", "diffract_dask.read-size": "16 kiB"}


@pytest.mark.parametrize(
    ("shape", "dtype", "limit"),
    [
        ((600, 24), "float32", 2**24),
        ((24, 600), "float64", 2**24),
        ((600, 24), "float64", 1000),
        ((24, 600), "float16", 1000),
        ((90, 90), "float32", 1000),
    ],
)
def test_streamed_agrees_with_whole(
    shape: tuple[int, int], dtype: str, limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shuffle, "SEQUENTIAL_ENTRIES", limit)
    monkeypatch.setattr(shuffle, "BLOCK", 1024)
    monkeypatch.setattr(shuffle, "BAG", 2048)
    w = np.random.default_rng(2).standard_normal(shape).astype(dtype)
    found = []
    for number, settings in enumerate(({}, SMALL)):
        with dask.config.set(settings), Session(str(tmp_path / str(number))) as session:
            session.models.add({"w.weight": w}, "m")
            text = session.compute.plan(*STREAMED).explain()
            assert ("streamed in" in text) == bool(settings)
            assert ("through a temporary file" in text) == (bool(settings) and limit == 1000)
            assert not session.compute.apply(*STREAMED).failed
            found.append(session.results.dataset(*STREAMED))
    unit = EPS if dtype == "float64" else float(np.finfo(np.float32).eps)
    for name in STREAMED:
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-5 if unit > EPS else 1e-10, err_msg=name)


def test_one_nan_in_a_streamed_slice() -> None:
    w = np.ones((500, 8), np.float32)
    w[400, 3] = np.nan
    with dask.config.set(SMALL):
        for value, status in statuses(w, "mp_num_spikes", "esd_rand_max", "w1_rand_distance_mean").values():
            assert math.isnan(value)
            assert STATUS_MEANING[Status.NON_FINITE] in status


BEFORE = """
import numpy as np
from diffract_dask import shuffle
shuffle.SEQUENTIAL_ENTRIES = int(sys.argv[2])
shuffle.BLOCK, shuffle.BAG = 2**18, 2**20
session = Session(sys.argv[1], mode="a")
FIELDS = ("weights_rand_svals", "w1_rand_distance")
session.filter(model_ids="warm").compute.apply(*FIELDS)
"""
MEASURED = """
with dask.config.set({"diffract_dask.memory-budget": "140 MiB", "diffract_dask.stream-above": "8 MiB"}):
    print(session.compute.plan(*FIELDS).peak_bytes)
    session.compute.apply(*FIELDS)
"""


@pytest.mark.parametrize("limit", [2**24, 2**20])
def test_peak_memory_is_as_projected(limit: int, tmp_path: Path) -> None:
    """A file of 39 MiB: shuffled as a whole in one case, scattered through a temporary file in the other."""
    path = tmp_path / "m.safetensors"
    testing.write_safetensors(
        path, {"w.weight": np.random.default_rng(0).standard_normal((40_000, 256)).astype(np.float32)}
    )
    with Session(str(tmp_path / "s.zarr")) as session:
        session.models.add({"w.weight": np.eye(20, 30, dtype=np.float32)}, "warm")
        session.models.add(path, "big", link=True)
    peak, printed = peak_of(BEFORE, MEASURED, tmp_path / "s.zarr", limit)
    # The allocator and the libraries' own buffers come on top of what the plan can know.
    assert peak <= int(printed) + 24 * 2**20
    with Session(str(tmp_path / "s.zarr")) as session:
        svals = session.results.dataset("weights_rand_svals").weights_rand_svals.sel(model_id="big", name="w.weight")
    assert float((svals**2).sum()) == pytest.approx(40_000 * 256, rel=1e-2)


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e-170])
def test_eigenvalues_out_of_range_have_no_bulk(scale: float) -> None:
    """Weights at the ends of float64, whose squares are infinite or zero: no count rather than a wrong one."""
    w = np.random.default_rng(0).standard_normal((30, 20)) * scale
    for name, (value, why) in statuses(w, *(name for name in NOISE_FIELDS if name != "w1_rand_distance")).items():
        assert math.isnan(value), name
        assert why, name
