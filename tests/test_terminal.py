"""Tables for a terminal: width, alignment, digits, and names that stay distinct."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffract_dask import terminal
from diffract_dask.terminal import format_number, format_table, shorten

FIELDS = [
    "frob_norm",
    "l2_norm",
    "nuclear_norm",
    "stable_rank",
    "effective_rank",
    "hard_rank",
    "esd_max",
    "esd_min",
    "weights_mean",
    "weights_std",
    "nonfinite_fraction",
]


def _rows(n: int = 12) -> list[dict[str, object]]:
    rng = np.random.default_rng(0)
    return [
        {
            "name": f"encoder.layer.{i}.attention.output.LayerNorm.projection.weight",
            "shape": (1536, 384),
            **{field: float(x) for field, x in zip(FIELDS, -(10 ** rng.uniform(-9, 9, len(FIELDS))), strict=True)},
        }
        for i in range(n)
    ]


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_a_table_fits_and_shows_every_column_of_every_row(width: int) -> None:
    rows = _rows()
    text = format_table(rows, ["name", "shape", *FIELDS], width=width)
    lines = text.split("\n")
    assert max(map(len, lines)) <= width
    blocks = text.split("\n\n")
    shown: dict[str, set[str]] = {}
    for block in blocks:
        rule = next(i for i, line in enumerate(block.split("\n")) if set(line) <= {"-", " "})
        for line in block.split("\n")[rule + 1 :]:
            name, *values = line.split()
            shown.setdefault(name, set()).update(values)
    assert len(shown) == len(rows)
    for row, values in zip(rows, shown.values(), strict=True):
        assert values == {format_number(row[column]) for column in ["shape", *FIELDS]}
    header = "".join(word for block in blocks for word in block.split("\n---")[0].split())
    assert all(part in header for field in FIELDS for part in field.split("_"))


def test_numbers_are_aligned_right_and_names_left() -> None:
    text = format_table([{"name": "a", "x": 1.5}, {"name": "bcd", "x": 100}], width=80)
    assert text.split("\n") == ["name    x", "----  ---", "a     1.5", "bcd   100"]


def test_a_wide_terminal_takes_one_block() -> None:
    assert "\n\n" not in format_table(_rows(), width=200)


def test_missing_values_are_dashes_and_nan_is_nan() -> None:
    text = format_table([{"name": "a", "x": None}, {"name": "b", "x": float("nan")}, {"name": "c"}], ["name", "x"])
    assert [line.split()[1] for line in text.split("\n")[2:]] == ["-", "nan", "-"]


def test_no_rows_give_the_header() -> None:
    assert format_table([], ["name", "stable_rank"]).split("\n")[0].split() == ["stable_"]


@given(st.floats(-1e308, 1e308))
def test_numbers_keep_four_digits_and_stay_short(x: float) -> None:
    text = format_number(x)
    assert len(text) <= len("-0.00012345")
    assert float(text) == pytest.approx(x, rel=5.1e-4, abs=1e-320)


@given(st.lists(st.text("ab.0", min_size=1, max_size=12), unique=True), st.integers(1, 12))
def test_shortened_names_stay_distinct(names: list[str], width: int) -> None:
    cut = shorten(names, width)
    assert len(set(cut)) == len(names)
    assert all(
        short == name or (short[0] == "…" and name.endswith(short[1:]) and len(short) <= len(name))
        for short, name in zip(cut, names, strict=True)
    )


def test_width_follows_the_terminal_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True, raising=False)
    for columns, expected in [(40, 80), (132, 132), (500, 200)]:
        monkeypatch.setenv("COLUMNS", str(columns))
        assert terminal.terminal_width() == expected
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: False, raising=False)
    assert terminal.terminal_width() == 200
