"""Spectra, from the checkpoint to the results: matrices on which numerics break, and what must not change them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from peak import peak_of
from reference import MODEL, SLICE, svals
from test_kernels import DATA, GOLDEN, NOISE, tolerance

from diffract_dask import Session, blas, errors, linalg, testing
from diffract_dask.testing import write_safetensors

MiB = 2**20
EPS = float(np.finfo(np.float64).eps)
SCALARS = [name for name in SLICE if name not in ("weights_svals", "esd")]
STREAMED = {"diffract_dask.stream-above": "1 B", "diffract_dask.read-size": "2 kiB"}


def gaussian(*shape: int, seed: int = 0, dtype: str = "float64") -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def computed(model: Any, *fields: str, **options: Any) -> Any:
    """Return `fields` of `model`, added to a session of its own."""
    session = Session()
    session.models.add(model, "m", **options)
    summary = session.compute.apply(*fields)
    assert summary.failed == ()
    return session.results.dataset(*fields).sel(model_id="m")


# One bad slice


OF_FINITE_ENTRIES = {"weights_mean", "weights_std", "weights_min", "weights_max", "weights_absmax", "weights_kurtosis"}
OF_FINITE_ENTRIES |= {"zero_fraction", "nonfinite_fraction", "greater_dim", "lower_dim", "aspect_ratio"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("streamed", [False, True])
def test_one_bad_matrix_among_good_ones(tmp_path: Path, dtype: str, streamed: bool) -> None:
    """One NaN or infinity in one of several matrices of one shape (sd-scripts 517).

    That slice has NaN with the status ``non_finite``, what can be said of its finite entries is said, all other
    slices are as they are without it, and the request succeeds.
    """
    model = {f"h.{i}.weight": gaussian(20, 12, seed=i, dtype=dtype) for i in range(4)}
    good = computed(model, *SCALARS, "weights_svals")
    session = Session()
    for bad in (np.nan, np.inf, -np.inf):
        model["h.2.weight"][13, 5] = bad
        path = write_safetensors(tmp_path / f"{bad}.safetensors", model)
        session.models.add(path, str(bad), link=streamed)
    fields = (*SCALARS, "weights_svals", "param_norm")
    with dask.config.set(STREAMED if streamed else {}):
        summary = session.compute.apply(*fields)
    assert summary.failed == ()
    found, status = session.results.dataset(*fields), session.results.status(*fields)
    undefined = set(SLICE) - OF_FINITE_ENTRIES - {"esd"}
    for name in (*SCALARS, "weights_svals"):
        bad_ones = found[name].sel(name="h.2.weight")
        assert bad_ones.isnull().all() if name in undefined else bad_ones.notnull().all(), name
        others = [f"h.{i}.weight" for i in (0, 1, 3)]
        want, got = (x.sel(name=others).transpose(..., "name") for x in (good[name], found[name]))
        np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-9, err_msg=name)
        reasons = status.reason.sel(field=name)
        assert (reasons.sel(name=others) == "").all()
        if name in undefined:
            assert (reasons.sel(name="h.2.weight") == "the weights hold NaN or infinity").all()
    assert (status.state == "fresh").all()
    assert (session.store.view().status["stable_rank"] == [0, 0, 2, 0]).all()
    assert (found.nonfinite_fraction.sel(name="h.2.weight") == 1 / 240).all()
    assert found.param_norm.isnull().all()


# The bestiary


def bestiary() -> dict[str, NDArray[np.float64]]:
    g = gaussian(24, 16)
    return {
        "lauchli": testing.lauchli(20, 1e-9),
        "hilbert": testing.hilbert(18),
        "kahan": testing.kahan(24),
        "rank_4": gaussian(40, 4, seed=1) @ gaussian(4, 28, seed=2),
        "identity": np.eye(20),
        "orthogonal": testing.matrix_with_spectrum(np.ones(20), 20, 20),
        "constant": np.full((20, 12), 0.7),
        "zero": np.zeros((9, 7)),
        "1e30": 1e30 * g,
        "1e-30": 1e-30 * g,
        "1e300": 1e300 * g,
        "1e-300": 1e-300 * g,
        "float32_subnormal": 1e-42 * g,
        "subnormal": 1e-312 * g,
        "mixed": g * 10.0 ** np.random.default_rng(3).integers(-150, 150, g.shape),
        "one_large": np.where(np.arange(g.size).reshape(g.shape) == 77, 1e18, g),
        "wide": g.T.copy(),
    }


def held(dtype: str) -> dict[str, NDArray[Any]]:
    """Return the bestiary in a stored type, without what that type cannot hold."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with np.errstate(all="ignore"):
        rounded = {name: w.astype(kind) for name, w in bestiary().items()}
    return {name: w for name, w in rounded.items() if np.isfinite(w.astype(np.float64)).all()}


BEASTS = ("weights_svals", "weights_svals_error", "weights_svals_route", *SCALARS)


@pytest.fixture(scope="module", params=["float64", "float32", "float16", "bfloat16"])
def beasts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the stored type, the matrices as float64, and their results, copied and whole or linked and streamed."""
    dtype = request.param
    model = held(dtype)
    path = write_safetensors(tmp_path_factory.mktemp("beasts") / "m.safetensors", model)
    session = Session()
    session.models.add(path, "whole")
    session.compute.apply(*BEASTS)
    other = Session()
    other.models.add(path, "streamed", link=True)
    with dask.config.set(STREAMED):
        assert "streamed in" in other.compute.plan(*BEASTS).explain()
        other.compute.apply(*BEASTS)
    wide = {name: w.astype(np.float64) for name, w in model.items()}
    return dtype, wide, {"whole": (session, session.results.dataset(*BEASTS).sel(model_id="whole")),
                         "streamed": (other, other.results.dataset(*BEASTS).sel(model_id="streamed"))}  # fmt: skip


@pytest.mark.parametrize("route", ["whole", "streamed"])
def test_singular_values_are_within_the_stated_error(beasts: Any, route: str) -> None:
    """Läuchli, Hilbert, Kahan, exact rank 4, identity, orthogonal, constant, zero, scales of 1e±30 and 1e±300,
    subnormal numbers, entries of very different size; each in four stored types.

    Every singular value is within ``weights_svals_error`` of LAPACK's in float64 on the matrix scaled to order one,
    and that error is within the tolerance: the rounding unit of the stored type (float32 for narrower ones).
    """
    dtype, matrices, results = beasts
    _, found = results[route]
    unit = 64 * EPS if dtype == "float64" else float(np.finfo(np.float32).eps)
    for name, w in matrices.items():
        want, row = svals(w), found.sel(name=name)
        got, error = row.weights_svals.values[: len(want)], float(row.weights_svals_error)
        lapack = 8 * EPS * want[-1] + 1e-322
        assert np.all(np.abs(got - want) <= error + lapack), (name, np.abs(got - want).max(), error)
        assert error <= unit * want[-1] + 1e-322, (name, error, want[-1])
        assert np.all(np.diff(got) >= 0), name
        assert np.isnan(row.weights_svals.values[len(want) :]).all()
        assert not row.weights_svals_route.isin([0, 4, 5]), name


def test_fields_of_the_bestiary(beasts: Any) -> None:
    """The same matrices: every scalar field against its definition in 50 digits."""
    dtype, matrices, results = beasts
    unit = EPS if dtype == "float64" else float(np.finfo(np.float32).eps)
    got = {
        (route, field): found[field].to_series().to_dict() for route, (_, found) in results.items() for field in SCALARS
    }
    reasons = {
        route: session.results.status(*SCALARS).squeeze("model_id").reason.to_series().to_dict()
        for route, (session, _) in results.items()
    }
    for name, w in matrices.items():
        for field in SCALARS:
            with np.errstate(all="ignore"):
                want = SLICE[field](w)
                allowed = tolerance(field, w, want, unit) if np.isfinite(want) else 0.0
            for route in results:
                value = got[route, field][name]
                same = np.array_equal(value, want, equal_nan=True) or abs(value - want) <= allowed
                assert same, (route, name, field, value, want)
                reason = reasons[route][field, name]
                assert reason.startswith("the quantity is not defined") == np.isnan(want), (route, name, field)


@pytest.mark.parametrize("route", ["whole", "streamed"])
def test_what_is_known_of_the_bestiary(beasts: Any, route: str) -> None:
    """What theory says of them, without any numerical library: ranks, norms, and NaN only where undefined."""
    dtype, matrices, results = beasts
    _, found = results[route]
    close = {"rel": 1e-12 if dtype == "float64" else 1e-6}
    columns = {field: found[field].to_series().to_dict() for field in SCALARS}
    at = {name: {field: columns[field][name] for field in SCALARS} for name in matrices}
    zero = at["zero"]
    norms = ("frob_norm", "nuclear_norm", "l2_norm", "max_weights_sval", "min_weights_sval", "esd_max", "hard_rank")
    assert [zero[field] for field in norms] == [0] * 7
    assert [field for field, value in zero.items() if np.isnan(value)] == [
        "weights_kurtosis",
        "effective_rank",
        "stable_rank",
        "participation_ratio",
    ]
    assert at["identity"]["stable_rank"] == pytest.approx(20, **close)
    assert at["identity"]["effective_rank"] == pytest.approx(20, **close)
    assert at["identity"]["nuclear_norm"] == pytest.approx(20, **close)
    if dtype in ("float64", "float32"):
        assert at["orthogonal"]["stable_rank"] == pytest.approx(20, **close)
        assert at["orthogonal"]["l2_norm"] == pytest.approx(1, **close)
    assert at["constant"]["stable_rank"] == pytest.approx(1, **close)
    assert at["constant"]["hard_rank"] == 1
    assert at["constant"]["weights_std"] == 0
    assert at["constant"]["l2_norm"] == pytest.approx(matrices["constant"][0, 0] * np.sqrt(20 * 12), **close)
    assert at["rank_4"]["hard_rank"] == 4
    if dtype == "float64":
        spectrum = found.weights_svals.sel(name="lauchli").values[:20]
        np.testing.assert_allclose(spectrum[:-1], 1e-9, rtol=1e-6)
        assert spectrum[-1] == pytest.approx(np.sqrt(20 + 1e-18), rel=1e-14)
        scaled = [at[name] for name in ("1e30", "1e-30", "1e300", "1e-300")]
        for field in ("stable_rank", "effective_rank", "hard_rank", "weights_kurtosis"):
            for values in scaled:
                assert values[field] == pytest.approx(at["wide"][field], rel=1e-11), field


def test_hilbert_and_kahan_in_many_digits() -> None:
    """The smallest singular values of Hilbert's and Kahan's matrices, float64, from mpmath in 60 digits.

    Those above the rounding unit are right to the stated error.
    """
    matrices = {"hilbert": testing.hilbert(10), "kahan": testing.kahan(16)}
    found = computed(matrices, "weights_svals", "weights_svals_error")
    exact = mpmath.mp.clone()
    exact.dps = 60
    for name, w in matrices.items():
        squares = exact.eigsy(exact.matrix(w.T.tolist()) * exact.matrix(w.tolist()), eigvals_only=True)
        want = np.array([float(exact.sqrt(abs(x))) for x in squares])
        row = found.sel(name=name)
        got = row.weights_svals.values[: len(want)]
        assert np.all(np.abs(got - np.sort(want)) <= float(row.weights_svals_error)), name


def test_rank_tolerance_follows_the_stored_type() -> None:
    """A product of rank 4, stored in float32, float16 and bfloat16.

    Rounding to the stored type adds small singular values; none of them is counted by ``hard_rank``. In float64
    a tolerance of the square of its rounding unit still counts four.
    """
    w = gaussian(256, 4, seed=1) @ gaussian(4, 200, seed=2)
    kinds = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "float16", "bfloat16", "float64")}
    model = {name: w.astype(kind) for name, kind in kinds.items()}
    assert (computed(model, "hard_rank").hard_rank == 4).all()
    session = Session()
    session.models.add(model, "m")
    session.compute.configure_kernel("hard_rank", rtol=(256 * EPS) ** 2)
    session.compute.apply("hard_rank")
    assert session.results.dataset("hard_rank").hard_rank.sel(model_id="m", name="float64") == 4


# Failing LAPACK


@pytest.mark.parametrize("streamed", [False, True])
def test_lapack_that_does_not_converge(monkeypatch: pytest.MonkeyPatch, streamed: bool) -> None:
    """A finite matrix on which ``gesdd`` gives up (Reference-LAPACK 672), among others on which it does not.

    Another routine computes it, the value is right, its status is ``fell_back``, and the others are as ever.
    """
    model = {f"h.{i}.weight": gaussian(20, 12, seed=i) for i in range(3)}
    troubled = np.linalg.norm(model["h.1.weight"])
    dense, in_place = np.linalg.svd, blas.svdvals

    def gives_up(a: NDArray[Any]) -> None:
        if np.any(np.abs(np.linalg.norm(a, axis=(-2, -1)) - troubled) < 1e-9):
            raise np.linalg.LinAlgError("SVD did not converge")

    def svd(a: NDArray[Any], *arguments: Any, **options: Any) -> Any:
        gives_up(a)
        return dense(a, *arguments, **options)

    def svdvals_in_place(a: NDArray[Any]) -> Any:
        gives_up(a)
        return in_place(a)

    monkeypatch.setattr(np.linalg, "svd", svd)
    monkeypatch.setattr(blas, "svdvals", svdvals_in_place)
    session = Session()
    session.models.add(model, "m")
    with dask.config.set(STREAMED if streamed else {}):
        summary = session.compute.apply("weights_svals", "weights_svals_route", "stable_rank", "weights_svals_error")
    monkeypatch.undo()
    assert summary.failed == ()
    found = session.results.dataset("weights_svals", "weights_svals_route", "weights_svals_error").sel(model_id="m")
    for name, w in model.items():
        row = found.sel(name=name)
        assert np.all(np.abs(row.weights_svals - svals(w)) <= row.weights_svals_error + 8 * EPS * svals(w)[-1])
        route = linalg.ROUTES[int(row.weights_svals_route)]
        assert route == ("gesvd" if name == "h.1.weight" else "tsqr" if streamed else "gesdd")
    status = session.results.status("weights_svals", "stable_rank").sel(model_id="m")
    fell_back = status.sel(field="weights_svals", name="h.1.weight")
    assert (fell_back.state, fell_back.reason) == ("fresh", "computed by a fallback, because the first method failed")
    assert (status.reason.sel(name=["h.0.weight", "h.2.weight"]) == "").all()
    assert session.store.view().status["weights_svals"][0].tolist() == [0, 6, 0]


# Chunks and sizes


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(96, 20), (20, 96), (50, 50)])
def test_every_chunking_gives_the_same(dtype: str, shape: tuple[int, int]) -> None:
    """A Dask array in one chunk, in chunks along one axis, along both, ragged, tall and wide (dask 5368, 6590,
    dask-ml 731); the same numbers read in spans of any size; the transposed matrix.

    The same results for all of them.
    """
    w = gaussian(*shape, dtype=dtype)
    fields = ("weights_svals", "stable_rank", "weights_kurtosis")
    cuts = [(-1, -1), (7, -1), (-1, 9), (13, 11), (1, 50), ((shape[0] - 3, 3), -1)]
    session = Session()
    session.models.add({"w": w, "t": w.T.copy()} | {str(c): da.from_array(w, chunks=c) for c in cuts}, "m")
    session.compute.apply(*fields)
    plain = session.results.dataset(*fields).sel(model_id="m")
    table = session.models.parameters().set_index("name")
    for cut in map(str, cuts):
        assert table.digest[cut] == table.digest["w"]
        for field in fields:
            np.testing.assert_array_equal(plain[field].sel(name=cut), plain[field].sel(name="w"), err_msg=field)
    unit, want = float(np.finfo(dtype).eps), plain.sel(name="w")
    scale = float(want.weights_svals.max())
    for size, threads in (("1 B", 1), ("200 B", 3), ("1 MB", 4)):
        part = {"diffract_dask.stream-above": "1 B", "diffract_dask.read-size": size, "diffract_dask.threads": threads}
        with dask.config.set(part):
            streamed = computed({"w": w, "t": w.T.copy()}, *fields)
        for found in (plain.sel(name="t"), streamed.sel(name="w"), streamed.sel(name="t")):
            np.testing.assert_allclose(found.weights_svals, want.weights_svals, rtol=0, atol=32 * unit * scale)
            np.testing.assert_allclose(found.stable_rank, want.stable_rank, rtol=32 * EPS)
            np.testing.assert_allclose(found.weights_kurtosis, want.weights_kurtosis, rtol=1e-12)


PEAK = """
import numpy as np
dask.config.set({"diffract_dask.memory-budget": sys.argv[3]})
session = Session(sys.argv[1])
session.models.add({"w.weight": np.random.default_rng(0).standard_normal((700, 600)).astype(sys.argv[4])}, "warm")
with dask.config.set({"diffract_dask.stream-above": "1 B"}):
    session.compute.apply("nuclear_norm", "weights_mean")
session.models.add(sys.argv[2], "m", link=True)
plan = session.compute.plan("nuclear_norm", "weights_mean")
assert "streamed in" in plan.explain()
"""
MEASURED = """
session.compute.apply("nuclear_norm", "weights_mean")
print(plan.peak_bytes)
"""


def blocks_of(path: Path, shape: tuple[int, int], dtype: str, step: int) -> Iterator[NDArray[Any]]:
    """Write a safetensors file of any size, and yield what is written."""
    rng = np.random.default_rng(0)
    itemsize = np.dtype(dtype).itemsize
    code = {"float32": "F32", "float64": "F64"}[dtype]
    entry = {"dtype": code, "shape": list(shape), "data_offsets": [0, shape[0] * shape[1] * itemsize]}
    header = json.dumps({"w.weight": entry}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, shape[0], step):
            block = rng.standard_normal((min(step, shape[0] - start), shape[1]), dtype=np.float32).astype(dtype)
            file.write(block.tobytes())
            yield block


def check_peak(tmp_path: Path, shape: tuple[int, int], dtype: str, budget: str) -> None:
    path, store = tmp_path / "m.safetensors", tmp_path / "s.zarr"
    squares = sum(float(np.square(block, dtype=np.float64).sum()) for block in blocks_of(path, shape, dtype, 4096))
    peak, printed = peak_of(PEAK, MEASURED, store, path, budget, dtype)
    projected = int(printed)
    # The allocator and the libraries' own buffers come on top of what the plan can know.
    assert peak <= projected + 24 * MiB
    found = Session(store).results.dataset("weights_svals").weights_svals.sel(model_id="m", name="w.weight")
    np.testing.assert_allclose(float((found**2).sum()), squares, rtol=1e-10)


@pytest.mark.parametrize(("shape", "dtype"), [((40_000, 256), "float32"), ((15_000, 300), "float64")])
def test_peak_memory_is_as_projected(tmp_path: Path, shape: tuple[int, int], dtype: str) -> None:
    """A file of 39 MiB by the Gram matrix, and one of 34 MiB by QR, neither of which is read whole (dask 9934).

    Measured memory stays within the projection, and the sum of the squared singular values is that of the entries.
    """
    check_peak(tmp_path, shape, dtype, "64 MiB")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_peak_memory_of_six_gigabytes(tmp_path: Path) -> None:
    """The same with a file of 6.1 GiB, 800,000 × 2048 float32, in a budget of 256 MiB."""
    check_peak(tmp_path, (800_000, 2048), "float32", "256 MiB")


def sparse_file(path: Path, shape: tuple[int, int], dtype: str = "F32") -> Path:
    """Write a safetensors file of zeros that takes no room on disk; its last row is ones."""
    nbytes = 4 * shape[0] * shape[1]
    header = json.dumps({"w.weight": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
        file.seek(-4 * shape[1], 2)
        file.write(np.ones(shape[1], np.float32).tobytes())
    return path


def test_30000_by_30000_is_refused_or_streamed(tmp_path: Path, no_compute: Any) -> None:
    """A square matrix of side 30,000, at which 32-bit indices overflow (scipy 10337), on paper.

    Refused before anything runs where its 6.7 GiB Gram matrix does not fit, naming both numbers and what to change;
    streamed where it does. What needs no Gram matrix is planned in little memory.
    """
    session = Session()
    session.models.add(sparse_file(tmp_path / "m.safetensors", (30_000, 30_000)), "m", link=True)
    with dask.config.set({"diffract_dask.memory-budget": "4 GiB"}):
        with pytest.raises(errors.OverBudgetError) as caught:
            session.compute.apply("stable_rank")
        for part in ("m: 30000 × 30000 float32", "singular_values", "6.71 GiB", "4 GiB", "memory-budget"):
            assert part in str(caught.value)
        assert session.compute.plan("frob_norm").peak_bytes < 100 * MiB
    with dask.config.set({"diffract_dask.memory-budget": "8 GiB"}):
        plan = session.compute.plan("stable_rank")
        assert "gram, streamed in 1 span" in plan.explain()
        assert 6.7 * 2**30 < plan.peak_bytes < 8 * 2**30


@pytest.mark.slow
def test_one_pass_over_30000_by_30000(tmp_path: Path) -> None:
    """The same matrix read in full, 3.4 GiB: offsets beyond 2³¹ are right, for its last row is all there is."""
    session = Session()
    session.models.add(sparse_file(tmp_path / "m.safetensors", (30_000, 30_000)), "m", link=True)
    with dask.config.set({"diffract_dask.memory-budget": "200 MiB"}):
        session.compute.apply("frob_norm", "zero_fraction", "weights_mean")
    found = session.results.dataset("frob_norm", "zero_fraction", "weights_mean").sel(model_id="m", name="w.weight")
    np.testing.assert_allclose(found.frob_norm, np.sqrt(30_000), rtol=1e-14)
    np.testing.assert_allclose(found.weights_mean, 1 / 30_000, rtol=1e-12)
    assert found.zero_fraction == 1 - 1 / 30_000


# Values of Diffract


def golden_model(which: str) -> dict[str, NDArray[Any]]:
    with np.load(DATA / f"diffract_{which}.npz") as archive:
        return {name: archive[name].astype(np.float64) for name in archive}


@pytest.mark.parametrize("streamed", [False, True])
def test_the_values_of_diffract(streamed: bool) -> None:
    """Two models of 19 matrices each, and what Diffract 0.3.1 makes of them: every field that both have, to 1e-9.

    Left out is what is rounding noise there and here.
    """
    fields = sorted({name for models in GOLDEN.values() for values in models.values() for name in values})
    session = Session()
    for which in "ab":
        session.models.add(golden_model(which), which)
    with dask.config.set(STREAMED | {"diffract_dask.read-size": "32 kiB"} if streamed else {}):
        session.compute.apply(*fields)
    results = session.results.dataset(*fields)
    compared = 0
    for case, models in GOLDEN.items():
        for which, values in models.items():
            row = results.sel(model_id=which, name=case)
            for name, want in values.items():
                got = row[name].values[: len(want)] if isinstance(want, list) else float(row[name])
                if (case, which, name) in NOISE:
                    assert abs(got - want) <= 100 * EPS * float(row.l2_norm), (case, which, name)
                else:
                    np.testing.assert_allclose(got, want, rtol=1e-9, err_msg=f"{case} {which} {name}")
                compared += 1
    assert compared >= 2 * 19 * 14


def test_model_level_values_of_the_same_models() -> None:
    """The model-level fields over the smaller matrices of the two models against their definitions in 50 digits."""
    session = Session()
    models = {which: {name: w for name, w in golden_model(which).items() if w.size <= 2048} for which in "ab"}
    for which, model in models.items():
        session.models.add(model, which)
    session.compute.apply(*MODEL)
    results = session.results.dataset(*MODEL)
    for which, model in models.items():
        for name, definition in MODEL.items():
            want = definition(list(model.values()))
            np.testing.assert_allclose(results[name].sel(model_id=which), want, rtol=1e-12, err_msg=name)


# Trained weights


def test_the_values_of_minilm(real_weights: Any) -> None:
    """A feed-forward layer of all-MiniLM-L6-v2, 1536 × 384 float32, against LAPACK in float64."""
    session = Session()
    session.models.add(real_weights("minilm/model.safetensors"), "minilm", link=True)
    part = session.filter(param_names="encoder.layer.0.intermediate.dense.weight")
    fields = ("l2_norm", "frob_norm", "stable_rank", "effective_rank")
    part.compute.apply(*fields)
    found = part.results.dataset(*fields).squeeze()
    want = (11.175887516512525, 49.451893691182015, 19.579509593146113, 340.88922298312264)
    for name, value in zip(fields, want, strict=True):
        np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)


def test_the_values_of_proteinmpnn(real_weights: Any) -> None:
    """One layer of four ProteinMPNN models, trained with more and more noise, which is their step."""
    pytest.importorskip("torch")
    session = Session()
    for noise in (30, 20, 10, 2):
        path = real_weights(f"proteinmpnn/v_48_0{noise:02d}.pt")
        session.models.add(path, f"noise-{noise}", step=noise / 100)
    fields = ("l2_norm", "frob_norm", "stable_rank", "effective_rank")
    session.compute.apply(*fields)
    found = session.results.dataset(*fields).sel(name="encoder_layers.0.dense.W_in.weight")
    assert found.step.values.tolist() == [0.02, 0.1, 0.2, 0.3]
    for name, want in {
        "l2_norm": [19.0115, 17.0599, 16.4776, 16.1806],
        "frob_norm": [54.1364, 52.5311, 51.2321, 50.7109],
        "stable_rank": [8.109, 9.482, 9.667, 9.822],
        "effective_rank": [108.35, 107.42, 107.03, 106.54],
    }.items():
        np.testing.assert_allclose(found[name], want, rtol=1e-4, err_msg=name)


# What must not change a value

few = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
INVARIANT = [name for name in SCALARS if name not in ("hard_rank", "nonfinite_fraction")]


def assert_same(one: Any, other: Any, w: NDArray[Any], power: Callable[[str], float] = lambda name: 1.0) -> None:
    """Check the scalar fields of two results of (a form of) `w`, the second `power(name)` times the first."""
    unit = float(np.finfo(w.dtype).eps)
    for name in INVARIANT:
        want, got = float(one[name]) * power(name), float(other[name])
        if np.isnan(want):
            assert np.isnan(got), name
            continue
        assert abs(got - want) <= 2 * tolerance(name, w.astype(np.float64), want, unit) * max(1.0, power(name)), name


@few
@given(testing.matrices(min_side=2))
def test_transposing_changes_nothing(w: NDArray[Any]) -> None:
    """A matrix and its transpose in one model: equal fields."""
    found = computed({"w": w, "t": w.T.copy()}, *INVARIANT)
    assert_same(found.sel(name="w"), found.sel(name="t"), w)


@few
@given(testing.matrices(min_side=2), st.integers(0, 2**32 - 1))
def test_permuting_rows_changes_nothing(w: NDArray[Any], seed: int) -> None:
    """A matrix with its rows, and with its columns, in another order: equal fields."""
    rng = np.random.default_rng(seed)
    moved = {"rows": w[rng.permutation(len(w))], "cols": w[:, rng.permutation(w.shape[1])]}
    found = computed({"w": w, **moved}, *INVARIANT)
    for name in moved:
        assert_same(found.sel(name="w"), found.sel(name=name), w)


@few
@given(testing.matrices(min_side=2), st.integers(-20, 20))
def test_powers_of_two_scale_exactly(w: NDArray[Any], exponent: int) -> None:
    """A matrix times a power of two: norms scale with it, eigenvalues with its square, ranks and shapes not at all."""
    scaled = np.ldexp(w, exponent)
    found = computed({"w": w, "scaled": scaled}, *INVARIANT, "hard_rank")
    degrees = dict.fromkeys(("esd_max", "esd_min"), 2) | dict.fromkeys(
        [name for name in INVARIANT if name.endswith(("norm", "sval")) or name.startswith("weights_")], 1
    )
    degrees["weights_kurtosis"] = 0
    one = found.sel(name="w")
    assert_same(
        one,
        found.sel(name="scaled"),
        scaled if exponent > 0 else w,
        lambda name: 2.0 ** (exponent * degrees.get(name, 0)),
    )
    assert found.hard_rank.sel(name="scaled") == one.hard_rank


@few
@given(testing.models(), st.randoms(use_true_random=False))
def test_the_order_of_parameters_changes_nothing(model: dict[str, NDArray[Any]], chance: Any) -> None:
    """The same model as a dict in another order: every value is the same, bit for bit; model-level ones, too."""
    names = list(model)
    chance.shuffle(names)
    session = Session()
    fields = ["frob_norm", "effective_rank", "hard_rank", "weights_kurtosis", *MODEL]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.NothingAnalysedWarning)
        session.models.add(model, "a")
        session.compute.apply(*fields)
        other = Session()
        other.models.add({name: model[name] for name in names}, "a")
        other.compute.apply(*fields)
    one, two = session.results.dataset(*fields), other.results.dataset(*fields).sel(name=list(model))
    for name in fields:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)
    columns = ["name", "digest", "skip_reason", "uid"]
    tables = [s.models.parameters()[columns].sort_values("name", ignore_index=True) for s in (session, other)]
    assert tables[0].equals(tables[1])


@pytest.mark.parametrize("shape", [(64, 48), (300, 300), (600, 600), (600, 150), (130, 700)])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.0])
def test_equal_entries_whose_rounding_errors_add_up(shape: tuple[int, int], value: float) -> None:
    found = linalg.singular_values(np.full(shape, value))
    error = max(abs(found.values[-1] - value * np.sqrt(shape[0] * shape[1])), found.values[:-1].max())
    assert error <= found.error
