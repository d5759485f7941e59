"""Rows for a terminal: filtered, sorted, and aligned to its width with names shortened but distinct."""

from __future__ import annotations

import math
import operator
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from diffract_dask.errors import FieldNotFoundError, FilterError, did_you_mean

__all__ = ["filter_rows", "format_number", "format_table", "shorten", "sort_rows", "terminal_width"]

R = TypeVar("R", bound=Mapping[str, Any])
Row = Mapping[str, Any]

GAP = 2
WRAP_HEADER_ABOVE = 9
LEAST_NAME = 20


def terminal_width() -> int:
    """Return the columns to use: those of the terminal, between 80 and 200; 200 where the output is not one."""
    if not sys.stdout.isatty():
        return 200
    return min(200, max(80, shutil.get_terminal_size().columns))


def format_number(value: Any) -> str:
    """Return a value as a table shows it; ``-`` for None, which is a value that was never computed.

    >>> [format_number(x) for x in (3, 2.0, 0.0123456, 1234567.8, float("nan"), None)]
    ['3', '2', '0.012346', '1.235e+06', 'nan', '-']
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value) and value == int(value) and abs(value) < 1e5:
            return str(int(value))
        text = f"{value:.5g}"
        return f"{value:.3e}" if "e" in text else text
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, str):
        return "array " + "x".join(map(str, shape))
    if isinstance(value, (tuple, list)):
        return "x".join(map(str, value)) or "scalar"
    return str(value)


def shorten(texts: Sequence[str], width: int) -> list[str]:
    """Return texts of at most `width` characters, or a little more where distinct ones would become equal.

    Names of parameters differ in their last parts, so the beginning goes.

    >>> shorten(["encoder.0.attention.weight", "encoder.10.attention.weight"], 19)
    ['….0.attention.weight', '…10.attention.weight']
    """
    distinct = len(set(texts))
    longest = max((len(text) for text in texts), default=0)
    for size in range(max(2, width), longest):
        cut = [text if len(text) <= size else "…" + text[1 - size :] for text in texts]
        if len(set(cut)) == distinct:
            return cut
    return list(texts)


def format_table(
    rows: Iterable[Row], columns: Sequence[str] | None = None, *, keys: int = 1, width: int | None = None
) -> str:
    """Return rows as an aligned table; columns that do not fit go into further blocks below, with the keys again.

    Parameters
    ----------
    rows : iterable of mapping
        A missing entry or None is shown as ``-``.
    columns : sequence of str, optional
        Which, in order. Default: those of the first row.
    keys : int
        How many of the first columns name the row; they are aligned left and head every block.
    width : int, optional
        Columns of the terminal. Default: :func:`terminal_width`.
    """
    rows = list(rows)
    columns = list(columns if columns is not None else rows[0] if rows else [])
    width = width or terminal_width()
    cells = {column: [format_number(row.get(column)) for row in rows] for column in columns}
    names, others = columns[:keys], columns[keys:]
    left = {c for c in columns if c in names or all(isinstance(row.get(c), str | None) for row in rows)}
    heads = {column: _header(column) for column in columns}

    def size(column: str) -> int:
        return max(map(len, [*heads[column], *cells[column]]), default=0)

    room = width - sum(GAP + size(c) for c in others)
    for key in names:  # the keys give way if one block is then enough; else to a third of the line, for several blocks
        share = room - sum(GAP + size(c) for c in names if c != key)
        if size(key) > share:
            one_block = shorten(cells[key], max(LEAST_NAME, share))
            fits = max(map(len, [*heads[key], *one_block])) <= share
            cells[key] = one_block if fits else shorten(cells[key], max(LEAST_NAME, width // 3 // len(names)))
    for column in left & set(others):
        share = max(width // 3, width - sum(GAP + size(c) for c in columns if c != column))
        if size(column) > share:
            cells[column] = [_tail(cell, share) for cell in cells[column]]
    blocks = _blocks(others, {c: size(c) for c in columns}, sum(GAP + size(c) for c in names) - GAP, width)
    return "\n\n".join(_block([*names, *block], cells, heads, left) for block in blocks)


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[1 - width :]


def _header(name: str) -> list[str]:
    """Return a column's name over as many lines as keep it narrow, broken after underscores."""
    lines = [""]
    for part in name.replace("_", "_\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > WRAP_HEADER_ABOVE:
            lines.append("")
        lines[-1] += part
    return lines


def _blocks(others: Sequence[str], sizes: Mapping[str, int], key_width: int, width: int) -> list[list[str]]:
    blocks: list[list[str]] = [[]]
    used = key_width
    for column in others:
        if blocks[-1] and used + GAP + sizes[column] > width:
            blocks.append([])
            used = key_width
        blocks[-1].append(column)
        used += GAP + sizes[column]
    return blocks


def _block(
    columns: Sequence[str], cells: Mapping[str, list[str]], heads: Mapping[str, list[str]], left: set[str]
) -> str:
    height = max((len(heads[column]) for column in columns), default=0)
    spread = []
    for column in columns:
        head = [""] * (height - len(heads[column])) + heads[column]
        size = max(map(len, [*head, *cells[column]]))
        lines = [*head, "-" * size, *cells[column]]
        spread.append([line.ljust(size) if column in left else line.rjust(size) for line in lines])
    return "\n".join((" " * GAP).join(line).rstrip() for line in zip(*spread, strict=True))


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
    "~": lambda text, pattern: re.search(pattern, str(text)) is not None,
}
_CONDITION = re.compile(r"\s*([^<>=!~\s]+)\s*(<=|>=|==|!=|<|>|=|~)\s*(.+?)\s*")


def filter_rows(rows: Sequence[R], conditions: Iterable[str]) -> list[R]:
    """Return the rows for which every condition holds; a value that is missing or nan fulfils none.

    Parameters
    ----------
    rows : sequence of mapping
        All with the same keys.
    conditions : iterable of str
        ``column sign value`` with one of the signs ``< <= > >= == !=``, or ``~`` for a regular expression that is
        found in the text.

    Raises
    ------
    FilterError
        A condition that cannot be read.
    FieldNotFoundError
        No column has this name.

    Examples
    --------
    >>> filter_rows([{"name": "a", "x": 1.0}, {"name": "b", "x": 7.0}], ["x>5"])
    [{'name': 'b', 'x': 7.0}]
    """
    kept = list(rows)
    for condition in conditions:
        parsed = _CONDITION.fullmatch(condition)
        if parsed is None:
            raise FilterError(f"{condition!r} is not a condition; write for example 'stable_rank>5' or 'type==conv'")
        column, sign, text = parsed.groups()
        _check_column(rows, column)
        kept = [row for row in kept if _holds(row[column], sign, text, condition)]
    return kept


def _holds(value: Any, sign: str, text: str, condition: str) -> bool:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    if sign == "~":
        try:
            return _OPERATORS[sign](value, text)
        except re.error as error:
            raise FilterError(f"{condition!r}: {text!r} is not a regular expression: {error}") from error
    if isinstance(value, (int, float)):
        try:
            return _OPERATORS[sign](value, float(text))
        except ValueError:
            raise FilterError(f"{condition!r}: {text!r} is not a number") from None
    return _OPERATORS[sign](str(value) if not isinstance(value, (tuple, list)) else "x".join(map(str, value)), text)


def sort_rows(rows: Sequence[R], column: str | None) -> list[R]:
    """Return the rows in order of a column (``-column``: largest first), natural for texts, nan and missing last."""
    if column is None:
        return list(rows)
    name = column.removeprefix("-")
    _check_column(rows, name)

    def absent(row: Row) -> bool:
        return row[name] is None or (isinstance(row[name], float) and math.isnan(row[name]))

    known = [row for row in rows if not absent(row)]
    known.sort(key=lambda row: _natural(row[name]), reverse=column.startswith("-"))
    return known + [row for row in rows if absent(row)]


def _natural(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", value)]


def _check_column(rows: Sequence[Row], name: str) -> None:
    if rows and name not in rows[0]:
        raise FieldNotFoundError(f"no column {name!r}; there are {', '.join(rows[0])}.{did_you_mean(name, rows[0])}")
