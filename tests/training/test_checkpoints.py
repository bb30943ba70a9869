"""Checkpoints: retention, and rejection of damaged or hostile files.

`python tests/training/test_checkpoints.py` creates the golden checkpoint, once for each schema.
`tests/resuming/test_damaged_files.py` damages every file of a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from stored_checkpoints import (
    MANIFEST,
    STATE,
    Segments,
    loaded,
    make_store,
    names,
    new_files,
    save,
    saved,
)
from test_state_files import assert_same

from maze_train import CheckpointStore, ConfigError, RunDirectoryError
from maze_train.core.files import FileDigest, seal
from maze_train.training.checkpoints import SCHEMA
from maze_train.training.outcome import Position

GOLDEN = Path(__file__).parent / "golden" / f"schema_{SCHEMA}"


@pytest.fixture
def directory(tmp_path):
    """Checkpoints after epochs 1 and 2, which share two of their three parts."""
    saved(tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


# -- writing and reading -------------------------------------------------------------------------


def test_saved_checkpoints_are_loaded_by_name(tmp_path):
    """Counters, score and state are restored; checkpoints can be loaded by name."""
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
    named = store.load("epoch_000025")
    assert (named.score, named.within_epoch, named.state) == (1.0, False, {"a": 1})
    assert [info.path for info in store.list()] == [first, second]
    assert names(tmp_path / "checkpoints") == [first.name, second.name, "latest"]
    content, data = json.loads((second / MANIFEST).read_text()), (second / STATE).read_bytes()
    assert (content["schema"], content["epoch"], content["updates"]) == (3, 25, 253)
    assert content["bytes"] == len(data)
    assert set(content["versions"]) == {"maze_train", "torch", "numpy", "gymnasium", "python"}
    assert content["versions"]["python"] == sys.version.split()[0]
    assert content["created"].endswith("+00:00")
    assert content["files"] == {STATE: {"sha256": FileDigest.of(data).sha256, "bytes": len(data)}}
    assert warnings == []


def test_unknown_checkpoint_name_raises(directory):
    """The error lists the available checkpoints."""
    store, _ = make_store(directory)
    for name in ("epoch_000003", "../epoch_000001", "", "latest"):
        with pytest.raises(RunDirectoryError, match=r"available: epoch_000002, epoch_000001"):
            store.load(name)


def test_unsupported_values_raise(directory):
    """Invalid scores, states and settings raise an error, and no file is written."""
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
def test_newest_and_best_checkpoints_are_kept(tmp_path, settings, scores, left):
    """The newest and the best checkpoints are kept; for equal scores, the earlier."""
    store, warnings = make_store(tmp_path, **settings)
    for epoch, score in enumerate(scores, 1):
        save(store, epoch, score=score)
    assert [info.epoch for info in store.list()] == left
    assert loaded(store) == (4, "")
    assert warnings == []


def test_checkpoints_after_the_resumed_position_are_removed(tmp_path):
    """Checkpoints after the resumed position are removed."""
    store, warnings = make_store(tmp_path, keep_last=9, keep_best=9)
    for epoch in (1, 2, 3, 4, 5):
        save(store, epoch, tag="left", score=float(epoch))
    assert store.load("epoch_000002").epoch == 2
    assert loaded(store) == (5, "left")
    save(store, 3, tag="new", score=0.0)
    assert [info.epoch for info in store.list()] == [1, 2, 3]
    assert loaded(store) == (3, "new")
    save(store, 3, updates=33, tag="new", within_epoch=True)
    assert names(tmp_path)[2:4] == ["epoch_000003-2", "epoch_000003_update_000033"]
    assert warnings == []


def test_fallback_ignores_abandoned_branches(directory):
    """Checkpoints at or after the position of `latest` belong to an abandoned branch."""
    store, warnings = make_store(directory, keep_last=9)
    save(store, 3)
    pointer = (directory / "latest").read_bytes()
    save(store, 4, tag="left")
    (directory / "latest").write_bytes(pointer)
    assert loaded(store) == (3, "")
    shutil.copytree(directory / "epoch_000003", directory / "epoch_000003-2")
    (directory / "epoch_000003" / STATE).unlink()
    assert loaded(store) == (2, "")
    assert len(warnings) == 1


def test_retention_keeps_the_newest_checkpoint(tmp_path):
    """Checkpoints at the same position have different names, so none is replaced.

    The new checkpoint itself is never removed.
    """
    store, warnings = make_store(tmp_path, keep_last=1)
    save(store, 2, within_epoch=True)
    for tag, name in (("end", "epoch_000002"), ("again", "epoch_000002-2"), ("", "epoch_000002")):
        assert save(store, 2, tag=tag) == tmp_path / name
        assert names(tmp_path) == [name, "latest"]
        assert loaded(store) == (2, tag)
        assert store.load(name).path.name == name
    assert warnings == []


def test_checkpoint_is_synced_before_the_pointer(tmp_path, monkeypatch):
    """Order of syncs: contents, names, checkpoint, pointer; then old ones are removed."""
    done = []

    def watch(name, function):
        def call(*args, **folders):
            paths = [os.readlink(f"/proc/self/fd/{args[0]}")] if name == "fsync" else args
            text = " ".join([name, *(Path(path).name for path in paths)])
            done.append(text.replace(f"-{os.getpid()}", "").replace(f".{os.getpid()}", ""))
            return function(*args, **folders)

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
        "fsync .latest.tmp",
        "replace .latest.tmp latest",
        "fsync checkpoints",
        "rename epoch_000001 .tmp-epoch_000001",
    ]


# -- damage --------------------------------------------------------------------------------------


def test_damaged_checkpoint_is_skipped_with_a_warning(directory):
    """The warning names the damaged checkpoint, and the previous checkpoint is used."""
    newest = directory / "epoch_000002"
    shutil.copytree(newest, directory / "copy")
    (part,) = new_files(newest, directory / "epoch_000001")
    for name in (MANIFEST, STATE, part):
        (newest / name).write_bytes(b"")
        store, warnings = make_store(directory)
        assert loaded(store) == (1, "")
        assert [f"{newest} is damaged and skipped: {name}: " in text for text in warnings] == [True]
        shutil.copy(directory / "copy" / name, newest / name)
    shutil.rmtree(newest)
    shutil.copytree(directory / "epoch_000001", newest)
    store, warnings = make_store(directory)
    assert loaded(store) == (1, "")
    assert "belongs to epoch_000001" in warnings[0]


@pytest.mark.parametrize("damaged", [MANIFEST, STATE])
def test_only_damaged_checkpoints_raise(directory, damaged):
    """If all checkpoints are damaged, loading raises an error."""
    for name in ("epoch_000001", "epoch_000002"):
        (directory / name / damaged).write_bytes(b"x")
    store, warnings = make_store(directory)
    with pytest.raises(RunDirectoryError, match=r"no undamaged checkpoint \(2 damaged\)"):
        store.load()
    assert len(warnings) == 2
    with pytest.raises(RunDirectoryError, match=f"epoch_000002 is damaged: {damaged}"):
        store.load("epoch_000002")


POINTERS = (b"", b"\xff", b"../epoch_000002\n", b"epoch_000009\n", b"/epoch_000002", b"0" * 9999)


@pytest.mark.parametrize("pointer", [*POINTERS, None, os.mkfifo], ids=repr)
def test_invalid_pointer_falls_back_to_the_newest_checkpoint(directory, pointer):
    """An invalid pointer is ignored, and the newest checkpoint is used."""
    path = directory / "latest"
    path.unlink()
    if isinstance(pointer, bytes):
        path.write_bytes(pointer)
    elif pointer is not None:
        pointer(path)
    store, warnings = make_store(directory)
    assert loaded(store) == (2, "")
    (warning,) = warnings
    assert f"{path} is" in warning
    for name in ("epoch_000001", "epoch_000002"):
        shutil.rmtree(directory / name)
    if pointer is None:
        assert store.load() is None
    else:  # missing checkpoints are an error, too
        with pytest.raises(RunDirectoryError, match="no undamaged checkpoint"):
            store.load()


def rewrite(directory, **changes):
    """Write a valid manifest with other content."""
    path = directory / "epoch_000002" / MANIFEST
    content = json.loads(path.read_text()) | changes
    path.write_bytes(seal({k: v for k, v in content.items() if v is not ...}))


def entry(sha256="0" * 64, nbytes=0):
    """Return one file entry of a manifest."""
    return {"sha256": sha256, "bytes": nbytes}


CRAFTED = [
    *({"schema": value} for value in (0, -1, True, "1", 1.0, None, ...)),
    *({"epoch": value} for value in (-1, "2", 2.0, None, ..., True, 10**30, 3)),
    *({"score": value} for value in ("1", 1, True, [], math.inf)),
    *({"files": value} for value in ([], {}, None, {STATE: 1}, {STATE: {}}, {"": entry()})),
    *({"files": {STATE: entry(nbytes=value)}} for value in (-1, "1", 2**70, True)),
    *({"files": {STATE: entry(), name: entry()}} for name in ("../x", "a/b", "/x", ".x", "y")),
    *({"files": {STATE: entry(sha256=value)}} for value in (1, None, [])),
    *({"within_epoch": value} for value in (0, None, True)),
    *({"settings": value} for value in (1, None, ...)),
]


def test_crafted_manifests_are_damage(directory):
    """Manifests with a valid digest but invalid content are damaged."""
    path = directory / "epoch_000002" / MANIFEST
    whole = path.read_bytes()
    for changes in CRAFTED:
        path.write_bytes(whole)
        rewrite(directory, **changes)
        store, warnings = make_store(directory)
        assert loaded(store) == (1, ""), changes
        assert len(warnings) == 1
        assert store.list()[0].epoch == 1


def test_other_files_in_place_of_manifests_are_damage(directory):
    """Other file types in place of a manifest are damaged; oversized files are not read."""
    path = directory / "epoch_000002" / MANIFEST
    store, warnings = make_store(directory)
    for data in (b"[" * 90_000, b"\xff", b"[]", b"{}", b'{"sha256": NaN}', b"9" * 5000):
        path.write_bytes(data)
        assert loaded(store) == (1, "")
        assert f"{MANIFEST}: " in warnings.pop()
    with path.open("wb") as file:
        file.truncate(2**40)
    assert loaded(store) == (1, "")
    assert f"{MANIFEST}: cannot be read: " in warnings[0]


# -- versions ------------------------------------------------------------------------------------


def golden_state():
    """Return the state in the golden checkpoint."""
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


def test_golden_checkpoint_can_be_read():
    """The format of this schema is unchanged; changes require a new schema number."""
    store, warnings = make_store(GOLDEN)
    found = store.load()
    assert (found.epoch, found.updates, found.env_steps) == (25, 253, 32384)
    assert (found.score, found.within_epoch) == (123.5, True)
    assert found.path.name == "epoch_000025_update_000253"
    assert_same(found.state, golden_state())
    assert warnings == []


@pytest.mark.parametrize(
    ("schema", "remedy"),
    [(2, r"resume the run with maze_train 9\.1, or start"), (4, "install a newer maze_train")],
)
def test_checkpoint_of_another_schema_raises(directory, schema, remedy):
    """Checkpoints of another schema raise an error and are not removed."""
    rewrite(directory, schema=schema, versions={"maze_train": "9.1"}, something="new")
    store, warnings = make_store(directory, keep_last=1)
    text = rf"written by maze_train 9\.1 with schema {schema}, .* reads schema 3: {remedy}"
    for name in (None, "epoch_000002"):
        with pytest.raises(RunDirectoryError, match=text):
            store.load(name)
    save(store, 3)
    assert names(directory) == ["epoch_000002", "epoch_000003", "latest"]
    assert warnings == []


if __name__ == "__main__":
    assert not GOLDEN.exists(), f"{GOLDEN} is there: golden checkpoints are never made again"
    GOLDEN.mkdir(parents=True)
    (GOLDEN.parent / ".gitattributes").write_text("* -text\n")
    position = Position(25, 253, 32384, score=123.5, within_epoch=True)
    CheckpointStore(GOLDEN).save(golden_state(), position)
