"""What an artifact holds, in bounded memory and of bounded size: arrays reduced to a grid, the first rows, the text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.errors import ArtifactError, ArtifactNotFoundError, did_you_mean
from diffract_dask.runs.arrays import (
    PARTS,
    ArrayRef,
    Selection,
    blocks,
    fields_of,
    leading_index,
    numbers,
    plane,
    value_class,
)
from diffract_dask.runs.artifact_kinds import kind_of, reading
from diffract_dask.runs.encoding import encode, strict
from diffract_dask.runs.grids import Grid, Moments
from diffract_dask.runs.readers import Content

__all__ = ["Preview", "dataset_of", "listing", "plain", "preview", "pruned"]

READ_BYTES = 2**31
_ROWS = 50
_VALUES = 100
_TEXT = 2**18
_ITEMS = 2000
_STRING = 10_000
_LISTED = 10_000


@dataclass(frozen=True, slots=True)
class Preview:
    """What :func:`preview` returns.

    Parameters
    ----------
    name : str
        Of the file or folder.
    kind, view : str
        See :mod:`diffract_dask.runs.artifact_kinds`.
    dataset : str, optional
        The address that is shown.
    datasets : list of dict
        ``address``, ``shape``, ``dtype`` of everything in it.
    data : dict
        Depends on `view`; arrays in it are NumPy arrays.
    attrs : dict
        What the file says of itself.
    notes : list of str
        What was left out, and why.
    """

    name: str
    kind: str
    view: str
    dataset: str | None = None
    datasets: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self, *, packed: bool = False) -> dict[str, Any]:
        """Return plain data for strict JSON, as :func:`plain` does."""
        found: dict[str, Any] = plain({name: getattr(self, name) for name in self.__slots__}, packed=packed)
        return found


def plain(value: Any, *, packed: bool = False) -> Any:
    """Return arrays, NumPy's scalars and complex numbers as what strict JSON has.

    Numbers that are not finite are ``{"$float": "nan"}``. Arrays are lists; `packed`, grids and curves are float32 in
    base 64, ``{"$array": {"dtype": "<f4", "shape": …, "data": …}}``, which takes a quarter of the space.

    >>> plain({"a": np.array([1.0, np.nan]), "b": np.float32(0.5), "c": 1 + 2j})
    {'a': [1.0, {'$float': 'nan'}], 'b': 0.5, 'c': {'$complex': [1.0, 2.0]}}
    """
    if packed and isinstance(value, np.ndarray) and value.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return encode(value.astype("<f4"))
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item, packed=packed) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, packed=packed) for item in value]
    if isinstance(value, complex):
        return {"$complex": [strict(value.real), strict(value.imag)]}
    if isinstance(value, bytes):
        return value.decode("utf8", "backslashreplace")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return strict(value) if isinstance(value, str | int | float | None) else str(value)


def preview(
    path: str | Path,
    dataset: str | None = None,
    *,
    kind: str | None = None,
    index: Sequence[int] | None = None,
    cut: tuple[int | None, int | None] | None = None,
    part: str = "abs",
    target: int = 256,
) -> Preview:
    """Return what an artifact holds.

    Parameters
    ----------
    path : path
    dataset : str, optional
        Which array of several; default: a list of them, and the array itself if there is one.
    kind : str, optional
        Default: what its name or its first bytes say.
    index : sequence of int, optional
        Of the plane that is shown, of arrays with more than two axes: a number for each axis but the last two.
    cut : (int or None, int or None), optional
        Row and column of a matrix along which values are given; default: the middle.
    part : {"abs", "real", "imag", "phase"}
        Of complex numbers.
    target : int
        At most so many rows and columns; each is the mean, least and greatest of a block.

    Raises
    ------
    ArtifactNotFoundError, ArtifactError, MissingExtraError
    """
    path = Path(path)
    if part not in PARTS:
        raise ArtifactError(f"part is {part!r}; give one of {', '.join(PARTS)}")
    if target < 1:
        raise ArtifactError(f"target is {target}; give the greatest number of rows and columns to show")
    chosen = kind_of(path, kind)
    with reading(path.name), chosen.open(path) as content:
        told = Preview(path.name, chosen.name, _view(chosen.view, content), attrs=content.attrs, notes=content.notes)
        if content.text is not None:
            return replace(told, data=_text(content.text, told.notes))
        if content.has_document:
            return replace(told, data={"document": pruned(content.document, told.notes)})
        ref = dataset_of(content, dataset, path.name)
        told = replace(told, datasets=listing(content, told.notes))
        if content.models:
            told.attrs["models"] = content.models
        if ref is None:
            data = _rows(content.arrays) if chosen.view == "table" else {}
            return replace(told, data=data)
        if chosen.view == "image":
            ref = _brightness(ref)
        data = _first_bytes(ref) if chosen.view == "bytes" else _array(ref, index, cut, part, target)
        return replace(told, dataset=ref.address, data=data)


def _view(view: str, content: Content) -> str:
    return "text" if content.text is not None else view


# ------------------------------------------------------------------------------------------------- datasets


def dataset_of(content: Content, address: str | None, name: str) -> ArrayRef | None:
    """Return the array of an address, or the only one; None if there are several and none is named.

    Raises
    ------
    ArtifactNotFoundError
        Nothing has this address.
    """
    if address is None:
        return content.arrays[0] if len(content.arrays) == 1 else None
    wanted = address.strip("/")
    found = {ref.address.strip("/"): ref for ref in content.arrays}
    if wanted not in found:
        found |= {one.address.strip("/"): one for ref in content.arrays for one in fields_of(ref)}
    if wanted not in found:
        known = [*content.models, *(one or "''" for one in found)]
        hint = did_you_mean(wanted, known) or f" There are {', '.join(known[:20])}." * bool(known)
        raise ArtifactNotFoundError(f"{name} has no dataset {address!r}.{hint}")
    return found[wanted]


def listing(content: Content, notes: list[str]) -> list[dict[str, Any]]:
    """Return address, shape and type of every array."""
    if len(content.arrays) > _LISTED:
        notes.append(f"the first {_LISTED} of {len(content.arrays)} datasets are listed")
    return [
        {"address": ref.address, "shape": list(ref.shape), "dtype": ref.type_name}
        | ({"refusal": ref.refusal} if ref.refusal else {})
        for ref in content.arrays[:_LISTED]
    ]


def _rows(columns: Sequence[ArrayRef]) -> dict[str, Any]:
    """Return the first rows of a table."""
    rows = max((ref.shape[0] for ref in columns), default=0)
    shown = min(rows, _ROWS)
    cells = [_values(np.asarray(ref.read((slice(0, shown),)))) for ref in columns]
    return {
        "columns": [ref.address for ref in columns],
        "rows": [list(row) for row in zip(*cells, strict=True)],
        "total_rows": rows,
    }


def _values(values: NDArray[Any]) -> list[Any]:
    """Return values as JSON has them: times and texts as texts."""
    if value_class(values.dtype) in ("time", "text"):
        return [_cut(str(one)) for one in values.reshape(-1)]
    if value_class(values.dtype) in ("bytes", "fields"):
        return [_cut(repr(one.tobytes()) if values.dtype.names is None else str(one)) for one in values.reshape(-1)]
    return list(values.reshape(-1).tolist())


def _cut(text: str) -> str:
    return text if len(text) <= _STRING else text[: _STRING - 1] + "…"


def _array(
    ref: ArrayRef,
    index: Sequence[int] | None,
    cut: tuple[int | None, int | None] | None,
    part: str,
    target: int,
) -> dict[str, Any]:
    told: dict[str, Any] = {"shape": list(ref.shape), "dtype": ref.type_name, "attrs": dict(ref.attrs)}
    if ref.chunks is not None:
        told["chunks"] = list(ref.chunks)
    if ref.refusal:
        return told | {"form": "nothing", "note": ref.refusal}
    if ref.size == 0:
        return told | {"form": "empty"}
    kind = value_class(ref.dtype)
    if kind == "fields":
        fields = [{"address": f.address, "shape": list(f.shape), "dtype": f.type_name} for f in fields_of(ref)]
        return told | {"form": "fields", "fields": fields, "first": _first(ref)}
    if kind in ("text", "bytes") or not ref.shape:
        return told | {"form": "values", "first": _first(ref)}
    if kind == "complex":
        told["part"] = part
    at = leading_index(ref.shape, index)
    if at:
        told["index"] = list(at)
    return told | _plane(plane(ref, at), len(ref.shape) == 1, cut, part, target)


def _first(ref: ArrayRef) -> list[Any]:
    """Return the first entries in C order."""
    selection = next(blocks(ref.shape, ref.chunks, _VALUES), ())
    found = np.asarray(ref.read(selection))
    return _values(found.reshape(-1)[:_VALUES])


def _plane(
    ref: ArrayRef, vector: bool, cut: tuple[int | None, int | None] | None, part: str, target: int
) -> dict[str, Any]:
    rows, cols = ref.shape
    width = 4 * target if vector else target
    grid, moments = Grid((rows, cols), width), Moments()
    row, col = (0, 0) if vector else (_position(i, n) for i, n in zip(cut or (None, None), ref.shape, strict=True))
    across, down = Grid((1, cols), 4 * target), Grid((1, rows), 4 * target)
    every = max(1, math.ceil(ref.size * ref.dtype.itemsize / READ_BYTES))
    for number, (select_row, select_col) in enumerate(blocks(ref.shape, ref.chunks)):
        holds = not vector and (select_row.start <= row < select_row.stop)
        crosses = not vector and (select_col.start <= col < select_col.stop)
        if number % every and not holds:
            continue
        values = numbers(np.asarray(ref.read((select_row, select_col))), part)
        moments.add(values)
        grid.add(select_row.start, select_col.start, values)
        if holds:
            across.add(0, select_col.start, values[row - select_row.start][None])
        if crosses:
            down.add(0, select_row.start, values[:, col - select_col.start][None])
    told: dict[str, Any] = {"stats": moments.summary()}
    if every > 1:
        told["sampled"] = f"one block in {every}"
    if vector:
        return told | {"form": "curve", "curve": _curve(grid)}
    heatmap = {"rows": rows, "cols": cols, "step": list(grid.step), **grid.blocks()}
    cuts = {"row": row, "col": col, "horizontal": _curve(across), "vertical": _curve(down)}
    return told | {"form": "matrix", "heatmap": heatmap, "cut": cuts}


def _position(given: int | None, n: int) -> int:
    """Return the row or column of a cut, which is in the middle by default."""
    if given is None:
        return n // 2
    if not -n <= given < n:
        raise ArtifactError(f"there is no row or column {given} to cut along, only {n}")
    return given % n


def _curve(grid: Grid) -> dict[str, Any]:
    made = {key: values[0] for key, values in grid.blocks().items()}
    return {"n": grid.shape[1], "step": grid.step[1], "x": np.arange(0, grid.shape[1], grid.step[1]), **made}


# ------------------------------------------------------------------------------------------------- all else


def _brightness(ref: ArrayRef) -> ArrayRef:
    """Return an image as one matrix: the mean of its colours."""
    if len(ref.shape) == 2:
        return ref
    bands = 3 if ref.shape[2] >= 3 else 1

    def read(selection: Selection) -> NDArray[Any]:
        return np.asarray(ref.read((*selection, slice(0, bands))).mean(axis=-1))

    return replace(ref, shape=ref.shape[:2], dtype=np.dtype("f8"), read=read, stored=ref.type_name)


def _first_bytes(ref: ArrayRef) -> dict[str, Any]:
    first = ref.read((slice(0, min(ref.size, 256)),)).tobytes()
    return {"size": ref.size, "hex": first.hex(" ")}


def _text(text: str, notes: list[str]) -> dict[str, Any]:
    if len(text) > _TEXT:
        notes.append(f"the first {_TEXT} characters")
    return {"text": text[:_TEXT], "lines": text.count("\n") + (not text.endswith("\n") and bool(text))}


def pruned(document: Any, notes: list[str]) -> Any:
    """Return a document of at most 2000 values and no long texts; `notes` says so if something is left out."""
    left = [_ITEMS]

    def walk(value: Any, depth: int) -> Any:
        left[0] -= 1
        if isinstance(value, Mapping | list | tuple) and value and depth > 50:
            return "…"
        if isinstance(value, Mapping):
            found: dict[str, Any] = {}
            for key, item in value.items():
                if left[0] <= 0:
                    found["…"] = f"{len(value) - len(found)} more"
                    break
                found[str(key)] = walk(item, depth + 1)
            return found
        if isinstance(value, list | tuple):
            items: list[Any] = []
            for item in value:
                if left[0] <= 0:
                    items.append(f"… {len(value) - len(items)} more")
                    break
                items.append(walk(item, depth + 1))
            return items
        return _cut(value) if isinstance(value, str) else value

    made = walk(document, 0)
    if left[0] <= 0:
        notes.append(f"the first {_ITEMS} values")
    return made
