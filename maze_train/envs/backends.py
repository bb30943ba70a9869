"""Third-party vector environments, including EnvPool (Weng et al. 2022)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakSet

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled, Error
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from maze_train.core.errors import ConfigError, EnvError, MazeTrainError, nearest
from maze_train.core.notices import notify
from maze_train.core.seeding import distinct_seeds
from maze_train.core.targets import InlineObject, import_extra, maker_of
from maze_train.envs.building import closed_on_error
from maze_train.envs.config import EnvConfig
from maze_train.envs.monitoring import metadata_of
from maze_train.envs.registered import (
    build_failure,
    import_env_module,
    missing_dependency,
    register_atari,
    registered_failure,
)
from maze_train.envs.types import Reset
from maze_train.spaces.autoreset import AutoresetMode

ATARI_ENTRY_POINT = "ale_py.vector_env:AtariVectorEnv"
ATARI = {
    "frameskip": 4,
    "maxpool": True,
    "img_height": 84,
    "img_width": 84,
    "grayscale": True,
    "stack_num": 4,
    "noop_max": 30,
    "use_fire_reset": True,
    "episodic_life": False,
    "reward_clipping": False,
}
"""Preprocessing of Mnih et al. (2015), Methods. Sign rewards and termination at the loss of a life
are applied by the adapter instead, so that raw returns remain available."""
OURS = {
    "num_envs": "set runner.concurrency",
    "batch_size": "all environments are stepped together",
    "autoreset_mode": "maze_train sets the mode",
    "max_episode_steps": "set env.max_episode_steps",
    "seed": "seeds are derived from the seed of the run",
    "env_seed": "seeds are derived from the seed of the run",
    "episodic_life": "the loss of a life ends an episode in training only",
    "reward_clipping": "rewards are replaced by their sign in training only",
    "reward_clip": "rewards are replaced by their sign in training only",
}
"""Arguments that are not allowed in `env.kwargs`, with the reason."""


IN_USE: WeakSet[VectorEnv[Any, Any, Any]] = WeakSet()
"""Vector environments that are in use."""


@dataclass(frozen=True)
class Backend:
    """A vector environment and its properties."""

    env: VectorEnv[Any, Any, Any]
    is_atari: bool = False
    """Whether `infos["lives"]` contains the lives of Atari games."""
    frame_stack: dict[str, int] = field(default_factory=dict)
    """Number of stacked frames for each observation leaf."""
    limit_left: int | None = None
    """Step limit enforced by the adapter; None if the environment enforces the limit."""


def check_settings(config: EnvConfig) -> None:
    """Check that the settings are compatible with third-party vector environments.

    Raises:
        ConfigError: If wrappers or unsupported arguments are set, or if not exactly one of `id` and
            `target` is set.
    """
    if config.backend == "gymnasium":
        raise ConfigError("env.backend", "expected native, envpool or tensor", config.backend)
    config.check_named()
    given = {"wrappers": config.wrappers, "training_wrappers": config.training_wrappers}
    for key, wrappers in given.items():
        if wrappers:
            raise ConfigError(
                f"env.{key}",
                "wrappers of single environments cannot wrap the vector environment of "
                f"env.backend={config.backend}: remove them, or use env.backend=gymnasium",
                wrappers,
            )
    for key, why in OURS.items():
        if key in config.kwargs:
            raise ConfigError(f"env.kwargs.{key}", f"remove it: {why}", config.kwargs[key])


def check_preprocessing(config: EnvConfig, is_atari: bool) -> bool:
    """Return `is_atari` after checking `env.preprocessing`.

    Raises:
        ConfigError: If the requested preprocessing is not available.
    """
    if is_atari and config.preprocessing == "none":
        raise ConfigError(
            "env.preprocessing",
            f"env.backend={config.backend} always applies the standard Atari preprocessing: use "
            "env.backend=gymnasium",
            "none",
        )
    if config.preprocessing == "atari" and not is_atari:
        raise ConfigError(
            "env.preprocessing",
            f"expected an ALE/ id with env.backend={config.backend}, got {config.id}",
            "atari",
        )
    return is_atari


def build_native(
    config: EnvConfig, num_envs: int, num_threads: int, max_episode_steps: int | None
) -> Backend:
    """Build the vector environment that is registered under an id or returned by a target.

    Args:
        config: Settings of the environment.
        num_envs: Number of environments.
        num_threads: Number of threads of the environment, if supported; 0 uses its default.
        max_episode_steps: Upper bound on the length of an episode. If the environment
            has a smaller limit, the smaller limit still applies.

    Raises:
        ConfigError: If the settings select no vector environment.
        EnvError: If building the environment failed.
        MissingExtraError: If a required package is not installed.
    """
    name, spec = config.target or "", None
    if config.id is not None:
        name, spec = config.id, vector_spec(config, config.id)
    is_atari = check_preprocessing(
        config, spec is not None and spec.vector_entry_point == ATARI_ENTRY_POINT
    )
    creator = load_creator(name, spec, config.kwargs)
    parameters = parameters_of(creator)
    registered = {} if spec is None else spec.kwargs
    kwargs: dict[str, Any] = {**registered, **(ATARI if is_atari else {}), **config.kwargs}
    if "autoreset_mode" in parameters:
        kwargs["autoreset_mode"] = AutoresetMode.SAME_STEP
    if num_threads and "num_threads" in parameters:
        kwargs.setdefault("num_threads", num_threads)
    own_limit = None if spec is None else spec.max_episode_steps
    limit = smaller(config.max_episode_steps or own_limit, max_episode_steps)
    if is_atari and limit is not None:
        # The limit of the game counts frames, including no-ops.
        frames = limit * frames_per_step(kwargs)
        key = "max_num_frames_per_episode"
        kwargs[key], limit = smaller(kwargs.get(key), frames), None
    elif "max_episode_steps" in parameters and limit is not None:
        kwargs["max_episode_steps"], limit = limit, None
    env = built(name, config, lambda: create(creator, config.id, num_envs, kwargs))
    if env.closed or env in IN_USE:
        raise EnvError(
            f"{name} is already in use, or closed. A run closes its vector environment, and each "
            "IMPALA actor needs a separate one: pass a class or function that creates it"
        )
    IN_USE.add(env)
    with closed_on_error([env]):
        if env.num_envs != num_envs:
            raise EnvError(
                f"{name} has {env.num_envs} environments, expected {num_envs}: build as many as "
                "the argument num_envs requests"
            )
        if config.max_episode_steps is None and autoreset_mode(env) is not AutoresetMode.DISABLED:
            if limit is not None and own_limit is None:
                notify(
                    f"note: evaluation episodes of {name} may never end: the environment resets "
                    "itself and does not accept max_episode_steps"
                )
            limit = None  # Only the environment could enforce this default limit.
    stack = int(kwargs["stack_num"]) if is_atari else 1
    return Backend(env, is_atari, {"": stack} if stack > 1 else {}, limit)


def create(
    creator: Callable[..., Any], env_id: str | None, num_envs: int, kwargs: dict[str, Any]
) -> Any:
    """Create the vector environment."""
    if env_id is None:
        return creator(num_envs=num_envs, **kwargs)
    with warnings.catch_warnings():
        # `autoreset_mode` reports missing and unknown modes.
        warnings.filterwarnings("ignore", message=r"(?s).*(AutoresetMode|autoreset_mode)")
        return gymnasium.make_vec(
            env_id, num_envs, vectorization_mode="vector_entry_point", **kwargs
        )


def vector_spec(config: EnvConfig, env_id: str) -> EnvSpec:
    """Return the registered specification of an id with a vector entry point.

    Raises:
        ConfigError: If the id is unknown, or has no vector entry point.
        MissingExtraError: If a required package is not installed.
    """
    module, _, name = env_id.rpartition(":")
    if module == "pettingzoo":
        problem = "PettingZoo has no vector environments: use env.backend=gymnasium"
        raise ConfigError("env.backend", problem, "native")
    try:
        if name.startswith("ALE/"):
            register_atari()
        import_env_module(env_id)
        spec = gymnasium.spec(name)
    except (ImportError, Error) as error:
        raise registered_failure(env_id, config, error) from error
    if spec.vector_entry_point is None:
        having = [i for i, s in gymnasium.registry.items() if s.vector_entry_point is not None]
        having.sort(key=lambda i: SequenceMatcher(None, name.lower(), i.lower()).ratio())
        raise ConfigError(
            "env.id",
            "no vector environment is registered for this id: use env.backend=gymnasium; ids with "
            f"a vector environment, nearest first: {', '.join(having[:-9:-1])}, ... "
            f"({len(having)} in total)",
            env_id,
        )
    return spec


def load_creator(name: str, spec: EnvSpec | None, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the class or function that creates the vector environment.

    Raises:
        ConfigError: If the creator cannot be imported, does not create vector environments, or
            arguments are given for an existing instance.
    """
    if kwargs and isinstance(name, InlineObject) and name.is_instance(VectorEnv):
        problem = "the environment is already an instance and takes no arguments: remove them"
        raise ConfigError("env.kwargs", problem, kwargs)
    if spec is None:
        creator: Callable[..., Any] = maker_of(name, "env._target_", VectorEnv)
    elif callable(spec.vector_entry_point):
        creator = spec.vector_entry_point
    else:
        try:
            creator = load_env_creator(str(spec.vector_entry_point))
        except ImportError as error:
            raise missing_dependency(name, error) from error
    if not callable(creator) or not takes_num_envs(creator):
        raise ConfigError(
            "env.id" if spec is not None else "env._target_",
            "env.backend=native expects a class or function that returns a "
            "gymnasium.vector.VectorEnv when it is called with num_envs=...; for single "
            "environments use env.backend=gymnasium",
            name,
        )
    return creator


Made = TypeVar("Made", bound=VectorEnv[Any, Any, Any])


def built(name: str, config: EnvConfig, make: Callable[[], Made]) -> Made:
    """Return the vector environment that `make` creates; raise errors as ConfigError or EnvError.

    Raises:
        ConfigError: If a package is missing, or `make` rejected its arguments.
        EnvError: If `make` raised another error, or did not return a vector environment.
    """
    try:
        env = make()
    except MazeTrainError:
        raise
    except (DependencyNotInstalled, ImportError) as error:
        raise missing_dependency(name, error) from error
    except BaseException as error:
        raise build_failure(name, config, error) from error
    if not isinstance(env, VectorEnv):
        raise EnvError(
            f"{name} returned {type(env).__name__}: expected a gymnasium.vector.VectorEnv; for "
            "single environments use env.backend=gymnasium"
        )
    return env


def parameters_of(creator: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function; empty if the signature is unknown."""
    try:
        return inspect.signature(creator).parameters
    except ValueError:
        return {}


def takes_num_envs(creator: Callable[..., Any]) -> bool:
    """Whether a class or function can be called with `num_envs`."""
    parameters = parameters_of(creator)
    any_name = (p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "num_envs" in parameters or any(any_name)


def frames_per_step(kwargs: Mapping[str, Any]) -> int:
    """Return the number of frames per step of a game.

    Raises:
        ConfigError: If `frameskip` is not an integer.
    """
    frames = kwargs["frameskip"]
    if not isinstance(frames, int):
        raise ConfigError("env.kwargs.frameskip", "expected an integer with native Atari", frames)
    return frames


def smaller(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two optional limits."""
    limits = [limit for limit in (one, other) if limit is not None]
    return min(limits, default=None)


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return the autoreset mode declared by a vector environment as an enum member or its value.

    Raises:
        EnvError: If the mode is missing or unknown.
    """
    # A class without metadata shares the dict of the base class. ale-py writes the mode of the
    # environment created last into this shared dict.
    shared = env.metadata is VectorEnv.metadata
    declared = None if shared else metadata_of(env).get("autoreset_mode")
    if declared is None:
        declared = getattr(env.unwrapped, "autoreset_mode", None)
    for mode in AutoresetMode:
        if declared is mode or declared == mode.value:
            return mode
    name = type(env.unwrapped).__name__
    raise EnvError(
        f"{name} declares the autoreset mode {declared!r}: expected one of "
        f"{', '.join(mode.value for mode in AutoresetMode)}; declare its behaviour at the end of "
        "an episode in the class: metadata = {'autoreset_mode': "
        "gymnasium.vector.AutoresetMode.NEXT_STEP}"
    )


def seed_for(env: VectorEnv[Any, Any, Any], root: int) -> Any:
    """Return the seed for `env.reset`: one seed per environment if `reset` accepts a list.

    Gymnasium expands a single integer s to s, s + 1, ..., so consecutive run seeds would share
    episodes. Therefore a single seed is also derived from `root` by hashing.
    """
    parameter = parameters_of(env.unwrapped.reset).get("seed")
    accepted = "" if parameter is None else str(parameter.annotation)
    seeds = distinct_seeds(root, env.num_envs)
    if "ndarray" in accepted:
        return np.array(seeds)
    return seeds if "list" in accepted or "Sequence" in accepted else seeds[0]


ENVPOOL_ATARI = {
    "frame_skip": 4,
    "img_height": 84,
    "img_width": 84,
    "gray_scale": True,
    "stack_num": 4,
    "noop_max": 30,
    "use_fire_reset": True,
    "episodic_life": False,
    "reward_clip": False,
    "repeat_action_probability": 0.25,
}
"""Preprocessing of Mnih et al. (2015), Methods, with the sticky actions of the v5 ids (Machado et
al. 2018, section 5). EnvPool's default repeat probability is 0."""


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """EnvPool environments that are rebuilt at each reset, with the seed of the reset.

    At the time limit, EnvPool does not distinguish termination from truncation; the step counts as
    truncated.

    Args:
        name: EnvPool's name of the environment.
        num_envs: Number of environments.
        options: Arguments of `envpool.make_gymnasium`, except seeds.

    Raises:
        ConfigError: If the environment is multi-agent.
        MissingExtraError: If EnvPool is not installed.
        TypeError: If an option is unknown to EnvPool.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (as in the base class)

    def __init__(self, name: str, num_envs: int, options: dict[str, Any]) -> None:
        envpool = import_envpool()
        self._make = partial(envpool.make_gymnasium, name, num_envs=num_envs, **options)
        self._pool: Any = None
        with warnings.catch_warnings():
            # Gymnasium warns about EnvPool's float64 bounds.
            warnings.simplefilter("ignore", UserWarning)
            spec = envpool.make_spec(name, num_envs=num_envs, **options)
            observation, action = spec.gymnasium_observation_space, spec.gymnasium_action_space
        self.config = spec.config
        if self.config.max_num_players > 1:
            raise ConfigError("env.id", "multi-player environments are not supported", name)
        self.num_envs = num_envs
        self.single_observation_space = with_true_bounds(observation)
        self.single_action_space = with_true_bounds(action)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> Reset:
        """Build the environments with the given seeds, and begin their first episodes.

        Args:
            seed: One seed per environment, or the first of `num_envs` consecutive seeds.
            options: Must be None, because EnvPool supports no options.

        Raises:
            EnvError: If options are given.
        """
        if options:
            raise EnvError(f"reset(options={options!r}): EnvPool supports no options")
        self._pool = None  # Stops the threads of the previous environment.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._pool = self._make(seed=0 if seed is None else seed)
            result: tuple[Any, dict[str, Any]] = self._pool.reset()
        return result

    def step(self, actions: Any) -> Any:
        """Step every environment once."""
        return self._pool.step(actions)

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the threads, by releasing the EnvPool."""
        self._pool = None


def build_envpool(
    config: EnvConfig, num_envs: int, num_threads: int, max_episode_steps: int | None
) -> Backend:
    """Build an EnvPool environment; `ALE/Pong-v5` selects EnvPool's `Pong-v5`.

    Args:
        config: Settings of the environment.
        num_envs: Number of environments.
        num_threads: Number of threads; 0 selects one per environment, but at most one per core.
        max_episode_steps: Upper bound on the length of an episode. If the environment
            has a smaller limit, the smaller limit still applies.

    Raises:
        ConfigError: If EnvPool does not provide the environment, or does not support the settings.
        EnvError: If building the environment failed.
        MissingExtraError: If EnvPool is not installed.
    """
    if config.id is None:
        raise ConfigError(
            "env._target_",
            "EnvPool supports its built-in environments only: set env.id, or use "
            "env.backend=gymnasium",
            config.target,
        )
    known = import_envpool().list_all_envs()
    name = config.id.removeprefix("ALE/")
    if name not in known:
        close = nearest(name, known)
        hint = f"; nearest ids: {', '.join(close)}" if close else ""
        problem = f"EnvPool has no environment of this name: use env.backend=gymnasium{hint}"
        raise ConfigError("env.id", problem, config.id)
    default = built(name, config, lambda: EnvPoolVectorEnv(name, 1, {}))
    is_atari = check_preprocessing(config, "zero_discount_on_life_loss" in default.config._fields)
    options = {**(ENVPOOL_ATARI if is_atari else {}), **config.kwargs}
    limit = config.max_episode_steps or default.config.max_episode_steps
    options["max_episode_steps"] = smaller(limit, max_episode_steps)
    if num_threads:
        options.setdefault("num_threads", num_threads)
    env = built(name, config, lambda: EnvPoolVectorEnv(name, num_envs, options))
    stack = options["stack_num"] if is_atari and options["gray_scale"] else 1
    return Backend(env, is_atari, {"": stack} if stack > 1 else {})


def import_envpool() -> ModuleType:
    """Import EnvPool.

    Raises:
        MissingExtraError: If EnvPool is not installed.
    """
    return import_extra("envpool", "envpool", "env.backend=envpool")


def with_true_bounds(space: object) -> Any:
    """Replace bounds equal to the limits of the dtype, which EnvPool uses, by infinity.

    For floats, EnvPool's lower limit is the smallest positive number, which is not a true bound.
    """
    if isinstance(space, (dict, spaces.Dict)):
        return spaces.Dict({key: with_true_bounds(part) for key, part in space.items()})
    if not isinstance(space, spaces.Box) or space.dtype is None or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    unbounded_below = (space.low == limits.tiny) | (space.low == limits.min)
    low = np.where(unbounded_below, -np.inf, space.low).astype(space.dtype)
    high = np.where(space.high == limits.max, np.inf, space.high).astype(space.dtype)
    return spaces.Box(low, high, dtype=space.dtype.type)
