"""The figures of the report: Bokeh models made from plain arrays, with all that they switch between inside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.layouts import column, row
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    DataRange1d,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
)
from bokeh.models.annotations import ColorBar, Legend, LegendItem
from bokeh.models.ui import UIElement
from bokeh.models.widgets import RadioButtonGroup, Select
from bokeh.palettes import RdBu11, Turbo256, Viridis256, interp_palette
from bokeh.plotting import figure
from numpy.typing import NDArray

__all__ = ["Run", "by_layer", "densities", "density", "heatmap", "over_steps", "runs"]

Floats = NDArray[np.float64]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Of Okabe and Ito, for readers with any colour vision."""
DASHES = ("solid", "dashed", "dotted", "dashdot", "dotdash")
WHOLE_MODEL = "whole model"


@dataclass(frozen=True, slots=True)
class Run:
    """Checkpoints that follow one another.

    Parameters
    ----------
    label : str
    models : tuple of int
        Positions of the models, each the parent of the next.
    fork_of : int, optional
        The model that the first of them came from, where that one goes on in another run.
    """

    label: str
    models: tuple[int, ...]
    fork_of: int | None = None


def runs(ids: Sequence[str], steps: Floats, parents: Sequence[Sequence[str]]) -> list[Run]:
    """Split models into runs.

    Parameters
    ----------
    ids : sequence of str
        In order of step.
    steps : (M,) array
        NaN where a model has none.
    parents : sequence of sequence of str
        The first parent that is among `ids` counts. A model without one follows the model of the nearest smaller
        step whose id differs from its own in digits only.

    Notes
    -----
    Of several children, the first whose id differs in digits only goes on with the parent's run, else the first; the
    others begin runs of their own.
    """
    place = {model_id: i for i, model_id in enumerate(ids)}
    stems = [_stem(model_id) for model_id in ids]
    before: list[int | None] = []
    for i, given in enumerate(parents):
        known = [place[p] for p in given if p in place and place[p] != i]
        if not known:
            earlier = [j for j, stem in enumerate(stems) if stem == stems[i] and steps[j] < steps[i]]
            known = sorted(earlier, key=lambda j: -float(steps[j]))
        before.append(known[0] if known else None)
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(before):
        if parent is not None:
            children.setdefault(parent, []).append(i)
    follows = {p: next((c for c in own if stems[c] == stems[p]), own[0]) for p, own in children.items()}
    starts = [i for i, parent in enumerate(before) if parent is None or follows[parent] != i]
    seen: set[int] = set()
    found: list[Run] = []
    for start in [*starts, *range(len(ids))]:  # the second part finds nothing unless parents go in a circle
        chain: list[int] = []
        at: int | None = start
        while at is not None and at not in seen:
            seen.add(at)
            chain.append(at)
            at = follows.get(at)
        if chain:
            found.append(Run(_label([ids[i] for i in chain], found), tuple(chain), before[start]))
    return found


def _stem(model_id: str) -> str:
    return re.sub(r"\d+", "#", model_id)


def _label(ids: Sequence[str], taken: Sequence[Run]) -> str:
    stems = {_stem(x) for x in ids}
    label = next(iter(stems)).replace("#", "").strip(" -_./=:") if len(stems) == 1 and len(ids) > 1 else ids[0]
    return label if label and label not in {run.label for run in taken} else ids[0]


def plain(text: str) -> str:
    """Return `text` with what Bokeh would take for TeX broken up: rendering TeX would fetch a script."""
    return re.sub(r"\\(?=[(\[])|\$(?=\$)", lambda found: found[0] + "\u200b", text)


def _figure(**options: Any) -> figure:
    fixed: dict[str, Any] = {
        "sizing_mode": "stretch_width",
        "height": 400,
        "toolbar_location": "above",
        "tools": "pan,box_zoom,wheel_zoom,reset,save",
        "active_scroll": None,
    }
    p = figure(**{**fixed, **options})
    p.toolbar.logo = None
    p.xgrid.grid_line_color = None
    p.ygrid.grid_line_color = "#e6eaee"
    p.outline_line_color = None
    p.axis.axis_label_text_font_style = "normal"
    p.axis.axis_line_color = p.axis.major_tick_line_color = "#8a94a0"
    p.axis.minor_tick_line_color = None
    return p


def _colours(n: int) -> list[str]:
    if n <= len(COLOURS):
        return list(COLOURS[:n])
    return [Turbo256[i] for i in np.linspace(20, 235, n).astype(int)]


def _legend(p: figure, groups: Mapping[str, list[Any]], title: str) -> None:
    items = [LegendItem(label={"value": plain(label)}, renderers=list(drawn)) for label, drawn in groups.items()]
    legend = Legend(
        items=items,
        title=title,
        click_policy="hide",
        border_line_color=None,
        label_text_font_size="12px",
        spacing=1,
        glyph_width=34,  # room for a dash
    )
    p.add_layout(legend, "right")


def _place_steps(steps: Floats) -> tuple[Floats, str]:
    """Return where steps lie on the axis and its label: log(1 + step) where they span orders of magnitude."""
    known = steps[np.isfinite(steps)]
    gaps = np.diff(np.unique(known))
    spread = gaps.size > 2 and known.min() >= 0 and gaps.max() > 5 * np.median(gaps)
    return (np.log10(1 + steps), "step (log scale)") if spread else (steps, "step")


def _label_steps(p: figure, x: Floats, steps: Floats, width: float) -> None:
    """Put a tick at each step, leaving out those too near to the one before."""
    ticks: list[float] = []
    for position, step in sorted({(float(a), float(b)) for a, b in zip(x, steps, strict=True) if np.isfinite(a)}):
        if not ticks or position - ticks[-1] >= width:
            ticks.append(position)
            p.xaxis.major_label_overrides[position] = f"{step:g}"
    p.xaxis.ticker = FixedTicker(ticks=ticks)


def _select(title: str, options: Mapping[str, str], width: int = 340) -> Select:
    listed: list[str | tuple[Any, str]] = [(k, plain(v)) for k, v in options.items()]
    return Select(title=title, value=next(iter(options)), options=listed, width=width)


def over_steps(
    ids: Sequence[str],
    steps: Floats,
    found: Sequence[Run],
    names: Sequence[str],
    values: Mapping[str, Floats],
    labels: Mapping[str, str],
) -> UIElement:
    """Return a field over steps: one colour per layer, one dash per run; a fork starts at the model it came from.

    Parameters
    ----------
    ids, steps : sequence of str, (M,) array
    found : sequence of Run
    names : sequence of str
        Layers to draw.
    values : mapping of field to (M, len(names)) or (M,) array
        A model-level field has one line for the whole model.
    labels : mapping of field to str
    """
    x, x_label = _place_steps(steps)
    series = [*names, *([WHOLE_MODEL] if any(v.ndim == 1 for v in values.values()) else [])]
    tables = {field: _series(v, len(names), len(series)) for field, v in values.items()}
    first = next(iter(values))
    p = _figure(x_axis_label=x_label, y_axis_label=plain(labels[first]))
    colours = [*_colours(len(names)), "#1c2430"]
    by_name: dict[str, list[Any]] = {name: [] for name in series}
    by_run: dict[str, list[Any]] = {}
    sources, rows = [], []
    for r, run in enumerate(found):
        members = [i for i in (run.fork_of, *run.models) if i is not None and np.isfinite(steps[i])]
        if not members:
            continue
        data: dict[str, Any] = {"x": x[members], "step": steps[members], "model": [plain(ids[i]) for i in members]}
        data |= {f"y{s}": tables[first][members, s] for s in range(len(series))}
        source = ColumnDataSource(data)
        sources.append(source)
        rows.append(members)
        for s, name in enumerate(series):
            style: dict[str, Any] = {"color": colours[s], "name": plain(name), "source": source}
            line = p.line("x", f"y{s}", line_width=2, line_dash=DASHES[r % len(DASHES)], **style)
            points = p.scatter("x", f"y{s}", size=6, **style)
            tips = [("layer", "$name"), ("model", "@model"), ("step", "@step"), ("value", f"@y{s}{{0.[00000]}}")]
            p.add_tools(HoverTool(renderers=[points], tooltips=tips, visible=False))
            by_name[name] += [line, points]
            by_run.setdefault(run.label, []).extend([line, points])
    _label_steps(p, x, steps, float(np.ptp(x[np.isfinite(x)])) / 18)
    _legend(p, by_name, "layer (click to hide)")
    if len(by_run) > 1:
        _legend(p, by_run, "run")
    choose = _select("Field", {field: labels[field] for field in values})
    code = """
        sources.forEach((source, r) => {
            const data = {...source.data};
            tables[this.value][r].forEach((y, s) => { data['y' + s] = y; });
            source.data = data;
        });
        axis.axis_label = labels[this.value];
    """
    switched = {field: [list(t[members].T) for members in rows] for field, t in tables.items()}
    texts = {field: plain(labels[field]) for field in values}
    args = {"sources": sources, "tables": switched, "labels": texts, "axis": p.yaxis[0]}
    choose.js_on_change("value", CustomJS(args=args, code=code))
    return column(choose, p, sizing_mode="stretch_width")


def _series(values: Floats, n: int, total: int) -> Floats:
    table = np.full((len(values), total), np.nan)
    if values.ndim == 1:
        table[:, -1] = values
    else:
        table[:, :n] = values
    return table


def by_layer(
    ids: Sequence[str], names: Sequence[str], values: Mapping[str, Floats], labels: Mapping[str, str]
) -> UIElement:
    """Return a field by layer, one line per model: the figure for models without steps."""
    first = next(iter(values))
    p = _figure(x_axis_label="layer", y_axis_label=plain(labels[first]), height=440)
    x = np.arange(len(names))
    source = ColumnDataSource({"x": x, "layer": [plain(n) for n in names]})
    drawn: dict[str, list[Any]] = {}
    for i, (model_id, colour) in enumerate(zip(ids, _colours(len(ids)), strict=True)):
        source.data[f"y{i}"] = values[first][i]
        style: dict[str, Any] = {"color": colour, "name": plain(model_id), "source": source}
        line = p.line("x", f"y{i}", line_width=1.5, line_alpha=0.6, **style)
        points = p.scatter("x", f"y{i}", size=7, **style)
        tips = [("model", "$name"), ("layer", "@layer"), ("value", f"@y{i}{{0.[00000]}}")]
        p.add_tools(HoverTool(renderers=[points], tooltips=tips, visible=False))
        drawn[model_id] = [line, points]
    _name_axis(p.xaxis, names, 30)
    p.xaxis.major_label_orientation = 0.9
    p.min_border_left = 130  # the first names reach out to the left
    if len(ids) > 1:
        _legend(p, drawn, "model")
    choose = _select("Field", {field: labels[field] for field in values})
    code = """
        const data = {...source.data};
        tables[this.value].forEach((y, i) => { data['y' + i] = y; });
        source.data = data;
        axis.axis_label = labels[this.value];
    """
    texts = {field: plain(labels[field]) for field in values}
    tables = {field: list(v) for field, v in values.items()}
    args = {"source": source, "tables": tables, "labels": texts, "axis": p.yaxis[0]}
    choose.js_on_change("value", CustomJS(args=args, code=code))
    return column(choose, p, sizing_mode="stretch_width")


def _name_axis(axis: Any, names: Sequence[str], most: int) -> None:
    every = -(-len(names) // most)
    ticks = list(range(0, len(names), every))
    axis.ticker = FixedTicker(ticks=ticks)
    axis.major_label_overrides = {i: plain(_short(names[i])) for i in ticks}
    axis.major_tick_line_color = None


def _short(name: str, most: int = 38) -> str:
    return name if len(name) <= most else "…" + name[-most + 1 :]


def density(spectra: Sequence[Floats]) -> tuple[Floats, list[Floats]]:
    """Return common edges and, for each spectrum, the share of its eigenvalues per decade in each bin.

    Parameters
    ----------
    spectra : sequence of (k,) arrays
        Those at most 1e-12 of the largest eigenvalue of all are left out of the bins, not of the shares.

    Returns
    -------
    edges : (b + 1,) array
        Evenly spaced in the logarithm; empty where no eigenvalue is positive.
    densities : list of (b,) arrays
    """
    positive = [s[np.isfinite(s) & (s > 0)] for s in spectra]
    largest = max((float(s.max()) for s in positive if s.size), default=0.0)
    positive = [s[s > 1e-12 * largest] for s in positive]
    every = np.concatenate([*positive, np.empty(0)])
    if not every.size:
        return np.empty(0), [np.empty(0) for _ in spectra]
    low, high = np.log10(every.min()), np.log10(every.max())
    if high - low < 0.1:
        low, high = low - 0.05, high + 0.05
    bins = int(np.clip(2 * np.sqrt(max(s.size for s in positive)), 10, 60))
    edges = np.linspace(low, high, bins + 1)
    width = edges[1] - edges[0]
    shares = [
        np.histogram(np.log10(s), edges)[0] / (max(1, int(np.isfinite(whole).sum())) * width)
        for s, whole in zip(positive, spectra, strict=True)
    ]
    return 10.0**edges, shares


def densities(ids: Sequence[str], spectra: Mapping[str, Sequence[Floats]], first: str) -> UIElement:
    """Return the density of eigenvalues of one layer, chosen from a list, in several models.

    Parameters
    ----------
    ids : sequence of str
        Labels of the models.
    spectra : mapping of name to sequence of arrays
        Eigenvalues of each layer, one array for each of `ids`; empty where a model lacks the layer.
    first : str
        The layer to show before another one is chosen.
    """
    tables = {name: _outlines(*density(own)) for name, own in spectra.items()}
    p = _figure(x_axis_label="eigenvalue λ = σ² / max(rows, columns)", y_axis_label="share of eigenvalues per decade",
                x_axis_type="log", y_range=DataRange1d(start=0))  # fmt: skip
    p.xgrid.grid_line_color = "#e6eaee"
    sources, drawn = [], {}
    for i, (label, colour) in enumerate(zip(ids, _colours(len(ids)), strict=True)):
        source = ColumnDataSource(tables[first][i])
        area = p.varea("x", 0, "y", source=source, color=colour, alpha=0.13)
        line = p.line("x", "y", source=source, color=colour, line_width=2, line_dash=DASHES[i % len(DASHES)])
        sources.append(source)
        drawn[label] = [area, line]
    _legend(p, drawn, "model (click to hide)")
    choose = _select("Layer", {name: name for name in tables}, 420)
    choose.value = first
    code = "sources.forEach((source, i) => { source.data = tables[this.value][i]; });"
    choose.js_on_change("value", CustomJS(args={"sources": sources, "tables": tables}, code=code))
    return column(choose, p, sizing_mode="stretch_width")


def _outlines(edges: Floats, shares: Sequence[Floats]) -> list[dict[str, Any]]:
    """Return each histogram as the corners of its outline."""
    x = np.repeat(edges, 2)
    return [{"x": x, "y": np.concatenate([[0.0], np.repeat(y, 2), [0.0]]) if x.size else x} for y in shares]


def heatmap(
    ids: Sequence[str], names: Sequence[str], values: Mapping[str, Floats], labels: Mapping[str, str]
) -> UIElement:
    """Return a name × model heatmap of a field, as it is or relative to the first model that has the layer.

    Parameters
    ----------
    ids, names : sequence of str
        Columns and rows; the first name is at the top.
    values : mapping of field to (M, N) array
    """
    m, n = len(ids), len(names)
    column_of, row_of = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    tables = {field: [np.asarray(t, np.float32).ravel() for t in (v, _relative(v))] for field, v in values.items()}
    limits = {field: [_limits(v), _limits(_relative(v), symmetric=True)] for field, v in values.items()}
    first = next(iter(values))
    z = tables[first][0]
    source = ColumnDataSource({"x": column_of.ravel(), "y": row_of.ravel(), "z": z})
    mapper = LinearColorMapper(
        palette=list(Viridis256), low=limits[first][0][0], high=limits[first][0][1], nan_color="#eceff2"
    )
    p = _figure(height=int(np.clip(110 + 24 * n, 220, 900)), x_range=(-0.5, m - 0.5), y_range=(n - 0.5, -0.5))
    p.grid.grid_line_color = None
    p.axis.axis_line_color = None
    cells = p.rect("x", "y", 1, 1, source=source, fill_color={"field": "z", "transform": mapper}, line_color="#ffffff",
                   line_width=0 if m * n > 2000 else 1)  # fmt: skip
    _name_axis(p.xaxis, ids, 40)
    _name_axis(p.yaxis, names, max(12, n if n <= 34 else 34))
    p.xaxis.major_label_orientation = 0.8
    look = "return names[Math.round(value)];"
    formats: dict[str, Any] = {
        "@x": CustomJSHover(args={"names": [plain(i) for i in ids]}, code=look),
        "@y": CustomJSHover(args={"names": [plain(i) for i in names]}, code=look),
    }
    tips = [("layer", "@y{custom}"), ("model", "@x{custom}"), ("value", "@z{0.[00000]}")]
    p.add_tools(HoverTool(renderers=[cells], tooltips=tips, formatters=formats, visible=False))
    p.add_layout(ColorBar(color_mapper=mapper, ticker=BasicTicker(desired_num_ticks=6), width=12), "right")
    choose = _select("Field", {field: labels[field] for field in values})
    kind = RadioButtonGroup(labels=["value", "relative to the first model"], active=0, align="end")
    code = """
        const k = kind.active;
        source.data = {...source.data, z: tables[choose.value][k]};
        mapper.palette = palettes[k];
        [mapper.low, mapper.high] = limits[choose.value][k];
    """
    args = {"source": source, "tables": tables, "limits": limits, "mapper": mapper, "choose": choose, "kind": kind,
            "palettes": [list(Viridis256), list(interp_palette(RdBu11, 201))]}  # fmt: skip
    switch = CustomJS(args=args, code=code)
    choose.js_on_change("value", switch)
    kind.js_on_change("active", switch)
    return column(row(choose, kind), p, sizing_mode="stretch_width")


def _relative(values: Floats) -> Floats:
    """Return (value - first) / |first| per column, the first being the first finite one."""
    known = np.isfinite(values)
    first = np.take_along_axis(values, known.argmax(0)[None], 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = (values - first) / np.abs(first)
    return np.where(np.isfinite(change), change, np.nan)


def _limits(values: Floats, *, symmetric: bool = False) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    if not known.size:
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    if symmetric:
        high = max(abs(low), abs(high)) or 1.0
        return -high, high
    return (low, high) if high > low else (low - 0.5, high + 0.5)
