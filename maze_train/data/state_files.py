"""The state of a run as bytes: exact, and unable to run code.

One file in the safetensors format. Its tensor `tree.json` is the tree as strict JSON; all other
tensors are those that the tree names. One file is verified and read in one go, needs one fsync, and
serves checkpoints and single files alike. In a checkpoint, large parts are their own files.

See `state_trees` for what stands for a tensor or a part in JSON.

JSON has no tensors, tuples, int keys, NaN or integers of any size. They are objects with the key
`~`, which says what the other keys mean:

    {"~": "tensor", "dtype": "float32", "shape": [2, 3], "data": name of the tensor}
    {"~": "array" or "scalar" of numpy, "dtype": "<f4", "shape": [2, 3], "data": name of the tensor}
    {"~": "tuple", "items": [...]}
    {"~": "dict", "items": [[key, value], ...]}     where not all keys are plain strings
    {"~": "int", "hex": "0x..."}                    beyond 2**53
    {"~": "float", "value": "nan" or "inf" or "-inf"}
    {"~": "str", "utf8": hexadecimal}               with half of a surrogate pair
    {"~": "part", "version": "7", "content": {...}}
    {"~": "part", "version": "7", "file": name}     where the content is its own file
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load, save

from maze_train.core.errors import RunDirectoryError
from maze_train.core.types import Array, StatePart, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


TreePath: TypeAlias = tuple[Any, ...]
"""A place in a state: keys and indices from the root."""

WritePart: TypeAlias = "Callable[[TreePath, StatePart], str]"
"""Writes the part at a place; returns the name of the file."""

OpenPart: TypeAlias = "Callable[[TreePath, str, str], StatePart]"
"""Gives the part at a place, of a version, in a file."""

MAX_DEPTH = 64
TREE, KIND = "tree.json", "~"

NATIVE = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Types that every version of safetensors stores by itself; others are stored as bytes."""

AS_BYTES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype)
    and re.fullmatch(r"uint(16|32|64)|complex(64|128)|float8_\w+", name)
}


def check_content(holds: bool, problem: str) -> None:
    """Refuse content that nothing here has written."""
    if not holds:
        raise ValueError(problem)


class Packer:
    """Turns a state into values of JSON and tensors by name.

    Args:
        write_part: Writes the parts to files; None: their content becomes part of the values.
    """

    def __init__(self, write_part: WritePart | None = None) -> None:
        self._write_part = write_part
        self.tensors: dict[str, Tensor] = {}

    def pack(self, value: Any, path: TreePath) -> Any:
        """The values of JSON that stand for what the state holds at `path`.

        Raises:
            TypeError: If it cannot be stored; names the path.
        """
        if len(path) > MAX_DEPTH:
            raise self._error(path[:4], f"is nested deeper than {MAX_DEPTH} levels")
        if value is None or type(value) is bool:
            return value
        if type(value) in (int, float, str):
            return _pack_plain(value)
        if type(value) is list:
            return self._items(value, path)
        if type(value) is tuple:
            return {KIND: "tuple", "items": self._items(value, path)}
        if type(value) in (dict, OrderedDict):
            return self._pack_dict(value, path)
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return self._pack_tensor(value, path)
        if type(value) is np.ndarray or isinstance(value, np.generic):
            return self._pack_array(value, path)
        if type(value) is StatePart:
            return self._pack_part(value, path)
        raise self._error(path, f"is of type {type(value).__name__}, which cannot be stored")

    def _items(self, values: list[Any] | tuple[Any, ...], path: TreePath) -> list[Any]:
        return [self.pack(value, (*path, i)) for i, value in enumerate(values)]

    def _pack_dict(self, value: dict[Any, Any], path: TreePath) -> dict[str, Any]:
        for key in value:
            if type(key) not in (str, int):
                raise self._error(path, f"has the key {key!r}: keys are str or int")
        if KIND not in value and all(type(key) is str and _is_text(key) for key in value):
            return {key: self.pack(item, (*path, key)) for key, item in value.items()}
        items = [[_pack_plain(key), self.pack(item, (*path, key))] for key, item in value.items()]
        return {KIND: "dict", "items": items}

    def _pack_part(self, value: StatePart, path: TreePath) -> dict[str, Any]:
        if type(value.version) is not str:
            raise self._error(path, f"has the version {value.version!r}: versions are str")
        marker = {KIND: "part", "version": _pack_plain(value.version)}
        if self._write_part is None:
            content = value.read()
            if not isinstance(content, dict):
                raise self._error(path, f"is a part with a {type(content).__name__}, not a dict")
            return marker | {"content": self.pack(content, path)}
        try:
            return marker | {"file": self._write_part(path, value)}
        except TypeError as error:
            raise self._error(path, f"is a part that cannot be stored: {error}") from error

    def _pack_tensor(self, value: Tensor, path: TreePath) -> dict[str, Any]:
        name = str(value.dtype).removeprefix("torch.")
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise self._error(path, "is no dense tensor: call .to_dense() before")
        if name not in NATIVE and name not in AS_BYTES:
            raise self._error(path, f"is a tensor of {name}, which cannot be stored")
        # its own copy, as safetensors refuses tensors that share memory.
        data = value.detach().cpu().resolve_conj().resolve_neg()
        data = data.clone(memory_format=torch.contiguous_format)
        if name not in NATIVE:
            data = data.reshape(-1).view(torch.uint8)
        return self._named("tensor", name, list(value.shape), data, path)

    def _pack_array(self, value: Any, path: TreePath) -> dict[str, Any]:
        if value.dtype.kind not in "biufc":
            raise self._error(path, f"is an array of {value.dtype}: only numbers can be stored")
        array = np.array(value, order="C")
        if not (array.dtype.name in NATIVE and array.dtype.isnative):
            array = np.frombuffer(array.tobytes(), np.uint8).copy()
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return self._named(kind, value.dtype.str, list(value.shape), torch.from_numpy(array), path)

    def _named(
        self, kind: str, dtype: str, shape: list[int], data: Tensor, path: TreePath
    ) -> dict[str, Any]:
        joined = "/".join(map(str, path)).encode(errors="replace").decode()
        # `__metadata__` is a name of the format itself.
        name, number = joined, 1
        while name in self.tensors or name in (TREE, "__metadata__"):
            number += 1
            name = f"{joined}#{number}"
        self.tensors[name] = data
        return {KIND: kind, "dtype": dtype, "shape": shape, "data": name}

    @staticmethod
    def _error(path: TreePath, problem: str) -> TypeError:
        return TypeError(f"state{''.join(f'[{key!r}]' for key in path)} {problem}")


def _is_text(value: str) -> bool:
    """Whether a string is text, which half of a surrogate pair is not."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pack_plain(value: float | str) -> Any:
    """An int, float or str; as an object where JSON would not give it back as it is."""
    if isinstance(value, str):
        if _is_text(value):
            return value
        return {KIND: "str", "utf8": value.encode(errors="surrogatepass").hex()}
    if isinstance(value, int):
        return value if abs(value) < 2**53 else {KIND: "int", "hex": hex(value)}
    return value if math.isfinite(value) else {KIND: "float", "value": repr(value)}


class Unpacker:
    """Turns values of JSON and tensors by name into a state; each tensor is used once.

    Args:
        tensors: The tensors; those that were used are taken out.
        open_part: Gives parts that are separate files; None if no part is.
    """

    def __init__(self, tensors: dict[str, Tensor], open_part: OpenPart | None = None) -> None:
        self._tensors = tensors
        self._open_part = open_part

    def unpack(self, value: Any, path: TreePath) -> Any:
        """Unpack `value`, at a place in the state.

        Raises:
            Exception: Of any kind, if a `Packer` did not make the value.
        """
        check_content(len(path) <= MAX_DEPTH, f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            return self._items(value, path)
        if not isinstance(value, dict):
            return value
        if KIND not in value:
            return {key: self.unpack(item, (*path, key)) for key, item in value.items()}
        fields = {key: item for key, item in value.items() if key != KIND}
        kind = value[KIND]
        if kind == "tuple":
            return tuple(self._items(_field(list, **fields), path))
        if kind == "dict":
            return self._unpack_dict(_field(list, **fields), path)
        if kind in ("int", "float", "str"):
            return _unpack_plain(kind, **fields)
        if kind == "tensor":
            return self._unpack_tensor(**fields)
        if kind in ("array", "scalar"):
            array = self._unpack_array(**fields)
            check_content(kind == "array" or array.ndim == 0, "a scalar has dimensions")
            return array if kind == "array" else array[()]
        if kind == "part":
            return self._unpack_part(path, **fields)
        raise ValueError(f"nothing is known of {kind!r}")

    def _items(self, values: list[Any], path: TreePath) -> list[Any]:
        return [self.unpack(value, (*path, i)) for i, value in enumerate(values)]

    def _unpack_dict(self, items: list[Any], path: TreePath) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, item in items:
            name = self.unpack(key, (*path, None))
            check_content(type(name) in (str, int) and name not in result, f"{key!r} is no key")
            result[name] = self.unpack(item, (*path, name))
        return result

    def _unpack_part(self, path: TreePath, version: Any, **where: Any) -> StatePart:
        version = self.unpack(version, (*path, None))
        check_content(type(version) is str, f"{version!r} is no version")
        if where.keys() == {"content"}:
            content = self.unpack(where["content"], path)
            check_content(type(content) is dict, "the content of a part is no dict")
            return StatePart(version, lambda: content)
        check_content(where.keys() == {"file"}, "a part has neither content nor file")
        if self._open_part is None:
            raise ValueError("a part has a file, which only those of checkpoints have")
        return self._open_part(path, version, where["file"])

    def _stored(self, dtype: torch.dtype, data: str, shape: list[int], native: bool) -> Tensor:
        check_content(
            type(shape) is list
            and all(type(n) is int and n >= 0 for n in shape)
            and math.prod(n or 1 for n in shape) < 2**60,
            f"{shape} is no shape",
        )
        stored = self._tensors.pop(data)
        check_content(stored.dtype == dtype, f"{data} is of {stored.dtype}, expected {dtype}")
        right = list(stored.shape) == shape if native else stored.dim() == 1
        check_content(right, f"{data} has shape {list(stored.shape)}, expected {shape}")
        if dtype == torch.bool and stored.numel():
            check_content(int(stored.view(torch.uint8).max()) <= 1, f"{data} holds neither 0 nor 1")
        return stored

    def _unpack_tensor(self, dtype: str, shape: list[int], data: str) -> Tensor:
        native = dtype in NATIVE
        wanted = NATIVE[dtype] if native else AS_BYTES[dtype]
        stored = self._stored(wanted if native else torch.uint8, data, shape, native)
        # Memory of PyTorch's own: sums can depend on where it begins.
        stored = stored.clone()
        return stored if native else stored.view(wanted).reshape(shape)

    def _unpack_array(self, dtype: str, shape: list[int], data: str) -> Array:
        check_content(
            re.fullmatch(r"[<>|][biufc]\d{1,2}", dtype) is not None, f"{dtype!r} is no type"
        )
        wanted = np.dtype(dtype)
        native = wanted.name in NATIVE and wanted.isnative
        stored_type = NATIVE[wanted.name] if native else torch.uint8
        stored = self._stored(stored_type, data, shape, native).numpy()
        if native:
            return np.array(stored)
        return np.array(np.frombuffer(stored.tobytes(), wanted).reshape(shape))


def _field(kind: type, **fields: Any) -> Any:
    """The only field of a marker, `items`, which is of type `kind`."""
    check_content(fields.keys() == {"items"} and type(fields["items"]) is kind, "no items")
    return fields["items"]


def _unpack_plain(kind: str, **fields: str) -> float | str:
    """An int, float or str that was stored as an object."""
    check_content(len(fields) == 1, "expected one field")
    if kind == "int":
        return int(fields["hex"], 16)
    if kind == "float":
        return float(fields["value"])
    return bytes.fromhex(fields["utf8"]).decode(errors="surrogatepass")


FORMAT = 1


def dumps(state: dict[str, Any], write_part: WritePart | None = None) -> bytes:
    """A state as bytes; equal states give equal bytes.

    Args:
        state: Nested dicts (keys: str, int), lists and tuples of None, bool, int, float, str, dense
            tensors, arrays and scalars of numpy (bool and numbers). Tensors come from any device;
            those that share memory are stored one by one. Ordered dicts come back as dicts,
            parameters as tensors without gradient. And parts, each asked for its content once.
        write_part: Takes a place in the state and the part there, writes it to a file and returns
            the name; None: the content of parts is among the bytes.

    Raises:
        TypeError: If the state holds anything else, or is nested deeper than 64 levels; the message
            names the place.
    """
    if not isinstance(state, dict):
        raise TypeError(f"a state is a dict, not {type(state).__name__}")
    packer = Packer(write_part)
    tree = {"format": FORMAT, "state": packer.pack(state, ())}
    text = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
    packer.tensors[TREE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return save(packer.tensors)


def loads(
    data: bytes, source: str | Path = "the state", open_part: OpenPart | None = None
) -> dict[str, Any]:
    """The state of `dumps`: equal types, numbers and bits; tensors are on the CPU.

    Nothing in `data` can run code, and memory grows with its length only.

    Args:
        data: Result of `dumps`.
        source: Where it is from, for messages.
        open_part: Gives the part for a place in the state, its version and the name of its file;
            None: no part has a file.

    Raises:
        RunDirectoryError: If the data is not what `dumps` writes.
    """
    try:
        tensors = load(data)
        tree = json.loads(
            tensors.pop(TREE).numpy().tobytes(),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
        )
        check_content(type(tree) is dict and type(tree.get("format")) is int, "it is no tree")
        if tree["format"] > FORMAT:
            raise RunDirectoryError(
                f"{source} has format {tree['format']}, this version of maze_train reads up to "
                f"{FORMAT}: install a newer maze_train"
            )
        check_content(
            tree["format"] == FORMAT and tree.keys() == {"format", "state"}, "it is no tree"
        )
        unpacker = Unpacker(tensors, open_part)
        state = unpacker.unpack(tree["state"], ())
        check_content(type(state) is dict, "it holds no dict")
        check_content(not tensors, "it holds tensors that the tree does not name")
    except RunDirectoryError:
        raise
    except Exception as error:  # whatever a file of unknown origin sets off
        problem = str(error) or type(error).__name__
        raise RunDirectoryError(f"{source} is damaged: {problem}") from error
    return state  # type: ignore[no-any-return]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    check_content(len(result) == len(pairs), "a key appears twice")
    return result


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not strict JSON")
