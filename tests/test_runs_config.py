"""Configurations, their encoding and fingerprints, variants."""

from __future__ import annotations

import copy
import json
import pickle
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from projects import Project

import diffract_dask.runs as dm
from diffract_dask.errors import DeclarationError, RunError, UnencodableError, UnknownNameError
from diffract_dask.runs import encoding

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=4)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
configs = st.dictionaries(st.text(max_size=3), values, max_size=4)


class Colour(Enum):
    RED = 1


def same(one: object, other: object) -> bool:
    return encoding.canonical(one) == encoding.canonical(other)


@settings(max_examples=60, deadline=None)
@given(configs, configs, configs)
def test_merging_is_associative_and_has_a_neutral_element(a: Any, b: Any, c: Any) -> None:
    assert same(dm.Config(dm.Config(a, b), c), dm.Config(a, b, c))
    assert same(dm.Config(a, {}), dm.Config(a))
    assert same(dm.Config({}, a), dm.Config(a))
    assert same(dm.Config(a, a), dm.Config(a))


@settings(max_examples=60, deadline=None)
@given(configs, configs)
def test_the_later_layer_wins_and_the_earlier_shows_where_it_is_silent(a: Any, b: Any) -> None:
    merged = dm.Config(a, b)
    assert merged.keys() == a.keys() | b.keys()
    for key in merged:
        if key not in b:
            assert same(merged[key], a[key])
        elif not isinstance(b[key], dict):
            assert same(merged[key], b[key])
        else:
            below = a.get(key) if isinstance(a.get(key), dict) else {}
            assert same(merged[key], dm.Config(below, b[key]))


@settings(max_examples=60, deadline=None)
@given(configs)
def test_a_configuration_survives_its_file_and_fingerprint_and_order(config: Any) -> None:
    made = dm.Config(config)
    text = json.dumps(encoding.encode(made), allow_nan=False)
    read = dm.Config(encoding.decode(json.loads(text)))
    assert read.fingerprint == made.fingerprint == dm.fingerprint(config)
    turned = dict(reversed(list(config.items())))
    assert dm.fingerprint(turned) == made.fingerprint
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), dm.Config(made.to_dict())):
        assert copied.fingerprint == made.fingerprint


@settings(max_examples=80, deadline=None)
@given(values, values)
def test_fingerprints_are_equal_only_for_equal_values(a: Any, b: Any) -> None:
    assert (dm.fingerprint(a) == dm.fingerprint(b)) == (repr(a) == repr(b) or same_by_hand(a, b))


def same_by_hand(a: Any, b: Any) -> bool:
    """Return whether two values are equal in type and content; NaN equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_by_hand(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same_by_hand(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)


ROUND_TRIPS = [
    1 + 2j,
    complex(float("nan"), 1),
    b"\x00\xff",
    Path("a/b"),
    datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
    date(2026, 1, 2),
    timedelta(days=1, microseconds=5),
    Decimal("1.10"),
    Fraction(1, 3),
    {1, 2},
    {1: "a", "1": "b", None: "c", (1, 2): "d"},
    {"$float": "nan"},
    {"$a": {"$$b": 1}},
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.array(3.5),
    np.array([], dtype="U3"),
    np.array([True, False]),
]


@pytest.mark.parametrize("value", ROUND_TRIPS, ids=lambda value: repr(value)[:30])
def test_values_beyond_json_survive_the_file(value: Any) -> None:
    text = json.dumps(encoding.encode(value), allow_nan=False)
    back = encoding.decode(json.loads(text))
    assert encoding.canonical(back) == encoding.canonical(value)
    if not isinstance(value, np.ndarray):
        assert repr(back) == repr(value)


def test_structured_arrays_and_enumerations_have_fingerprints() -> None:
    rows = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    assert dm.fingerprint(rows) != dm.fingerprint(rows.astype([("a", "i4"), ("c", "f8")]))
    assert dm.fingerprint(Colour.RED) == dm.fingerprint(Colour.RED)
    assert dm.fingerprint(np.datetime64("2026-01-01")) != dm.fingerprint(np.datetime64("2026-01-02"))


def test_numpy_scalars_are_numbers() -> None:
    assert (
        dm.Config(a=np.float32(0.5), b=np.int8(3), c=np.bool_(True)).fingerprint
        == dm.Config(a=0.5, b=3, c=True).fingerprint
    )


def test_items_are_attributes_and_wrong_ones_name_the_nearest() -> None:
    config = dm.Config(scan={"width": 1, "items": 2})
    assert (config.scan.width, config["scan"]["items"]) == (1, 2)
    with pytest.raises(AttributeError, match="Did you mean 'width'"):
        _ = config.scan.widht
    with pytest.raises(KeyError, match="Did you mean 'scan'"):
        config["scann"]
    assert config.get("nothing") is None
    assert "Config" in repr(config)
    assert (config | {"x": 1})["x"] == 1


def test_a_layer_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match="mapping, not int"):
        dm.Config(3)  # type: ignore[arg-type]


def test_plain_copies_can_be_changed() -> None:
    config = dm.Config(a={"l": [1, {"b": 2}]}, x=np.zeros(2))
    plain = config.to_dict()
    plain["a"]["l"][1]["b"] = 3
    plain["x"][0] = 1
    assert config.a.l[1]["b"] == 2
    assert config.x[0] == 0


def test_variants_build_on_one_another(project: Project) -> None:
    module = project.declare(
        "p",
        """
one = dm.register('one', {'base': 1, 'name': 2, 'module': 3}, a=1)
two = dm.register('two', base=one, b=2)
three = dm.register('three', base='p:two', c=3, a=dm.UNSET)
""",
    )
    assert dm.registry.get("p", "three").config == {"base": 1, "name": 2, "module": 3, "b": 2, "c": 3}
    assert list(dm.registry.for_module("p")) == ["one", "two", "three"]
    assert module.two.short_fp == module.two.fingerprint[:12] == dm.fingerprint(module.two.config)[:12]


def test_layers_of_overrides_are_merged_and_frozen() -> None:
    arrays = {"x": np.arange(3)}
    for _ in range(2):  # the same again is no other variant, arrays or not
        variant = dm.registry.register("layers", "v", {"a": {"b": 1}, "z": 1}, arrays, a={"c": 2}, z=dm.replace(q=1))
    assert variant.config.a == {"b": 1, "c": 2}
    assert variant.config.z == {"q": 1}
    with pytest.raises(DeclarationError, match="already"):
        dm.registry.register("layers", "v", {"x": np.arange(4)})
    for change in (lambda: variant.overrides.update(a=1), lambda: variant.overrides["a"].pop("b")):
        with pytest.raises(RunError, match="cannot be changed"):
            change()
    again = pickle.loads(pickle.dumps(variant))
    assert again.fingerprint == variant.fingerprint
    assert again.is_written_like(variant)
    dm.registry.drop_module("layers")


def test_a_base_in_several_other_modules_has_to_be_named(project: Project) -> None:
    for name in ("one", "two"):
        project.write(**{name: "import diffract_dask.runs as dm\ndm.register('shared', a=1)\n"})
    project.write(both="import one, two\nimport diffract_dask.runs as dm\ndm.register('x', base={base})\n")
    text = (project.folder / "both.py").read_text()
    project.write(both=text.format(base="'shared'"))
    with pytest.raises(DeclarationError, match=r"several modules \(one, two\).*base='one:shared'"):
        project.load("both")
    project.write(both=text.format(base="'two:shared'"))
    project.load("both")
    assert dm.registry.get("both", "x").base is dm.registry.get("two", "shared")


def test_a_name_is_given_once_but_a_module_may_be_loaded_again(project: Project) -> None:
    with pytest.raises(DeclarationError, match="already"):
        project.declare("p", "for i in (1, 2): dm.register('v', a=i)\n")
    module = project.declare("p", "dm.register('v', a=1)\ndm.register('v', a=1)\n")
    (project.folder / "p.py").write_text("import diffract_dask.runs as dm\ndm.register('v', a=2)\n")
    import importlib

    importlib.reload(module)
    assert dm.registry.get("p", "v").config == {"a": 2}


def test_a_script_registers_under_the_name_that_it_is_imported_by(project: Project) -> None:
    project.write(p="import diffract_dask.runs as dm\ndm.register('v')\nprint(dm.registry.get('p', 'v').module)\n")
    assert project.python("p.py").stdout == project.python("-m", "p").stdout == "p\n"


def test_what_is_typed_in_registers_under_main_and_may_be_typed_again(project: Project) -> None:
    typed = "import diffract_dask.runs as dm\nfor i in (1, 2):\n    exec(\"dm.register('v', a=i)\")\n"
    code = f"{typed}print(dm.registry.get('__main__', 'v').config.a)\n"
    assert project.python("-c", code).stdout == "2\n"


def test_unknown_variants_name_the_nearest() -> None:
    dm.registry.register("lookup", "jitter")
    with pytest.raises(UnknownNameError, match="Did you mean 'jitter'"):
        dm.registry.get("lookup", "jiter")
    with pytest.raises(UnknownNameError, match="Did you mean 'lookup'"):
        dm.registry.get("lokup", "jitter")
    dm.registry.drop_module("lookup")


@pytest.mark.parametrize("name", ["", "  ", "a\nb", 3, None])
def test_a_name_is_printable_text(name: Any) -> None:
    with pytest.raises(RunError, match="printable text"):
        dm.registry.register("m", name)


@pytest.mark.parametrize(
    "stages", [[], ["not a stage"], [dm.Stage("a", print), dm.Stage("a", print)]], ids=["none", "no stage", "twice"]
)
def test_a_pipeline_is_stages_of_different_names(stages: Any) -> None:
    with pytest.raises(DeclarationError):
        dm.Pipeline("p", stages, module="nowhere")


class Quantity(np.ndarray):
    """An array with something beside its numbers, as units are."""


@pytest.mark.parametrize("value", [np.ma.array([1, 2], mask=[0, 1]), np.arange(2).view(Quantity)])
def test_arrays_with_more_than_numbers_are_refused(value: object) -> None:
    with pytest.raises(UnencodableError, match="probe"):
        dm.Config(probe=value)


def test_members_of_an_enumeration_count_by_name_and_value() -> None:
    kinds = [Enum("Kind", {"FAST": value}) for value in (1, 2, object())]
    assert len({dm.fingerprint(kind.FAST) for kind in kinds}) == 3
