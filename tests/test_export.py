"""Export formats: shapes, order of columns, missing against not measurable, and round trips through files."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import xarray as xr

from diffract_dask import export
from diffract_dask.errors import ConfigurationError, MissingExtraError
from diffract_dask.export import EXPORTS, export_table, formats, register_formatter
from diffract_dask.fields import Field
from diffract_dask.table import Aggregate, Sources, Table, tabulate

NAN = math.nan
DECLARED = {"hard_rank": Field("Hard rank", dtype="int64"), "stable_rank": Field("Stable rank")}
METADATA = [
    {
        "uid": "u0",
        "name": "w",
        "model_id": "a",
        "parameter_type": "dense",
        "metadata": {"shape": (3, 2), "dtype": "float32", "layer_id": np.int64(4), "name": "impostor"},
    },
    {"uid": "u1", "name": "w", "model_id": "b", "parameter_type": "dense", "metadata": {"shape": (3, 3)}},
    {"uid": "u2", "name": "v", "model_id": "b", "parameter_type": "conv", "metadata": {"shape": (2, 2, 1)}},
]


def dataset() -> xr.Dataset:
    outer = ("model_id", "name")
    svals = np.full((2, 2, 3), NAN)
    svals[0, 1, :2], svals[1, 1], svals[1, 0, :2] = [1, 2], [1, 2, 3], [4, 5]
    vectors = np.full((2, 2, 3, 3), NAN)
    vectors[0, 1, :3, :2] = np.arange(6).reshape(3, 2)
    return xr.Dataset(
        {
            "stable_rank": (outer, [[NAN, 1.5], [NAN, 2.5]], {"long_name": "Stable rank", "units": "1"}),
            "hard_rank": (outer, [[NAN, 2.0], [3.0, NAN]]),
            "weights_svals": ((*outer, "sval"), svals),
            "weights_lsvs": ((*outer, "row", "sval"), vectors),
            "param_norm": ("model_id", [10.0, 20.0]),
        },
        coords={
            "model_id": np.array(["a", "b"], object),
            "name": np.array(["v", "w"], object),
            "rows": (outer, [[0, 3], [2, 3]]),
            "cols": (outer, [[0, 2], [2, 3]]),
            "type": (outer, np.array([["", "dense"], ["conv", "dense"]], object)),
            "step": ("model_id", [0.0, 100.0]),
        },
    )


def table(*fields: str, sources: Sources = "metrics", aggregates: tuple[Aggregate, ...] = ()) -> Table:
    never = {"hard_rank": np.array([[True, False], [False, True]])}
    return tabulate(
        dataset(), METADATA, fields, declared=DECLARED, missing=never, sources=sources, aggregates=aggregates
    )


PAIR: Aggregate = {"field": "l_agreement", "context_models": ("a", "b"), "context_params": ("w",), "value": 0.5}


# ------------------------------------------------------------------------------------------- rows


def test_rows_hold_python_numbers_of_the_declared_kind_and_leave_out_what_was_never_computed() -> None:
    rows = table("hard_rank", "stable_rank").parameters
    assert [list(row["fields"]) for row in rows] == [
        ["hard_rank", "stable_rank"],
        ["stable_rank"],
        ["hard_rank", "stable_rank"],
    ]
    assert rows[0]["fields"]["hard_rank"] == 2
    assert type(rows[0]["fields"]["hard_rank"]) is int
    assert type(rows[0]["fields"]["stable_rank"]) is float
    assert math.isnan(rows[2]["fields"]["stable_rank"])  # not measurable is a value
    assert type(rows[0]["metadata"]["layer_id"]) is int


def test_array_fields_lose_their_padding() -> None:
    rows = table("weights_svals", "weights_lsvs").parameters
    np.testing.assert_array_equal(rows[0]["fields"]["weights_svals"], [1, 2])
    np.testing.assert_array_equal(rows[1]["fields"]["weights_svals"], [1, 2, 3])
    np.testing.assert_array_equal(rows[0]["fields"]["weights_lsvs"], np.arange(6).reshape(3, 2))
    assert rows[2]["fields"]["weights_lsvs"].shape == (2, 2)


def test_size_variable_wins_over_the_shape_of_the_slice() -> None:
    sized = dataset().assign(weights_svals_size=(("model_id", "name"), [[0, 1], [2, 2]]))
    rows = tabulate(sized, METADATA, ["weights_svals"]).parameters
    assert [len(row["fields"]["weights_svals"]) for row in rows] == [1, 2, 2]


def test_a_parameter_outside_the_dataset_keeps_its_row_without_fields() -> None:
    skipped = {"uid": "u9", "name": "bias", "model_id": "a", "parameter_type": "bias", "metadata": {}}
    rows = tabulate(dataset(), [*METADATA, skipped], ["stable_rank"]).parameters
    assert rows[-1]["uid"] == "u9"
    assert rows[-1]["fields"] == {}


def test_only_parameters_in_scope_count_for_model_level_fields() -> None:
    made = tabulate(dataset(), METADATA[1:], ["param_norm"], sources="aggregates")
    assert made.aggregates == [
        {"field": "param_norm", "context_models": ("b",), "context_params": ("v", "w"), "value": 20.0}
    ]


def test_unknown_sources_names_the_choices() -> None:
    with pytest.raises(ConfigurationError, match="'metrics'"):
        tabulate(dataset(), METADATA, [], sources="metric")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- dict, list, json


def test_dict_has_the_shape_that_diffract_users_know() -> None:
    made = export_table(table("stable_rank"), "dict")
    assert list(made) == ["u0", "u1", "u2"]
    assert made["u0"] == {
        "metadata": {
            "name": "w",  # an attribute called "name" cannot replace the real one
            "model_id": "a",
            "parameter_type": "dense",
            "shape": (3, 2),
            "dtype": "float32",
            "layer_id": 4,
        },
        "fields": {"stable_rank": 1.5},
    }


def test_list_records_have_columns_in_the_order_of_the_request() -> None:
    made = export_table(table("stable_rank", "hard_rank"), "list")
    identity = ["parameter_uid", "model_id", "parameter_name", "parameter_type"]
    meta = ["meta_shape", "meta_dtype", "meta_layer_id", "meta_name"]
    assert list(made[0]) == [*identity, *meta, "stable_rank", "hard_rank"]
    assert list(export_table(table("hard_rank", "stable_rank"), "list")[0])[-2:] == ["hard_rank", "stable_rank"]
    assert made[0]["parameter_name"] == "w"
    assert made[0]["meta_name"] == "impostor"


def test_aggregates_are_a_list_of_contexts_in_every_plain_format() -> None:
    made = table("param_norm", sources="aggregates", aggregates=(PAIR,))
    expected = [
        {"field": "param_norm", "context_models": ("a",), "context_params": ("w",), "value": 10.0},
        {"field": "param_norm", "context_models": ("b",), "context_params": ("v", "w"), "value": 20.0},
        dict(PAIR),
    ]
    assert export_table(made, "dict") == expected
    assert export_table(made, "list") == expected
    assert json.loads(export_table(made, "json"))[2]["context_models"] == ["a", "b"]
    assert list(export_table(made, "pandas")["value"]) == [10.0, 20.0, 0.5]
    assert export_table(made, "polars")["context_params"].to_list() == [["w"], ["v", "w"], ["w"]]


def test_all_adds_a_column_for_each_context() -> None:
    made = export_table(table("stable_rank", "param_norm", sources="all", aggregates=(PAIR,)), "dict")
    assert made["u0"]["fields"] == {
        "stable_rank": 1.5,
        "param_norm@models[a]": 10.0,
        "l_agreement@models[a,b]@params[w]": 0.5,
    }
    assert "l_agreement@models[a,b]@params[w]" not in made["u2"]["fields"]
    assert made["u2"]["fields"]["param_norm@models[b]"] == 20.0


def test_all_does_not_change_the_table() -> None:
    made = table("stable_rank", "param_norm", sources="all")
    export_table(made, "dict")
    assert list(made.parameters[0]["fields"]) == ["stable_rank"]


def test_json_is_strict_and_null_is_not_measurable() -> None:
    text = export_table(table("stable_rank", "hard_rank", "weights_lsvs"), "json")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    made = json.loads(text, parse_constant=refuse)
    assert made["u2"]["fields"]["stable_rank"] is None
    assert "hard_rank" not in made["u1"]["fields"]
    assert made["u0"]["fields"]["weights_lsvs"] == [[0, 1], [2, 3], [4, 5]]
    assert made["u0"]["metadata"]["shape"] == [3, 2]


def test_json_writes_the_literals_when_asked() -> None:
    text = export_table(table("stable_rank"), "json", allow_nan=True)
    assert math.isnan(json.loads(text)["u2"]["fields"]["stable_rank"])


# ------------------------------------------------------------------------------------------- frames and csv


def test_pandas_frame_equals_the_records() -> None:
    made = table("stable_rank", "hard_rank", "weights_svals")
    frame = export_table(made, "pandas")
    records = export_table(made, "list")
    assert list(frame.columns) == list(records[0])
    assert frame["stable_rank"].dtype == np.float64
    np.testing.assert_array_equal(frame["stable_rank"], [1.5, 2.5, NAN])
    np.testing.assert_array_equal(frame["hard_rank"], [2, NAN, 3])
    for cell, record in zip(frame["weights_svals"], records, strict=True):
        np.testing.assert_array_equal(cell, record["weights_svals"])
    assert list(frame["meta_shape"]) == [(3, 2), (3, 3), (2, 2, 1)]


def test_frames_hold_arrays_of_equal_length_as_cells() -> None:
    made = tabulate(dataset(), METADATA[:1] * 2, ["weights_svals"])
    frame = export_table(made, "pandas")
    assert frame["weights_svals"].map(np.shape).tolist() == [(2,), (2,)]


def test_polars_tells_never_computed_from_not_measurable() -> None:
    polars = pytest.importorskip("polars")
    frame = export_table(table("stable_rank", "hard_rank", "weights_svals", "weights_lsvs"), "polars")
    assert frame["stable_rank"].is_nan().to_list() == [False, False, True]
    assert frame["hard_rank"].to_list() == [2, None, 3]
    assert frame["hard_rank"].dtype == polars.Int64
    assert frame["weights_svals"].to_list() == [[1, 2], [1, 2, 3], [4, 5]]
    assert frame["weights_lsvs"].dtype == polars.Object
    assert frame["meta_shape"].to_list() == [[3, 2], [3, 3], [2, 2, 1]]


def test_polars_takes_columns_of_mixed_kinds() -> None:
    pytest.importorskip("polars")
    array: Aggregate = {**PAIR, "field": "l_overlap", "value": np.eye(2)}
    made = export_table(table(sources="aggregates", aggregates=(PAIR, array)), "polars")
    assert made["value"].to_list()[0] == 0.5
    np.testing.assert_array_equal(made["value"].to_list()[1], np.eye(2))


def test_csv_keeps_every_digit_and_tells_missing_from_nan() -> None:
    values = dataset()
    values["stable_rank"][0, 1] = 1 / 3
    made = tabulate(
        values, METADATA, ["stable_rank", "weights_svals", "hard_rank"], missing={"hard_rank": np.ones((2, 2), bool)}
    )
    rows = list(csv.DictReader(io.StringIO(export_table(made, "csv"))))
    assert float(rows[0]["stable_rank"]) == 1 / 3
    assert rows[2]["stable_rank"] == "nan"
    assert rows[0]["hard_rank"] == ""
    assert json.loads(rows[1]["weights_svals"]) == [1, 2, 3]
    assert json.loads(rows[0]["meta_shape"]) == [3, 2]


@pytest.mark.parametrize("name", sorted(EXPORTS))
@pytest.mark.parametrize("sources", ["metrics", "aggregates", "all"])
def test_every_format_takes_a_table_with_nothing_in_it(name: str, sources: Sources, tmp_path: Any) -> None:
    made = tabulate(xr.Dataset(), [], ["stable_rank"], sources=sources)
    path = tmp_path / "x.nc" if EXPORTS[name].file_only else None
    result = export_table(made, name, path)
    assert (path.exists() and result == path) if path else len(result) == 0 or name in ("json", "csv")


# ------------------------------------------------------------------------------------------- files


def test_netcdf_reads_back_equal(tmp_path: Any) -> None:
    pytest.importorskip("netCDF4")
    original = dataset()
    original["half"] = (("model_id", "name"), np.array([[0.1, 2], [NAN, 4]], np.float16))
    original["count"] = (("model_id", "name"), np.array([[1, 2**62], [3, 4]], np.int64))
    original["digest"] = (("model_id", "name"), np.array([[1, 2**63 + 1], [3, 4]], np.uint64))
    original["flag"] = (("model_id", "name"), np.array([[True, False], [False, True]]))
    original.coords["parent"] = ("model_id", np.array(["", "a"], object))
    original["stable_rank"].attrs.update(valid_range=(0.0, 1.0), flag_values=[0, 1], flag_meanings=["ok", "no"])
    original.attrs["created_by"] = "diffract_dask"
    original["stable_rank"].encoding = {"chunks": (1, 1), "compressors": ()}
    path = export_table(tabulate(original, METADATA, list(original), sources="all"), None, tmp_path / "r.nc")
    with xr.open_dataset(path, engine="netcdf4") as back:
        xr.testing.assert_equal(back, original)
        assert back["flag"].dtype == bool
        assert back["digest"].dtype == np.uint64
        assert back.attrs == original.attrs
        assert back["stable_rank"].attrs["long_name"] == "Stable rank"


def test_netcdf_takes_attributes_and_texts_that_it_has_no_type_for(tmp_path: Any) -> None:
    pytest.importorskip("netCDF4")
    original = dataset()
    original["type"][0, 0] = None
    original["stable_rank"].attrs = {
        "none": None,
        "dtype": "bool",
        "yes": True,
        "params": {"rtol": 1e-5},
        "mixed": [1, "a"],
        "empty": [],
        "path": tmp_path,
    }
    before = dict(original["stable_rank"].attrs)
    path = export_table(tabulate(original, METADATA, list(original), sources="all"), "netcdf", tmp_path / "r.nc")
    assert original["stable_rank"].attrs == before
    with xr.open_dataset(path, engine="netcdf4") as back:
        assert back["type"].values[0, 0] == ""
        attrs = back["stable_rank"].attrs
        assert "none" not in attrs
        assert attrs["value_dtype"] == "bool"
        np.testing.assert_array_equal(back["stable_rank"], original["stable_rank"])  # not cast to booleans
        assert attrs["yes"] == 1
        assert json.loads(attrs["params"]) == {"rtol": 1e-5}
        assert json.loads(attrs["mixed"]) == [1, "a"]
        assert attrs["path"] == str(tmp_path)


def test_xarray_selects_by_level() -> None:
    metrics = export_table(table(sources="metrics"), "xarray")
    aggregates = export_table(table(sources="aggregates"), "xarray")
    both = export_table(table(sources="all"), "xarray")
    assert "param_norm" not in metrics
    assert list(aggregates) == ["param_norm"]
    assert set(both) == {*metrics, *aggregates}


def test_the_suffix_chooses_the_format(tmp_path: Any) -> None:
    made = table("stable_rank")
    assert export_table(made, None, tmp_path / "r.csv") == tmp_path / "r.csv"
    assert (tmp_path / "r.csv").read_text() == export_table(made, "csv")
    export_table(made, None, tmp_path / "r.json", default="list")
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(export_table(made, "json"))


def test_an_unknown_suffix_names_the_known_ones(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"\.csv.*export_format="):
        export_table(table("stable_rank"), None, tmp_path / "r.xls")


def test_objects_do_not_go_to_files_and_files_need_a_path(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"choose .*csv"):
        export_table(table("stable_rank"), "pandas", tmp_path / "r.csv")
    with pytest.raises(ConfigurationError, match="path="):
        export_table(table("stable_rank"), "netcdf")


def test_a_failed_export_leaves_the_old_file_and_nothing_else(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("netCDF4")
    target = tmp_path / "r.nc"
    target.write_bytes(b"old")

    def fail(self: xr.Dataset, path: Any, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(xr.Dataset, "to_netcdf", fail)
    with pytest.raises(OSError, match="disk full"):
        export_table(table("stable_rank"), None, target)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.nc"]


# ------------------------------------------------------------------------------------------- the table of formats


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'pandas'"):
        export_table(table(), "panda")


def test_default_format_is_the_setting() -> None:
    import dask.config

    with dask.config.set({"diffract_dask.export-format": "list"}):
        assert isinstance(export_table(table("stable_rank")), list)
    assert isinstance(export_table(table("stable_rank"), default="list"), list)


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_missing_package_is_named_with_its_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=f"pip install .*{name}"):
        export_table(table("stable_rank"), name)


def test_missing_netcdf_is_named_with_its_remedy(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="pip install netCDF4"):
        export_table(table("stable_rank"), None, tmp_path / "r.nc")


def test_register_formatter(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(export, "EXPORTS", dict(EXPORTS))

    def uids(table: Table, path: Any = None, *, sep: str = " ") -> str | None:
        """The uids."""
        text = sep.join(row["uid"] for row in table.parameters)
        return path.write_text(text) and None if path else text

    register_formatter("uids", uids, suffixes=[".uids"])
    assert "uids" in formats()
    assert export_table(table(), "uids", sep=",") == "u0,u1,u2"
    export_table(table(), None, tmp_path / "x.uids")
    assert (tmp_path / "x.uids").read_text() == "u0 u1 u2"
    with pytest.raises(ConfigurationError, match="replace=True"):
        register_formatter("uids", uids)


def test_entry_points_are_loaded_when_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="keys", value="diffract_dask.export:formats", group=export.ENTRY_POINTS)
    monkeypatch.setattr(export, "EXPORTS", dict(EXPORTS))
    monkeypatch.setattr(export, "_installed_formats", lambda: {"keys": point})
    assert "keys" in formats()
    with pytest.raises(TypeError, match="formats"):  # the function was found and called with a table
        export_table(table(), "keys")


@pytest.mark.parametrize("declared", EXPORTS.values(), ids=lambda e: e.name)
def test_every_format_is_documented(declared: export.Export) -> None:
    assert declared.doc.endswith(".")
    assert declared.function.__doc__
