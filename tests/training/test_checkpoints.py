"""Checkpoints: what is kept, and that nothing damaged or hostile is taken for one.

The golden checkpoints are made by `python tests/training/test_checkpoints.py`, once for each
schema: those of older schemas are never made again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from stored_checkpoints import (
    MANIFEST,
    STATE,
    Segments,
    flip,
    loaded,
    make_store,
    names,
    new_files,
    save,
    saved,
)

from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import seal
from maze_train.data.state_files import dumps
from maze_train.training import checkpoint_files as manifests
from maze_train.training import checkpoints
from maze_train.training.checkpoint_files import digest
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.outcome import Position

GOLDEN = Path(__file__).parent / "golden" / "schema_1"


@pytest.fixture
def directory(tmp_path):
    """Checkpoints after epochs 1 and 2, which share two of their three parts."""
    saved(tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


# -- writing and reading -------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path):
    """Counters, score and state; by name as well. Manifests can be read by people."""
    store, warnings = make_store(tmp_path / "checkpoints")
    store.clean()
    assert names(tmp_path) == []
    assert store.load() is None
    assert store.list() == ()
    first = store.save({"a": 1}, Position(25, 250, 2000, score=1))
    second = store.save({"a": 2}, Position(25, 253, 2024, within_epoch=True))
    assert first == tmp_path / "checkpoints" / "epoch_000025"
    assert second == tmp_path / "checkpoints" / "epoch_000025_update_000253"
    found = store.load()
    assert (found.path, found.epoch, found.updates, found.env_steps) == (second, 25, 253, 2024)
    assert (found.score, found.within_epoch, found.state) == (None, True, {"a": 2})
    assert found.nbytes == (second / STATE).stat().st_size
    assert set(found.versions) == {"maze_train", "torch", "numpy", "gymnasium", "python"}
    assert found.versions["python"] == sys.version.split()[0]
    assert found.created.endswith("+00:00")
    named = store.load("epoch_000025")
    assert (named.score, named.within_epoch, named.state) == (1.0, False, {"a": 1})
    assert [info.path for info in store.list()] == [first, second]
    assert names(tmp_path / "checkpoints") == [first.name, second.name, "latest"]
    content, data = json.loads((second / MANIFEST).read_text()), (second / STATE).read_bytes()
    assert (content["schema"], content["epoch"], content["updates"]) == (1, 25, 253)
    assert content["files"] == {STATE: {"sha256": digest(data).sha256, "bytes": len(data)}}
    assert warnings == []


def test_a_name_that_is_not_there(directory):
    """The error lists those that are; names that lead elsewhere are not there either."""
    store, _ = make_store(directory)
    for name in ("epoch_000003", "../epoch_000001", "", "latest"):
        with pytest.raises(RunDirectoryError, match=r"there: epoch_000002, epoch_000001"):
            store.load(name)


def test_what_can_not_be_stored(directory):
    """JSON has no such scores; a wrong state or setting is an error: nothing is written."""
    for settings in ({"keep_last": 0}, {"keep_best": -1}, {"mode": "best"}):
        with pytest.raises(ConfigError):
            make_store(directory, **settings)
    store, _ = make_store(directory)
    before = names(directory)
    with pytest.raises(TypeError, match=r"state\['a'\]"):
        store.save({"a": object()}, Position(3, 30, 0))
    assert names(directory) == before
    for score in (math.nan, math.inf, None):
        save(store, 3, score=score)
        assert store.load().score is None


# -- retention and branches ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "scores", "left"),
    [
        ({}, [1, 1, 1, 1], [3, 4]),
        ({"keep_last": 1}, [1, 1, 1, 1], [4]),
        ({"keep_last": 9}, [1, 1, 1, 1], [1, 2, 3, 4]),
        ({"keep_last": 1, "keep_best": 1}, [2, 5, 5, 3], [2, 4]),
        ({"keep_last": 1, "keep_best": 2}, [2, 5, 5, 3], [2, 3, 4]),
        ({"keep_last": 1, "keep_best": 1, "mode": "min"}, [2, 1, 1, 3], [2, 4]),
        ({"keep_last": 1, "keep_best": 1}, [math.nan, -3, None, -9], [2, 4]),
        ({"keep_last": 1, "keep_best": 3}, [math.nan, None, None, -9], [4]),
        ({"keep_last": 2, "keep_best": 1}, [1, 2, 3, 4], [3, 4]),
    ],
)
def test_which_checkpoints_are_kept(tmp_path, settings, scores, left):
    """The newest, and the best; of equal scores the earlier."""
    store, warnings = make_store(tmp_path, **settings)
    for epoch, score in enumerate(scores, 1):
        save(store, epoch, score=score)
    assert [info.epoch for info in store.list()] == left
    assert loaded(store) == (4, "")
    assert warnings == []


def test_a_branch_that_was_left_is_removed(tmp_path):
    """Resumed from an earlier one: what came after it belongs to nothing any more."""
    store, warnings = make_store(tmp_path, keep_last=9, keep_best=9)
    for epoch in (1, 2, 3, 4, 5):
        save(store, epoch, tag="left", score=float(epoch))
    assert store.load("epoch_000002").epoch == 2
    assert loaded(store) == (5, "left")
    save(store, 3, tag="new", score=0.0)
    assert [info.epoch for info in store.list()] == [1, 2, 3]
    assert loaded(store) == (3, "new")
    save(store, 3, updates=33, tag="new", within_epoch=True)
    assert names(tmp_path)[2:4] == ["epoch_000003", "epoch_000003_update_000033"]
    assert warnings == []


def test_an_older_branch_is_no_fall_back(directory):
    """What `latest` names counts; what has more updates was left."""
    store, warnings = make_store(directory, keep_last=9)
    save(store, 3)
    pointer = (directory / "latest").read_bytes()
    save(store, 4, tag="left")
    (directory / "latest").write_bytes(pointer)
    assert loaded(store) == (3, "")
    (directory / "epoch_000003" / STATE).unlink()
    assert loaded(store) == (2, "")
    assert len(warnings) == 1


def test_the_one_just_saved_is_never_removed(tmp_path):
    """At the end of an epoch of which a part was saved after the same number of updates."""
    store, warnings = make_store(tmp_path, keep_last=1)
    save(store, 2, within_epoch=True)
    for tag in ("end", "again"):  # the later one takes the place of the earlier
        assert save(store, 2, tag=tag).is_dir()
        assert names(tmp_path) == ["epoch_000002", "latest"]
        assert loaded(store) == (2, tag)
    assert warnings == []


def test_the_disk_has_all_of_it_before_it_counts(tmp_path, monkeypatch):
    """Content before names, the checkpoint before the pointer, and all before old ones go."""
    done = []

    def watch(name, function):
        def call(*args):
            paths = [os.readlink(f"/proc/self/fd/{args[0]}")] if name == "fsync" else args
            text = " ".join([name, *(Path(path).name for path in paths)])
            done.append(text.replace(f"-{os.getpid()}", ""))
            return function(*args)

        monkeypatch.setattr(os, name, call)

    store, _ = make_store(tmp_path / "checkpoints", keep_last=1)
    save(store, 1, owner := Segments(2))
    owner.change(1, 5)
    for name in ("fsync", "rename", "replace"):
        watch(name, getattr(os, name))
    save(store, 2, owner)
    assert done[0].startswith("fsync part_")
    assert done[1:] == [
        f"fsync {STATE}",
        f"fsync {MANIFEST}",
        "fsync .tmp-epoch_000002",
        "rename .tmp-epoch_000002 epoch_000002",
        "fsync checkpoints",
        "fsync .tmp-latest",
        "replace .tmp-latest latest",
        "fsync checkpoints",
        "rename epoch_000001 .trash-epoch_000001",
    ]


# -- damage --------------------------------------------------------------------------------------


FILES = ["manifest", "state", "part", "latest"]


def file_of(directory, kind):
    """A file on which the newest checkpoint, and no other, rests."""
    newest = directory / "epoch_000002"
    if kind == "part":
        return newest / new_files(newest, directory / "epoch_000001")[0]
    return {"manifest": newest / MANIFEST, "state": newest / STATE}.get(kind, directory / "latest")


def check_damage(path, damage, message=""):
    """It is reported, and the checkpoint before is used; if the pointer suffered, the newest."""
    is_pointer, whole = path.name == "latest", path.read_bytes()
    damage(path, whole)
    store, warnings = make_store(path.parent if is_pointer else path.parents[1])
    assert loaded(store) == ((2, "") if is_pointer else (1, ""))
    (warning,) = warnings
    assert path.name in warning
    assert message in warning
    assert is_pointer or f"checkpoint {path.parent} is damaged and left out" in warning
    path.write_bytes(whole)


@pytest.mark.parametrize("kind", FILES)
def test_any_flipped_byte_is_noticed(directory, kind):
    """Each byte of each file, another bit each time."""
    path = file_of(directory, kind)
    for offset in range(path.stat().st_size):
        message = "" if kind in ("latest", "manifest") else f"{path.name}: sha256 differs"
        check_damage(path, flip(offset, 1 << offset % 8), message)


@pytest.mark.parametrize("kind", FILES)
def test_other_files_are_noticed(directory, kind):
    """Cut, longer, missing, that of another place, that of another checkpoint."""
    path = file_of(directory, kind)
    n, is_told = path.stat().st_size, kind in ("state", "part")
    for length in {0, 1, *range(2, n - 1, 37), n - 1}:
        message = f"is {length} bytes long, expected {n}" if is_told else ""
        check_damage(path, lambda path, whole, n=length: path.write_bytes(whole[:n]), message)
    check_damage(path, lambda path, whole: path.write_bytes(whole + b"\n"))
    check_damage(path, lambda path, _: path.unlink(), f"{path.name}: missing" if is_told else "")
    others = {*directory.glob(f"*/{path.name.split('_')[0]}*")} - {path}
    assert bool(others) == (kind != "latest")
    for other in others:
        check_damage(path, lambda path, _, other=other: shutil.copy(other, path))


def test_whole_directories(directory):
    """A checkpoint that is gone, and one that is the copy of another."""
    newest = directory / "epoch_000002"
    shutil.rmtree(newest)
    store, warnings = make_store(directory)
    assert loaded(store) == (1, "")
    assert len(warnings) == 1
    assert f"{newest} is damaged and left out: the directory is missing" in warnings[0]
    shutil.copytree(directory / "epoch_000001", newest)
    assert loaded(store) == (1, "")
    assert "it is that of epoch_000001" in warnings[1]


@pytest.mark.parametrize("damaged", [MANIFEST, STATE])
def test_all_are_damaged(directory, damaged):
    """An error, not a beginning from nothing; by name it is the same."""
    for name in ("epoch_000001", "epoch_000002"):
        (directory / name / damaged).write_bytes(b"x")
    store, warnings = make_store(directory)
    with pytest.raises(RunDirectoryError, match=r"no checkpoint that is whole \(2 damaged\)"):
        store.load()
    assert len(warnings) == 2
    with pytest.raises(RunDirectoryError, match=f"epoch_000002 is damaged: {damaged}"):
        store.load("epoch_000002")


def test_a_pointer_to_nothing(directory):
    """Checkpoints that are gone are an error as well."""
    for name in ("epoch_000001", "epoch_000002"):
        shutil.rmtree(directory / name)
    store, _ = make_store(directory)
    for pointer in ((directory / "latest").read_bytes(), b""):
        (directory / "latest").write_bytes(pointer)
        with pytest.raises(RunDirectoryError, match="no checkpoint that is whole"):
            store.load()
    (directory / "latest").unlink()
    assert store.load() is None


def rewrite(directory, **changes):
    """A manifest with other content that is valid by itself, and the pointer to it."""
    path = directory / "epoch_000002" / MANIFEST
    content = json.loads(path.read_text()) | changes
    data = seal({k: v for k, v in content.items() if v is not ...})
    path.write_bytes(data)
    (directory / "latest").write_text(f"epoch_000002 {digest(data).sha256}\n")


def entry(sha256="0" * 64, nbytes=0):
    """One file of a manifest."""
    return {"sha256": sha256, "bytes": nbytes}


@pytest.mark.parametrize(
    "changes",
    [
        *({"schema": value} for value in (0, -1, True, "1", 1.0, None, ...)),
        *({"epoch": value} for value in (-1, "2", 2.0, None, ..., True, 10**30, 3)),
        *({"score": value} for value in ("1", 1, True, [], math.nan)),
        *({"versions": value} for value in ([], None, {"torch": 1}, ...)),
        *({"files": value} for value in ([], {}, None, {STATE: 1}, {STATE: {}}, {"": entry()})),
        *({"files": {STATE: entry(nbytes=value)}} for value in (-1, "1", 2**70, True)),
        *({"files": {STATE: entry(), name: entry()}} for name in ("../x", "a/b", "/x", ".x", "y")),
        *({"files": {STATE: entry(sha256=value)}} for value in (1, None, [])),
        *({"within_epoch": value} for value in (0, None, True)),
        {"created": 1},
        {"bytes": -1},
    ],
    ids=str,
)
def test_crafted_manifests(directory, changes):
    """A manifest whose digest is right, but not its content."""
    rewrite(directory, **changes)
    store, warnings = make_store(directory)
    assert loaded(store) == (1, "")
    assert len(warnings) == 1
    assert store.list()[0].epoch == 1


def test_manifests_that_are_none(directory):
    """Anything else where the manifest should be; one that is too long is not even read."""
    path = directory / "epoch_000002" / MANIFEST
    for data in (b"[" * 90_000, b"\xff", b"[]", b"{}", b'{"sha256": NaN}', b"9" * 5000):
        check_damage(path, lambda path, _, data=data: path.write_bytes(data))
    with path.open("wb") as file:
        file.truncate(2**40)
    store, warnings = make_store(directory)
    assert loaded(store) == (1, "")
    assert f"{2**40} bytes long, too long" in warnings[0]


def test_crafted_pointers(directory):
    """A pointer leads to a checkpoint of this directory, or nowhere."""
    for name in ("../epoch_000002", "epoch_000009"):
        (directory / "latest").write_text(f"{name} {'0' * 64}\n")
        store, warnings = make_store(directory)
        assert loaded(store) == (2, "")
        assert len(warnings) == 1


def test_a_pointer_with_the_name_of_another(directory):
    """The digest says which one it means."""
    store, warnings = make_store(directory, keep_last=9)
    save(store, 3)
    pointer = (directory / "latest").read_text()
    save(store, 4, tag="left")
    for wrong in ("epoch_000001", "epoch_000004", "epoch_000009"):
        (directory / "latest").write_text(pointer.replace("epoch_000003", wrong))
        assert loaded(store) == (3, "")
        assert warnings.pop().endswith(f"latest is damaged: it means epoch_000003, not {wrong}")
    assert warnings == []


def test_things_that_are_no_files(directory):
    """Pipes would never end, and a directory cannot be read."""
    for kind in ("latest", "manifest", "state"):
        file_of(directory, kind).unlink()
    os.mkfifo(directory / "latest")
    os.mkfifo(directory / "epoch_000002" / MANIFEST)
    (directory / "epoch_000002" / STATE).mkdir()
    store, warnings = make_store(directory)
    assert loaded(store) == (1, "")
    assert len(warnings) == 2


# -- versions ------------------------------------------------------------------------------------


def golden_state():
    """What the golden checkpoint of schema 1 holds."""
    return {
        "plain": [None, True, -7, 2**70, 0.1, -0.0, math.inf, "text é", (1, (2,))],
        "keys": {0: "int", "0": "str"},
        "weight": torch.arange(6.0).reshape(2, 3) / 7,
        "half": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
        "complex": torch.tensor(1 + 2j, dtype=torch.complex128),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3, dtype=torch.int64),
        "array": np.arange(4, dtype=np.uint16).reshape(2, 2),
        "big_endian": np.array([1.0, 2.0], ">f4"),
        "scalar": np.float32(0.5),
    }


def test_the_golden_checkpoint_of_schema_1():
    """What was written once can be read for ever."""
    store, warnings = make_store(GOLDEN)
    found = store.load()
    assert (found.schema, found.epoch, found.updates, found.env_steps) == (1, 25, 253, 32384)
    assert (found.score, found.within_epoch) == (123.5, True)
    assert found.path.name == "epoch_000025_update_000253"
    assert dumps(found.state) == dumps(golden_state())
    assert found.state["weight"][1, 2].item() == pytest.approx(5 / 7)
    assert found.state["keys"] == {0: "int", "0": "str"}
    assert warnings == []


def test_a_newer_schema_is_refused(directory):
    """Not damaged, so nothing older is used in its place; and nothing of it is removed."""
    rewrite(directory, schema=2, versions={"maze_train": "9.1"}, something="new")
    store, warnings = make_store(directory, keep_last=1)
    text = r"written by maze_train 9\.1 with schema 2.* up to 1: install a newer maze_train"
    for name in (None, "epoch_000002"):
        with pytest.raises(RunDirectoryError, match=text):
            store.load(name)
    save(store, 3)
    assert names(directory) == ["epoch_000002", "epoch_000003", "latest"]
    assert warnings == []


def test_older_schemas_are_migrated(directory, monkeypatch):
    """Step by step, each by its function; without one the error names the version."""
    monkeypatch.setattr(manifests, "SCHEMA", 3)
    store, _ = make_store(directory)
    with pytest.raises(RunDirectoryError, match="schema 1, which this version no longer reads"):
        store.load()
    steps = {
        1: lambda s: {**s, "steps": ["one"]},
        2: lambda s: {**s, "steps": [*s["steps"], "two"]},
    }
    monkeypatch.setattr(manifests, "MIGRATIONS", MappingProxyType(steps))
    found = store.load()
    assert found.state["steps"] == ["one", "two"]
    assert found.schema == 1
    save(store, 3)
    assert "steps" not in store.load().state


def test_the_tables_of_this_version():
    """Each older schema has its function, and its golden checkpoint."""
    assert sorted(checkpoints.MIGRATIONS) == list(range(1, checkpoints.SCHEMA))
    golden = sorted(path.name for path in GOLDEN.parent.glob("schema_*"))
    assert golden == [f"schema_{n}" for n in range(1, checkpoints.SCHEMA + 1)]


if __name__ == "__main__":
    place = GOLDEN.parent / f"schema_{checkpoints.SCHEMA}"
    assert not place.exists(), f"{place} is there: golden checkpoints are never made again"
    place.mkdir(parents=True)
    (GOLDEN.parent / ".gitattributes").write_text("* -text\n")
    position = Position(25, 253, 32384, score=123.5, within_epoch=True)
    CheckpointStore(place).save(golden_state(), position)
