"""Exact serialization of run states to bytes, safe to load from untrusted sources.

`torch.save` writes a tree of plain values and tensors, and `load_archive` reads the tree without
creating objects of other types. Checkpoints and single files use the same format; in a checkpoint,
large parts are separate files.

Other values are encoded as dicts with the key None, which is not allowed in states:

    {None: "array" or "scalar" of numpy, "dtype": "<f4", "shape": (2, 3), "data": bytes}
    {None: "part", "version": "7", "content": {...}}
    {None: "part", "version": "7", "file": name}     for a part in a separate file
"""

from __future__ import annotations

import io
import pickletools
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from maze_train.core.errors import RunDirectoryError
from maze_train.core.state import StatePart
from maze_train.core.types import Array, Tensor

TreePath: TypeAlias = tuple[Any, ...]
"""Path of a value in a state: keys and indices from the root."""

WritePart: TypeAlias = "Callable[[TreePath, StatePart], str]"
"""Writes the part at a path and returns the file name."""

OpenPart: TypeAlias = "Callable[[TreePath, str, str], StatePart]"
"""Returns the part with a path, version and file name."""

FORMAT = 2

MAX_DEPTH = 64
MAX_INT_BITS = 2000  # The opcode LONG1 supports at most 255 bytes.

DTYPES = re.compile(r"bool|u?int(8|16|32|64)|bfloat16|float(16|32|64|8_\w+)|complex(64|128)")
"""Dtypes of tensors that can be stored."""

STORAGES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16,
    "BFloat16": torch.bfloat16, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32,
    "Long": torch.int64, "Bool": torch.bool, "Untyped": torch.uint8,
}  # fmt: skip
"""Dtypes by the name of the storage class in files of PyTorch."""


def check_content(holds: bool, problem: str) -> None:
    """Raise ValueError with the message `problem` if `holds` is False."""
    if not holds:
        raise ValueError(problem)


def dumps(state: dict[str, Any], write_part: WritePart | None = None) -> bytes:
    """Serialize a state to bytes.

    Args:
        state: Nested dicts (keys: str, int), lists and tuples of None, bool, int, float, str, dense
            tensors, NumPy arrays and scalars (bool and numeric) and parts. Tensors may be on any
            device; tensors that share memory are stored separately. Ordered dicts are loaded as
            dicts, and parameters as tensors. Each part is read once.
        write_part: Function that writes a part with a path in the state to a file, and returns the
            file name; None: parts are stored inline.

    Raises:
        TypeError: If the state contains a type not listed above, or is nested deeper than 64
            levels. The message contains the path.
    """
    if not isinstance(state, dict):
        raise TypeError(f"expected a state dict, got {type(state).__name__}")
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "state": _packed(state, (), write_part)}, buffer)
    return buffer.getvalue()


def _packed(value: Any, path: TreePath, write_part: WritePart | None) -> object:
    """Encode the value at `path` as plain values and tensors."""
    if len(path) > MAX_DEPTH:
        raise _error(path[:4], f"is nested deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        if kind is int and value.bit_length() > MAX_INT_BITS:
            raise _error(path, f"is an integer of more than {MAX_INT_BITS} bits")
        return value
    if kind in (list, tuple):
        return kind(_packed(item, (*path, i), write_part) for i, item in enumerate(value))
    if kind in (dict, OrderedDict):
        for key in value:
            if type(key) not in (str, int):
                raise _error(path, f"has the key {key!r}: keys are str or int")
        # Pickle writes references to repeated objects. Interned keys make the bytes depend only on
        # values.
        keys = [sys.intern(key) if isinstance(key, str) else key for key in value]
        items = zip(keys, value.values(), strict=True)
        return {key: _packed(item, (*path, key), write_part) for key, item in items}
    return _packed_object(value, path, write_part)


def _packed_object(value: Any, path: TreePath, write_part: WritePart | None) -> object:
    """Encode a tensor, an array or a part."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _packed_tensor(value, path)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _packed_array(value, path)
    if kind is StatePart:
        return _packed_part(value, path, write_part)
    raise _error(path, f"is of type {kind.__name__}, which cannot be stored")


def _packed_tensor(value: Tensor, path: TreePath) -> Tensor:
    """Return a contiguous copy; `torch.save` would store the whole storage of a view."""
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        raise _error(path, "is not a dense tensor: call .to_dense() first")
    if not _can_be_stored(value):
        raise _error(path, f"is a tensor of {value.dtype}, which cannot be stored")
    data = value.detach().cpu().resolve_conj().resolve_neg()
    return data.clone(memory_format=torch.contiguous_format)


def _can_be_stored(value: Tensor) -> bool:
    return DTYPES.fullmatch(str(value.dtype).removeprefix("torch.")) is not None


def _packed_array(value: Array | np.generic, path: TreePath) -> dict[str | None, Any]:
    if value.dtype.kind not in "biufc":
        raise _error(path, f"is an array of {value.dtype}: only numeric arrays can be stored")
    data = np.array(value, order="C").reshape(-1).view(np.uint8)
    return {
        None: "array" if isinstance(value, np.ndarray) else "scalar",
        "dtype": value.dtype.str,
        "shape": value.shape,
        "data": torch.from_numpy(data),
    }


def _packed_part(
    value: StatePart, path: TreePath, write_part: WritePart | None
) -> dict[str | None, Any]:
    if type(value.version) is not str:
        raise _error(path, f"has the version {value.version!r}: versions are str")
    marker: dict[str | None, Any] = {None: "part", "version": value.version}
    if write_part is None:
        content = value.read()
        if not isinstance(content, dict):
            raise _error(path, f"is a part with a {type(content).__name__}, expected a dict")
        return marker | {"content": _packed(content, path, None)}
    try:
        return marker | {"file": write_part(path, value)}
    except TypeError as error:
        raise _error(path, f"is a part that cannot be stored: {error}") from error


def _error(path: TreePath, problem: str) -> TypeError:
    return TypeError(f"state{''.join(f'[{key!r}]' for key in path)} {problem}")


def loads(
    data: bytes, source: str | Path = "the state", open_part: OpenPart | None = None
) -> dict[str, Any]:
    """Deserialize a state from `dumps`, with identical types and values, and tensors on the CPU.

    Loading never runs code from `data`. Memory use is limited by the length of `data`.

    Args:
        data: Result of `dumps`.
        source: Origin of the data, for error messages.
        open_part: Returns a part with a path, version and file name; None: parts in files are not
            allowed.

    Raises:
        RunDirectoryError: If the data was not written by `dumps` or is damaged.
    """
    try:
        content = load_archive(data)
        check_content(type(content) is dict, "it does not contain a state")
        _check_format(content["format"], source)
        state: dict[str, Any] = _Unpacker(len(data), open_part).unpack(content["state"], ())
        check_content(type(state) is dict, "it does not contain a dict")
    except RunDirectoryError:
        raise
    except Exception as error:  # Untrusted files can cause any exception.
        is_ours = type(error) is ValueError
        problem = str(error) if is_ours else f"it is not a state ({type(error).__name__})"
        raise RunDirectoryError(f"{source} is damaged: {problem}") from error
    return state


def _check_format(found: Any, source: str | Path) -> None:
    check_content(type(found) is int and found > 0, "it has no format version")
    if found != FORMAT:
        remedy = "install a newer maze_train" if found > FORMAT else "use the version that wrote it"
        raise RunDirectoryError(
            f"{source} has format {found}, this version of maze_train supports format {FORMAT}: "
            f"{remedy}"
        )


def load_archive(data: bytes) -> Any:
    """Read a file that `torch.save` wrote: dicts, lists and tuples of plain values and tensors.

    Only the opcodes and functions that such files need are interpreted, and every tensor lies
    within its stored bytes. Therefore, loading runs no code, and memory use is limited by the
    length of `data`; `torch.load(weights_only=True)` does not limit the memory.

    Raises:
        Exception: If the file has other content; the type depends on the content.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        # The content of a compressed archive could be much larger than the archive.
        is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries.values())
        nbytes = sum(entry.file_size for entry in archive.infolist())
        check_content(
            data[:2] == b"PK" and is_plain and nbytes <= len(data), "it is not an archive"
        )
        (name,) = (name for name in entries if name.endswith("/data.pkl"))
        folder = name.removesuffix("data.pkl")
        order = archive.read(f"{folder}byteorder").decode()
        check_content(order == sys.byteorder, f"its byte order is {order}")

        def read(key: str) -> Tensor:
            # `archive.read` would copy the content twice and take five times as long.
            entry = entries[f"{folder}data/{key}"]
            lengths = np.frombuffer(data, "<u2", 2, entry.header_offset + 26)  # Name and others.
            start = entry.header_offset + 30 + int(lengths.sum())
            content = torch.empty(entry.file_size, dtype=torch.uint8)
            content.numpy()[:] = np.frombuffer(data, np.uint8, entry.file_size, start)
            return content

        return _interpreted(archive.read(name), read)


class _Global(NamedTuple):
    """Name of a class or function in a pickle."""

    name: str


class _Storage(NamedTuple):
    """Memory of tensors."""

    content: Tensor
    """The bytes."""
    dtype: torch.dtype


def _interpreted(content: bytes, read: Callable[[str], Tensor]) -> object:
    """Return the value of a pickle; `read` returns the bytes of a storage by key."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    storages: dict[str, Tensor] = {}
    arg: Any
    for opcode, arg, _ in pickletools.genops(content):
        match opcode.name:
            case "PROTO":
                check_content(arg == 2, "its pickle has another protocol")
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(arg)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "GLOBAL":
                stack.append(_Global(arg))
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack[-int(opcode.name[-1]) :] = [tuple(stack[-int(opcode.name[-1]) :])]
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                marks.append(len(stack))
            case "TUPLE" | "APPENDS" | "SETITEMS":
                mark = marks.pop()
                items = stack[mark:]
                del stack[mark:]
                if opcode.name == "TUPLE":
                    stack.append(tuple(items))
                elif opcode.name == "APPENDS":
                    _list(stack[-1]).extend(items)
                else:
                    _set_items(stack[-1], items)
            case "APPEND":
                item = stack.pop()
                _list(stack[-1]).append(item)
            case "SETITEM":
                items = [stack.pop(-2), stack.pop()]
                _set_items(stack[-1], items)
            case "BUILD":  # Attributes of the result of `Module.state_dict`, which are not needed.
                stack.pop()
                check_content(type(stack[-1]) is dict, "another type has attributes")
            case "BINPERSID":
                kind, storage, key, _, _ = stack.pop()
                check_content(kind == "storage" and type(storage) is _Global, "unknown reference")
                dtype = STORAGES[storage.name.split()[1].removesuffix("Storage")]
                if key not in storages:
                    storages[key] = read(key)
                stack.append(_Storage(storages[key], dtype))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_called(stack.pop(), arguments))
            case "STOP":
                (value,) = stack
                return value
            case name:
                raise ValueError(f"its pickle has the opcode {name}")
    raise AssertionError("unreachable: `genops` raises if there is no STOP")


def _list(value: Any) -> list[Any]:
    check_content(type(value) is list, "an item is added to another type")
    return value  # type: ignore[no-any-return]


def _set_items(target: Any, items: list[Any]) -> None:
    # The hash of a nested tuple could take forever.
    is_plain = all(key is None or type(key) in (str, int, float) for key in items[::2])
    check_content(type(target) is dict and is_plain, "it has unexpected keys")
    target.update(zip(items[::2], items[1::2], strict=True))


def _called(function: Any, arguments: tuple[Any, ...]) -> object:
    """Return the result of a call in the file: an empty dict of hooks, or a tensor."""
    check_content(type(function) is _Global, "it calls a value")
    if function.name == "collections OrderedDict":
        check_content(arguments == (), "a dict has arguments")
        return {}
    names = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
    check_content(function.name in names, f"it calls {function.name}")
    storage, offset, size, stride, requires_grad, _, *others = arguments
    check_content(type(storage) is _Storage and requires_grad is False, "unexpected tensor")
    dtype = storage.dtype
    if function.name == names[1]:
        (dtype_name,) = others
        module, name = dtype_name.name.split()
        check_content(module == "torch" and DTYPES.fullmatch(name) is not None, "unknown dtype")
        dtype = getattr(torch, name)
    else:
        check_content(not others, "a tensor has metadata")
    value = storage.content.view(dtype).as_strided(size, stride, offset)
    check_content(value.nbytes <= len(storage.content), "a tensor is larger than its storage")
    return value


class _Unpacker:
    """Decodes the output of `_packed`, and raises for other results of `torch.load`.

    Args:
        limit: Maximum number of values. Without a limit, a small file with many references to the
            same list could exceed the memory.
        open_part: Opens parts in separate files; None: separate files are not allowed.
    """

    def __init__(self, limit: int, open_part: OpenPart | None) -> None:
        self._left = limit
        self._open_part = open_part

    def unpack(self, value: Any, path: TreePath) -> Any:
        """Decode the value at a path in the state.

        Raises:
            Exception: If the value was not written by `_packed`; the type depends on the value.
        """
        self._left -= 1
        check_content(self._left >= 0, "it contains more values than possible for its length")
        check_content(len(path) <= MAX_DEPTH, f"it is nested deeper than {MAX_DEPTH} levels")
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in (list, tuple):
            return kind(self.unpack(item, (*path, i)) for i, item in enumerate(value))
        if kind is torch.Tensor:
            return _checked_tensor(value)
        check_content(kind is dict, f"it contains a {kind.__name__}")
        if None not in value:
            check_content(all(type(key) in (str, int) for key in value), "a key is not str or int")
            return {key: self.unpack(item, (*path, key)) for key, item in value.items()}
        fields = {key: item for key, item in value.items() if key is not None}
        what = value[None]
        if what == "part":
            return self._part(path, **fields)
        check_content(what in ("array", "scalar"), f"unknown object {what!r}")
        array = _unpacked_array(**fields)
        check_content(what == "array" or array.ndim == 0, "a scalar has dimensions")
        return array if what == "array" else array[()]

    def _part(self, path: TreePath, version: Any, **where: Any) -> StatePart:
        check_content(type(version) is str, f"{version!r} is not a version")
        if where.keys() == {"content"}:
            content = self.unpack(where["content"], path)
            check_content(type(content) is dict, "the content of a part is not a dict")
            return StatePart(version, lambda: content)
        check_content(where.keys() == {"file"}, "a part has neither content nor file")
        if self._open_part is None:
            raise ValueError("a part is in a separate file, which only checkpoints support")
        return self._open_part(path, version, where["file"])


def _checked_tensor(value: Tensor) -> Tensor:
    """Check that a tensor is a possible result of `_packed_tensor`."""
    check_content(
        value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and _can_be_stored(value)
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.nbytes,
        "a tensor has an unexpected layout, device, dtype or size",
    )
    if value.dtype == torch.bool and value.numel():
        check_content(int(value.view(torch.uint8).max()) <= 1, "a bool is neither 0 nor 1")
    return value


def _unpacked_array(dtype: str, shape: tuple[int, ...], data: Any) -> Array:
    is_type = type(dtype) is str and re.fullmatch(r"[<>|][biufc]\d{1,2}", dtype) is not None
    check_content(is_type, f"{dtype!r} is not a supported dtype")
    check_content(type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape), "shape")
    check_content(type(data) is torch.Tensor and data.dtype == torch.uint8, "an array has no bytes")
    content = _checked_tensor(data).numpy()
    if np.dtype(dtype).kind == "b":
        check_content(int(content.max(initial=0)) <= 1, "a bool is neither 0 nor 1")
    array: Array = np.frombuffer(content.tobytes(), dtype).copy()
    return array.reshape(shape)
