"""Large parts of a state are separate files, shared between checkpoints."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_checkpoints import (
    MANIFEST,
    STATE,
    Segments,
    contents,
    flip,
    inodes,
    make_store,
    names,
    new_files,
    refuse_links,
    save,
    saved,
)

from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import FileDigest
from maze_train.core.state import StatePart
from maze_train.core.state_files import dumps
from maze_train.training import checkpoints as manifests
from maze_train.training.outcome import Position


@pytest.fixture
def stored(tmp_path):
    """A store, the owner of its three parts and the directory; one part changed after epoch 1."""
    return *saved(tmp_path / "checkpoints"), tmp_path / "checkpoints"


# -- writing and reading -------------------------------------------------------------------------


def test_parts_with_equal_content_share_a_file(tmp_path, monkeypatch):
    """Parts with equal content share a file, which is written once."""
    store, _ = make_store(tmp_path)
    written = []
    original = manifests.write_synced

    def write(path, data):
        written.append(path.name)
        original(path, data)

    monkeypatch.setattr(manifests, "write_synced", write)

    def state(**values):
        return {
            key: StatePart(str(value), lambda x=value: {"x": torch.full((3,), x)})
            for key, value in values.items()
        }

    for epoch, a, b, c, new in ((1, 7, 5, 5, 2), (2, 7, 5, 5, 0), (3, 7, 5, 6, 1), (4, 7, 7, 8, 1)):
        path = store.save(state(a=a, b=b, c=c), Position(epoch, 0, 0))
        assert len(inodes(path)) == len({a, b, c})
        assert sum(name.startswith("part_") for name in written) == new
        written.clear()
        if epoch > 1:
            assert len(new_files(path, path.with_name(f"epoch_00000{epoch - 1}"))) == new
        found = make_store(tmp_path)[0].load().state
        assert [found[key].read()["x"].tolist() for key in "abc"] == [[x] * 3 for x in (a, b, c)]


def test_checkpoint_with_too_many_parts_raises(stored, monkeypatch):
    """A checkpoint whose manifest would be too large to read is not written."""
    store, owner, directory = stored
    before = names(directory)
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 500)
    with pytest.raises(ValueError, match="4 files; use fewer, larger parts of the state"):
        save(store, 3, owner)
    assert names(directory) == before


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch.save leaves reference cycles")
@pytest.mark.parametrize("copied", [False, True])
def test_parts_are_in_memory_one_at_a_time(tmp_path, monkeypatch, copied):
    """Only one part at a time is in memory while parts are written, verified, linked or copied."""
    if copied:
        monkeypatch.setattr(os, "link", refuse_links)
    owner, state = Segments(20, size=125_000), None
    for epoch, most in ((1, 5e6), (2, 4e6)):
        store, _ = make_store(tmp_path)
        tracemalloc.start()
        try:
            state = store.load().state if epoch == 2 else owner.state_dict()
            store.save(state, Position(epoch, 0, 0))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < most
    assert contents(store.load().state) == owner.values


# -- which files are shared ----------------------------------------------------------------------


def test_stores_share_no_files_of_unloaded_checkpoints(stored):
    """A store shares no files with checkpoints it did not load, even if versions are equal."""
    _, _, directory = stored
    store, _ = make_store(directory)
    other = Segments(3)
    other.values = [7.0, 8.0, 9.0]
    other.change(1, 80)
    path = save(store, 3, other)
    assert other.reads == [0, 1, 2]
    assert len(new_files(path, directory / "epoch_000002")) == 3
    assert contents(store.load().state) == [7.0, 80.0, 9.0]


def test_part_versions_depend_on_their_position(tmp_path):
    """Versions identify parts by position; a version that returns after another is read again."""
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
        store.save(state, Position(epoch, 0, 0))
        assert read == expected
    state = store.load().state
    assert [state["a"].read(), state["b"][0].read()] == [{"value": 5}, {"value": 6}]


def test_link_reported_as_failed_is_not_overwritten(stored, monkeypatch):
    """If a link is created but reported as failed, its file is not overwritten."""
    store, owner, directory = stored
    link = os.link

    def late(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", late)
    before = inodes(directory / "epoch_000002")
    path = save(store, 3, owner)
    assert owner.reads == []
    assert len(new_files(path, directory / "epoch_000002")) == 3
    assert inodes(directory / "epoch_000002") == before
    assert contents(make_store(directory)[0].load().state) == owner.values


def cut_off(path):
    """Remove the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path):
    """Flip a bit of a file."""
    flip(200, 1)(path, path.read_bytes())


@pytest.mark.parametrize(
    "lose", [Path.unlink, cut_off, lambda path: shutil.rmtree(path.parent), flipped]
)
def test_missing_or_damaged_part_is_written_again(stored, monkeypatch, lose):
    """A missing or damaged earlier file is written again, also if files are copied."""
    store, owner, directory = stored
    if lose is flipped:
        monkeypatch.setattr(os, "link", refuse_links)
    (name,) = new_files(directory / "epoch_000002", directory / "epoch_000001")
    lose(directory / "epoch_000002" / name)
    save(store, 3, owner)
    assert 1 in owner.reads
    assert contents(make_store(directory)[0].load().state) == owner.values


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("change", "save", "save", "within", "load", "named", "new", "copy")),
        st.integers(0, 3),
    ),
    max_size=25,
)


@settings(max_examples=30, deadline=None)
@given(ACTIONS)
def test_any_history_of_saves_and_loads_keeps_states(tmp_path_factory, actions):
    """In any history, each checkpoint has the state of its owner when it was written."""
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
                path = save(store, epoch, owner, within_epoch=action == "within")
                expected[path.name] = list(owner.values)
            elif action == "copy":
                monkeypatch.setattr(os, "link", refuse_links)
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


def test_damaged_shared_part_damages_all_checkpoints(stored):
    """Damage to a shared file damages all checkpoints that have it."""
    _, _, directory = stored
    first, second = (inodes(directory / f"epoch_00000{n}") for n in (1, 2))
    shared = directory / "epoch_000001" / min(first.keys() & second.keys())
    flip(30, 4)(shared, shared.read_bytes())
    store, warnings = make_store(directory)
    with pytest.raises(RunDirectoryError, match=r"no undamaged checkpoint \(2 damaged\)"):
        store.load()
    assert len(warnings) == 2
    assert all(f"{shared.name}: sha256 differs" in warning for warning in warnings)


def test_parts_are_verified_when_read(stored):
    """Files are verified again when a part is read."""
    store, _, directory = stored
    (name,) = new_files(directory / "epoch_000002", directory / "epoch_000001")
    changed_file = directory / "epoch_000002" / name
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
    """Write a checkpoint after epoch 3 with these files and a state with one part."""
    file = io.BytesIO()
    torch.save({"format": 2, "state": {"a": marker}}, file)
    files = {**files, STATE: file.getvalue()}
    place = Position(3, 30, 0)
    manifest = manifests.make_manifest({n: FileDigest.of(data) for n, data in files.items()}, place)
    path = directory / place.name
    path.mkdir()
    for name, data in {**files, MANIFEST: manifest}.items():
        (path / name).write_bytes(data)
    (directory / "latest").write_text(f"{place.name}\n")


def marker(file, version="7"):
    """Return the stored form of a part."""
    return {None: "part", "version": version, "file": file}


GOOD = dumps({"x": 1})
NAME = f"part_{FileDigest.of(GOOD).sha256[:32]}.pt"
"""Part names are derived from the digest of their content."""


@pytest.mark.parametrize(
    ("files", "marker", "is_whole"),
    [
        ({NAME: GOOD}, marker(NAME), True),
        ({}, marker(NAME), False),
        ({NAME: GOOD}, marker("../epoch_000002/" + NAME), False),
        ({NAME: GOOD}, marker(STATE), False),
        ({NAME: GOOD}, marker(MANIFEST), False),
        ({NAME: GOOD, "other.pt": GOOD}, marker("other.pt"), False),
        ({NAME: GOOD + b"\0"}, marker(NAME), False),
        ({NAME: GOOD}, marker([NAME]), False),
        ({NAME: GOOD}, marker(None), False),
        ({NAME: GOOD}, marker(NAME, version=7), False),
    ],
    ids=range(10),
)
def test_crafted_parts_are_damage(stored, files, marker, is_whole):
    """A part must be a file of its checkpoint with a matching name; anything else is damage."""
    _, _, directory = stored
    craft(directory, files, marker)
    store, warnings = make_store(directory)
    found = store.load()
    if is_whole:
        part = found.state["a"]
        assert (found.epoch, part.version, part.read()) == (3, "7", {"x": 1})
        return
    assert found.epoch == 2
    (warning,) = warnings
    assert f"epoch_000003 is damaged and skipped: {STATE} is damaged" in warning


# -- single files --------------------------------------------------------------------------------


def test_nested_parts_are_stored_in_the_outer_file(tmp_path):
    """Inner parts are stored in the file of the outer part."""
    inner = StatePart("2", lambda: {"x": 5})
    store, _ = make_store(tmp_path)
    path = store.save({"a": StatePart("1", lambda: {"inner": inner})}, Position(1, 0, 0))
    assert len(inodes(path)) == 1
    content = store.load().state["a"].read()["inner"]
    assert (content.version, content.read()) == ("2", {"x": 5})
