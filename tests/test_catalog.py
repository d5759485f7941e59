"""The catalog: types, skip reasons, overrides, ties, digests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diffract_dask import catalog, digests
from diffract_dask.catalog import (
    PARAMETER_TYPES,
    SKIP_MEANING,
    Checkpoint,
    Digester,
    Location,
    Parameters,
    SkipReason,
    Tensor,
    classify,
    describe,
    digest,
    tie,
    uid,
)
from diffract_dask.errors import InvalidIdentifierError, ParameterNotFoundError, SessionError, SourceError
from diffract_dask.sources import open_checkpoint


def rows_of(array: NDArray[Any]) -> Callable[[int, int], NDArray[Any]]:
    return lambda start, stop: array[start:stop] if array.ndim else array


def nothing(start: int, stop: int) -> NDArray[Any]:
    raise AssertionError("describing a checkpoint reads nothing")


def a_tensor(name: str, *shape: int, dtype: str = "float32", **more: Any) -> Tensor:
    return Tensor(name, shape, dtype, nothing, **more)


def table(*tensors: Tensor, **overrides: Any) -> Parameters:
    return describe(Checkpoint(list(tensors), "a test"), "m", overrides)


# --------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("h.0.attn.c_attn.weight", (768, 2304), "dense"),
        ("self_attn.in_proj_weight", (96, 32), "dense"),
        ("my-layer", (8, 4), "dense"),
        ("dense", (8, 4), "dense"),
        ("lm_head.weight", (100, 8), "dense"),
        ("features.embeddings.linear.weight", (16, 66), "dense"),
        ("fc_w", (74, 256), "dense"),
        ("lin.parametrizations.weight.original1", (8, 4), "dense"),
        ("conv1.weight", (64, 32, 5), "conv"),
        ("0.weight", (64, 32, 5), "conv"),
        ("features.0.weight", (64, 3, 7, 7), "conv"),
        ("patch_embedding.weight", (768, 3, 16, 16), "conv"),
        ("video.weight", (8, 3, 2, 4, 4), "conv"),
        ("conv.long.weight", (4, 4, 64), "other"),
        ("long_conv.weight", (4, 4, 64), "conv"),
        ("experts.gate_up_proj", (8, 512, 1024), "other"),
        ("experts.down", (8, 16, 16), "other"),
        ("wte.weight", (50257, 768), "embedding"),
        ("model.embed_tokens.weight", (100, 8), "embedding"),
        ("embeddings.word_embeddings.weight", (100, 8), "embedding"),
        ("pos_embed", (1, 197, 768), "embedding"),
        ("enc_emb", (29, 256), "embedding"),
        ("block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 8), "embedding"),
        ("h.0.ln_1.weight", (768,), "norm"),
        ("layer1.0.bn2.running_var", (64,), "norm"),
        ("encoder.LayerNorm.gamma", (64,), "norm"),
        ("1.weight", (64,), "norm"),
        ("spatial.norm.weight", (64, 32), "norm"),
        ("prelu1.weight", (32,), "other"),
        ("rbf.frequencies", (32,), "other"),
        ("logit_scale", (), "other"),
        ("h.0.ln_1.bias", (768,), "bias"),
        ("fc.bias", (10,), "bias"),
        ("lstm.bias_ih_l0", (32,), "bias"),
        ("enc_b_ih", (768,), "bias"),
        ("fc_b", (768,), "bias"),
        ("attn.bias", (1, 1, 16, 16), "bias"),
        ("swin.relative_position_bias_table", (49, 3), "embedding"),
        ("lstm.weight_ih_l0", (32, 8), "recurrent"),
        ("rnn_stack.weight_hh_l1_reverse", (32, 8), "recurrent"),
        ("enc_w_hh", (768, 256), "recurrent"),
        ("lstm_cell.weight", (32, 8), "recurrent"),
        ("gru/recurrent_kernel", (8, 24), "recurrent"),
    ],
)
def test_type_follows_from_name_and_shape(name: str, shape: tuple[int, ...], expected: str) -> None:
    assert expected in PARAMETER_TYPES
    assert classify(a_tensor(name, *shape)) == expected


def test_type_of_the_framework_wins_but_a_bias_is_a_bias() -> None:
    assert classify(a_tensor("features.0.weight", 8, 4, kind="embedding")) == "embedding"
    assert classify(a_tensor("features.0.bias", 8, kind="dense")) == "bias"
    assert classify(a_tensor("embeddings.position_ids", 1, 512, dtype="int64")) == "other"
    assert classify(a_tensor("layer.weight", 8, 4, dtype="int8")) == "dense"


def test_type_does_not_depend_on_case() -> None:
    assert classify(a_tensor("Encoder.LayerNorm.Weight", 8)) == "norm"
    assert classify(a_tensor("LSTM.Weight_ih_l0", 8, 4)) == "recurrent"


# --------------------------------------------------------------------------------------------------- skip reasons


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (a_tensor("w", 3, 2), ""),
        (a_tensor("w", 2, 1, 3, 3), ""),
        (a_tensor("w", 50257, 768), ""),
        (a_tensor("w", 3, 2, dtype="float16"), ""),
        (a_tensor("w", 3, 2, dtype="bfloat16"), ""),
        (a_tensor("w", 3, 2, dtype="float8_e4m3fn"), ""),
        (a_tensor("w"), SkipReason.SCALAR),
        (a_tensor("w", 5), SkipReason.VECTOR),
        (a_tensor("w", 1, 7), SkipReason.SINGLE_ROW),
        (a_tensor("w", 7, 1), SkipReason.SINGLE_ROW),
        (a_tensor("w", 7, 1, 1), SkipReason.SINGLE_ROW),
        (a_tensor("w", 1, 16, 8), SkipReason.SINGLE_ROW),
        (a_tensor("w", 0, 5), SkipReason.EMPTY),
        (a_tensor("w", 5, 0), SkipReason.EMPTY),
        (a_tensor("w", 0), SkipReason.EMPTY),
        (a_tensor("w", 3, 2, dtype="int64"), SkipReason.INTEGER),
        (a_tensor("w", 3, 2, dtype="bool"), SkipReason.INTEGER),
        (a_tensor("w", dtype="int64"), SkipReason.SCALAR),
        (a_tensor("w", 3, 2, dtype="complex64"), SkipReason.COMPLEX),
        (a_tensor("w", 3, 2, dtype="string"), SkipReason.NOT_NUMERIC),
        (a_tensor("w", dtype="object"), SkipReason.NOT_NUMERIC),
        (a_tensor("w", 3, 2, dtype="float4_e2m1fn"), SkipReason.QUANTISED),
        (a_tensor("w", 3, 2, skip="no_data"), SkipReason.NO_DATA),
        (a_tensor("w", 3, 2, skip="reason of a source of mine"), "reason of a source of mine"),
        (a_tensor("optimizer.state.0.step", 3, 2), SkipReason.OPTIMIZER),
        (a_tensor("state.layer.weight.exp_avg", 3, 2), SkipReason.OPTIMIZER),
        (a_tensor("optimizer", 3, 2), ""),
    ],
    ids=lambda given: f"{given.shape}-{given.dtype}" if isinstance(given, Tensor) else str(given),
)
def test_skip_reason(tensor: Tensor, expected: str) -> None:
    assert list(table(tensor).skip_reason) == [expected]


def test_every_reason_has_a_sentence() -> None:
    assert set(SKIP_MEANING) == set(SkipReason)
    assert all(len(sentence) > 8 for sentence in SKIP_MEANING.values())


QUANTISED = SkipReason.QUANTISED


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        pytest.param(
            [
                a_tensor("l.weight", 512, 1, dtype="uint8"),
                a_tensor("l.weight.absmax", 16),
                a_tensor("l.weight.quant_map", 16),
                a_tensor("l.weight.quant_state.bitsandbytes__nf4", 90, dtype="uint8"),
                a_tensor("l.bias", 32),
            ],
            [QUANTISED, QUANTISED, QUANTISED, QUANTISED, "vector"],
            id="bitsandbytes 4 bit",
        ),
        pytest.param(
            [a_tensor("l.weight", 32, 32, dtype="uint8"), a_tensor("l.weight.quant_state.bitsandbytes__fp4", 90)],
            [QUANTISED, QUANTISED],
            id="quant_state alone",
        ),
        pytest.param(
            [a_tensor("l.weight", 32, 32, dtype="int8"), a_tensor("l.SCB", 32), a_tensor("k.weight", 8, 4)],
            [QUANTISED, QUANTISED, ""],
            id="bitsandbytes 8 bit",
        ),
        pytest.param(
            [
                a_tensor("l.qweight", 64, 32, dtype="int32"),
                a_tensor("l.qzeros", 4, 4, dtype="int32"),
                a_tensor("l.scales", 4, 32, dtype="float16"),
                a_tensor("l.g_idx", 64, dtype="int32"),
            ],
            [QUANTISED] * 4,
            id="GPTQ, AWQ",
        ),
        pytest.param(
            [a_tensor("w", 8, 4, dtype="int8"), a_tensor("w_scale", 8, 2)], [QUANTISED, QUANTISED], id="plain names"
        ),
        pytest.param(
            [a_tensor("a.codes", 8, 4, dtype="int8"), a_tensor("a.scale", 8, 2)],
            [QUANTISED, QUANTISED],
            id="scale in the module",
        ),
        pytest.param(
            [
                a_tensor("l.weight", 256, 256, dtype="float8_e4m3fn"),
                a_tensor("l.weight_scale_inv", 2, 2),
                a_tensor("k.weight", 256, 256, dtype="float8_e4m3fn"),
            ],
            [QUANTISED, QUANTISED, ""],
            id="float8 with block scales",
        ),
        pytest.param(
            [a_tensor("l.weight_packed", 8, 4, dtype="int32"), a_tensor("l.weight_scale", 8, 2)],
            [QUANTISED, QUANTISED],
            id="compressed-tensors",
        ),
        pytest.param(
            [
                a_tensor("norm.scale", 8, 2),
                a_tensor("norm.calls", dtype="int64"),
                a_tensor("attn.weight", 8, 8),
                a_tensor("attn.weight_scale", 8, 2),
                a_tensor("index", 8, 8, dtype="int64"),
            ],
            ["", "scalar", "", "", "integer"],
            id="scales of no codes, indices of no scales",
        ),
    ],
)
def test_codes_of_quantised_weights_are_never_analysed(tensors: list[Tensor], expected: list[str]) -> None:
    assert list(table(*tensors).skip_reason) == expected


# ----------------------------------------------------------------------------------------------------- the table


def test_every_parameter_gets_a_row_with_its_reading() -> None:
    parameters = table(a_tensor("b", 5), a_tensor("conv.weight", 64, 32, 5, used=True), a_tensor("s"))
    assert list(parameters.name) == ["b", "conv.weight", "s"]
    assert list(parameters.shape) == [(5,), (64, 32, 5), ()]
    assert parameters.rows.tolist() == [0, 64, 0]
    assert parameters.cols.tolist() == [0, 160, 0]
    assert parameters.nbytes.tolist() == [20, 4 * 64 * 160, 4]
    assert parameters.used.tolist() == [-1, 1, -1]
    assert list(parameters.module) == ["", "conv", ""]
    assert parameters.analysed.tolist() == [False, True, False]
    assert parameters.analysed.dtype == bool
    assert list(parameters.digest) == list(parameters.tied_to) == list(parameters.stack) == [""] * 3
    assert parameters.index.tolist() == [-1] * 3
    assert len(parameters) == 3


def test_an_empty_checkpoint_is_an_empty_table() -> None:
    parameters = table()
    assert len(parameters) == 0
    assert parameters.analysed.shape == parameters.canonical.shape == (0,)
    tie(parameters)
    assert len(parameters.select(parameters.analysed)) == 0


def test_tuples_of_equal_length_stay_tuples() -> None:
    assert list(table(a_tensor("a", 3, 2), a_tensor("b", 5, 4)).shape) == [(3, 2), (5, 4)]


def test_row_select_and_location() -> None:
    place = Location("/data/m.safetensors", 108, 24, 132, 7, "0+100:ab")
    parameters = table(a_tensor("a", 3, 2, location=place), a_tensor("layer.b", 4))
    assert parameters.row("layer.b") == 1
    assert parameters.location(0) == place
    assert parameters.location(1) is None
    chosen = parameters.select(np.array([False, True]))
    assert list(chosen.name) == ["layer.b"]
    assert chosen.row("layer.b") == 0
    with pytest.raises(ParameterNotFoundError, match=r"'layer\.c'.*Did you mean 'layer\.b'"):
        parameters.row("layer.c")


def test_uid_is_stable_and_tells_models_and_names_apart() -> None:
    assert uid("m", "w") == uid("m", "w") == "45e3e412392bcec5"
    assert len({uid("a", "bc"), uid("ab", "c"), uid("a", "b"), uid("b", "a")}) == 4
    assert list(table(a_tensor("w", 2, 2)).uid) == [uid("m", "w")]


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b"])
def test_names_are_printable_text(name: str) -> None:
    with pytest.raises(InvalidIdentifierError, match="non-empty printable"):
        table(a_tensor(name, 2, 2))


def test_any_printable_name_will_do() -> None:
    names = ["a-b.weight", "dense", "ünï cödé", "a/b:c", "*", "re:x", "..", "x" * 500]
    assert list(table(*(a_tensor(name, 2, 2) for name in names)).name) == names


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(SourceError, match="two parameters are named 'w'"):
        table(a_tensor("w", 2, 2), a_tensor("w", 3, 3))


# ----------------------------------------------------------------------------------------------------- overrides


def test_overrides_set_type_attributes_and_skip() -> None:
    parameters = describe(
        Checkpoint([a_tensor("a", 3, 2), a_tensor("b", 3, 2), a_tensor("c", 3, 2)], "test"),
        "m",
        {"a": {"type": "embedding", "head": 3}, "b": {"skip": True}, "c": {"skip": "frozen"}},
    )
    assert list(parameters.type) == ["embedding", "dense", "dense"]
    assert list(parameters.skip_reason) == ["", "user", "user"]
    assert list(parameters.attrs) == [{"head": 3}, {}, {"skip": "frozen"}]


def test_overrides_can_analyse_what_the_rules_leave_out() -> None:
    tensors = [a_tensor("l.weight", 4, 4, dtype="float8_e5m2"), a_tensor("l.scale", 4, 4), a_tensor("optim.w", 3, 3)]
    allowed = {name: {"skip": False} for name in ("l.weight", "optim.w")}
    parameters = describe(Checkpoint(tensors, "test"), "m", allowed)
    assert list(parameters.skip_reason) == ["", "quantised", ""]


@pytest.mark.parametrize(
    "tensor",
    [a_tensor("w", 5), a_tensor("w", 3, 2, dtype="int8"), a_tensor("w", 1, 5)],
    ids=["vector", "integers", "one row"],
)
def test_overrides_cannot_analyse_what_is_no_matrix(tensor: Tensor) -> None:
    with pytest.raises(SessionError, match="'w' cannot be analysed, it is"):
        table(tensor, w={"skip": False})


def test_overrides_of_unknown_names_and_types_are_errors() -> None:
    with pytest.raises(ParameterNotFoundError, match=r"'layer\.wieght'.*Did you mean 'layer\.weight'"):
        describe(Checkpoint([a_tensor("layer.weight", 3, 2)], "test"), "m", {"layer.wieght": {"skip": True}})
    with pytest.raises(SessionError, match=r"'embeding'.*Did you mean 'embedding'"):
        table(a_tensor("w", 3, 2), w={"type": "embeding"})


# ---------------------------------------------------------------------------------------------------------- ties


def with_digests(arrays: dict[str, NDArray[Any]]) -> Parameters:
    """Return the table as for a file: content known, sharing of memory not."""
    tensors = [Tensor(name, a.shape, a.dtype.name, rows_of(a)) for name, a in arrays.items()]
    parameters = table(*tensors)
    parameters.digest[:] = [digest(t.read, t.shape, t.dtype) for t in tensors]
    tie(parameters)
    return parameters


def test_shared_memory_ties() -> None:
    w = np.arange(6.0).reshape(3, 2)
    checkpoint = open_checkpoint({"head.weight": w, "emb.weight": w, "copy.weight": w.copy(), "part.weight": w[:2]})
    parameters = describe(checkpoint, "m")
    parameters.digest[:] = [digest(t.read, t.shape, t.dtype) for t in checkpoint.tensors]
    tie(parameters)
    assert list(parameters.tied_to) == ["", "head.weight", "", ""]
    assert parameters.canonical.tolist() == [0, 0, 2, 3]


def test_equal_content_of_files_ties_embedding_and_head() -> None:
    w = np.arange(6.0).reshape(3, 2)
    parameters = with_digests({"emb.weight": w, "bias": w[0], "head.weight": w.copy(), "out.weight": w.copy()})
    assert list(parameters.tied_to) == ["", "", "emb.weight", "emb.weight"]
    assert parameters.canonical.tolist() == [0, 1, 0, 0]
    before = parameters.tied_to.copy()
    tie(parameters)
    assert list(parameters.tied_to) == list(before)


@pytest.mark.parametrize(
    "arrays",
    [
        pytest.param({"a.lora_B": np.zeros((3, 2)), "b.lora_A": np.zeros((3, 2))}, id="zeros"),
        pytest.param({"a.gate": np.full((30, 200), 0.02), "b.proj": np.full((30, 200), 0.02)}, id="constant"),
        pytest.param({"a.bias": np.arange(3.0), "b.gamma": np.arange(3.0)}, id="vectors"),
        pytest.param({"a.ids": np.arange(6).reshape(2, 3), "b.pos": np.arange(6).reshape(2, 3)}, id="integers"),
        pytest.param({"a.w": np.arange(6.0).reshape(2, 3), "b.v": np.arange(6.0).reshape(3, 2)}, id="other shape"),
        pytest.param({"a.w": np.arange(6.0).reshape(2, 3), "b.v": np.arange(6, dtype="f4").reshape(2, 3)}, id="type"),
        pytest.param({"layers.0.w": np.arange(6.0).reshape(2, 3), "layers.1.w": np.arange(6.0).reshape(2, 3)}, id="nr"),
    ],
)
def test_what_is_equal_by_chance_is_not_tied(arrays: dict[str, NDArray[Any]]) -> None:
    assert not any(with_digests(arrays).tied_to)


def test_a_tie_whose_first_is_not_selected_stands_for_itself() -> None:
    w = np.arange(6.0).reshape(3, 2)
    parameters = with_digests({"a": w, "b": w})
    assert parameters.select(np.array([1])).canonical.tolist() == [0]


# ------------------------------------------------------------------------------------------------------- digests


def reference_digest(array: NDArray[Any], dtype: str, piece_bytes: int) -> str:
    """The definition, written down once more."""
    rows, rest = (array.shape[0], math.prod(array.shape[1:])) if array.ndim > 1 else (0, 0)
    first = array.reshape(len(array) if array.ndim else 1, -1) if array.size else array
    step = max(1, piece_bytes // first[0].nbytes) if array.size else 1
    hashed, constant = b"", True
    for i in range(0, len(first) if array.size else 0, step):
        piece = first[i : i + step].ravel()
        same = bool((piece == piece[0]).all())
        value = xxhash.xxh3_128_intdigest(piece.tobytes())
        hashed += ((value & ~1) | same).to_bytes(16, "big")
        constant &= same
    value = xxhash.xxh3_128_intdigest(hashed + f"{array.shape} {dtype} {rows}x{rest}".encode())
    return f"{(value & ~1) | constant:032x}"


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


kinds = st.sampled_from(["counting", "constant", "two constant parts"])


@given(shapes, st.sampled_from(["float64", "float32", "float16", "int8", "complex128"]), kinds, st.data())
def test_digest_is_as_defined_and_the_same_however_the_rows_arrive(
    shape: tuple[int, ...], dtype: str, kind: str, data: st.DataObject
) -> None:
    n = math.prod(shape)
    made = {"counting": np.arange(n), "constant": np.full(n, 3), "two constant parts": np.arange(n) >= n // 2}
    array = made[kind].reshape(shape).astype(dtype)
    piece = data.draw(st.sampled_from([1, 16, 100, 16 * 2**20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "PIECE_BYTES", piece)
        expected = reference_digest(array, dtype, piece)
        assert digest(rows_of(array), shape, dtype) == expected
        whole, flat = Digester(shape, dtype), array.ravel()
        for part in np.split(flat, sorted(data.draw(st.lists(st.integers(0, flat.size), max_size=5)))):
            whole.update(part)
        assert whole.hexdigest() == expected


@pytest.mark.parametrize("entries", ["random", "all zero", "zero but for the last"])
def test_digest_of_large_arrays_in_pieces_of_whole_rows(entries: str) -> None:
    array = np.zeros((5000, 1000), np.float32)
    if entries == "random":
        array[:] = np.random.default_rng(0).standard_normal(array.shape)
    elif entries != "all zero":
        array[-1, -1] = 1
    expected = reference_digest(array, "float32", 16 * 2**20)
    assert catalog.piece_rows(array.shape, "float32") == 4194
    hashes = [catalog.hash_piece(array[:4194]), catalog.hash_piece(array[4194:])]
    assert catalog.combine_digests(hashes, array.shape, "float32") == expected
    assert digest(rows_of(array), array.shape, "float32") == expected


def test_digest_of_constant_parts_is_not_that_of_a_constant() -> None:
    array = np.repeat([[1.0, 1.0], [2.0, 2.0]], 3, axis=0)
    whole = Digester(array.shape, "float64")
    for part in (array[:3], array[3:]):
        whole.update(part)
    assert whole.hexdigest() == reference_digest(array, "float64", 2**24)


@given(st.integers(0, 199), st.integers(0, 7))
def test_digest_changes_with_every_bit(entry: int, bit: int) -> None:
    array = np.arange(200, dtype=np.uint8).reshape(20, 10)
    other = array.copy()
    other.flat[entry] ^= 1 << bit
    assert digest(rows_of(array), array.shape, "uint8") != digest(rows_of(other), other.shape, "uint8")


def test_digest_tells_shape_and_type() -> None:
    array = np.arange(24, dtype=np.uint16)
    readings = [(24,), (4, 6), (6, 4), (4, 2, 3), (2, 2, 6)]
    found = {digest(rows_of(array.reshape(s)), s, d) for s in readings for d in ("uint16", "float16", "bfloat16")}
    assert len(found) == 15
    assert all(len(x) == 32 and int(x, 16) for x in found)


def test_digest_of_a_view_in_another_order_is_that_of_its_values() -> None:
    array = np.arange(24.0).reshape(4, 6)
    assert digest(rows_of(np.asfortranarray(array)), (4, 6), "float64") == digest(rows_of(array), (4, 6), "float64")


def test_digest_key_is_never_zero_for_a_digest() -> None:
    digests = ["", "0" * 32, "00000000000000ff" + "0" * 16, "f" * 32]
    assert catalog.digest_keys(digests).tolist() == [0, 1, 255, 2**64 - 1]
    assert catalog.digest_keys([]).shape == (0,)


@given(st.lists(st.from_regex(r"[a-z.]{0,3}[0-9]{0,3}[a-z]{0,2}", fullmatch=True)))
def test_natural_order_is_an_order_and_counts(names: list[str]) -> None:
    ordered = sorted(names, key=catalog.natural_key)
    assert sorted(ordered) == sorted(names)
    assert ordered == sorted(reversed(names), key=catalog.natural_key)


def test_natural_order_counts() -> None:
    names = ["run-10", "run-2", "run-2b", "a", "10", "9"]
    assert sorted(names, key=catalog.natural_key) == ["9", "10", "a", "run-2", "run-2b", "run-10"]


def test_raw_codes_of_small_floats_have_a_digest_of_their_type() -> None:
    codes = np.array([[1, 2], [3, 4]], ml_dtypes.float8_e4m3fn)
    (tensor,) = open_checkpoint({"w": codes}).tensors
    assert tensor.dtype == "float8_e4m3fn"
    assert digest(tensor.read, (2, 2), tensor.dtype) == reference_digest(codes.view(np.uint8), "float8_e4m3fn", 2**24)
