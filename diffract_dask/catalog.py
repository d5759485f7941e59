"""The catalog: what parameters a model has, their types, why some are not analysed, which are tied, and digests.

A source (:mod:`diffract_dask.sources`) gives a :class:`Checkpoint` of lazy :class:`Tensor` objects;
:func:`describe` turns it into :class:`Parameters`, one row for *every* parameter. The 2-D reading of a tensor is
dimension 0 × the rest; it depends on the tensor alone, so that every route to the same tensor agrees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.digests import (
    PIECE_BYTES,
    Digester,
    combine_digests,
    digest,
    digest_keys,
    hash_piece,
    is_constant,
    matrix_shape,
    piece_rows,
)
from diffract_dask.errors import (
    InvalidIdentifierError,
    ParameterNotFoundError,
    SessionError,
    SourceError,
    did_you_mean,
)
from diffract_dask.sources import dtypes

__all__ = [
    "PARAMETER_TYPES",
    "PIECE_BYTES",
    "SKIP_MEANING",
    "Checkpoint",
    "Digester",
    "Location",
    "Parameters",
    "SkipReason",
    "Tensor",
    "classify",
    "combine_digests",
    "describe",
    "digest",
    "digest_keys",
    "hash_piece",
    "matrix_shape",
    "natural_key",
    "piece_rows",
    "tie",
    "uid",
]


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor's bytes lie in a file, and what the file was like when that was found out.

    Parameters
    ----------
    path : str
        Absolute path.
    offset, nbytes : int
        Of the tensor in the file.
    size, mtime_ns : int
        Of the file.
    header : str
        ``"start+length:hash"``: the bytes that say where tensors lie (the header of safetensors, the directory of
        a zip file) and their xxh3_128.
    """

    path: str
    offset: int
    nbytes: int
    size: int
    mtime_ns: int
    header: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter as a source sees it; nothing is read until `read` is called.

    Parameters
    ----------
    name : str
        Full address in the source.
    shape : tuple of int
    dtype : str
        Name of the stored type (:mod:`diffract_dask.sources.dtypes`), or ``string``, ``object``, ….
    read : callable
        ``read(start, stop)`` returns rows [start, stop) of dimension 0 as a raw array; may alias live memory.
        A scalar is ``read(0, 1)``, of shape ``()``.
    location : Location, optional
        Where the bytes lie, if the tensor can be linked.
    storage : hashable
        Equal for tensors that share memory; None where the source does not know.
    kind : str
        The type (:data:`PARAMETER_TYPES`) where the framework knows it.
    module : str
        The module that holds the parameter; by default the name without its last part.
    used : bool, optional
        Whether a forward pass uses it, if known.
    skip : str
        A reason (:class:`SkipReason`) that only the source can know.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], NDArray[Any]]
    location: Location | None = None
    storage: Hashable = None
    kind: str = ""
    module: str = ""
    used: bool | None = None
    skip: str = ""

    @property
    def readable(self) -> bool:
        """Whether `read` can be called: the type has a raw form and the data is there."""
        return dtypes.has_carrier(self.dtype) and self.skip not in _NO_DATA


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a source returns.

    Parameters
    ----------
    tensors : list of Tensor
    source : str
        The path, or the class of the object.
    framework : str
        ``torch``, ``numpy``, …; empty if unknown.
    attrs : dict
        JSON values: ``checkpoint`` (what the file says of itself), ``wrapper`` (the keys that led to the weights),
        ``left_out`` (keys beside them that hold no weights).
    """

    tensors: list[Tensor]
    source: str
    framework: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)


class SkipReason(StrEnum):
    """Why a parameter is not analysed; :data:`SKIP_MEANING` has a sentence for each."""

    USER = "user"
    NO_DATA = "no_data"
    SPARSE = "sparse"
    QUANTISED = "quantised"
    OPTIMIZER = "optimizer"
    NOT_NUMERIC = "not_numeric"
    COMPLEX = "complex"
    EMPTY = "empty"
    SCALAR = "scalar"
    INTEGER = "integer"
    VECTOR = "vector"
    SINGLE_ROW = "single_row"


SKIP_MEANING: dict[SkipReason, str] = {
    SkipReason.USER: "left out by overrides={name: {'skip': True}}",
    SkipReason.NO_DATA: "the data is not in this process (a meta, lazy or distributed tensor)",
    SkipReason.SPARSE: "stored sparse or masked; give it dense",
    SkipReason.QUANTISED: "codes or scales of a quantised weight; dequantise it first",
    SkipReason.OPTIMIZER: "state of the optimizer, not a weight",
    SkipReason.NOT_NUMERIC: "text, an object or another entry that is no array of numbers",
    SkipReason.COMPLEX: "complex numbers",
    SkipReason.EMPTY: "has no entries",
    SkipReason.SCALAR: "a single number",
    SkipReason.INTEGER: "integers or booleans: counts, indices or masks",
    SkipReason.VECTOR: "one-dimensional",
    SkipReason.SINGLE_ROW: "fewer than two rows or two columns when read as dimension 0 × the rest",
}

_NO_DATA = frozenset({SkipReason.NO_DATA, SkipReason.SPARSE, SkipReason.QUANTISED, SkipReason.NOT_NUMERIC})

PARAMETER_TYPES = ("dense", "conv", "embedding", "norm", "bias", "recurrent", "other")
"""Types of parameters; see :func:`classify`."""


# ---------------------------------------------------------------------------------------------- names and types

_NUMBER = re.compile(r"(\d+)")
_SEPARATOR = re.compile(r"[./]")
_BIAS = re.compile(r"(.*_)?bias(_.*)?|bias\d*")
_SHORT_BIAS = re.compile(r"(.*_)?b(_[ih]h)?\d*|beta")
_RECURRENT = re.compile(r"(.*_)?(weight|w|kernel)_(ih|hh|hr)(_.*)?\d*|recurrent_kernel")
_RECURRENT_MODULE = re.compile(r"(.*_)?(lstm|gru|rnn)(_?cell)?s?_?\d*")
_NORM = re.compile(r".*norm\d*|(.*_)?(ln|bn|gn|norm)(_.*|\d*)|.*norm_.*|batchnorm.*|layernorm.*")
_NORM_LEAF = re.compile(r"running_(mean|var)|gamma|beta|gain|scale|g|weight")
_ACTIVATION = re.compile(r".*(relu|act|activation)\d*")
_EMBEDDING = re.compile(
    r".*embed(ding|der)?s?\d*|.*embed_(tokens|positions|in|out)|(.*_)?embed(ding)?s?_.*|wte|wpe|(.*_)?emb\d*"
    r"|codebook|lookup|relative_attention_bias|relative_position_bias_table"
)
_LARGEST_1D_KERNEL = 16


def natural_key(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key that puts ``layer.2`` before ``layer.10``.

    >>> sorted(["run-10", "run-2"], key=natural_key)
    ['run-2', 'run-10']
    """
    parts = _NUMBER.split(text)
    return tuple((not i % 2, int(part) if i % 2 else 0, part) for i, part in enumerate(parts) if part)


def classify(tensor: Tensor) -> str:
    """Return the type of a parameter, one of :data:`PARAMETER_TYPES`.

    Notes
    -----
    The first rule that fits, on the last part of the name (*leaf*), the part before it (*module*), in lower case,
    and the shape; parts are separated by ``.`` or ``/``:

    1. ``bias``: the leaf is ``bias``, ``bias_…`` or ``…_bias``; of a vector also ``b``, ``…_b``, ``beta``.
    2. the type that the framework knows (a module's class), if there is one.
    3. vectors: ``norm`` if the module is named like a norm (``ln_1``, ``bn2``, ``…norm…``) or the leaf is
       ``weight``, ``scale``, ``gamma``, ``gain``, ``g``, ``running_mean`` or ``running_var``, and the module is no
       activation; else ``other``. Scalars: ``other``.
    4. ``other``: integers (positions, masks), but for codes named ``weight`` or ``qweight``.
    5. ``recurrent``: the leaf is ``weight_ih…``, ``weight_hh…``, ``w_ih``, ``recurrent_kernel`` …, or the module
       is named ``lstm``, ``gru`` or ``rnn``.
    6. ``conv``: four or five dimensions, or three of which the last is a short kernel (at most 16, and less than
       the first) or the name has ``conv`` in it.
    7. ``norm``: the module is named like a norm.
    8. ``embedding``: leaf or module is named ``embedding``, ``embed_tokens``, ``wte``, ``wpe``, ``emb`` …
    9. ``dense``: any other matrix; ``other``: what has more dimensions.

    Examples
    --------
    >>> def of(name, *shape):
    ...     return classify(Tensor(name, shape, "float32", lambda start, stop: None))
    >>> of("h.0.attn.c_attn.weight", 768, 2304), of("conv1.weight", 64, 32, 5), of("wte.weight", 50257, 768)
    ('dense', 'conv', 'embedding')
    >>> of("lstm.weight_ih_l0", 32, 8), of("h.0.ln_1.weight", 768), of("h.0.ln_1.bias", 768)
    ('recurrent', 'norm', 'bias')
    """
    parts = _SEPARATOR.split(tensor.name.lower())
    leaf, module = parts[-1], parts[-2] if len(parts) > 1 else ""
    ndim = len(tensor.shape)
    if _BIAS.fullmatch(leaf) and not _EMBEDDING.fullmatch(leaf):
        return "bias"
    if ndim == 1 and _SHORT_BIAS.fullmatch(leaf):
        return "bias"
    if tensor.kind:
        return tensor.kind
    norm = bool(_NORM.fullmatch(module))
    if ndim < 2:
        named = norm or _NORM_LEAF.fullmatch(leaf) or _NORM.fullmatch(leaf)
        return "norm" if ndim == 1 and named and not _ACTIVATION.fullmatch(module) else "other"
    if dtypes.is_integer(tensor.dtype) and leaf not in ("weight", "qweight"):
        return "other"
    if _RECURRENT.fullmatch(leaf) or _RECURRENT_MODULE.fullmatch(module):
        return "recurrent"
    if ndim in (4, 5) or (ndim == 3 and (_short_kernel(tensor.shape) or "conv" in module or "conv" in leaf)):
        return "conv"
    if norm:
        return "norm"
    if _EMBEDDING.fullmatch(leaf) or _EMBEDDING.fullmatch(module):
        return "embedding"
    return "dense" if ndim == 2 else "other"


def _short_kernel(shape: tuple[int, ...]) -> bool:
    return shape[2] <= _LARGEST_1D_KERNEL and shape[2] < shape[0]


def uid(model_id: str, name: str) -> str:
    """Return the stable hash (16 hex digits) of a parameter of a model."""
    return blake2b(f"{model_id}\0{name}".encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------------------------------------------- the table


@dataclass(eq=False)
class Parameters:
    """The parameters of one model: one row each, columns are NumPy arrays (object for text, tuples and dicts).

    Parameters
    ----------
    name, uid, type, shape, dtype
        As in :class:`Tensor`; `shape` holds tuples.
    rows, cols : int64
        The 2-D reading; 0 for scalars and vectors.
    nbytes : int64
        Of the stored entries.
    digest : object
        32 hex digits, or empty where the content is not known yet.
    tied_to : object
        Name of the first parameter that is the same tensor, or empty.
    used : int8
        1, 0, or -1 where unknown.
    skip_reason : object
        :class:`SkipReason`, or empty for what is analysed.
    module : object
    attrs : object
        Dicts of the user's attributes.
    stack, index : object, int64
        Place in the store; ``""`` and -1 before it is stored and for linked parameters.
    path, offset, size, mtime_ns, header
        The columns of :class:`Location`; ``""`` and -1 where there is none.
    """

    name: NDArray[np.object_]
    uid: NDArray[np.object_]
    type: NDArray[np.object_]
    shape: NDArray[np.object_]
    dtype: NDArray[np.object_]
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    digest: NDArray[np.object_]
    tied_to: NDArray[np.object_]
    used: NDArray[np.int8]
    skip_reason: NDArray[np.object_]
    module: NDArray[np.object_]
    attrs: NDArray[np.object_]
    stack: NDArray[np.object_]
    index: NDArray[np.int64]
    path: NDArray[np.object_]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    mtime_ns: NDArray[np.int64]
    header: NDArray[np.object_]

    def __post_init__(self) -> None:
        self.sharing_known: bool = False
        """Whether the source told which parameters share memory; then equal content alone ties nothing."""
        self._rows: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.name)

    @property
    def analysed(self) -> NDArray[np.bool_]:
        """Which rows are analysed."""
        return np.asarray(self.skip_reason == "", dtype=bool).reshape(len(self))

    @property
    def canonical(self) -> NDArray[np.int64]:
        """Each row's own position, or that of the parameter it is tied to (if that is in the table)."""
        rows = np.arange(len(self))
        for i in np.flatnonzero(self.tied_to != ""):
            rows[i] = self._positions().get(self.tied_to[i], i)
        return rows

    def _positions(self) -> dict[str, int]:
        if self._rows is None:
            self._rows = {name: i for i, name in enumerate(self.name)}
        return self._rows

    def row(self, name: str) -> int:
        """Return the position of the parameter `name`; ParameterNotFoundError with the nearest names."""
        position = self._positions().get(name)
        if position is None:
            raise ParameterNotFoundError(f"no parameter {name!r}.{did_you_mean(name, self.name)}")
        return position

    @cached_property
    def kinds(self) -> NDArray[np.intp]:
        """A number for each row, equal for slices of one shape and stored type in one stack, or in linked files."""
        columns = (self.rows.tolist(), self.cols.tolist(), self.dtype, self.path != "", self.stack)
        numbers: dict[tuple[Any, ...], int] = {}
        return np.array([numbers.setdefault(row, len(numbers)) for row in zip(*columns, strict=True)], np.intp)

    def select(self, mask: NDArray[Any]) -> Parameters:
        """Return the rows where `mask` (boolean, or positions) says so."""
        chosen = Parameters(**{f.name: getattr(self, f.name)[mask] for f in fields(self)})
        chosen.sharing_known = self.sharing_known
        return chosen

    def location(self, i: int) -> Location | None:
        """Return where row `i` lies in a file, None if it is not linked."""
        if not self.path[i]:
            return None
        return Location(
            path=self.path[i],
            offset=int(self.offset[i]),
            nbytes=int(self.nbytes[i]),
            size=int(self.size[i]),
            mtime_ns=int(self.mtime_ns[i]),
            header=self.header[i],
        )


def _objects(values: Iterable[Any], n: int) -> NDArray[np.object_]:
    out = np.empty(n, object)
    for i, value in enumerate(values):  # a slice assignment would unpack tuples of equal length
        out[i] = value
    return out


def describe(
    checkpoint: Checkpoint, model_id: str, overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> Parameters:
    """Return the table of a checkpoint's parameters, without reading any of them.

    Parameters
    ----------
    checkpoint : Checkpoint
    model_id : str
    overrides : mapping of name to mapping, optional
        ``type``: one of :data:`PARAMETER_TYPES`. ``skip``: True (or a text, kept as the attribute ``skip``) leaves the
        parameter out; False analyses it against the rules, which only a matrix of real floats allows. Anything
        else is kept as an attribute of the parameter.

    Returns
    -------
    Parameters
        Complete but for `digest`, `stack` and `index`; `tied_to` is filled from shared memory.

    Raises
    ------
    ParameterNotFoundError
        `overrides` has a name that the checkpoint has not.
    InvalidIdentifierError
        A name is empty or not printable.
    SourceError
        Two parameters have one name.
    SessionError
        An unknown type, or ``skip=False`` on what cannot be analysed.
    """
    tensors = checkpoint.tensors
    names = [tensor.name for tensor in tensors]
    _check_names(names, checkpoint.source, overrides or {})
    reasons, types, attrs = _judge(tensors, overrides or {})
    n = len(tensors)
    readings = [matrix_shape(t.shape) for t in tensors]
    places = [t.location for t in tensors]
    parameters = Parameters(
        name=_objects(names, n),
        uid=_objects((uid(model_id, name) for name in names), n),
        type=_objects(types, n),
        shape=_objects((tuple(t.shape) for t in tensors), n),
        dtype=_objects((t.dtype for t in tensors), n),
        rows=np.array([r for r, _ in readings], np.int64),
        cols=np.array([c for _, c in readings], np.int64),
        nbytes=np.array(
            [t.location.nbytes if t.location else math.prod(t.shape) * dtypes.itemsize(t.dtype) for t in tensors],
            np.int64,
        ),
        digest=_objects([""] * n, n),
        tied_to=_objects(_shared(tensors), n),
        used=np.array([-1 if t.used is None else int(t.used) for t in tensors], np.int8),
        skip_reason=_objects(reasons, n),
        module=_objects((t.module or _prefix(t.name) for t in tensors), n),
        attrs=_objects(attrs, n),
        stack=_objects([""] * n, n),
        index=np.full(n, -1, np.int64),
        path=_objects((p.path if p else "" for p in places), n),
        offset=np.array([p.offset if p else -1 for p in places], np.int64),
        size=np.array([p.size if p else -1 for p in places], np.int64),
        mtime_ns=np.array([p.mtime_ns if p else -1 for p in places], np.int64),
        header=_objects((p.header if p else "" for p in places), n),
    )
    parameters.sharing_known = any(t.storage is not None for t in tensors)
    return parameters


def _prefix(name: str) -> str:
    return name[: max(name.rfind("."), name.rfind("/"), 0)]


def _check_names(names: list[str], source: str, overrides: Mapping[str, Any]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name or not name.isprintable():
            raise InvalidIdentifierError(f"{source}: a parameter is named {name!r}; names are non-empty printable text")
        if name in seen:
            raise SourceError(f"{source}: two parameters are named {name!r}; names must be unique")
        seen.add(name)
    for name in overrides:
        if name not in seen:
            raise ParameterNotFoundError(f"overrides: {source} has no parameter {name!r}.{did_you_mean(name, names)}")


def _shared(tensors: Sequence[Tensor]) -> list[str]:
    first: dict[Hashable, str] = {}
    return [
        "" if t.storage is None or (owner := first.setdefault(t.storage, t.name)) == t.name else owner for t in tensors
    ]


def tie(parameters: Parameters) -> None:
    """Fill `tied_to` from equal content, where the source could not tell which parameters share memory.

    Two analysed parameters of equal digest (so of equal shape and type) are the same tensor, unless they are
    constant (zero initialisation) or their names differ in numbers only: copies of one layer, as
    ``nn.TransformerEncoder`` makes them, are equal at the start and are yet parameters of their own.
    """
    if parameters.sharing_known:
        return
    first: dict[str, tuple[str, set[str]]] = {}
    for i in np.flatnonzero(parameters.analysed & (parameters.digest != "")):
        hexdigest, name = parameters.digest[i], parameters.name[i]
        if is_constant(hexdigest):
            continue
        pattern = _NUMBER.sub("#", name)
        owner, patterns = first.setdefault(hexdigest, (name, {pattern}))
        if pattern not in patterns:
            parameters.tied_to[i] = owner
            patterns.add(pattern)


# ------------------------------------------------------------------------------- which parameters are not analysed

_SCALES = (
    "scale", "scales", "scale_inv", "scale_2", "zero", "zeros", "zero_point", "absmax", "nested_absmax", "quant_map",
    "nested_quant_map", "quant_state", "global_scale", "scb", "g_idx", "shift", "scale_weight", "scale_input",
)  # fmt: skip
_CODES = ("qweight", "qzeros", "weight_packed", "w_q", "packed_params")
_OPTIMIZER_ROOTS = ("optimizer", "optim", "optimizer_state", "optimizer_state_dict", "opt_state")
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def _judge(
    tensors: Sequence[Tensor], overrides: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """Return the skip reason, type and attributes of every tensor."""
    quantised = _quantised(tensors)
    reasons: list[str] = []
    types: list[str] = []
    attrs: list[dict[str, Any]] = []
    for tensor in tensors:
        reason: str = _reason(tensor, tensor.name in quantised)
        given = dict(overrides.get(tensor.name, {}))
        skip = given.get("skip")
        if skip is not None and not isinstance(skip, str):
            del given["skip"]
        if skip is False:
            if reason in (SkipReason.QUANTISED, SkipReason.OPTIMIZER):
                reason = _reason(tensor, None)
            if reason:
                meaning = {str(known): text for known, text in SKIP_MEANING.items()}.get(reason, "as its source says")
                raise SessionError(f"overrides: {tensor.name!r} cannot be analysed, it is {reason}: {meaning}")
        elif skip:
            reason = SkipReason.USER
        kind = given.pop("type", None) or classify(tensor)
        if kind not in PARAMETER_TYPES:
            raise SessionError(
                f"overrides: the type of {tensor.name!r} is {kind!r}; the types are {', '.join(PARAMETER_TYPES)}."
                f"{did_you_mean(str(kind), PARAMETER_TYPES)}"
            )
        reasons.append(str(reason))
        types.append(kind)
        attrs.append(given)
    return reasons, types, attrs


def _reason(tensor: Tensor, quantised: bool | None) -> str:
    """Return the reason of the rules; `quantised` None leaves out those that a user may overrule."""
    if tensor.skip and not (quantised is None and tensor.skip == SkipReason.OPTIMIZER):
        return tensor.skip
    by_type, by_shape = _reason_of_type(tensor.dtype), _reason_of_shape(tensor.shape)
    if quantised is not None:
        if _is_moment(tensor.name):
            return SkipReason.OPTIMIZER
        if quantised or dtypes.is_packed(tensor.dtype):
            return SkipReason.QUANTISED
    if by_type in (SkipReason.NOT_NUMERIC, SkipReason.COMPLEX):
        return by_type
    if by_shape in (SkipReason.EMPTY, SkipReason.SCALAR):
        return by_shape
    return by_type or by_shape


def _reason_of_type(dtype: str) -> str:
    if dtypes.is_float(dtype):
        return ""
    if dtypes.is_integer(dtype):
        return SkipReason.INTEGER
    return SkipReason.COMPLEX if dtypes.is_complex(dtype) else SkipReason.NOT_NUMERIC


def _reason_of_shape(shape: tuple[int, ...]) -> str:
    if 0 in shape:
        return SkipReason.EMPTY
    if len(shape) < 2:
        return SkipReason.VECTOR if shape else SkipReason.SCALAR
    return SkipReason.SINGLE_ROW if min(matrix_shape(shape)) < 2 else ""


def _is_moment(name: str) -> bool:
    parts = _SEPARATOR.split(name)
    return parts[-1] in _MOMENTS or (len(parts) > 1 and parts[0] in _OPTIMIZER_ROOTS)


def _quantised(tensors: Sequence[Tensor]) -> set[str]:
    """Return the names of codes that have scales beside them, and of those scales.

    Codes are integers of 8 to 32 bits (64 are indices), or float8. Their scales are named after them (``weight_scale``,
    ``weight.absmax``) or lie beside them in their module (``SCB``, ``scales``, ``weight_scale``); underscores before
    the last part do not matter (``weight._data`` and ``weight._scale``).
    """
    found: set[str] = set()
    plain = {tensor.name: _without_underscores(tensor.name.lower()) for tensor in tensors}
    names: dict[str, list[str]] = {}
    for original, name in plain.items():
        names.setdefault(name, []).append(original)
        head, mark, _ = name.partition(".quant_state.")
        if mark:
            names.setdefault(f"{head}.quant_state", []).append(original)
    for tensor in tensors:
        name = plain[tensor.name]
        prefix = name[: max(name.rfind("."), name.rfind("/")) + 1]
        leaf = name[len(prefix) :]
        if leaf in _CODES:
            found.add(tensor.name)
        elif not _may_be_codes(tensor):
            continue
        stems = (f"{name}.", f"{name}_", f"{name}/", prefix, f"{prefix}weight_", f"{prefix}input_")
        scales = [n for stem in stems for scale in _SCALES for n in names.get(stem + scale, ())]
        if scales and set(scales) != {tensor.name}:
            found.update(scales, [tensor.name])
    return found


def _without_underscores(name: str) -> str:
    start = max(name.rfind("."), name.rfind("/")) + 1
    return name[:start] + name[start:].lstrip("_")


def _may_be_codes(tensor: Tensor) -> bool:
    eight = tensor.dtype.startswith("float8") or dtypes.is_packed(tensor.dtype)
    integer = dtypes.is_integer(tensor.dtype) and tensor.dtype not in ("bool", "int64", "uint64")
    return (eight or integer) and math.prod(tensor.shape) > 1
