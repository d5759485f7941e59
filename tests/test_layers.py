"""The shape of the package: layers, sizes, names, and what importing it may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "diffract_dask"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the bottom up. A module may import from its own layer and from those below, never from above, be it at the top
# of the file or inside a function. A folder is one entry.
LAYERS = (
    {"errors", "config"},
    {"fields", "blas", "codehash", "options", "workers"},
    {"kernel", "moments", "randommatrix", "powerlaw"},
    {"shuffle"},
    {"linalg"},
    {"kernels", "sources", "catalog", "digests", "store", "view", "testing"},
    {"memory", "selection", "cells"},
    {"plan"},
    {"stored"},
    {"graph"},
    {"modellevel", "commits", "lazy"},
    {"execute"},
    {"definitions", "table", "export", "ingest", "results", "report", "report_figures", "terminal"},
    {"session"},
    {"xarray_backend", "demo", "runs"},
    {"cli_options", "cli_where", "cli_chains", "cli_artifacts", "cli_runs", "cli", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# The only modules that may import a package: frameworks are named in sources alone, the store's format in the store.
ROOMS = {
    "torch": {"sources"},
    "safetensors": {"sources"},
    "bokeh": {"report", "report_figures"},
    "click": {"cli", "cli_options", "cli_where", "cli_chains", "cli_artifacts", "cli_runs"},
    "zarr": {"store", "runs"},
    "h5py": {"runs"},
    "netCDF4": {"runs"},
    "pyarrow": {"runs"},
    "PIL": {"runs"},
    "filelock": {"store", "runs"},
    "xxhash": {"digests", "sources"},
    "threadpoolctl": {"blas"},
}
SAYS_NOTHING = {"util", "utils", "helper", "helpers", "common", "base", "manager", "core", "misc"}
FILE_LINES = 650
FUNCTION_LINES = 60


def module(path: Path) -> str:
    """Return the entry of LAYERS that a file belongs to: its own name, or that of its folder."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Yield what a file imports by full name; ``from package import name`` gives ``package.name``."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    here = dotted(path).split(".")
    nodes = top_level_nodes(tree) if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = here if path.name == "__init__.py" else here[:-1]
            start = parent[: len(parent) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def top_level_nodes(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module is imported, those under ``if TYPE_CHECKING`` apart."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.If | ast.Try):
            yield from (child for child in ast.walk(node) if isinstance(child, ast.stmt))
        yield node


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each function with its number of lines, its docstring apart."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            doc = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - doc


def by_name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


every_file = pytest.mark.parametrize("path", FILES, ids=by_name)


@every_file
def test_a_lower_layer_never_imports_a_higher_one(path: Path) -> None:
    own = module(path)
    if own == "__init__":
        pytest.skip("the package itself names everything, lazily")
    assert own in LEVEL, f"{by_name(path)}: give it a place in LAYERS of {Path(__file__).name}"
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package != "diffract_dask":
            continue
        other = rest.split(".")[0]
        if other in LEVEL:
            assert LEVEL[other] <= LEVEL[own], f"{by_name(path)} imports {name}, which lies above it"
        else:
            assert not (PACKAGE / f"{other}.py").exists(), f"{name} has no place in LAYERS"


@every_file
def test_packages_are_imported_in_their_own_room(path: Path) -> None:
    for name in imports(path):
        package = name.split(".")[0]
        assert module(path) in ROOMS.get(package, {module(path)}), f"{by_name(path)} imports {name}"


def test_modules_of_one_layer_do_not_import_each_other_in_a_circle() -> None:
    known = {dotted(path) for path in FILES}
    graph: dict[str, set[str]] = {}
    for path in FILES:
        found = set()
        for name in imports(path, top_level=True):
            target = name if name in known else name.rpartition(".")[0]
            if target in known and target != dotted(path):
                found.add(target)
        graph[dotted(path)] = found
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@every_file
def test_files_and_functions_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf8").splitlines())
    assert lines <= FILE_LINES, f"{by_name(path)} has {lines} lines; split it by subject"
    long = {name: n for name, n in functions(path) if n > FUNCTION_LINES}
    assert not long, f"{by_name(path)}: {long} (lines, docstring apart; at most {FUNCTION_LINES})"


@every_file
def test_names_say_what_a_file_is_about(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    assert len(parts) <= 2, f"{by_name(path)}: one folder level inside the package"
    assert not SAYS_NOTHING & {word for part in parts for word in part.split("_")}, by_name(path)


def test_folders_hold_siblings() -> None:
    for folder in {path.parent for path in FILES} - {PACKAGE}:
        siblings = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(siblings) >= 4, f"{folder.name}/ has {len(siblings)} modules; a folder is for four or more"


@every_file
def test_heavy_frameworks_are_imported_when_used(path: Path) -> None:
    heavy = {"torch", "safetensors", "tensorflow", "jax", "onnx", "h5py", "polars", "pandas", "ml_dtypes"}
    at_import = {name.split(".")[0] for name in imports(path, top_level=True)}
    assert not heavy & at_import, f"{by_name(path)} imports {heavy & at_import} as soon as it is imported"


def test_importing_the_package_is_light() -> None:
    code = "import sys, diffract_dask; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & {"dask", "distributed", "xarray", "zarr", "scipy", "bokeh", "click", "torch", "pandas"}


def test_every_module_can_be_the_first_one_imported() -> None:
    code = f"""
import importlib, sys
for name in {[dotted(path) for path in FILES]}:
    for loaded in [x for x in sys.modules if x.split(".")[0] == "diffract_dask"]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_of_the_package_exists() -> None:
    import diffract_dask

    assert diffract_dask.__all__
    for name in diffract_dask.__all__:
        assert getattr(diffract_dask, name) is not None
    assert set(diffract_dask.__all__) <= set(dir(diffract_dask))
    missing = "no_such_name"
    with pytest.raises(AttributeError, match=missing):
        getattr(diffract_dask, missing)


def test_the_version_is_the_one_in_pyproject() -> None:
    import diffract_dask

    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf8")
    stated = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert stated is not None
    assert diffract_dask.__version__ == stated[1]


def test_no_compute_catches_every_scheduler(request: pytest.FixtureRequest) -> None:
    import dask

    attempts = request.getfixturevalue("no_compute")
    for scheduler in ("threads", "sync", "processes"):
        with pytest.raises(pytest.fail.Exception, match="graph was run"):
            dask.delayed(abs)(-1).compute(scheduler=scheduler)
    assert len(attempts) == 3
    attempts.clear()
