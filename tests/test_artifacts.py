"""Artifacts of every kind in the table: recognised, previewed, compared; and what the kinds have of their own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact_samples import SAMPLES, matrix

from diffract_dask.errors import ArtifactError, ArtifactNotFoundError, DiffractError, MissingExtraError
from diffract_dask.runs import artifact_kinds
from diffract_dask.runs.artifact_diffs import diff_artifacts, diff_documents, diff_texts
from diffract_dask.runs.artifact_kinds import ENTRY_POINTS, KINDS, ArtifactKind, is_unit, kind_of, register_kind
from diffract_dask.runs.previews import preview
from diffract_dask.runs.readers import Content

every_kind = pytest.mark.parametrize("kind", sorted(KINDS))
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return ``write(kind, change=0, where="a")``: an artifact of a kind in a folder of its own."""

    def make(kind: str, change: float = 0, where: str = "a") -> Path:
        path = tmp_path / where / SAMPLES[kind].name
        path.parent.mkdir(exist_ok=True)
        SAMPLES[kind].write(path, matrix(change))
        return path

    return make


def strict_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


# ------------------------------------------------------------------------------------------- every kind


def test_every_kind_has_a_sample() -> None:
    assert set(SAMPLES) == set(KINDS)


@every_kind
def test_a_kind_is_recognised(kind: str, write: Write) -> None:
    assert kind_of(write(kind)).name == kind


@every_kind
def test_a_preview_is_strict_json_and_names_what_is_in_it(kind: str, write: Write) -> None:
    shown = preview(write(kind))
    strict_json(shown.as_dict())
    assert (shown.kind, shown.view) == (kind, KINDS[kind].view)
    address = SAMPLES[kind].address
    if address is not None:
        assert address in [one["address"].lstrip("/") for one in shown.datasets]


@pytest.mark.parametrize("kind", [kind for kind, sample in SAMPLES.items() if sample.address or kind == "npy"])
def test_a_dataset_is_previewed_by_its_address(kind: str, write: Write) -> None:
    data = preview(write(kind), SAMPLES[kind].address, cut=(2, 3)).data
    if KINDS[kind].view == "table":
        assert data["curve"]["mean"].tolist() == matrix()[:, 3].tolist()
        assert data["stats"]["max"] == matrix()[:, 3].max()
        return
    assert data["heatmap"]["mean"].tolist() == matrix().tolist()
    assert data["cut"]["horizontal"]["mean"].tolist() == matrix()[2].tolist()
    assert data["cut"]["vertical"]["mean"].tolist() == matrix()[:, 3].tolist()
    assert data["stats"]["std"] == pytest.approx(matrix().std())


@every_kind
def test_an_artifact_is_equal_to_its_copy(kind: str, write: Write) -> None:
    found = diff_artifacts(write(kind), write(kind, where="b"))
    strict_json(found.as_dict())
    assert found.equal is True


@every_kind
def test_a_difference_is_found(kind: str, write: Write) -> None:
    found = diff_artifacts(write(kind), write(kind, 10, where="b"))
    strict_json(found.as_dict())
    assert found.equal is False


@pytest.mark.parametrize("kind", [kind for kind, sample in SAMPLES.items() if sample.address or kind == "npy"])
def test_the_difference_of_a_dataset_has_figures_and_a_grid(kind: str, write: Write) -> None:
    found = diff_artifacts(write(kind), write(kind, 10, where="b"), SAMPLES[kind].address)
    stats = found.data["stats"]
    assert (stats["differing"], stats["abs_max"], stats["min"], stats["max"]) == (1, 10, 0, 10)
    assert stats["rel_max"] == pytest.approx(10 / 16)
    if KINDS[kind].view == "table":
        assert stats["abs_max_at"] == [2]
        assert found.data["overlay"]["difference"]["mean"].tolist() == [0, 0, 10, 0, 0, 0]
    else:
        assert stats["abs_max_at"] == [2, 3]
        assert stats["rel_norm"] == pytest.approx(10 / np.linalg.norm(matrix()))
        assert np.array_equal(found.data["heatmap"]["mean"], matrix(10) - matrix())


@pytest.mark.parametrize("kind", [kind for kind in SAMPLES if KINDS[kind].view in ("arrays", "table")])
def test_collections_are_compared_dataset_by_dataset(kind: str, write: Write) -> None:
    found = diff_artifacts(write(kind), write(kind, 10, where="b"))
    changed = {one["address"].lstrip("/") for one in found.data["datasets"] if not one["equal"]}
    assert changed == {SAMPLES[kind].address}
    assert len(found.data["datasets"]) > 1
    assert found.data["only_in_a"] == found.data["only_in_b"] == []


@every_kind
def test_a_file_that_is_cut_off_is_an_error_that_names_it(kind: str, write: Write, tmp_path: Path) -> None:
    if KINDS[kind].view in ("text", "document", "bytes") or not SAMPLES[kind].name.partition(".")[2]:
        pytest.skip("any beginning of it is one, too")
    path = write(kind)
    if path.is_dir() or kind == "csv":
        pytest.skip("not one file of a fixed size")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DiffractError, match=path.name):
        preview(path, SAMPLES[kind].address)


@every_kind
@pytest.mark.parametrize("seed", range(2))
def test_rubbish_is_an_error_and_no_traceback(kind: str, seed: int, write: Write) -> None:
    path = write(kind)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    rng = np.random.default_rng(seed)
    for file in files[seed::4] if path.is_dir() else files:
        data = bytearray(file.read_bytes())
        for at in rng.integers(0, max(1, min(len(data), 400)), 12):
            data[at : at + 1] = rng.bytes(1)
        file.write_bytes(data[: len(data) // (1 + seed % 2)])
    for dataset in (None, SAMPLES[kind].address):
        with contextlib.suppress(DiffractError):
            strict_json(preview(path, dataset).as_dict())
        with contextlib.suppress(DiffractError):
            strict_json(diff_artifacts(path, write(kind, where="b"), dataset).as_dict())


@every_kind
def test_an_empty_file_is_no_traceback(kind: str, tmp_path: Path) -> None:
    path = tmp_path / SAMPLES[kind].name
    path.touch()
    if kind == "torch":
        pytest.importorskip("torch")
    said = path.name
    try:
        strict_json(preview(path).as_dict())
    except DiffractError as error:
        said = str(error)
    assert path.name in said


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [("hdf5", "h5py", "hdf5"), ("parquet", "pyarrow", "parquet"), ("image", "PIL", "images")],
)
def test_an_extra_that_is_absent_is_named(
    kind: str, package: str, extra: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(kind)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'diffract_dask\[{extra}\]'"):
        preview(path)


# ------------------------------------------------------------------------------------------- the table


def test_a_kind_of_ones_own_comes_first(tmp_path: Path) -> None:
    @contextmanager
    def read(path: Path) -> Any:
        yield Content(document=path.read_text().split())

    kind = register_kind(ArtifactKind("words", "words", read, "document", (".words.txt",)))
    try:
        (tmp_path / "a.words.txt").write_text("one two")
        (tmp_path / "b.words.txt").write_text("one three")
        assert preview(tmp_path / "a.words.txt").data == {"document": ["one", "two"]}
        found = diff_artifacts(tmp_path / "a.words.txt", tmp_path / "b.words.txt")
        assert found.data["entries"] == [{"path": "[1]", "kind": "changed", "a": "two", "b": "three"}]
        with pytest.raises(ArtifactError, match="there already"):
            register_kind(kind)
    finally:
        del KINDS["words"]
    with pytest.raises(ArtifactError, match="view"):
        register_kind(ArtifactKind("odd", "odd", read, "odd"))


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("noend", b"plain text \xc3\xa4", "text"),
        ("noend", b"\x00\x01", "binary"),
        ("noend", b"\xff\xfe\xfa", "binary"),
        ("x.svg", b"<svg/>", "text"),
        ("X.JSON", b"{}", "json"),
        ("model.weights", b"\x93NUMPY\x01\x00", "npy"),
        ("noend", b"\x89HDF\r\n\x1a\n00000000", "hdf5"),
        ("cut", b"a" * 4095 + "ä".encode(), "text"),
    ],
)
def test_what_the_name_does_not_tell_the_first_bytes_do(name: str, content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert kind_of(tmp_path / name).name == kind


def test_errors_name_what_was_asked_for(tmp_path: Path, write: Write) -> None:
    with pytest.raises(ArtifactNotFoundError, match=r"gone\.npy"):
        preview(tmp_path / "gone.npy")
    with pytest.raises(ArtifactError, match="folder"):
        preview(tmp_path)
    with pytest.raises(ArtifactError, match="Did you mean 'json'"):
        preview(write("json"), kind="jsno")
    with pytest.raises(ArtifactError, match="Did you mean 'values'"):
        preview(write("npz"), "valuse")
    with pytest.raises(ArtifactError, match=r"npy.*npz"):
        diff_artifacts(write("npy"), write("npz"))
    with pytest.raises(ArtifactError, match="part"):
        preview(write("npy"), part="half")


def test_kinds_come_from_other_packages_and_a_broken_one_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def read(path: Path) -> Any:
        yield Content(text="theirs")

    class Point:
        def __init__(self, name: str, value: Any) -> None:
            self.name, self.value = name, f"package:{name}"
            self._loaded = value

        def load(self) -> Any:
            return self._loaded

    theirs = ArtifactKind("theirs", "theirs", read, "text", (".theirs",))
    points = [Point("theirs", theirs), Point("odd", 3)]
    monkeypatch.setattr(artifact_kinds, "entry_points", lambda group: points if group == ENTRY_POINTS else [])
    artifact_kinds._load_entry_points.cache_clear()
    try:
        with pytest.warns(UserWarning, match="'odd'.*expected an ArtifactKind"):
            assert kind_of(Path("x.theirs"), "theirs") is theirs
    finally:
        KINDS.pop("theirs", None)
        artifact_kinds._load_entry_points.cache_clear()


def test_folders_that_are_one_artifact(write: Write, tmp_path: Path) -> None:
    assert is_unit(write("zarr"))
    assert is_unit(write("weight store"))
    assert not is_unit(tmp_path)


# ------------------------------------------------------------------------------------------- documents and texts


@pytest.mark.parametrize(
    ("a", "b", "entries"),
    [
        ({"x": 1}, {"x": 1.0}, []),
        ({"x": 1}, {"x": True}, [{"path": "x", "kind": "changed", "a": 1, "b": True}]),
        ({"x": float("nan")}, {"x": float("nan")}, []),
        ({"x": None}, {}, [{"path": "x", "kind": "removed", "a": None}]),
        (
            {"x": {"y": [1, {"z": 2}]}},
            {"x": {"y": [1, {"z": 3}]}},
            [{"path": "x.y[1].z", "kind": "changed", "a": 2, "b": 3}],
        ),
        ([1], [1, 2], [{"path": "[1]", "kind": "added", "b": 2}]),
        ({"x": {}}, {"x": []}, [{"path": "x", "kind": "changed", "a": {}, "b": []}]),
        (3, "3", [{"path": "", "kind": "changed", "a": 3, "b": "3"}]),
    ],
)
def test_documents(a: Any, b: Any, entries: list[dict[str, Any]]) -> None:
    assert diff_documents(a, b) == {"equal": not entries, "entries": entries}


def test_a_document_with_nan_is_shown_and_compared(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"loss": NaN, "x": -Infinity}')
    (tmp_path / "b.json").write_text('{"loss": 1.5, "x": -Infinity}')
    assert preview(tmp_path / "a.json").as_dict()["data"]["document"]["loss"] == {"$float": "nan"}
    found = diff_artifacts(tmp_path / "a.json", tmp_path / "b.json").as_dict()
    assert found["data"]["entries"] == [{"path": "loss", "kind": "changed", "a": {"$float": "nan"}, "b": 1.5}]


def test_a_large_document_is_cut_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"rows": list(range(100_000)), "text": "x" * 100_000}))
    shown = preview(tmp_path / "a.json")
    assert len(strict_json(shown.as_dict())) < 50_000
    assert any("first" in note for note in shown.notes)


def test_malformed_documents_are_shown_as_text(tmp_path: Path) -> None:
    for name, text in (("a.json", "{not json"), ("a.yaml", "a: [1"), ("b.yaml", "!!python/object:os.system x")):
        (tmp_path / name).write_text(text)
        shown = preview(tmp_path / name)
        assert (shown.view, shown.data["text"]) == ("text", text)
        assert "shown as text" in shown.notes[0]


def test_yaml_that_names_one_part_many_times_takes_no_time(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join(['*a' + str(i - 1)] * 9)}]" for i in range(1, 12)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    (tmp_path / "b.yaml").write_text("\n".join(lines))
    assert len(strict_json(preview(tmp_path / "a.yaml").as_dict())) < 200_000
    assert diff_artifacts(tmp_path / "a.yaml", tmp_path / "b.yaml").equal


def test_texts() -> None:
    found = diff_texts("a\nb\nc\n", "a\nB\nc\nd\n")
    assert (found["added"], found["removed"]) == (2, 1)
    assert found["diff"].splitlines()[3:] == [" a", "-b", "+B", " c", "+d"]
    assert diff_texts("a\r\n", "a\n")["note"]


def test_texts_that_differ_beyond_what_is_read(tmp_path: Path) -> None:
    for name, end in (("a.txt", b"x"), ("b.txt", b"y")):
        (tmp_path / name).write_bytes(b"line\n" * 1_000_000 + end)
    found = diff_artifacts(tmp_path / "a.txt", tmp_path / "b.txt")
    assert found.equal is False
    assert "beyond" in found.notes[-1]


# ------------------------------------------------------------------------------------------- kinds of their own


def test_links_of_hdf5_that_lead_out_of_the_file_are_not_followed(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.arange(4.0)
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "x", (4,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["out"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "x")
        file["gone"] = h5py.SoftLink("/nowhere")
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", (2,), "f8", external=[(str(tmp_path / "raw.bin"), 0, 16)])
        file["loop/back"] = h5py.SoftLink("/loop")
        file["empty"] = h5py.Empty("f4")
        file["texts"] = np.array(["ä", "b"], h5py.string_dtype())
        file.attrs["nan"] = np.nan
    shown = preview(tmp_path / "a.h5").as_dict()
    strict_json(shown)
    assert {one["address"] for one in shown["datasets"]} == {"/virtual", "/raw", "/empty", "/texts"}
    assert [one["address"] for one in shown["datasets"] if "other files" in one.get("refusal", "")] == [
        "/raw",
        "/virtual",
    ]
    assert len(shown["notes"]) == 2
    assert shown["attrs"]["nan"] == {"$float": "nan"}
    assert preview(tmp_path / "a.h5", "texts").data["first"] == ["ä", "b"]
    assert preview(tmp_path / "a.h5", "empty").data["form"] in ("nothing", "empty")
    assert "other files" in preview(tmp_path / "a.h5", "virtual").data["note"]


def test_netcdf_is_scaled_and_its_fill_is_nan(tmp_path: Path) -> None:
    netcdf4 = pytest.importorskip("netCDF4")
    with netcdf4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("x", 3)
        packed = file.createVariable("packed", "i2", ("x",), fill_value=-1)
        packed.scale_factor, packed.add_offset = 0.5, 10.0
        packed.set_auto_maskandscale(False)
        packed[:] = [0, -1, 4]
        file.createVariable("name", str, ("x",))[:] = np.array(["a", "b", "c"], object)
        file.createGroup("inner").createVariable("scalar", "f8", ())[...] = 3.5
    curve = preview(tmp_path / "a.nc", "packed").data["curve"]["mean"]
    assert np.array_equal(curve, [10, np.nan, 12], equal_nan=True)
    assert preview(tmp_path / "a.nc", "name").data["first"] == ["a", "b", "c"]
    assert preview(tmp_path / "a.nc", "inner/scalar").data["first"] == [3.5]


def test_parquet_keeps_missing_values_and_texts(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = pyarrow.table({"i": [1, None, 3], "n": [1, 2, 3], "t": ["a", None, "c"], "b": [True, False, None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    shown = preview(tmp_path / "a.parquet").as_dict()
    assert shown["data"]["rows"][1] == [{"$float": "nan"}, 2, "", 0.0]
    assert [one["dtype"] for one in shown["datasets"]] == ["int64", "int64", "string", "bool"]


def test_csv_with_odd_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('x;y;x\n1;"a;b";\n2;c;4;5\n')
    shown = preview(tmp_path / "a.csv").as_dict()
    assert shown["data"]["columns"] == ["x", "y", "x (3)"]
    assert shown["data"]["rows"] == [[1.0, "a;b", {"$float": "nan"}], [2.0, "c", 4.0]]
    assert shown["notes"] == ["1 rows have more or fewer than 3 cells"]


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "I;16", "F", "CMYK", "LA"])
def test_images_of_every_mode(mode: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, level in (("a.tif", 10), ("b.tif", 200)):
        made = image.new(mode, (7, 5), 0)
        if mode == "P":
            made.putpalette([level for level in range(256) for _ in "RGB"])
        made.putpixel((2, 3), level if mode in ("L", "P", "1", "I;16", "F") else (level,) * len(mode))
        made.save(tmp_path / name)
    shown = preview(tmp_path / "a.tif").as_dict()
    strict_json(shown)
    assert (shown["attrs"]["width"], shown["attrs"]["height"], shown["attrs"]["mode"]) == (7, 5, mode)
    found = diff_artifacts(tmp_path / "a.tif", tmp_path / "b.tif")
    if mode != "1":
        assert found.equal is False
        assert np.argwhere(found.data["heatmap"]["abs_max"] > 0).tolist() == [[3, 2]]


def test_the_frames_of_an_image(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    frames = [image.new("L", (4, 4), level) for level in (0, 50, 100)]
    frames[0].save(tmp_path / "a.tif", save_all=True, append_images=frames[1:])
    shown = preview(tmp_path / "a.tif")
    assert [one["address"] for one in shown.datasets] == ["frame 0", "frame 1", "frame 2"]
    assert preview(tmp_path / "a.tif", "frame 2").data["stats"]["mean"] == 100


def test_zarr_of_version_2_a_lone_array_and_zipped(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    zarr.create_array(tmp_path / "v2.zarr", data=matrix(), zarr_format=2)
    with zarr.storage.ZipStore(tmp_path / "a.zarr.zip", mode="w") as store:
        zarr.create_array(store, data=matrix())
    (tmp_path / "link.zarr").symlink_to(tmp_path / "v2.zarr", target_is_directory=True)
    for name in ("v2.zarr", "a.zarr.zip", "link.zarr"):
        assert preview(tmp_path / name).data["heatmap"]["mean"].tolist() == matrix().tolist()


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, diffract_dask.runs.artifacts, diffract_dask.runs.artifact_diffs, diffract_dask.runs.previews\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(loaded) & {"dask", "xarray", "zarr", "h5py", "pyarrow", "PIL", "netCDF4", "yaml", "scipy", "click"}


def test_the_reference_page_has_the_table() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "reference" / "artifacts.md").read_text(encoding="utf8")
    rows = []
    for kind in reversed(KINDS.values()):
        ends = " ".join(f"`{end}`" for end in kind.suffixes)
        needs = f"extra `{kind.extra}`" if kind.extra else ""
        cells = (f"`{kind.name}`", kind.view, ends, needs, kind.summary)
        rows.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    assert "\n".join(rows) in page
