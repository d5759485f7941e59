"""Arrays of every type and size: previews and differences against NumPy on the whole arrays, and their memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from diffract_dask.errors import ArtifactError
from diffract_dask.runs.array_diffs import Differences, diff_arrays
from diffract_dask.runs.arrays import ArrayRef, blocks
from diffract_dask.runs.artifact_diffs import diff_artifacts
from diffract_dask.runs.encoding import decode
from diffract_dask.runs.grids import Grid, Moments
from diffract_dask.runs.previews import preview

ROOT = Path(__file__).resolve().parent.parent
NAN, INF = float("nan"), float("inf")


def ref(values: Any, chunks: tuple[int, ...] | None = None) -> ArrayRef:
    values = np.asarray(values)
    return ArrayRef("", values.shape, values.dtype, lambda s: values[s], chunks)


def saved(path: Path, values: Any) -> Path:
    np.save(path, values)
    return path


ODD: dict[str, tuple[Any, Any]] = {
    "nan": (np.array([1.0, NAN, 3.0]), np.array([1.0, NAN, 4.0])),
    "infinite": (np.array([[INF, -INF, 0.0]]), np.array([[INF, INF, 1.0]])),
    "all nan": (np.full((3, 3), NAN), np.zeros((3, 3))),
    "complex": (np.array([1 + 2j, NAN * 1j]), np.array([1 + 2j, 3.0])),
    "0-d": (np.array(2.5), np.array(3.5)),
    "0-d nan": (np.array(NAN), np.array(1.0)),
    "0-d boolean": (np.array(True), np.array(False)),
    "empty": (np.zeros((0, 4)), np.zeros((0, 4))),
    "empty 3-d": (np.zeros((2, 0, 4)), np.zeros((2, 0, 4))),
    "boolean": (np.array([True, False]), np.array([True, True])),
    "float16": (np.array([65504, 1], "f2"), np.array([-65504, 1], "f2")),
    "longdouble": (np.array([1, 2], np.longdouble), np.array([1, 3], np.longdouble)),
    "uint64": (np.array([2**63, 5], "u8"), np.array([2**63 + 1, 5], "u8")),
    "int8": (np.array([-128, 1], "i1"), np.array([127, 1], "i1")),
    "big-endian": (np.array([1.0, 2.0], ">f4"), np.array([1.0, 5.0], ">f4")),
    "Fortran": (np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.asfortranarray(np.ones((3, 4)))),
    "Fortran 3-d": (np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)), np.ones((2, 3, 4))),
    "structured": (
        np.array([(1, [1.0, 2.0], b"a")], [("i", "i4"), ("p", "f8", 2), ("s", "S2")]),
        np.array([(1, [1.0, NAN], b"b")], [("i", "i4"), ("p", "f8", 2), ("s", "S2")]),
    ),
    "nested": (
        np.zeros(2, [("a", [("b", "c8"), ("c", "?")])]),
        np.array([((1j, False),), ((0, False),)], [("a", [("b", "c8"), ("c", "?")])]),
    ),
    "text": (np.array(["a", "ä"]), np.array(["a", "b"])),
    "bytes": (np.array([b"a\xff"]), np.array([b"a"])),
    "dates": (np.array(["2026-01-01", "NaT"], "M8[D]"), np.array(["2026-01-03", "NaT"], "M8[D]")),
    "durations": (np.array([1, 2], "m8[s]"), np.array([1, 3], "m8[s]")),
    "void": (np.array([b"ab", b"cd"], "V2"), np.array([b"ab", b"ce"], "V2")),
    "5-d": (np.zeros((2, 1, 2, 3, 4)), np.ones((2, 1, 2, 3, 4))),
}


# ------------------------------------------------------------------------------------------- odd types


@pytest.mark.parametrize("name", ODD)
def test_odd_arrays_are_previewed_and_compared(name: str, tmp_path: Path) -> None:
    a, b = (saved(tmp_path / f"{side}.npy", values) for side, values in zip("ab", ODD[name], strict=True))
    json.dumps(preview(a).as_dict(), allow_nan=False)
    assert diff_artifacts(a, a).equal is True
    found = diff_artifacts(a, b)
    json.dumps(found.as_dict(), allow_nan=False)
    assert found.equal is (ODD[name][0].size == 0)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("nan", {"differing": 1, "compared": 2, "unequal_nonfinite": 0, "abs_max": 1, "abs_max_at": [2]}),
        ("infinite", {"differing": 2, "compared": 1, "unequal_nonfinite": 1, "max": 1}),
        ("all nan", {"differing": 9, "compared": 0, "unequal_nonfinite": 9, "abs_max": None, "rel_norm": None}),
        ("complex", {"differing": 1, "compared": 1, "unequal_nonfinite": 1, "min": None, "mean": None, "abs_max": 0}),
        ("boolean", {"differing": 1, "min": 0, "max": 1, "abs_max_at": [1]}),
        ("float16", {"min": -131008, "rel_max": 2.0}),
        ("uint64", {"differing": 1, "max": 1}),
        ("int8", {"max": 255}),
        ("0-d", {"differing": 1, "mean": 1, "abs_max_at": []}),
        ("dates", {"differing": 1, "max": 2, "compared": 1}),
        ("big-endian", {"max": 3}),
    ],
)
def test_figures_of_odd_arrays(name: str, figures: dict[str, Any]) -> None:
    stats = diff_arrays(*map(ref, ODD[name]))["stats"]
    assert {key: stats[key] for key in figures} == figures


def test_structured_arrays_are_compared_field_by_field() -> None:
    fields = diff_arrays(*map(ref, ODD["structured"]))["fields"]
    assert {name: one["equal"] for name, one in fields.items()} == {"i": True, "p": False, "s": False}
    assert fields["p"]["stats"]["unequal_nonfinite"] == 1
    assert fields["s"]["first"] == [{"at": [0], "a": "a", "b": "b"}]
    nested = diff_arrays(*map(ref, ODD["nested"]))["fields"]
    assert {name: one["equal"] for name, one in nested.items()} == {"a.b": False, "a.c": True}


def test_a_field_is_previewed_by_its_address(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", ODD["structured"][1])
    assert preview(path).data["form"] == "fields"
    assert preview(path, "i").data["stats"]["mean"] == 1
    assert preview(path, "p").as_dict()["data"]["heatmap"]["mean"] == [[1.0, {"$float": "nan"}]]


@pytest.mark.parametrize(("part", "shown"), [("abs", 5.0), ("real", 3.0), ("imag", 4.0), ("phase", math.atan2(4, 3))])
def test_parts_of_complex_numbers(part: str, shown: float, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", np.array([[3 + 4j]]))
    assert preview(path, part=part).data["stats"]["mean"] == pytest.approx(shown)


def test_pickled_objects_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([{"x": 1}], object), allow_pickle=True)
    shown = preview(path).data
    assert shown["form"] == "nothing"
    assert "pickle" in shown["note"]
    assert diff_artifacts(path, path).equal is None


def test_arrays_of_other_shapes_and_types() -> None:
    told = diff_arrays(ref(np.zeros((2, 3))), ref(np.zeros((3, 2))))
    assert "shapes differ" in told["note"]
    assert told["equal"] is False
    told = diff_arrays(ref(np.zeros(3, "f4")), ref(np.zeros(3, "f8")))
    assert (told["equal"], told["stats"]["differing"]) == (False, 0)
    assert "cannot be compared" in diff_arrays(ref(np.zeros(2)), ref(np.array(["a", "b"])))["note"]


# ------------------------------------------------------------------------------------------- against NumPy

floats = st.floats(-1e6, 1e6, width=32) | st.sampled_from([NAN, INF, -INF, 0.0])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any, tuple[int, ...]]:
    shape = draw(arrays_of.array_shapes(min_dims=1, max_dims=3, max_side=9))
    a, b = (draw(arrays_of.arrays(np.float32, shape, elements=floats)) for _ in "ab")
    keep = draw(arrays_of.arrays(np.bool_, shape))
    chunks = tuple(draw(st.integers(1, n)) for n in shape)
    return a, np.where(keep, a, b), chunks


@given(pairs())
@settings(max_examples=60, deadline=None)
def test_figures_of_differences_are_those_of_the_whole_arrays(case: tuple[Any, Any, tuple[int, ...]]) -> None:
    a, b, chunks = case
    found = Differences()
    for selection in blocks(a.shape, chunks, limit=4):
        found.add(a[selection], b[selection], [s.start for s in selection])
    stats = found.summary()
    wide_a, wide_b = a.astype(float), b.astype(float)
    with np.errstate(invalid="ignore"):
        apart, finite = wide_b - wide_a, np.isfinite(wide_a) & np.isfinite(wide_b)
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    assert (stats["entries"], stats["differing"], stats["compared"]) == (a.size, unequal.sum(), finite.sum())
    assert stats["unequal_nonfinite"] == (unequal & ~finite).sum()
    if not finite.any():
        assert stats["abs_max"] is None
        return
    apart, wide_a, wide_b = apart[finite], wide_a[finite], wide_b[finite]
    size = np.maximum(np.abs(wide_a), np.abs(wide_b))
    relative = np.abs(apart) / np.where(size > 0, size, 1)
    expected = {
        "min": apart.min(), "max": apart.max(), "mean": apart.mean(), "abs_mean": np.abs(apart).mean(),
        "abs_max": np.abs(apart).max(), "rms": np.sqrt((apart**2).mean()), "rel_max": relative.max(),
    }  # fmt: skip
    scale = max(1.0, np.abs(apart).max())
    assert {key: stats[key] for key in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12 * scale)
    if stats["abs_max"] > 0:
        at = tuple(stats["abs_max_at"])
        assert abs(float(b[at]) - float(a[at])) == stats["abs_max"]


@given(
    arrays_of.arrays(np.float64, arrays_of.array_shapes(min_dims=2, max_dims=2, max_side=20), elements=floats),
    st.integers(1, 8),
    st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_a_grid_is_the_mean_least_and_greatest_of_each_block(values: Any, target: int, limit: int) -> None:
    grid, moments = Grid(values.shape, target), Moments()
    for rows, cols in blocks(values.shape, limit=limit):
        grid.add(rows.start, cols.start, values[rows, cols])
        moments.add(values[rows, cols])
    made = grid.blocks()
    assert max(made["mean"].shape) <= target
    high, wide = grid.step
    for (i, j), mean in np.ndenumerate(made["mean"]):
        block = values[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        block = block[np.isfinite(block)]
        if not block.size:
            assert np.isnan([mean, made["min"][i, j], made["max"][i, j]]).all()
            continue
        assert mean == pytest.approx(block.mean(), rel=1e-9, abs=1e-6)
        assert (made["min"][i, j], made["max"][i, j]) == (block.min(), block.max())
    finite = values[np.isfinite(values)]
    told = moments.summary()
    assert (told["count"], told["nan"], told["zeros"]) == (values.size, np.isnan(values).sum(), (finite == 0).sum())
    if finite.size:
        assert told["std"] == pytest.approx(finite.std(), rel=1e-6, abs=1e-6)


@given(arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7), st.integers(1, 50), st.data())
@settings(max_examples=80, deadline=None)
def test_blocks_cover_an_array_once(shape: tuple[int, ...], limit: int, data: st.DataObject) -> None:
    chunks = data.draw(st.none() | st.tuples(*(st.integers(1, 9) for _ in shape)))
    seen = np.zeros(shape, int)
    for selection in blocks(shape, chunks, limit):
        seen[selection] += 1
        assert chunks is not None or seen[selection].size <= limit
    assert (seen == 1).all()


# ------------------------------------------------------------------------------------------- planes, cuts, sizes


def test_planes_of_arrays_with_more_axes(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    path = saved(tmp_path / "a.npy", values)
    shown = preview(path, index=(1, -1), cut=(-1, 0)).data
    assert shown["index"] == [1, 2]
    assert np.array_equal(shown["heatmap"]["mean"], values[1, 2])
    assert shown["cut"]["horizontal"]["mean"].tolist() == values[1, 2, -1].tolist()
    assert shown["cut"]["vertical"]["mean"].tolist() == values[1, 2, :, 0].tolist()
    for index in ((0, 3), (0, 0, 0)):
        with pytest.raises(ArtifactError, match="index"):
            preview(path, index=index)
    with pytest.raises(ArtifactError, match="row or column"):
        preview(path, cut=(9, 0))


def test_the_grid_shows_the_plane_of_the_largest_difference(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.npy", np.zeros((4, 3, 5)))
    changed = np.zeros((4, 3, 5))
    changed[2, 1, 4], changed[0, 0, 0] = -9, 2
    found = diff_artifacts(a, saved(tmp_path / "b.npy", changed)).data
    assert (found["stats"]["abs_max_at"], found["heatmap"]["index"]) == ([2, 1, 4], [2])
    assert np.array_equal(found["heatmap"]["mean"], changed[2])
    at_zero = diff_artifacts(a, tmp_path / "b.npy", index=(0,)).data
    assert np.array_equal(at_zero["heatmap"]["mean"], changed[0])


@pytest.mark.parametrize("shape", [(1000, 700), (3, 5000), (5000, 3), (4000,)])
def test_large_arrays_are_reduced_and_no_outlier_is_lost(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.zeros(shape)
    at = tuple(n // 3 for n in shape)
    values[at] = 77
    path, zero = saved(tmp_path / "a.npy", values), saved(tmp_path / "b.npy", np.zeros(shape))
    shown = preview(path, target=64).data
    told = shown["curve" if len(shape) == 1 else "heatmap"]
    assert told["max"].max() == 77
    assert max(told["max"].shape) <= 256
    assert len(json.dumps(preview(path, target=64).as_dict())) < 200_000
    found = diff_artifacts(zero, path, target=64).data
    assert found["stats"]["abs_max_at"] == list(at)
    grid = found["overlay"]["difference"]["max"] if len(shape) == 1 else found["heatmap"]["abs_max"]
    assert grid.max() == 77


def test_grids_can_be_packed(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(300, 300))
    values[0] = NAN
    values[1] = 1e300
    shown = preview(saved(tmp_path / "a.npy", values), target=300)
    lists, packed = (json.dumps(shown.as_dict(packed=way), allow_nan=False) for way in (False, True))
    assert len(packed) < len(lists) / 3
    grid = decode(json.loads(packed)["data"]["heatmap"]["mean"])
    with np.errstate(over="ignore"):
        assert np.array_equal(grid, values.astype("f4"), equal_nan=True)


PEAK = """
import sys, time
from pathlib import Path
from diffract_dask.runs.artifact_diffs import diff_artifacts
from diffract_dask.runs.previews import preview
start = time.process_time()
{call}
with open("/proc/self/status") as file:  # not ru_maxrss, which starts from that of the process that forked
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
print(time.process_time() - start, peak)
"""


def peak(call: str, *args: object) -> tuple[float, float]:
    """Return CPU seconds of a call, which uses one thread, and peak memory of the whole process that makes it."""
    if not sys.platform.startswith("linux"):
        pytest.skip("peak memory is read from /proc")
    command = [sys.executable, "-c", PEAK.format(call=call), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, nbytes = map(float, done.stdout.split())
    return seconds, nbytes


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arrays of 64 MB, as .npy, .npz, HDF5, Zarr and safetensors."""
    import h5py
    import zarr

    from diffract_dask.testing import write_safetensors

    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(0)
    for name in "ab":
        values = rng.standard_normal((4096, 4096), dtype=np.float32)
        np.save(folder / f"{name}.npy", values)
        np.savez(folder / f"{name}.npz", values=values)
        write_safetensors(folder / f"{name}.safetensors", {"values": values})
        zarr.create_array(folder / f"{name}.zarr", data=values, chunks=(512, 512), compressors=None)
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("values", data=values, chunks=(512, 512))
    return folder


LOAD = "import zarr, h5py, diffract_dask.runs.weights"


@pytest.fixture(scope="module")
def idle() -> float:
    return peak(LOAD)[1]


@pytest.mark.parametrize("suffix", ["npy", "npz", "h5", "zarr", "safetensors"])
def test_memory_does_not_grow_with_the_artifact(suffix: str, large: Path, idle: float) -> None:
    a, b = large / f"a.{suffix}", large / f"b.{suffix}"
    call = "preview(sys.argv[1], target=64); diff_artifacts(sys.argv[1], sys.argv[2])"
    used = peak(f"{LOAD}; {call}", a, b)[1] - idle
    assert used < 40e6, used  # one array has 67 MB


@pytest.mark.slow
def test_two_arrays_of_256_mb_in_300_mb(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in "ab":
        saved(tmp_path / f"{name}.npy", rng.standard_normal((8192, 8192), dtype=np.float32))
    runs = [peak("diff_artifacts(sys.argv[1], sys.argv[2])", tmp_path / "a.npy", tmp_path / "b.npy") for _ in range(3)]
    assert max(nbytes for _, nbytes in runs) < 300e6
    assert min(seconds for seconds, _ in runs) < 4


@pytest.mark.slow
def test_a_large_table_is_read_in_bounded_memory(tmp_path: Path, idle: float) -> None:
    line = "0.25,1,abc\n"
    (tmp_path / "a.csv").write_text("x,y,z\n" + line * (40_000_000 // len(line)))
    used = peak(f"{LOAD}; assert 'first' in preview(sys.argv[1]).notes[0]", tmp_path / "a.csv")[1]
    assert used - idle < 150e6
