"""The state of a run as bytes: exact, and unable to run code.

One file in the safetensors format. Its tensor `tree.json` is the tree as strict JSON; all other
tensors are those that the tree names. One file is verified and read in one go, needs one fsync, and
serves checkpoints and single files alike. In a checkpoint, large parts are files of their own.

See `state_trees` for what stands for a tensor or a part in JSON.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save

from maze_train.data.state_trees import (
    TREE,
    OpenPart,
    Packer,
    Unpacker,
    WritePart,
    check_content,
)
from maze_train.errors import RunDirectoryError

if TYPE_CHECKING:
    from pathlib import Path


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
