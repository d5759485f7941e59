"""The report: what it says of a store, that it needs no network, and that no name or value can break the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffract_dask.report import report
from diffract_dask.report_figures import density, plain, runs
from diffract_dask.session import Session
from diffract_dask.testing import matrix_with_spectrum, power_law_svals, random_model

SHAPES = {"h.0.attn.weight": (12, 8), "h.0.mlp.weight": (24, 8), "h.0.mlp.bias": (24,), "head.weight": (6, 12)}
FIELDS = ("stable_rank", "effective_rank", "frob_norm", "param_norm")


class Page(HTMLParser):
    """The parts of a page that tests look at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.visible: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.visible.append(data)
            if self._open[-1] == "h2":
                self.headings.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.visible).split())


def figures(path: Path) -> list[dict[str, object]]:
    """Return the Bokeh models of the page."""
    text = path.read_text(encoding="utf8")
    found = re.search(r"const docs_json = '(\{.*?\})';", text)
    assert found is not None
    (document,) = json.loads(found[1].encode().decode("unicode_escape")).values()
    models: list[dict[str, object]] = []

    def walk(value: object) -> None:
        if isinstance(value, dict):
            if value.get("type") == "object":
                models.append(value)
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(document)
    return models


def options(path: Path, title: str) -> list[str]:
    """Return what the list of this title offers."""
    for model in figures(path):
        own = model.get("attributes", {})
        if model["name"] == "Select" and isinstance(own, dict) and own.get("title") == title:
            return [entry[0] for entry in own["options"]]
    return []


def filled() -> Session:
    made = Session()
    for i, step in enumerate((0, 100, 1000)):
        parent = f"run-{(0, 0, 100)[i]}" if i else None
        made.models.add(random_model(SHAPES, seed=i), f"run-{step}", step=step, parent=parent)
    made.models.add(random_model(SHAPES, seed=9), "fork-1000", step=1000, parent="run-100", attrs={"note": "other"})
    made.compute.apply(*FIELDS)
    return made


@pytest.fixture(scope="module")
def session() -> Session:
    """Return a session that tests only read."""
    return filled()


@pytest.fixture(scope="module")
def path(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report of everything in it."""
    return report(session, tmp_path_factory.mktemp("report") / "r.html", title="A title")


@pytest.fixture(scope="module")
def page(path: Path) -> Page:
    return Page(path)


def test_sections_and_facts(session: Session, page: Page) -> None:
    assert page.headings[:4] == ["Over training steps", "Eigenvalue density", "Layers and steps", "Models"]
    assert {"Values", "Parameters", "Fields"} <= set(page.headings)
    assert "A title" in page.text
    assert "4 checkpoints, steps 0 to 1000" in page.text
    assert "fork-1000" in page.text
    assert "other" in page.text  # an attribute that the user gave
    value = float(session.results.dataset("stable_rank").stable_rank.sel(model_id="fork-1000", name="head.weight"))
    assert f"{value:.5g}" in page.text


def test_nothing_is_fetched(path: Path, page: Page) -> None:
    for tag, attrs in page.tags:
        assert "src" not in attrs, (tag, attrs)
        assert tag != "link"
        assert (attrs.get("href") or "#").startswith("#")
    text = path.read_text(encoding="utf8")
    assert "@import" not in text
    assert not re.search(r"url\(\s*[\"']?https?:", text)
    assert not {"TeX", "MathML", "Ascii", "WMTSTileSource", "ImageURL"} & {model["name"] for model in figures(path)}


def test_size_and_figures(path: Path) -> None:
    assert path.stat().st_size < 5_000_000
    assert set(options(path, "Field")) >= {"stable_rank", "effective_rank", "frob_norm", "param_norm"}
    assert options(path, "Layer") == ["h.0.attn.weight", "h.0.mlp.weight", "head.weight"]
    legends = [
        entry["attributes"]["label"]["value"]  # type: ignore[index]
        for entry in figures(path)
        if entry["name"] == "LegendItem"
    ]
    assert {"run", "fork-1000", "run-0 (step 0)", "run-1000 (step 1000)", "fork-1000 (step 1000)"} <= set(legends)


def test_skipped_parameters_have_a_reason(page: Page) -> None:
    assert "h.0.mlp.bias" in page.text
    assert any(attrs.get("title") == "one-dimensional" for _, attrs in page.tags)


def test_only_the_fields_asked_for(session: Session, tmp_path: Path) -> None:
    one = report(session, tmp_path / "r.html", ["frob_norm"])
    assert options(one, "Field") == ["frob_norm"]
    assert "stable_rank" not in Page(one).text


def test_a_filtered_session(session: Session, tmp_path: Path) -> None:
    part = report(session.filter(model_ids="run-*", param_names="h.*"), tmp_path / "r.html", ["stable_rank"])
    text = Page(part).text
    assert "3 checkpoints" in text
    assert "fork-1000" not in text
    assert "head.weight" not in text


def test_models_without_steps(tmp_path: Path) -> None:
    made = Session()
    made.models.add(random_model(SHAPES, seed=1), "one")
    made.models.add(random_model(SHAPES, seed=2), "two")
    made.compute.apply("stable_rank")
    page = Page(report(made, tmp_path / "r.html"))
    assert page.headings[:3] == ["By layer", "Eigenvalue density", "Layers and models"]
    assert "No model has a step" in page.text
    assert "models.add(path, step=…" in page.text


def test_some_models_without_steps(tmp_path: Path) -> None:
    made = filled()
    made.models.add(random_model(SHAPES, seed=5), "loose")
    made.compute.apply("stable_rank")
    page = Page(report(made, tmp_path / "r.html", ["stable_rank"]))
    assert page.headings[0] == "Over training steps"
    assert "1 model without a step" in page.text


def test_values_that_are_not_there_have_a_reason(tmp_path: Path) -> None:
    weights = random_model(SHAPES)
    weights["head.weight"][0, 0] = np.nan
    made = Session()
    made.models.add(weights, "m", step=1)
    made.compute.apply("stable_rank")
    page = Page(report(made, tmp_path / "r.html"))
    assert "Values that are not there" in page.headings
    assert "the weights hold NaN or infinity" in page.text
    assert any(tag == "td" and "NaN or infinity" in (a.get("title") or "") for tag, a in page.tags)


@pytest.mark.parametrize("computed", [(), ("frob_norm",)])
def test_without_singular_values_the_page_says_how_to_get_them(computed: tuple[str, ...], tmp_path: Path) -> None:
    made = Session()
    made.models.add(random_model(SHAPES), "m", step=0)
    if computed:
        made.compute.apply(*computed)
    page = Page(report(made, tmp_path / "r.html"))
    assert "session.compute.apply('weights_svals')" in page.text
    assert ("No values are stored" in page.text) == (not computed)


def test_an_empty_session(tmp_path: Path) -> None:
    page = Page(report(Session(), tmp_path / "r.html"))
    assert "There is no model here" in page.text


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    name = "</script><script>alert('1')</script> $$x$$ \\(y\\) <u>&\"'"
    made = Session()
    made.models.add({name: np.eye(4, 3)}, name, step=0, attrs={"<i>": "</style>"})
    made.models.add({name: 2 * np.eye(4, 3)}, "[a-z]*", step=1)
    made.compute.apply("stable_rank", "l2_norm")
    path = report(made, tmp_path / "r.html", title=name)
    page = Page(path)
    assert page.text.count("alert('1')") > 3
    assert {tag for tag, _ in page.tags}.isdisjoint({"u", "i"})
    assert "<script>alert" not in path.read_text(encoding="utf8")
    legends = [m["attributes"]["label"]["value"] for m in figures(path) if m["name"] == "LegendItem"]  # type: ignore[index]
    assert not any("$$" in label or "\\(" in label for label in legends)


@pytest.mark.parametrize("text", ["$$x$$", r"\(x\)", r"\[x\]", "a$$$$b"])
def test_plain_leaves_no_tex(text: str) -> None:
    assert not re.search(r"\$\$|\\\(|\\\[", plain(text))
    assert plain(text).replace("\u200b", "") == text


def test_many_models_and_layers_stay_small(tmp_path: Path) -> None:
    made = Session()
    shapes = {f"h.{i}.weight": (4, 3) for i in range(90)}
    for step in range(15):
        made.models.add(random_model(shapes, seed=step), f"s-{step}", step=step)
    made.compute.apply(*FIELDS, "l2_norm", "nuclear_norm")
    path = report(made, tmp_path / "r.html")
    assert path.stat().st_size < 5_000_000
    text = Page(path).text
    assert "Shown are 12 of 90 layers" in text
    assert "Shown are 60 of 90 layers" in text


# ------------------------------------------------------------------------------------------- runs and densities

NAN = float("nan")


@pytest.mark.parametrize(
    ("ids", "steps", "parents", "expected"),
    [
        (["a-0", "a-1", "a-2"], [0, 1, 2], {}, [("a", [0, 1, 2], None)]),
        (["a-0", "b-0", "a-1", "b-1"], [0, 0, 1, 1], {}, [("a", [0, 2], None), ("b", [1, 3], None)]),
        (["x", "y"], [0, 1], {}, [("x", [0], None), ("y", [1], None)]),
        (["x", "y"], [NAN, NAN], {"y": ["x"]}, [("x", [0, 1], None)]),
        (["a-0", "f-1", "a-1"], [0, 1, 1], {"f-1": ["a-0"]}, [("a", [0, 2], None), ("f-1", [1], 0)]),
        (["x", "y", "z"], [0, 1, 2], {"y": ["x"], "z": ["x"]}, [("x", [0, 1], None), ("z", [2], 0)]),
        (["x", "y"], [0, 1], {"y": ["gone", "x"]}, [("x", [0, 1], None)]),
    ],
    ids=["one", "two by name", "unrelated", "no steps", "fork", "fork by order", "parent not in scope"],
)
def test_runs(
    ids: list[str], steps: list[float], parents: dict[str, list[str]], expected: list[tuple[str, list[int], int | None]]
) -> None:
    found = runs(ids, np.array(steps, float), [parents.get(i, []) for i in ids])
    assert [(r.label, list(r.models), r.fork_of) for r in found] == expected


@given(st.data())
def test_runs_hold_every_model_once(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.sampled_from([f"{x}-{i}" for x in "ab" for i in range(4)]), unique=True, max_size=8))
    steps = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, NAN]), min_size=len(ids), max_size=len(ids))))
    parents = [data.draw(st.lists(st.sampled_from(ids), max_size=2)) for _ in ids]  # circles too
    found = runs(ids, steps, parents)
    assert sorted(i for run in found for i in run.models) == list(range(len(ids)))


def test_density_has_the_mass_of_the_spectrum() -> None:
    s = np.linalg.svd(matrix_with_spectrum(power_law_svals(40), 60, 40), compute_uv=False)
    edges, (whole, half) = density([s**2, (s**2)[:20]])
    width = np.diff(np.log10(edges))
    np.testing.assert_allclose(whole @ width, 1.0)
    np.testing.assert_allclose(half @ width, 1.0)
    assert edges[0] <= (s**2).min()
    assert edges[-1] >= (s**2).max() * (1 - 1e-12)


def test_density_counts_zero_eigenvalues_in_the_share() -> None:
    edges, (share,) = density([np.array([0.0, 0.0, 1.0, 2.0])])
    np.testing.assert_allclose(share @ np.diff(np.log10(edges)), 0.5)


@pytest.mark.parametrize("make", [lambda: np.zeros(4), lambda: np.empty(0), lambda: np.full(3, np.nan)])
def test_density_of_nothing_is_empty(make: Callable[[], np.ndarray]) -> None:
    edges, (share,) = density([make()])
    assert edges.size == 0
    assert share.size == 0


def test_density_of_equal_eigenvalues_is_one_peak() -> None:
    edges, (share,) = density([np.full(5, 3.0)])
    assert np.isfinite(share).all()
    assert (share > 0).sum() == 1
    assert edges[0] < 3.0 < edges[-1]
