"""The version of a kernel that states none: a hash of its code."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from hashlib import blake2b
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from diffract_dask.errors import KernelRegistrationError

__all__ = ["code_version"]


def code_version(func: Callable[..., Any], label: str, form: str) -> str:
    """Return a version for a kernel that states none: the hash of its form, its code and what that code refers to.

    Its closure, the functions of the same module that it calls and the plain global values that it reads count;
    other modules do not, nor do comments, the docstring and defaults (which are parameters).

    Parameters
    ----------
    func : callable
    label : str
        The kernel's name, for messages.
    form : str
        What is declared beside the function and changes what its values mean: outputs in order, level, batch.

    Raises
    ------
    KernelRegistrationError
        It refers to an object that cannot be hashed.
    """
    digest = blake2b(form.encode(), digest_size=8)
    seen: set[int] = set()
    try:
        for text in _described_function(func, seen) if isinstance(func, FunctionType) else _described(func, "", seen):
            digest.update(text.encode() + b"\n")
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise KernelRegistrationError(
            f"kernel {label!r}: its code refers to an object that cannot be hashed ({error}); state its version: "
            "@kernel(…, version=1)"
        ) from error
    return "code:" + digest.hexdigest()


def _described_function(func: FunctionType, seen: set[int]) -> Iterator[str]:
    seen.add(id(func))
    code = func.__code__
    yield from _described_code(code, func.__module__, seen, skip_first=code.co_consts[:1] == (func.__doc__,))
    for cell in func.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        yield from _described(content, func.__module__, seen)
    for name in sorted(_names(code) & func.__globals__.keys()):
        value = func.__globals__[name]
        counts = isinstance(
            value, (*_PLAIN, np.ndarray, tuple, list, dict, set, frozenset, FunctionType, functools.partial)
        )
        if counts or isinstance(_unwrapped(value), FunctionType):
            yield name
            yield from _described(value, func.__module__, seen)


def _described_code(code: CodeType, module: str, seen: set[int], *, skip_first: bool = False) -> Iterator[str]:
    yield code.co_code.hex() + code.co_exceptiontable.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars))
    for const in code.co_consts[skip_first:]:
        yield from _described(const, module, seen)


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(const) for const in code.co_consts if isinstance(const, CodeType)))


_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), np.generic)


def _unwrapped(value: Any) -> Any:
    """Return the function inside a wrapper such as that of functools.cache; anything else as it is."""
    return value if isinstance(value, FunctionType) else inspect.getattr_static(value, "__wrapped__", value)


def _described(value: Any, module: str, seen: set[int]) -> Iterator[str]:
    """Yield text that is equal for equal values in every process: no addresses, no order of sets."""
    if isinstance(_unwrapped(value), FunctionType):
        value = _unwrapped(value)
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, CodeType):
        yield from _described_code(value, module, seen)
    elif isinstance(value, FunctionType) and value.__module__ == module:
        yield value.__qualname__
        if id(value) not in seen:
            yield from _described((value.__defaults__, value.__kwdefaults__), module, seen)
            yield from _described_function(value, seen)
    elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, ModuleType):
        yield value.__name__
    elif isinstance(value, functools.partial):
        yield from _described(("partial", value.func, value.args, value.keywords), module, seen)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype.str}{value.shape}{blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _described(item, module, seen)
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted("\n".join(_described(item, module, seen)) for item in value))
    elif isinstance(value, dict):
        yield repr(sorted("\n".join(_described(item, module, seen)) for item in value.items()))
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        yield blake2b(pickle.dumps(value, protocol=5), digest_size=16).hexdigest()
