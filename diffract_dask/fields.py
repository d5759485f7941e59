"""What a field is: its declaration, its level and the table of statuses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

__all__ = ["MISSING", "STATUS_MEANING", "Dim", "Field", "Level", "Status"]

Level = Literal["slice", "model", "pair"]
"""Outer dimensions of a field: one value per slice, per model, or per pair of models."""

Dim = Literal["sval", "row", "col"]
"""Inner dimensions: ``sval`` has min(rows, cols) entries, ``row`` and ``col`` those of the slice."""


@dataclass(frozen=True, slots=True)
class Field:
    """Declaration of one named value; everything that documents or labels it is derived from here.

    Parameters
    ----------
    long_name : str
        For people: axis labels, tables.
    formula : str
        LaTeX, in the symbols of the field reference.
    reference : str
        Keys of ``docs/references.bib``, comma separated; empty for what needs none.
    units : str
        UDUNITS string; ``"1"`` for a pure number.
    dims : tuple of Dim
        Inner dimensions; empty for a scalar.
    dtype : str
        ``float64``, ``int64`` or ``bool``. Scalars are stored as float64, in which counts are exact.
    persist : bool
        False: lives only in the graph unless it is asked for by name.
    valid_range : tuple of float, optional
        Smallest and largest value that can occur.
    nan : str
        What NaN means here.
    """

    long_name: str
    formula: str = ""
    reference: str = ""
    units: str = "1"
    dims: tuple[Dim, ...] = ()
    dtype: str = "float64"
    persist: bool = True
    valid_range: tuple[float, float] | None = None
    nan: str = ""


class Status(IntEnum):
    """Why a value is as it is; stored beside every value."""

    OK = 0
    UNDEFINED = 1
    NON_FINITE = 2
    DEGENERATE = 3
    FEW_VALUES = 4
    LEADING_ONLY = 5
    FELL_BACK = 6
    NOT_APPLICABLE = 7
    OVER_BUDGET = 8
    FAILED = 9
    INGESTED = 10


MISSING = 255
"""Status of a value that was never computed (the fill value of the status arrays)."""

STATUS_MEANING: dict[Status, str] = {
    Status.OK: "computed",
    Status.UNDEFINED: "the quantity is not defined for this input (for example a ratio to a zero norm)",
    Status.NON_FINITE: "the weights hold NaN or infinity",
    Status.DEGENERATE: "the spectrum is degenerate (all values equal, zero, or fewer than two distinct)",
    Status.FEW_VALUES: "too few values for the estimate to mean anything",
    Status.LEADING_ONLY: "only the leading part of the spectrum is known",
    Status.FELL_BACK: "computed by a fallback, because the first method failed",
    Status.NOT_APPLICABLE: "the field does not apply to this parameter",
    Status.OVER_BUDGET: "not computed: it does not fit in the memory budget",
    Status.FAILED: "the kernel raised; the reason is kept with the model",
    Status.INGESTED: "given by the user, not computed",
}
