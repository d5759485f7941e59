"""Readers of HDF5, netCDF, Zarr and Parquet: the datasets by address, each read in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.errors import ArtifactError
from diffract_dask.runs.arrays import ArrayRef, Selection
from diffract_dask.runs.readers import Content, missing_extra

__all__ = ["read_hdf5", "read_netcdf", "read_parquet", "read_zarr"]

_ATTRS_LENGTH = 1000


def _refusing(address: str, shape: tuple[int, ...], stored: str, why: str, attrs: Mapping[str, Any]) -> ArrayRef:
    def refuse(selection: Selection) -> NDArray[Any]:
        raise ArtifactError(f"{address!r} cannot be read: {why}")

    return ArrayRef(address, shape, np.dtype("V0"), refuse, stored=stored, attrs=attrs, refusal=why)


def _attr(value: Any) -> Any:
    """Return an attribute as a JSON value, long ones shortened."""
    if isinstance(value, bytes):
        value = value.decode("utf8", "backslashreplace")
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufSU" and value.size <= _ATTRS_LENGTH:
        return _attr(value.tolist())
    if isinstance(value, list | tuple):
        return [_attr(one) for one in value[:_ATTRS_LENGTH]]
    if isinstance(value, dict):
        return {str(key): _attr(one) for key, one in value.items()}
    return value if isinstance(value, bool | int | float | None) else str(value)[:_ATTRS_LENGTH]


def _attrs(source: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): _attr(value) for key, value in source.items()}


# ------------------------------------------------------------------------------------------------- HDF5


@contextmanager
def read_hdf5(path: Path) -> Iterator[Content]:
    """Open an HDF5 file. Links and data that lead to other files are named, and not followed."""
    try:
        import h5py
    except ImportError:
        raise missing_extra(path, "h5py", "hdf5") from None
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read as HDF5: {error}") from error
    with file:
        content = Content(attrs=_hdf5_attrs(file))
        _hdf5_group(h5py, file, content, {h5py.h5o.get_info(file.id).addr})
        yield content


def _hdf5_attrs(item: Any) -> dict[str, Any]:
    found = {}
    for name in item.attrs:
        try:
            found[str(name)] = _attr(item.attrs[name])
        except (OSError, TypeError, ValueError) as error:
            found[str(name)] = f"cannot be read: {error}"
    return found


def _hdf5_group(h5py: Any, group: Any, content: Content, seen: set[Any]) -> None:
    for name in group:
        address = f"{group.name.rstrip('/')}/{name}"
        if isinstance(group.get(name, getlink=True), h5py.ExternalLink):
            content.notes.append(f"{address} is a link to another file, and not followed")
            continue
        try:
            item = group[name]
        except (KeyError, OSError) as error:
            content.notes.append(f"{address} leads nowhere: {error}")
            continue
        if isinstance(item, h5py.Group):
            mark = h5py.h5o.get_info(item.id).addr
            if mark not in seen:
                seen.add(mark)
                _hdf5_group(h5py, item, content, seen)
        elif isinstance(item, h5py.Dataset):
            content.arrays.append(_hdf5_dataset(h5py, item, address))


def _hdf5_dataset(h5py: Any, dataset: Any, address: str) -> ArrayRef:
    attrs = _hdf5_attrs(dataset)
    shape = dataset.shape
    if shape is None:
        return _refusing(address, (), "empty", "it has no data", attrs)
    dtype = dataset.dtype
    text = h5py.check_string_dtype(dtype) is not None
    why = ""
    if dataset.external or (dataset.is_virtual and any(s.file_name != "." for s in dataset.virtual_sources())):
        why = "its data lies in other files"
    elif dtype.hasobject and not text:
        why = "its entries are references, or of different length each"
    if why:
        return _refusing(address, shape, str(dtype), why, attrs)

    def read(selection: Selection) -> NDArray[Any]:
        try:
            return np.asarray(dataset.asstr(errors="backslashreplace")[selection] if text else dataset[selection])
        except OSError as error:
            raise ArtifactError(f"{address!r} cannot be read: {error}") from error

    dtype = np.dtype(object) if text else dtype
    return ArrayRef(address, shape, dtype, read, dataset.chunks, "text" if text else "", attrs)


# ------------------------------------------------------------------------------------------------- netCDF


@contextmanager
def read_netcdf(path: Path) -> Iterator[Content]:
    """Open a netCDF file; values are scaled and fill values become NaN, as the CF conventions say."""
    import netCDF4

    try:
        file = netCDF4.Dataset(path, "r")
    except OSError as error:
        raise ArtifactError(f"{path.name} cannot be read as netCDF: {error}") from error
    with file:
        file.set_auto_maskandscale(False)
        content = Content(attrs=_attrs({name: file.getncattr(name) for name in file.ncattrs()}))
        groups = [file]
        while groups:
            group = groups.pop(0)
            groups += group.groups.values()
            for variable in group.variables.values():
                content.arrays.append(
                    _netcdf_variable(variable, f"{group.path.rstrip('/')}/{variable.name}".lstrip("/"))
                )
        yield content


def _netcdf_variable(variable: Any, address: str) -> ArrayRef:
    attrs = _attrs({name: variable.getncattr(name) for name in variable.ncattrs()})
    attrs["dimensions"] = list(variable.dimensions)
    shape = tuple(int(n) for n in variable.shape)
    text = variable.dtype is str
    if not text and (type(variable.datatype).__name__ == "VLType" or variable.dtype.hasobject):
        return _refusing(address, shape, "ragged", "its entries are of different length each", attrs)
    stored = np.dtype(object) if text else np.dtype(variable.dtype)
    fills = [attrs[name] for name in ("_FillValue", "missing_value") if name in attrs]
    scale, offset = attrs.get("scale_factor", 1), attrs.get("add_offset", 0)
    decodes = stored.kind in "iuf" and (bool(fills) or scale != 1 or offset != 0)
    dtype = stored if not decodes or (stored.kind == "f" and (scale, offset) == (1, 0)) else np.dtype("f8")

    def read(selection: Selection) -> NDArray[Any]:
        raw = np.asarray(variable[selection] if shape else variable[...]).reshape([s.stop - s.start for s in selection])
        if not decodes:
            return raw
        values = raw.astype(dtype) * scale + offset if dtype == np.dtype("f8") else raw.astype(dtype)
        values[np.isin(raw, np.asarray(fills, stored))] = np.nan
        return values

    chunks = variable.chunking()
    chunks = tuple(chunks) if isinstance(chunks, list) and shape else None
    return ArrayRef(address, shape, dtype, read, chunks, "text" if text else str(stored), attrs)


# ------------------------------------------------------------------------------------------------- Zarr


@contextmanager
def read_zarr(path: Path) -> Iterator[Content]:
    """Open a Zarr array or group, version 2 or 3, in a folder or a ``.zarr.zip``."""
    import zarr

    with ExitStack() as stack:
        where: Any = str(path)
        try:
            if path.is_file():
                where = stack.enter_context(zarr.storage.ZipStore(path, mode="r"))
            opened = _zarr_node(zarr, where)
            if isinstance(opened, zarr.Array):
                arrays = [("", opened)]
            else:
                members = opened.members(max_depth=None)
                arrays = [(name, item) for name, item in sorted(members) if isinstance(item, zarr.Array)]
        except (OSError, ValueError, KeyError) as error:
            raise ArtifactError(f"{path.name} cannot be read as Zarr: {error}") from error
        yield Content([_zarr_array(array, name) for name, array in arrays], attrs=_attrs(dict(opened.attrs)))


def _zarr_node(zarr: Any, where: Any) -> Any:
    try:
        return zarr.open_group(where, mode="r", use_consolidated=False)
    except (FileNotFoundError, zarr.errors.ContainsArrayError, zarr.errors.NodeTypeValidationError):
        return zarr.open_array(where, mode="r")


def _zarr_array(array: Any, name: str) -> ArrayRef:
    text = array.dtype.kind in "OT"

    def read(selection: Selection) -> NDArray[Any]:
        try:
            found = np.asarray(array[selection if selection else ...])
        except (OSError, ValueError, RuntimeError) as error:
            raise ArtifactError(f"{name!r} cannot be read: {error}") from error
        return found.astype(object) if text else found

    dtype = np.dtype(object) if text else array.dtype
    return ArrayRef(name, array.shape, dtype, read, array.chunks, "text" if text else "", _attrs(dict(array.attrs)))


# ------------------------------------------------------------------------------------------------- Parquet


@contextmanager
def read_parquet(path: Path) -> Iterator[Content]:
    """Open a Parquet file; each column is an array, missing values are NaN, nested ones text."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_extra(path, "pyarrow", "parquet") from None
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ArtifactError(f"{path.name} cannot be read as Parquet: {error}") from error
    with file:
        rows = file.metadata.num_rows
        attrs = {"rows": rows, "row_groups": file.metadata.num_row_groups, "written_by": file.metadata.created_by}
        yield Content([_ParquetColumn(pyarrow, file, field).ref(rows) for field in file.schema_arrow], attrs=attrs)


class _ParquetColumn:
    """A column that is read forward batch by batch, and from the start again when an earlier part is asked for."""

    def __init__(self, pyarrow: Any, file: Any, field: Any) -> None:
        self._file, self._name, self._type = file, field.name, field.type
        self._dtype = self._values_dtype(pyarrow.types)
        self._next = 0
        self._kept: NDArray[Any] = np.empty(0, self._dtype)
        self._batches: Iterator[Any] = iter(())

    def ref(self, rows: int) -> ArrayRef:
        """Return the column as an array."""
        return ArrayRef(self._name, (rows,), self._dtype, self._read, stored=str(self._type))

    def _values_dtype(self, types: Any) -> np.dtype[Any]:
        """Return what values become: float64 where integers or booleans are missing, text if no number or time."""
        own = self._type
        if types.is_floating(own) or types.is_integer(own) or types.is_boolean(own):
            keeps = types.is_floating(own) or self._is_complete()
            return np.dtype(own.to_pandas_dtype() if keeps else "f8")
        if types.is_timestamp(own) or types.is_date(own):
            return np.dtype("M8[ns]")
        return np.dtype("m8[ns]") if types.is_duration(own) else np.dtype(object)

    def _is_complete(self) -> bool:
        """Return whether the file says that no value is missing."""
        meta = self._file.metadata
        column = next(i for i in range(meta.num_columns) if meta.schema.column(i).path == self._name)
        stats = [meta.row_group(i).column(column).statistics for i in range(meta.num_row_groups)]
        return all(one is not None and one.has_null_count and one.null_count == 0 for one in stats)

    def _read(self, selection: Selection) -> NDArray[Any]:
        (wanted,) = selection
        if wanted.start < self._next - len(self._kept):
            self._next, self._kept = 0, self._kept[:0]
        if not self._next:
            self._batches = self._file.iter_batches(batch_size=2**16, columns=[self._name])
        parts: list[NDArray[Any]] = []
        position = wanted.start
        while position < wanted.stop:
            first = self._next - len(self._kept)
            if position < self._next:
                parts.append(self._kept[position - first : wanted.stop - first])
                position += len(parts[-1])
                continue
            batch = next(self._batches, None)
            if batch is None:
                raise ArtifactError(f"{self._name!r} ends at row {self._next}, expected {wanted.stop}")
            self._kept = self._values(batch.column(0))
            self._next += len(self._kept)
        return np.concatenate(parts) if parts else np.empty(0, self._dtype)

    def _values(self, column: Any) -> NDArray[Any]:
        if self._dtype != np.dtype(object):
            return np.asarray(column.to_numpy(zero_copy_only=False)).astype(self._dtype)
        return np.array(["" if one is None else str(one) for one in column.to_pylist()], object)
