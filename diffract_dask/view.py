"""The (model, name) table of a store: what is stored for every parameter of every model, aligned by position."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diffract_dask.catalog import natural_key
from diffract_dask.fields import MISSING

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["NAME_COORDINATES", "ROLES", "Source", "View", "addresses", "public_attrs"]

Index = NDArray[np.intp]


class Source(Protocol):
    """Where a view's columns come from. Arrays are over (model, name), or (model,) for kinds ``model_…``."""

    fields: list[str]
    array_fields: list[str]
    kernels: list[str]
    model_fields: list[str]
    model_kernels: list[str]

    def load(self, kind: str, name: str = "") -> NDArray[Any]:
        """Return one array: of kind ``type``, ``rows``, ``cols``, ``row``, ``canonical``, ``digest``, ``analysed``,
        or ``value``, ``status``, ``key``, ``model_value``, … of the field or kernel `name`."""

    def outdated(self) -> NDArray[np.bool_] | None:
        """Return which models were written since the view was made; None if nothing was."""


_FILL: dict[str, Any] = {"value": np.nan, "status": MISSING, "key": 0}


class _Columns(Mapping[str, NDArray[Any]]):
    """The arrays of one kind by field or kernel, loaded when they are first looked at."""

    def __init__(self, view: View, kind: str, names: Sequence[str]) -> None:
        self._view, self._kind, self._names = view, kind, dict.fromkeys(names)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return self._view.column(self._kind, name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class View:
    """The table of one store at one moment: M models × N names, as NumPy arrays.

    Parameters
    ----------
    model_ids, names : list of str
        In the order in which they came; see :attr:`order`.
    step : (M,) float64
        NaN where a model has none.
    parent, added : list of str
        Several parents are a JSON list; `added` is a time, ISO 8601.
    source : Source
    attrs : dict of field to dict
        Attributes of the fields' variables; array fields have their ``dims`` among them.

    Attributes
    ----------
    dims : dict of str to tuple of str
        Inner dimensions of the array fields.
    present, analysed : (M, N) bool
    row, canonical : (M, N) int32
        Position in the model's parameters; position among the names of the first parameter that it is tied to,
        its own otherwise; -1 where the model has no such parameter.
    digest : (M, N) uint64
        Root of the keys, 0 where the content is not known yet.
    type : (M, N) object
    rows, cols : (M, N) int64
    values, status, keys : mapping of str to (M, N) array
        By field (scalars only; statuses of array fields too) and by kernel. Missing: NaN, 255, 0.
    model_values, model_status, model_keys : mapping of str to (M,) array
    """

    def __init__(
        self,
        model_ids: list[str],
        names: list[str],
        step: NDArray[np.float64],
        parent: list[str],
        added: list[str],
        source: Source,
        attrs: dict[str, dict[str, Any]],
    ) -> None:
        self.model_ids, self.names, self.step, self.parent, self.added = model_ids, names, step, parent, added
        self.attrs = {name: {k: v for k, v in own.items() if k != "dims"} for name, own in attrs.items()}
        self.dims = {name: tuple(own["dims"]) for name, own in attrs.items() if "dims" in own}
        self._source = source
        self._loaded: dict[tuple[str, str], NDArray[Any]] = {}
        self.values = _Columns(self, "value", source.fields)
        self.status = _Columns(self, "status", [*source.fields, *source.array_fields])
        self.keys = _Columns(self, "key", source.kernels)
        self.model_values = _Columns(self, "model_value", source.model_fields)
        self.model_status = _Columns(self, "model_status", source.model_fields)
        self.model_keys = _Columns(self, "model_key", source.model_kernels)

    def __repr__(self) -> str:
        return f"<View of {len(self.model_ids)} models × {len(self.names)} names, {len(self.status)} fields>"

    def column(self, kind: str, name: str = "") -> NDArray[Any]:
        """Return one array. A field's values and statuses are loaded together, so that they belong together.

        Models that another process has written since the view was made are given as missing.
        """
        if (kind, name) not in self._loaded:
            kinds = [kind]
            if kind.removeprefix("model_") in ("value", "status"):
                prefix = kind.removesuffix("value").removesuffix("status")
                known = self.values if not prefix else self.model_values
                kinds = [f"{prefix}value", f"{prefix}status"] if name in known else [kind]
            found = {part: self._source.load(part, name) for part in kinds}
            outdated = self._source.outdated() if kind.removeprefix("model_") in _FILL else None
            for part, array in found.items():
                if outdated is not None and outdated.any():
                    array = array.copy()
                    array[outdated] = _FILL[part.removeprefix("model_")]
                array.flags.writeable = False
                self._loaded[part, name] = array
        return self._loaded[kind, name]

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """Which models have which parameters."""
        return self.row >= 0

    @property
    def analysed(self) -> NDArray[np.bool_]:
        """Which parameters are analysed."""
        return self.column("analysed")

    @property
    def row(self) -> NDArray[np.int32]:
        """Positions in the models' parameters."""
        return self.column("row")

    @property
    def canonical(self) -> NDArray[np.int32]:
        """Positions of the first of tied parameters."""
        return self.column("canonical")

    @property
    def digest(self) -> NDArray[np.uint64]:
        """Root keys of contents."""
        return self.column("digest")

    @property
    def type(self) -> NDArray[np.object_]:
        """Types of parameters."""
        return self.column("type")

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows of slices."""
        return self.column("rows")

    @property
    def cols(self) -> NDArray[np.int64]:
        """Columns of slices."""
        return self.column("cols")

    @cached_property
    def order(self) -> Index:
        """Positions of the models by (step, added, natural order of ids); those without a step come last."""
        keys = [sort_key(*row) for row in zip(self.step.tolist(), self.added, self.model_ids, strict=True)]
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.intp)

    def coordinates(self, models: Index | None = None, columns: Index | None = None) -> dict[str, Any]:
        """Return the coordinates of a Dataset over (model_id, name), for positions of models and names."""
        models = self.order if models is None else models
        columns = np.arange(len(self.names)) if columns is None else columns
        at = np.ix_(models, columns)
        both = ("model_id", "name")
        names = _text(self.names)[columns]
        coordinates: dict[str, Any] = {"model_id": _text(self.model_ids)[models], "name": names}
        coordinates["step"] = ("model_id", self.step[models], COORDINATE_ATTRS["step"])
        for name in ("parent", "added"):
            coordinates[name] = ("model_id", _text(getattr(self, name))[models], COORDINATE_ATTRS[name])
        for name in ("type", "rows", "cols"):
            coordinates[name] = (both, getattr(self, name)[at], COORDINATE_ATTRS[name])
        for name, values in addresses(names).items():
            coordinates[name] = ("name", values, COORDINATE_ATTRS[name])
        return coordinates

    def to_dataset(
        self,
        fields: Sequence[str] | None = None,
        *,
        attrs: Mapping[str, Mapping[str, Any]] | None = None,
        models: Index | None = None,
        columns: Index | None = None,
    ) -> xr.Dataset:
        """Return scalar fields as a labelled Dataset.

        Parameters
        ----------
        fields : sequence of str, optional
            Default: all stored ones. One that is not stored is NaN throughout.
        attrs : mapping of field to mapping, optional
            Attributes in place of the stored ones.
        models, columns : int arrays, optional
            Positions; default: all, models by (step, added).
        """
        import xarray as xr

        models = self.order if models is None else models
        columns = np.arange(len(self.names)) if columns is None else columns
        variables: dict[str, Any] = {}
        for name in fields if fields is not None else [*self.values, *self.model_values]:
            labels = public_attrs(dict((attrs or self.attrs).get(name, {})))
            if name in self.model_values:
                variables[name] = ("model_id", self.model_values[name][models], labels)
            elif name in self.values:
                variables[name] = (("model_id", "name"), self.values[name][np.ix_(models, columns)], labels)
            else:
                variables[name] = (("model_id", "name"), np.full((len(models), len(columns)), np.nan), labels)
        return xr.Dataset(variables, self.coordinates(models, columns))


def sort_key(step: float | None, added: str, model_id: str) -> tuple[Any, ...]:
    """Return the key that orders models by (step, added, natural order); those without a step come last."""
    number = np.nan if step is None else float(step)
    return (np.isnan(number), 0.0 if np.isnan(number) else number, added, natural_key(model_id))


def public_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a field's variable as they stand in files.

    ``dtype`` becomes ``value_dtype``, and only where it is not float64: xarray takes a float variable with
    ``dtype: bool`` for booleans, and NaN for True.
    """
    shown = {"units": "1", **{k: v for k, v in attrs.items() if k != "dtype"}}
    if attrs.get("dtype", "float64") != "float64":
        shown["value_dtype"] = attrs["dtype"]
    return shown


def _text(values: Sequence[Any]) -> NDArray[np.object_]:
    out = np.empty(len(values), object)
    out[:] = values
    return out


COORDINATE_ATTRS: dict[str, dict[str, Any]] = {
    "model_id": {"long_name": "Model"},
    "name": {"long_name": "Parameter"},
    "step": {"long_name": "Training step", "units": "1"},
    "parent": {"long_name": "Model that this one was made from"},
    "added": {"long_name": "Time at which the model was added (UTC)"},
    "type": {"long_name": "Type of the parameter"},
    "rows": {"long_name": "Rows of the slice", "units": "1"},
    "cols": {"long_name": "Columns of the slice", "units": "1"},
    "layer": {"long_name": "Name without its last part"},
    "block": {"long_name": "First number in the name; -1 if there is none", "units": "1"},
    "module": {"long_name": "Layer within its block: what follows the first number"},
    "role": {"long_name": "What the layer does, by patterns on its name"},
}

NAME_COORDINATES = ("layer", "block", "module", "role")

ROLES: tuple[tuple[str, str], ...] = (
    ("query_key_value", r"c_attn|w?qkv(_proj)?|query_key_value|attn_qkv|in_proj"),
    ("query", r"(self\.|attention\.)?(q|wq|query|q_proj|q_lin|to_q|attn_q)"),
    ("key", r"(self\.|attention\.)?(k|wk|key|k_proj|k_lin|to_k|attn_k)"),
    ("value", r"(self\.|attention\.)?(v|wv|value|v_proj|v_lin|to_v|attn_v)"),
    ("attention_output", r"o_proj|out_proj|out_lin|to_out(\.\d+)?|attn_output|attention\.output\.dense"),
    ("attention_output", r"(attn|attention|self_attn)\.(c_proj|proj|wo|o|dense)"),
    ("mlp_gate", r"gate_proj|wi_0|ffn_gate|feed_forward\.w1"),
    ("mlp_down", r"down_proj|c_proj|fc2|fc_out|lin2|linear2|dense_4h_to_h|ffn_down|output\.dense"),
    ("mlp_down", r"(mlp|ffn|densereludense)\.wo|feed_forward\.w2"),
    ("mlp_up", r"up_proj|c_fc|fc1|fc_in|lin1|linear1|dense_h_to_4h|ffn_up|intermediate\.dense"),
    ("mlp_up", r"wi(_1)?|feed_forward\.w3"),
    ("position_embedding", r"wpe|position_embeddings?|embed_positions|pos_embed(ding)?s?|position_embd"),
    ("embedding", r"wte|((word|token|token_type|patch)_)?embeddings?|embed(_tokens)?|tok_embeddings|token_embd|shared"),
    ("head", r"lm_head|head|classifier|score|embed_out|output_projection|heads?\.head"),
    ("norm", r".*norm.*|ln_?\w*|bn\d*|gn\d*"),
    ("convolution", r"conv\w*|downsample\.0"),
)
"""Roles and the patterns of their layers, tried in order on the whole end of the layer's name, in lower case."""

_ROLE_PATTERNS = tuple((role, re.compile(rf"(?:.*\.)?(?:{pattern})")) for role, pattern in ROLES)
_PARTS = re.compile(r"[./]")
_LEAF = re.compile(r"weight.*|bias.*|kernel|scale|gamma|beta|running_(mean|var)|num_batches_tracked|in_proj_.*")


def addresses(names: Sequence[str] | NDArray[np.object_]) -> dict[str, NDArray[Any]]:
    """Return what parameters' names say: layer, block, module and role, one array each.

    Notes
    -----
    Names are split at ``.`` and ``/``. *layer* is the name without its last part; *block* the first part that is a
    number, -1 without one; *module* what follows that number, without the last part (without a number: the
    layer); *role* the first of :data:`ROLES` whose pattern fits the end of the layer, or, for a name of one part
    or a last part that is no ``weight`` or ``bias``, of the whole name; empty if none fits.

    Examples
    --------
    >>> found = addresses(["h.0.attn.c_attn.weight", "wte.weight", "ln_f.bias"])
    >>> found["layer"].tolist(), found["block"].tolist()
    (['h.0.attn.c_attn', 'wte', 'ln_f'], [0, -1, -1])
    >>> found["module"].tolist(), found["role"].tolist()
    (['attn.c_attn', 'wte', 'ln_f'], ['query_key_value', 'embedding', 'norm'])
    """
    rows = [_address(name) for name in names]
    found: dict[str, NDArray[Any]] = {key: _text([row[i] for row in rows]) for i, key in enumerate(NAME_COORDINATES)}
    found["block"] = found["block"].astype(np.int64)
    return found


def _address(name: str) -> tuple[str, int, str, str]:
    parts = _PARTS.split(name)
    owner = parts[:-1]
    numbers = [i for i, part in enumerate(owner) if part.isdecimal()]
    block = int(owner[numbers[0]]) if numbers else -1
    within = owner[numbers[0] + 1 :] if numbers else owner
    subject = ".".join(owner if owner and _LEAF.fullmatch(parts[-1].lower()) else parts).lower()
    if parts[-1].lower().startswith("in_proj"):
        role = "query_key_value"
    else:
        role = next((role for role, pattern in _ROLE_PATTERNS if pattern.fullmatch(subject)), "")
    return name[: len(name) - len(parts[-1])].rstrip("./"), block, ".".join(within), role
