"""Cells of the (model_id, name) table, and what they must hold.

Cells with equal content form one *class*: tied parameters, frozen layers of a fork, the same file added twice. Keys
depend on content alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from diffract_dask.kernel import GIVEN, SHAPE, Kernel, Keys, Registry, after_failure, mix

if TYPE_CHECKING:
    from diffract_dask.view import View

__all__ = ["Cells", "expected_key", "expected_keys", "shape_keys"]

Mask = NDArray[np.bool_]
Index = NDArray[np.intp]

_SHAPE_ROOT = np.uint64(0x5EED5A4E)


@dataclass(frozen=True, eq=False)
class Cells:
    """The analysed cells of a view and their classes of equal content.

    Attributes
    ----------
    model, name : (C,) int arrays
        Position of each cell in the view.
    of : (C,) int array
        Class of each cell.
    tie : (C,) int array
        Equal for parameters of one model that are tied to each other.
    weights, shapes : (K,) uint64 arrays
        Root keys of each class: of its content (0 unknown) and of its shape.
    rows, cols : (K,) int64 arrays
    lookup : (M, N) int array
        Cell at each position of the view, -1 where there is none.
    """

    model: Index
    name: Index
    of: Index
    tie: Index
    weights: Keys
    shapes: Keys
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    lookup: Index

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.weights)

    def of_model(self, position: int, chosen: Mask) -> Index:
        """Return the cells of one model that are in `chosen`; cells are in the order of models."""
        start, stop = np.searchsorted(self.model, [position, position + 1])
        found: Index = start + np.flatnonzero(chosen[start:stop])
        return found

    @cached_property
    def canonical(self) -> Mask:
        """Which cells are not tied to an earlier one of their model."""
        return self.distinct(np.ones(len(self.tie), bool))

    def distinct(self, chosen: Mask) -> Mask:
        """Return `chosen` without cells that are tied to an earlier chosen one."""
        at = np.flatnonzero(chosen)
        _, first = np.unique(self.tie[at], return_index=True)
        found = np.zeros(len(self.tie), bool)
        found[at[first]] = True
        return found

    @classmethod
    def of_view(cls, view: View) -> Cells:
        """Return the cells of `view`."""
        model, name = np.nonzero(view.analysed & view.present)
        digest = view.digest[model, name]
        own = view.canonical[model, name]
        flat = model * max(1, len(view.names)) + np.where(own < 0, name, own)
        known = digest != 0
        label = np.empty(len(model), np.intp)
        _, inverse = np.unique(digest[known], return_inverse=True)
        label[known] = inverse
        offset = int(inverse.max()) + 1 if inverse.size else 0
        _, inverse = np.unique(flat[~known], return_inverse=True)
        label[~known] = inverse + offset
        n = int(label.max()) + 1 if label.size else 0
        first = np.zeros(n, np.intp)
        first[label[::-1]] = np.arange(len(label))[::-1]
        rows = view.rows[model, name][first].astype(np.int64)
        cols = view.cols[model, name][first].astype(np.int64)
        lookup = np.full(view.present.shape, -1, np.intp)
        lookup[model, name] = np.arange(len(model))
        return cls(
            model,
            name,
            label,
            flat,
            digest[first],
            shape_keys(rows, cols),
            rows,
            cols,
            lookup,
        )


def shape_keys(rows: NDArray[np.int64], cols: NDArray[np.int64]) -> Keys:
    """Return the root keys of shapes, which are known before any weight is read."""
    one = np.uint64(1)
    return mix(_SHAPE_ROOT, [rows.astype(np.uint64) + one, cols.astype(np.uint64) + one])


def expected_keys(
    kernels: Iterable[Kernel],
    registry: Registry,
    roots: Mapping[str, np.uint64],
    weights: Keys,
    shapes: Keys,
    failed: Mapping[str, Mask],
) -> dict[str, Keys]:
    """Return the key that each slice-level kernel's values must have.

    Parameters
    ----------
    weights, shapes : uint64 arrays
        Root keys of the slices.
    failed : mapping of str to bool array
        On which slices a kernel's stored values are those of a failure.
    """
    keys: dict[str, Keys] = {}
    for kernel in kernels:
        if kernel.level == "slice":
            keys[kernel.name] = expected_key(kernel, registry, roots, weights, shapes, keys, failed)
    return keys


def expected_key(
    kernel: Kernel,
    registry: Registry,
    roots: Mapping[str, np.uint64],
    weights: Keys,
    shapes: Keys,
    keys: Mapping[str, Keys],
    failed: Mapping[str, Mask],
) -> Keys:
    """Return the key that one kernel's values must have, from the `keys` of the kernels before it."""
    inputs: list[Keys] = []
    for name in kernel.inputs:
        if name in GIVEN:
            inputs.append(shapes if name == SHAPE else weights)
        else:
            producer = registry.producer(name).name
            inputs.append(after_failure(keys[producer], failed[producer]) if producer in failed else keys[producer])
    return mix(roots[kernel.name], inputs or [shapes])
