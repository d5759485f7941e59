"""How exact every field is: ``python -m benchmarks.accuracy`` writes the table of ``docs/explanation/accuracy.md``.

Each field is compared with its independent definition (``tests/reference.py``: LAPACK in float64, then 30 to 50 digits)
on matrices of many kinds, in float64; and its value from float32 weights with that from the same weights in float64.
It takes some minutes: the definitions of the fits try every tail.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import testing
from diffract_dask.kernel import ROUNDING, SHAPE, WEIGHTS, Kernel, Registry
from diffract_dask.kernels import BUILTIN

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "accuracy.md"
sys.path.insert(0, str(ROOT / "tests"))

from reference import TABLE, Entry  # noqa: E402  (the table of definitions lies with the tests)

MARK = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.DOTALL)
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """The largest errors of one field, with the matrix that has the one against the definition."""

    field: str
    against_definition: float
    case: str
    float32: float
    tolerance: float


def matrices() -> dict[str, Matrix]:
    """Return matrices of the kinds that layers and hard cases are."""
    rng = np.random.default_rng(0)
    gauss = rng.standard_normal((60, 40))
    cases: dict[str, Any] = {
        "noise": gauss,
        "wide noise": gauss.T,
        "square noise": rng.standard_normal((48, 48)),
        "large mean": 1.0 + 0.1 * gauss,
        "heavy tails (t, 1.5)": rng.standard_t(1.5, (50, 40)),
        "signals in noise": gauss + 3 * np.outer(rng.standard_normal(60), rng.standard_normal(40)),
        "power law": testing.matrix_with_spectrum(testing.power_law_svals(40, 2.0), 80, 40),
        "rank 4": testing.matrix_with_spectrum([4.0, 3.0, 2.0, 1.0], 48, 32),
        "sparse": np.where(rng.random((60, 40)) < 0.8, 0.0, gauss),
        "orthogonal": testing.matrix_with_spectrum(np.ones(32), 32, 32),
        "Hilbert": testing.hilbert(12),
        "Kahan": testing.kahan(24),
        "Läuchli": testing.lauchli(4),
        "1e-30": 1e-30 * gauss,
        "1e30": 1e30 * gauss,
    }
    for model in "ab":
        with np.load(ROOT / "tests" / "data" / f"diffract_{model}.npz") as archive:
            chosen = [name for name in archive if archive[name].size <= 5000 and "constant" not in name]
            cases |= {f"golden {name} ({model})": archive[name] for name in chosen}
    return {name: np.asarray(w, np.float64) for name, w in cases.items()}


def values(w: NDArray[Any], names: Iterable[str], stored: Any = None) -> dict[str, Any]:
    """Return fields of one matrix with the rounding of the dtype `stored` (its own), by plain calls of the kernels."""
    registry = Registry(BUILTIN)
    rounding = np.asarray(np.finfo(stored or w.dtype).eps / 2)
    known: dict[str, Any] = {WEIGHTS: w, SHAPE: np.array(w.shape), ROUNDING: rounding}
    for kernel in registry.closure(names):
        made = kernel.function(*(known[name] for name in kernel.inputs))
        known.update(zip(kernel.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    return known


def unit(name: str, entry: Entry, w: Matrix) -> float:
    """Return the size that absolute errors of a field are compared with; 0 where only the value itself counts."""
    norm = float(np.linalg.norm(w, 2))
    if name in ("tpl_lambda", "tpl_lambda_error"):
        return max(w.shape) / norm**2
    if name == "tpl_scale" or (name.endswith("_ratio") and name != "aspect_ratio"):
        return 1.0
    if name == "esd_zero":
        return 0.0
    if entry.power == 2:
        return norm**2 / max(w.shape)
    if entry.power == 1:
        of_entries = name.startswith("weights_") and not name.endswith("svals")
        return float(np.abs(w).max()) if of_entries or name == "mp_bulk_std" else norm
    return 0.0


def error(got: Any, want: Any, size: float) -> float:
    """Return the largest error relative to value or `size`; infinite where one is a number and the other is not."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(got == want, 0.0, np.abs(got - want) / np.maximum(np.abs(want), size))
    return float(np.nanmax(relative, initial=0.0))


def measure(cases: Mapping[str, Matrix]) -> list[Row]:
    """Return the errors of every slice-level field that has a definition, largest over the cases."""
    names = [name for name, entry in TABLE.items() if entry.value is not None and entry.level == "slice"]
    worst = {name: (0.0, "") for name in names}
    single = dict.fromkeys(names, 0.0)
    for case, w in cases.items():
        double = values(w, names)
        rounded = w.astype(np.float32)
        fits = np.isfinite(rounded).all() and np.abs(rounded).max() > 1e-35
        narrow, exact = (values(x, names, np.float32) for x in (rounded, rounded.astype(np.float64)))
        for name in names:
            entry = TABLE[name]
            assert entry.value is not None
            worst[name] = max(worst[name], (error(double[name], entry.value(w), unit(name, entry, w)), case))
            if fits:
                single[name] = max(single[name], error(narrow[name], exact[name], unit(name, entry, w)))
    rows = [Row(name, *worst[name], single[name], TABLE[name].float32) for name in names]
    return rows + _model_rows(cases)


def _model_rows(cases: Mapping[str, Matrix]) -> list[Row]:
    """Return the errors of the model-level fields, over all cases as the slices of one model."""
    model = [w for case, w in cases.items() if "1e" not in case]
    rounded = [w.astype(np.float32) for w in model]
    rows = []
    for kernel in Registry(BUILTIN).kernels.values():
        if kernel.level != "model":
            continue

        def made(slices: Iterable[NDArray[Any]], stored: Any, kernel: Kernel = kernel) -> NDArray[np.float64]:
            inputs = [np.array([values(w, [field], stored)[field] for w in slices]) for field in kernel.inputs]
            return np.atleast_1d(kernel.function(*inputs))

        double, narrow = made(model, np.float64), made(rounded, np.float32)
        exact = made([w.astype(np.float64) for w in rounded], np.float32)
        for i, name in enumerate(kernel.outputs):
            value = TABLE[name].value
            assert value is not None
            against = error(double[i], value(model), 0.0)
            rows.append(Row(name, against, "all as one model", error(narrow[i], exact[i], 0.0), TABLE[name].float32))
    return rows


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| field | against its definition | worst on | float32 | tolerance in tests |", "|---|---|---|---|---|"]
    for row in rows:
        narrow = (row.float32, row.tolerance) if row.tolerance < np.inf else (np.nan, np.nan)
        figures = ["–" if np.isnan(x) else f"{x:.0e}" if x else "0" for x in (row.against_definition, *narrow)]
        case = row.case if row.against_definition else "–"
        lines.append(f"| `{row.field}` | {figures[0]} | {case} | {figures[1]} | {figures[2]} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and put the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    text = table(measure(matrices()))
    print(text)
    page = args.page.read_text(encoding="utf8")
    args.page.write_text(MARK.sub(lambda found: found[1] + text + "\n" + found[2], page), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
