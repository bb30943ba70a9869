"""Read and write Minari datasets through Minari's public interface.

Minari stores datasets in the directory given by the environment variable `MINARI_DATASETS_PATH`
(default: `~/.minari/datasets`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from maze_train.core.errors import DatasetError, MissingExtraError, ShapeError, SpaceError
from maze_train.core.files import process_runs
from maze_train.core.targets import import_extra
from maze_train.core.types import tree_map
from maze_train.data.trajectories import DatasetMetadata, Trajectory
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.spaces.describe import FlatView, flatten_value, unflatten_value

DATASET_ID = re.compile(r"(?:[-_\w][-_\w/]*[-_\w]/)?[-_\w]+-v[0-9]+")
DETAILS = ("algorithm_name", "author", "author_email", "code_permalink", "description")
OWN = "maze_train"
"""Key of the Minari metadata under which this package stores its own metadata."""

UNFINISHED = "-unfinished-"
"""Part of the name of a dataset while it is written; the process ID follows."""

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, AssertionError, OSError)
"""Exceptions that Minari and h5py raise for damaged data or data of another version."""


def load_minari(dataset_id: str) -> TrajectoryDataset:
    """Read a local Minari dataset into memory.

    If the dataset does not fit into memory, write `minari_episodes` with a `TrajectoryWriter` once
    and open the result with `mmap`; see docs/trajectories.md.

    Nested observations and actions are flattened, and seeds are kept. `metadata.env` contains the
    `id` and `env_spec` of the environment if Minari recorded them; `metadata.policy` contains the
    recorded algorithm and author.

    Args:
        dataset_id: Such as `D4RL/door/human-v2`.

    Raises:
        DatasetError: If the dataset does not exist, cannot be read, is empty, or contains an
            episode that is not a valid `Trajectory`.
        SpaceError: If a space has an unsupported leaf (Text, Graph, ...).
        ShapeError: If observations or actions do not have the shape of their space.
        MissingExtraError: If Minari or h5py is not installed.
    """
    metadata, episodes = minari_episodes(dataset_id)
    return TrajectoryDataset.from_trajectories(episodes, metadata, f"minari:{dataset_id}")


def minari_episodes(dataset_id: str) -> tuple[DatasetMetadata, Iterator[Trajectory]]:
    """Read a local Minari dataset, episode by episode.

    Args:
        dataset_id: Such as `D4RL/door/human-v2`.

    Returns:
        Metadata (spaces, environment and policy), and an iterator that reads one episode at a time.

    Raises:
        DatasetError: See `load_minari`; also raised during iteration.
        SpaceError: If a space has an unsupported leaf.
        ShapeError: If observations or actions do not have the shape of their space.
        MissingExtraError: If Minari or a library that it reads with is not installed.
    """
    minari = import_extra("minari", "minari", "reading a Minari dataset")
    _check_id(dataset_id)
    name = f"minari:{dataset_id}"
    try:
        source = minari.load_dataset(dataset_id, download=False)
        known = source.storage.metadata
        ends = list(source.storage.get_episode_metadata(source.episode_indices))
    except FileNotFoundError as error:
        raise DatasetError(
            f"{name} is not on this machine: list the local datasets with 'minari list local', or "
            f"run 'minari download {dataset_id}'"
        ) from error
    except (ImportError, *UNREADABLE) as error:
        if isinstance(error, ImportError):
            import_extra("h5py", "minari", f"reading {name}")
        raise DatasetError(f"{name} cannot be read: {error!r}") from error
    views = FlatView(source.observation_space), FlatView(source.action_space)
    metadata = DatasetMetadata(
        source.observation_space, source.action_space, *_origin(dataset_id, known)
    )
    seeds = [None if end.get("seed") is None else int(end["seed"]) for end in ends]
    return metadata, _episodes(name, source, views, seeds)


def _origin(dataset_id: str, known: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recorded settings of environment and policy."""
    own = known.get(OWN)
    if isinstance(own, dict) and all(isinstance(own.get(key), dict) for key in ("env", "policy")):
        return own["env"], own["policy"]
    env: dict[str, Any] = {}
    if known.get("env_spec") is not None:
        spec = json.loads(known["env_spec"])
        env = {"id": spec.get("id"), "env_spec": spec}
    policy: dict[str, Any] = {"minari": dataset_id}
    for key in DETAILS:
        if (value := known.get(key)) is not None:
            policy[key] = sorted(value) if isinstance(value, set) else value
    return env, policy


def _episodes(
    name: str, source: Any, views: tuple[FlatView, FlatView], seeds: list[int | None]
) -> Iterator[Trajectory]:
    """Yield the episodes of a dataset."""
    episodes = iter(source.iterate_episodes())
    for seed in seeds:
        try:
            episode = next(episodes)
        except (*UNREADABLE, StopIteration) as error:
            raise DatasetError(f"{name} cannot be read: {error!r}") from error
        label = f"{name}: episode {episode.id}"
        flags = [np.asarray(x, bool) for x in (episode.terminations, episode.truncations)]
        if any(flag[:-1].any() for flag in flags):
            raise DatasetError(
                f"{label} continues after a step that terminated or truncated it: split it into "
                f"episodes with Minari first"
            )
        try:
            yield Trajectory(
                obs=tree_map(np.asarray, flatten_value(views[0], episode.observations)),
                actions=tree_map(np.asarray, flatten_value(views[1], episode.actions)),
                rewards=np.asarray(episode.rewards),
                terminated=bool(flags[0][-1:].any()),
                truncated=bool(flags[1][-1:].any()),
                seed=seed,
            )
        except (ShapeError, SpaceError, ValueError) as error:
            raise DatasetError(f"{label} is not a valid trajectory: {error}") from error


def save_minari(
    dataset: TrajectoryDataset,
    dataset_id: str,
    *,
    algorithm_name: str | None = None,
    author: str | None = None,
    author_email: str | None = None,
    code_permalink: str | None = None,
    description: str | None = None,
) -> Path:
    """Write a Minari dataset (HDF5, lossless images).

    The dataset is written under a temporary name next to its own and renamed once it is complete.
    If writing fails, nothing is left. If the process is killed, the unfinished dataset
    `<name>-unfinished-<pid>-v0` is left; the next call for the same name removes it.

    Args:
        dataset: The episodes.
        dataset_id: `<name>-v<number>`, optionally prefixed by folders (`folder/<name>-v<number>`).
        algorithm_name: Algorithm that trained the policy.
        author: Author of the dataset.
        author_email: Email address of the author.
        code_permalink: URL of the code.
        description: Short description. Each of these five texts defaults to the entry of
            `metadata.policy` with the same key.

    Returns: Directory of the new dataset.

    Raises:
        DatasetError: If the name is malformed or already in use, or the dataset cannot be written.
        SpaceError: If HDF5 cannot store a key of a Dict space.
        MissingExtraError: If Minari (0.5.4 or newer) or h5py is not installed.
    """
    purpose = "writing a Minari dataset"
    minari = import_extra("minari", "minari", purpose)
    import_extra("h5py", "minari", purpose)
    create = minari.create_dataset_from_buffers
    if "jpeg_encoding" not in inspect.signature(create).parameters:  # older: lossy images
        raise MissingExtraError("minari>=0.5.4", "minari", purpose)
    _check_id(dataset_id)
    metadata = dataset.metadata
    for space in (metadata.observation_space, metadata.action_space):
        _check_keys(space)
    for number, seed in enumerate(dataset.seeds):
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise DatasetError(f"seed {seed} of episode {number}: HDF5 stores at most 64 bits")
    given = (algorithm_name, author, author_email, code_permalink, description)
    texts = {
        key: value if value is not None else metadata.policy.get(key)
        for key, value in zip(DETAILS, given, strict=True)
    }
    stem, path = dataset_id.rpartition("-v")[0], None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Minari warns about missing metadata
            storage = create(
                f"{stem}{UNFINISHED}{os.getpid()}-v0",
                [],
                observation_space=metadata.observation_space,
                action_space=metadata.action_space,
                data_format="hdf5",
                jpeg_encoding=False,
                **{key: text for key, text in texts.items() if isinstance(text, str)},
            ).storage
        path = Path(storage.data_path).parent
        target = path.with_name(Path(dataset_id).name)
        if target.exists():
            raise FileExistsError(f"{target} already exists")
        _remove_unfinished(path.parent, Path(stem).name)
        spec = _env_spec(metadata.env)
        own = {OWN: {"env": metadata.env, "policy": metadata.policy}}
        storage.update_metadata(own if spec is None else {**own, "env_spec": spec.to_json()})
        storage.update_episodes(_buffers(dataset))
        file = Path(storage.data_path, "metadata.json")
        content = {**json.loads(file.read_text()), "dataset_id": dataset_id}
        file.write_text(json.dumps(content))
        path.rename(target)
    except BaseException as error:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, UNREADABLE):
            raise DatasetError(f"minari:{dataset_id} could not be written: {error}") from error
        raise
    return target


def _remove_unfinished(directory: Path, name: str) -> None:
    """Remove unfinished datasets of this name that were left by killed processes."""
    for path in directory.glob(f"{name}{UNFINISHED}*-v0"):
        pid = path.name.removeprefix(name + UNFINISHED).removesuffix("-v0")
        if pid.isdigit() and not process_runs(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _buffers(dataset: TrajectoryDataset) -> Iterator[Any]:
    """Yield the episodes as Minari episode buffers."""
    buffer = importlib.import_module("minari.data_collector").EpisodeBuffer
    views = FlatView(dataset.metadata.observation_space), FlatView(dataset.metadata.action_space)
    for trajectory in dataset:
        flags = np.zeros((2, trajectory.num_steps), np.bool_)
        flags[:, -1] = trajectory.terminated, trajectory.truncated
        yield buffer(
            seed=trajectory.seed,
            observations=unflatten_value(views[0], trajectory.obs),
            actions=unflatten_value(views[1], trajectory.actions),
            rewards=trajectory.rewards,
            terminations=flags[0],
            truncations=flags[1],
            infos={},
        )


def _env_spec(env: dict[str, Any]) -> EnvSpec | None:
    """Return the Gymnasium `EnvSpec`, or None if it would not describe the environment.

    A spec does not include the wrappers of this package, which may change observations and actions.
    """
    if isinstance(env.get("env_spec"), dict):
        return EnvSpec.from_json(json.dumps(env["env_spec"]))
    env_id, kwargs, limit = env.get("id"), env.get("kwargs"), env.get("max_episode_steps")
    if not isinstance(env_id, str) or env_id not in gymnasium.registry or env.get("wrappers"):
        return None
    if env_id.startswith("ALE/") and env.get("preprocessing") in ("auto", "atari"):
        return None
    spec = deepcopy(gymnasium.registry[env_id])
    spec.kwargs.update(kwargs if isinstance(kwargs, dict) else {})
    if isinstance(limit, int):
        spec.max_episode_steps = limit
    try:
        spec.to_json()
    except (TypeError, ValueError):  # custom factory, or arguments that are not plain values
        return None
    return spec


def _check_keys(space: spaces.Space[Any]) -> None:
    """Raise SpaceError for keys that HDF5 would interpret as paths."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            if not isinstance(key, str) or "/" in key or "\0" in key or key in (".", ".."):
                raise SpaceError(
                    f"the key {key!r} of {space} cannot be stored in a Minari dataset: expected a "
                    f"string without '/'"
                )
            _check_keys(part)
    elif isinstance(space, spaces.Tuple):
        for part in space.spaces:
            _check_keys(part)


def _check_id(dataset_id: str) -> None:
    if not DATASET_ID.fullmatch(dataset_id):
        raise DatasetError(
            f"{dataset_id!r} is not the name of a Minari dataset: expected <name>-v<number>, such "
            f"as cartpole/random-v0"
        )
