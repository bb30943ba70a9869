"""Write Minari datasets through Minari's public API."""

from __future__ import annotations

import importlib
import inspect
import json
import os
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

from maze_train.core.errors import DatasetError, MissingExtraError, SpaceError
from maze_train.core.files import process_runs
from maze_train.core.targets import import_extra
from maze_train.data.minari import DETAILS, OWN, UNREADABLE, check_id
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.spaces.describe import FlatView, unflatten_value

UNFINISHED = "-unfinished-"
"""Part of the temporary name of a dataset, followed by the process ID."""


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

    The dataset is written under a temporary name and renamed when it is complete. If writing fails,
    no files remain. If the process is killed, the unfinished dataset `<name>-unfinished-<pid>-v0`
    remains until the next call with the same name.

    Args:
        dataset: The episodes.
        dataset_id: `<name>-v<number>`, optionally prefixed by folders (`folder/<name>-v<number>`).
        algorithm_name: Algorithm that trained the policy; default: `metadata.policy["algorithm"]`.
        author: Author of the dataset.
        author_email: Email address of the author.
        code_permalink: URL of the code.
        description: Short description. All five texts default to the entry in `metadata.policy`
            with the same key.

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
    # Older versions store lossy images.
    if "jpeg_encoding" not in inspect.signature(create).parameters:
        raise MissingExtraError("minari>=0.5.4", "minari", purpose)
    check_id(dataset_id)
    metadata = dataset.metadata
    for space in (metadata.observation_space, metadata.action_space):
        _check_keys(space)
    for number, seed in enumerate(dataset.seeds):
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise DatasetError(f"seed {seed} of episode {number}: HDF5 stores at most 64 bits")
    given = (algorithm_name, author, author_email, code_permalink, description)
    known = {DETAILS[0]: metadata.policy.get("algorithm"), **metadata.policy}
    texts = {
        key: value if value is not None else known.get(key)
        for key, value in zip(DETAILS, given, strict=True)
    }
    stem, path = dataset_id.rpartition("-v")[0], None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Minari warns about missing metadata.
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
    """Remove unfinished datasets with this name, left by killed processes."""
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
    """Return the Gymnasium `EnvSpec`, or None if a spec cannot describe the environment.

    A spec cannot include wrappers of this package that change observations or actions.
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
    except (TypeError, ValueError):  # A custom factory, or arguments that are not plain values.
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
