"""Measure error and time of the routes over condition number and size, and draw them as SVG for the documentation.

``python -m benchmarks.plot_routes``: writes docs/explanation/routes-error.svg, routes-time.svg and routes.json.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import machine
from diffract_dask import linalg
from diffract_dask.blas import blas_threads
from diffract_dask.testing import matrix_with_spectrum

FOLDER = Path(__file__).resolve().parent.parent / "docs/explanation"
ROUTES = {"gram": "#0072b2", "tsqr": "#d55e00", "gesdd": "#009e73"}
Lines = dict[str, list[tuple[float, float]]]


def errors(n: int = 16, repeats: int = 3) -> Lines:
    """Return true error / σ₁ of each route by condition number, and the bound that it states."""
    import mpmath

    digits = mpmath.mp.clone()
    digits.dps = 40
    lines: Lines = {name: [] for route in ROUTES for name in (route, f"{route}, stated")}
    for power in range(0, 17, 2):
        worst = dict.fromkeys(lines, 1e-17)
        for seed in range(repeats):
            w = matrix_with_spectrum(np.logspace(0, -power, n), n, n, seed)
            squares = digits.eigsy(digits.matrix(w.T.tolist()) * digits.matrix(w.tolist()), eigvals_only=True)
            true = sorted(digits.sqrt(abs(x)) for x in squares)
            for route in ROUTES:
                values, error, _ = linalg.singular_values(w, method=route)
                off = max(abs(digits.mpf(float(v)) - t) for v, t in zip(values, true, strict=True)) / true[-1]
                worst[route] = max(worst[route], float(off))
                worst[f"{route}, stated"] = max(worst[f"{route}, stated"], float(error / values[-1]))
        for name, value in worst.items():
            lines[name].append((10.0**power, value))
    return lines


def times(sizes: Sequence[int] = (128, 256, 512, 1024), aspect: int = 4, repeats: int = 3) -> Lines:
    """Return the best of some times of each route, on matrices `aspect` times as tall as wide, with one BLAS thread."""
    lines: Lines = {route: [] for route in ROUTES}
    for k in sizes:
        w = np.random.default_rng(0).standard_normal((aspect * k, k))
        for route in ROUTES:
            best = math.inf
            with blas_threads(1):
                for _ in range(repeats):
                    start = time.perf_counter()
                    linalg.singular_values(w, method=route)
                    best = min(best, time.perf_counter() - start)
            lines[route].append((float(k), best))
    return lines


def svg(lines: Lines, title: str, x_label: str, y_label: str) -> str:
    """Return a plot with logarithmic axes; lines that are called “…, stated” are dashed."""
    left, top, width, height = 70, 40, 430, 260
    points = [point for line in lines.values() for point in line]
    (x0, x1), (y0, y1) = (
        (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))))
        for values in ([x for x, _ in points], [y for _, y in points])
    )

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (math.log10(x) - x0) / max(x1 - x0, 1), (math.log10(y) - y0) / max(y1 - y0, 1)
        return left + across * width, top + height - up * height

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 350" font-family="sans-serif" font-size="12">',
        '<rect width="640" height="350" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">{title}</text>',
        f'<text x="{left + width / 2}" y="342" text-anchor="middle">{x_label}</text>',
        f'<text x="16" y="{top + height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {top + height / 2})">{y_label}</text>',
    ]
    for power in range(x0, x1 + 1, max(1, (x1 - x0) // 8)):
        x, y = place(10.0**power, 10.0**y0)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">1e{power}</text>')
    for power in range(y0, y1 + 1, max(1, (y1 - y0) // 8)):
        x, y = place(10.0**x0, 10.0**power)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for number, (name, line) in enumerate(lines.items()):
        colour = ROUTES[name.split(",")[0]]
        dash = ' stroke-dasharray="5 4"' if "stated" in name else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y = top + 12 + 20 * number
        parts.append(f'<line x1="515" y1="{y}" x2="540" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="545" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Measure, and write the plots and their figures."""
    found = {"errors": errors(), "times": times()}
    about = "Error of singular values, float64, 16 × 16, geometric spectrum"
    plot = svg(found["errors"], about, "condition number", "largest error / σ₁")
    (FOLDER / "routes-error.svg").write_text(plot, encoding="utf8")
    about = "Time of singular values, float64, 4k × k, one BLAS thread"
    (FOLDER / "routes-time.svg").write_text(svg(found["times"], about, "k", "seconds"), encoding="utf8")
    facts = machine.facts()
    (FOLDER / "routes.json").write_text(json.dumps({"machine": facts, **found}, indent=1), encoding="utf8")


if __name__ == "__main__":
    main()
