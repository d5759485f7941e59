"""Weights in the store: every type, any chunking, slices and links to files."""

from __future__ import annotations

import os
import pickle
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from stored import KINDS, add, arrays, cells, scalar

from diffract_dask import catalog
from diffract_dask.errors import (
    LinkBrokenError,
    StoreError,
    UnsupportedSourceError,
)
from diffract_dask.sources import dtypes, open_checkpoint
from diffract_dask.store import Commit, Store, weights
from diffract_dask.testing import write_safetensors

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128",
]  # fmt: skip


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store.open(KINDS[request.param](tmp_path))


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s.zarr")


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4, 3, 2, 2), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept_exactly_and_read_by_plain_zarr(local: Store, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    numpy_type = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    with np.errstate(all="ignore"):
        one, two = (
            (rng.standard_normal(shape) * 3).astype(numpy_type),
            (rng.standard_normal(shape) * 3).astype(numpy_type),
        )
    table = add(local, tensors={"a": one, "b": two})
    if 0 in shape:
        assert table.stack.tolist() == ["", ""]
        return
    kept = zarr.open_array(f"{local.location}/models/m/weights/{table.stack[0]}/weights", mode="r")
    for name, given in (("a", one), ("b", two)):
        found = kept[int(table.index[table.row(name)])]
        wanted = given.astype(np.float32) if dtype.startswith(("bf", "float8")) else given
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted, equal_nan=wanted.dtype.kind in "fc")
    names = zarr.open_array(f"{local.location}/models/m/weights/{table.stack[0]}/name", mode="r")
    assert names[:].tolist() == ["a", "b"][: kept.shape[0]]


def test_equal_tensors_are_kept_once(local: Store) -> None:
    w = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    shared = add(local, "shared", {"emb.weight": w, "x.weight": w + 1, "head.weight": w})
    copied = add(local, "copied", {"emb.weight": w, "x.weight": w + 1, "head.weight": w.copy()})
    for model_id, table in (("shared", shared), ("copied", copied)):
        kept = zarr.open_array(f"{local.location}/models/{model_id}/weights/50x8-float32/weights", mode="r")
        assert kept.shape == (2, 50, 8)
        assert np.array_equal(local.slices(model_id, [0, 1, 2]).load(), [w, w + 1, w])
        assert table.digest[0] == table.digest[2]
    assert shared.tied_to.tolist() == ["", "", "emb.weight"]
    assert local.view().canonical[0].tolist() == [0, 1, 0]


# ------------------------------------------------------------------------------------------------- large weights

LIMITS = {"_CHUNK_BYTES": 300, "_WHOLE_BYTES": 600, "_PART_BYTES": 200, "_PANEL_BYTES": 500}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in LIMITS.items():
        monkeypatch.setattr(weights, name, limit)


SHAPES = [
    (2, 2),
    (6, 4),
    (10, 15),
    (33, 7),
    (7, 33),
    (5, 3, 7),
    (31, 2, 3, 2),
    (8, 9, 3),
    (160, 2),
    (2, 160),
    (300,),
    (2, 2, 50),
]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_chunking_gives_the_same_slices(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(1)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    given = {f"w{i}": rng.standard_normal(shape).astype(kind) for i in range(5)}
    given["same"] = given["w1"].copy()
    for location in (tmp_path / "s.zarr", None):
        store = Store.open(location)
        table = add(store, tensors=given)
        assert (table.digest != "").all()
        wanted = catalog.digest(lambda i, j: given["w3"][i:j].view(dtypes.carrier(dtype)), shape, dtype)
        assert table.digest[3] == wanted
        if location is not None:
            kept = zarr.open_array(f"{location}/models/m/weights/{table.stack[0]}/weights", mode="r")
            assert kept.shape[0] == 5
            assert np.array_equal(kept[3], given["w3"].astype(store.slice_dtype(dtype)))
        if len(shape) < 2:
            continue
        expected = np.stack([a.reshape(shape[0], -1).astype(store.slice_dtype(dtype)) for a in given.values()])
        slices = store.slices("m", np.array([4, 0, 1, 2, 5]))
        assert np.array_equal(slices.load(), expected[[4, 0, 1, 2, 5]])
        one = store.slices("m", [2])
        long, tall = max(expected.shape[1:]), expected.shape[1] >= expected.shape[2]
        across = expected[2] if tall else expected[2].T
        for start, stop, nbytes in (
            (0, long, 64),
            (0, long, 10**6),
            (1, long - 1, 48),
            (long // 2, long, 1),
            (1, 1, 9),
        ):
            blocks = list(one.blocks(start, stop, nbytes))
            step = max(1, nbytes // (across.shape[1] * one.dtype.itemsize))
            assert [len(b) for b in blocks] == [min(step, stop - i) for i in range(start, stop, step)]
            assert np.array_equal(np.concatenate([across[:0], *blocks]), across[start:stop])
        edges = one.span_edges(3)
        assert edges[0] == 0
        assert edges[-1] == long
        assert sorted(set(edges)) == edges


def test_small_parameters_share_a_chunk(local: Store) -> None:
    add(local, tensors={f"w{i}": np.random.default_rng(i).standard_normal((16, 16)) for i in range(300)})
    folder = Path(str(local.location), "models/m/weights/16x16-float64/weights")
    assert len([p for p in folder.rglob("*") if p.is_file()]) == 2


def test_chunks_waste_little() -> None:
    for n in (1, 2, 7, 11, 25, 100, 333):
        for rows in (10, 384, 1000, 1500, 3000):
            spec = weights.stack_spec((rows, rows), "float32", n)
            stored = np.prod(spec.grid) * np.prod(spec.chunks)
            assert stored * 4 <= np.prod(spec.shape) * 4 + spec.grid[0] * rows * rows * 4
            assert np.prod(spec.chunks) * 4 <= 64 * 2**20
    tall = weights.stack_spec((60000, 4096), "float32", 1)
    wide = weights.stack_spec((4096, 60000), "bfloat16", 1)
    assert tall.chunks[2] == 4096
    assert wide.chunks[1] == 4096
    for spec in (tall, wide):
        assert 8 * 2**20 < np.prod(spec.chunks) * 4 <= 17 * 2**20
        assert np.prod(spec.grid) * np.prod(spec.chunks) <= 1.02 * np.prod(spec.shape)


# ------------------------------------------------------------------------------------------------------- slices


def test_slices_of_different_shapes_are_refused(local: Store) -> None:
    add(local, tensors={"a": np.eye(3), "b": np.eye(4), "c": np.eye(3, dtype=np.float32)})
    for pair in ([0, 1], [0, 2]):
        with pytest.raises(StoreError, match="of one shape and type"):
            local.slices("m", pair)


def test_one_reading_of_several_stacks(local: Store) -> None:
    rng = np.random.default_rng(0)
    given = {"a": rng.random((4, 6)), "b": rng.random((4, 3, 2)), "c": rng.random((4, 6)), "d": rng.random((4, 2, 3))}
    add(local, tensors=given)
    found = local.slices("m", [1, 0, 3, 2]).load()
    assert np.array_equal(found, [given[k].reshape(4, 6) for k in "badc"])


def test_slices_travel_unless_in_memory(local: Store) -> None:
    add(local)
    assert np.array_equal(
        pickle.loads(pickle.dumps(local.slices("m", [0, 1]))).load(), local.slices("m", [0, 1]).load()
    )
    again = pickle.loads(pickle.dumps(local))
    assert again.read_only
    assert again.model_ids() == ["m"]
    memory = Store.open()
    add(memory)
    slices = memory.slices("m", [0, 1])
    with pytest.raises(StoreError, match="inline"):
        pickle.dumps(slices)
    with pytest.raises(StoreError, match="cannot be sent"):
        pickle.dumps(memory)
    sent = pickle.loads(pickle.dumps(slices.inline()))
    assert np.array_equal(sent.load(), slices.load())
    assert sent.load_with_digests()[1] == list(slices.digests)
    one = pickle.loads(pickle.dumps(memory.slices("m", [1]).inline()))
    assert np.array_equal(np.concatenate(list(one.blocks(1, 5, 20))), slices.load()[1][1:5])


def test_a_lost_chunk_is_an_error_and_no_number(local: Store) -> None:
    add(local)
    slices = local.slices("m", [0])
    next(Path(str(local.location), "models/m/weights/6x4-float32/weights").rglob("c/0/0/0")).unlink()
    with pytest.raises(StoreError, match="damaged or was removed"):
        slices.load()


# ----------------------------------------------------------------------------------------------------- linked


@pytest.fixture
def linked(local: Store, tmp_path: Path) -> tuple[Store, Path]:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, arrays())
    table = add(local, "m", path, link=True)
    assert (table.stack == "").all()
    assert (table.digest == "").all()
    return local, path


def test_linked_and_copied_agree(linked: tuple[Store, Path]) -> None:
    store, path = linked
    add(store, "copied", path)
    assert not Path(str(store.location), "models/m/weights").exists()
    ours, theirs = store.slices("m", [0, 1, 2]), store.slices("copied", [0, 1, 2])
    assert ours.linked
    assert not theirs.linked
    values, digests = ours.load_with_digests()
    assert np.array_equal(values, theirs.load())
    assert digests == list(theirs.digests)
    assert pickle.loads(pickle.dumps(ours)).load_with_digests()[1] == digests
    for i in range(3):
        one = store.slices("m", [i])
        assert one.digest() == digests[i]
        pieces = one.digest_pieces(0, 6)
        blocks = list(one.blocks(0, 6, 20, pieces))
        assert np.array_equal(np.concatenate(blocks), values[i])
        assert one.combine(pieces.hashes()) == digests[i]
    assert store.view().digest[0, :3].tolist() == [0, 0, 0]
    store.commit([Commit("m", digests=(np.array([2, 0]), [digests[2], digests[0]]))])
    store.refresh_view()
    known = catalog.digest_keys(digests).tolist()
    assert store.view().digest[0, :3].tolist() == [known[0], 0, known[2]]


def test_spans_of_a_linked_slice_give_its_digest(local: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffract_dask.digests.PIECE_BYTES", 100)
    w = np.random.default_rng(0).standard_normal((101, 5)).astype(np.float32)
    write_safetensors(tmp_path / "w.safetensors", {"w": w, "wide": np.ascontiguousarray(w.T)})
    add(local, "m", tmp_path / "w.safetensors", link=True)
    wanted = catalog.digest(lambda i, j: w[i:j], w.shape, "float32")
    tall = local.slices("m", [0])
    for spans in (1, 2, 7, 1000):
        edges = tall.span_edges(spans)
        hashes: list[bytes] = []
        for start, stop in pairwise(edges):
            pieces = tall.digest_pieces(start, stop)
            assert np.array_equal(np.concatenate(list(tall.blocks(start, stop, 60, pieces))), w[start:stop])
            hashes += pieces.hashes()
        assert tall.combine(hashes) == wanted
    wide = local.slices("m", [1])
    assert np.array_equal(np.concatenate(list(wide.blocks(0, 101, 60))), w)
    assert wide.digest() == catalog.digest(lambda i, j: w.T[i:j], (5, 101), "float32")


def test_the_same_file_linked_twice_is_told(linked: tuple[Store, Path]) -> None:
    store, path = linked
    assert store.add_model("again", open_checkpoint(path), link=True).same_as == ["m"]


def test_ties_show_when_digests_come(local: Store, tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    write_safetensors(tmp_path / "t.safetensors", {"emb.weight": w, "head.weight": w})
    add(local, "m", tmp_path / "t.safetensors", link=True)
    assert local.parameters("m").tied_to.tolist() == ["", ""]
    _, digests = local.slices("m", [0, 1]).load_with_digests()
    local.commit([Commit("m", digests=(np.array([0, 1]), digests))])
    assert local.parameters("m").tied_to.tolist() == ["", "emb.weight"]
    assert local.view().canonical.tolist() == [[0, 0]]


def test_a_changed_file_is_hashed_again(linked: tuple[Store, Path]) -> None:
    store, path = linked
    digests = store.slices("m", [0, 1, 2]).load_with_digests()[1]
    store.commit([Commit("m", digests=(np.arange(3), digests))])
    assert (store.view().digest[0, :3] != 0).all()
    planned = store.slices("m", [0])
    write_safetensors(path, arrays(9))
    os.utime(path, ns=(1, 10**18))
    with pytest.raises(LinkBrokenError, match="changed after"):
        planned.load()
    with pytest.raises(LinkBrokenError, match="changed after"):
        list(planned.blocks(0, 6, 10))
    assert (store.view().digest[0, :3] == 0).all()
    assert (store.parameters("m").digest == "").all()
    values, new = store.slices("m", [0, 1, 2]).load_with_digests()
    assert np.array_equal(values[0], arrays(9)["h.0.weight"])
    assert not set(new) & set(digests)


def test_a_touched_file_with_the_old_content_gets_the_old_digests(linked: tuple[Store, Path]) -> None:
    store, path = linked
    digests = store.slices("m", [0, 1]).load_with_digests()[1]
    os.utime(path, ns=(1, 10**18))
    store.view()
    assert store.slices("m", [0, 1]).load_with_digests()[1] == digests


@pytest.mark.parametrize("damage", ["gone", "shrunk", "other layout"])
def test_a_broken_link_is_an_error_at_reading_only(linked: tuple[Store, Path], damage: str) -> None:
    store, path = linked
    store.commit([scalar(store, "m")])
    store.refresh_view()
    if damage == "gone":
        path.unlink()
    elif damage == "shrunk":
        path.write_bytes(path.read_bytes()[:-120])
    else:
        write_safetensors(path, {"x": np.eye(9), **arrays(9)})
    assert cells(store, "m")[0][:3] == [1.0, 2.0, 3.0]
    slices = store.slices("m", [0])
    for read in (slices.load, slices.load_with_digests, slices.digest, lambda: list(slices.blocks(0, 6, 8))):
        with pytest.raises(LinkBrokenError, match=r"m\.safetensors"):
            read()


def test_what_lies_in_no_file_cannot_be_linked(store: Store) -> None:
    with pytest.raises(UnsupportedSourceError, match="link"):
        add(store, link=True)
    assert store.model_ids() == []


def test_npz_is_linked(local: Store, tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **{k: v for k, v in arrays().items() if v.ndim == 2})
    add(local, "m", tmp_path / "w.npz", link=True)
    assert np.array_equal(local.slices("m", [1]).load()[0], arrays()["h.1.weight"])
