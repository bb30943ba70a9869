"""The files of a repository: a policy, and what tells about it; nothing else of a run."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from maze_train.config.train_config import DevRunnerConfig
from maze_train.config.writing import config_to_dict, dotted_name
from maze_train.conversion import join
from maze_train.errors import ConfigError
from maze_train.files import read_regular
from maze_train.hub import POLICY_FILES
from maze_train.runners.parts import METRICS, SUMMARY
from maze_train.runners.rollout import ROLLOUTS, VIDEOS
from maze_train.runners.saved_policies import read_saved_policy
from maze_train.sharing.card import CURVE, FILM, model_card
from maze_train.targets import TARGET
from maze_train.training.policy_files import PolicyWriter

if TYPE_CHECKING:
    from maze_train.config.push_config import PushConfig
    from maze_train.config.train_config import TrainConfig
    from maze_train.runners.saved_policies import SavedPolicy


CARD = "README.md"
OWN_FILES = (*POLICY_FILES, METRICS, CURVE, FILM)
MAX_NBYTES = 1 << 28

SHARED = ("env", "model", "policies", "policies_to_train", "algorithm", "seed", "total_steps")
SHARED_OF_RUNNER = ("concurrency", "envs_per_actor", "dataset")
"""Settings that others get: those that made the numbers. The others are of a machine and its user:
directories, writers of metrics and callbacks with their addresses and tokens."""

SECRET_KEY = re.compile(r"(^|_)(token|secret|passw(or)?d|credentials?|(api|access)_?key)s?$", re.I)
SECRET = re.compile(r"\bhf_\w{20,}|://[^/\s]*:[^/\s]*@")
LOCAL = re.compile(r"[/~\\]|file:|[A-Za-z]:[/\\]")


def write_repository(folder: Path, saved: SavedPolicy, config: PushConfig, name: str) -> list[str]:
    """Write the files of a repository, and see that the policy can be loaded from them.

    Args:
        folder: An empty directory.
        saved: The policy.
        config: What is wanted besides.
        name: What `load_policy` will take.

    Returns:
        Keys of the settings that were left out or shortened.

    Raises:
        ConfigError: If the film can not be read.
        RunDirectoryError: If the policy can not be loaded from what was written.
    """
    settings, left_out = shared_settings(saved.config)
    score = {key: saved.score.get(key) for key in ("score", "epoch")}
    PolicyWriter(*saved.spaces, yaml.safe_dump(settings, sort_keys=False))(
        folder, saved.weights, score
    )
    read_saved_policy(folder, config.trust).make_model()
    run = saved.run_dir
    found = {METRICS: run / METRICS, CURVE: run / "plots" / CURVE, FILM: film_of(saved)}
    sources = {file: path for file, path in found.items() if path and lies_in(run, path)}
    if config.film is not None:
        sources[FILM] = Path(config.film)
    for file, path in sources.items():
        try:
            (folder / file).write_bytes(read_regular(path, MAX_NBYTES))
        except OSError as error:
            key = "film" if file == FILM else "run"
            raise ConfigError(key, f"can not be read: {error}", str(path)) from error
    if config.card:
        text = model_card(saved, settings, name, set(sources))
        (folder / CARD).write_text(text, encoding="utf-8")
    return left_out


def lies_in(run: Path, path: Path) -> bool:
    """Whether a file is one of a run: no link of a stranger's run to another file of the user."""
    return path.is_file() and path.resolve().is_relative_to(run.resolve())


def film_of(saved: SavedPolicy) -> Path | None:
    """The newest film of this policy, of rollouts of its run; None: there is none."""
    for folder in sorted((saved.run_dir / ROLLOUTS).glob("*"), reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):
            played = json.loads(read_regular(folder / SUMMARY))["policy"]["epoch"]
            films = sorted((folder / VIDEOS).glob("*.mp4"))
            if films and played == saved.score.get("epoch"):
                return films[0]
    return None


def shared_settings(config: TrainConfig) -> tuple[dict[str, Any], list[str]]:
    """The settings of a policy that others get, as plain values.

    Of a path only the last part stays, and nothing of what is named as a secret.

    Returns:
        The settings, and the keys of those that were changed so.
    """
    settings = config_to_dict(config)
    runner = {key: settings["runner"][key] for key in SHARED_OF_RUNNER}
    found = {key: settings[key] for key in SHARED}
    found["runner"] = {TARGET: dotted_name(DevRunnerConfig), **runner}
    changed: list[str] = []
    return _cleaned(found, "", changed), changed


def _cleaned(node: Any, key: str, changed: list[str]) -> Any:
    if SECRET_KEY.search(key.rpartition(".")[2]) and node is not None:
        changed.append(key)
        return None
    if isinstance(node, dict):
        return {name: _cleaned(value, join(key, name), changed) for name, value in node.items()}
    if isinstance(node, list):
        return [_cleaned(value, f"{key}[{i}]", changed) for i, value in enumerate(node)]
    if not isinstance(node, str):
        return node
    home = str(Path.home())
    if SECRET.search(node):
        changed.append(key)
        return None
    if LOCAL.match(node) or (len(home) > 1 and home in node):
        changed.append(key)
        return re.split(r"[/\\]", node.rstrip("/\\"))[-1]
    return node
