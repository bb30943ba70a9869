"""Parts of data sets that earlier versions wrote: directories of .npy files with a manifest."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.data.trajectory_files import mapped_or_read
from maze_train.files import read_regular
from maze_train.sealed import unseal

if TYPE_CHECKING:
    from pathlib import Path

    from maze_train.types import Array


MANIFEST = "MANIFEST.json"


def read_arrays(
    directory: Path, entry: None, *, mmap: bool, verify: bool
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a part by name, and its seeds, environment and policy.

    Args:
        directory: The part.
        entry: None: `dataset.json` says nothing of parts in this version.
        mmap: As for `trajectory_files.read_part`.
        verify: Likewise.

    Raises:
        DatasetError: If a file is missing or damaged.
        ValueError: If the manifest was changed or a file is malformed, as other errors of that.
        OSError: If a file can not be read.
    """
    content = unseal(read_regular(directory / MANIFEST))
    arrays = {key: np.array(content[key]) for key in ("lengths", "terminated", "truncated")}
    for item in content["arrays"]:
        path = directory / item["file"]
        if path.parent != directory:
            raise ValueError(f"{item['file']!r}: expected the name of a file")
        data = mapped_or_read(path, item, mmap=mmap, verify=verify)
        header = io.BytesIO(data[: 1 << 16].tobytes())
        np.lib.format.read_magic(header)
        shape, _, dtype = np.lib.format.read_array_header_1_0(header)
        name = f"{item['column']}/{item['key']}" if item["key"] else item["column"]
        arrays[name] = data[header.tell() :].view(dtype).reshape(shape)
    about = {"seeds": content["seeds"], "env": content.get("env", {})}
    return arrays, {**about, "policy": content.get("policy", {})}
