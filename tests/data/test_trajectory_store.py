"""Trajectory datasets: exact round trips, and detection of damaged files."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import multiprocessing
import os
import shutil
import signal
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from trajectory_cases import (
    CHOICE,
    FLOATS,
    NESTED,
    ODD_SPACES,
    SPACES,
    assert_all_same,
    assert_same,
    random_trajectories,
    random_trajectory,
)

from maze_train.core.errors import ConfigError, DatasetError, ShapeError, SpaceError
from maze_train.core.files import seal
from maze_train.data import trajectories as trajectory_parts
from maze_train.data import trajectory_files
from maze_train.data.datasets import open_dataset
from maze_train.data.trajectories import DatasetMetadata, Trajectory
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.data.trajectory_files import DATASET, TrajectoryWriter
from maze_train.spaces.describe import space_to_dict

METADATA = DatasetMetadata(FLOATS, CHOICE, env={"id": "Own-v0"}, policy={"policy": "random"})
EVERY_SPACE = {**SPACES, **ODD_SPACES}


def write(directory, trajectories, metadata=METADATA, **options):
    """Write a dataset of these episodes; return its directory."""
    with TrajectoryWriter(directory, metadata, **options) as writer:
        for trajectory in trajectories:
            writer.add(trajectory)
    return directory


def episodes(*lengths):
    """Return random episodes of the default spaces."""
    return random_trajectories(FLOATS, CHOICE, lengths)


def names(directory):
    """Return all files of a dataset except the lock."""
    found = (str(path.relative_to(directory)) for path in Path(directory).rglob("*"))
    return sorted(name for name in found if name != ".lock")


def part(directory, number=1):
    """Return the file of a part."""
    return directory / f"part-{number:06d}.safetensors"


def change_json(directory, **changes):
    """Change values in `dataset.json`, and update its digest."""
    path = directory / DATASET
    path.write_bytes(seal({**json.loads(path.read_bytes()), **changes}))


def change_part(directory, data):
    """Replace the second part, with a matching `dataset.json`."""
    part(directory).write_bytes(data)
    parts = json.loads((directory / DATASET).read_bytes())["parts"]
    parts[1] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    change_json(directory, parts=parts)


def changed(directory, changes):
    """Replace arrays or metadata of the second part."""
    data = part(directory).read_bytes()
    about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    texts = {key: value for key, value in changes.items() if isinstance(value, str)}
    arrays = {key: value for key, value in changes.items() if key not in texts}
    return save({**load(data), **arrays}, {**about, **texts})


def flip(path, place=-1):
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture
def dataset(tmp_path):
    """Return the directory of a dataset with three parts of one episode each."""
    return write(tmp_path / "data", episodes(2, 3, 4), part_nbytes=1)


# -- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_SPACE)
def test_datasets_of_every_space_round_trip(tmp_path, monkeypatch, name):
    """Observations, actions and spaces of each kind are bit-for-bit identical after reading."""
    space = EVERY_SPACE[name]
    trajectories = random_trajectories(space, space, [1, 4, 2, 3, 1])
    metadata = replace(METADATA, observation_space=space, action_space=space)
    size = 2 * trajectories[1].nbytes
    write(tmp_path, trajectories, metadata, part_nbytes=size)
    monkeypatch.setattr(trajectory_files, "MAPPED_NBYTES", 0)
    for mapped in (True, False):
        found = TrajectoryDataset.open(tmp_path, mmap=mapped)
        assert_all_same(found, trajectories)
        assert found.metadata == metadata
    assert_all_same(TrajectoryDataset.from_trajectories(trajectories, metadata), trajectories)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), nbytes=st.integers(1, 600))
def test_episodes_are_indexed_across_parts_of_any_size(tmp_path_factory, lengths, nbytes):
    """All episodes are available in order by every index, however they are split into parts."""
    trajectories = episodes(*lengths)
    path = write(tmp_path_factory.mktemp("data"), trajectories, part_nbytes=nbytes)
    found = TrajectoryDataset.open(path)
    np.testing.assert_array_equal(found.lengths, lengths, strict=False)
    assert found.lengths.dtype == np.int64
    np.testing.assert_array_equal(
        found.returns, [x.episode_return for x in trajectories], strict=True
    )
    assert found.seeds == [x.seed for x in trajectories]
    assert found.num_steps == sum(lengths)
    assert found.nbytes == sum(lengths) * (12 + 8 + 8) + len(lengths) * 12
    assert sum(part.num_episodes for part in found.parts) == len(found) == len(lengths)
    for number, trajectory in enumerate(trajectories):
        assert_same(found[number], trajectory)
        assert_same(found[number - len(lengths)], trajectory)
    for rows in (slice(1, 5), slice(None, None, -2), slice(-3, None)):
        assert_all_same(found[rows], trajectories[rows])
    for number in (len(lengths), -len(lengths) - 1):
        with pytest.raises(IndexError):
            found[number]


def owner_of(array):
    """Return the base of an array view."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array


def test_mmap_datasets_return_read_only_views(dataset, monkeypatch):
    """Arrays are read-only views of memory-mapped files; without mmap they are in memory."""
    with monkeypatch.context() as patch:
        patch.setattr(trajectory_files, "MAPPED_NBYTES", part(dataset).stat().st_size)
        mapped = TrajectoryDataset.open(dataset)[1].obs
    assert not mapped.flags.writeable
    assert isinstance(owner_of(mapped), mmap.mmap)
    small = TrajectoryDataset.open(dataset)
    assert not isinstance(owner_of(small[1].obs), mmap.mmap)  # the file is not open
    found = TrajectoryDataset.open(dataset, mmap=False)
    shutil.rmtree(dataset)
    assert_same(small[2], episodes(2, 3, 4)[2])
    assert not small[2].obs.flags.writeable
    assert found[2].obs.flags.writeable
    assert np.shares_memory(found[1].obs, found.parts[1].obs)
    assert_same(found[2], episodes(2, 3, 4)[2])


def test_writer_copies_and_converts_episodes_without_loss(tmp_path):
    """Integers and rewards are converted without loss; floats are rounded."""
    given = Trajectory(
        obs=np.full((3, 3), 0.1),
        actions=np.array([1, 2], np.uint8),
        rewards=np.array([1, 0], np.int32),
        terminated=np.bool_(True),
        truncated=False,
        seed=np.int64(4),
    )
    (same,) = episodes(3)
    with TrajectoryWriter(tmp_path, METADATA) as writer:
        for trajectory in (given, same):
            writer.add(trajectory)
            for array in (trajectory.obs, trajectory.actions, trajectory.rewards):
                array[:] = 2  # environments reuse their arrays
    found, other = TrajectoryDataset.open(tmp_path)
    np.testing.assert_array_equal(found.obs, np.full((3, 3), 0.1, np.float32), strict=True)
    np.testing.assert_array_equal(found.actions, np.array([1, 2]), strict=True)
    np.testing.assert_array_equal(found.rewards, np.array([1.0, 0.0]), strict=True)
    assert (found.terminated, found.truncated, found.seed) == (True, False, 4)
    assert_same(other, *episodes(3))


DOUBLE = SPACES["float64"]
COUNTS = spaces.Box(-9, 9, (1,), np.int64)
LEVEL = spaces.Dict({"level": spaces.Box(0, 255, (1,), np.uint8)})


@pytest.mark.parametrize(
    ("space", "changes", "error", "text"),
    [
        (FLOATS, {"obs": np.zeros((3, 2), np.float32)}, ShapeError, r"obs has the shape \[3, 2\]"),
        (FLOATS, {"obs": {"a": np.zeros((3, 3))}}, ShapeError, "obs/a.*expected"),
        (LEVEL, {"obs": np.zeros((3, 1), np.uint8)}, ShapeError, "obs/level"),
        (FLOATS, {"obs": np.zeros((3, 3), np.complex64)}, SpaceError, "complex64.*float32"),
        (FLOATS, {"obs": np.zeros((3, 3), object)}, SpaceError, "object.*float32"),
        (FLOATS, {"obs": np.full((3, 3), 1e300)}, SpaceError, r"obs\[0\].*1.e\+300.*float32"),
        (FLOATS, {"obs": np.full((3, 3), 2**24 + 1)}, SpaceError, r"16777217.*float32"),
        (DOUBLE, {"obs": np.full((3, 2, 2), 2**53 + 1)}, SpaceError, "9007199254740993.*float64"),
        (LEVEL, {"obs": {"level": np.zeros((3, 1))}}, SpaceError, "obs/level.*float64.*uint8"),
        (LEVEL, {"obs": {"level": np.full((3, 1), 256)}}, SpaceError, "256.*uint8"),
        (LEVEL, {"obs": {"level": np.full((3, 1), -1)}}, SpaceError, "-1.*uint8"),
        (COUNTS, {"obs": np.full((3, 1), 2**64 - 1, np.uint64)}, SpaceError, "18446.*int64"),
        (FLOATS, {"actions": np.array([0, 3])}, SpaceError, "actions: 3.* not in Discrete"),
        (FLOATS, {"actions": np.array([0.0, 1.0])}, SpaceError, "actions of dtype float64"),
        (FLOATS, {"actions": np.zeros((2, 1), int)}, ShapeError, r"actions has the shape \[2, 1\]"),
        (FLOATS, {"rewards": np.array(["a", "b"])}, SpaceError, "rewards has dtype <U1"),
        (spaces.Discrete(4, start=1), {"obs": np.full(3, 7)}, SpaceError, "is not in"),
        (spaces.MultiDiscrete([3, 4]), {"obs": np.full((3, 2), 3)}, SpaceError, "is not in"),
        (spaces.MultiBinary(2), {"obs": np.full((3, 2), 2, np.int8)}, SpaceError, "is not in"),
    ],
)
def test_writer_raises_for_invalid_episodes_and_continues(tmp_path, space, changes, error, text):
    """The error names the array; episodes before and after are kept."""
    metadata = replace(METADATA, observation_space=space)
    good = random_trajectory(space, CHOICE, 2)
    with TrajectoryWriter(tmp_path, metadata) as writer:
        writer.add(good)
        with pytest.raises(error, match=f"(?s)^trajectory 1.*{text}"):
            writer.add(replace(good, **changes))
        writer.add(good)
        assert (writer.num_episodes, writer.num_steps) == (2, 4)
    assert TrajectoryDataset.open(tmp_path).lengths.tolist() == [2, 2]


def test_unsupported_spaces_and_metadata_raise(tmp_path):
    """The error names a Text leaf, before anything is written."""
    with pytest.raises(SpaceError, match="'word' is Text"):
        DatasetMetadata(spaces.Dict({"word": spaces.Text(3)}), CHOICE)
    metadata = DatasetMetadata(spaces.Dict({(1, 2): CHOICE}), CHOICE)
    with pytest.raises(SpaceError, match=r"the key \(1, 2\)"):
        TrajectoryWriter(tmp_path / "data", metadata)
    for env in ({"f": print}, {"a": {1, 2}}, {1: 2}):
        with pytest.raises(DatasetError, match=r"env = .* expected"):
            TrajectoryWriter(tmp_path / "data", replace(METADATA, env=env))
    assert not (tmp_path / "data").exists()


# -- writers -----------------------------------------------------------------------------------


def test_writer_appends_parts_with_their_origin(tmp_path):
    """Each part records the environment and policy of its writer."""
    trajectories = episodes(2, 3, 4, 2)
    about = {"id": "Own-v0", "kwargs": {"size": 3, "at": (1, 2), "x": float("nan")}}
    first = replace(METADATA, env=about)
    write(tmp_path, trajectories[:1], first)
    created = json.loads((tmp_path / DATASET).read_text())["created"]
    write(tmp_path, trajectories[1:3], first)
    write(tmp_path, [], METADATA)
    other = {"policy": "ppo", "epoch": 3}
    write(tmp_path, trajectories[3:], replace(first, env={**about, "id": "New-v0"}, policy=other))
    found = TrajectoryDataset.open(tmp_path)
    assert_all_same(found, trajectories)
    assert [part.num_episodes for part in found.parts] == [1, 2, 1]
    assert [part.env["id"] for part in found.parts] == ["Own-v0", "Own-v0", "New-v0"]
    assert [part.policy for part in found.parts] == [{"policy": "random"}] * 2 + [other]
    assert found.metadata.env["kwargs"]["at"] == [1, 2]
    assert json.loads((tmp_path / DATASET).read_text())["created"] == created
    (in_memory,) = TrajectoryDataset.from_trajectories(episodes(2), METADATA).parts
    assert (in_memory.env, in_memory.policy) == (METADATA.env, METADATA.policy)


def test_writer_appends_to_a_dataset_with_infinite_numbers(dataset):
    """Version 0.3 wrote infinite bounds as numbers."""
    old = {"type": "Box", "low": -math.inf, "high": math.inf, "shape": [3], "dtype": "float32"}
    change_json(dataset, observation_space=old)
    assert "1e999" in (dataset / DATASET).read_text()
    write(dataset, episodes(2))
    assert len(TrajectoryDataset.open(dataset)) == 4


def test_writer_raises_for_other_spaces(dataset):
    """Different bounds are an error as well; the message shows both spaces."""
    before = names(dataset)
    for space in (spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-9, 9, (3,), np.float64)):
        with pytest.raises(DatasetError, match=r"observation_space Box\(-inf.*have Box\(-") as told:
            TrajectoryWriter(dataset, replace(METADATA, observation_space=space))
        assert str(dataset) in str(told.value)
    with pytest.raises(DatasetError, match=r"action_space Discrete\(3\).*Discrete\(3, start=1\)"):
        TrajectoryWriter(dataset, replace(METADATA, action_space=spaces.Discrete(3, start=1)))
    assert names(dataset) == before


def test_writer_does_not_touch_other_directories(tmp_path):
    """Unrelated files are not changed, nor a file in place of the directory."""
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(DatasetError, match=r"contains \['thesis.txt'\] but no dataset.json"):
        TrajectoryWriter(tmp_path, METADATA)
    with pytest.raises(DatasetError, match="cannot be written"):
        TrajectoryWriter(tmp_path / "thesis.txt", METADATA)
    assert names(tmp_path) == ["thesis.txt"]
    for name in ("part_nbytes", "part_seconds"):
        with pytest.raises(ConfigError, match=name):
            TrajectoryWriter(tmp_path / "new", METADATA, **{name: 0})


def add_and_raise(writer, error):
    """Add an episode in a block that an exception ends."""
    with writer:
        writer.add(episodes(2)[0])
        raise error


def test_closed_writer_keeps_added_episodes(tmp_path):
    """Added episodes are on disk however the writer ends; a closed writer accepts no episodes."""
    for error in (ValueError, KeyboardInterrupt):
        writer = TrajectoryWriter(tmp_path, METADATA)
        with pytest.raises(error):
            add_and_raise(writer, error)
        writer.close()
        with pytest.raises(DatasetError, match="closed"):
            writer.add(episodes(2)[0])
    assert names(tmp_path) == [DATASET, part(Path(), 0).name, part(Path(), 1).name]
    assert len(TrajectoryDataset.open(tmp_path)) == 2


def test_second_writer_of_a_dataset_raises(dataset):
    """A second writer is an error until the first is closed; readers are allowed."""
    first = TrajectoryWriter(dataset, METADATA)
    with pytest.raises(DatasetError, match=rf"pid {os.getpid()} .*writes to .*wait until it ends"):
        TrajectoryWriter(dataset, METADATA)
    assert len(TrajectoryDataset.open(dataset)) == 3
    first.close()
    write(dataset, episodes(5))
    for _ in range(2):  # a rejected writer leaves no lock
        with pytest.raises(DatasetError, match="observation_space"):
            TrajectoryWriter(dataset, replace(METADATA, observation_space=NESTED))
    assert TrajectoryDataset.open(dataset).lengths.tolist() == [2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_killed_writer_leaves_complete_parts(tmp_path):
    """A part missing in `dataset.json` does not exist; earlier parts are complete."""

    def write_and_die():
        writer = TrajectoryWriter(tmp_path / "data", METADATA, part_nbytes=1)
        writer.add(episodes(2)[0])
        trajectory_files.write_content = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        writer.add(episodes(3)[0])

    killed = multiprocessing.get_context("fork").Process(target=write_and_die)
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    assert part(tmp_path / "data").exists()
    assert TrajectoryDataset.open(tmp_path / "data").lengths.tolist() == [2]
    (tmp_path / "data" / f".{DATASET}.{killed.pid}.tmp").write_bytes(b"half")
    write(tmp_path / "data", episodes(4))
    assert names(tmp_path / "data") == [DATASET, part(Path(), 0).name, part(Path(), 1).name]
    assert TrajectoryDataset.open(tmp_path / "data").lengths.tolist() == [2, 4]


def test_writer_writes_episodes_after_a_full_disk(tmp_path, monkeypatch):
    """A part that cannot be written leaves no file; its episodes are written later."""

    def full(*args):
        raise OSError(28, "No space left on device")

    writer = TrajectoryWriter(tmp_path, METADATA, part_nbytes=1)
    with monkeypatch.context() as patch:
        patch.setattr(trajectory_files, "save", full)
        with pytest.raises(DatasetError, match=r"No space left.*1 episodes are still in memory"):
            writer.add(episodes(2)[0])
    assert names(tmp_path) == [DATASET]
    writer.add(episodes(3)[0])
    assert TrajectoryDataset.open(tmp_path).lengths.tolist() == [2, 3]


def test_interrupted_writer_does_not_duplicate_a_part(tmp_path, monkeypatch):
    """The part is not duplicated."""
    write_content = trajectory_files.write_content

    def interrupted(*args):
        write_content(*args)
        raise ArithmeticError  # as an interrupt by a signal

    writer = TrajectoryWriter(tmp_path, METADATA)
    writer.add(episodes(2)[0])
    with monkeypatch.context() as patch:
        patch.setattr(trajectory_files, "write_content", interrupted)
        with pytest.raises(ArithmeticError):
            writer.flush()
    assert len(TrajectoryDataset.open(tmp_path)) == 1
    writer.add(episodes(3)[0])
    writer.close()
    assert TrajectoryDataset.open(tmp_path).lengths.tolist() == [2, 3]


# -- damage ------------------------------------------------------------------------------------


def put_pipe(path):
    """Replace a file by a pipe."""
    path.unlink()
    os.mkfifo(path)


ENDLESS = (10**15).to_bytes(8, "little") + b"{}"


def headed(dtype, shape=(1,)):
    """Return a part whose header has an array with a dtype and a shape."""
    array = {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}
    header = json.dumps({"__metadata__": {}, "lengths": array}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


DAMAGE = [
    (flip, "damaged: the sha256"),
    (lambda path: os.truncate(path, 130), "is 130 bytes long, expected"),
    (os.unlink, "cannot be read: .*No such file"),
    (put_pipe, "cannot be read: .*not a regular file"),
    (lambda path: os.truncate(path, 1 << 40), "cannot be read: .*sparse file"),
    (b"", "not a valid part"),
    (b"a text" * 9, "not a valid part"),
    (ENDLESS, "not a valid part"),
    (save({"lengths": np.ones(1)}), "not a valid part"),
    *((headed(dtype), "not a valid part") for dtype in ("", "F", "F99999999999", None, [])),
    (headed("F64", (1 << 40, 1 << 40)), "not a valid part"),
    (save({}, {"seeds": "[]"}), "not a valid part"),
    ({"seeds": '["x"]'}, "not a valid part"),
    ({"seeds": "[-1]"}, "seeds: expected integers >= 0"),
    ({"policy": '"ppo"'}, "expected mappings"),
    ({"lengths": np.array([2])}, r"obs has the shape \[4, 3\], expected \[3, 3\]"),
    ({"lengths": np.array([0])}, "one length >= 1"),
    ({"lengths": np.array([[3]])}, "one length >= 1"),
    ({"truncated": np.ones(2, bool)}, "two flags"),
    ({"obs/a": np.ones(1)}, "has the arrays"),
    ({"obs": np.zeros((4, 3))}, "float64, expected float32"),
    ({"obs": np.zeros((5, 3), np.float32)}, r"obs has the shape \[5, 3\]"),
    ({"obs": np.full((4, 3), np.nan, np.float32)}, r"obs\[0\] = .*finite values"),
    ({"actions": np.array([0, 1, 7])}, "7 .*not in Discrete"),
]
CONTENTS = ("damaged", r"obs\[0\] =", "7 .*")


@pytest.mark.parametrize(("damage", "text"), DAMAGE)
def test_damaged_part_raises_or_is_skipped(dataset, capsys, damage, text):
    """The error names the file; the part can be skipped; without verification it is not read."""
    if callable(damage):
        damage(part(dataset))
    else:
        change_part(dataset, damage if isinstance(damage, bytes) else changed(dataset, damage))
    for verify in (True, False):
        if not verify and text.startswith(CONTENTS):
            assert len(TrajectoryDataset.open(dataset, verify=False)) == 3
            continue
        with pytest.raises(DatasetError, match=f"(?s){text}") as told:
            TrajectoryDataset.open(dataset, verify=verify)
        assert str(part(dataset)) in str(told.value)
        assert "; use on_damaged=skip to skip damaged parts" in str(told.value)
    found = TrajectoryDataset.open(dataset, on_damaged="skip")
    assert_all_same(found, episodes(2, 3, 4)[::2])
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {part(dataset)}")
    assert warning.endswith(f"{part(dataset).name} is skipped\n")
    assert warning.count("\n") == 1


HUGE = (
    {"type": "Discrete", "n": 2**70, "start": 0, "dtype": "int64"},
    {"type": "Box", "low": 0, "high": 1, "shape": [10**13], "dtype": "float32"},
)
"""Spaces that exceed the memory of any machine."""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shutil.rmtree, "is not a directory"),
        (lambda path: (path / DATASET).unlink(), "is not a dataset .* dataset.json .* is missing"),
        (lambda path: flip(path / DATASET, 60), "dataset.json"),
        (lambda path: (path / DATASET).write_text("[1]"), "sha256 mismatch"),
        (lambda path: (path / DATASET).write_bytes(b"\xff"), "not JSON"),
        ({"schema": "other"}, "schema 'other'"),
        ({"version": 0}, "version 0, expected"),
        ({"env": 3}, "expected mappings"),
        ({"parts": 3}, "not a valid dataset"),
        ({"parts": []}, "there are no episodes"),
        ({"action_space": {}}, "not a valid dataset"),
        ({"action_space": HUGE[0]}, "not a valid dataset"),
        ({"observation_space": HUGE[1]}, "not a valid dataset"),
    ],
)
def test_directories_without_a_dataset_raise(dataset, change, text):
    """The error names a directory that is not a dataset of this version, and what is expected."""
    if callable(change):
        change(dataset)
    else:
        change_json(dataset, **change)
    for on_damaged in ("raise", "skip"):
        with pytest.raises(DatasetError, match=text) as told:
            TrajectoryDataset.open(dataset, on_damaged=on_damaged)
        assert str(dataset) in str(told.value)


def test_error_suggests_a_dataset_nearby(tmp_path):
    """The error suggests a dataset directly above or below the given directory."""
    data = write(tmp_path / "out" / "trajectories", episodes(2))
    for place in (data.parent, part(data, 0), data / DATASET, data / "new"):
        with pytest.raises(DatasetError) as told:
            TrajectoryDataset.open(place)
        assert str(told.value).endswith(f"; did you mean {data}?")
    with pytest.raises(DatasetError, match=r"contains \['trajectories'\].*did you mean"):
        TrajectoryWriter(data.parent, METADATA)
    with pytest.raises(DatasetError, match=r"of a TrajectoryWriter is missing$"):
        TrajectoryDataset.open(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'skip'"):
        TrajectoryDataset.open(data, on_damaged="skipp")


# -- datasets in memory, and sources -----------------------------------------------------------


def test_writer_releases_episodes_of_a_generator(monkeypatch):
    """Episodes of a generator are released, and the buffer of the current part is small."""
    monkeypatch.setattr(trajectory_parts, "PART_NBYTES", 2**20)
    space = spaces.Box(0, 255, (1000,), np.uint8)

    def one(seed):
        zeros = np.zeros((101, 1000), np.uint8)
        return Trajectory(zeros + seed, np.zeros(100, np.int64), np.zeros(100), True, False, seed)

    tracemalloc.start()
    try:
        found = TrajectoryDataset.from_trajectories(
            (one(seed) for seed in range(100)), replace(METADATA, observation_space=space)
        )
        assert tracemalloc.get_traced_memory()[1] < found.nbytes + 4 * 2**20
    finally:
        tracemalloc.stop()
    assert len(found.parts) == 10
    assert found.seeds == list(range(100))
    assert [int(trajectory.obs[3, 4]) for trajectory in found] == list(range(100))


def test_parts_of_other_spaces_raise(dataset):
    """User-defined parts are checked against the spaces; at least one is required."""
    with pytest.raises(DatasetError, match="nothing contains no episodes"):
        TrajectoryDataset.from_trajectories([], METADATA, "nothing")
    with pytest.raises(DatasetError, match="has no episodes"):
        TrajectoryDataset([], METADATA)
    parts = TrajectoryDataset.open(dataset).parts
    assert len(TrajectoryDataset([*parts, *parts], METADATA)) == 6
    for space, text in ((NESTED, "has the arrays"), (SPACES["float64"], r"expected \[3, 2, 2\]")):
        with pytest.raises(DatasetError, match=text):
            TrajectoryDataset(parts, replace(METADATA, observation_space=space))


def make_dataset():
    """Return a user-defined dataset."""
    return TrajectoryDataset.from_trajectories(episodes(2, 3), METADATA)


def make_something(value):
    """Return the given value from a user-defined function."""
    return value


def failing_trajectories():
    """Yield one episode, then raise an error."""
    yield from episodes(2)
    raise OSError("the tape tore")


def target(name, **arguments):
    """Return a configuration node that names a function of this file."""
    return {"_target_": f"{__name__}.{name}", **arguments}


BOTH = {"observation_space": FLOATS, "action_space": CHOICE}


def test_open_dataset_accepts_directories_and_functions(dataset):
    """A source is a directory, or a function that returns a dataset, or episodes and spaces."""
    assert len(open_dataset(str(dataset))) == len(open_dataset(dataset, mmap=False)) == 3
    flip(part(dataset, 0))
    assert len(open_dataset(dataset, verify=False)) == 3
    assert len(open_dataset(dataset, on_damaged="skip")) == 2
    assert open_dataset(target("make_dataset")).lengths.tolist() == [2, 3]
    found = open_dataset(target("make_something", value=episodes(2, 3)), **BOTH)
    assert_all_same(found, episodes(2, 3))
    assert found.metadata.policy == {"source": f"{__name__}.make_something"}
    assert found.parts[0].name == f"{__name__}.make_something"


@pytest.mark.parametrize(
    ("source", "spaces", "text"),
    [
        *((value, BOTH, r"is not a dataset.*_target_") for value in ("", None, 3, {"x": "y"})),
        *(
            (target("make_something", value=value), BOTH, f"returned {type(value).__name__}")
            for value in (None, 3, "data", {"a": 1})
        ),
        (target("failing_trajectories"), {}, r"spaces are unknown.*from_trajectories"),
        (target("failing_trajectories"), {"observation_space": FLOATS}, "spaces are unknown"),
        (target("failing_trajectories"), BOTH, "_trajectories failed: OSError: the tape tore"),
        (target("make_something", value=[]), BOTH, "contains no episodes"),
        (target("make_something", value=[*episodes(2), 7]), BOTH, "item 1 is a int"),
    ],
)
def test_invalid_dataset_sources_raise(source, spaces, text):
    """The error names the function, its result, and what is expected."""
    with pytest.raises(DatasetError, match=text):
        open_dataset(source, **spaces)


def test_reading_invalid_discrete_observations_raises(tmp_path):
    """Values that a network would misinterpret are errors when they are read."""
    episode = Trajectory(np.full(2, 7), np.zeros(1, np.int64), np.ones(1), True, False)
    write(tmp_path, [episode], DatasetMetadata(spaces.Discrete(9), CHOICE))
    change_json(tmp_path, observation_space=space_to_dict(spaces.Discrete(4, start=1)))
    with pytest.raises(DatasetError, match=r"obs.* is not in .* its space of obs"):
        TrajectoryDataset.open(tmp_path)
