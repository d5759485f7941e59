"""Configurations: nested mappings that never change once made, and how layers of them are merged."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from diffract_dask.errors import DeclarationError, FrozenConfigError, did_you_mean
from diffract_dask.runs import encoding

__all__ = ["UNSET", "Config", "Replacement", "replace", "thawed"]


class _Unset:
    """The value that takes a key away when layers are merged."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET = _Unset()


class Replacement:
    """A mapping that takes the place of another one, where a plain mapping would be merged into it."""

    __slots__ = ("value",)

    def __init__(self, value: Mapping[Any, Any]) -> None:
        self.value = Config(value)

    def __repr__(self) -> str:
        return f"replace({dict(self.value)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replacement) and self.value == other.value

    def __hash__(self) -> int:
        return hash(encoding.canonical(self.value))


def replace(mapping: Mapping[Any, Any] | None = None, /, **values: Any) -> Replacement:
    """Return a mapping that takes the place of the base's instead of being merged into it.

    >>> Config({"probe": {"amp": 1, "jitter": True}}, probe=replace(amp=2))
    Config({'probe': {'amp': 2}})
    """
    return Replacement({**(mapping or {}), **values})


class FrozenList(list[Any]):
    """A list within a configuration: reads like one and cannot be changed."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FrozenConfigError("a list in a configuration cannot be changed; change a copy of it: list(value)")

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> Any:
        return FrozenList, (list(self),)

    def __deepcopy__(self, memo: Any) -> FrozenList:
        return self


class Config(dict[Any, Any]):
    """A configuration: a dict whose items are attributes too, and which cannot be changed.

    Parameters
    ----------
    *layers : mapping or None
        Merged in order. Within each key, a mapping is merged into a mapping; anything else takes its place; `UNSET`
        takes the key away; `replace` puts a mapping in the place of another.
    **values
        The last layer.

    Notes
    -----
    Nested mappings become configurations, lists lists that cannot be changed, sets frozensets, and NumPy arrays
    read-only copies. Keys that are names of dict's methods are reached as items only: ``config["items"]``.

    Examples
    --------
    >>> base = Config(scan={"width": 5e-6, "step": 1e-7}, notes="first")
    >>> Config(base, {"scan": {"step": 1e-8}, "notes": UNSET})
    Config({'scan': {'width': 5e-06, 'step': 1e-08}})
    >>> base.scan.step
    1e-07

    Raises
    ------
    DeclarationError
        `UNSET` for a key that no earlier layer has.
    UnencodableError
        A value has no canonical form.
    """

    __slots__ = ()

    def __init__(self, *layers: Mapping[Any, Any] | None, **values: Any) -> None:
        merged: dict[Any, Any] = {}
        for layer in (*layers, values):
            if layer is not None and not isinstance(layer, Mapping):
                raise TypeError(f"a layer of a configuration is a mapping, not {type(layer).__name__}")
            merge_into(merged, layer or {}, "")
        super().__init__({key: _frozen(value, str(key)) for key, value in merged.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            near = did_you_mean(name, [key for key in self if isinstance(key, str)])
            raise AttributeError(f"the configuration has no key {name!r}.{near}") from None

    def __missing__(self, key: Any) -> NoReturn:
        near = did_you_mean(str(key), [known for known in self if isinstance(known, str)])
        raise ConfigKeyError(f"the configuration has no key {key!r}.{near}")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FrozenConfigError(
            "a configuration cannot be changed; make another: Config(config, key=value), or a copy: config.to_dict()"
        )

    __setitem__ = __delitem__ = __setattr__ = __delattr__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __or__(self, other: Any) -> Any:
        return Config(self, other)

    def __repr__(self) -> str:
        return f"Config({thawed(self)!r})"

    def __reduce__(self) -> Any:
        return Config, (dict(self),)

    def __copy__(self) -> Config:
        return self

    def __deepcopy__(self, memo: Any) -> Config:
        return self

    def copy(self) -> dict[Any, Any]:
        """Return a plain dict that can be changed, at every depth."""
        return self.to_dict()

    def to_dict(self) -> dict[Any, Any]:
        """Return a plain dict that can be changed, at every depth."""
        found: dict[Any, Any] = thawed(self)
        return found

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the content."""
        return encoding.fingerprint(self, "config")


class ConfigKeyError(KeyError):
    """A key that a configuration lacks; says so in words."""

    def __str__(self) -> str:
        return str(self.args[0])


def merge_into(target: dict[Any, Any], layer: Mapping[Any, Any], where: str) -> None:
    """Merge a layer into a plain dict."""
    for key, value in layer.items():
        path = f"{where}.{key}" if where else str(key)
        if value is UNSET:
            if key not in target:
                near = did_you_mean(str(key), [known for known in target if isinstance(known, str)])
                raise DeclarationError(f"there is nothing to unset at {path!r}.{near}")
            del target[key]
        elif isinstance(value, Replacement):
            target[key] = thawed(value.value)
        elif isinstance(value, Mapping):
            present = target.get(key)
            below = dict(present) if isinstance(present, Mapping) else {}
            merge_into(below, value, path)
            target[key] = below
        else:
            target[key] = value


def _frozen(value: Any, where: str) -> Any:
    if isinstance(value, Config):
        return value
    if isinstance(value, Mapping):
        return Config(value)
    if type(value) in (bool, int, float, str) or value is None:
        return value
    if isinstance(value, list):
        return FrozenList(_frozen(item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, tuple):
        return tuple(_frozen(item, f"{where}[{i}]") for i, item in enumerate(value))
    encoding.encode(value, f"config key {where!r}", whole=False)
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, bytearray):
        return bytes(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        value = value.copy()
        value.setflags(write=False)
    return value


def thawed(value: Any) -> Any:
    """Return a value with plain dicts, lists and arrays in the place of those that cannot be changed."""
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thawed(item) for item in value]
    if isinstance(value, tuple):
        return tuple(thawed(item) for item in value)
    numpy = sys.modules.get("numpy")
    return value.copy() if numpy is not None and isinstance(value, numpy.ndarray) else value


class Overrides(dict[Any, Any]):
    """What a variant adds to its base, as it was written: `UNSET` and `replace` stay. It cannot be changed."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise FrozenConfigError("what a variant adds to its base cannot be changed; register another variant")

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return frozen_overrides, (dict(self),)


def frozen_overrides(*layers: Mapping[Any, Any], where: str = "") -> Overrides:
    """Return the layers as one, which shares nothing that can change with them."""
    found: dict[Any, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            path = f"{where}.{key}" if where else str(key)
            if value is UNSET or isinstance(value, Replacement):
                found[key] = value
            elif isinstance(value, Mapping):
                below = found.get(key)
                found[key] = frozen_overrides(*([below] if isinstance(below, Overrides) else []), value, where=path)
            else:
                found[key] = _frozen(value, path)
    return Overrides(found)


def encode_overrides(layer: Mapping[Any, Any]) -> Any:
    """Return overrides as plain JSON data, `UNSET` as ``{"$unset": true}`` and `replace` as ``{"$replace": …}``."""
    found: dict[str, Any] = {}
    for key, value in layer.items():
        name = f"${key}" if str(key).startswith("$") else str(key)
        if value is UNSET:
            found[name] = {"$unset": True}
        elif isinstance(value, Replacement):
            found[name] = {"$replace": encoding.encode(value.value)}
        elif isinstance(value, Mapping):
            found[name] = encode_overrides(value)
        else:
            found[name] = encoding.encode(value)
    return found


def pick(config: Mapping[Any, Any], path: str) -> Any:
    """Return what is at a key or dotted path, `UNSET` if nothing is; a key that has dots itself comes first."""
    if path in config:
        return config[path]
    head, _, rest = path.partition(".")
    below = config.get(head, UNSET)
    return pick(below, rest) if rest and isinstance(below, Mapping) else UNSET


def paths(config: Mapping[Any, Any], where: str = "") -> Iterator[str]:
    """Yield every key of a configuration as a dotted path, those of mappings too."""
    for key, value in config.items():
        path = f"{where}.{key}" if where else str(key)
        yield path
        if isinstance(value, Mapping):
            yield from paths(value, path)
