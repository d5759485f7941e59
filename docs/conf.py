"""Sphinx configuration: `make docs`."""

from __future__ import annotations

from typing import Any

from diffract_dask import __version__

project = "diffract_dask"
release = version = __version__
copyright = "the diffract_dask developers"

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
exclude_patterns = ["_build"]
root_doc = "index"
html_theme = "furo"
html_title = f"diffract_dask {version}"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False


def fill_catalogue(app: Any, docname: str, source: list[str]) -> None:
    """Put the definitions of all built-in fields into the page that is about them; fail if one lacks a part."""
    if docname != "reference/fields":
        return
    from sphinx.errors import ExtensionError

    from diffract_dask.definitions import catalogue, incomplete
    from diffract_dask.kernel import Registry
    from diffract_dask.kernels import BUILTIN

    registry = Registry(BUILTIN)
    lacking = incomplete(registry)
    if lacking:
        raise ExtensionError("reference/fields: " + "; ".join(lacking))
    source[0] = source[0].replace("<!-- catalogue -->", catalogue(registry))


def setup(app: Any) -> None:
    """Connect what this file adds to Sphinx."""
    app.connect("source-read", fill_catalogue)
