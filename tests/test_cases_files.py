"""Reading files, from the checkpoint to the results: files on which tools of this kind broke."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from peak import peak_of
from reference import svals

from diffract_dask import Session, errors
from diffract_dask.testing import write_safetensors

MiB = 2**20
EPS32 = float(np.finfo(np.float32).eps)
ENTRIES = ("weights_min", "weights_max", "weights_mean", "weights_std", "zero_fraction", "frob_norm")


def gaussian(*shape: int, seed: int = 0, dtype: str = "float32") -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def layers(n: int = 12) -> dict[str, NDArray[Any]]:
    """Return a model whose names sort differently by number and by letter."""
    model = {f"h.{i}.fc.weight": gaussian(6 + i, 5, seed=i) for i in range(n)}
    return model | {"h.0.fc.bias": gaussian(6), "wte.weight": gaussian(9, 4, dtype="float16"), "steps": np.array([3])}


def save(path: Path, model: Mapping[str, NDArray[Any]]) -> Path:
    """Write `model` in the format that the path's suffix says."""
    if path.suffix == ".safetensors":
        return write_safetensors(path, model)
    if path.suffix == ".npz":
        np.savez(path, **model)  # type: ignore[arg-type]
        return path
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(array) for name, array in model.items()}
    torch.save(state, path, _use_new_zipfile_serialization=path.suffix != ".bin")
    return path


FORMATS = ["m.safetensors", "m.npz", "m.pt", "m.bin"]


def refused(path: Any, match: str, kind: type[Exception] = errors.CorruptFileError, **options: Any) -> None:
    """Check that adding `path` is an error before anything is added or computed."""
    session = Session()
    with pytest.raises(kind, match=match):
        session.models.add(path, "m", **options)
    assert session.models.list() == []


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("link", [True, False])
def test_bfloat16_and_float8_are_decoded_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, link: bool
) -> None:
    """bfloat16 and the two float8 types in safetensors (safetensors 598), subnormal numbers and zeros of both signs
    among them, where neither torch nor ml_dtypes is installed.

    Entries are exactly those that were written, and singular values those of the same numbers in float64.
    """
    dtype = np.dtype(getattr(ml_dtypes, name))
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    w = gaussian(31, 17).astype(dtype)
    w[:3, 0] = [tiny, -tiny, -0.0]
    w[3:5, 0] = [ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min]
    one = np.full((2, 2), tiny).astype(dtype)
    path = write_safetensors(tmp_path / "m.safetensors", {"w": w, "tiny": one}, dtype={"w": name, "tiny": name})
    assert path.read_bytes().endswith(w.tobytes() + one.tobytes())
    for module in ("torch", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, module, None)
    session = Session()
    session.models.add(path, "m", link=link)
    session.compute.apply(*ENTRIES, "weights_svals")
    assert set(session.models.parameters().dtype) == {name}
    found = session.results.dataset(*ENTRIES, "weights_svals").sel(model_id="m")
    for key, array in {"w": w.astype(np.float64), "tiny": one.astype(np.float64)}.items():
        row = found.sel(name=key)
        assert (row.weights_min, row.weights_max) == (array.min(), array.max())
        assert row.zero_fraction == np.mean(array == 0)
        np.testing.assert_allclose(row.weights_mean, array.mean(), rtol=1e-13, atol=1e-15 * np.abs(array).max())
        np.testing.assert_allclose(row.frob_norm, np.linalg.norm(array), rtol=1e-14)
        want = svals(array)
        np.testing.assert_allclose(row.weights_svals[: len(want)], want, rtol=0, atol=EPS32 * want[-1])


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_widened_before_the_decomposition(name: str) -> None:
    """float16 and bfloat16 matrices, for which LAPACK has no routine (mergekit 304, peft 1052); entries up to the
    largest float16, whose squares leave its range.

    Singular values and vectors are those of the same numbers in float64.
    """
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    w = (gaussian(20, 9) * (65504 / 4 if name == "float16" else 1e30)).astype(dtype)
    session = Session()
    session.models.add({"w": w}, "m")
    summary = session.compute.apply("weights_svals", "weights_lsvs", "weights_rsvs")
    assert summary.failed == ()
    row = session.results.dataset("weights_svals", "weights_lsvs", "weights_rsvs").sel(model_id="m", name="w")
    wide = w.astype(np.float64)
    want = svals(wide)
    np.testing.assert_allclose(row.weights_svals, want, rtol=0, atol=EPS32 * want[-1])
    made = (row.weights_lsvs.values * want) @ row.weights_rsvs.values.T
    np.testing.assert_allclose(made, wide, rtol=0, atol=1e-12 * want[-1])


def shard(
    folder: Path, model: Mapping[str, NDArray[Any]], n: int, form: str = "safetensors", index: bool = False
) -> Path:
    """Write every n-th parameter to each of `n` files."""
    folder.mkdir()
    stem = "pytorch_model" if form == "bin" else "model"
    weight_map = {}
    for i in range(n):
        name = f"{stem}-{i + 1:05d}-of-{n:05d}.{form}"
        part = dict(list(model.items())[i::n])
        save(folder / name, part)
        weight_map.update(dict.fromkeys(part, name))
    if index:
        (folder / f"{stem}.{form}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def many_shards(folder: Path, n: int, tensors: int, shape: tuple[int, int]) -> Path:
    folder.mkdir()
    for i in range(n):
        rng = np.random.default_rng(i)
        part = {f"h.{i}.{j}.weight": rng.standard_normal(shape, dtype=np.float32) for j in range(tensors)}
        write_safetensors(folder / f"model-{i + 1:05d}-of-{n:05d}.safetensors", part)
    return folder


def shard_peaks(tmp_path: Path, counts: Iterable[int], tensors: int, shape: tuple[int, int], link: bool) -> list[int]:
    """Return the peak of adding and analysing each of `counts` shards in a budget of 16 MiB."""
    before = """
import numpy as np
dask.config.set({"diffract_dask.memory-budget": "16 MiB"})
session = Session(sys.argv[1])
session.models.add({f"w.{i}": np.eye(300, 400, k=i, dtype="f4") for i in range(40)}, "warm")
session.compute.apply("stable_rank", "weights_mean")
"""
    measured = f"""
session.models.add(sys.argv[2], "m", link={link})
print(session.compute.apply("stable_rank", "weights_mean"))
"""
    peaks = []
    for n in counts:
        folder = many_shards(tmp_path / f"shards-{n}", n, tensors, shape)
        peak, printed = peak_of(before, measured, tmp_path / f"store-{n}.zarr", folder)
        assert f"{2 * n * tensors} values computed" in printed
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize("link", [True, False])
def test_memory_is_flat_in_the_number_of_shards(tmp_path: Path, link: bool) -> None:
    """3 and 12 shards of 24 tensors each (safetensors 437, WeightWatcher 266), 18 and 72 MiB, in a budget of 16 MiB.

    Adding and analysing four times as many takes no more memory.
    """
    few, many = shard_peaks(tmp_path, (3, 12), 24, (256, 256), link)
    assert many < few + 12 * MiB
    assert many < 48 * MiB


@pytest.mark.slow
@pytest.mark.parametrize("link", [True, False])
def test_memory_is_flat_in_the_number_of_many_shards(tmp_path: Path, link: bool) -> None:
    """The same with 10 and 40 shards of 100 tensors each, 381 MiB and 1.5 GiB.

    1.1 GiB of weights more take 40 MiB more at most: the rows and the results of 3000 tensors more.
    """
    few, many = shard_peaks(tmp_path, (10, 40), 100, (4000, 25), link)
    assert many < few + 40 * MiB


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("index", [False, True])
def test_sharded_files_are_as_the_single_file(tmp_path: Path, form: str, index: bool) -> None:
    """A checkpoint in five files, with an index and without one (safetensors 268).

    Names and results are those of the single file; in safetensors their order, too, by number.
    """
    model, fields = layers(), ("stable_rank", "weights_svals", "param_norm")
    session = Session()
    session.models.add(save(tmp_path / f"single.{form}", model), "single")
    folder = shard(tmp_path / "sharded", model, 5, form, index)
    with pytest.warns(errors.DuplicateContentWarning, match="same content as 'single'"):
        session.models.add(folder, "folder")
    with pytest.warns(errors.DuplicateContentWarning):
        session.models.add(sorted(folder.glob(f"*.{form}"), reverse=True), "files")
    if form == "safetensors":
        for name in ("single", "folder", "files"):
            assert session.models.parameters(name).name.tolist() == [
                *(
                    f"h.{i}.{leaf}"
                    for i in range(12)
                    for leaf in (("fc.bias", "fc.weight") if i == 0 else ("fc.weight",))
                ),
                "steps",
                "wte.weight",
            ]
    columns = ["name", "shape", "dtype", "skip_reason", "digest", "type"]
    tables = [
        session.models.parameters(name)[columns].sort_values("name", ignore_index=True)
        for name in ("single", "folder", "files")
    ]
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])
    summary = session.compute.apply(*fields)
    assert summary.kernel_slices["singular_values"] == 13
    found = session.results.dataset(*fields)
    for name in ("folder", "files"):
        for field in fields:
            np.testing.assert_array_equal(found[field].sel(model_id=name), found[field].sel(model_id="single"))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("missing", ["tensor", "shard", "numbered shard"])
def test_an_index_that_lists_what_is_not_there(tmp_path: Path, no_compute: Any, form: str, missing: str) -> None:
    """An index that lists a tensor that its shard does not hold, or a shard that is gone (mergekit 556); or a number
    missing among shards without an index.

    An error before any computing, which names the shard and the key.
    """
    folder = shard(tmp_path / "sharded", layers(), 3, form, index=missing != "numbered shard")
    stem = "pytorch_model" if form == "bin" else "model"
    gone = f"{stem}-00002-of-00003.{form}"
    if missing == "tensor":
        path = folder / f"{stem}.{form}.index.json"
        content = json.loads(path.read_text())
        content["weight_map"]["h.99.fc.weight"] = gone
        path.write_text(json.dumps(content))
        refused(folder, rf"index .*'h\.99\.fc\.weight' in the shard '{gone}'")
        refused(path, rf"index .*'h\.99\.fc\.weight' in the shard '{gone}'")
    elif missing == "shard":
        (folder / gone).unlink()
        refused(folder, rf"index .* names the shard '{gone}', which is not there; it should hold 'h\.1\.fc\.weight'")
    else:
        (folder / gone).unlink()
        refused(folder, f"the shard '{gone}' is missing.*expected 3 files, found 2")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("link", [True, False])
def test_files_that_are_cut_in_half(tmp_path: Path, name: str, link: bool) -> None:
    """A file of which only the first half, or all but the last byte, arrived (airllm 137).

    Refused with the size that it has and, as far as what arrived can tell, the size that was expected.
    """
    path = save(tmp_path / name, layers())
    whole = path.read_bytes()
    for size in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        expected = str(len(whole))
        if path.suffix in (".npz", ".pt"):
            expected = "the directory at its end"
        elif path.suffix == ".bin":
            expected = rf"(at least \d+ bytes|more than {size} bytes)"
        refused(path, rf"{name}'.*cut off.*expected {expected}.*\b{size}\b", link=link)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("extra", [b"\0", b"x" * 9, b"PK\5\6" + bytes(18), bytes(100_000)], ids=len)
def test_files_with_bytes_appended(tmp_path: Path, name: str, extra: bytes) -> None:
    """A file with bytes after its end, as after a download that was resumed wrongly (ComfyUI 15602).

    Refused with the expected and the actual size.
    """
    path = save(tmp_path / name, layers())
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(extra)
    if path.suffix in (".npz", ".pt") and len(extra) > 65_535:
        refused(path, rf"expected the directory at its end, found {size + len(extra)} bytes without one")
    elif path.suffix in (".npz", ".pt") and extra.startswith(b"PK"):  # an empty zip file of its own
        refused(path, rf"\({size + len(extra)} bytes\) has bytes appended.*covers only what follows byte {size}$")
    else:
        refused(path, rf"has bytes appended: expected {size} bytes.*found {size + len(extra)}\b")


@pytest.mark.parametrize("link", [True, False])
def test_safetensors_with_metadata_only(tmp_path: Path, link: bool) -> None:
    """A safetensors file that holds metadata and no tensor (safetensors 466).

    A model with an empty table; adding it and computing warn, and nothing fails.
    """
    path = write_safetensors(tmp_path / "m.safetensors", {}, {"format": "pt", "note": "nothing"})
    session = Session()
    with pytest.warns(errors.NothingAnalysedWarning, match="'m' has no parameters"):
        session.models.add(path, "m", link=link)
    table = session.models.parameters()
    assert len(table) == 0
    assert {"name", "shape", "dtype", "skip_reason"} <= set(table.columns)
    assert session.models.attrs("m")["checkpoint"] == {"format": "pt", "note": "nothing"}
    with pytest.warns(errors.NothingAnalysedWarning, match="'m' has no parameters"):
        assert session.compute.apply("stable_rank", "param_norm").computed == {}
    assert session.results.dataset("stable_rank", "weights_svals").sizes["name"] == 0
    assert session.results.status("stable_rank").sizes["name"] == 0
    assert session.compute.lazy("stable_rank", "param_norm").sizes["name"] == 0
    assert session.results.export_metrics("stable_rank", export_format="list") == []


@pytest.mark.parametrize("length", [100_000, 100_001, 1_000_000])
def test_a_header_of_exactly_100_000_bytes(tmp_path: Path, length: int) -> None:
    """A header as long as the first request of a reader that guesses (huggingface_hub 4602), and longer.

    It is read by its length prefix: every tensor is there, with its values.
    """
    model = layers()
    raw = write_safetensors(tmp_path / "m.safetensors", model).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    path = tmp_path / "long.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + raw[8:start].ljust(length) + raw[start:])
    session = Session()
    session.models.add(path, "m", link=True)
    session.compute.apply("frob_norm")
    found = session.results.dataset("frob_norm").frob_norm.sel(model_id="m")
    assert set(found["name"].values) == set(model)
    for name, array in model.items():
        if array.ndim == 2:
            np.testing.assert_allclose(found.sel(name=name), np.linalg.norm(array.astype(float)), rtol=1e-13)


class Exploding:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("what", ["hostile", "harmless", "module", "plain pickle"])
def test_a_pickle_with_custom_globals(tmp_path: Path, zipped: bool, what: str) -> None:
    """Files of PyTorch that hold more than tensors: an object that runs code, the arguments of a script, a module.

    Refused with a message that names the global and says what to do; nothing in the file is executed.
    """
    torch = pytest.importorskip("torch")
    mark, path = tmp_path / "executed", tmp_path / "m.pt"
    weights = {"fc.weight": torch.ones(3, 2)}
    content: Any = {"state_dict": weights, "args": Exploding(mark)}
    if what == "harmless":
        content["args"] = argparse.Namespace(lr=0.1)
    elif what == "module":
        content = torch.nn.Linear(3, 2)
    if what == "plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
    named = {"harmless": r"argparse\.Namespace", "module": r"torch\.nn\.modules\.linear\.Linear"}.get(what, r".*")
    refused(path, rf"m\.pt' holds (the global '{named}|an instr).*nothing in it was executed", errors.UnsafePickleError)
    assert not mark.exists()


def test_objects_in_npz_are_not_unpickled(tmp_path: Path) -> None:
    """An ``.npz`` file with an array of objects that run code: a row with a reason; the matrix beside it counts."""
    mark = tmp_path / "executed"
    np.savez(tmp_path / "m.npz", hostile=np.array([[Exploding(mark)] * 2] * 2, dtype=object), w=gaussian(4, 3))
    session = Session()
    session.models.add(tmp_path / "m.npz", "m")
    session.compute.apply("frob_norm")
    assert session.models.parameters().set_index("name").skip_reason.to_dict() == {"hostile": "not_numeric", "w": ""}
    found = session.results.dataset("frob_norm").frob_norm.sel(model_id="m", name="w")
    np.testing.assert_allclose(found, np.linalg.norm(gaussian(4, 3).astype(float)), rtol=1e-14)
    assert not mark.exists()
