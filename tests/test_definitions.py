"""The catalogue that is printed from the declarations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diffract_dask import definitions
from diffract_dask.errors import FieldNotFoundError
from diffract_dask.fields import Field
from diffract_dask.kernel import Registry, kernel
from diffract_dask.kernels import BUILTIN

DOCS = Path(__file__).resolve().parent.parent / "docs"
REGISTRY = Registry(BUILTIN)


def test_no_declaration_lacks_anything() -> None:
    assert definitions.incomplete(REGISTRY) == []


def test_what_a_declaration_lacks_is_named() -> None:
    @kernel(bare=Field("Bare"), version=1)
    def bare(l2_norm):
        return l2_norm

    @kernel(lost=Field("Lost", formula="x", reference="nobody2030nothing", nan="never"), version=1)
    def lost(l2_norm):
        return l2_norm

    registry = REGISTRY.copy()
    registry.add(bare)
    registry.add(lost)
    assert definitions.incomplete(registry) == [
        "field 'bare' has no formula",
        "field 'bare' has no reference",
        "field 'bare' has no meaning of NaN",
        "field 'lost' cites 'nobody2030nothing', which is not in docs/references.bib",
    ]


def test_a_definition_says_everything() -> None:
    found = definitions.definition(REGISTRY, "hard_rank")
    assert found["parameters"] == "rtol=1e-05"
    assert found["inputs"] == "weights_svals"
    assert found["range"] == "0 to inf"
    assert found["reference"].startswith("Golub and Van Loan (2013): Matrix Computations. Johns Hopkins")
    assert "outputs" not in found
    assert definitions.definition(REGISTRY, "weights_lsvs")["value"] == "array (row, sval) of float64"
    with pytest.raises(FieldNotFoundError, match="stable_rank"):
        definitions.definition(REGISTRY, "stable_rnk")


def test_the_catalogue_holds_each_field_once_with_its_formula_and_citation() -> None:
    text = definitions.catalogue(REGISTRY)
    assert sorted(re.findall(r"^### `(\w+)`$", text, re.MULTILINE)) == sorted(REGISTRY.fields)
    assert text.count("$$\n") == 2 * len(REGISTRY.fields)
    assert set(re.findall(r"^## (.+)$", text, re.MULTILINE)) >= {"Shape", "Null", "Random matrix", "Model level"}
    assert "<!-- catalogue -->" in (DOCS / "reference" / "fields.md").read_text(encoding="utf8")


def test_every_entry_of_the_bibliography_can_be_cited() -> None:
    keys = re.findall(r"^@\w+\{(\w+),", (DOCS / "references.bib").read_text(encoding="utf8"), re.MULTILINE)
    for key in keys:
        assert re.match(r".+ \(\d{4}\): .+\. .+", definitions.citation(key)), key
        assert not set("{}") & set(definitions.citation(key))
    assert definitions.citation("nobody2030nothing") == "nobody2030nothing"


def test_the_documentation_refuses_an_incomplete_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    from sphinx.errors import ExtensionError

    namespace: dict[str, object] = {}
    exec((DOCS / "conf.py").read_text(encoding="utf8"), namespace)
    source = ["<!-- catalogue -->"]
    namespace["fill_catalogue"](None, "reference/fields", source)  # type: ignore[operator]
    assert "### `stable_rank`" in source[0]
    monkeypatch.setattr(definitions, "incomplete", lambda registry: ["field 'x' has no formula"])
    with pytest.raises(ExtensionError, match="has no formula"):
        namespace["fill_catalogue"](None, "reference/fields", source)  # type: ignore[operator]
