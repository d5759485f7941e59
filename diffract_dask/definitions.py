"""The definition of every field, for the command line and for the documentation: all from the declarations."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from diffract_dask.kernel import Kernel, Registry

__all__ = ["catalogue", "citation", "definition", "incomplete"]

_HERE = Path(__file__).resolve().parent
# In an installed package the bibliography lies beside the data; in a checkout the documentation holds it.
_BIBLIOGRAPHIES = (_HERE / "data" / "references.bib", _HERE.parent / "docs" / "references.bib")
_ENTRY = re.compile(r"^@\w+\{(\w+),\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^\s*(\w+)\s*=\s*\{(.*?)\},?$", re.MULTILINE)


@cache
def _bibliography() -> dict[str, dict[str, str]]:
    """Return the entries of the bibliography by key; empty where there is none."""
    for path in _BIBLIOGRAPHIES:
        if path.is_file():
            text = path.read_text(encoding="utf8")
            return {key: dict(_ITEM.findall(body)) for key, body in _ENTRY.findall(text)}
    return {}


def citation(key: str) -> str:
    """Return an entry of the bibliography as people cite it; the key itself where there is no such entry.

    >>> print(citation("roy2007effective"))
    Roy and Vetterli (2007): The Effective Rank: A Measure of Effective Dimensionality. 15th European Signal Processing
    Conference (EUSIPCO), 606–610
    """
    entry = {name: _plain(value) for name, value in _bibliography().get(key, {}).items()}
    if not entry:
        return key
    names = [author.split(",")[0] for author in entry["author"].split(" and ")]
    who = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
    where = next((entry[name] for name in ("journal", "booktitle", "publisher") if name in entry), "")
    numbers = entry.get("volume", "") + (f"({entry['number']})" if "number" in entry else "")
    place = ", ".join(filter(None, (f"{where} {numbers}".strip(), entry.get("pages", ""))))
    link = f"https://doi.org/{entry['doi']}" if "doi" in entry else entry.get("url", "")
    return f"{who} ({entry['year']}): {entry['title']}. {place}" + (f". {link}" if link else "")


def _plain(text: str) -> str:
    return text.replace("{", "").replace("}", "").replace("--", "–")


def _references(reference: str) -> list[str]:
    return [key.strip() for key in reference.split(",") if key.strip()]


def definition(registry: Registry, name: str) -> dict[str, str]:
    """Return the definition of a field as label and text, in the order in which it is shown; without empty ones.

    Raises
    ------
    FieldNotFoundError
        No kernel produces the field.
    """
    declared, kernel = registry.field(name), registry.producer(name)
    low, high = declared.valid_range or ("", "")
    shape = f"array ({', '.join(declared.dims)}) of {declared.dtype}" if declared.dims else f"scalar {declared.dtype}"
    entries = {
        "title": declared.long_name,
        "formula": declared.formula,
        "level": kernel.level,
        "value": shape,
        "units": declared.units,
        "range": f"{low:g} to {high:g}" if declared.valid_range else "any real number",
        "nan means": declared.nan,
        "stored": "yes" if declared.persist else "only when asked for by name",
        "kernel": f"{kernel.name}, version {kernel.version}",
        "inputs": ", ".join(kernel.inputs),
        "parameters": ", ".join(f"{key}={value!r}" for key, value in registry.params(kernel.name).items()) or "none",
        "outputs": ", ".join(kernel.outputs) if len(kernel.outputs) > 1 else "",
        "reference": "; ".join(citation(key) for key in _references(declared.reference)),
    }
    return {label: text for label, text in entries.items() if text}


def incomplete(registry: Registry) -> list[str]:
    """Return a sentence for everything that a declaration lacks: a title, formula, reference or meaning of NaN.

    References must be in the bibliography.
    """
    found = []
    for name, declared in registry.fields.items():
        required = {"title": declared.long_name, "formula": declared.formula, "reference": declared.reference}
        required["meaning of NaN"] = declared.nan
        found += [f"field {name!r} has no {what}" for what, text in required.items() if not text.strip()]
        unknown = [key for key in _references(declared.reference) if key not in _bibliography()]
        found += [f"field {name!r} cites {key!r}, which is not in docs/references.bib" for key in unknown]
    return found


def catalogue(registry: Registry) -> str:
    """Return all definitions as Markdown with formulas between dollar signs: a section per family, field by field."""
    sections: dict[str, list[str]] = {}
    for name in registry.fields:
        kernel = registry.producer(name)
        sections.setdefault(_family(kernel), []).append(_page(registry, name))
    parts = [f"## {family.capitalize()}\n\n" + "\n\n".join(pages) for family, pages in sections.items()]
    return "\n\n".join(parts) + "\n"


def _family(kernel: Kernel) -> str:
    if kernel.level != "slice":
        return f"{kernel.level} level"
    return kernel.function.__module__.rpartition(".")[2].replace("_", " ")


def _page(registry: Registry, name: str) -> str:
    entries: dict[str, Any] = definition(registry, name)
    title, formula = entries.pop("title"), entries.pop("formula", "")
    lines = [f"### `{name}`", "", f"{title}.", "", f"$$\n{formula}\n$$", ""]
    for label, text in entries.items():
        shown = ", ".join(f"`{part}`" for part in text.split(", ")) if label in ("inputs", "outputs") else text
        shown = f"`{text}`" if label == "parameters" and text != "none" else shown
        lines.append(f"- {'NaN means' if label == 'nan means' else label}: {shown}")
    return "\n".join(lines)
