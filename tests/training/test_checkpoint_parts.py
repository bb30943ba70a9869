"""Large pieces of a state are files of their own, which checkpoints share until they change."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import tracemalloc
import weakref
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from failing_disks import FULL, Faults, Killed, attempt, flip, make_store, names, restored
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_tensors

from maze_train.errors import RunDirectoryError
from maze_train.training import checkpoint_files, manifests
from maze_train.training.checkpoint_files import digest
from maze_train.training.outcome import Position
from maze_train.training.state_files import dumps, loads
from maze_train.types import StatePart

MANIFEST, STATE = "MANIFEST.json", "state.safetensors"


class Segments:
    """An owner of large pieces; knows which of them were read."""

    def __init__(self, n, size=4):
        self.size = size
        self.values = [float(i) for i in range(n)]
        self.versions = [0] * n
        self.changes = 0
        self.reads = []

    def change(self, i, value):
        """A piece with another content has another version."""
        self.changes += 1
        self.values[i], self.versions[i] = float(value), self.changes

    def part(self, i):
        """One piece as it is now."""

        def read():
            self.reads.append(i)
            return {"column": np.full(self.size, self.values[i]), "rows": (i, self.size)}

        return StatePart(str(self.versions[i]), read)

    def state_dict(self):
        """The pieces within lists and dicts."""
        parts = [self.part(i) for i in range(len(self.values))]
        return {"changes": self.changes, "segments": {"first": parts[0], "more": tuple(parts[1:])}}

    def load_state_dict(self, state):
        """Continue with the pieces, and with their versions."""
        found = [state["segments"]["first"], *state["segments"]["more"]]
        self.changes = state["changes"]
        self.versions = [int(part.version) for part in found]
        self.values = contents(state)


def contents(state):
    """The value of each piece of a state that was loaded."""
    values = []
    for i, part in enumerate((state["segments"]["first"], *state["segments"]["more"])):
        content = part.read()
        assert content["rows"] == (i, len(content["column"]))
        assert len(set(content["column"])) == 1
        values.append(float(content["column"][0]))
    return values


def save(store, owner, epoch, **more):
    """A checkpoint of the owner."""
    place = Position(epoch=epoch, updates=10 * epoch, env_steps=0, **more)
    return store.save(owner.state_dict(), place)


def inodes(path):
    """The files of parts in a checkpoint: name and inode."""
    return {file.name: file.stat().st_ino for file in path.glob("part_*")}


def what_is_new(path, earlier):
    """Names of the files of parts that an earlier checkpoint does not share."""
    known = set(inodes(earlier).values())
    return [name for name, inode in inodes(path).items() if inode not in known]


@pytest.fixture
def saved(tmp_path):
    """A store, its owner of three pieces, and the directory: the second changed after epoch 1."""
    store, _ = make_store(tmp_path / "checkpoints")
    owner = Segments(3)
    save(store, owner, 1)
    owner.change(1, 50)
    save(store, owner, 2)
    owner.reads.clear()
    return store, owner, store.directory


# -- writing and reading -------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path):
    """Contents and versions; they are files, all of which the manifest lists and counts."""
    store, warnings = make_store(tmp_path)
    owner = Segments(3, size=10_000)
    path = save(store, owner, 1)
    found = make_store(tmp_path)[0].load()
    assert contents(found.state) == [0.0, 1.0, 2.0]
    assert found.state["segments"]["first"].version == "0"
    assert type(found.state["segments"]["more"]) is tuple
    manifest = json.loads((path / MANIFEST).read_text())
    assert sorted({*manifest["files"], MANIFEST}) == names(path)
    assert len(inodes(path)) == 3
    for name, entry in manifest["files"].items():
        assert digest((path / name).read_bytes()).sha256 == entry["sha256"]
    sizes = {name: (path / name).stat().st_size for name in manifest["files"]}
    assert sizes == {name: entry["bytes"] for name, entry in manifest["files"].items()}
    assert found.nbytes == manifest["bytes"] == sum(sizes.values()) > 3 * 80_000
    assert sizes[STATE] < 2000
    assert warnings == []


def test_only_what_changed_is_read_and_written(tmp_path):
    """One piece of fifty; and then none."""
    store, _ = make_store(tmp_path, keep_last=3)
    owner = Segments(50)
    first = save(store, owner, 1)
    assert owner.reads == list(range(50))
    owner.reads.clear()
    owner.change(17, 99)
    second = save(store, owner, 2)
    assert owner.reads == [17]
    assert len(inodes(second)) == 50
    assert len(what_is_new(second, first)) == 1
    third = save(store, owner, 3)
    assert owner.reads == [17]
    assert what_is_new(third, second) == []
    assert third.joinpath(STATE).stat().st_ino != second.joinpath(STATE).stat().st_ino
    assert contents(store.load().state) == owner.values
    assert contents(store.load("epoch_000001").state) == [float(i) for i in range(50)]


def test_a_file_is_written_before_the_next_piece_is_read(tmp_path):
    """And it is on disk, before the state that names it."""
    order = []

    class Watched(Segments):
        def part(self, i):
            part = super().part(i)
            return StatePart(part.version, lambda: order.append(f"read {i}") or part.read())

    fsync = os.fsync

    def watch(descriptor):
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("_")[0])
        fsync(descriptor)

    (tmp_path / "checkpoints").mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", watch)
        save(make_store(tmp_path / "checkpoints")[0], Watched(2), 1)
    assert order[:6] == ["read 0", "part", "read 1", "part", STATE, MANIFEST]
    assert order[6].startswith(".tmp-epoch")


def test_pieces_of_equal_content_are_one_file(tmp_path, monkeypatch):
    """Until one of them changes; it is written once, and never again."""
    store, _ = make_store(tmp_path)
    written = []
    original = checkpoint_files.write_synced

    def write(path, data):
        written.append(path.name)
        original(path, data)

    monkeypatch.setattr(checkpoint_files, "write_synced", write)

    def state(**values):
        return {
            key: StatePart(str(value), lambda x=value: {"x": torch.full((3,), x)})
            for key, value in values.items()
        }

    for epoch, a, b, c, new in ((1, 7, 5, 5, 2), (2, 7, 5, 5, 0), (3, 7, 5, 6, 1), (4, 7, 7, 8, 1)):
        path = store.save(state(a=a, b=b, c=c), Position(epoch=epoch, updates=0, env_steps=0))
        assert len(inodes(path)) == len({a, b, c})
        assert sum(name.startswith("part_") for name in written) == new
        written.clear()
        if epoch > 1:
            assert len(what_is_new(path, path.with_name(f"epoch_00000{epoch - 1}"))) == new
        found = make_store(tmp_path)[0].load().state
        assert [found[key].read()["x"].tolist() for key in "abc"] == [[x] * 3 for x in (a, b, c)]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            StatePart("1", lambda: {"x": [1, object()]}),
            r"state\['a'\]\[1\].*\['x'\]\[1\] is of type object",
        ),
        (StatePart("1", lambda: [1]), r"state\['a'\]\[1\] is a part .*list"),
        (StatePart(1, dict), r"state\['a'\]\[1\] has the version 1: versions are str"),
    ],
    ids=["content", "list", "version"],
)
def test_parts_that_can_not_be_stored(saved, part, message):
    """Said with the place, in checkpoints and in single files; nothing is left of it."""
    store, _, directory = saved
    state = {"a": [StatePart("1", dict), part]}
    with pytest.raises(TypeError, match=message):
        dumps(state)
    before = names(directory)
    with pytest.raises(TypeError, match=message):
        store.save(state, Position(epoch=3, updates=30, env_steps=0))
    assert names(directory) == before


def test_too_many_parts(saved, monkeypatch):
    """A checkpoint whose manifest would not be read is not written."""
    store, owner, directory = saved
    before = names(directory)
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 500)
    with pytest.raises(ValueError, match="4 files: let the state have fewer, larger parts"):
        save(store, owner, 3)
    assert names(directory) == before


def test_thousands_of_parts(tmp_path):
    """A manifest of them is read again."""
    state = {"a": [StatePart("", lambda i=i: {"i": i}) for i in range(1000)]}
    store, _ = make_store(tmp_path)
    store.save(state, Position(epoch=1, updates=0, env_steps=0))
    assert [part.read()["i"] for part in store.load().state["a"]] == list(range(1000))


# -- memory --------------------------------------------------------------------------------------


def test_one_piece_at_a_time_is_in_memory(tmp_path):
    """While they are written; the content of the one before is gone when the next is read."""
    alive = weakref.WeakSet()
    most = 0

    def read():
        nonlocal most
        most = max(most, len(alive))
        column = torch.zeros(250_000)
        alive.add(column)
        return {"column": column}

    store, _ = make_store(tmp_path)
    state = {"parts": [StatePart("", read) for _ in range(20)]}
    tracemalloc.start()
    try:
        store.save(state, Position(epoch=1, updates=0, env_steps=0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most == 0
    assert len(alive) == 0
    assert peak < 5e6


@pytest.mark.parametrize("copied", [False, True])
def test_verifying_reads_piece_by_piece(tmp_path, monkeypatch, copied):
    """Twenty files of a megabyte each, also where they have to be copied."""
    store, _ = make_store(tmp_path)
    owner = Segments(20, size=125_000)
    save(store, owner, 1)
    if copied:
        monkeypatch.setattr(os, "link", refuse)
    tracemalloc.start()
    try:
        store, _ = make_store(tmp_path)
        found = store.load()
        store.save(found.state, Position(epoch=2, updates=20, env_steps=0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert contents(store.load().state) == owner.values
    assert peak < 4e6


# -- which files are shared ----------------------------------------------------------------------


def refuse(*args, **kwargs):
    """A file system without links."""
    raise OSError(errno.EPERM, "Operation not permitted")


def test_a_continued_run_shares_with_what_it_loaded(saved):
    """The first save of another process reads only what changed since."""
    _, _, directory = saved
    store, _ = make_store(directory)
    owner = Segments(3)
    owner.load_state_dict(store.load().state)
    owner.change(0, 70)
    path = save(store, owner, 3)
    assert owner.reads == [0]
    assert len(what_is_new(path, directory / "epoch_000002")) == 1
    assert contents(make_store(directory)[0].load().state) == [70.0, 50.0, 2.0]


def test_nothing_is_shared_with_what_was_not_loaded(saved):
    """A store knows nothing of versions that others gave, and another run may give the same."""
    _, _, directory = saved
    store, _ = make_store(directory)
    other = Segments(3)
    other.values = [7.0, 8.0, 9.0]
    other.change(1, 80)
    path = save(store, other, 3)
    assert other.reads == [0, 1, 2]
    assert len(what_is_new(path, directory / "epoch_000002")) == 3
    assert contents(store.load().state) == [7.0, 80.0, 9.0]


def test_another_branch_from_an_older_checkpoint(tmp_path):
    """The versions of the branch that was left come up again, with other contents."""
    store, warnings = make_store(tmp_path, keep_last=9)
    owner = Segments(3)
    for epoch in (1, 2, 3):
        owner.change(1, 10 * epoch)
        save(store, owner, epoch)
    owner.load_state_dict(store.load("epoch_000001").state)
    assert owner.values == [0.0, 10.0, 2.0]
    owner.reads.clear()
    owner.change(1, 77)
    owner.change(2, 78)
    path = save(store, owner, 2, within_epoch=True)
    assert owner.reads == [1, 2]
    assert len(what_is_new(path, tmp_path / "epoch_000001")) == 2
    assert contents(make_store(tmp_path)[0].load().state) == [0.0, 77.0, 78.0]
    assert warnings == []


def test_the_same_version_in_another_place_is_another_part(tmp_path):
    """And a version that comes back after another one was saved is read anew."""
    store, _ = make_store(tmp_path)
    read = []

    def part(version, value):
        return StatePart(version, lambda: read.append(value) or {"value": value})

    for epoch, state, expected in (
        (1, {"a": part("x", 1), "b": part("y", 2)}, [1, 2]),
        (2, {"a": part("y", 3), "b": part("y", 4)}, [3]),
        (3, {"a": part("x", 5), "b": [part("y", 6)], 0: part("y", 7)}, [5, 6, 7]),
        (4, {"a": part("x", 8), "b": [part("y", 9)], "0": part("y", 10)}, [10]),
    ):
        read.clear()
        store.save(state, Position(epoch=epoch, updates=0, env_steps=0))
        assert read == expected
    state = store.load().state
    assert [state["a"].read(), state["b"][0].read()] == [{"value": 5}, {"value": 6}]


def test_what_old_checkpoints_shared_stays_when_they_are_removed(tmp_path):
    """Three pieces of the first checkpoint are still those of the tenth."""
    store, _ = make_store(tmp_path, keep_last=1)
    owner = Segments(5)
    first = inodes(save(store, owner, 1))
    for epoch in range(2, 11):
        owner.change(epoch % 2, epoch)
        path = save(store, owner, epoch)
        assert names(tmp_path) == [path.name, "latest"]
    assert len(inodes(path).items() & first.items()) == 3
    assert contents(make_store(tmp_path)[0].load().state) == [10.0, 9.0, 2.0, 3.0, 4.0]
    assert all(file.stat().st_nlink == 1 for file in path.iterdir())


def test_a_checkpoint_of_the_same_name(saved):
    """It takes over the files of the one whose place it takes."""
    store, owner, directory = saved
    before = inodes(directory / "epoch_000002")
    owner.change(2, 30)
    path = save(store, owner, 2)
    assert owner.reads == [2]
    assert len(before.items() & inodes(path).items()) == 2
    save(store, owner, 2)
    assert owner.reads == [2]
    assert contents(make_store(directory)[0].load().state) == [0.0, 50.0, 30.0]


def test_links_that_are_refused(saved, monkeypatch):
    """Files are copied, and still not read from their owner."""
    store, owner, directory = saved
    monkeypatch.setattr(os, "link", refuse)
    owner.change(0, 60)
    path = save(store, owner, 3)
    assert owner.reads == [0]
    assert len(what_is_new(path, directory / "epoch_000002")) == 3
    assert contents(make_store(directory)[0].load().state) == [60.0, 50.0, 2.0]


def test_damaged_files_are_not_copied(saved, monkeypatch):
    """What is read is compared, and then written anew."""
    store, owner, directory = saved
    monkeypatch.setattr(os, "link", refuse)
    (name,) = what_is_new(directory / "epoch_000002", directory / "epoch_000001")
    file = directory / "epoch_000002" / name
    flip(200, 1)(file, file.read_bytes())
    save(store, owner, 3)
    assert owner.reads == [1]
    assert contents(make_store(directory)[0].load().state) == owner.values


def test_a_link_that_was_made_although_it_failed(saved, monkeypatch):
    """Its file is that of the earlier checkpoint, and nothing is written into it."""
    store, owner, directory = saved
    link = os.link

    def late(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", late)
    before = inodes(directory / "epoch_000002")
    path = save(store, owner, 3)
    assert owner.reads == []
    assert len(what_is_new(path, directory / "epoch_000002")) == 3
    assert inodes(directory / "epoch_000002") == before
    assert contents(make_store(directory)[0].load().state) == owner.values


def cut_off(path):
    """A file that lost its end."""
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("lose", [Path.unlink, cut_off, lambda path: shutil.rmtree(path.parent)])
def test_an_earlier_file_that_is_gone(saved, lose):
    """It is written anew."""
    store, owner, directory = saved
    (name,) = what_is_new(directory / "epoch_000002", directory / "epoch_000001")
    lose(directory / "epoch_000002" / name)
    save(store, owner, 3)
    assert 1 in owner.reads
    assert contents(make_store(directory)[0].load().state) == owner.values


def test_a_state_that_was_migrated_shares_nothing(saved, monkeypatch):
    """What parts of an older schema hold may mean something else now."""
    _, _, directory = saved

    def migrate(state):
        values = contents(state)
        parts = [StatePart("0", lambda i=i, x=x: {"i": i, "x": -x}) for i, x in enumerate(values)]
        return {**state, "segments": {"first": parts[0], "more": tuple(parts[1:])}}

    monkeypatch.setattr(manifests, "SCHEMA", 2)
    monkeypatch.setattr(manifests, "MIGRATIONS", MappingProxyType({1: migrate}))
    store, _ = make_store(directory)
    store.save(store.load().state, Position(epoch=3, updates=30, env_steps=0))
    state = make_store(directory)[0].load().state
    assert state["segments"]["first"].read() == {"i": 0, "x": -0.0}
    assert state["segments"]["more"][0].read() == {"i": 1, "x": -50.0}


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("change", "save", "save", "within", "load", "named", "new", "copy")),
        st.integers(0, 3),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_any_history(tmp_path_factory, actions):
    """Whatever was shared, each checkpoint holds what its owner held when it was written."""
    directory = tmp_path_factory.mktemp("history")
    store, warnings = make_store(directory, keep_last=3)
    owner, expected, epoch, value = Segments(4), {}, 0, 100
    with pytest.MonkeyPatch.context() as monkeypatch:
        for action, i in actions:
            if action == "change":
                value += 1
                owner.change(i, value)
            elif action in ("save", "within"):
                epoch += action == "save"
                path = save(store, owner, epoch, within_epoch=action == "within")
                expected[path.name] = list(owner.values)
            elif action == "copy":
                monkeypatch.setattr(os, "link", refuse)
            elif store.list():
                if action == "new":
                    store, warnings = make_store(directory, keep_last=3)
                present = [info.path.name for info in store.list()]
                found = store.load(present[i % len(present)] if action == "named" else None)
                owner.load_state_dict(found.state)
                epoch = found.epoch
                assert owner.values == expected[found.path.name]
    for info in store.list():
        found = make_store(directory)[0].load(info.path.name)
        assert contents(found.state) == expected[info.path.name]
    assert warnings == []


# -- damage --------------------------------------------------------------------------------------


@pytest.fixture
def changed_file(saved):
    """The file that only the newest checkpoint has."""
    _, _, directory = saved
    (name,) = what_is_new(directory / "epoch_000002", directory / "epoch_000001")
    return directory / "epoch_000002" / name


def check_damage(path, damage, message):
    """It is told which file, and the checkpoint before is used; then all is whole again."""
    whole = path.read_bytes()
    damage(path, whole)
    store, warnings = make_store(path.parents[1])
    found = store.load()
    assert found.epoch == 1
    assert contents(found.state) == [0.0, 1.0, 2.0]
    (warning,) = warnings
    assert f"checkpoint {path.parent} is damaged and left out: {path.name}: " in warning
    assert message in warning
    path.write_bytes(whole)


def test_any_flipped_byte_is_noticed(changed_file):
    """Each byte of the file, another bit each time."""
    for offset in range(changed_file.stat().st_size):
        check_damage(changed_file, flip(offset, 1 << offset % 8), "sha256 differs")


def test_other_files_in_its_place_are_noticed(changed_file):
    """Cut, longer, missing, that of another place, that of another checkpoint."""
    n = changed_file.stat().st_size
    for length in (0, 1, n // 2, n - 1):
        check_damage(changed_file, lambda p, w, n=length: p.write_bytes(w[:n]), f"expected {n}")
    check_damage(changed_file, lambda p, w: p.write_bytes(w + b"\0"), f"is {n + 1} bytes long")
    check_damage(changed_file, lambda p, _: p.unlink(), "missing")
    earlier = changed_file.parents[1] / "epoch_000001"
    for other in {*changed_file.parent.glob("part_*"), *earlier.glob("part_*")} - {changed_file}:
        assert other.stat().st_size == n
        check_damage(changed_file, lambda p, _, o=other: shutil.copy(o, p), "sha256 differs")


def test_a_file_that_all_share(saved):
    """All checkpoints that have it are damaged: none is taken for whole."""
    _, _, directory = saved
    first, second = (inodes(directory / f"epoch_00000{n}") for n in (1, 2))
    shared = directory / "epoch_000001" / min(first.keys() & second.keys())
    flip(30, 4)(shared, shared.read_bytes())
    store, warnings = make_store(directory)
    with pytest.raises(RunDirectoryError, match=r"no checkpoint that is whole \(2 damaged\)"):
        store.load()
    assert len(warnings) == 2
    assert all(f"{shared.name}: sha256 differs" in warning for warning in warnings)


def test_damage_after_it_was_loaded(changed_file):
    """Files are verified once more when a part is asked for its content."""
    store, _ = make_store(changed_file.parents[1])
    part = store.load().state["segments"]["more"][0]
    whole = changed_file.read_bytes()
    flip(len(whole) - 1, 1)(changed_file, whole)
    pattern = rf"checkpoint .*epoch_000002 is damaged: {changed_file.name}: sha256 differs"
    with pytest.raises(RunDirectoryError, match=pattern):
        part.read()
    changed_file.write_bytes(whole)
    assert part.read()["column"].tolist() == [50.0] * 4
    shutil.rmtree(changed_file.parent)
    with pytest.raises(RunDirectoryError, match=f"{changed_file.name}: missing"):
        part.read()


def craft(directory, files, marker):
    """A checkpoint after epoch 3 with these files, whose state holds one part."""
    text = json.dumps({"format": 1, "state": {"a": marker}}).encode()
    tree = {"tree.json": torch.tensor(list(text), dtype=torch.uint8)}
    files = {**files, STATE: save_tensors(tree)}
    place = Position(epoch=3, updates=30, env_steps=0)
    manifest = manifests.make_manifest({n: digest(data) for n, data in files.items()}, place)
    path = directory / place.name
    path.mkdir()
    for name, data in {**files, MANIFEST: manifest}.items():
        (path / name).write_bytes(data)
    (directory / "latest").write_text(f"{place.name} {digest(manifest).sha256}\n")


def part_name(data):
    """Names follow from contents."""
    return f"part_{digest(data).sha256[:32]}.safetensors"


def test_how_parts_are_stored(saved):
    """What was written once can be read for ever: the marker, and the name of the file."""
    _, _, directory = saved
    data = dumps({"x": 1})
    craft(directory, {part_name(data): data}, marker(part_name(data)))
    found = make_store(directory)[0].load()
    assert (found.epoch, found.state["a"].version, found.state["a"].read()) == (3, "7", {"x": 1})


def marker(file, version="7"):
    """What stands for a part."""
    return {"~": "part", "version": version, "file": file}


GOOD = dumps({"x": 1})
NAME = part_name(GOOD)


@pytest.mark.parametrize(
    ("files", "marker"),
    [
        ({}, marker(NAME)),
        ({NAME: GOOD}, marker("../epoch_000002/" + NAME)),
        ({NAME: GOOD}, marker(STATE)),
        ({NAME: GOOD}, marker(MANIFEST)),
        ({NAME: GOOD, "other.safetensors": GOOD}, marker("other.safetensors")),
        ({NAME: GOOD + b"\0"}, marker(NAME)),
        ({NAME: GOOD}, marker([NAME])),
        ({NAME: GOOD}, marker(None)),
        ({NAME: GOOD}, marker(NAME, version=7)),
        ({NAME: GOOD}, marker(NAME, version=[])),
        ({NAME: GOOD}, {**marker(NAME), "content": {}}),
        ({NAME: GOOD}, {**marker(NAME), "path": []}),
        ({NAME: GOOD}, {"~": "part", "file": NAME}),
        ({NAME: GOOD}, {"~": "part", "version": "7"}),
    ],
    ids=range(14),
)
def test_crafted_parts(saved, files, marker):
    """A part is a file of its checkpoint whose name fits; anything else is damage."""
    _, _, directory = saved
    craft(directory, files, marker)
    store, warnings = make_store(directory)
    assert store.load().epoch == 2
    (warning,) = warnings
    assert f"epoch_000003 is damaged and left out: {STATE} is damaged" in warning


def test_parts_run_no_code(saved, tmp_path):
    """A pickle in a file whose digest fits is damaged when it is read, and not more."""
    _, _, directory = saved
    mark = tmp_path / "mark"

    class Intruder:
        def __reduce__(self):
            return Path.touch, (mark,)

    data = pickle.dumps(Intruder())
    craft(directory, {part_name(data): data}, marker(part_name(data)))
    found = make_store(directory)[0].load()
    with pytest.raises(RunDirectoryError, match=rf"{part_name(data)} is damaged"):
        found.state["a"].read()
    assert not mark.exists()


# -- processes that end in the middle, disks that fail -------------------------------------------


def continued(store, epoch, **more):
    """What a continued run does: load, change a piece, save."""
    owner = Segments(3)
    owner.load_state_dict(store.load().state)
    owner.change(2, 90)
    return save(store, owner, epoch, **more)


def new_epoch(store):
    """The usual case."""
    return continued(store, 3)


def same_place(store):
    """A checkpoint of the same name is there."""
    return continued(store, 2)


def without_links(store):
    """Where files have to be copied."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "link", refuse)
        return continued(store, 3)


def first_save(store):
    """Nothing is known, so that all pieces are written."""
    owner = Segments(3)
    owner.values, owner.versions = [0.0, 50.0, 90.0], [4, 4, 4]
    return save(store, owner, 3)


SCENARIOS = (new_epoch, same_place, without_links, first_save)
OLD, NEW = [0.0, 50.0, 2.0], [0.0, 50.0, 90.0]


@pytest.mark.parametrize("mode", ["before", "after", "dead"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_moment(saved, tmp_path, scenario, mode):
    """The old checkpoint or the new one is there, whole; and the next one can be written."""
    _, _, directory = saved
    shutil.copytree(directory, tmp_path / "backup")
    counted = Faults(-1, Killed())
    attempt(directory, scenario, counted)
    seen = []
    for k in range(counted.calls):
        restored(directory, tmp_path / "backup")
        result, _ = attempt(directory, scenario, Faults(k, Killed(), mode))
        assert isinstance(result, Killed)
        store, _ = make_store(directory)
        found = contents(store.load().state)
        assert found in (OLD, NEW)
        seen.append(found)
        store.clean()
        owner = Segments(3)
        owner.load_state_dict(store.load().state)
        assert owner.values == found
        assert not [name for name in names(directory) if name.startswith(".")]
        owner.change(0, 5)
        path = save(store, owner, 4)
        assert owner.reads == [0]
        assert contents(make_store(directory)[0].load().state) == [5.0, *found[1:]]
        assert len(inodes(path)) == 3
    assert OLD in seen
    assert NEW in seen


def test_what_the_scenarios_do(saved, tmp_path):
    """They make links, and copies where these are refused."""
    _, _, directory = saved
    for scenario, n_links, n_written in ((new_epoch, 2, 1), (without_links, 0, 3)):
        shutil.copytree(directory, tmp_path / scenario.__name__)
        store, _ = make_store(tmp_path / scenario.__name__, keep_last=9)
        path = scenario(store)
        new = what_is_new(path, path.with_name("epoch_000002"))
        assert (len(inodes(path)) - len(new), len(new)) == (n_links, n_written)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_full_disk(saved, tmp_path, scenario):
    """A warning; all is as it was, and the next save shares with what is there."""
    _, _, directory = saved
    shutil.copytree(directory, tmp_path / "backup")
    operations = ("open", "mkdir", "fsync")
    counted = Faults(-1, FULL, names=operations)
    attempt(directory, scenario, counted)
    failed = 0
    for k in range(counted.calls):
        restored(directory, tmp_path / "backup")
        before = names(directory)
        store, warnings = make_store(directory)
        owner = Segments(3)
        owner.load_state_dict(store.load().state)
        with pytest.MonkeyPatch.context() as monkeypatch:
            Faults(k, FULL, names=operations).patch(monkeypatch)
            result = scenario(store)
        if result is None:
            failed += 1
            assert "No space left on device" in warnings[0]
            assert names(directory) == before
            assert contents(make_store(directory)[0].load().state) == OLD
        owner.change(1, 8)
        owner.reads.clear()
        if result is None:
            save(store, owner, 4)
            assert owner.reads == [1]
            assert contents(make_store(directory)[0].load().state) == [0.0, 8.0, 2.0]
    assert failed >= 5


# -- single files --------------------------------------------------------------------------------


def test_single_files_hold_their_parts():
    """The same state as bytes, in which each part is asked once."""
    owner = Segments(3)
    data = dumps(owner.state_dict())
    assert owner.reads == [0, 1, 2]
    state = loads(data)
    other = Segments(3)
    other.load_state_dict(state)
    assert (other.values, other.versions) == (owner.values, owner.versions)
    assert dumps(state) == data


def test_a_checkpoint_as_a_single_file(saved, tmp_path):
    """What is loaded from one can be written as the other."""
    store, owner, directory = saved
    state = loads(dumps(store.load().state))
    assert contents(state) == owner.values
    shutil.rmtree(directory)
    store.save(state, Position(epoch=1, updates=10, env_steps=0))
    assert contents(make_store(directory)[0].load().state) == owner.values


def test_parts_within_parts(tmp_path):
    """The inner ones belong to the file of the outer one."""
    inner = StatePart("2", lambda: {"x": 5})
    store, _ = make_store(tmp_path)
    path = store.save(
        {"a": StatePart("1", lambda: {"inner": inner})}, Position(epoch=1, updates=0, env_steps=0)
    )
    assert len(inodes(path)) == 1
    content = store.load().state["a"].read()["inner"]
    assert (content.version, content.read()) == ("2", {"x": 5})
