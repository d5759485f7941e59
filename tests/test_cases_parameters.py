"""Which parameters are analysed, from the checkpoint to the results: inputs on which tools of this kind broke."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from peak import peak_of
from reference import SLICE, svals

from diffract_dask import Session, errors
from diffract_dask.testing import write_safetensors

SCALARS = [name for name in SLICE if name not in ("weights_svals", "esd")]
MiB = 2**20


def gaussian(*shape: int, seed: int = 0, dtype: str = "float32") -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def analysed(model: Any, *fields: str, link: bool = False) -> tuple[Session, Any]:
    """Add `model` to a new session, compute `fields`, and return the session and the results of the model."""
    session = Session()
    session.models.add(model, "m", link=link)
    session.compute.apply(*fields)
    return session, session.results.dataset(*fields).sel(model_id="m")


def reasons(session: Session) -> dict[str, str]:
    """Return the skip reason of every parameter, empty for what is analysed."""
    table = session.models.parameters()
    return dict(zip(table.name, table.skip_reason, strict=True))


@pytest.mark.parametrize("shape", [(64, 32, 5), (64, 3, 7, 7), (8, 4, 3, 3, 3)])
def test_convolutions(shape: tuple[int, ...]) -> None:
    """A convolution's weight, one- to three-dimensional (WeightWatcher 105, 128).

    It is read as output channels × everything else, and its singular values are those of that matrix.
    """
    w = gaussian(*shape)
    session, found = analysed({"conv.weight": w, "fc.weight": gaussian(6, 5)}, "weights_svals", "stable_rank")
    row = session.models.parameters().set_index("name").loc["conv.weight"]
    assert (row["type"], row.skip_reason, row["shape"]) == ("conv", "", shape)
    assert (row.rows, row.cols) == (shape[0], int(np.prod(shape[1:])))
    want = svals(w.reshape(shape[0], -1).astype(np.float64))
    got = found.weights_svals.sel(name="conv.weight").values
    np.testing.assert_allclose(got[: len(want)], want, rtol=0, atol=np.finfo(np.float32).eps * want[-1])
    assert found.weights_svals_size.sel(name="conv.weight") == len(want)


def test_a_model_of_which_nothing_can_be_analysed() -> None:
    """A model that has vectors, scalars, integers and matrices of one row only (WeightWatcher 328).

    Adding and computing both warn, and say why; the table has every parameter with its reason; no value is made up.
    """
    model = {
        "norm.weight": np.ones(8, np.float32),
        "norm.bias": np.zeros(8, np.float32),
        "head.weight": gaussian(1, 8),
        "temperature": np.float32(0.7),
        "position_ids": np.arange(12).reshape(3, 4),
    }
    session = Session()
    with pytest.warns(errors.NothingAnalysedWarning, match="nothing can be analysed: .*vector.*single_row|single_row"):
        session.models.add(model, "m")
    assert reasons(session) == {
        "norm.weight": "vector",
        "norm.bias": "vector",
        "head.weight": "single_row",
        "temperature": "scalar",
        "position_ids": "integer",
    }
    with pytest.warns(errors.NothingAnalysedWarning, match=r"'m'.*2 × vector \(one-dimensional\)"):
        summary = session.compute.apply("stable_rank", "param_norm")
    assert (summary.computed, summary.failed) == ({}, ())
    results = session.results.dataset("stable_rank", "param_norm")
    assert results.sizes == {"model_id": 1, "name": 5}
    assert np.isnan(results.stable_rank).all()
    assert np.isnan(results.param_norm).all()
    assert (session.results.status("stable_rank").state == "skipped").all()
    assert session.results.export_metrics("stable_rank", export_format="list") == []
    lazy = session.compute.lazy("stable_rank", "weights_svals", "param_norm").compute()
    assert lazy.sizes["model_id"] == 0


def test_a_filter_that_leaves_nothing_says_so() -> None:
    """A selection without any parameter in it: the warning speaks of the selection, not of the model."""
    session = Session()
    session.models.add({"fc.weight": gaussian(4, 3), "fc.bias": gaussian(4)}, "m")
    for part, match in (
        (session.filter(param_names="nothing.*"), "'m': no parameter in scope"),
        (session.filter(model_ids="other"), "no model in scope"),
        (session.filter(param_names="fc.bias"), r"'m': nothing can be analysed: 1 × vector \(one-dimensional\)\."),
    ):
        with pytest.warns(errors.NothingAnalysedWarning, match=match):
            part.compute.apply("stable_rank")
        assert part.compute.lazy("stable_rank", "param_norm").sizes["model_id"] == 0


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    """Return a file with an embedding of the size of GPT-2's, and its stable rank and mean."""
    w = np.random.default_rng(0).standard_normal((50257, 768), dtype=np.float32)
    gram = sum(part.T @ part for part in (w[i : i + 8192].astype(np.float64) for i in range(0, len(w), 8192)))
    path = write_safetensors(tmp_path_factory.mktemp("embedding") / "m.safetensors", {"wte.weight": w})
    return path, np.trace(gram) / np.linalg.eigvalsh(gram)[-1], w.mean(dtype=np.float64)


@pytest.mark.parametrize("link", [True, False])
def test_a_large_embedding_is_analysed_in_bounded_memory(
    tmp_path: Path, embedding: tuple[Path, float, float], link: bool
) -> None:
    """The word embedding of GPT-2, 50257 × 768, 147 MiB (WeightWatcher 15, 29, 72, 223), in a budget of 100 MiB.

    It is analysed, not dropped for its size, in less memory than it takes itself, whether linked or copied.
    """
    path, stable_rank, mean = embedding
    before = """
import numpy as np
dask.config.set({"diffract_dask.memory-budget": "100 MiB"})
session = Session(sys.argv[1])
session.models.add({"w.weight": np.eye(900, 800, dtype=np.float32)}, "warm")
session.compute.apply("stable_rank", "weights_mean")
"""
    measured = (
        f'session.models.add(sys.argv[2], "m", link={link})\nsession.compute.apply("stable_rank", "weights_mean")'
    )
    store = tmp_path / "s.zarr"
    peak, _ = peak_of(before, measured, store, path)
    assert peak < 124 * MiB < path.stat().st_size
    session = Session(store)
    assert session.compute.plan("stable_rank", "weights_mean").nothing_to_do
    found = session.results.dataset("stable_rank", "weights_mean").sel(model_id="m", name="wte.weight")
    np.testing.assert_allclose(found.stable_rank, stable_rank, rtol=1e-10)
    np.testing.assert_allclose(found.weights_mean, mean, rtol=1e-9)


def test_a_torch_model_where_torch_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module, a tensor and a file of PyTorch in an environment without it (WeightWatcher 317).

    Each is refused at the call, naming the extra to install; nothing is added; arrays work without any framework.
    """
    monkeypatch.setitem(sys.modules, "torch", None)
    module = type("Module", (), {"__module__": "torch.nn.modules.module"})
    tensor = type("Tensor", (), {"__module__": "torch", "shape": (3, 2), "dtype": "torch.float32"})
    (tmp_path / "m.pt").write_bytes(b"PK\3\4")
    session = Session()
    for model in (type("Net", (module,), {})(), {"w": tensor()}, tmp_path / "m.pt", str(tmp_path / "m.pt")):
        with pytest.raises(errors.MissingExtraError, match=r"pip install 'diffract_dask\[torch\]'"):
            session.models.add(model, "m")
    assert session.models.list() == []
    session.models.add({"w": gaussian(4, 3)}, "m")
    assert session.compute.apply("stable_rank").computed["stable_rank"] == 1


def test_recurrent_attention_and_bare_parameters() -> None:
    """An LSTM's ``weight_ih_l0``, fused and separate projections of attention, a parameter without a module
    (WeightWatcher 145, 303).

    All are analysed under their full names, which need not end in ``.weight``.
    """
    torch = pytest.importorskip("torch")
    nn = torch.nn
    torch.manual_seed(0)

    class Net(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 4, num_layers=2, bidirectional=True, proj_size=3)
            self.attn = nn.MultiheadAttention(8, 2)
            self.cross = nn.MultiheadAttention(8, 2, kdim=5, vdim=6)
            self.bare = nn.Parameter(torch.randn(5, 3))
            self.listed = nn.ParameterList([nn.Parameter(torch.randn(3, 4))])

    net = Net()
    state = {name: value.detach().numpy() for name, value in net.state_dict().items()}
    for model in (net, net.state_dict(), state):
        session, found = analysed(model, "frob_norm", "stable_rank")
        missed = {name for name, reason in reasons(session).items() if reason}
        assert missed == {name for name, value in state.items() if value.ndim < 2}
        for name in set(state) - missed:
            np.testing.assert_allclose(found.frob_norm.sel(name=name), np.linalg.norm(state[name].astype(float)))
        types = session.models.parameters().set_index("name").type
        assert types["lstm.weight_ih_l0"] == types["lstm.weight_hr_l1_reverse"] == "recurrent"
        assert types["attn.in_proj_weight"] == types["cross.k_proj_weight"] == types["bare"] == "dense"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_orientation_does_not_matter(dtype: str) -> None:
    """The same layer stored as (out, in) and as (in, out), as the Conv1D of transformers does (bergson 254).

    Every scalar field is the same for both.
    """
    w = gaussian(40, 12, dtype=dtype)
    model = {"linear.weight": w, "c_attn.weight": w.T.copy()}
    session, found = analysed(model, *SCALARS)
    unit = np.finfo(dtype).eps
    for name in SCALARS:
        one, other = found[name].sel(name="linear.weight"), found[name].sel(name="c_attn.weight")
        np.testing.assert_allclose(other, one, rtol=100 * unit, atol=1e-12, err_msg=name)
    assert session.models.parameters().set_index("name").rows.to_dict() == {"linear.weight": 40, "c_attn.weight": 12}


def codes(*shape: int, dtype: str = "uint8") -> NDArray[Any]:
    return np.random.default_rng(1).integers(0, 120, shape).astype(dtype)


FOUR_BIT = {
    "NF4": {
        "weight": codes(64, 1),
        "weight.absmax": gaussian(2),
        "weight.quant_map": gaussian(16),
        "weight.quant_state.bitsandbytes__nf4": codes(90),
    },
    "FP4, not flattened, nested scales": {
        "weight": codes(16, 8),
        "weight.absmax": codes(4, 4),
        "weight.nested_absmax": gaussian(4, 2),
        "weight.nested_quant_map": gaussian(16, 16),
        "weight.quant_state.bitsandbytes__fp4": codes(90),
    },
    "GPTQ": {
        "qweight": codes(4, 16, dtype="int32"),
        "qzeros": codes(2, 4, dtype="int32"),
        "scales": gaussian(2, 16, dtype="float16"),
        "g_idx": np.arange(16, dtype=np.int32),
    },
    "HQQ": {"W_q": codes(16, 8), "scale": gaussian(16, 2), "zero": gaussian(16, 2)},
}
EIGHT_BIT = {
    "scale per row": {"weight": codes(16, 8, dtype="int8"), "weight_scale": gaussian(16, 1)},
    "scale per group": {"weight": codes(16, 8, dtype="int8"), "weight_scale": gaussian(16, 4)},
    "scale and zero point": {
        "weight_quantized": codes(16, 8, dtype="int8"),
        "weight_scale": gaussian(16, 4),
        "weight_zero_point": codes(16, 4, dtype="int8"),
    },
    "LLM.int8": {"weight": codes(16, 8, dtype="int8"), "SCB": gaussian(16)},
    "names with underscores": {"weight._data": codes(16, 8, dtype="int8"), "weight._scale": gaussian(16, 4)},
    "underscores within": {"_weight_qdata": codes(16, 8, dtype="int8"), "_weight_scale": gaussian(16, 4)},
    "slashes": {"kernel": codes(16, 8, dtype="int8"), "kernel/scale": gaussian(16, 4)},
    "no common name": {"codes": codes(16, 8, dtype="int8"), "scale": gaussian(16, 4)},
}
FLOAT8 = {
    "scales per block": {"weight": gaussian(16, 8), "weight_scale_inv": gaussian(2, 2)},
    "scale of a tensor": {"weight": gaussian(16, 8), "scale_weight": np.full((1,), 2.0, np.float32)},
}


def check_quantised(path: Path, layer: dict[str, NDArray[Any]], dtype: dict[str, str] | None = None) -> None:
    model = {f"model.layers.0.fc.{name}": array for name, array in layer.items()}
    stored = {f"model.layers.0.fc.{name}": kind for name, kind in (dtype or {}).items()}
    good = {"model.layers.0.norm.scale": gaussian(8, 4), "model.layers.1.fc.weight": gaussian(8, 6)}
    write_safetensors(path, model | good, dtype=stored)
    for source in (path,) if stored else (path, model | good):
        session, found = analysed(source, "frob_norm", "param_norm")
        assert reasons(session) == dict.fromkeys(model, "quantised") | dict.fromkeys(good, "")
        assert np.isnan(found.frob_norm.sel(name=list(model))).all()
        want = sum((array.astype(float) ** 2).sum() for array in good.values())
        np.testing.assert_allclose(found.param_norm, want, rtol=1e-12)


@pytest.mark.parametrize("kind", FOUR_BIT)
def test_packed_four_bit_weights(tmp_path: Path, kind: str) -> None:
    """Four-bit codes packed into bytes, (n · m / 2, 1), beside their ``quant_state`` (laserRMT 9, bitsandbytes 765),
    and the other layouts in use.

    Codes, scales and zero points have the reason ``quantised``; none of them is taken for a matrix of weights, and
    sums over the model are without them.
    """
    check_quantised(tmp_path / "m.safetensors", FOUR_BIT[kind])


@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_int8_codes_with_scales(tmp_path: Path, kind: str) -> None:
    """Int8 codes beside scales: neither the codes nor two-dimensional scales are analysed, whatever they are called."""
    check_quantised(tmp_path / "m.safetensors", EIGHT_BIT[kind])


@pytest.mark.parametrize("kind", FLOAT8)
def test_float8_codes_with_scales(tmp_path: Path, kind: str) -> None:
    """Float8 weights that mean something only times a scale beside them are codes, too."""
    check_quantised(tmp_path / "m.safetensors", FLOAT8[kind], {"weight": "float8_e4m3fn"})


def test_an_index_beside_a_parameter_called_scale_is_no_code() -> None:
    """A matrix named ``scale`` beside an int64 table of positions is a parameter, and analysed."""
    session, _ = analysed({"attn.scale": gaussian(16, 4), "attn.index": np.arange(16).reshape(4, 4)}, "frob_norm")
    assert reasons(session) == {"attn.scale": "", "attn.index": "integer"}


def test_quantised_tensors_of_torch() -> None:
    """A tensor that PyTorch itself quantised, and a four-bit parameter: ``quantised``, and the rest is analysed."""
    torch = pytest.importorskip("torch")
    weight = torch.randn(6, 4)
    packed = torch.nn.Parameter(torch.zeros(12, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = object()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this way of quantising is deprecated
        quantised = torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
    session, found = analysed({"a": quantised, "b": packed, "c": weight}, "frob_norm")
    assert reasons(session) == {"a": "quantised", "b": "quantised", "c": ""}
    np.testing.assert_allclose(found.frob_norm.sel(name="c"), np.linalg.norm(weight.double().numpy()))


def test_one_row_empty_scalar_and_text() -> None:
    """A matrix of one row, one without entries, numbers and texts among weights: each has a row with its reason."""
    model = {
        "row": gaussian(1, 7),
        "column": gaussian(7, 1),
        "empty": np.zeros((0, 5), np.float32),
        "hollow": np.zeros((4, 0, 3), np.float32),
        "scalar": np.float32(3),
        "number": 3,
        "text": "hello",
        "texts": np.array([["a", "b"], ["c", "d"]]),
        "nothing": None,
        "objects": np.array([[1, None], [2, 3]], object),
        "complex": gaussian(3, 3) + 1j,
        "flags": np.eye(3, dtype=bool),
        "w": gaussian(4, 3),
    }
    session, found = analysed(model, "stable_rank", "param_norm")
    assert reasons(session) == {
        "row": "single_row",
        "column": "single_row",
        "empty": "empty",
        "hollow": "empty",
        "scalar": "scalar",
        "number": "scalar",
        "text": "not_numeric",
        "texts": "not_numeric",
        "nothing": "not_numeric",
        "objects": "not_numeric",
        "complex": "complex",
        "flags": "integer",
        "w": "",
    }
    assert list(found.name[found.stable_rank.notnull()].values) == ["w"]
    np.testing.assert_allclose(found.param_norm, (model["w"].astype(float) ** 2).sum(), rtol=1e-12)
    status = session.results.status("stable_rank").sel(model_id="m", field="stable_rank")
    assert status.state.sel(name="text") == "skipped"
    assert status.reason.sel(name="hollow") == "empty"


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("form", ["dict", "pt"])
def test_wrappers_and_optimizer_state(tmp_path: Path, key: str, form: str) -> None:
    """A training checkpoint: weights under a key, the optimizer's moments, of the same shapes, beside them
    (WeightWatcher 259, 179).

    The wrapper is opened, names are those of the weights, and no moment is taken for a weight.
    """
    weights: dict[str, Any] = {"fc.weight": gaussian(5, 4), "fc.bias": gaussian(5)}
    moments: dict[str, Any] = {"exp_avg": gaussian(5, 4, seed=1), "exp_avg_sq": gaussian(5, 4, seed=2)}
    content: Any = {"epoch": 3, key: weights, "optimizer": {"state": {0: moments}, "param_groups": [{"lr": 0.1}]}}
    if form == "pt":
        torch = pytest.importorskip("torch")
        content[key] = {name: torch.from_numpy(array) for name, array in weights.items()}
        content["optimizer"]["state"][0] = {name: torch.from_numpy(array) for name, array in moments.items()}
        torch.save(content, tmp_path / "m.pt")
        content = tmp_path / "m.pt"
    session, found = analysed(content, "frob_norm", "param_norm")
    assert reasons(session) == {"fc.weight": "", "fc.bias": "vector"}
    np.testing.assert_allclose(found.param_norm, (weights["fc.weight"].astype(float) ** 2).sum(), rtol=1e-12)
    attrs = session.models.attrs("m")
    assert (attrs["wrapper"], attrs["left_out"], attrs["checkpoint"]) == (key, ["optimizer"], {"epoch": 3})


def test_flat_optimizer_state(tmp_path: Path) -> None:
    """Moments in one flat file with the weights, as sharded training writes them: rows with the reason
    ``optimizer``."""
    model = {
        "model.fc.weight": gaussian(5, 4),
        "optimizer.state.fc.weight.exp_avg": gaussian(5, 4, seed=1),
        "opt_state/0/mu/fc/kernel": gaussian(5, 4, seed=2),
        "fc.weight.momentum_buffer": gaussian(5, 4, seed=3),
    }
    session, found = analysed(write_safetensors(tmp_path / "m.safetensors", model), "param_norm")
    assert reasons(session) == dict.fromkeys(model, "optimizer") | {"model.fc.weight": ""}
    np.testing.assert_allclose(found.param_norm, (model["model.fc.weight"].astype(float) ** 2).sum(), rtol=1e-12)


@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RMSprop", "Rprop", "SGD"])
def test_the_file_of_an_optimizer_alone(tmp_path: Path, name: str) -> None:
    """What ``optimizer.pt`` beside a model holds, given as if it were the model.

    Whatever the optimizer calls its state, nothing of it is analysed, and a warning says so.
    """
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(4, 3)
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1, **options)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    session = Session()
    with pytest.warns(errors.NothingAnalysedWarning, match="optimizer"):
        session.models.add(tmp_path / "optimizer.pt", "m")
    matrices = session.models.parameters().query("rows > 0")
    assert set(matrices.skip_reason) == {"optimizer"}
    both = {"state_dict": layer.state_dict(), **optimizer.state_dict()}
    session, _ = analysed(both, "frob_norm")
    assert reasons(session) == {"weight": "", "bias": "vector"}


def test_the_folder_of_a_trainer(tmp_path: Path) -> None:
    """A checkpoint folder with the weights, the optimizer, its schedule, random states and the arguments of a script.

    The weights are read and nothing else is opened, let alone taken for weights.
    """
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save(layer.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 3, "base_lrs": torch.ones(3, 3)}, tmp_path / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "rng_state_0.pth")
    torch.save(argparse.Namespace(lr=0.1), tmp_path / "training_args.bin")
    for unreadable in ("optimizer.bin", "random_states_0.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (tmp_path / unreadable).write_bytes(b"not a checkpoint")
    session, _ = analysed(tmp_path, "frob_norm")
    assert reasons(session) == {"weight": "", "bias": "vector"}


def test_real_checkpoint_with_moments(real_weights: Any) -> None:
    """CHGNet 0.3.0 as published, with its Adam moments: 136 parameters, 49 matrices, 412,525 entries."""
    pytest.importorskip("torch")
    session, found = analysed(real_weights("chgnet/chgnet_0.3.0_e29f68s314m37.pth.tar"), "stable_rank")
    table = session.models.parameters()
    assert (len(table), (table.skip_reason == "").sum()) == (136, 49)
    assert sum(int(np.prod(shape)) for shape in table["shape"]) == 412_525
    assert not (table.skip_reason == "optimizer").any()
    assert found.stable_rank.notnull().sum() == 49


@pytest.mark.parametrize("form", ["file", "linked file", "dict", "module", "pt"])
def test_tied_embedding_and_head(tmp_path: Path, form: str) -> None:
    """An embedding that is the output layer, too (safetensors 202, mergekit 385), shared in memory or saved twice.

    It is computed once, both names have its values, ``tied_to`` says so, and sums over the model count it once.
    """
    w, fc = gaussian(20, 6), gaussian(6, 6, seed=1)
    arrays: Any = {"emb.weight": w, "fc.weight": fc, "head.weight": w}
    model: Any = arrays
    if form.endswith("file"):
        model = write_safetensors(tmp_path / "m.safetensors", arrays)
    elif form != "dict":
        torch = pytest.importorskip("torch")
        nn = torch.nn
        model = nn.ModuleDict({"emb": nn.Embedding(20, 6), "fc": nn.Linear(6, 6, bias=False)})
        model["head"] = nn.Linear(6, 20, bias=False)
        model["head"].weight = model["emb"].weight
        with torch.no_grad():
            model["emb"].weight.copy_(torch.from_numpy(w))
            model["fc"].weight.copy_(torch.from_numpy(fc))
        if form == "pt":
            torch.save(model.state_dict(), tmp_path / "m.pt")
            model = tmp_path / "m.pt"
    session = Session()
    session.models.add(model, "m", link=form == "linked file")
    summary = session.compute.apply("stable_rank", "param_norm", "log_prod_frob_norm")
    # What is only linked is known to be the same when it has been read.
    assert summary.kernel_slices["singular_values"] == 3 if form == "linked file" else 2
    assert session.models.parameters().set_index("name").tied_to.to_dict() == {
        "emb.weight": "",
        "fc.weight": "",
        "head.weight": "emb.weight",
    }
    found = session.results.dataset("stable_rank", "param_norm", "log_prod_frob_norm").sel(model_id="m")
    assert found.stable_rank.sel(name="emb.weight") == found.stable_rank.sel(name="head.weight")
    norms = [np.linalg.norm(array.astype(float)) for array in (w, fc)]
    np.testing.assert_allclose(found.param_norm, np.square(norms).sum(), rtol=1e-12)
    np.testing.assert_allclose(found.log_prod_frob_norm, np.log10(norms).sum(), rtol=1e-12)
    assert session.compute.plan("stable_rank", "param_norm").nothing_to_do
    lazy = session.compute.lazy("param_norm").compute().param_norm.sel(model_id="m")
    np.testing.assert_allclose(lazy, found.param_norm)


def test_parametrised_weights() -> None:
    """Layers under ``weight_norm``, ``spectral_norm`` and ``orthogonal``: analysed by their parts, with their names."""
    torch = pytest.importorskip("torch")
    make = torch.nn.utils.parametrizations
    layers = {
        name: getattr(make, name)(torch.nn.Linear(6, 5)) for name in ("weight_norm", "spectral_norm", "orthogonal")
    }
    session, found = analysed(torch.nn.ModuleDict(layers), "frob_norm")
    part = "weight_norm.parametrizations.weight.original1"
    skipped = reasons(session)
    assert skipped[part] == ""
    assert skipped["weight_norm.parametrizations.weight.original0"] == "single_row"
    want = layers["weight_norm"].parametrizations.weight.original1.detach().double().numpy()
    np.testing.assert_allclose(found.frob_norm.sel(name=part), np.linalg.norm(want), rtol=1e-12)
    for name in ("spectral_norm", "orthogonal"):
        assert any(key.startswith(name) and not reason for key, reason in skipped.items())


def test_names_have_no_meaning_of_their_own() -> None:
    """Layers with ``-`` in their names, called ``dense``, or with characters that mean something in patterns.

    Selections go by glob or regular expression on the full name; an exact name means that parameter alone.
    """
    names = ["dense", "dense.weight", "my-dense-1.weight", "my-dense-10.weight", "h[0].w", "a*b", "re:x", "x"]
    session = Session()
    session.models.add({name: gaussian(4, 3, seed=i) for i, name in enumerate(names)}, "m")
    for pattern, expected in {
        "dense": ["dense"],
        "dense*": ["dense", "dense.weight"],
        "*-*": ["my-dense-1.weight", "my-dense-10.weight"],
        "my-dense-1.weight": ["my-dense-1.weight"],
        "-": [],
        "h[0].w": ["h[0].w"],
        "a*b": ["a*b"],
        "re:x": ["re:x"],
        r"re:.*dense-\d+\.weight": ["my-dense-1.weight", "my-dense-10.weight"],
        "re:.*": names,
    }.items():
        part = session.filter(param_names=pattern)
        assert part.models.parameters().name.tolist() == expected, pattern
        if expected:
            part.compute.apply("frob_norm")
            assert part.results.dataset("frob_norm").name.values.tolist() == expected
    found = session.results.dataset("frob_norm").frob_norm.sel(model_id="m")
    for i, name in enumerate(names):
        np.testing.assert_allclose(found.sel(name=name), np.linalg.norm(gaussian(4, 3, seed=i).astype(float)))
