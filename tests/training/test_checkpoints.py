"""Checkpoints survive whatever happens to a process or to a disk.

The golden checkpoints are made by `python tests/training/test_checkpoints.py`, once for each
schema: those of older schemas are never made anew.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from failing_disks import FULL, Faults, Killed, attempt, flip, make_store, names, restored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maze_train.errors import ConfigError, RunDirectoryError
from maze_train.sealed import seal
from maze_train.training import checkpoints, manifests
from maze_train.training.checkpoint_files import digest
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.outcome import Position
from maze_train.training.state_files import dumps

GOLDEN = Path(__file__).parent / "golden" / "schema_1"
MANIFEST, STATE = "MANIFEST.json", "state.safetensors"


def save(store, epoch, *, updates=None, tag="", **more):
    """A checkpoint after `epoch` epochs of 10 updates; `tag` tells it from others."""
    updates = epoch * 10 if updates is None else updates
    state = {"epoch": epoch, "tag": tag, "weight": torch.full((2,), float(epoch))}
    return store.save(state, Position(epoch=epoch, updates=updates, env_steps=updates * 8, **more))


def loaded(store):
    """Epoch and tag of what is loaded; None for nothing."""
    found = store.load()
    if found is None:
        return None
    assert found.epoch == found.state["epoch"]
    assert found.state["weight"].tolist() == [float(found.epoch)] * 2
    return found.epoch, found.state["tag"]


@pytest.fixture
def directory(tmp_path):
    """Checkpoints after epochs 1 and 2, without any others."""
    store, _ = make_store(tmp_path / "checkpoints")
    save(store, 1)
    save(store, 2)
    return tmp_path / "checkpoints"


# -- writing and reading -------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path):
    """Counters, score and state; by name as well."""
    store, warnings = make_store(tmp_path / "checkpoints")
    assert store.load() is None
    assert store.list() == ()
    first = store.save({"a": 1}, Position(epoch=25, updates=250, env_steps=2000, score=1))
    within = Position(epoch=25, updates=253, env_steps=2024, within_epoch=True)
    second = store.save({"a": 2}, within)
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
    assert warnings == []


def test_the_manifest_can_be_read_by_people(directory):
    """Counters are plain JSON, and the digest is that of the file."""
    content = json.loads((directory / "epoch_000002" / MANIFEST).read_text())
    assert (content["schema"], content["epoch"], content["updates"]) == (1, 2, 20)
    data = (directory / "epoch_000002" / STATE).read_bytes()
    assert content["files"] == {STATE: {"sha256": digest(data).sha256, "bytes": len(data)}}
    assert content["bytes"] == len(data)


def test_a_name_that_is_not_there(directory):
    """The error lists those that are; names that lead elsewhere are not there either."""
    store, _ = make_store(directory)
    for name in ("epoch_000003", "../epoch_000001", "", "latest"):
        with pytest.raises(RunDirectoryError, match=r"there: epoch_000002, epoch_000001"):
            store.load(name)


@pytest.mark.parametrize("score", [math.nan, math.inf, None])
def test_scores_that_are_no_numbers(tmp_path, score):
    """JSON has none of them."""
    store, _ = make_store(tmp_path)
    save(store, 1, score=score)
    assert store.load().score is None


def test_a_state_that_can_not_be_stored_is_an_error_of_the_program(directory):
    """Nothing is written then."""
    store, _ = make_store(directory)
    before = names(directory)
    with pytest.raises(TypeError, match=r"state\['a'\]"):
        store.save({"a": object()}, Position(epoch=3, updates=30, env_steps=0))
    assert names(directory) == before


@pytest.mark.parametrize("settings", [{"keep_last": 0}, {"keep_best": -1}, {"mode": "best"}])
def test_settings_out_of_range(tmp_path, settings):
    """Refused when the store is made."""
    with pytest.raises(ConfigError):
        CheckpointStore(tmp_path, **settings)


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


def test_the_same_place_twice(directory):
    """The later one takes the place of the earlier."""
    store, warnings = make_store(directory)
    save(store, 2, tag="again")
    assert loaded(store) == (2, "again")
    assert names(directory) == ["epoch_000001", "epoch_000002", "latest"]
    assert warnings == []


def test_the_one_just_saved_is_never_removed(tmp_path):
    """At the end of an epoch of which a part was saved after the same number of updates."""
    store, _ = make_store(tmp_path, keep_last=1)
    save(store, 2, within_epoch=True)
    assert save(store, 2, tag="end").is_dir()
    assert names(tmp_path) == ["epoch_000002", "latest"]
    assert loaded(store) == (2, "end")


def test_the_disk_has_all_of_it_before_it_counts(tmp_path, monkeypatch):
    """Content before names, the checkpoint before the pointer, and all before old ones go."""
    done = []

    def watch(name, describe):
        function = getattr(os, name)

        def call(*args, **kwargs):
            done.append(f"{name} {describe(*args)}".replace(f"-{os.getpid()}", ""))
            return function(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    store, _ = make_store(tmp_path / "checkpoints", keep_last=1)
    save(store, 1)
    watch("fsync", lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
    for name in ("rename", "replace"):
        watch(name, lambda source, target: f"{Path(source).name} {Path(target).name}")
    save(store, 2)
    assert done == [
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


def damage_and_load(directory, path, damage):
    """What is loaded, and the warnings, while `path` is damaged; it is whole again afterwards."""
    whole = path.read_bytes()
    damage(path, whole)
    store, warnings = make_store(directory)
    try:
        return loaded(store), warnings
    finally:
        path.write_bytes(whole)


def check_damage(directory, path, damage):
    """It is told, and the previous checkpoint is used; if only the pointer suffered, the newest."""
    result, warnings = damage_and_load(directory, path, damage)
    assert len(warnings) == 1
    assert path.name in warnings[0]
    assert result == ((2, "") if path.name == "latest" else (1, ""))
    if path.name != "latest":
        assert str(path.parent) in warnings[0]


def newest_files(directory):
    """All files on which the newest checkpoint rests."""
    return [
        *(directory / "epoch_000002" / name for name in (MANIFEST, STATE)),
        directory / "latest",
    ]


@pytest.mark.parametrize("i", range(3), ids=["manifest", "state", "latest"])
def test_any_flipped_byte_is_noticed(directory, i):
    """Each byte of each file, another bit each time."""
    path = newest_files(directory)[i]
    for offset in range(path.stat().st_size):
        check_damage(directory, path, flip(offset, 1 << offset % 8))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_flipped_bits_are_noticed(directory, data):
    """File, place and bits at random."""
    path = data.draw(st.sampled_from(newest_files(directory)))
    offset = data.draw(st.integers(0, path.stat().st_size - 1))
    check_damage(directory, path, flip(offset, data.draw(st.integers(1, 255))))


@pytest.mark.parametrize("i", range(3), ids=["manifest", "state", "latest"])
def test_any_length_is_noticed(directory, i):
    """Cut anywhere, empty, or longer by one byte."""
    path = newest_files(directory)[i]
    for length in range(path.stat().st_size):
        check_damage(directory, path, lambda path, whole, n=length: path.write_bytes(whole[:n]))
    check_damage(directory, path, lambda path, whole: path.write_bytes(whole + b"\n"))


@pytest.mark.parametrize("i", range(3), ids=["manifest", "state", "latest"])
def test_files_that_are_missing_or_of_another_checkpoint(directory, i):
    """Neither is taken for the one that was written."""
    path = newest_files(directory)[i]
    check_damage(directory, path, lambda path, _: path.unlink())
    if path.name != "latest":
        other = directory / "epoch_000001" / path.name
        check_damage(directory, path, lambda path, _: shutil.copy(other, path))


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


def test_what_is_wrong_is_said(directory):
    """File, sizes and digests."""
    state, manifest, _ = directory / "epoch_000002" / STATE, newest_files(directory)[0], None
    n = state.stat().st_size
    for damage, text in (
        (lambda path, whole: path.write_bytes(whole[:-1]), f"is {n - 1} bytes long, expected {n}"),
        (flip(n - 1, 1), f"{STATE}: sha256 differs"),
        (lambda path, _: path.unlink(), f"{STATE}: missing"),
    ):
        _, (warning,) = damage_and_load(directory, state, damage)
        assert f"checkpoint {state.parent} is damaged" in warning
        assert text in warning
    _, (warning,) = damage_and_load(directory, manifest, flip(5, 1))
    assert f"{MANIFEST}: its sha256 differs" in warning


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
    with pytest.raises(RunDirectoryError, match="no checkpoint that is whole"):
        store.load()
    (directory / "latest").write_bytes(b"")
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
    sha256 = digest(data).sha256
    (directory / "latest").write_text(f"epoch_000002 {sha256}\n")


def entry(sha256="0" * 64, nbytes=0):
    """One file of a manifest."""
    return {"sha256": sha256, "bytes": nbytes}


@pytest.mark.parametrize(
    "changes",
    [
        *({"schema": value} for value in (0, -1, True, "1", 1.0, None, ...)),
        *({"epoch": value} for value in (-1, "2", 2.0, None, ..., True, 10**30, 3)),
        *({"score": value} for value in ("1", 1, True, [])),
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


@pytest.mark.parametrize(
    "data",
    [
        *(b"[" * 90_000, b"\xff", b"[]", b"{}", b"null", b'{"sha256": NaN}', b'"\\ud800"'),
        *(b"9" * 5000, b" " * 200_000),
    ],
    ids=range(9),
)
def test_manifests_that_are_none(directory, data):
    """Anything else where the manifest should be."""
    (directory / "epoch_000002" / MANIFEST).write_bytes(data)
    store, warnings = make_store(directory)
    assert loaded(store) == (1, "")
    assert len(warnings) == 1


def test_a_manifest_that_is_too_long_is_not_even_read(directory):
    """A file of any size may be there."""
    with (directory / "epoch_000002" / MANIFEST).open("wb") as file:
        file.truncate(2**40)
    store, warnings = make_store(directory)
    assert loaded(store) == (1, "")
    assert f"{2**40} bytes long, too long" in warnings[0]


@pytest.mark.parametrize(
    "text",
    [
        "../epoch_000002 " + "0" * 64 + "\n",
        "epoch_000002",
        "\xff",
        "epoch_000009 " + "0" * 64 + "\n",
    ],
)
def test_crafted_pointers(directory, text):
    """A pointer leads to a checkpoint of this directory, or nowhere."""
    (directory / "latest").write_bytes(text.encode("latin1"))
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
    """Pipes would never end, and a directory can not be read."""
    for path in newest_files(directory):
        path.unlink()
    os.mkfifo(directory / "latest")
    os.mkfifo(directory / "epoch_000002" / MANIFEST)
    (directory / "epoch_000002" / STATE).mkdir()
    store, warnings = make_store(directory)
    assert loaded(store) == (1, "")
    assert len(warnings) == 2


class Intruder:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("fitting", [False, True])
def test_checkpoints_run_no_code(directory, tmp_path, kind, fitting):
    """Every file is a pickle; with a manifest that fits, or as manifest and pointer as well."""
    mark = tmp_path / "mark"
    file = io.BytesIO()
    torch.save({"a": Intruder(mark)}, file)
    payload = pickle.dumps(Intruder(mark)) if kind == "pickle" else file.getvalue()
    shutil.rmtree(directory / "epoch_000001")
    for path in newest_files(directory)[1 if fitting else 0 :]:
        path.write_bytes(payload)
    if fitting:
        rewrite(directory, files={STATE: vars_of(digest(payload))}, bytes=len(payload))
    store, warnings = make_store(directory)
    with pytest.raises(RunDirectoryError):
        store.load()
    assert any("damaged" in text for text in warnings)
    store.list()
    store.clean()
    assert not mark.exists()


def vars_of(content):
    """A digest as manifests have it."""
    return entry(content.sha256, content.nbytes)


# -- processes that end in the middle ------------------------------------------------------------


def new_epoch(store):
    """The usual case."""
    return save(store, 3, tag="new")


def same_place(store):
    """A checkpoint of the same name is there."""
    return save(store, 2, tag="new")


def other_branch(store):
    """Resumed from the first one; the second belongs to a branch that is left."""
    return save(store, 1, updates=13, tag="new", within_epoch=True)


def older_place(store):
    """Replaces a checkpoint that is not the newest."""
    return save(store, 1, tag="new")


SCENARIOS = (new_epoch, same_place, other_branch, older_place)


@pytest.mark.parametrize("mode", ["before", "after", "dead"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_moment(directory, tmp_path, scenario, mode):
    """The old checkpoint or the new one is there, whole; and the next one can be written."""
    shutil.copytree(directory, tmp_path / "backup")
    counted = Faults(-1, Killed())
    result, _ = attempt(directory, scenario, counted)
    assert counted.calls > 10
    new = (result.name, "new")
    seen = set()
    for k in range(counted.calls):
        restored(directory, tmp_path / "backup")
        result, _ = attempt(directory, scenario, Faults(k, Killed(), mode))
        assert isinstance(result, Killed)
        store, _ = make_store(directory)
        found = store.load()
        place = found.path.name.removeprefix(".old-").split("-")[0]
        assert (place, found.state["tag"]) in {new, ("epoch_000002", "")}
        seen.add(found.state["tag"])
        store.clean()
        cleaned = store.load()
        assert cleaned.state["tag"] == found.state["tag"]
        assert cleaned.path.name == place
        assert not [name for name in names(directory) if name.startswith(".")]
        save(store, 4, tag="next")
        assert loaded(make_store(directory)[0]) == (4, "next")
        assert [info.epoch for info in store.list()][-1] == 4
    assert seen == {"new", ""}


@pytest.mark.parametrize("mode", ["before", "dead"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_without_cleaning(directory, tmp_path, scenario, mode):
    """The next process saves at once, at the same place."""
    shutil.copytree(directory, tmp_path / "backup")
    counted = Faults(-1, Killed())
    attempt(directory, scenario, counted)
    for k in range(counted.calls):
        restored(directory, tmp_path / "backup")
        attempt(directory, scenario, Faults(k, Killed(), mode))
        store, warnings = make_store(directory)
        assert scenario(store) is not None
        assert store.load().state["tag"] == "new"
        assert warnings == []


@pytest.mark.slow
def test_real_kills(tmp_path):
    """Forty processes that save without pause, each killed by SIGKILL."""
    code = """
import os, random, signal, sys, time, torch
from pathlib import Path
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.outcome import Position
from maze_train.types import StatePart
torch.set_num_threads(1)
random.seed(1)
warnings, last = [], 0
store = CheckpointStore(Path(sys.argv[1]), warn=warnings.append)

def work(first):
    store.clean()
    for n in range(first, 10**6):
        for tag in "ab":  # the second takes the place of the first
            state = {"n": n, "tag": tag, "w": torch.full((1000,), float(n))}
            # Some of them change each time, the others from time to time.
            versions = [n // (i + 1) for i in range(4)]
            state["parts"] = [StatePart(str(v), lambda v=v: {"version": v}) for v in versions]
            assert store.save(state, Position(epoch=n, updates=n, env_steps=n))
            os.write(writing, b"x")

for _ in range(40):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        work(last + 1)
    os.read(reading, 1)  # some progress each time
    time.sleep(random.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = store.load()
    if found is not None:
        n = found.state["n"]
        assert found.epoch == n > last and found.state["w"].eq(n).all()
        contents = [part.read()["version"] for part in found.state["parts"]]
        assert contents == [n // (i + 1) for i in range(4)]
        last = n
store.clean()
names = [path.name for path in store.directory.iterdir()]
print(last >= 40, sum(name.startswith(".") for name in names), len(names) <= 4)
print([text for text in warnings if "latest is damaged" not in text])
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == ["True 0 True", "[]"]


# -- disks that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["before", "dead"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_full_disk(directory, tmp_path, scenario, mode):
    """One warning that names the last good checkpoint; all is as it was, and training goes on."""
    shutil.copytree(directory, tmp_path / "backup")
    # What needs space; what removes things works, but for renaming when it is the only fault.
    operations = ("open", "mkdir", "fsync", *(("rename", "replace") if mode == "before" else ()))
    counted = Faults(-1, FULL, names=operations)
    attempt(directory, scenario, counted)
    outcomes = []
    for k in range(counted.calls):
        restored(directory, tmp_path / "backup")
        before = names(directory)
        result, warnings = attempt(directory, scenario, Faults(k, FULL, mode, operations))
        outcomes.append(result)
        store, none = make_store(directory)
        if result is None:
            assert len(warnings) == 1
            assert "No space left on device" in warnings[0]
            assert "last good one is still epoch_000002" in warnings[0]
            assert names(directory) == before
            assert loaded(store) == (2, "")
        else:  # only what comes after the new one was complete
            assert store.load().state["tag"] == "new"
        assert none == []
        assert save(store, 4) is not None
    assert outcomes[0] is None
    assert outcomes.count(None) >= 7


def test_a_full_disk_when_nothing_is_new(tmp_path, monkeypatch):
    """The same bytes a second time, within one second."""

    class Clock(datetime):
        """Stands still."""

        @classmethod
        def now(cls, tz=None):
            return cls(2024, 1, 1, tzinfo=tz)

    monkeypatch.setattr(manifests, "datetime", Clock)
    store, _ = make_store(tmp_path / "checkpoints")
    for k in range(7):
        save(store, 1)
        attempt(tmp_path / "checkpoints", lambda store: save(store, 1), Faults(k, FULL))
        assert loaded(store) == (1, "")
        assert not [name for name in names(store.directory) if name.startswith(".tmp")]
        assert "epoch_000001" in names(store.directory)


def test_a_file_that_grows_too_long(directory):
    """A real write that fails in the middle."""
    resource = pytest.importorskip("resource")
    store, warnings = make_store(directory)
    before = names(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"epoch": 3, "weight": torch.zeros(100_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        assert store.save(state, Position(epoch=3, updates=30, env_steps=0)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(warnings) == 1
    assert "File too large" in warnings[0]
    assert names(directory) == before
    assert loaded(store) == (2, "")
    assert store.save(state, Position(epoch=3, updates=30, env_steps=0)) is not None


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    """A file system of 400 kB, where the machine lets everyone mount one."""
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from maze_train.training.checkpoints import CheckpointStore\n"
        "from maze_train.training.outcome import Position\n"
        "store = CheckpointStore(Path(sys.argv[1]) / 'checkpoints')\n"
        "places = {e: Position(epoch=e, updates=e, env_steps=0) for e in (1, 2, 3)}\n"
        "print([store.save({'a': torch.ones(n)}, places[e]) is not None\n"
        "       for e, n in ((1, 50_000), (2, 80_000), (3, 20_000))])\n"
        "print([len(store.load().state['a']), "
        "       sorted(p.name for p in store.directory.iterdir())])\n"
    )
    mount = f"mount -t tmpfs -o size=400k none {tmp_path}"
    run = f'exec {sys.executable} -c "$CODE" {tmp_path}'
    try:
        result = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f"{mount} && {run}"],
            env={**os.environ, "CODE": code},
            capture_output=True,
            text=True,
            timeout=120,
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if result.returncode and "Traceback" not in result.stderr:
        pytest.skip(f"no file system can be mounted: {result.stderr.strip()}")
    assert result.stdout.splitlines() == [
        "[True, False, True]",
        "[20000, ['epoch_000001', 'epoch_000003', 'latest']]",
    ]
    assert "No space left on device" in result.stderr


def test_a_run_directory_that_is_gone(tmp_path, capsys):
    """It is not made anew: its disk may have been unmounted. The warning is printed by default."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    store = CheckpointStore(run_dir / "checkpoints")
    assert save(store, 1) is not None
    shutil.rmtree(run_dir)
    assert save(store, 2) is None
    assert not run_dir.exists()
    text = capsys.readouterr().err
    assert text.startswith("warning: checkpoint ")
    assert text.count("\n") == 1
    assert "there is no earlier one; training goes on" in text
    run_dir.mkdir()
    assert save(store, 3) is not None


def test_old_checkpoints_that_can_not_be_removed(directory, monkeypatch):
    """A warning; the new one is there."""
    rename, rmtree = os.rename, shutil.rmtree

    def fail(path, *args, **kwargs):
        if "epoch_000001" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return (rename if args else rmtree)(path, *args, **kwargs)

    monkeypatch.setattr(os, "rename", fail)
    monkeypatch.setattr(shutil, "rmtree", fail)
    store, warnings = make_store(directory)
    assert save(store, 3) is not None
    assert len(warnings) == 1
    assert "epoch_000001 could not be removed: [Errno 13] Permission denied" in warnings[0]
    assert loaded(store) == (3, "")


def test_checkpoints_of_which_nothing_is_known_stay(directory, monkeypatch):
    """A disk that does not answer now may answer later."""
    fstat = os.fstat
    bad = (directory / "epoch_000001" / MANIFEST).stat().st_ino

    def fail(descriptor):
        if fstat(descriptor).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return fstat(descriptor)

    store, warnings = make_store(directory, keep_last=1)
    monkeypatch.setattr(os, "fstat", fail)
    save(store, 3)
    assert names(directory) == ["epoch_000001", "epoch_000003", "latest"]
    monkeypatch.undo()
    save(store, 4)
    assert names(directory) == ["epoch_000004", "latest"]
    assert warnings == []


# -- leftovers -----------------------------------------------------------------------------------


def dead_pid():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    process.wait()
    return process.pid


def test_leftovers_of_dead_processes(directory):
    """Those of processes that run stay, and so does all that is no leftover."""
    dead = dead_pid()
    for kind in ("tmp", "trash"):
        for pid in (dead, os.getpid(), os.getppid(), 10**20):
            (directory / f".{kind}-epoch_000009-{pid}").mkdir()
            (directory / f".{kind}-epoch_000009-{pid}" / STATE).write_bytes(b"x")
    (directory / f".tmp-latest-{dead}").write_bytes(b"x")
    (directory / "notes.txt").write_text("mine")
    (directory / ".hidden").write_text("mine")
    store, warnings = make_store(directory)
    assert loaded(store) == (2, "")
    store.clean()
    alive = os.getppid()
    assert names(directory) == [
        *(".hidden", f".tmp-epoch_000009-{alive}", f".trash-epoch_000009-{alive}"),
        *("epoch_000001", "epoch_000002", "latest", "notes.txt"),
    ]
    assert warnings == []


def test_cleaning_where_there_is_nothing(tmp_path):
    """Before the first checkpoint."""
    make_store(tmp_path / "checkpoints")[0].clean()
    assert names(tmp_path) == []


def test_a_checkpoint_that_was_about_to_be_replaced(directory):
    """It counts until its place is taken, and gets it back."""
    old = directory / f".old-epoch_000002-{dead_pid()}"
    (directory / "epoch_000002").rename(old)
    store, warnings = make_store(directory)
    assert loaded(store) == (2, "")
    assert store.load("epoch_000002").path == old
    assert names(directory)[0] == old.name
    store.clean()
    assert names(directory) == ["epoch_000001", "epoch_000002", "latest"]
    assert warnings == []


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
    assert not place.exists(), f"{place} is there: golden checkpoints are never made anew"
    place.mkdir(parents=True)
    (GOLDEN.parent / ".gitattributes").write_text("* -text\n")
    CheckpointStore(place).save(
        golden_state(),
        Position(epoch=25, updates=253, env_steps=32384, score=123.5, within_epoch=True),
    )
