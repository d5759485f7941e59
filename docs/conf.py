"""Sphinx configuration: `make docs`."""

from __future__ import annotations

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
