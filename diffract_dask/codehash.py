"""Text that stands for code, and the version of a kernel that states none: a hash of it."""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import io
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from diffract_dask.errors import KernelRegistrationError

__all__ = ["Walk", "code_version", "described_code"]


def _same_module(module: str, origin: str) -> bool:
    return module == origin


@dataclass
class Walk:
    """A walk over code and what it refers to.

    Attributes
    ----------
    follows : callable
        Whether code of a module counts when code of another one refers to it: ``follows(module, origin)``.
    deep : bool
        Whether attributes of modules, imports within functions and the methods of classes count too.
    seen : set of int
    modules : set of str
        Those whose code was met.
    """

    follows: Callable[[str, str], bool] = _same_module
    deep: bool = False
    seen: set[int] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


def described_code(func: Callable[..., Any], walk: Walk) -> Iterator[str]:
    """Yield text that is equal for equal code in every process of one version of Python.

    Raises
    ------
    pickle.PicklingError, TypeError, AttributeError
        The code refers to an object that cannot be hashed.
    """
    if isinstance(func, FunctionType):
        yield from _described_function(func, walk)
    else:
        yield from _described(func, "", walk)


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
    try:
        for text in described_code(func, Walk()):
            digest.update(text.encode() + b"\n")
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise KernelRegistrationError(
            f"kernel {label!r}: its code refers to an object that cannot be hashed ({error}); state its version: "
            "@kernel(…, version=1)"
        ) from error
    return "code:" + digest.hexdigest()


def _described_function(func: FunctionType, walk: Walk) -> Iterator[str]:
    walk.seen.add(id(func))
    walk.modules.add(func.__module__)
    code = func.__code__
    yield from _described_code(code, func.__module__, walk, skip_first=code.co_consts[:1] == (func.__doc__,))
    for cell in func.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        yield from _described(content, func.__module__, walk)
    if walk.deep and isinstance(getattr(func, "registry", None), MappingProxyType):  # functools.singledispatch
        yield from _described(func.registry, func.__module__, walk)  # type: ignore[attr-defined]
    names = _names(code)
    for name in sorted(names & func.__globals__.keys() - (_OF_MODULES if walk.deep else set())):
        value = func.__globals__[name]
        counts = isinstance(value, (*_PLAIN, tuple, list, dict, set, frozenset, FunctionType, functools.partial))
        if counts or _is_array(value) or isinstance(_unwrapped(value), FunctionType):
            yield name
            yield from _described(value, func.__module__, walk)
        elif walk.deep:
            yield name
            yield from _described(value, func.__module__, walk)
            yield from _used_of(value, names, func.__module__, walk)
    if walk.deep:
        for module in _imported(code, func, walk):
            yield from _used_of(module, names, func.__module__, walk)


def _used_of(value: Any, names: set[str], origin: str, walk: Walk, above: tuple[int, ...] = ()) -> Iterator[str]:
    """Yield the text of what code may use of a module, and of the modules in it: whatever it names."""
    if not isinstance(value, ModuleType) or id(value) in above or not walk.follows(value.__name__, origin):
        return
    for name in sorted(names & vars(value).keys()):
        yield name
        yield from _described(vars(value)[name], value.__name__, walk)
        yield from _used_of(vars(value)[name], names, value.__name__, walk, (*above, id(value)))


def _imported(code: CodeType, func: FunctionType, walk: Walk) -> Iterator[ModuleType]:
    """Yield the modules that a function imports when it runs, of those that count."""
    steps = list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        if step.opname != "IMPORT_NAME":
            continue
        level = steps[i - 2].argval if i >= 2 and isinstance(steps[i - 2].argval, int) else 0
        try:
            package = func.__globals__.get("__package__") or ""
            name = importlib.util.resolve_name("." * level + step.argval, package)
            if walk.follows(name, func.__module__):
                yield importlib.import_module(name)
                yield sys.modules[name.partition(".")[0]]  # what `import package.module` gives a name to
        except Exception:  # whatever its code raises; the function will meet it when it runs
            continue
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _imported(const, func, walk)


# What every module has: it differs between a script and the same file imported, and between places.
_OF_MODULES = {"__name__", "__file__", "__spec__", "__doc__", "__package__", "__loader__", "__cached__", "__builtins__"}


def _described_class(kind: type, walk: Walk) -> Iterator[str]:
    """Yield the text of a class of the user: its metaclass, bases, methods and other attributes."""
    if id(kind) in walk.seen:
        return
    walk.seen.add(id(kind))
    walk.modules.add(kind.__module__)
    for other in (type(kind), *kind.__bases__):
        if walk.follows(_home(other), _home(kind)):
            yield from _described(other, kind.__module__, walk)
    for name, value in sorted(vars(kind).items()):
        for part in _parts(value):
            special = name.startswith("__") and name.endswith("__")  # what decorators and metaclasses keep there
            if special and not isinstance(part, (FunctionType, functools.partial)):
                continue
            yield name
            try:
                yield "\n".join(_described(part, kind.__module__, walk))
            except (pickle.PicklingError, TypeError, AttributeError):  # a lock has no value that could change
                yield f"{type(part).__module__}.{type(part).__qualname__}"


def _parts(value: Any) -> tuple[Any, ...]:
    """Return what counts of an attribute of a class: the functions inside descriptors, and nothing of slots."""
    if isinstance(value, (classmethod, staticmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return (value.fget, value.fset, value.fdel)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, functools.partialmethod):
        return (value.func, value.args, value.keywords)
    if isinstance(value, functools.singledispatchmethod):
        return (value.func, value.dispatcher.registry)
    return () if isinstance(value, (GetSetDescriptorType, MemberDescriptorType)) else (value,)


_BASES: tuple[Any, ...] = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)


def _home(kind: type) -> str:
    module: Any = kind.__module__  # some classes written in C have a descriptor there
    return module if isinstance(module, str) else "builtins"


def _described_instance(value: Any, walk: Walk) -> Iterator[str]:
    """Yield the text of an object of a class of the user: the class, its attributes, slots included, its content."""
    kind = type(value)
    yield kind.__qualname__
    yield from _described_class(kind, walk)
    if id(value) in walk.seen:
        return
    walk.seen.add(id(value))
    yield from _described(getattr(value, "__dict__", {}), kind.__module__, walk)
    for each in kind.__mro__:
        for name, slot in sorted(vars(each).items()):
            if isinstance(slot, MemberDescriptorType) and walk.follows(_home(each), _home(kind)):
                yield name
                yield from _described(getattr(value, name, None), kind.__module__, walk)
    for plain in _BASES:
        if isinstance(value, plain):
            yield from _described(plain(value), kind.__module__, walk)
    if _is_array(value):
        yield from _described(sys.modules["numpy"].asarray(value), kind.__module__, walk)


class _Pickler(pickle.Pickler):
    """Pickles an object of a library; what it holds of the user counts by content, not by name, and sets have an order.

    Parameters
    ----------
    file : BytesIO
    whole : object
        What is pickled.
    module : str
    walk : Walk
    """

    def __init__(self, file: io.BytesIO, whole: object, module: str, walk: Walk) -> None:
        super().__init__(file, protocol=5)
        self.whole, self.module, self.walk = whole, module, walk

    def persistent_id(self, item: Any) -> str | None:
        kind = item if isinstance(item, type) else type(item)
        if item is self.whole or kind in (bool, int, float, str, bytes, type(None)):
            return None
        apart = (set, frozenset, FunctionType, MethodType, ModuleType, MappingProxyType, logging.Logger)
        if isinstance(item, apart) or self.walk.follows(_home(kind), self.module):
            return "\n".join(_described(item, self.module, self.walk))
        return None


def _described_code(code: CodeType, module: str, walk: Walk, *, skip_first: bool = False) -> Iterator[str]:
    yield code.co_code.hex() + code.co_exceptiontable.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars))
    for const in code.co_consts[skip_first or (walk.deep and _starts_with_docstring(code)) :]:
        yield from _described(const, module, walk)


def _starts_with_docstring(code: CodeType) -> bool:
    """Return whether the first constant of a function within another is its docstring, or stands for none."""
    if sys.version_info >= (3, 13):
        return bool(code.co_flags & 0x4000000)  # CO_HAS_DOCSTRING
    is_function = bool(code.co_flags & inspect.CO_NEWLOCALS) and not code.co_name.startswith("<")
    return is_function and isinstance(code.co_consts[:1] and code.co_consts[0], (str, type(None)))


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(const) for const in code.co_consts if isinstance(const, CodeType)))


_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


def _is_array(value: Any) -> bool:
    """Return whether a value is an array or a scalar of NumPy, which nobody has where NumPy is not imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _is_scalar(value: Any) -> bool:
    return _is_array(value) and isinstance(value, sys.modules["numpy"].generic)


def _unwrapped(value: Any) -> Any:
    """Return the function inside a wrapper such as that of functools.cache; anything else as it is."""
    return value if isinstance(value, FunctionType) else inspect.getattr_static(value, "__wrapped__", value)


def _described(value: Any, module: str, walk: Walk) -> Iterator[str]:
    """Yield text that is equal for equal values in every process: no addresses, no order of sets."""
    own = walk.deep and not isinstance(value, type) and walk.follows(_home(type(value)), module)
    if not own and isinstance(_unwrapped(value), FunctionType):
        value = _unwrapped(value)
    if isinstance(value, CodeType):
        yield from _described_code(value, module, walk)
    elif isinstance(value, FunctionType) and walk.follows(value.__module__, module):
        yield value.__qualname__
        if id(value) not in walk.seen:
            yield from _described((value.__defaults__, value.__kwdefaults__), module, walk)
            yield from _described_function(value, walk)
    elif isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        if walk.deep and isinstance(value, type) and walk.follows(value.__module__, module):
            yield value.__qualname__  # without the module, which is __main__ for the same code run as a script
            yield from _described_class(value, walk)
        else:
            yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, ModuleType):
        yield value.__name__
    elif own:
        yield from _described_instance(value, walk)
    else:
        yield from _described_data(value, module, walk)


def _described_data(value: Any, module: str, walk: Walk) -> Iterator[str]:
    if isinstance(value, _PLAIN) or _is_scalar(value):
        yield repr(value)
    elif _is_array(value) and not value.dtype.hasobject:
        yield f"{value.dtype.str}{value.shape}{blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    elif isinstance(value, functools.partial):
        yield from _described(("partial", value.func, value.args, value.keywords), module, walk)
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} {len(value)}"
        for item in value:
            yield from _described(item, module, walk)
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted("\n".join(_described(item, module, walk)) for item in value))
    elif isinstance(value, dict):
        yield repr(sorted("\n".join(_described(item, module, walk)) for item in value.items()))
    elif walk.deep and isinstance(value, MethodType):
        yield from _described((value.__func__, value.__self__), module, walk)
    elif walk.deep and isinstance(value, MappingProxyType):
        yield from _described(dict(value), module, walk)
    elif walk.deep and isinstance(value, logging.Logger):
        yield "logging.Logger"  # its name is that of the module, which is another one in a script
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        file = io.BytesIO()
        (_Pickler(file, value, module, walk) if walk.deep else pickle.Pickler(file, protocol=5)).dump(value)
        yield blake2b(file.getvalue(), digest_size=16).hexdigest()
