"""Training and acting from Python."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from maze_train.config.conversion import key_of_field
from maze_train.config.loading import load_config
from maze_train.config.resuming import AUTO, stored_settings
from maze_train.envs.factory import EnvFactory
from maze_train.errors import ConfigError, RunDirectoryError
from maze_train.runners.factory import build_runner
from maze_train.targets import locate
from maze_train.training.policy_files import TrainedPolicy, read_spaces, read_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymnasium import Env

    from maze_train.envs.config import EnvConfig
    from maze_train.runners.result import TrainingResult

__all__ = ["load_policy", "train"]


def train(
    env: str | Callable[..., Env[Any, Any]] | EnvConfig | dict[str, Any] | None = None,
    algorithm: str | dict[str, Any] | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train a policy, or go on training one.

        result = train(env="CartPole-v1", algorithm="ppo", total_steps=50_000)
        action = result.policy.act(observation)
        result = train(resume=result.run_dir, total_steps=100_000)

    Args:
        env: A registered id, an environment class, a function that makes an environment, or the
            settings of the `env` section as a mapping or an `EnvConfig`.
        algorithm: The name of an algorithm (by default ppo), or its settings as a mapping with
            `_target_`.
        **overrides: Settings by top-level name: `total_steps=50_000`, `seed=1`, `runner="local"`,
            or sections, `evaluation={"n_episodes": 20}`; single values by dotted names as on the
            command line: `**{"algorithm.lr": 1e-3}`. With `resume=<run directory>` and no
            `algorithm`, they change the settings of that run; `env` is then needed only if it was a
            function or class that has no importable name.

    Returns:
        History, run directory, and the best policy.

    Raises:
        ConfigError: If a setting is wrong; nothing has been written then.
        Interrupted: After SIGINT, SIGTERM or SIGUSR1; a checkpoint was saved.
        MazeTrainError: If training failed.
    """
    for key in ("resume", "run_dir"):
        if isinstance(overrides.get(key), Path):
            overrides[key] = str(overrides[key])
    resume = overrides.get("resume")
    if algorithm is None and resume not in (None, AUTO) and (env is None or callable(env)):
        config = load_config(stored_settings(resume, overrides))
        maker = None if env is None else EnvFactory.from_any(env).maker
        return build_runner(config, maker and EnvFactory(config.env, maker)).run()
    if env is None:
        raise ConfigError("env", "expected a registered id, a class, or a function that makes one")
    maker = None
    if not isinstance(env, str | dict):
        named = EnvFactory.from_any(env)
        # A mapping, so that overrides of single values can be merged into it.
        env = {key_of_field(key): value for key, value in asdict(named.config).items()}
        maker = named.maker
    config = load_config({"env": env, "algorithm": algorithm or "ppo", **overrides})
    factory = None if maker is None else EnvFactory(config.env, maker)
    return build_runner(config, factory).run()


def load_policy(run_dir: str | Path) -> TrainedPolicy:
    """The best policy of a run.

    Args:
        run_dir: Directory of a run, or of one saved policy (`<run dir>/policies/epoch_<n>`).

    Raises:
        RunDirectoryError: If no policy was saved there, or a file is damaged.
    """
    directory = Path(run_dir)
    if (directory / "best").is_dir():
        directory = directory / "best"
    weights = read_weights(directory)
    observation_space, action_space = read_spaces(directory)
    config = load_config(yaml.safe_load((directory / "config.yaml").read_text()))
    algorithm = config.algorithm
    build_model = locate(algorithm.model_builder)
    model = build_model(
        config.model, observation_space, action_space, seed=0, **algorithm.model_settings
    )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunDirectoryError(
            f"the weights in {directory} do not fit its config.yaml: {error}"
        ) from error
    return TrainedPolicy(model.eval(), observation_space, action_space)
