"""Variants: named configurations that build on one another; and the register of all that this process declares."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from diffract_dask.errors import DeclarationError, UnknownNameError, did_you_mean
from diffract_dask.runs import encoding
from diffract_dask.runs.config import Config, Overrides, encode_overrides, frozen_overrides
from diffract_dask.runs.naming import check_kind, check_name, own_name
from diffract_dask.runs.records import SHORT

if TYPE_CHECKING:
    from diffract_dask.runs.chains import Chain
    from diffract_dask.runs.pipelines import Pipeline

__all__ = ["Variant", "VariantRegistry", "register", "registry"]


@dataclass(frozen=True, eq=False)
class Variant:
    """A named layer of configuration upon a base.

    Attributes
    ----------
    name, module : str
    base : Variant or None
    forks_of : str or None
        The variant of the parent pipeline that this one descends from under another name.
    overrides : Overrides
        What it adds to its base, as written.
    """

    name: str
    module: str
    base: Variant | None = None
    forks_of: str | None = None
    overrides: Overrides = field(default_factory=Overrides)

    @cached_property
    def config(self) -> Config:
        """The merged configuration."""
        return Config(self.base.config if self.base else None, self.overrides)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the merged configuration; names do not count."""
        return self.config.fingerprint

    @property
    def short_fp(self) -> str:
        """The first twelve digits of the fingerprint."""
        return self.fingerprint[:SHORT]

    def is_written_like(self, other: Variant) -> bool:
        """Return whether both say the same."""
        texts = [encoding.plain_text(encode_overrides(item.overrides)) for item in (self, other)]
        bases = [item.base and (item.base.module, item.base.name, item.base.fingerprint) for item in (self, other)]
        return texts[0] == texts[1] and bases[0] == bases[1] and self.forks_of == other.forks_of


@dataclass(frozen=True)
class _Origin:
    """Where something was declared: a second run of the same lines, as by a reload, may replace it."""

    code: CodeType | None
    line: int

    @classmethod
    def of(cls, frame: FrameType) -> _Origin:
        return cls(frame.f_code, frame.f_lineno)

    def again(self, other: _Origin) -> bool:
        """Return whether `other` is the same place, run anew: its code was compiled again."""
        if self.code is None or other.code is None or self.code is other.code:
            return False
        if not os.path.isfile(other.code.co_filename):  # typed in, as in a notebook
            return True
        whole = self.code.co_name == other.code.co_name == "<module>"
        return self.code.co_filename == other.code.co_filename and (whole or self.line == other.line)


def owner(frame: FrameType) -> str:
    """Return the name of the module that a frame runs in; of a script, the name it would be imported by."""
    return own_name(frame.f_globals)


class VariantRegistry:
    """The variants, pipelines and chains that this process has declared, by module and name."""

    def __init__(self) -> None:
        self._variants: dict[str, dict[str, Variant]] = {}
        self._origins: dict[tuple[str, str], _Origin] = {}
        self._pipelines: dict[str, dict[str, Pipeline]] = {}
        self._chains: dict[str, dict[str, Chain]] = {}
        self._files: dict[str, str] = {}
        self._texts: dict[str, bytes] = {}
        self._lock = threading.RLock()
        self.count = 0

    def register(
        self,
        module: str,
        name: str,
        *layers: Mapping[str, Any],
        base: str | Variant | None = None,
        forks_of: str | None = None,
        origin: _Origin | None = None,
        **overrides: Any,
    ) -> Variant:
        """Register a variant of a module that is named; `register` finds the module itself.

        Raises
        ------
        DeclarationError
            The module has a variant of this name, or a base is ambiguous.
        UnknownNameError
            There is no such base.
        UnencodableError
            A value has no canonical form.
        """
        check_name(name, "variant")
        for layer in layers:
            check_kind(layer, Mapping, f"a layer of variant {name!r}")
        check_kind(base or "", (str, Variant), f"the base of variant {name!r}")
        check_kind(forks_of or "", str, f"forks_of= of variant {name!r}")
        added = frozen_overrides(*layers, overrides)
        with self._lock:
            found = self._base(module, base) if base is not None else None
            variant = Variant(name, module, found, forks_of, added)
            _ = variant.fingerprint  # refuses, here and by name, what cannot be kept
            known = self._variants.get(module, {}).get(name)
            before, here = self._origins.get((module, name)), origin or _Origin(None, 0)
            if known is not None and not known.is_written_like(variant) and not (before and before.again(here)):
                raise DeclarationError(
                    f"{module} has a variant {name!r} already, with other values; give this one another name"
                )
            self._variants.setdefault(module, {})[name] = variant
            self._origins[module, name] = here
            self.count += 1
        return variant

    def _base(self, module: str, base: str | Variant) -> Variant:
        if isinstance(base, Variant):
            return base
        owner_of, colon, name = base.rpartition(":")
        if colon:
            return self.get(owner_of, name)
        own = self._variants.get(module, {})
        if base in own:
            return own[base]
        others = [module for module, known in self._variants.items() if base in known]
        if len(others) == 1:
            return self._variants[others[0]][base]
        if others:
            raise DeclarationError(
                f"the base {base!r} is in several modules ({', '.join(sorted(others))}); name one: "
                f"base={f'{others[0]}:{base}'!r}"
            )
        raise UnknownNameError(f"{module} has no variant {base!r} to build on.{did_you_mean(base, own)}")

    def get(self, module: str, name: str) -> Variant:
        """Return a variant.

        Raises
        ------
        UnknownNameError
            The module has declared none of this name; the message has the nearest ones.
        """
        known = self._variants.get(module)
        if known is None:
            hint = did_you_mean(module, self._variants) or " Import it first."
            raise UnknownNameError(f"no module {module!r} has registered variants.{hint}")
        if name not in known:
            hint = did_you_mean(name, known) or f" There are {', '.join(map(repr, known))}."
            raise UnknownNameError(f"{module} has no variant {name!r}.{hint}")
        return known[name]

    def for_module(self, module: str) -> dict[str, Variant]:
        """Return the variants of a module, in the order in which they were registered."""
        return dict(self._variants.get(module, {}))

    def drop_module(self, module: str) -> None:
        """Forget what a module has declared."""
        with self._lock:
            for table in (self._variants, self._pipelines, self._chains, self._files, self._texts):
                table.pop(module, None)
            self._origins = {key: at for key, at in self._origins.items() if key[0] != module}
            self.count += 1

    def modules(self) -> list[str]:
        """Return the modules that have declared something."""
        return list(dict.fromkeys([*self._variants, *self._pipelines, *self._chains]))

    def pipelines(self, module: str) -> dict[str, Pipeline]:
        """Return the pipelines of a module by name."""
        return dict(self._pipelines.get(module, {}))

    def chains(self, module: str) -> dict[str, Chain]:
        """Return the chains of a module by name."""
        return dict(self._chains.get(module, {}))

    def note(self, declared: Pipeline | Chain) -> None:
        """Remember a pipeline or chain; a later one of the same module and name takes its place."""
        from diffract_dask.runs.chains import Chain

        with self._lock:
            if isinstance(declared, Chain):
                self._chains.setdefault(declared.module, {})[declared.name] = declared
            else:
                self._pipelines.setdefault(declared.module, {})[declared.name] = declared
            if declared.source_file:
                self._files[declared.module] = declared.source_file
                with suppress(OSError):  # now, while it is what runs: it may be edited before the first run
                    self._texts[declared.module] = Path(declared.source_file).read_bytes()
            self.count += 1

    def source_file(self, module: str) -> str | None:
        """Return the file of a module that has declared a pipeline or chain, if it has one."""
        return self._files.get(module)

    def source_text(self, module: str) -> bytes | None:
        """Return the source of such a module as it was when it declared that."""
        return self._texts.get(module)


registry = VariantRegistry()


def register(
    name: str,
    /,
    *layers: Mapping[str, Any],
    base: str | Variant | None = None,
    forks_of: str | None = None,
    **overrides: Any,
) -> Variant:
    """Register a variant of the module that calls this.

    Parameters
    ----------
    name : str
    *layers : mapping
        Overrides as mappings: for keys that are no identifiers, or are called ``base`` or ``forks_of``.
    base : str or Variant
        What it builds on: a variant of this module; else the only one of that name in another module;
        ``"module:name"`` says which.
    forks_of : str
        The variant of the parent pipeline that this one descends from under another name.
    **overrides
        What it adds to its base, merged as `Config` does.

    Returns
    -------
    Variant

    Raises
    ------
    DeclarationError, UnknownNameError, UnencodableError
        As `VariantRegistry.register`.
    """
    frame = sys._getframe(1)
    return registry.register(
        owner(frame), name, *layers, {**overrides}, base=base, forks_of=forks_of, origin=_Origin.of(frame)
    )
