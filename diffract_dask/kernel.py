"""Kernels: a declaration on a pure function, the registry that orders them, and the keys of what they produce."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as _replaced
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, get_args, overload

import numpy as np
from numpy.typing import NDArray

from diffract_dask.codehash import code_version
from diffract_dask.errors import (
    CircularDependencyError,
    ConfigurationError,
    FieldNotFoundError,
    KernelError,
    KernelNotFoundError,
    KernelRegistrationError,
    did_you_mean,
)
from diffract_dask.fields import Dim, Field, Level

__all__ = [
    "GIVEN",
    "ROUNDING",
    "SHAPE",
    "WEIGHTS",
    "Kernel",
    "Keys",
    "Registry",
    "Streamed",
    "after_failure",
    "canonical_json",
    "kernel",
    "mix",
    "model_key",
    "own_params",
]

WEIGHTS = "weights"
"""The input that is the slice itself, ``(..., rows, cols)`` in its stored dtype."""

SHAPE = "shape"
"""The input that is the slice's (rows, cols): int64 ``(..., 2)``, known without reading the weights."""

ROUNDING = "rounding"
"""The input that is the unit roundoff of the slice's stored dtype: float64 ``(...,)``, known without the weights."""

GIVEN = (WEIGHTS, SHAPE, ROUNDING)
"""The inputs that no kernel produces."""

Keys = NDArray[np.uint64]
F = TypeVar("F", bound=Callable[..., Any])


class Streamed(Protocol):
    """The twin of a kernel for a slice that is read in spans of its long axis.

    Blocks arrive as ``(b, k)`` arrays in the stored dtype, ``k = min(rows, cols)``: row blocks of a tall slice,
    transposed column panels of a wide one. One state per span; states are merged one at a time. A twin whose `finish`
    always reads the slice again says so with an attribute ``rereads = True``, for the plan's memory.
    """

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Any:
        """Return an empty state for a slice of `shape` (rows, cols)."""

    def update(self, state: Any, block: NDArray[Any]) -> Any:
        """Return `state` with one more block in it; may work in place."""

    def merge(self, first: Any, second: Any) -> Any:
        """Return one state from two neighbouring spans; may work in place in `first`."""

    def finish(
        self, state: Any, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the kernel's outputs for one slice, without batch axes.

        `reread` yields all blocks again. `params` holds the kernel's parameters, and its inputs other than the weights
        by their names.
        """

    def workspace(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return peak bytes of (one state while it is updated, finish beyond the state)."""

    def route(self, shape: tuple[int, int], dtype: np.dtype[Any], params: Mapping[str, Any]) -> str:
        """Return the name of the route that will be taken, for ``plan.explain()``."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function with what the engine must know of it. Made by :func:`kernel`.

    Parameters
    ----------
    name : str
        The function's name; what ``configure_kernel`` takes and graph layers are called.
    function : callable
        ``(inputs…, *, parameters…) -> outputs`` on arrays with leading batch axes.
    outputs : mapping of str to Field
        In the order in which the function returns them.
    inputs : tuple of str
        Input fields: the positional parameter names.
    defaults : mapping
        Keyword-only parameters and their defaults.
    version : int or str
        Changes whenever the same inputs could give other values.
    level : {"slice", "model", "pair"}
        A model-level function gets a 1-D array over the slices of one model for each slice-level input.
    batch : bool
        False: called once per slice, without batch axes.
    blocks : Streamed, optional
        The out-of-core twin.
    workspace : callable, optional
        ``(n, rows, cols, itemsize) -> bytes`` of peak memory beyond inputs and outputs for `n` slices.
    status : callable, optional
        ``(*outputs) -> uint8 array`` over the batch axes: a status where it can say more than "NaN is undefined".
    route : callable, optional
        ``(rows, cols, dtype, params) -> str`` for ``plan.explain()``.
    partial : Streamed, optional
        A twin that needs less memory and gives part of the outputs, with the status ``LEADING_ONLY``; it is only used
        where that is asked for and nothing else fits.
    check : callable, optional
        Called with all parameters by name wherever some are set; raises ConfigurationError for a wrong value, before
        anything is computed.
    persist : bool
        False if all outputs are.
    """

    name: str
    function: Callable[..., Any]
    outputs: Mapping[str, Field]
    inputs: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    version: int | str = 1
    level: Level = "slice"
    batch: bool = True
    blocks: Streamed | None = None
    workspace: Callable[[int, int, int, int], int] | None = None
    status: Callable[..., Any] | None = None
    route: Callable[[int, int, np.dtype[Any], Mapping[str, Any]], str] | None = None
    partial: Streamed | None = None
    check: Callable[..., None] | None = None

    @property
    def persist(self) -> bool:
        """Whether any output is stored without being asked for."""
        return any(f.persist for f in self.outputs.values())

    def parameters(self, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the defaults updated by `params`; ConfigurationError for an unknown name or a wrong value."""
        merged = dict(self.defaults)
        for key, value in (params or {}).items():
            if key not in merged:
                found = f"it has {', '.join(sorted(merged))}" if merged else "it has none"
                raise ConfigurationError(
                    f"kernel {self.name!r} has no parameter {key!r}; {found}.{did_you_mean(key, merged)}"
                )
            merged[key] = value
        if self.check is not None and params:
            try:
                self.check(**merged)
            except ConfigurationError as error:
                raise ConfigurationError(f"kernel {self.name!r}: {error}") from error
        return own_params(merged)

    def root(self, params: Mapping[str, Any] | None = None) -> np.uint64:
        """Return the hash of name, version and parameters: the first input of every key of this kernel."""
        merged = self.parameters(params)
        try:
            text = canonical_json([self.name, self.version, merged])
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"kernel {self.name!r}: parameters must be JSON values (numbers, strings, lists, null); {error}"
            ) from error
        return np.uint64(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little"))


def own_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of parameters that can be changed without changing the original: lists, dicts and arrays too."""
    return {
        key: value if isinstance(value, (bool, int, float, str, type(None))) else copy.deepcopy(value)
        for key, value in params.items()
    }


def canonical_json(value: Any) -> str:
    """Return JSON text that is the same for equal values: sorted keys, no spaces, NumPy scalars as Python ones."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


@overload
def kernel(function: F, /) -> F: ...
@overload
def kernel(
    *,
    version: int | str | None = None,
    level: Level = "slice",
    batch: bool = True,
    blocks: Streamed | None = None,
    workspace: Callable[[int, int, int, int], int] | None = None,
    status: Callable[..., Any] | None = None,
    route: Callable[[int, int, np.dtype[Any], Mapping[str, Any]], str] | None = None,
    partial: Streamed | None = None,
    check: Callable[..., None] | None = None,
    name: str | None = None,
    **outputs: Field,
) -> Callable[[F], F]: ...
def kernel(
    function: F | None = None,
    /,
    *,
    version: int | str | None = None,
    level: Level = "slice",
    batch: bool = True,
    blocks: Streamed | None = None,
    workspace: Callable[[int, int, int, int], int] | None = None,
    status: Callable[..., Any] | None = None,
    route: Callable[[int, int, np.dtype[Any], Mapping[str, Any]], str] | None = None,
    partial: Streamed | None = None,
    check: Callable[..., None] | None = None,
    name: str | None = None,
    **outputs: Field,
) -> F | Callable[[F], F]:
    """Declare a kernel; the decorated function is returned unchanged, with the declaration in ``__kernel__``.

    Positional parameter names are the input fields, keyword-only parameters are configuration. Without
    `outputs` the kernel produces one scalar field of its own name.

    Raises
    ------
    KernelRegistrationError
        The signature has ``*args``, ``**kwargs`` or a keyword-only parameter without a default.

    Examples
    --------
    >>> @kernel(top_share=Field(long_name="Share of the largest eigenvalue"), version=1)
    ... def top_share(esd):
    ...     return esd[..., -1] / esd.sum(-1)
    >>> float(top_share(np.array([1.0, 3.0])))
    0.75
    >>> top_share.__kernel__.inputs
    ('esd',)
    """

    def declare(func: F) -> F:
        label = name or func.__name__
        inputs, defaults = _signature(func, label)
        made = dict(outputs) or {label: Field(long_name=label.replace("_", " "))}
        form = repr(([(output, f.dims) for output, f in made.items()], level, batch))
        declared = Kernel(
            name=label,
            function=func,
            outputs=MappingProxyType(made),
            inputs=inputs,
            defaults=MappingProxyType(defaults),
            version=version if version is not None else code_version(func, label, form),
            level=level,
            batch=batch,
            blocks=blocks,
            workspace=workspace,
            status=status,
            route=route,
            partial=partial,
            check=check,
        )
        func.__kernel__ = declared  # type: ignore[attr-defined]
        return func

    return declare if function is None else declare(function)


def _signature(func: Callable[..., Any], label: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    inputs: list[str] = []
    defaults: dict[str, Any] = {}
    for parameter in inspect.signature(func).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise KernelRegistrationError(
                f"kernel {label!r}: {parameter} is not allowed; name each input field as a positional parameter"
            )
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty:
                raise KernelRegistrationError(
                    f"kernel {label!r}: the keyword-only parameter {parameter.name!r} is configuration and needs a "
                    "default; an input field is a positional parameter"
                )
            defaults[parameter.name] = parameter.default
        elif parameter.default is not parameter.empty:
            raise KernelRegistrationError(
                f"kernel {label!r}: {parameter.name!r} is positional, so an input field, and cannot have a default; "
                f"write '*, {parameter}' for configuration"
            )
        else:
            inputs.append(parameter.name)
    return tuple(inputs), defaults


class Registry:
    """The kernels of one session, by name, with the producer of each field.

    Parameters
    ----------
    kernels : iterable of Kernel or of decorated functions
        Added in order.
    """

    def __init__(self, kernels: Iterable[Kernel | Callable[..., Any]] = ()) -> None:
        self.kernels: dict[str, Kernel] = {}
        self._producer: dict[str, str] = {}
        self.config: dict[str, dict[str, Any]] = {}
        self.variants: dict[str, tuple[str, dict[str, Any]]] = {}
        for item in kernels:
            self.add(item)

    def copy(self) -> Registry:
        """Return an independent registry with the same kernels and configuration."""
        other = Registry()
        other.kernels = dict(self.kernels)
        other._producer = dict(self._producer)
        other.config = {name: dict(params) for name, params in self.config.items()}
        other.variants = dict(self.variants)
        return other

    def add(self, item: Kernel | Callable[..., Any], *, replace: bool = False) -> Kernel:
        """Add a kernel; with ``replace=True`` in place of one of the same name, whose variants are made anew.

        Raises
        ------
        KernelRegistrationError
            The name is taken, an input does not exist, an output has a producer already, or levels or dimensions
            disagree.
        CircularDependencyError
            The kernels would need each other in a circle.
        """
        new = _declared(item)
        if new.name in self.kernels and not replace:
            raise KernelRegistrationError(f"a kernel {new.name!r} exists already; pass replace=True to replace it")
        kernels = {**self.kernels, new.name: new}
        producer = {f: k for f, k in self._producer.items() if k != new.name}
        for name, declared in new.outputs.items():
            if name in GIVEN:
                raise KernelRegistrationError(
                    f"kernel {new.name!r}: {name!r} is given by the slice itself and cannot be produced; choose "
                    "another name"
                )
            if name in producer:
                raise KernelRegistrationError(
                    f"kernel {new.name!r}: the field {name!r} is produced by kernel {producer[name]!r}; one producer "
                    "per field. Choose another name, or compute.variant(…) for a second setting"
                )
            _check_dims(new, name, declared)
            producer[name] = new.name
        for other in kernels.values():
            _check_inputs(other, kernels, producer, new)
        _order(kernels, producer, [new.name])
        self._take(new, kernels, producer)
        return new

    def _take(self, new: Kernel, kernels: dict[str, Kernel], producer: dict[str, str]) -> None:
        """Put `new` in force, with its variants made anew; or leave everything as it was."""
        before = self.kernels, self._producer, self.config, self.variants
        self.kernels, self._producer = kernels, producer
        self.variants = {name: made for name, made in before[3].items() if name != new.name}
        known = {key: value for key, value in self.config.get(new.name, {}).items() if key in new.defaults}
        self.config = {**self.config, new.name: known}
        try:
            for name, (original, params) in before[3].items():
                if original == new.name:
                    self.make_variant(original, name, params, replace=True)
        except (KernelError, ConfigurationError) as error:
            self.kernels, self._producer, self.config, self.variants = before
            raise KernelRegistrationError(f"kernel {new.name!r} cannot replace the present one: {error}") from error

    def variant(self, kernel_name: str, field_name: str, /, **params: Any) -> Kernel:
        """Add a copy of a single-output kernel with other defaults, which produces the field `field_name`.

        Parameters that are not given are those in force now. When the kernel is replaced, so is the variant.
        """
        return self.make_variant(kernel_name, field_name, params)

    def make_variant(
        self, kernel_name: str, field_name: str, params: Mapping[str, Any], *, replace: bool = False
    ) -> Kernel:
        """Add a variant; with ``replace=True`` in place of a kernel of the same name."""
        original = self.kernel(kernel_name)
        if len(original.outputs) != 1:
            raise KernelRegistrationError(
                f"kernel {kernel_name!r} has {len(original.outputs)} outputs; a variant needs a kernel with one"
            )
        (declared,) = original.outputs.values()
        shown = ", ".join(f"{k}={v!r}" for k, v in params.items())
        made = _replaced(
            original,
            name=field_name,
            outputs=MappingProxyType({field_name: _replaced(declared, long_name=f"{declared.long_name} ({shown})")}),
            defaults=MappingProxyType(self.params(kernel_name, {kernel_name: params})),
            version=f"{original.name}:{original.version}",
        )
        self.add(made, replace=replace)
        self.variants[field_name] = (kernel_name, own_params(params))
        return made

    def configure(self, kernel_name: str, **params: Any) -> dict[str, Any]:
        """Set parameters of a kernel for this registry and return all of its parameters."""
        merged = own_params({**self.config.get(kernel_name, {}), **params})
        self.kernel(kernel_name).root(merged)
        self.config[kernel_name] = merged
        return self.params(kernel_name)

    def params(self, kernel_name: str, call: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Return the parameters in force: defaults, then :meth:`configure`, then those of one call."""
        merged = {**self.config.get(kernel_name, {}), **(call or {}).get(kernel_name, {})}
        return self.kernel(kernel_name).parameters(merged)

    def kernel(self, name: str) -> Kernel:
        """Return the kernel `name`; KernelNotFoundError with the nearest names."""
        if name not in self.kernels:
            raise KernelNotFoundError(f"no kernel {name!r}.{did_you_mean(name, self.kernels)}")
        return self.kernels[name]

    def producer(self, field_name: str) -> Kernel:
        """Return the kernel that produces `field_name`; FieldNotFoundError with the nearest names."""
        if field_name not in self._producer:
            near = did_you_mean(field_name, self._producer)
            raise FieldNotFoundError(f"no kernel produces the field {field_name!r}.{near}")
        return self.kernels[self._producer[field_name]]

    def field(self, name: str) -> Field:
        """Return the declaration of the field `name`."""
        return self.producer(name).outputs[name]

    @property
    def fields(self) -> dict[str, Field]:
        """Every field that can be produced, in order of registration."""
        return {name: self.kernels[k].outputs[name] for name, k in self._producer.items()}

    def closure(self, fields: Iterable[str]) -> list[Kernel]:
        """Return the kernels that `fields` need, themselves included, each after those it depends on."""
        wanted = [self.producer(name).name for name in fields]
        return [self.kernels[name] for name in _order(self.kernels, self._producer, wanted)]


def _declared(item: Kernel | Callable[..., Any]) -> Kernel:
    declared = item if isinstance(item, Kernel) else getattr(item, "__kernel__", None)
    if not isinstance(declared, Kernel):
        raise KernelRegistrationError(
            f"{getattr(item, '__name__', repr(item))} is not a kernel; decorate the function with @kernel"
        )
    return declared


def _check_dims(owner: Kernel, name: str, declared: Field) -> None:
    unknown = [dim for dim in declared.dims if dim not in get_args(Dim)]
    if unknown:
        raise KernelRegistrationError(
            f"kernel {owner.name!r}: the field {name!r} has the dimension {unknown[0]!r}; known are "
            f"{', '.join(get_args(Dim))}"
        )
    if owner.level == "model" and declared.dims:
        raise KernelRegistrationError(
            f"kernel {owner.name!r} is model-level: its field {name!r} is one number and cannot have dimensions "
            f"{declared.dims}"
        )


def _check_inputs(one: Kernel, kernels: Mapping[str, Kernel], producer: Mapping[str, str], new: Kernel) -> None:
    """Raise if an input of `one` does not exist or does not fit its level, now that `new` is there."""
    where = f"kernel {one.name!r}"
    if one is not new:
        where = f"kernel {new.name!r} cannot replace the present one: {where}"
    for name in one.inputs:
        if name not in GIVEN and name not in producer:
            raise KernelRegistrationError(
                f"{where} needs the field {name!r}, which no kernel produces.{did_you_mean(name, [*GIVEN, *producer])}"
            )
        given = name in GIVEN
        level = "slice" if given else kernels[producer[name]].level
        if one.level == "slice" and level != "slice":
            raise KernelRegistrationError(f"{where} is slice-level and cannot take the {level}-level field {name!r}")
        if one.level == "model" and (given or kernels[producer[name]].outputs[name].dims):
            raise KernelRegistrationError(
                f"{where} is model-level and takes one number per slice; {name!r} is an array. Reduce it in a "
                "slice-level kernel first"
            )


def _order(kernels: Mapping[str, Kernel], producer: Mapping[str, str], wanted: Sequence[str]) -> list[str]:
    """Return `wanted` and what it depends on in topological order (depth first, no recursion limit in practice)."""
    done: dict[str, None] = {}
    path: list[str] = []

    def visit(name: str) -> None:
        if name in done:
            return
        if name in path:
            raise CircularDependencyError(
                "kernels need each other in a circle: " + " → ".join([*path[path.index(name) :], name])
            )
        path.append(name)
        for needed in kernels[name].inputs:
            if needed not in GIVEN:
                visit(producer[needed])
        path.pop()
        done[name] = None

    for name in wanted:
        visit(name)
    return list(done)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FAILED = np.uint64(0xFA11ED)


def _scramble(x: Keys) -> Keys:
    """SplitMix64's finaliser, elementwise (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix(root: np.uint64, inputs: Sequence[Keys]) -> Keys:
    """Return the expected keys of a kernel: a positional mix of its root over the keys of its inputs.

    Parameters
    ----------
    root : uint64
        :meth:`Kernel.root`.
    inputs : sequence of uint64 arrays
        Keys of the input fields, in the order of the kernel's inputs; 0 means unknown.

    Returns
    -------
    uint64 array
        0 exactly where an input is unknown.
    """
    state = np.full(inputs[0].shape, root, np.uint64)
    known = np.ones(inputs[0].shape, bool)
    with np.errstate(over="ignore"):
        for position, keys in enumerate(inputs, 1):
            step = np.uint64(position * int(_GOLDEN) % 2**64)
            state = _scramble(state ^ _scramble(keys + step))
            known &= keys != 0
    state[state == 0] = 1
    state[~known] = 0
    return state


def after_failure(keys: Keys, failed: NDArray[np.bool_]) -> Keys:
    """Return the keys of inputs as those see them that depend on them: other ones where the input's kernel raised.

    A kernel that raised keeps its key, so that it does not run again by itself. What was computed from its NaN must
    be computed anew as soon as there is a value.
    """
    if not failed.any():
        return keys
    marked = _scramble(keys ^ _FAILED) | np.uint64(1)
    return np.where(failed & (keys != 0), marked, keys)


def model_key(root: np.uint64, names: Sequence[str], inputs: Sequence[Keys]) -> np.uint64:
    """Return the expected key of a model-level kernel: a mix over the sorted (name, input keys) of its slices.

    0 where an input key is unknown.
    """
    if any(bool((keys == 0).any()) for keys in inputs):
        return np.uint64(0)
    order = sorted(range(len(names)), key=names.__getitem__)
    h = blake2b(int(root).to_bytes(8, "little"), digest_size=8)
    h.update("\0".join(names[i] for i in order).encode())
    h.update(np.stack([*inputs], axis=-1)[order].astype("<u8").tobytes())
    return np.uint64(int.from_bytes(h.digest(), "little") or 1)
