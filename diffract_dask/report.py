"""A report: one HTML file with tables and interactive figures that opens anywhere, without a network.

It reads what a session's store holds and computes nothing.
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diffract_dask import __version__
from diffract_dask.catalog import SKIP_MEANING
from diffract_dask.terminal import format_number

if TYPE_CHECKING:
    import pandas as pd

    from diffract_dask.report_figures import Run

__all__ = ["report"]

Floats = NDArray[np.float64]

SVALS = "weights_svals"
PREFERRED = ("stable_rank", "effective_rank", "l2_norm", "frob_norm")
MOST_LINES = 12
MOST_SPECTRA = 60
MOST_ROWS = 250
MOST_COLUMNS = 200
MOST_MODELS = 8
MOST_HEATMAP_FIELDS = 20
MOST_CELLS = 220_000
"""Cells of all heatmaps together; float32 in base64, twice (values and changes)."""


class Source(Protocol):
    """What the report needs of a session."""

    @property
    def models(self) -> Any: ...

    @property
    def compute(self) -> Any: ...

    @property
    def results(self) -> Any: ...

    def filter(self, model_ids: Any = None) -> Source: ...


@dataclass(frozen=True, slots=True)
class Head:
    text: str
    number: bool = False
    code: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    heads: list[Head]
    rows: list[list[Cell]]
    left_out: str = ""


@dataclass(slots=True)
class Section:
    anchor: str
    title: str
    text: list[str]
    figure: Any = ""
    note: str = ""
    tables: list[Table] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Content:
    """The stored values as plain arrays over models and layers (parameters that are analysed in some model)."""

    ids: list[str]
    steps: Floats
    runs: list[Run]
    names: list[str]
    sizes: NDArray[np.int64]
    values: dict[str, Floats]
    attrs: dict[str, Mapping[str, Any]]
    parameters: pd.DataFrame
    reasons: dict[str, NDArray[Any]]

    @property
    def stepped(self) -> bool:
        """Whether at least two different steps are known, so that there is a step axis."""
        return len(np.unique(self.steps[np.isfinite(self.steps)])) > 1

    @property
    def per_layer(self) -> dict[str, Floats]:
        """Slice-level fields with at least one number."""
        return {k: v for k, v in self.values.items() if v.ndim == 2 and np.isfinite(v).any()}

    @property
    def per_model(self) -> dict[str, Floats]:
        """Model-level fields with at least one number."""
        return {k: v for k, v in self.values.items() if v.ndim == 1 and np.isfinite(v).any()}

    @property
    def labels(self) -> dict[str, str]:
        """What figures call the fields."""
        return {k: f"{a.get('long_name') or k} ({k})" for k, a in self.attrs.items()}

    @property
    def ends(self) -> list[int]:
        """The first model and the last of every run: those whose spectra are worth comparing."""
        order = [i for run in self.runs for i in run.models]
        last = [run.models[-1] for run in self.runs]
        return list(dict.fromkeys([*order[:1], *last]))[:5]


def report(
    session: Source,
    path: str | Path,
    fields: Iterable[str] | None = None,
    *,
    title: str = "Spectral report",
) -> Path:
    """Write a report of what a session's store holds.

    Parameters
    ----------
    session : Session
        Or a filtered one: the report covers its scope.
    path : path
        The HTML file; replaced if it exists.
    fields : iterable of str, optional
        Fields to show. Default: every scalar field that has values.
    title : str

    Returns
    -------
    Path
        The file: one page of 2 to 5 MB, with all scripts and data inside.

    Notes
    -----
    Large stores are shown in part (the 12 largest layers as lines, up to 200 models in a heatmap), and the page says
    so. Singular values are needed for the densities: ``session.compute.apply("weights_svals")``.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources
    from jinja2 import Environment

    content = _content(session, fields)
    sections = [*_figures(session, content), *_tables(session, content)]
    drawn = {s.anchor: s.figure for s in sections if s.figure}
    script, divs = components(drawn) if drawn else ("", {})
    for section in sections:
        section.figure = divs.get(section.anchor, "")
    resources = Resources(mode="inline", components=["bokeh", "bokeh-widgets"]).render() if drawn else ""
    template = (files("diffract_dask") / "data" / "report.html.jinja").read_text(encoding="utf8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    html = page.render(
        title=title,
        lead=_lead(content),
        facts=_facts(content),
        notices=_notices(content),
        sections=sections,
        about=_about(session),
        version=__version__,
        resources=resources,
        script=script,
    )
    path = Path(path)
    path.write_text(html, encoding="utf8")
    return path


# ------------------------------------------------------------------------------------------- what is there


def _content(session: Source, fields: Iterable[str] | None) -> Content:
    from diffract_dask.report_figures import runs

    asked = list(fields or ())
    dataset = session.results.dataset(*asked)
    scalars = [str(k) for k, v in dataset.data_vars.items() if v.dims in (("model_id", "name"), ("model_id",))]
    scalars = [k for k in scalars if k in asked or (not asked and not k.endswith("_size"))]
    ids = [str(i) for i in dataset["model_id"].values]
    steps = np.asarray(dataset["step"].values, np.float64)
    table = session.models.parameters()
    analysed = {name for name, reason in zip(table["name"], table["skip_reason"], strict=True) if not reason}
    keep = np.array([str(n) in analysed for n in dataset["name"].values], bool)
    sizes = np.nan_to_num(dataset["rows"].values * dataset["cols"].values).max(0, initial=0)
    names = [str(n) for n in dataset["name"].values[keep]]
    values = {k: np.asarray(dataset[k].values, np.float64) for k in scalars}
    values = {k: v[:, keep] if v.ndim == 2 else v for k, v in values.items()}
    return Content(
        ids=ids,
        steps=steps,
        runs=runs(ids, steps, [_parents(str(p)) for p in dataset["parent"].values]),
        names=names,
        sizes=sizes[keep].astype(np.int64),
        values=values,
        attrs={k: dict(dataset[k].attrs) for k in scalars},
        parameters=table,
        reasons=_reasons(session, values, names),
    )


def _parents(text: str) -> list[str]:
    """Return the parents of a model: one is stored as it is, several as a JSON list."""
    if text.startswith("["):
        try:
            return [str(p) for p in json.loads(text)]
        except ValueError:
            pass
    return [text] if text else []


def _reasons(session: Source, values: Mapping[str, Floats], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return, per slice-level field, why a value is not there, as texts (model, layer); empty where it is."""
    reasons = {k: np.full(v.shape, "", object) for k, v in values.items() if v.ndim == 2}
    gaps = [k for k in reasons if not np.isfinite(values[k]).all()]
    if gaps and names:
        status = session.results.status(*gaps).sel(name=list(names)).transpose("field", "model_id", "name")
        for k, state, reason in zip(gaps, status["state"].values, status["reason"].values, strict=True):
            there = np.isfinite(values[k]) | (state == "")
            reasons[k] = np.where(there, "", np.where(reason == "", state, reason))
    return reasons


def _spectra(session: Source, content: Content) -> tuple[list[str], dict[str, list[Floats]]]:
    """Return the eigenvalues of the largest layers in the models at the ends of the runs."""
    ids = [content.ids[i] for i in content.ends]
    if not ids:
        return [], {}
    exact = ["re:" + re.escape(model_id) for model_id in ids]
    dataset = session.filter(model_ids=exact).results.dataset(SVALS)
    at = {str(n): j for j, n in enumerate(dataset["name"].values)}
    order = [list(dataset["model_id"].values).index(model_id) for model_id in ids]
    spectra = {}
    for name in _largest(content, MOST_SPECTRA):
        if name in at:
            greater = np.fmax(dataset["rows"].values[:, at[name]], dataset["cols"].values[:, at[name]])
            svals = dataset[SVALS].isel(name=at[name]).values
            own = [svals[i][np.isfinite(svals[i])] ** 2 / greater[i] for i in order]
            if any(s.size for s in own):
                spectra[name] = own
    return ids, spectra


def _largest(content: Content, most: int) -> list[str]:
    """Return the `most` layers with the most entries, in the order in which the store has them."""
    chosen = np.sort(np.argsort(-content.sizes, kind="stable")[:most])
    return [content.names[j] for j in chosen]


def _order(fields: Iterable[str]) -> list[str]:
    return sorted(fields, key=lambda f: (PREFERRED.index(f) if f in PREFERRED else len(PREFERRED), f))


# ------------------------------------------------------------------------------------------- figures


def _figures(session: Source, content: Content) -> list[Section]:
    sections = []
    per_layer = {k: content.per_layer[k] for k in _order(content.per_layer)}
    per_model = {k: content.per_model[k] for k in _order(content.per_model)}
    if content.stepped and (per_layer or per_model):
        sections.append(_over_steps(content, per_layer | per_model))
    elif per_layer:
        sections.append(_by_layer(content, per_layer))
    ids, spectra = _spectra(session, content)
    sections.append(_densities(content, ids, spectra))
    if per_layer and len(content.ids) > 1:
        sections.append(_heatmap(content, per_layer))
    return sections


def _over_steps(content: Content, values: Mapping[str, Floats]) -> Section:
    from diffract_dask.report_figures import over_steps

    names = _largest(content, MOST_LINES)
    at = [content.names.index(n) for n in names]
    shown = {k: v[:, at] if v.ndim == 2 else v for k, v in values.items()}
    text = ["One line per layer. Choose a field above the figure, click the legend to hide a layer, hover for values."]
    if any(run.fork_of is not None for run in content.runs):
        text.append("A fork has a dash of its own and starts at the checkpoint that it was made from.")
    figure = over_steps(content.ids, content.steps, content.runs, names, shown, content.labels)
    return Section("steps", "Over training steps", text, figure, _only(len(names), len(content.names), "layers"))


def _by_layer(content: Content, values: Mapping[str, Floats]) -> Section:
    from diffract_dask.report_figures import by_layer

    names = _largest(content, MOST_COLUMNS)
    at = [content.names.index(n) for n in names]
    models = content.ends if len(content.ids) > MOST_MODELS else range(len(content.ids))
    shown = {k: v[np.ix_(list(models), at)] for k, v in values.items()}
    text = ["One line per model over its layers, in order of their names. Choose a field above the figure."]
    figure = by_layer([content.ids[i] for i in models], names, shown, content.labels)
    note = _only(len(models), len(content.ids), "models") + _only(len(names), len(content.names), "layers")
    return Section("layers", "By layer", text, figure, note)


def _densities(content: Content, ids: Sequence[str], spectra: Mapping[str, list[Floats]]) -> Section:
    from diffract_dask.report_figures import densities

    text = [
        "How the eigenvalues λ = σ² / max(rows, columns) of a layer are spread, on a logarithmic axis. Random weights "
        "have a bounded bulk. Training often adds large eigenvalues to the right of it; weight decay moves what is not "
        "needed to the left."
    ]
    if not spectra:
        text.append(f"Singular values are not stored. Compute them: session.compute.apply({SVALS!r}).")
        return Section("density", "Eigenvalue density", text)
    label = {i: m if np.isnan(content.steps[i]) else f"{m} (step {content.steps[i]:g})" for i, m in
             enumerate(content.ids)}  # fmt: skip
    figure = densities([label[content.ids.index(m)] for m in ids], spectra, _telling(spectra))
    text.append("Shown: the first model, and the last one of each run." if len(ids) > 1 else f"Shown: {ids[0]}.")
    return Section("density", "Eigenvalue density", text, figure, _only(len(spectra), len(content.names), "layers"))


def _telling(spectra: Mapping[str, list[Floats]]) -> str:
    """Return the layer to show first: of those with many eigenvalues, where the largest one differs most."""

    def count(name: str) -> int:
        return max(s.size for s in spectra[name])

    def spread(name: str) -> float:
        top = [float(s.max()) for s in spectra[name] if s.size and s.max() > 0]
        return max(top) / min(top) if top else 0.0

    enough = max(map(count, spectra)) / 2
    return max((name for name in spectra if count(name) >= enough), key=spread)


def _heatmap(content: Content, values: Mapping[str, Floats]) -> Section:
    from diffract_dask.report_figures import heatmap

    order = [i for run in content.runs for i in run.models]
    if len(order) > MOST_COLUMNS:
        order = [order[i] for i in np.unique(np.linspace(0, len(order) - 1, MOST_COLUMNS).astype(int))]
    fields = list(values)[:MOST_HEATMAP_FIELDS]
    rows = int(np.clip(MOST_CELLS // (len(order) * len(fields)), 5, 120))
    names = _largest(content, rows)
    at = [content.names.index(n) for n in names]
    shown = {k: values[k][np.ix_(order, at)] for k in fields}
    ids = [content.ids[i] for i in order]
    text = [
        f"Layers down, models across{', run after run in order of step' if content.stepped else ''}. Relative to the "
        "first model, a layer's own change shows whatever its size: 0.5 is half as much again, -0.5 is half."
    ]
    note = _only(len(names), len(content.names), "layers") + _only(len(ids), len(content.ids), "models")
    note += _only(len(fields), len(values), "fields")
    return Section("heatmap", "Layers and models" if not content.stepped else "Layers and steps", text,
                   heatmap(ids, names, shown, content.labels), note)  # fmt: skip


def _only(shown: int, there: int, what: str) -> str:
    return f"Shown are {shown} of {there} {what}. " if shown < there else ""


# ------------------------------------------------------------------------------------------- tables and texts


def _tables(session: Source, content: Content) -> list[Section]:
    sections = [_models(session, content)]
    if content.per_layer or content.per_model:
        sections.append(_values(content))
    sections.append(_parameters(content))
    missing = _missing(content)
    if missing is not None:
        sections.append(missing)
    if content.values:
        sections.append(_definitions(session, content))
    return sections


def _table(heads: list[Head], rows: list[list[Any]], what: str) -> Table:
    """Return a table without the columns that are empty throughout."""
    cells = [[c if isinstance(c, Cell) else Cell(_text(c)) for c in row] for row in rows[:MOST_ROWS]]
    used = [j for j in range(len(heads)) if j == 0 or any(row[j].text for row in cells)]
    shown = [[row[j] for j in used] for row in cells]
    return Table([heads[j] for j in used], shown, _only(len(cells), len(rows), what))


def _text(value: Any) -> str:
    if isinstance(value, float) and not np.isfinite(value):
        return "–"
    return format_number(value.item() if isinstance(value, np.generic) else value)


def _models(session: Source, content: Content) -> Section:
    attrs = [dict(session.models.attrs(model_id)) for model_id in content.ids[:MOST_ROWS]]
    known = {"model_id", "step", "parent", "source", "framework", "added", "link"}
    free = list(dict.fromkeys(k for a in attrs for k, v in _free(a, known).items() if isinstance(v, str | int | float)))
    counted = content.parameters.groupby("model_id", sort=False)
    size, total = counted.size(), counted["nbytes"].sum()
    used = content.parameters[content.parameters["skip_reason"] == ""].groupby("model_id").size()
    run_of = {i: run.label for run in content.runs for i in run.models}
    heads = [Head("model"), Head("step", number=True), Head("run"), Head("parent"), Head("parameters", number=True),
             Head("analysed", number=True), Head("MB", number=True), *(Head(k, number=True) for k in free[:8]),
             Head("added")]  # fmt: skip
    rows = []
    for i, (model_id, own) in enumerate(zip(content.ids, attrs, strict=False)):
        parent = own.get("parent") or ""
        rows.append([
            model_id, float(content.steps[i]), run_of.get(i, ""),
            parent if isinstance(parent, str) else ", ".join(parent), int(size.get(model_id, 0)),
            int(used.get(model_id, 0)), float(total.get(model_id, 0)) / 1e6,
            *(_free(own, known).get(k, "") for k in free[:8]), str(own.get("added", ""))[:19].replace("T", " "),
        ])  # fmt: skip
    table = _table(heads, rows, "models")
    return Section("models", "Models", [f"{_count(len(content.ids), 'checkpoint')}, in order of step."], tables=[table])


def _free(attrs: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the attributes that the user gave, without what the command line notes of a file."""
    return {k: v for k, v in attrs.items() if k not in known and not k.startswith("file_")}


def _values(content: Content) -> Section:
    tables = []
    last = content.ends[-1]
    shown = [run.models[-1] for run in content.runs][:4] if content.stepped else content.ends[:4]
    for i in shown:
        fields = _order(content.per_layer)
        heads = [Head(f"{content.ids[i]}: layer", code=True)]
        heads += [Head(k, number=True, title=str(content.attrs[k].get("long_name", ""))) for k in fields]
        rows = [
            [name, *(_cell(content, k, i, j) for k in fields)]
            for j, name in enumerate(content.names)
            if any(np.isfinite(content.values[k][i, j]) or content.reasons[k][i, j] for k in fields)
        ]
        if fields and rows:
            tables.append(_table(heads, rows, "layers"))
    text = ["Values of the last model of each run." if content.stepped else f"Values of {content.ids[last]}."]
    text.append("A dash is a value that is not there; hover over an underlined one for the reason.")
    if content.per_model:
        fields = _order(content.per_model)
        heads = [Head("whole model"), *(Head(k, number=True) for k in fields)]
        rows = [[m, *(float(content.values[k][i]) for k in fields)] for i, m in enumerate(content.ids)]
        tables.append(_table(heads, rows, "models"))
    return Section("values", "Values", text, tables=tables)


def _cell(content: Content, name: str, i: int, j: int) -> Cell:
    value = float(content.values[name][i, j])
    return Cell(_text(value), "" if np.isfinite(value) else str(content.reasons[name][i, j]))


def _parameters(content: Content) -> Section:
    last = content.ids[content.ends[-1]] if content.ids else ""
    table = content.parameters[content.parameters["model_id"] == last] if last else content.parameters
    heads = [Head("parameter", code=True), Head("type"), Head("shape"), Head("dtype"), Head("tied to", code=True),
             Head("not analysed because")]  # fmt: skip
    columns = ("name", "type", "shape", "dtype", "tied_to", "skip_reason")
    rows = [
        [*r, Cell(str(reason), SKIP_MEANING.get(reason, "")) if reason else ""]
        for *r, reason in zip(*(table[c] for c in columns), strict=True)
    ]
    text = [f"Every tensor of {last}, analysed or not." if last else "There is no model."]
    return Section("parameters", "Parameters", text, tables=[_table(heads, rows, "parameters")])


def _missing(content: Content) -> Section | None:
    counts: Counter[tuple[str, str]] = Counter()
    for name in content.per_layer:
        gone = ~np.isfinite(content.values[name])
        counts.update((name, str(r)) for r in content.reasons[name][gone] if r)
    if not counts:
        return None
    heads = [Head("field", code=True), Head("values", number=True), Head("reason")]
    rows = [[name, n, reason] for (name, reason), n in counts.most_common()]
    return Section("missing", "Values that are not there", [], tables=[_table(heads, rows, "reasons")])


def _definitions(session: Source, content: Content) -> Section:
    heads = [Head("field", code=True), Head("what it is"), Head("formula (LaTeX)", code=True), Head("kernel"),
             Head("version"), Head("parameters", code=True)]  # fmt: skip
    declared, rows = session.compute.fields, []
    for name in _order(content.values):
        attrs = {"kernel": "", "kernel_version": "", "params": "{}", "long_name": "", **content.attrs[name]}
        formula = declared[name].formula if name in declared else ""
        params = "" if attrs["params"] == "{}" else attrs["params"]
        rows.append([name, attrs["long_name"], formula, attrs["kernel"], attrs["kernel_version"], params])
    text = ["σ are singular values, λ = σ² / max(rows, columns) eigenvalues, w weights."]
    return Section("fields", "Fields", text, tables=[_table(heads, rows, "fields")])


def _lead(content: Content) -> str:
    known = content.steps[np.isfinite(content.steps)]
    span = f", steps {known.min():g} to {known.max():g}" if content.stepped else ""
    return f"Spectra of the weights of {_count(len(content.ids), 'checkpoint')}{span}."


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _facts(content: Content) -> list[dict[str, str]]:
    table = content.parameters
    analysed = table[table["skip_reason"] == ""]
    numbers = (
        (len(content.ids), "model"),
        (len(content.runs), "run"),
        (len(content.names), "analysed layer"),
        (len(content.values), "field"),
    )
    facts = [{"value": f"{n:,}", "label": label + "s" * (n != 1)} for n, label in numbers]
    return [*facts, {"value": f"{analysed['nbytes'].sum() / 1e6:,.1f} MB", "label": "of weights analysed"}]


def _notices(content: Content) -> list[str]:
    if not content.ids:
        return ["There is no model here. Add one: session.models.add(path, step=…)."]
    notices = []
    without = int(np.isnan(content.steps).sum())
    if not content.stepped:
        who = "No model has a step" if without == len(content.ids) else "No two models have different steps"
        notices.append(
            f"{who}, so there is no step axis: figures compare layers and models instead. Give models their steps with "
            "session.models.add(path, step=…, parent=…)."
        )
    elif without:
        notices.append(f"{_count(without, 'model')} without a step: in the tables and the heatmap only.")
    if not content.names:
        notices.append("Nothing was analysed; the table of parameters says why.")
    elif not (content.per_layer or content.per_model):
        notices.append("No values are stored. Compute some: session.compute.apply('stable_rank').")
    return notices


def _about(session: Source) -> list[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "xarray", "zarr", "dask", "bokeh"))
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    store = getattr(getattr(session, "store", None), "location", None) or "in memory"
    return [f"Made {made} by diffract_dask {__version__} from the store {store}.",
            f"Python {platform.python_version()}, {packages}. The page is complete in itself."]  # fmt: skip
