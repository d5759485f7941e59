"""The code of a stage, as part of its key: its function with the helpers it calls, and the arguments bound to it."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diffract_dask.codehash import Walk, described_code
from diffract_dask.errors import DeclarationError
from diffract_dask.runs import encoding

__all__ = ["StageCode", "stage_code"]


@dataclass(frozen=True)
class StageCode:
    """What a stage's code comes to.

    Attributes
    ----------
    code : str
        Hash of the code, or the declared version: ``version:…``.
    bound : object
        The bound arguments as plain JSON data; None without any.
    modules : tuple of str
        The user's modules whose code counts.
    """

    code: str
    bound: Any
    modules: tuple[str, ...]


def stage_code(func: Callable[..., Any], version: object, stage: str) -> StageCode:
    """Return the code of a stage.

    Code of the user's own modules counts, wherever the function or its helpers name it: functions, classes, closures,
    plain globals, imports within functions. What is installed does not count, nor do comments and docstrings.

    Raises
    ------
    DeclarationError
        The code refers to an object that cannot be hashed.
    UnencodableError
        A bound argument or the version has no canonical form.
    """
    bound: list[Any] = []
    while isinstance(func, functools.partial):
        bound.append([list(func.args), dict(func.keywords)])
        func = func.func
    arguments = encoding.encode(bound, f"what is bound to stage {stage!r}", whole=False) if bound else None
    if version is not None:
        told = encoding.canonical(version, f"the version of stage {stage!r}")
        walk_modules = {str(getattr(func, "__module__", ""))}
        return StageCode(f"version:{told}", arguments, _users(walk_modules))
    walk = Walk(follows=lambda module, origin: is_users(module or "__main__"), deep=True)
    digest = hashlib.sha256()
    try:
        for text in described_code(func, walk):
            digest.update(text.encode("utf8", "surrogatepass") + b"\n")
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise DeclarationError(
            f"the code of stage {stage!r} refers to an object that cannot be hashed ({error}); state a version "
            f"instead: Stage({stage!r}, …, version=1)"
        ) from error
    return StageCode(digest.hexdigest(), arguments, _users(walk.modules))


def _users(modules: set[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in modules if name and is_users(name)))


def is_users(module: str) -> bool:
    """Return whether a module is the user's own: not built in, of the standard library, installed, or this package.

    A module that is not loaded is looked for, and its package imported at most.
    """
    top = module.partition(".")[0]
    if top == "__main__":
        return True
    if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "diffract_dask":
        return False
    if top.startswith("_cython_"):  # where compiled extensions keep their types
        return False
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec(top)
    file = getattr(loaded, "__file__", None) or getattr(spec, "origin", None)
    if file is None:
        folders = list(getattr(spec, "submodule_search_locations", None) or [])
        return _is_own_file(os.path.abspath(folders[0])) if folders else loaded is not None and spec is None
    return _is_own_file(os.path.abspath(file))


@functools.cache
def _is_own_file(path: str) -> bool:
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    return not any(path.startswith(os.path.join(folder, "")) for folder in _LIBRARY)


_LIBRARY = [os.path.abspath(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")]


def file_of(module: str) -> str | None:
    """Return the source file of a loaded module, if it has one; ``__main__`` counts under its own name."""
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    return file if file and file.endswith(".py") and os.path.isfile(file) else None
