"""Finding modules that declare pipelines and chains: by reading their text, never by running it.

`discover` parses; `scan_import` imports each module in a process of its own, on request, and keeps the errors.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from diffract_dask.errors import UnknownNameError, did_you_mean
from diffract_dask.runs import manifests
from diffract_dask.runs.records import SCHEMA

__all__ = ["FoundModule", "discover", "load_module", "scan_import"]

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
_LONGEST = 1 << 20
_TIMEOUT = 120.0
_HARMLESS = ("subprocess", "asyncio")
_DECLARING = {"Pipeline", "Chain", "register"}


@dataclass
class FoundModule:
    """A module that declares something, as its text shows it.

    Attributes
    ----------
    module : str
        As it is imported from the folder that was scanned.
    path : Path
    folder : str
        Relative to the folder that was scanned.
    pipelines, chains : dict
        Parent by name, where both are written as plain text.
    variants : list of str
        Names that are written as plain text.
    runs_at_import : bool
        It calls ``run`` as soon as it is imported; it will not be.
    error : str or None
        Why it cannot be read.
    """

    module: str
    path: Path
    folder: str
    pipelines: dict[str, str | None] = field(default_factory=dict)
    chains: dict[str, str | None] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)
    runs_at_import: bool = False
    error: str | None = None

    def as_manifest(self) -> dict[str, Any]:
        """Return what its text shows in the form of a manifest: names without content."""
        return {
            "schema": SCHEMA,
            "module": self.module,
            "file": f"{self.module.replace('.', '/')}.py",
            "sha256": None,
            "error": self.error or "not imported yet: run it, or scan with --import",
            "pipelines": [{"name": name, "parent": parent, "stages": []} for name, parent in self.pipelines.items()],
            "variants": [],
            "chains": [
                {"name": name, "parent": parent, "steps": [], "variations": []} for name, parent in self.chains.items()
            ],
        }


def discover(root: str | os.PathLike[str] = ".") -> list[FoundModule]:
    """Return the modules below a folder that declare pipelines, chains or variants, without importing any.

    Hidden folders, those that start with ``_``, environments and folders of runs are left out.
    """
    base = Path(os.path.abspath(root))
    found = []
    for at, folders, files in os.walk(base):
        folders[:] = sorted(name for name in folders if name[0] not in "._" and not _skipped(at, name))
        for name in sorted(files):
            if name.endswith(".py"):
                item = _read(Path(at, name), base)
                if item is not None:
                    found.append(item)
    return found


def _skipped(at: str, name: str) -> bool:
    path = os.path.join(at, name)
    marks = ("pyvenv.cfg", "_scripts", "_manifests")
    return name in _SKIPPED or any(os.path.exists(os.path.join(path, mark)) for mark in marks)


def _read(path: Path, base: Path) -> FoundModule | None:
    try:
        if path.stat().st_size > _LONGEST:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    if not any(word in data for word in (b"diffract_dask", b"diffman")) or not any(
        word.encode() in data for word in _DECLARING
    ):
        return None
    below = path.relative_to(base).with_suffix("").parts
    parts = below[:-1] if below[-1] == "__init__" else below
    above = "/".join(below[:-1])
    item = FoundModule(".".join(parts) or base.name, path, above)
    try:
        tree = ast.parse(data, filename=path.name)
    except (SyntaxError, ValueError) as error:
        item.error = f"{type(error).__name__}: {error}"
        return item
    _Reader(item).visit(tree)
    item.runs_at_import = any(_runs(node) for node in tree.body)
    return item if item.pipelines or item.chains or item.variants else None


class _Reader(ast.NodeVisitor):
    """Collects calls of Pipeline, Chain and register, by whatever name this package goes in the module."""

    def __init__(self, item: FoundModule) -> None:
        self.item = item
        self.modules: set[str] = set()
        self.names: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name in ("diffract_dask.runs", "diffman"):
                self.modules.add(alias.asname or alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.module == "diffract_dask" and alias.name == "runs":
                self.modules.add(alias.asname or "runs")
            elif node.module in ("diffract_dask.runs", "diffman") and alias.name in _DECLARING:
                self.names[alias.asname or alias.name] = alias.name

    def visit_Call(self, node: ast.Call) -> None:
        called = self._called(node.func)
        if called is not None:
            given = {item.arg: item.value for item in node.keywords if item.arg}
            name = _text(node.args[0] if node.args else given.get("name"))
            if called == "register" and name is not None:
                self.item.variants.append(name)
            elif called in ("Pipeline", "Chain"):
                table = self.item.pipelines if called == "Pipeline" else self.item.chains
                table[name or self.item.module] = _text(given.get("parent"))
        self.generic_visit(node)

    def _called(self, func: ast.expr) -> str | None:
        if isinstance(func, ast.Name):
            return self.names.get(func.id)
        if isinstance(func, ast.Attribute) and func.attr in _DECLARING and ast.unparse(func.value) in self.modules:
            return func.attr
        return None


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _runs(node: ast.stmt) -> bool:
    """Return whether a statement of a module calls ``….run(…)`` when it is imported."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
        return False
    for child in ast.walk(node):
        called = child.func if isinstance(child, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "run" and ast.unparse(called.value) not in _HARMLESS:
            return True
    return False


def load_module(name: str, scan_root: str | os.PathLike[str] = ".") -> ModuleType:
    """Import a module by its name as `discover` gives it, and return it.

    Raises
    ------
    UnknownNameError
        Nothing of this name is below `scan_root` or can be imported.
    """
    with _importing_from(Path(os.path.abspath(scan_root))):
        if name in sys.modules:
            return sys.modules[name]
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            known = [item.module for item in discover(scan_root)]
            hint = did_you_mean(name, known) or (f" There are {', '.join(known[:20])}." if known else "")
            raise UnknownNameError(f"there is no module {name!r} under {scan_root}.{hint}") from None


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Let imports look into a folder first, for as long as this lasts."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def scan_import(
    scan_root: str | os.PathLike[str], root: str | os.PathLike[str], *, timeout: float = _TIMEOUT
) -> dict[str, str | None]:
    """Import every module that `discover` finds, each in a process of its own, and write the manifests.

    Parameters
    ----------
    scan_root : path
    root : path
        Of the runs: manifests are written to ``<root>/_manifests``.
    timeout : float
        Seconds that one import may take.

    Returns
    -------
    dict
        By module: None, or why it could not be imported. One that runs something when it is imported is not.
    """
    base, target = Path(os.path.abspath(scan_root)), Path(os.path.abspath(root))
    answer: dict[str, str | None] = {}
    for item in discover(base):
        error = item.error
        if error is None and item.runs_at_import:
            error = "it runs a pipeline or chain when it is imported; put that under: if __name__ == '__main__'"
        if error is None:
            error = _import_apart(base, target, item.module, timeout)
        if error is not None:
            manifests.failed(target, item.module, f"{item.module.replace('.', '/')}.py", error)
        answer[item.module] = error
    return answer


_CHILD = """
import sys
base, root, module = sys.argv[1:]
sys.path.insert(0, base)
from diffract_dask.runs.discovery import write_manifest
write_manifest(module, root)
"""


def _import_apart(base: Path, root: Path, module: str, timeout: float) -> str | None:
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, os.environ.get("PYTHONPATH", "")]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(base), str(root), module],
            cwd=base,
            env=surroundings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its import took more than {timeout:g} s"
    return None if done.returncode == 0 else done.stderr.strip() or f"its import ended with {done.returncode}"


def write_manifest(module: str, root: str) -> None:
    """Import a module and write its manifest, with a snapshot of its source: the work of the process of a scan."""
    from diffract_dask.runs import snapshots
    from diffract_dask.runs.code import file_of
    from diffract_dask.runs.variants import registry

    importlib.import_module(module)
    names = [name for name in registry.modules() if name == module] or registry.modules()
    files = {name: file for name in names if (file := registry.source_file(name) or file_of(name))}
    taken = snapshots.take(Path(root), files, f"scan {module}")
    for name in names:
        manifests.write(Path(root), name, taken)
