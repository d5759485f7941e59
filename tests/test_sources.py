"""Sources without any framework: stored types, safetensors, npz, mappings, links, the table."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diffract_dask import sources
from diffract_dask.catalog import Checkpoint, Location, Tensor, describe, digest
from diffract_dask.errors import (
    CorruptFileError,
    LinkBrokenError,
    MissingExtraError,
    SourceError,
    UnsupportedSourceError,
)
from diffract_dask.sources import SOURCES, Source, dtypes, linked, open_checkpoint, register

REAL = Path(os.environ.get("DIFFRACT_DASK_REAL_WEIGHTS") or Path(__file__).resolve().parent.parent / ".real-weights")

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def write(
    path: Path, arrays: Mapping[str, NDArray[Any]], metadata: dict[str, str] | None = None, header_bytes: int = 0
) -> Path:
    """Write safetensors, in the order given; the header is padded to `header_bytes`."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata is not None else {}
    data = b""
    for name, array in arrays.items():
        start, data = len(data), data + array.tobytes()
        header[name] = {
            "dtype": CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, len(data)],
        }
    write_raw(path, header, data, header_bytes)
    return path


def write_raw(path: Path, header: Any, data: bytes, header_bytes: int = 0) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode().ljust(header_bytes)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def some_arrays(seed: int = 0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {
        "layer.10.weight": rng.standard_normal((6, 4), dtype=np.float32),
        "layer.2.weight": rng.standard_normal((5, 3)).astype(np.float16),
        "conv.weight": rng.standard_normal((4, 3, 2)),
        "layer.2.bias": rng.standard_normal(5).astype(np.float32),
        "steps": np.array(7),
        "empty": np.zeros((0, 5), np.float32),
    }


def values(checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    """Read everything that can be read, decoded."""
    return {t.name: dtypes.decode(t.read(0, (*t.shape, 1)[0]), t.dtype) for t in checkpoint.tensors if t.readable}


def same(found: dict[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].shape == np.shape(expected[name])
        and np.array_equal(found[name], np.asarray(expected[name]).astype(found[name].dtype), equal_nan=True)
        for name in expected
    )


def names(checkpoint: Checkpoint) -> list[str]:
    return [t.name for t in checkpoint.tensors]


# -------------------------------------------------------------------------------------------------- stored types

SMALL_FLOATS = [name for name in dtypes.DTYPES if name.startswith("float8")]


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_float8_is_decoded_exactly(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    found = dtypes.decode(codes, name)
    expected = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
    assert found.dtype == np.float32 == dtypes.decoded(name)
    np.testing.assert_array_equal(found, expected)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[finite]), np.signbit(expected[finite]))


def test_bfloat16_is_decoded_exactly() -> None:
    codes = np.arange(2**16, dtype=np.uint16).reshape(2, 128, 256)
    found = dtypes.decode(codes, "bfloat16")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), codes.astype(np.uint32) << 16)
    np.testing.assert_array_equal(found, codes.view(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("name", dtypes.DTYPES)
def test_every_stored_type_is_consistent(name: str) -> None:
    carrier = dtypes.carrier(name)
    assert dtypes.itemsize(name) == carrier.itemsize
    assert dtypes.has_carrier(name)
    assert dtypes.is_float(name) + dtypes.is_integer(name) + dtypes.is_complex(name) == 1
    assert not dtypes.is_packed(name)
    raw = np.zeros((2, 3), carrier)
    decoded = dtypes.decode(raw, name)
    assert decoded.dtype == dtypes.decoded(name)
    assert decoded.shape == (2, 3)
    assert dtypes.is_float(name) or decoded is raw


def test_types_without_a_raw_form() -> None:
    assert not dtypes.has_carrier("string")
    assert dtypes.itemsize("string") == 0
    with pytest.raises(UnsupportedSourceError, match=r"'bfloat15'.*Did you mean 'bfloat16'"):
        dtypes.carrier("bfloat15")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.dtype(">f8"), "float64"),
        (np.dtype("?"), "bool"),
        (np.dtype("U3"), "string"),
        (np.dtype("S3"), "string"),
        (np.dtype(object), "object"),
        (np.dtype([("a", "f4")]), "void"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2"),
    ],
)
def test_names_of_numpy_types(dtype: np.dtype[Any], expected: str) -> None:
    assert dtypes.dtype_name(dtype) == expected


# --------------------------------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2), (0, 5), (5, 0)])
def test_safetensors_of_every_type_and_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    (tensor,) = open_checkpoint(write(tmp_path / "m.safetensors", {"w": array})).tensors
    assert (tensor.name, tensor.shape, tensor.dtype) == ("w", shape, name)
    raw = tensor.read(0, (*shape, 1)[0])
    assert raw.dtype == dtypes.carrier(name)
    assert raw.shape == shape
    assert raw.tobytes() == array.tobytes()
    np.testing.assert_array_equal(dtypes.decode(raw, name), array.astype(dtypes.decoded(name)))


def test_safetensors_agrees_with_the_reference_implementation(tmp_path: Path) -> None:
    reference = pytest.importorskip("safetensors.numpy")
    arrays = some_arrays()
    path = tmp_path / "m.safetensors"
    reference.save_file(arrays, path, metadata={"format": "np", "step": "3"})
    checkpoint = open_checkpoint(str(path))
    assert same(values(checkpoint), reference.load_file(path))
    assert same(values(checkpoint), arrays)
    assert (checkpoint.source, checkpoint.framework) == (str(path), "numpy")
    assert checkpoint.attrs == {"checkpoint": {"format": "np", "step": "3"}}
    assert names(checkpoint) == ["conv.weight", "empty", "layer.2.bias", "layer.2.weight", "layer.10.weight", "steps"]


def test_safetensors_rows_are_read_by_range(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.float32).reshape(10, 3, 2)
    (tensor,) = open_checkpoint(write(tmp_path / "m.safetensors", {"w": array})).tensors
    np.testing.assert_array_equal(tensor.read(3, 7), array[3:7])
    np.testing.assert_array_equal(tensor.read(9, 99), array[9:])
    assert tensor.read(4, 4).shape == (0, 3, 2)
    assert tensor.location is not None
    assert tensor.location.path == str(tmp_path / "m.safetensors")
    assert tensor.location.nbytes == array.nbytes


@pytest.mark.parametrize("size", [100_000, 100_001, 3_000_000])
def test_safetensors_headers_of_any_length(tmp_path: Path, size: int) -> None:
    arrays = some_arrays()
    path = write(tmp_path / "m.safetensors", arrays, header_bytes=size)
    assert int.from_bytes(path.read_bytes()[:8], "little") == size
    assert same(values(open_checkpoint(path)), arrays)


def test_safetensors_with_metadata_only_is_an_empty_table(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {}, {"format": "pt"})
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors == []
    assert checkpoint.framework == "torch"
    assert len(describe(checkpoint, "m")) == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_safetensors_cut_anywhere_is_refused_with_both_sizes(tmp_path: Path, data: st.DataObject) -> None:
    whole = write(tmp_path / "whole.safetensors", some_arrays()).read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path / "cut.safetensors"
    path.write_bytes(whole[:cut])
    header = 8 + int.from_bytes(whole[:8], "little")
    expected = len(whole) if cut >= header else header if cut >= 8 else 8
    with pytest.raises(CorruptFileError, match=rf"cut off.*expected .*\b{expected}\b.*found {cut}\b"):
        open_checkpoint(path)


def test_safetensors_with_bytes_appended_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", some_arrays())
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x" * 9)
    with pytest.raises(CorruptFileError, match=rf"bytes appended: expected {size} bytes.*found {size + 9}\b"):
        open_checkpoint(path)


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"w": GOOD | {"data_offsets": [4, 20]}}, "expected from 0 on"),
        ({"w": GOOD, "v": GOOD | {"data_offsets": [8, 24]}}, "leaves a gap or overlaps"),
        ({"w": GOOD, "v": GOOD | {"data_offsets": [20, 36]}}, "leaves a gap or overlaps"),
        ({"w": GOOD | {"shape": [2, 3]}}, "needs 24 bytes, found 16"),
        ({"w": GOOD | {"shape": [-2, -2]}}, "entry for 'w'"),
        ({"w": GOOD | {"data_offsets": [16, 0]}}, "entry for 'w'"),
        ({"w": GOOD | {"data_offsets": [0, 16.0]}}, "entry for 'w'"),
        ({"w": {"dtype": "F32"}}, "entry for 'w'"),
        ({"w": 3}, "entry for 'w'"),
        ({"__metadata__": 3, "w": GOOD}, "not a mapping of tensor names"),
        ([1, 2], "not a mapping of tensor names"),
        ("{not json", "not JSON"),
        ('{"w": 1, "w": 2}', "'w' twice"),
    ],
)
def test_safetensors_whose_header_is_wrong_is_refused(tmp_path: Path, header: Any, match: str) -> None:
    write_raw(tmp_path / "m.safetensors", header, bytes(16))
    with pytest.raises(CorruptFileError, match=match):
        open_checkpoint(tmp_path / "m.safetensors")


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CorruptFileError, match="git lfs pull"):
        open_checkpoint(path)


def test_safetensors_types_without_a_raw_form_get_a_row(tmp_path: Path) -> None:
    four = {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}
    new = {"dtype": "Z99", "shape": [4, 4], "data_offsets": [8, 16]}
    write_raw(tmp_path / "m.safetensors", {"four": four, "new": new}, bytes(16))
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    assert list(describe(checkpoint, "m").skip_reason) == ["quantised", "not_numeric"]
    assert not any(t.readable for t in checkpoint.tensors)
    with pytest.raises(SourceError, match="its type is float4_e2m1fn"):
        checkpoint.tensors[0].read(0, 1)


def test_safetensors_that_share_bytes_are_tied(tmp_path: Path) -> None:
    other = GOOD | {"data_offsets": [16, 32]}
    write_raw(tmp_path / "m.safetensors", {"emb": GOOD, "head": GOOD, "other": other}, bytes(range(32)))
    assert list(describe(open_checkpoint(tmp_path / "m.safetensors"), "m").tied_to) == ["", "emb", ""]


# -------------------------------------------------------------------------------------------------------- shards


def shard(folder: Path, arrays: Mapping[str, NDArray[Any]], n: int, index: bool) -> Path:
    """Write `arrays` as `n` shards, every n-th to each."""
    weight_map = {}
    for i in range(n):
        name = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
        part = dict(list(arrays.items())[i::n])
        write(folder / name, part, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    if index:
        content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_sharded_safetensors_are_as_the_single_file(tmp_path: Path, n: int, index: bool) -> None:
    arrays = some_arrays()
    single = open_checkpoint(write(tmp_path / "single.safetensors", arrays))
    folder = tmp_path / "sharded"
    folder.mkdir()
    shard(folder, arrays, n, index)
    ways: list[Any] = [folder, str(folder), sorted(folder.glob("*.safetensors")), tuple(folder.glob("*.safetensors"))]
    if index:
        ways.append(folder / "model.safetensors.index.json")
    for way in ways:
        found = open_checkpoint(way)
        assert names(found) == names(single)
        assert same(values(found), arrays)
        assert found.framework == "torch"
        table = describe(found, "m")
        expected = describe(single, "m")
        for column in ("name", "uid", "type", "shape", "dtype", "rows", "cols", "nbytes", "skip_reason"):
            assert list(getattr(table, column)) == list(getattr(expected, column))


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, some_arrays(), 3, index=True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptFileError, match=r"model-00002-of-00003\.safetensors.*'layer\.2\.weight'"):
        open_checkpoint(tmp_path)


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, some_arrays(), 3, index=True)
    path = tmp_path / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["layer.2.wieght"] = "model-00002-of-00003.safetensors"
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptFileError, match=r"'layer\.2\.wieght'.*model-00002.*Did you mean 'layer\.2\.weight'"):
        open_checkpoint(path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CorruptFileError, match="weight_map"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_without_an_index_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, some_arrays(), 3, index=False)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CorruptFileError, match=r"model-00003-of-00003\.safetensors.*expected 3 files, found 2"):
        open_checkpoint(tmp_path)
    with pytest.raises(SourceError, match="does not exist"):
        open_checkpoint([tmp_path / "model-00001-of-00003.safetensors", tmp_path / "model-00003-of-00003.safetensors"])


def test_shards_numbered_from_zero_are_complete(tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path / f"m-{i}-of-2.safetensors", {f"w{i}": np.ones((2, 2))})
    assert names(open_checkpoint(tmp_path)) == ["w0", "w1"]


def test_one_name_in_two_shards_is_refused_unless_the_index_decides(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": np.ones((2, 2))})
    write(tmp_path / "b.safetensors", {"w": np.zeros((2, 2)), "v": np.ones((2, 2))})
    with pytest.raises(CorruptFileError, match=r"'w' is in both .*a\.safetensors.*b\.safetensors"):
        open_checkpoint(tmp_path)
    write(tmp_path / "a.safetensors", {"w": np.ones((2, 2)), "u": np.ones((2, 3))})
    index = {"weight_map": {"u": "a.safetensors", "w": "b.safetensors", "v": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = {"u": np.ones((2, 3)), "v": np.ones((2, 2)), "w": np.zeros((2, 2))}
    assert same(values(open_checkpoint(tmp_path)), expected)


def test_a_folder_with_two_checkpoints_asks_which(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": np.ones((2, 2))})
    for name in ("net.safetensors.index.json", "net.fp16.safetensors.index.json"):
        (tmp_path / name).write_text('{"weight_map": {"w": "a.safetensors"}}')
    with pytest.raises(SourceError, match=r"several checkpoints: net\.fp16\.safetensors\.index\.json, net\."):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    assert names(open_checkpoint(tmp_path)) == ["w"]


def test_memory_is_flat_in_the_number_of_shards(tmp_path: Path) -> None:
    one = 2**20

    def peak(n: int) -> int:
        folder = tmp_path / str(n)
        folder.mkdir()
        for i in range(n):
            write(folder / f"m{i}.safetensors", {f"w{i}": np.full((256, one // 2048), i, np.float64)})
        gc.collect()
        tracemalloc.start()
        for tensor in open_checkpoint(folder).tensors:
            digest(tensor.read, tensor.shape, tensor.dtype)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(12) < peak(2) + one / 4


# ----------------------------------------------------------------------------------------------------------- npz


def test_npz_uncompressed_is_read_by_range_and_linkable(tmp_path: Path) -> None:
    arrays = some_arrays() | {"path/with.slash": np.ones((2, 2))}
    path = tmp_path / "m.npz"
    np.savez(path, **arrays)
    checkpoint = open_checkpoint(path)
    assert names(checkpoint) == list(arrays)
    assert same(values(checkpoint), arrays)
    assert checkpoint.framework == "numpy"
    for tensor in checkpoint.tensors:
        place = tensor.location
        assert place is not None
        assert path.read_bytes()[place.offset : place.offset + place.nbytes] == arrays[tensor.name].tobytes()
        assert linked.check(place)
    np.testing.assert_array_equal(checkpoint.tensors[0].read(2, 4), arrays["layer.10.weight"][2:4])


def test_npz_compressed_big_endian_and_column_major_are_read_but_not_linked(tmp_path: Path) -> None:
    arrays = some_arrays()
    path = tmp_path / "m.npz"
    np.savez_compressed(path, **arrays)
    checkpoint = open_checkpoint(path)
    assert same(values(checkpoint), arrays)
    assert all(t.location is None for t in checkpoint.tensors)

    w = np.arange(12.0).reshape(4, 3)
    np.savez(path, fortran=np.asfortranarray(w), swapped=w.astype(">f4"), one=np.asfortranarray(w[:1]))
    checkpoint = open_checkpoint(path)
    assert same(values(checkpoint), {"fortran": w, "swapped": w, "one": w[:1]})
    assert [t.location is None for t in checkpoint.tensors] == [True, True, False]
    assert [t.dtype for t in checkpoint.tensors] == ["float64", "float32", "float64"]
    np.testing.assert_array_equal(checkpoint.tensors[0].read(1, 3), w[1:3])


def test_an_open_npz_is_opened_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, w=np.ones((3, 2)))
    with np.load(path) as archive:
        checkpoint = open_checkpoint(archive)
    assert checkpoint.source == str(path)
    assert same(values(checkpoint), {"w": np.ones((3, 2))})


class Exploding:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_npz_members_that_are_no_numbers_get_a_row_and_are_never_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    np.savez(
        tmp_path / "m.npz",
        evil=np.array([Exploding(mark)], dtype=object),
        text=np.array(["a", "b"]),
        record=np.zeros(3, [("a", "f4")]),
        bf16=np.ones((2, 2), ml_dtypes.bfloat16),
        w=np.ones((2, 2)),
    )
    with zipfile.ZipFile(tmp_path / "m.npz", "a") as archive:
        archive.writestr("readme.txt", "hello")
    checkpoint = open_checkpoint(tmp_path / "m.npz")
    table = describe(checkpoint, "m")
    assert dict(zip(table.name, table.skip_reason, strict=True)) == {
        **dict.fromkeys(("evil", "text", "record", "bf16", "readme.txt"), "not_numeric"),
        "w": "",
    }
    assert [t.name for t in checkpoint.tensors if t.readable] == ["w"]
    for tensor in checkpoint.tensors[:-1]:
        if tensor.name != "w":
            with pytest.raises(SourceError, match="cannot be read"):
                tensor.read(0, 1)
    assert not mark.exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 400, -30, -1])
def test_npz_cut_anywhere_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, **some_arrays())
    content = path.read_bytes()[:keep]
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"cut off.*found {len(content)} bytes"):
        open_checkpoint(path)


def test_npz_with_bytes_appended_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, **some_arrays())
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x" * 9)
    with pytest.raises(CorruptFileError, match=rf"expected {size} bytes, found {size + 9}\b"):
        open_checkpoint(path)


def test_npz_member_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.ones((4, 4)))
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("w.npy", buffer.getvalue()[:-8])
    with pytest.raises(CorruptFileError, match="needs 128 bytes, found 120"):
        open_checkpoint(tmp_path / "m.npz")


# ------------------------------------------------------------------------------------------------------ mappings


def test_a_mapping_of_arrays_of_any_make() -> None:
    w = np.arange(12.0).reshape(4, 3)
    arrays: dict[str, Any] = {
        "plain": w,
        "view": w.T,
        "swapped": w.astype(">f4"),
        "fortran": np.asfortranarray(w),
        "strided": np.arange(48.0).reshape(8, 6)[::2, ::2],
        "half": w.astype(np.float16),
        "bfloat16": w.astype(ml_dtypes.bfloat16),
        "float8": w.astype(ml_dtypes.float8_e4m3fn),
        "long": w.astype(np.longdouble),
        "scalar": np.float32(3),
        "number": 2.5,
    }
    checkpoint = open_checkpoint(arrays)
    assert same(values(checkpoint), arrays)
    assert checkpoint.framework == "numpy"
    assert all(t.read(0, 1).flags.c_contiguous for t in checkpoint.tensors)
    assert all(t.read(0, 1).dtype == dtypes.carrier(t.dtype) for t in checkpoint.tensors)
    found = dict(zip(arrays, checkpoint.tensors, strict=True))
    assert found["bfloat16"].read(0, 4).dtype == np.uint16
    assert found["long"].dtype == "float64"
    assert np.shares_memory(found["plain"].read(0, 4), w)
    np.testing.assert_array_equal(found["view"].read(1, 3), w.T[1:3])


class ArrayLike:
    """Of a framework that NumPy can convert, with a type of its own that it does not know."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.shape, self.dtype = array, array.shape, "Float-Thirty-Two"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.array

    def __getitem__(self, key: slice) -> NDArray[Any]:
        return self.array[key]


def test_array_likes_are_converted_when_they_are_read(tmp_path: Path) -> None:
    w = np.arange(6.0).reshape(3, 2)
    np.save(tmp_path / "w.npy", w)
    mapped = np.load(tmp_path / "w.npy", mmap_mode="r")
    shared = ArrayLike(w)
    checkpoint = open_checkpoint({"like": shared, "again": shared, "other": ArrayLike(w), "mapped": mapped})
    assert same(values(checkpoint), dict.fromkeys(("like", "again", "other", "mapped"), w))
    assert list(describe(checkpoint, "m").tied_to) == ["", "like", "", ""]


def test_entries_that_are_no_arrays_get_a_row_with_a_reason() -> None:
    class Sparse:
        shape, dtype = (3, 2), np.dtype(float)

        def tocsr(self) -> None: ...

    content = {
        "w": np.ones((3, 2)),
        "text": "hello",
        "nothing": None,
        "list": [1, 2],
        "strings": np.array([["a", "b"], ["c", "d"]]),
        "objects": np.array([[None, 1], [2, 3]]),
        "dates": np.zeros((2, 2), "M8[s]"),
        "complex": np.ones((2, 2), complex),
        "masked": np.ma.ones((3, 2)),
        "sparse": Sparse(),
        "int4": np.ones((2, 2), ml_dtypes.int4),
        "flag": True,
    }
    checkpoint = open_checkpoint(content)
    table = describe(checkpoint, "m")
    assert dict(zip(table.name, table.skip_reason, strict=True)) == {
        "w": "",
        **dict.fromkeys(("text", "nothing", "list", "strings", "objects", "dates"), "not_numeric"),
        "complex": "complex",
        **dict.fromkeys(("masked", "sparse"), "sparse"),
        "int4": "quantised",
        "flag": "scalar",
    }
    assert {t.name for t in checkpoint.tensors if t.readable} == {"w", "complex", "flag"}
    for tensor in checkpoint.tensors:
        if not tensor.readable:
            with pytest.raises(SourceError, match="cannot be read"):
                tensor.read(0, 1)


W, V = np.arange(6.0).reshape(3, 2), np.arange(8.0).reshape(2, 4)
MOMENTS = {"state": {0: {"exp_avg": W, "step": 3}}, "param_groups": [{"lr": 0.1}]}


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
def test_wrappers_are_opened_and_optimizer_state_is_left_out(key: str) -> None:
    content = {key: {"w": W, "b": W[0]}, "optimizer": MOMENTS, "epoch": 3, "note": "x"}
    checkpoint = open_checkpoint(content)
    assert names(checkpoint) == ["w", "b"]
    assert checkpoint.attrs == {"checkpoint": {"epoch": 3, "note": "x"}, "wrapper": key, "left_out": ["optimizer"]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param({"model": {"state_dict": {"w": W}}, "optimizer": MOMENTS}, ["w"], id="nested"),
        pytest.param({"module": {"module": {"w": W}}}, ["w"], id="twice the same"),
        pytest.param({"model": {"w": W}, "anything": MOMENTS}, ["w"], id="optimizer by its shape"),
        pytest.param({"model": {"w": W}, "optimizer_states": [MOMENTS], "lr_schedulers": [{"x": W}]}, ["w"], id="list"),
        pytest.param({"model": {"w": W}, "model_ema": {"w": W + 1, "decay": 1}}, ["w"], id="average"),
        pytest.param({"model": {"w": W}, "best": {"w": W + 1}}, ["w"], id="the same keys"),
        pytest.param({"state_dict": {"w": W}, "model": {"w": W + 1}}, ["w"], id="two wrappers"),
        pytest.param({"model": {"w": W}, "rng": np.ones(5, np.uint8), "class_weights": W[0]}, ["w"], id="vectors"),
        pytest.param({"model": {"w": W}, "critic": {"v": V}}, ["model.w", "critic.v"], id="weights beside"),
        pytest.param({"model": {"w": W}, "v": V}, ["model.w", "v"], id="array beside"),
        pytest.param({"G": {"w": W}, "D": {"v": V}, "optimizer_G": MOMENTS}, ["G.w", "D.v"], id="no wrapper"),
        pytest.param({"params": {"Dense_0": {"kernel": W}}, "opt_state": [{"mu": W}]}, ["Dense_0.kernel"], id="flax"),
        pytest.param({"layers": [W, {"v": V}], "lr": 0.1}, ["layers.0", "layers.1.v"], id="lists"),
        pytest.param({"model": W, "state_dict": V}, ["model", "state_dict"], id="arrays of these names"),
        pytest.param({"model": {"name": "mlp"}, "w": W}, ["w"], id="a wrapper of no arrays"),
        pytest.param({1: W, "b": V}, ["1", "b"], id="keys that are no text"),
        pytest.param({}, [], id="empty"),
    ],
)
def test_what_is_taken_for_weights(content: dict[Any, Any], expected: list[str]) -> None:
    checkpoint = open_checkpoint(content)
    assert names(checkpoint) == expected
    assert not any("exp_avg" in name or "mu" in name for name in names(checkpoint))
    first = {"w": W, "v": V, "kernel": W, "0": W, "model": W, "state_dict": V, "1": W, "b": V}
    for tensor in checkpoint.tensors:
        np.testing.assert_array_equal(tensor.read(0, 3), first[tensor.name.rpartition(".")[2]])


def test_flat_optimizer_state_gets_a_reason() -> None:
    checkpoint = open_checkpoint({"layer.w": W, "optimizer.state.0.exp_avg": W, "optim.layer.w.momentum_buffer": W})
    assert list(describe(checkpoint, "m").skip_reason) == ["", "optimizer", "optimizer"]


def test_keys_that_join_to_one_name_are_refused() -> None:
    with pytest.raises(SourceError, match=r"two entries of the checkpoint are named 'a\.b'"):
        open_checkpoint({"a": {"b": W}, "a.b": V})


def test_the_same_weights_have_the_same_table_and_digests_whatever_the_route(tmp_path: Path) -> None:
    arrays = {name: array for name, array in some_arrays().items() if name != "steps"}
    np.savez(tmp_path / "m.npz", **arrays)
    np.savez_compressed(tmp_path / "c.npz", **arrays)
    routes = [
        arrays,
        {"state_dict": arrays, "optimizer": MOMENTS},
        write(tmp_path / "m.safetensors", arrays),
        tmp_path / "m.npz",
        tmp_path / "c.npz",
    ]
    tables = []
    for route in routes:
        checkpoint = open_checkpoint(route)
        table = describe(checkpoint, "m")
        table.digest[:] = [digest(t.read, t.shape, t.dtype) for t in checkpoint.tensors]
        columns = (table.uid, table.type, table.shape, table.dtype, table.rows, table.cols, table.nbytes, table.digest)
        tables.append(dict(zip(table.name, zip(*columns, table.skip_reason, table.module, strict=True), strict=True)))
    assert all(table == tables[0] for table in tables)


# --------------------------------------------------------------------------------------------------------- links


def a_link(tmp_path: Path, array: NDArray[Any]) -> Location:
    path = write(tmp_path / "m.safetensors", {"before": np.ones(3), "w": array, "zafter": np.ones(5)})
    (place,) = (t.location for t in open_checkpoint(path).tensors if t.name == "w")
    assert place is not None
    return place


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.data())
def test_rows_and_columns_of_a_link(tmp_path: Path, a: int, b: int, c: int, data: st.DataObject) -> None:
    array = np.arange(a * b * c, dtype=np.float32).reshape(a, b, c)
    place = a_link(tmp_path, array)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, a), st.integers(0, a + 2))))
    rows = linked.read_rows(place, array.shape, "float32", start, stop)
    np.testing.assert_array_equal(rows, array[start:stop])
    start, stop = sorted(data.draw(st.tuples(st.integers(0, b * c), st.integers(0, b * c + 2))))
    columns = linked.read_columns(place, array.shape, "float32", start, stop)
    np.testing.assert_array_equal(columns, array.reshape(a, b * c)[:, start:stop])
    assert columns.flags.c_contiguous


def test_a_read_longer_than_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linked, "_READ_BYTES", 7)
    array = np.arange(60.0).reshape(10, 6)
    np.testing.assert_array_equal(linked.read_rows(a_link(tmp_path, array), (10, 6), "float64", 2, 9), array[2:9])


def test_check_of_a_link(tmp_path: Path) -> None:
    array = np.arange(60.0).reshape(10, 6)
    place = a_link(tmp_path, array)
    path = Path(place.path)
    whole = path.read_bytes()
    assert linked.check(place)

    os.utime(path, ns=(1, place.mtime_ns + 1))
    assert not linked.check(place)

    path.write_bytes(whole + b"more")
    assert not linked.check(place)

    write(path, {"another": np.ones(3), "layout": np.ones(200)})
    with pytest.raises(LinkBrokenError, match="another layout"):
        linked.check(place)


@pytest.mark.parametrize("read", ["check", "read_rows", "read_columns"])
def test_a_link_to_a_file_that_shrank_or_is_gone_is_an_error(tmp_path: Path, read: str) -> None:
    array = np.arange(60.0).reshape(10, 6)
    place = a_link(tmp_path, array)
    path = Path(place.path)
    calls: dict[str, Callable[[], Any]] = {
        "check": lambda: linked.check(place),
        "read_rows": lambda: linked.read_rows(place, array.shape, "float64", 0, 10),
        "read_columns": lambda: linked.read_columns(place, array.shape, "float64", 1, 3),
    }
    size = path.stat().st_size
    os.truncate(path, size - 200)
    with pytest.raises(LinkBrokenError, match=rf"m\.safetensors.*shrunk: expected {size} bytes, found {size - 200}\b"):
        calls[read]()
    path.unlink()
    with pytest.raises(LinkBrokenError, match=rf"m\.safetensors.*No such file.*expected {size} bytes"):
        calls[read]()


# ----------------------------------------------------------------------------------------------------- the table


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Source]:
    """Let a test add sources that are gone after it."""
    copy = dict(SOURCES)
    monkeypatch.setattr(sources, "SOURCES", copy)
    return copy


def test_a_function_is_a_source(tmp_path: Path, table: dict[str, Source]) -> None:
    path = tmp_path / "m.csv"
    np.savetxt(path, W, delimiter=",")
    with pytest.raises(UnsupportedSourceError, match=r"m\.csv'; known file names end in \.bin"):
        open_checkpoint(path)
    register(Source("csv", lambda p: {"w": np.loadtxt(p, delimiter=",")}, suffixes=(".csv",)))
    checkpoint = open_checkpoint(path)
    assert checkpoint.source == str(path)
    assert same(values(checkpoint), {"w": W})
    assert list(describe(checkpoint, "m").skip_reason) == [""]


def test_a_source_of_the_user_goes_before_the_built_in_ones(table: dict[str, Source]) -> None:
    made = Checkpoint([Tensor("w", (3, 2), "float64", lambda a, b: W[a:b])], "mine")

    def opens(model: Any, *, scale: int = 1) -> Checkpoint:
        return made if scale == 1 else Checkpoint([], "scaled")

    register(Source("mine", opens, accepts=lambda model: isinstance(model, dict) and "mine" in model))
    assert open_checkpoint({"mine": 1}) is made
    assert open_checkpoint({"mine": 1}, scale=2).source == "scaled"
    assert names(open_checkpoint({"w": W})) == ["w"]
    with pytest.raises(SourceError, match="replace=True"):
        register(Source("mine", opens))
    register(Source("mine", lambda model: 3, accepts=lambda model: model == "x"), replace=True)  # type: ignore[arg-type, return-value]


def test_a_source_must_return_a_checkpoint_or_a_mapping(table: dict[str, Source]) -> None:
    register(Source("odd", lambda model: 3, accepts=lambda model: isinstance(model, set)))  # type: ignore[arg-type, return-value]
    with pytest.raises(SourceError, match="'odd' returned a int"):
        open_checkpoint({1})


PLUGIN = Source("plugin", lambda model: {"w": W}, accepts=lambda model: model is NotImplemented)


def test_sources_come_from_entry_points(table: dict[str, Source], monkeypatch: pytest.MonkeyPatch) -> None:
    def points(group: str) -> list[EntryPoint]:
        assert group == "diffract_dask.sources"
        return [
            EntryPoint("broken", "no_such_module_at_all:x", group),
            EntryPoint("odd", "os:sep", group),
            EntryPoint("plugin", f"{__name__}:PLUGIN", group),
        ]

    monkeypatch.setattr(sources, "entry_points", points)
    sources._load_entry_points.cache_clear()
    try:
        with pytest.warns(UserWarning, match="'broken'.*cannot be loaded|'odd'.*expected a Source") as caught:
            checkpoint = open_checkpoint(NotImplemented)
        assert len(caught) == 2
        assert names(checkpoint) == ["w"]
    finally:
        sources._load_entry_points.cache_clear()


def test_a_checkpoint_is_its_own_source() -> None:
    checkpoint = Checkpoint([], "x")
    assert open_checkpoint(checkpoint) is checkpoint


@pytest.mark.parametrize("model", [3, None, object(), [], [1, 2], {1, 2}])
def test_an_object_that_no_source_takes(model: Any) -> None:
    with pytest.raises(UnsupportedSourceError, match=r"no source takes a (?s:.)*safetensors: "):
        open_checkpoint(model)


def test_a_single_array_has_no_name() -> None:
    with pytest.raises(UnsupportedSourceError, match="give a mapping"):
        open_checkpoint(np.ones((2, 2)))


def test_a_file_that_cannot_be_read(tmp_path: Path, table: dict[str, Source]) -> None:
    def refuse(path: str) -> Checkpoint:
        raise PermissionError(13, "Permission denied", path)

    (tmp_path / "m.locked").touch()
    register(Source("locked", refuse, suffixes=(".locked",)))
    with pytest.raises(SourceError, match=r"m\.locked cannot be read: .*Permission denied"):
        open_checkpoint(tmp_path / "m.locked")


def test_a_missing_path_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"w": W})
    with pytest.raises(SourceError, match=r"does not exist\. Did you mean 'model\.safetensors'"):
        open_checkpoint(tmp_path / "modle.safetensors")
    with pytest.raises(SourceError, match="does not exist"):
        open_checkpoint(tmp_path / "no" / "such" / "folder")


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSourceError, match="no source opens"):
        open_checkpoint(tmp_path)


def test_a_file_whose_name_does_not_tell_is_known_by_its_content(tmp_path: Path) -> None:
    write(tmp_path / "weights", {"w": W})
    np.savez(tmp_path / "m.npz", w=W)
    os.rename(tmp_path / "m.npz", tmp_path / "arrays")
    assert same(values(open_checkpoint(tmp_path / "weights")), {"w": W})
    assert same(values(open_checkpoint(tmp_path / "arrays")), {"w": W})
    for content in (b"", b"hello world, this is text"):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(UnsupportedSourceError, match="known file names"):
            open_checkpoint(tmp_path / "text")


# ----------------------------------------------------------------------------------- PyTorch where there is none


def test_a_torch_model_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    module = type("Module", (), {"__module__": "torch.nn.modules.module"})
    tensor = type("Tensor", (), {"__module__": "torch", "shape": (3, 2), "dtype": "torch.float32"})
    net = type("Net", (module,), {"__module__": "mine"})
    (tmp_path / "m.pt").write_bytes(b"\x80\x02.")
    for model in (net(), {"w": tensor(), "v": W}, tmp_path / "m.pt", str(tmp_path / "m.pt")):
        with pytest.raises(MissingExtraError, match=r"pip install 'diffract_dask\[torch\]'"):
            open_checkpoint(model)
    assert names(open_checkpoint({"w": W})) == ["w"]


class Record:
    def __init__(self, address: str, value: Any, used: list[str], **more: Any) -> None:
        self.address, self.value, self.used_by_ops = address, value, used
        self.__dict__.update(more)


class Trace:
    def __init__(self, params: Any) -> None:
        self.params = params


def test_a_trace_tells_which_parameters_are_used() -> None:
    records = [
        Record("emb.weight", W, ["op1", "op2"], all_addresses=["emb.weight", "head.weight"], module_address="emb"),
        Record("old.weight", W.copy(), []),
        Record("lost.weight", None, ["op3"]),
    ]
    for params in (records, {r.address: r for r in records}):
        table = describe(open_checkpoint(Trace(params)), "m")
        assert list(table.name) == ["emb.weight", "head.weight", "old.weight", "lost.weight"]
        assert table.used.tolist() == [1, 1, 0, 1]
        assert list(table.tied_to) == ["", "emb.weight", "", ""]
        assert list(table.module) == ["emb", "head", "old", "lost"]
        assert list(table.skip_reason) == ["", "", "", "not_numeric"]
    for params in ([], [1], "text", iter(records)):
        with pytest.raises(UnsupportedSourceError, match="no source takes"):
            open_checkpoint(Trace(params))


# -------------------------------------------------------------------------------------------------- real weights


def real(name: str) -> Path:
    path = REAL / name
    if not path.is_file():
        pytest.skip(f"{name} is not there; fetch it with 'make real-weights'")
    return path


def test_real_minilm() -> None:
    table = describe(open_checkpoint(real("minilm/model.safetensors")), "m")
    assert (len(table), int(table.analysed.sum()), int(table.nbytes[table.dtype == "float32"].sum()) // 4) == (
        104,
        40,
        22713216,
    )
    largest = table.row("embeddings.word_embeddings.weight")
    assert (table.shape[largest], table.type[largest]) == ((30522, 384), "embedding")


def test_real_silero_agrees_with_the_reference_implementation() -> None:
    reference = pytest.importorskip("safetensors.numpy")
    path = real("silero/silero_vad_16k.safetensors")
    checkpoint = open_checkpoint(path)
    assert same(values(checkpoint), reference.load_file(path))
    table = describe(checkpoint, "m")
    assert table.type[table.row("lstm_cell.weight_ih")] == "recurrent"
    assert table.type[table.row("conv1.weight")] == "conv"


def test_real_g2p_agrees_with_numpy() -> None:
    path = real("g2p/checkpoint20.npz")
    checkpoint = open_checkpoint(path)
    with np.load(path) as archive:
        assert same(values(checkpoint), dict(archive))
    assert {t.name for t in checkpoint.tensors if t.location} == set(names(checkpoint))
