"""How two arrays differ: figures over all entries, and the differences reduced to a grid; read block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.runs.arrays import ArrayRef, blocks, fields_of, leading_index, numbers, plane, value_class
from diffract_dask.runs.grids import Floats, Grid

__all__ = ["Differences", "diff_arrays", "relative_difference"]

_FIRST = 10
_TINY = float(np.finfo(np.float64).tiny)  # normal: arithmetic with anything less is slow
_SHOWN_TEXT = 200


@dataclass(slots=True)
class Differences:
    """Figures about ``b - a``, gathered block by block; of complex numbers about ``|b - a|``.

    Sums are NumPy's own: those of BLAS start threads, which cost more than they save on blocks this small.
    Where both are finite the difference counts; NaN against NaN, and an infinity against the same, are equal;
    anything else that is not finite differs and is counted in `unequal_nonfinite`.
    """

    entries: int = 0
    differing: int = 0
    compared: int = 0
    unequal_nonfinite: int = 0
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    absolute: float = 0.0
    squares: float = 0.0
    squares_a: float = 0.0
    relative: float = 0.0
    largest: float = -1.0
    largest_at: tuple[int, ...] | None = None
    signed: bool = True

    def add(self, a: NDArray[Any], b: NDArray[Any], start: Sequence[int] = ()) -> Floats:
        """Take in a block of each, of one shape, whose first entry is `start`; return ``b - a``, NaN where left out."""
        self.entries += a.size
        apart, size_a, size_b = _apart(a, b)
        self.signed &= value_class(a.dtype) != "complex" and value_class(b.dtype) != "complex"
        with np.errstate(all="ignore"):
            if math.isfinite(float(apart.sum())) and math.isfinite(float(size_a.sum() + size_b.sum())):
                self._add_finite(a, b, apart, size_a, size_b, start)
            else:
                self._add_some(a, b, apart, size_a, size_b, start)
        return apart

    def _add_finite(
        self, a: NDArray[Any], b: NDArray[Any], apart: Floats, size_a: Floats, size_b: Floats, start: Sequence[int]
    ) -> None:
        self.differing += int(np.count_nonzero(a != b))
        self.compared += a.size
        self._figures(apart, size_a, size_b)
        self._find_largest(apart, start)

    def _add_some(
        self, a: NDArray[Any], b: NDArray[Any], apart: Floats, size_a: Floats, size_b: Floats, start: Sequence[int]
    ) -> None:
        finite = np.isfinite(size_a) & np.isfinite(size_b)
        missing = _is_missing(a) & _is_missing(b)
        unequal = (a != b) & ~missing
        self.differing += int(np.count_nonzero(unequal))
        self.unequal_nonfinite += int(np.count_nonzero(unequal & ~finite))
        apart[~finite] = np.nan
        n = int(np.count_nonzero(finite))
        self.compared += n
        if n:
            self._figures(apart[finite], size_a[finite], size_b[finite])
            self._find_largest(np.where(finite, apart, 0), start)

    def _figures(self, apart: Floats, size_a: Floats, size_b: Floats) -> None:
        self.low, self.high = min(self.low, float(apart.min())), max(self.high, float(apart.max()))
        self.total += float(apart.sum())
        apart, size_a, size_b = apart.ravel(), size_a.ravel(), size_b.ravel()
        self.squares += float(np.einsum("i,i->", apart, apart))
        self.squares_a += float(np.einsum("i,i->", size_a, size_a))
        size = np.abs(apart)
        self.absolute += float(size.sum())
        np.abs(size_a, out=size_a)
        np.abs(size_b, out=size_b)
        np.maximum(size_a, size_b, out=size_a)
        np.maximum(size_a, _TINY, out=size_a)  # 0 / 0 becomes 0
        np.divide(size, size_a, out=size)
        self.relative = max(self.relative, float(size.max()))

    def _find_largest(self, apart: Floats, start: Sequence[int]) -> None:
        for at in (int(apart.argmax()), int(apart.argmin())):
            size = abs(float(apart.flat[at]))
            if size > self.largest:
                index = np.unravel_index(at, apart.shape)
                offset = start or (0,) * apart.ndim
                self.largest = size
                self.largest_at = tuple(int(i) + s for i, s in zip(index, offset, strict=True))

    def summary(self) -> dict[str, Any]:
        """Return the figures by name; None where nothing could be compared."""
        n, known = self.compared, self.compared > 0
        whole = {
            "entries": self.entries,
            "differing": self.differing,
            "compared": n,
            "unequal_nonfinite": self.unequal_nonfinite,
        }
        rms_a = math.sqrt(self.squares_a)
        norm = math.sqrt(self.squares)
        return whole | {
            "min": self.low if known and self.signed else None,
            "max": self.high if known and self.signed else None,
            "mean": self.total / n if known and self.signed else None,
            "abs_max": max(abs(self.low), abs(self.high)) if known else None,
            "abs_max_at": list(self.largest_at) if self.largest > 0 and self.largest_at is not None else None,
            "abs_mean": self.absolute / n if known else None,
            "rms": math.sqrt(self.squares / n) if known else None,
            "rel_max": self.relative if known else None,
            "rel_norm": relative_difference(norm, rms_a) if known else None,
        }


def relative_difference(difference: float, size: float) -> float:
    """Return ``‖b - a‖ / ‖a‖``: 0 where both are 0, infinite where only `a` is."""
    return difference / size if size else (0.0 if not difference else math.inf)


def _apart(a: NDArray[Any], b: NDArray[Any]) -> tuple[Floats, Floats, Floats]:
    """Return ``b - a`` in float64, and the two (of complex numbers their sizes) as new arrays."""
    with np.errstate(all="ignore"):
        if "complex" in (value_class(a.dtype), value_class(b.dtype)):
            wide_a, wide_b = a.astype(np.complex128), b.astype(np.complex128)
            return np.abs(wide_b - wide_a), np.abs(wide_a), np.abs(wide_b)
        if a.dtype.itemsize == 8 and b.dtype.itemsize == 8 and a.dtype.kind + b.dtype.kind in ("ii", "uu", "iu", "ui"):
            exact = b.astype(np.longdouble) - a.astype(np.longdouble)
            return exact.astype(np.float64), a.astype(np.float64), b.astype(np.float64)
        size_a, size_b = numbers(a), numbers(b)
        size_a = size_a.copy() if np.shares_memory(size_a, a) else size_a
        size_b = size_b.copy() if np.shares_memory(size_b, b) else size_b
        return size_b - size_a, size_a, size_b


def _is_missing(values: NDArray[Any]) -> NDArray[np.bool_]:
    kind = value_class(values.dtype)
    if kind == "time":
        return np.asarray(np.isnat(values), np.bool_)
    return np.isnan(values) if values.dtype.kind in "fc" else np.zeros(values.shape, np.bool_)


# ------------------------------------------------------------------------------------------------- two arrays


def diff_arrays(
    a: ArrayRef, b: ArrayRef, *, index: Sequence[int] | None = None, target: int = 256, bands: bool = False
) -> dict[str, Any]:
    """Return how two arrays differ.

    Parameters
    ----------
    a, b : ArrayRef
    index : sequence of int, optional
        Of the plane that the grid shows, of arrays with more than two axes; default: that of the largest difference.
    target : int
        Rows and columns of the grid; 0: no grid.
    bands : bool
        A third axis holds the channels of an image; the grid shows the channel that differs most.

    Returns
    -------
    dict
        ``shape_a``, ``shape_b``, ``dtype_a``, ``dtype_b``, ``equal``; then, unless ``note`` says why not,
        ``stats`` (:meth:`Differences.summary`) and ``heatmap`` or, of a vector, ``overlay``; of a structured array
        ``fields``, of texts ``first``.
    """
    told: dict[str, Any] = {
        "shape_a": list(a.shape),
        "shape_b": list(b.shape),
        "dtype_a": a.type_name,
        "dtype_b": b.type_name,
        "equal": False,
    }
    if a.refusal or b.refusal:
        return told | {"equal": None, "note": f"not compared: {a.refusal or b.refusal}"}
    if a.dtype.names is not None and b.dtype.names is not None:
        return told | _diff_fields(a, b, index, target)
    if a.shape != b.shape:
        return told | {"note": f"the shapes differ: {list(a.shape)} and {list(b.shape)}"}
    kinds = {value_class(a.dtype), value_class(b.dtype)}
    if kinds <= {"number", "complex"} or (kinds == {"time"} and a.dtype == b.dtype):
        return told | _diff_numbers(a, b, index, target, bands)
    if len(kinds) > 1:
        return told | {"note": f"the types {a.type_name} and {b.type_name} cannot be compared"}
    return told | _diff_texts(a, b)


def _pairs(a: ArrayRef, b: ArrayRef) -> Iterator[tuple[tuple[int, ...], NDArray[Any], NDArray[Any]]]:
    for selection in blocks(a.shape, a.chunks or b.chunks):
        yield tuple(s.start for s in selection), np.asarray(a.read(selection)), np.asarray(b.read(selection))


def _diff_numbers(
    a: ArrayRef, b: ArrayRef, index: Sequence[int] | None, target: int, bands: bool = False
) -> dict[str, Any]:
    ndim = len(a.shape)
    bands = bands and ndim == 3
    flat = bool(target) and (ndim <= 2 or bands) and 0 not in a.shape
    found, grid, curves = Differences(), None, None
    if flat:
        a, b = (a, b) if bands else (plane(a), plane(b))
        grid = Grid((a.shape[0], a.shape[1]), target if ndim > 1 else 4 * target)
        curves = (Grid(grid.shape, grid.target), Grid(grid.shape, grid.target)) if ndim == 1 else None
    for start, block_a, block_b in _pairs(a, b):
        apart = found.add(block_a, block_b, start)
        if grid is not None:
            grid.add(start[0], start[1], _most(apart) if bands else apart)
        if curves is not None:
            curves[0].add(start[0], start[1], numbers(block_a))
            curves[1].add(start[0], start[1], numbers(block_b))
    if found.largest_at is not None and flat and ndim < 2:
        found.largest_at = found.largest_at[2 - ndim :]
    told: dict[str, Any] = {"equal": found.differing == 0 and a.dtype == b.dtype, "stats": found.summary()}
    if ndim == 0:
        told |= {"a": _scalar(a), "b": _scalar(b)}
    elif curves is not None and grid is not None:
        told["overlay"] = _overlay(grid, curves)
    elif grid is not None:
        told["heatmap"] = _heatmap(grid)
    elif ndim > 2 and target and found.entries:
        at = leading_index(a.shape, index if index is not None else (found.largest_at or ())[: ndim - 2])
        inner = _diff_numbers(plane(a, at), plane(b, at), None, target)
        told["heatmap"] = inner["heatmap"] | {"index": list(at)}
    return told


def _most(apart: Floats) -> Floats:
    """Return the entry of the greatest size along the last axis."""
    at = np.argmax(np.abs(np.nan_to_num(apart)), axis=-1, keepdims=True)
    return np.asarray(np.take_along_axis(apart, at, axis=-1)[..., 0])


def _scalar(ref: ArrayRef) -> Any:
    value = ref.whole().reshape(-1)[0]
    return value.item() if value_class(ref.dtype) in ("number", "complex") else str(value)


def _heatmap(grid: Grid) -> dict[str, Any]:
    made = grid.blocks()
    size = np.fmax(np.abs(made["min"]), np.abs(made["max"]))
    return {
        "rows": grid.shape[0],
        "cols": grid.shape[1],
        "step": list(grid.step),
        "mean": made["mean"],
        "abs_max": size,
    }


def _overlay(grid: Grid, curves: tuple[Grid, Grid]) -> dict[str, Any]:
    a, b, apart = (one.blocks() for one in (*curves, grid))
    step = grid.step[1]
    told = {"n": grid.shape[1], "step": step, "x": np.arange(0, grid.shape[1], step)}
    for name, made in (("a", a), ("b", b), ("difference", apart)):
        told[name] = {key: values[0] for key, values in made.items()}
    return told


def _diff_fields(a: ArrayRef, b: ArrayRef, index: Sequence[int] | None, target: int) -> dict[str, Any]:
    ours, theirs = ({one.address: one for one in fields_of(ref)} for ref in (a, b))
    fields = {
        name: diff_arrays(one, theirs[name], index=index, target=target) for name, one in ours.items() if name in theirs
    }
    only_a, only_b = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
    equal = not only_a and not only_b and all(one["equal"] for one in fields.values())
    return {"equal": equal, "fields": fields, "only_in_a": only_a, "only_in_b": only_b}


def _diff_texts(a: ArrayRef, b: ArrayRef) -> dict[str, Any]:
    """Compare texts or raw bytes for equality, and show the first that differ."""
    entries = differing = 0
    first: list[dict[str, Any]] = []
    for start, block_a, block_b in _pairs(a, b):
        if value_class(block_a.dtype) == "bytes":
            block_a, block_b = (
                np.array([x.tobytes() for x in y.reshape(-1)], object).reshape(y.shape) for y in (block_a, block_b)
            )
        unequal = np.asarray(block_a != block_b, bool).reshape(block_a.shape)
        entries += unequal.size
        differing += int(np.count_nonzero(unequal))
        for at in np.argwhere(unequal)[: _FIRST - len(first)]:
            place = tuple(int(i) for i in at)
            shown = {name: _shown(block[place]) for name, block in (("a", block_a), ("b", block_b))}
            first.append({"at": [i + s for i, s in zip(place, start, strict=True)], **shown})
    return {"equal": not differing, "stats": {"entries": entries, "differing": differing}, "first": first}


def _shown(value: Any) -> str:
    text = value.decode("utf8", "backslashreplace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= _SHOWN_TEXT else text[: _SHOWN_TEXT - 1] + "…"
