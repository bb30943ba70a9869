"""The state of a run as bytes: exact, and unable to run code.

One file in the safetensors format. Its tensor `tree.json` is the tree as strict JSON; all other
tensors are those that the tree names. One file is verified and read in one go, needs one fsync, and
serves checkpoints and single files alike.

See `state_trees` for what stands for a tensor in JSON.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from maze_train.errors import RunDirectoryError
from maze_train.files import fsync_directory, write_synced
from maze_train.training.state_trees import TREE, Packer, Unpacker, check_content

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["STATE", "FileDigest", "digest", "dumps", "loads", "read_state", "write_state"]

STATE = "state.safetensors"
"""Name of the file that `write_state` writes."""

FORMAT = 1


@dataclass(frozen=True)
class FileDigest:
    """What tells whether a file is the one that was written."""

    sha256: str
    nbytes: int


def digest(data: bytes) -> FileDigest:
    """The digest of the content of a file."""
    return FileDigest(hashlib.sha256(data).hexdigest(), len(data))


def write_state(directory: Path, state: dict[str, Any]) -> dict[str, FileDigest]:
    """Write a state into a directory that exists, and wait until the disk has it.

    Args:
        directory: Where `state.safetensors` is written.
        state: See `dumps`.

    Returns:
        The digests of the files by name.

    Raises:
        TypeError: If the state holds something that can not be stored.
        OSError: If the file can not be written.
    """
    data = dumps(state)
    write_synced(directory / STATE, data)
    fsync_directory(directory)
    return {STATE: digest(data)}


def read_state(directory: Path) -> dict[str, Any]:
    """The state that `write_state` wrote into a directory.

    Raises:
        RunDirectoryError: If it is missing or damaged.
    """
    path = directory / STATE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunDirectoryError(f"{path} can not be read: {error}") from error
    return loads(data, path)


def dumps(state: dict[str, Any]) -> bytes:
    """A state as bytes; equal states give equal bytes.

    Args:
        state: Nested dicts (keys: str, int), lists and tuples of None, bool, int, float, str, dense
            tensors, arrays and scalars of numpy (bool and numbers). Tensors come from any device;
            those that share memory are stored one by one. Ordered dicts come back as dicts,
            parameters as tensors without gradient.

    Raises:
        TypeError: If the state holds anything else, or is nested deeper than 64 levels; the message
            names the place.
    """
    if not isinstance(state, dict):
        raise TypeError(f"a state is a dict, not {type(state).__name__}")
    packer = Packer()
    tree = {"format": FORMAT, "state": packer.pack(state, ())}
    text = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
    packer.tensors[TREE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return save(packer.tensors)


def loads(data: bytes, source: str | Path = "the state") -> dict[str, Any]:
    """The state of `dumps`: equal types, numbers and bits; tensors are on the CPU.

    Nothing in `data` can run code, and memory grows with its length only.

    Args:
        data: What `dumps` returned.
        source: Where it is from, for messages.

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
        unpacker = Unpacker(tensors)
        state = unpacker.unpack(tree["state"], 0)
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
