"""Damaged files are named in the error, for all formats, and no code in them is executed.

Tests every combination of `FORMATS` and `DAMAGE`. `tests/training/test_checkpoints.py` tests runs
with damaged checkpoints, and `test_attacks.py` tests links.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from stored_checkpoints import MANIFEST, make_store, new_files, saved
from trajectory_cases import CHOICE, FLOATS, random_trajectories

from maze_train import (
    DatasetMetadata,
    ModelConfig,
    TrajectoryDataset,
    TrajectoryWriter,
    build_actor_critic,
)
from maze_train.config.stored import read_settings
from maze_train.core.errors import MazeTrainError
from maze_train.core.files import seal
from maze_train.training.evaluators import copy_of_weights
from maze_train.training.policy_files import PolicyWriter, read_spaces, read_weights

if TYPE_CHECKING:
    from collections.abc import Callable


class Intruder:
    """Object that creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("mark"),)


class Format(NamedTuple):
    """File format with functions that write and read a file."""

    write: Callable[[Path], Path]
    """Write the file, with the files that belong to it, below a directory; return its path."""
    read: Callable[[Path], Any]
    """Read the file, or everything that belongs to it."""
    has_digest: bool = True
    """Whether a flipped bit is detected; files that users may edit have no digest."""
    version: str = ""
    """Key of the version number, if the format is JSON."""


def checkpoint(kind: str, directory: Path) -> Path:
    """Return a file that only the second checkpoint uses."""
    saved(directory / "checkpoints")
    newest = directory / "checkpoints" / "epoch_000002"
    (part,) = new_files(newest, newest.with_name("epoch_000001"))
    return newest / (kind or part)


def load(path: Path) -> Any:
    """Load the checkpoint that contains the file."""
    return make_store(path.parents[1])[0].load("epoch_000002")


def policy(name: str, directory: Path) -> Path:
    """Return a file of a saved policy."""
    model = build_actor_critic(ModelConfig(hidden_sizes=[2]), FLOATS, CHOICE, 1)
    PolicyWriter(FLOATS, CHOICE, "seed: 1\n")(directory, copy_of_weights(model), {"score": 2.0})
    return directory / name


def without_score(directory: Path) -> Path:
    """Return the weights of a policy without the file that contains their digest."""
    policy("score.json", directory).unlink()
    return directory / "policy.pt"


def trajectories(name: str, directory: Path) -> Path:
    """Return a file of a dataset with two parts."""
    with TrajectoryWriter(directory, DatasetMetadata(FLOATS, CHOICE), part_nbytes=1) as writer:
        for trajectory in random_trajectories(FLOATS, CHOICE, [2, 3]):
            writer.add(trajectory)
    return directory / name


def text(name: str, content: str, directory: Path) -> Path:
    """Return a text file that users may edit."""
    (directory / name).write_text(content)
    return directory / name


def in_directory(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return a function that reads the directory of a file."""
    return lambda path: read(path.parent)


FORMATS = {
    "manifest": Format(partial(checkpoint, MANIFEST), load, version="schema"),
    "state": Format(partial(checkpoint, "state.pt"), load),
    "part of a state": Format(partial(checkpoint, ""), load),
    "policy": Format(partial(policy, "policy.pt"), in_directory(read_weights)),
    "policy without a score": Format(without_score, in_directory(read_weights), False),
    "score": Format(partial(policy, "score.json"), in_directory(read_weights), False),
    "spaces": Format(partial(policy, "spaces.json"), in_directory(read_spaces), False),
    "data set": Format(
        partial(trajectories, "dataset.json"),
        in_directory(TrajectoryDataset.open),
        version="version",
    ),
    "part of a data set": Format(
        partial(trajectories, "part-000001.safetensors"), in_directory(TrajectoryDataset.open)
    ),
    "configuration": Format(
        partial(text, "config.yaml", "seed: 1\nmodel:\n  hidden_sizes: [8]\n"),
        in_directory(read_settings),
        False,
    ),
}


def flipped(path: Path, whole: bytes) -> Any:
    """Flip one bit at a time: in all bytes of header and end, and in some between."""
    places = {*range(min(64, len(whole))), *range(0, len(whole), 197), *range(-64, 0)}
    for place in sorted({place % len(whole) for place in places}):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        yield path.write_bytes(data)


def cut(path: Path, whole: bytes) -> Any:
    """Truncate the file, or append a byte."""
    for length in {1, len(whole) // 2, len(whole) - 1}:
        yield path.write_bytes(whole[:length])
    yield path.write_bytes(whole + b"\n")


def replaced(path: Path, whole: bytes) -> Any:
    """Write an empty file, invalid UTF-8, or unclosed brackets."""
    for data in (b"", b"\xff" * len(whole), b"[" * 100_000):
        yield path.write_bytes(data)


def pickled(path: Path, whole: bytes) -> Any:
    """Write pickled code instead of the content."""
    yield path.write_bytes(pickle.dumps(Intruder()))
    for content in ({"weights": Intruder()}, [1, 2, 3]):
        yield torch.save(content, path)


def no_file(path: Path, whole: bytes) -> Any:
    """Replace the file by a pipe, which would block a reader, and by a directory."""
    path.unlink()
    os.mkfifo(path)
    yield
    path.unlink()
    yield path.mkdir()
    path.rmdir()


DAMAGE = {damage.__name__: damage for damage in (flipped, cut, replaced, pickled, no_file)}
CASES = [
    (name, damage)
    for name, format in FORMATS.items()
    for damage in DAMAGE
    if format.has_digest or damage not in ("flipped", "cut")
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_damaged_files_are_named_in_the_error(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file; no code runs, and the message suggests no unsafe loading."""
    monkeypatch.chdir(tmp_path)
    kind = FORMATS[name]
    path = kind.write(tmp_path)
    assert kind.read(path) is not None
    for _ in DAMAGE[damage](path, path.read_bytes()):
        with pytest.raises(MazeTrainError, match=rf"{path.name}\b") as told:
            kind.read(path)
        assert "weights_only" not in str(told.value)
        assert damage != "no_file" or re.search("(no|not a) (regular )?file", str(told.value))
        assert not Path("mark").exists()


@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].has_digest])
def test_flipped_text_files_load_or_raise(name: str, tmp_path: Path) -> None:
    """Files without a digest, which users may edit, load or raise an error that names the file."""
    kind = FORMATS[name]
    path = kind.write(tmp_path)
    told = []
    for _ in flipped(path, path.read_bytes()):
        try:
            kind.read(path)
        except MazeTrainError as error:
            told.append(str(error))
    assert told
    assert all(path.name in text for text in told)


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].version])
def test_files_of_another_version_raise(name: str, tmp_path: Path) -> None:
    """The error names the version and the remedy, and does not call the file damaged."""
    kind = FORMATS[name]
    path = kind.write(tmp_path)
    content = json.loads(path.read_bytes())
    own = content[kind.version]
    for version, remedy in (
        (own + 1, "install a newer maze_train"),
        (own - 1, "(with|use) maze_train"),
    ):
        path.write_bytes(seal({**content, kind.version: version}))
        with pytest.raises(MazeTrainError, match=rf"{kind.version} {version}\b.*{remedy}"):
            kind.read(path)
