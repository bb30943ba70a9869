"""Builds single environments from their settings."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers

from maze_train.core.errors import ConfigError, EnvError, MazeTrainError, did_you_mean, nearest
from maze_train.core.step_end import TERMINATED, TRUNCATED
from maze_train.core.targets import (
    TARGET,
    InlineObject,
    build_target,
    import_for_id,
    locate,
    maker_of,
    target_name,
)
from maze_train.envs.building import (
    ConvertibleEnv,
    NumberedFactory,
    build_failure,
    closed_on_error,
    import_env_module,
    missing_package,
    nearest_ids,
    register_atari,
    register_installed,
    registered_failure,
)
from maze_train.envs.config import SIMULATORS, EnvConfig
from maze_train.envs.faults import SHIMMY, explained
from maze_train.envs.types import Env, Reset
from maze_train.envs.wrappers import (
    FRAME_STACK,
    AllLegalWrapper,
    MonitoringWrapper,
    described_metadata,
    layers_of,
)
from maze_train.spaces.agents import AGENTS, TEAMS, agent_spaces, partition
from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from maze_train.envs.atari import AtariGames
    from maze_train.envs.pettingzoo import PettingZoo
    from maze_train.simulators.simulator import Simulator

SEPARATE_STATISTICS = (
    "keeps separate statistics in each environment, which evaluation and saved policies do not "
    "have: remove it, and set "
)
STATISTICS = {
    wrappers.NormalizeObservation: "model.normalization.mode=running",
    wrappers.vector.NormalizeObservation: "model.normalization.mode=running",
    wrappers.NormalizeReward: "algorithm.reward_scaling=true (A2C and PPO)",
    wrappers.vector.NormalizeReward: "algorithm.reward_scaling=true (A2C and PPO)",
}
"""Wrappers with running statistics, and the setting that replaces them."""

OF_SINGLE_IMAGES = (
    wrappers.AtariPreprocessing,
    wrappers.FrameStackObservation,
    wrappers.GrayscaleObservation,
    wrappers.MaxAndSkipObservation,
    wrappers.ResizeObservation,
)
"""Wrappers that misread stacked frames."""

ENV_INDEX = "{env_index}"
"""Placeholder in the arguments of wrappers."""


@dataclass(frozen=True)
class EnvFactory(NumberedFactory):
    """Builds one environment per call. The factory can be sent to other processes.

    Args:
        config: Settings of the environment.
        training: Whether to apply training-only wrappers.
        index: Index of the environment, for the placeholder `{env_index}` of wrappers.
    """

    config: EnvConfig
    training: bool = True
    index: int = 0

    @classmethod
    def from_any(cls, env: object, **kwargs: object) -> EnvFactory:
        """Create a factory from any supported description of an environment.

        Args:
            env: A registered id, an `EnvConfig`, a factory, a class or function that returns an
                environment, or a vector environment (for training only).
            **kwargs: Keyword arguments for the environment, added to the config's arguments.

        Raises:
            ConfigError: If `env` is of any other type.
        """
        if isinstance(env, EnvFactory):
            merged = replace(env.config, kwargs={**env.config.kwargs, **kwargs})
            return replace(env, config=merged)
        if isinstance(env, EnvConfig):
            return cls(replace(env, kwargs={**env.kwargs, **kwargs}))
        if isinstance(env, str):
            return cls(EnvConfig(id=env, kwargs=kwargs))
        if isinstance(env, gymnasium.vector.VectorEnv):
            return cls(EnvConfig(target=InlineObject(env), backend="native", kwargs=kwargs))
        if isinstance(env, gymnasium.Env) and env.spec is not None:
            problem = (
                f"a single instance cannot be shared: pass the id, env={env.spec.id!r}, or "
                f"a function that creates it, env=lambda: gymnasium.make({env.spec.id!r})"
            )
            raise ConfigError("env", problem, env)
        if isinstance(env, gymnasium.Env) or not callable(env):
            raise ConfigError(
                "env",
                "expected an id, an EnvConfig, or a class or function that returns an environment; "
                "a single instance cannot be shared",
                env,
            )
        return cls(EnvConfig(target=InlineObject(env), kwargs=kwargs))

    def __call__(self) -> Env:
        """Build a new environment.

        The wrappers are applied in this order, innermost first: Atari preprocessing and `wrappers`;
        in training also `MonitoringWrapper`, `EpisodicLifeWrapper` and `ClipReward` of Atari
        games, and `training_wrappers`.

        Raises:
            ConfigError: If the settings select no valid environment.
            EnvError: If building the environment failed.
            MissingExtraError: If a required package is not installed.
        """
        config = self.config
        config.check_named()
        games = preprocessing_of(config)
        env = make(config) if games is None else games.make(config, make)
        name = f"{'train' if self.training else 'eval'}-{self.index}"
        for i, wrapper in enumerate(config.wrappers):
            with closed_on_error([env]):
                env = wrap(env, wrapper, f"env.wrappers[{i}]", name)
        if config.empty_mask == "all_legal":
            env = AllLegalWrapper(env)
        if not self.training or not (games or config.training_wrappers):
            return env
        env = MonitoringWrapper(env)
        if games is not None:
            env = games.for_training(env)
        for i, wrapper in enumerate(config.training_wrappers):
            key = f"env.training_wrappers[{i}]"
            with closed_on_error([env]):
                wrapped = wrap(env, wrapper, key, name)
                check_spaces_kept(env, wrapped, key, wrapper)
            env = wrapped
        return env

    def for_evaluation(self) -> EnvFactory:
        """Return a factory of the same environments without training-only wrappers."""
        return replace(self, training=False)

    def numbered(self, index: int) -> EnvFactory:
        """Return the factory of the environment with an index."""
        return replace(self, index=index)


GUARD_STEPS = 30_000
"""Maximum length of an episode if neither the settings nor the environment set a limit."""


@dataclass(frozen=True)
class BoundedEnvFactory(NumberedFactory):
    """Builds environments with an upper bound on the length of episodes.

    Args:
        factory: Builds the environments.
        max_episode_steps: Maximum length of an episode, >= 1. If the environment has a smaller
            limit, the smaller limit still applies. If None, the limit of the environment applies,
            or `GUARD_STEPS` if the environment has no limit. If 0, no limit is added.
    """

    factory: Callable[[], Env]
    max_episode_steps: int | None

    def __call__(self) -> Env:
        """Build a new environment."""
        env, limit = self.factory(), self.max_episode_steps
        if limit is None:
            limit = 0 if has_time_limit(env) else GUARD_STEPS
        return wrappers.TimeLimit(env, limit) if limit else env

    def numbered(self, index: int) -> BoundedEnvFactory:
        """Return the factory of the environment with an index."""
        if isinstance(self.factory, NumberedFactory):
            return replace(self, factory=self.factory.numbered(index))
        return self


def has_time_limit(env: Env) -> bool:
    """Whether a `TimeLimit` wrapper truncates episodes, as in registered environments."""
    return any(isinstance(layer, wrappers.TimeLimit) for layer in layers_of(env))


def cap_on_episodes(config: EnvConfig, max_episode_steps: int | None) -> int:
    """Return the limit of `BoundedEnvFactory` for vector environments."""
    if max_episode_steps is not None:
        return max_episode_steps
    spec = gymnasium.registry.get((config.id or "").rpartition(":")[2])
    registered = None if spec is None else spec.max_episode_steps
    return max(GUARD_STEPS, config.max_episode_steps or registered or 0)


def guard_note(lengths: Iterable[float], key: str) -> str | None:
    """Return a note if episodes were truncated after `GUARD_STEPS` steps, otherwise None.

    Args:
        lengths: Lengths of episodes.
        key: Setting that changes the limit.
    """
    count = sum(length == GUARD_STEPS for length in lengths)
    if not count:
        return None
    return (
        f"note: {count} {'episodes were' if count > 1 else 'episode was'} truncated after "
        f"{GUARD_STEPS:,} steps, since the environment declares no time limit; their partial "
        f"returns are included. {key} sets another limit, 0 disables the limit"
    )


def preprocessing_of(config: EnvConfig) -> type[AtariGames] | None:
    """Return the preprocessing of the environment, if any.

    Raises:
        ConfigError: See `AtariGames.fits`.
        MissingExtraError: See `AtariGames.fits`.
    """
    is_game = (config.id or "").rpartition(":")[2].startswith("ALE/")
    if config.preprocessing == "none" or (config.preprocessing == "auto" and not is_game):
        return None
    games: type[AtariGames] = locate(config.atari_games)
    return games if games.fits(config) else None


def env_name(config: EnvConfig) -> str:
    """Return a short name of the environment, suitable for a directory.

    The name of a function includes its module, because many functions are called `make`.

    Raises:
        ConfigError: If the settings select no environment.
    """
    if config.id is not None:
        return re.sub(r"[/:]", "-", config.id)
    if config.target is None:
        raise ConfigError("env", "expected an id or a _target_, got neither")
    *modules, name = re.split(r"[.:]", config.target)
    is_function = name[:1].islower() and modules and modules[-1].isidentifier()
    return f"{modules[-1]}-{name}" if is_function else name.strip("<>")


def make(config: EnvConfig) -> Env:
    """Build the environment selected by the settings, without wrappers."""
    env = _made(config)
    if config.teams:
        with closed_on_error([env]):
            joint = env.unwrapped
            several = agent_spaces(joint.observation_space, joint.action_space)
            if several is None:
                problem = "the environment has one agent; remove this setting"
                raise ConfigError("env.teams", problem, list(config.teams))
            teams = partition(config.teams, several.agents)
            joint.metadata = {**joint.metadata, TEAMS: teams}
    return env


def _made(config: EnvConfig) -> Env:
    if config.backend == "tensor":
        return make_simulator_env(config)
    if config.id is None:
        return make_own(config, own_maker(config.target or ""))
    if config.id.startswith("pettingzoo:"):
        adapter: type[PettingZoo] = locate(config.pettingzoo)
        return make_own(config, adapter.maker_named(config.id))
    return make_registered(config, config.id)


def make_registered(config: EnvConfig, env_id: str) -> Env:
    """Build a registered environment; raise errors of Gymnasium as errors of maze_train."""
    import_env_module(env_id)
    if env_id.rpartition(":")[2].startswith("ALE/"):
        register_atari()
    elif ":" not in env_id and env_id not in gymnasium.registry:
        register_installed()
    # Gymnasium's environment checker slows down every step. Values are checked when they are
    # stored.
    options = {"disable_env_checker": True, "max_episode_steps": config.max_episode_steps}
    displays = {"DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR"}
    if config.kwargs.get("render_mode") == "rgb_array" and displays.isdisjoint(os.environ):
        # Without a display, pygame prints an error although it can draw to memory.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        return gymnasium.make(env_id, **{**options, **config.kwargs})
    except MazeTrainError:
        raise
    except BaseException as error:
        # For known packages, the traceback is omitted, because it could reveal the contents of a
        # file if the settings are untrusted.
        spec = gymnasium.registry.get(env_id)
        entry = str(spec.entry_point) if spec is not None else ""
        is_told = entry.startswith(("gymnasium", "minigrid.")) or isinstance(error, ImportError)
        cause = None if is_told else error
        raise registered_failure(env_id, config, error) from cause


def check_registered(env_id: str, others: Iterable[str] = ()) -> None:
    """Check that an environment is registered; imports the module of `module:Id`.

    Args:
        env_id: The id.
        others: Other names to suggest in the error.

    Raises:
        ConfigError: If the id is unknown or the module cannot be imported.
        MissingExtraError: If the package of the environment is not installed.
    """
    module, colon, name = env_id.rpartition(":")
    if module == "pettingzoo":
        from maze_train.envs.pettingzoo import module_named

        module_named(env_id)
        return
    if module in SIMULATORS:
        return  # The name is checked when the environment is built.
    if colon:
        import_for_id(env_id, module, "env")
    if name not in gymnasium.registry:
        register_installed()
    if name in gymnasium.registry:
        return
    missing = missing_package(env_id)
    if missing is not None:
        raise missing
    path = target_name(env_id)
    if path:
        close = [f"env.{TARGET}={path}"]
    else:
        from maze_train.envs.pettingzoo import nearest_names

        ids = nearest_ids(env_id)
        same = [found for found in ids if found.endswith(f"/{env_id}")]
        close = [*nearest(env_id, others), *same, *nearest_names(env_id), *ids]
        close = list(dict.fromkeys(close))
    raise ConfigError(
        "env",
        f"no such environment{did_you_mean(close) or '.'} Use a registered gymnasium id, "
        "`my_module:MyEnv-v0` to import a module first, or env._target_=<class or function>",
        env_id,
    )


def make_own(config: EnvConfig, make: Callable[..., Any]) -> Env:
    """Build an environment from a class or function, with a time limit if one is set."""
    target = str(config.target or config.id)
    try:
        env = make(**config.kwargs)
        if not isinstance(env, gymnasium.Env):
            env = converted(env)
    except MazeTrainError:
        raise
    except BaseException as error:
        raise build_failure(target, config, error, make) from error
    if not isinstance(env, gymnasium.Env):
        raise EnvError(
            f"{target} returned {type(env).__name__}: expected a gymnasium.Env, "
            "so let its class derive from gymnasium.Env, or from maze_train.MultiAgentEnv for "
            f"multi-agent environments. {SHIMMY}"
        )
    if config.max_episode_steps is None:
        return env
    return wrappers.TimeLimit(env, config.max_episode_steps)


def converted(env: object) -> object:
    """Convert a non-Gymnasium environment to Gymnasium; return other objects unchanged."""
    adapter = pettingzoo_adapter()
    if adapter is not None:
        env = adapter.adapted(env)
    if not isinstance(env, ConvertibleEnv):
        return env
    with closed_on_error([env]):
        return env.converted()


def own_maker(target: str) -> Callable[..., Any]:
    """Return the class or function at a dotted path that creates environments.

    Raises:
        ConfigError: If the object cannot be found or does not create environments.
    """
    key = "env._target_"
    locate(target, key)  # Imports the package of the class.
    adapter = pettingzoo_adapter()
    others = () if adapter is None else adapter.kinds()
    return maker_of(target, key, gymnasium.Env, ConvertibleEnv, *others)


def pettingzoo_adapter() -> type[PettingZoo] | None:
    """Return the adapter of PettingZoo environments, or None if PettingZoo is not imported."""
    if "pettingzoo" not in sys.modules:
        return None
    adapter: type[PettingZoo] = locate(EnvConfig.pettingzoo)
    return adapter


def wrap(env: Env, node: dict[str, Any], key: str, name: str = "train-0") -> Env:
    """Wrap an environment with the wrapper selected by a configuration node.

    Args:
        env: The environment.
        node: The node, see `build_target`.
        key: Dotted name of the node.
        name: Value of the placeholder `{env_index}`.
    """
    target = locate(node[TARGET], key)
    numbered = {k: with_index(value, name) for k, value in node.items() if k != TARGET}
    if isinstance(target, type):
        check_wrapper(env, target, key, node)
    try:
        wrapped: Env = build_target(
            {TARGET: node[TARGET], **numbered}, env, key=key, kind=gymnasium.Env
        )
    except MazeTrainError:
        raise
    except BaseException as error:
        raise EnvError(f"{key} failed: {explained(error)}") from error
    for layer in takewhile(lambda layer: layer is not env, layers_of(wrapped)):
        check_wrapper(env, type(layer), key, node)
    if agent_spaces(env.observation_space, env.action_space) is None:
        return wrapped
    known, given = (
        {*space} if isinstance(space, spaces.Dict) else set()
        for space in (env.observation_space, wrapped.observation_space)
    )
    if AGENTS in given and given != known:
        changed = [*(f"adds {key!r}" for key in sorted(given - known))]
        changed += [f"takes {key!r} away" for key in sorted(known - given)]
        problem = (
            f"{' and '.join(changed)} in the joint observation, which no policy uses: change the "
            "observations of the agents within the environment"
        )
        raise ConfigError(key, problem, node[TARGET])
    if isinstance(wrapped, gymnasium.RewardWrapper):
        problem = (
            "changes the mean of the rewards, but agents learn from their individual rewards: "
            "change the individual rewards within the environment"
        )
        raise ConfigError(key, problem, node[TARGET])
    return wrapped


def check_wrapper(env: Env, kind: type, key: str, node: dict[str, Any]) -> None:
    """Raise ConfigError if a wrapper of class `kind` around `env` would give wrong results."""
    setting = next((s for known, s in STATISTICS.items() if issubclass(kind, known)), None)
    problem = "" if setting is None else SEPARATE_STATISTICS + setting
    if issubclass(kind, OF_SINGLE_IMAGES) and described_metadata(env).get(FRAME_STACK):
        problem = (
            "processes single frames, but the observations are stacked frames: move it before the "
            "wrapper that stacks them; Atari games are already preprocessed, unless "
            "env.preprocessing=none"
        )
    if issubclass(kind, wrappers.RecordVideo) and ENV_INDEX not in str(node):
        problem = (
            "environments would overwrite each other's videos: add the number of the environment, "
            "such as video_folder: 'videos/{env_index}'"
        )
    if problem:
        raise ConfigError(key, problem, node[TARGET])


def with_index(value: Any, index: str) -> Any:
    """Return a value of a node with `{env_index}` replaced in all texts."""
    if isinstance(value, dict):
        return {key: with_index(part, index) for key, part in value.items()}
    if isinstance(value, list):
        return [with_index(part, index) for part in value]
    is_text = isinstance(value, str) and ENV_INDEX in value
    return value.replace(ENV_INDEX, index) if is_text else value


def check_spaces_kept(env: Env, wrapped: Env, key: str, node: dict[str, Any]) -> None:
    """Raise if a training wrapper changes a space, because evaluation omits the wrapper."""
    for name, before, after in (
        ("observation_space", env.observation_space, wrapped.observation_space),
        ("action_space", env.action_space, wrapped.action_space),
    ):
        if before != after:
            raise ConfigError(
                key,
                f"changes the {name} from {before} to {after}, but is not used in evaluation: "
                "move the wrapper to env.wrappers",
                node,
            )


class SimulatorEnv(Env):
    """Adapter from a simulator of one environment to a Gymnasium environment.

    Args:
        simulator: A simulator with `num_envs` = 1; closed together with the adapter.
        render_mode: `rgb_array` or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 (as in the base)

    def __init__(self, simulator: Simulator, render_mode: str | None = None) -> None:
        self.simulator = simulator
        self.render_mode = render_mode
        self.observation_space = simulator.observation_space
        self.action_space = simulator.action_space
        self._observation = FlatView(self.observation_space)
        self._action = FlatView(self.action_space)
        self._obs: object = None
        self._has_ended = False
        self._picture: object = None

    @property
    def env(self) -> Any:
        """The object whose methods callbacks may call."""
        return self.simulator.called

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin an episode. If `seed` is None, the seed is derived from the previous one."""
        super().reset(seed=seed)
        self._has_ended = False
        self._obs = self._first(self.simulator.reset_arrays(int(self.np_random.integers(2**31))))
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment."""
        parts = {key: np.asarray(part)[None] for key, part in self._action.read(action)}
        found = self.simulator.step_arrays(parts)
        end, info = int(found.end[0]), dict[str, Any]()
        self._has_ended = end in (TERMINATED, TRUNCATED)
        if not self._has_ended:
            self._obs = self._first(found.obs)
        else:
            info = {key: x[0] for key, x in found.columns.items()}
            if found.final_obs is not None:
                self._obs = self._first(found.final_obs)
        return self._obs, float(found.rewards[0]), end == TERMINATED, end == TRUNCATED, info

    def _first(self, obs: Any) -> object:
        """Return the observation of the environment, in the structure of the space."""
        return self._observation.build({key: leaf[0] for key, leaf in obs.items()})

    def render(self) -> Any:
        """Render the environment.

        At the end of an episode, the simulator has already begun the next one, so the previous
        image is returned.

        Raises:
            EnvError: If rendering is not supported.
        """
        if not self._has_ended or self._picture is None:
            self._picture = self.simulator.render()
        if self._picture is None:
            raise EnvError(
                f"{self.simulator.name} cannot be rendered: expected a method render() that "
                "returns an image, uint8 [height, width, 3]; disable video and rendering"
            )
        return self._picture

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()


def make_simulator_env(config: EnvConfig) -> SimulatorEnv:
    """Build a single environment from a simulator."""
    settings = dict(config.kwargs)
    mode = settings.pop("render_mode", None)
    return SimulatorEnv(simulator_of(replace(config, kwargs=settings), 1), mode)


def simulator_of(
    config: EnvConfig, num_envs: int, device: Any = "cpu", at_most: int | None = None
) -> Simulator:
    """Build the simulator selected by the settings.

    Args:
        config: Settings of the environment.
        num_envs: Number of environments.
        device: Device; ignored if the settings select a device.
        at_most: See `make_simulator`.
    """
    from maze_train.simulators.make import make_simulator  # Requires PyTorch.

    simulator = make_simulator(
        config.id,
        config.target,
        config.kwargs,
        num_envs,
        device=config.device or device,
        max_episode_steps=config.max_episode_steps,
        at_most=at_most,
    )
    simulator.truncation = config.truncation
    return simulator
