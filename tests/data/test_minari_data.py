"""Minari datasets: round trips in both directions."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from warnings import catch_warnings, simplefilter

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from trajectory_cases import (
    CHOICE,
    FLOATS,
    NESTED,
    ODD_SPACES,
    SPACES,
    assert_all_same,
    random_trajectories,
)

from maze_train.core.errors import DatasetError, MissingExtraError, ShapeError, SpaceError
from maze_train.data.datasets import open_dataset
from maze_train.data.minari import load_minari
from maze_train.data.trajectories import DatasetMetadata
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.spaces.describe import flatten_value
from maze_train.tools import minari as minari_data
from maze_train.tools.minari import save_minari

minari = pytest.importorskip("minari", reason="needs the extra minari")
EpisodeBuffer = pytest.importorskip("minari.data_collector").EpisodeBuffer

NAME = "own/folder/test-v3"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """Return an empty Minari folder; network connections raise an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("a connection to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def in_memory(observation_space=FLOATS, action_space=CHOICE, lengths=(2, 1, 4), **about):
    """Return a dataset of random episodes."""
    trajectories = random_trajectories(observation_space, action_space, lengths)
    metadata = DatasetMetadata(observation_space, action_space, **about)
    return TrajectoryDataset.from_trajectories(trajectories, metadata)


def by_minari(buffers, observation_space=FLOATS, action_space=CHOICE, **options):
    """Return a dataset written by Minari."""
    with catch_warnings():
        simplefilter("ignore")  # Minari warns about a missing author and other metadata
        return minari.create_dataset_from_buffers(
            NAME,
            buffers,
            observation_space=observation_space,
            action_space=action_space,
            **options,
        )


def buffer(length=3, **changes):
    """Return an episode as collected by Minari: lists of values."""
    content = {
        "observations": [np.full(3, t, np.float32) for t in range(length + 1)],
        "actions": [np.int64(t % 3) for t in range(length)],
        "rewards": [float(t) for t in range(length)],
        "terminations": [False] * (length - 1) + [True],
        "truncations": [False] * length,
        "infos": {},
    }
    return EpisodeBuffer(**{**content, **changes})


@pytest.mark.parametrize("name", SPACES)
def test_datasets_of_every_space_round_trip(name):
    """Observations and actions of all spaces, including images, are bit-for-bit identical."""
    expected = in_memory(SPACES[name], SPACES[name])
    save_minari(expected, NAME)
    found = load_minari(NAME)
    assert_all_same(found, expected)
    assert found.metadata == expected.metadata


def test_minari_converts_discrete_and_sorts_keys():
    """Minari converts Discrete to int64 and sorts Dict keys; values keep their leaves."""
    small = ODD_SPACES["small_discrete"]
    space = spaces.Dict(OrderedDict([("b", small), ("a", FLOATS)]))
    expected = in_memory(space)
    save_minari(expected, NAME)
    found = load_minari(NAME)
    assert list(found.metadata.observation_space) == ["a", "b"]
    assert found.metadata.observation_space["b"] == spaces.Discrete(3, start=250)
    for ours, theirs in zip(found, expected, strict=True):
        for key, leaf in theirs.obs.items():
            np.testing.assert_array_equal(ours.obs[key], leaf)


@pytest.mark.parametrize("name", ["integer_keys", "odd_keys"])
def test_minari_export_of_unsupported_keys_raises(root, name):
    """The error contains the key, and nothing is written."""
    space = spaces.Tuple((CHOICE, ODD_SPACES[name]))
    with pytest.raises(SpaceError, match=r"the key .* cannot be stored in a Minari dataset"):
        save_minari(in_memory(space), NAME)
    assert not root.exists() or list(root.iterdir()) == []


def test_minari_loads_exported_datasets(root):
    """Minari's loader returns nested arrays, ends and seeds."""
    expected = in_memory(NESTED, NESTED, [3, 2])
    path = save_minari(expected, NAME, author="Ada", description="two episodes")
    assert path == root / NAME
    with pytest.raises(DatasetError, match="already exists"):
        save_minari(in_memory(lengths=[5]), NAME)
    assert minari.list_local_datasets()[NAME]["author"] == ["Ada"]
    found = minari.load_dataset(NAME)
    assert (found.total_episodes, found.total_steps, found.env_spec) == (2, 5, None)
    assert found.observation_space == NESTED
    for number, (ours, theirs) in enumerate(zip(found.iterate_episodes(), expected, strict=True)):
        for tree, flat in ((ours.observations, theirs.obs), (ours.actions, theirs.actions)):
            leaves = flatten_value(NESTED, tree)
            assert list(leaves) == list(flat)
            for key, leaf in leaves.items():
                np.testing.assert_array_equal(leaf, flat[key], strict=True)
        np.testing.assert_array_equal(ours.rewards, theirs.rewards, strict=True)
        ends = [False] * (len(ours) - 1) + [number == 0]
        assert ours.terminations.tolist() == ours.truncations.tolist() == ends
    ends = found.storage.get_episode_metadata([0, 1])
    assert [end["seed"] for end in ends] == expected.seeds == [0, 1]


def test_minari_recovers_registered_environments():
    """A registered id becomes an `env_spec` with its arguments."""
    env = gymnasium.make("CartPole-v1")
    kwargs = {"sutton_barto_reward": True}
    about = {"id": "CartPole-v1", "kwargs": kwargs, "max_episode_steps": 77, "wrappers": []}
    save_minari(in_memory(env.observation_space, env.action_space, env=about), NAME)
    recovered = minari.load_dataset(NAME).recover_environment()
    assert recovered.spec.id == "CartPole-v1"
    assert recovered.unwrapped._sutton_barto_reward is True
    assert recovered.spec.max_episode_steps == 77
    assert gymnasium.registry["CartPole-v1"] == env.spec
    assert load_minari(NAME).metadata.env == about


def test_minari_export_of_custom_environments_has_no_env_spec(monkeypatch):
    """Datasets of unregistered environments or custom wrappers have no `env_spec`."""
    spec = gymnasium.envs.registration.EnvSpec("OwnMinari-v0", entry_point=lambda: None)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    wrapped = {"id": "CartPole-v1", "wrappers": [{"_target_": "my.Wrapper"}]}
    abouts = [{"id": spec.id}, {"id": "Unknown-v0"}, {"id": None, "target": "my.Env"}, wrapped, {}]
    for number, about in enumerate(abouts):
        save_minari(in_memory(env=about), f"test-v{number}")
        assert minari.load_dataset(f"test-v{number}").env_spec is None
        assert load_minari(f"test-v{number}").metadata.env == about


def test_minari_export_keeps_metadata():
    """Arguments take precedence over entries of `policy`; metadata is preserved."""
    policy = {"algorithm_name": "PPO", "author": "Ada", "score": 3.5}
    expected = in_memory(env={"id": "Own-v0", "x": [1, 2]}, policy=policy)
    save_minari(expected, NAME, author="Grace")
    known = minari.load_dataset(NAME).storage.metadata
    assert (known["algorithm_name"], known["author"]) == ("PPO", {"Grace"})
    assert load_minari(NAME).metadata == expected.metadata
    save_minari(in_memory(policy={"algorithm": "sac"}), "recorded-v0")  # as recorded by rollouts
    assert minari.load_dataset("recorded-v0").storage.metadata["algorithm_name"] == "sac"


def test_load_minari_reads_datasets_of_minari():
    """Lists of steps, seeds, the environment specification and authors are read."""
    spec = gymnasium.spec("CartPole-v1")
    by_minari(
        [buffer(3, seed=7), buffer(2, terminations=[False, False], truncations=[False, True])],
        env=spec,
        author={"Grace", "Ada"},
        algorithm_name="by hand",
    )
    found = load_minari(NAME)
    assert found.lengths.tolist() == [3, 2]
    assert found.seeds == [7, None]
    assert [(x.terminated, x.truncated) for x in found] == [(True, False), (False, True)]
    assert found[0].obs.tolist() == [[t] * 3 for t in range(4)]
    assert found[0].actions.dtype == np.int64
    assert found[0].rewards.tolist() == [0.0, 1.0, 2.0]
    assert found.metadata.env["id"] == "CartPole-v1"
    assert found.metadata.env["env_spec"]["max_episode_steps"] == 500
    assert found.metadata.policy == {
        "minari": NAME,
        "algorithm_name": "by hand",
        "author": ["Ada", "Grace"],
    }


def test_load_minari_reads_jpeg_images():
    """Images stored as JPEG keep their shape."""
    space = spaces.Box(0, 255, (40, 32, 3), np.uint8)
    frames = [np.full(space.shape, 20 * t, np.uint8) for t in range(4)]
    by_minari([buffer(observations=frames)], observation_space=space)
    (found,) = load_minari(NAME)
    assert found.obs.shape == (4, 40, 32, 3)
    np.testing.assert_allclose(found.obs, frames, atol=3)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"observations": [np.zeros(3)] * 3}, DatasetError, r"episode 1 is not a .*obs.*\[3, 3\]"),
        ({"observations": [np.zeros(2)] * 4}, ShapeError, r"trajectory 1: obs .*\[4, 2\]"),
        ({"actions": [0, 1, 3]}, SpaceError, "trajectory 1: actions: 3 .*not in Discrete"),
        ({"rewards": [0.0, np.nan, 0.0]}, DatasetError, r"episode 1 is not a .*rewards\[1\] = nan"),
        ({"terminations": [True, False, True]}, DatasetError, "episode 1 continues after"),
    ],
)
def test_load_minari_of_invalid_episodes_raises(changes, error, text):
    """The error contains the dataset, the episode and the array."""
    by_minari([buffer(), buffer(**changes)])
    with pytest.raises(error, match=f"minari:{NAME}: .*{text}"):
        load_minari(NAME)


def test_missing_minari_datasets_raise(root):
    """The error contains the id and a remedy, and nothing is downloaded."""
    with pytest.raises(DatasetError, match=f"minari:{NAME} is not available locally") as told:
        load_minari(NAME)
    assert f"run 'minari download {NAME}'" in str(told.value)
    assert "=True" not in str(told.value)  # arguments of Minari cannot be set here
    for name in ("cartpole", "../../x-v0", "/x-v0", "a//../x-v0", "", "x-v"):
        for use in (load_minari, lambda name: save_minari(in_memory(), name)):
            with pytest.raises(DatasetError, match="is not the name of a Minari dataset"):
                use(name)
    assert not list(root.rglob("metadata.json"))


def test_failed_minari_export_leaves_no_file(root, monkeypatch):
    """Seeds that HDF5 does not support and a full disk raise an error without leaving files."""
    dataset = in_memory()
    (part,) = dataset.parts
    odd = TrajectoryDataset([replace(part, seeds=[1, 2**64, 3])], dataset.metadata)
    with pytest.raises(DatasetError, match=f"seed {2**64} of episode 1"):
        save_minari(odd, NAME)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(minari_data, "_buffers", full)
    with pytest.raises(DatasetError, match=r"could not be written.*No space left"):
        save_minari(dataset, NAME)
    assert [path for path in root.rglob("*test-v3*")] == []


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1:]
from maze_train.tools import minari
from test_minari_data import NAME, in_memory

buffers = minari._buffers

def killed(dataset):
    episodes = buffers(dataset)
    yield next(episodes)
    yield next(episodes)
    os.kill(os.getpid(), signal.SIGKILL)

minari._buffers = killed
minari.save_minari(in_memory(), NAME)
"""


def test_killed_minari_export_creates_no_dataset(root):
    """A killed export does not create the dataset, and the next export removes its files."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
    result = subprocess.run([sys.executable, "-c", KILLED, *folders], timeout=60)
    assert result.returncode == -signal.SIGKILL
    folder = (root / NAME).parent
    assert [path.name.startswith("test-unfinished-") for path in folder.glob("*-v*")] == [True]
    with pytest.raises(DatasetError, match=f"minari:{NAME} is not available locally"):
        load_minari(NAME)
    expected = in_memory()
    save_minari(expected, NAME)
    assert_all_same(load_minari(NAME), expected)
    assert [path.name for path in folder.glob("*-v*")] == ["test-v3"]


def test_damaged_minari_dataset_raises():
    """Damaged metadata, a missing episode and a truncated file raise an error."""
    path = save_minari(in_memory(), NAME) / "data"
    metadata, data = path / "metadata.json", path / "main_data.hdf5"
    whole = metadata.read_text()
    fourth = json.dumps({**json.loads(whole), "total_episodes": 4})
    for text in ("", "{}", '{"data_format": "hdf5"}', '{"data_format": "x"}', fourth):
        metadata.write_text(text)
        with pytest.raises(DatasetError, match=f"minari:{NAME} cannot be read"):
            load_minari(NAME)
    metadata.write_text(whole)
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(DatasetError, match="cannot be read"):
        load_minari(NAME)


@pytest.mark.parametrize("value", [None, "absent"])
@pytest.mark.parametrize("space", ["observation_space", "action_space"])
def test_datasets_without_a_space_create_no_environment(root, space, value):
    """For a missing space, Minari would call the entry point that the file names."""
    save_minari(in_memory(), NAME)
    path = root / NAME / "data/metadata.json"
    content = json.loads(path.read_text())
    content[space] = value
    if value == "absent":
        del content[space]
    marker = root / "marker"
    spec = {"id": "A-v0", "entry_point": "os:system", "kwargs": {"command": f"touch {marker}"}}
    wrappers = {"additional_wrappers": [], "vector_entry_point": None}
    content["env_spec"] = json.dumps({**spec, **wrappers})
    path.write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=f"cannot be read: .*metadata.json has no {space}"):
        load_minari(NAME)
    assert not marker.exists()


def planted_in_hdf5(kind, group, path):
    """Replace the rewards of an episode by data that is not stored in the file."""
    h5py = pytest.importorskip("h5py")
    del group["rewards"]
    if kind == "fill value":
        group.create_dataset("rewards", (1 << 40,), "f8", chunks=(1024,), fillvalue=1.0)
    elif kind == "external file":
        group.create_dataset("rewards", (3,), "f8", external=[(str(path), 0, 24)])
    elif kind == "virtual dataset":
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(path, "secret", (3,))
        group.create_virtual_dataset("rewards", layout)
    else:
        group["rewards"] = h5py.ExternalLink(path, "secret")


@pytest.mark.parametrize(
    "kind", ["fill value", "external file", "virtual dataset", "external link"]
)
def test_hdf5_data_outside_the_file_is_not_read(root, tmp_path, kind):
    """Small files cannot allocate much memory or refer to other files."""
    h5py = pytest.importorskip("h5py")
    save_minari(in_memory(), NAME)
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["secret"] = np.ones(3)
    with h5py.File(root / NAME / "data/main_data.hdf5", "a") as file:
        planted_in_hdf5(kind, file["episode_0"], tmp_path / "other.hdf5")
    with pytest.raises(DatasetError, match=r"cannot be read: .*rewards (is|has|refers)"):
        load_minari(NAME)


def test_missing_minari_raises_missing_extra_error(monkeypatch):
    """The error contains the package, the extra and the purpose, or the required version."""
    for package in ("minari", "h5py"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtraError, match=rf"writing.*'{package}'.*train\[minari\]"):
                save_minari(in_memory(), NAME)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "minari", None)
        with pytest.raises(MissingExtraError, match="reading a Minari dataset"):
            open_dataset(f"minari:{NAME}")
    monkeypatch.setattr(minari, "create_dataset_from_buffers", lambda dataset_id, buffer: None)
    with pytest.raises(MissingExtraError, match=r"'minari>=0\.5\.4'"):
        save_minari(in_memory(), NAME)
