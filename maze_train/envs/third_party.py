"""Third-party vector environments, including EnvPool (Weng et al. 2022), as `MazeVectorEnv`."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import WeakSet

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled, Error
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from maze_train.core.errors import ConfigError, EnvError, MazeTrainError, SpaceError, nearest
from maze_train.core.notices import notify
from maze_train.core.seeding import distinct_seeds
from maze_train.core.step_end import (
    RESET_ONLY,
    RUNNING,
    TRUNCATED,
    EpisodeEnd,
    StepBatch,
    end_codes,
    has_ended,
    is_terminated,
)
from maze_train.core.targets import InlineObject, import_extra, maker_of
from maze_train.envs import faults
from maze_train.envs.atari import AtariLives
from maze_train.envs.batch import episode_end, info_of, infos_by_key, required_keys
from maze_train.envs.building import (
    build_failure,
    close_all,
    closed_on_error,
    import_env_module,
    missing_dependency,
    register_atari,
    registered_failure,
)
from maze_train.envs.calls import CallableSingleEnvs, EnvCall, calls_from, calls_to_state
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import simulator_of
from maze_train.envs.types import Mask, Reset, Space
from maze_train.envs.vector import (
    FILL_MASKS,
    Array,
    ArrayTree,
    MazeVectorEnv,
    StepBuffers,
    converted,
    zeroed_columns,
)
from maze_train.envs.wrappers import metadata_of
from maze_train.spaces.autoreset import AutoresetMode
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import mask_layout

if TYPE_CHECKING:
    from maze_train.simulators.simulator import Simulator

Columns: TypeAlias = dict[str, Array]

FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")
"""Keys of Gymnasium's infos about ended episodes."""


def make_third_party_env(
    config: EnvConfig,
    num_envs: int,
    *,
    training: bool,
    num_threads: int = 0,
    max_episode_steps: int | None = None,
    device: object = "cpu",
    info_keys: Sequence[str] | None = None,
) -> MazeVectorEnv:
    """Build the vector environment of a configuration with a backend other than `gymnasium`.

    Args:
        config: Settings of the environment.
        num_envs: Number of environments.
        training: Whether to build a training environment. In training, the loss of a life ends an
            Atari episode, rewards are replaced by their sign, and simulators exchange tensors.
        num_threads: Number of threads of the environment, if supported; 0 uses its default.
        max_episode_steps: Upper bound (>= 1) on the length of an episode. If the environment
            has a smaller limit, the smaller limit still applies.
        device: Device of a simulator; ignored if the settings select a device.
        info_keys: See `ThirdPartyVectorEnv`.

    Raises:
        ConfigError: If the settings select no vector environment, or the backend does not support
            the settings.
        EnvError: If building the environment failed, or the environment declares no autoreset mode.
        MissingExtraError: If a required package is not installed.
        SpaceError: If a space cannot be flattened.
    """
    check_settings(config)
    settings: dict[str, Any] = {"empty_mask": config.empty_mask, "info_keys": info_keys}
    settings |= {"copy": False, "step_infos": False}
    if config.backend == "tensor":
        simulator = simulator_of(config, num_envs, device, max_episode_steps)
        with closed_on_error([simulator]):
            return SimulatorVectorEnv(simulator, max_episode_steps, tensors=training, **settings)
    build = build_native if config.backend == "native" else build_envpool
    backend = build(config, num_envs, num_threads, max_episode_steps)
    with closed_on_error([backend.env]):
        return GymVectorEnv(
            backend.env,
            atari_training=training and backend.is_atari,
            frame_stack=backend.frame_stack,
            max_episode_steps=backend.limit_left,
            **settings,
        )


class ThirdPartyVectorEnv(MazeVectorEnv, ABC):
    """Base class of adapters of third-party vector environments.

    With `atari_training`, `AtariLives` ends an episode when a life is lost. The raw return `r` and
    the length `l` of whole games are in `infos["final_info"]["episode"]`, under the mask
    `infos["final_info"]["_episode"]`.

    Args:
        name: Name in messages.
        num_envs: Number of environments.
        spaces: Observation and action space of one environment.
        metadata: Metadata of an environment.
        atari_training: Whether the loss of a life ends an episode and rewards are replaced by their
            sign; requires `infos["lives"]`.
        frame_stack: Number of stacked frames by leaf of the observation; if None, the metadata
            declares the number.
        empty_mask: See `EnvConfig.empty_mask`.
        copy: Whether to return copies of the observations.
        step_infos: Whether to return the infos of every step.
        info_keys: Keys of the values to keep from final infos; if None, whole infos are kept.

    Raises:
        SpaceError: If a space cannot be flattened.
    """

    def __init__(
        self,
        name: str,
        num_envs: int,
        spaces: tuple[Space, Space],
        metadata: Mapping[str, Any],
        *,
        atari_training: bool = False,
        frame_stack: Mapping[str, int] | None = None,
        empty_mask: str = "error",
        copy: bool = True,
        step_infos: bool = True,
        info_keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(copy=copy, step_infos=step_infos)
        self._name = name
        metadata = {**metadata, "monitored": atari_training}
        if frame_stack is not None:
            metadata["frame_stack"] = frame_stack
        self._describe(*spaces, num_envs, metadata)
        self._lives = AtariLives(name, num_envs) if atari_training else None
        self._keys = None if info_keys is None else required_keys(info_keys, self.agents)
        self._observation = FlatView(spaces[0])
        self._masks = mask_layout(*spaces)
        actions = zeroed_columns(self._action, num_envs)
        numbers = np.zeros(num_envs), np.zeros(num_envs, np.uint8)
        self._buffers = StepBuffers({}, {}, actions, *numbers)
        self._fills_masks = empty_mask == "all_legal"
        self._resetting: Mask = np.zeros(
            num_envs, np.bool_
        )  # The next step only resets the environment.
        self._lengths = np.zeros(num_envs, np.int64)

    @abstractmethod
    def _reset_envs(
        self, seed: int, options: dict[str, Any] | None
    ) -> tuple[Columns, dict[str, Any]]:
        """Begin new episodes in all environments; return observations by leaf and infos."""

    @abstractmethod
    def _step_envs(self, actions: Columns) -> StepBatch[Array]:
        """Step all environments; return observations by leaf, and all infos in `columns`."""

    def _following(self, columns: Columns, end: Array) -> Columns:
        """Return the observations for the next actions after a step with episode ends."""
        return columns

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ArrayTree, dict[str, Any]]:
        """Begin new episodes in all environments.

        Args:
            seed: Seed of all following episodes, an integer >= 0; if None, a seed is drawn.
            options: Passed to this reset of the environment, but not to later autoresets.

        Returns:
            The first observations, [num_envs, ...], and the infos of the reset.

        Raises:
            EnvError: If the environment raises or returns an invalid value.
        """
        self._check_not_stepping("reset()")
        if options is not None and "reset_mask" in options:
            raise SpaceError(
                "reset(options={'reset_mask': ...}): not supported for third-party vector "
                "environments; a reset begins new episodes in all environments"
            )
        columns, infos = self._reset_envs(self._seed_for(seed), options)
        self._resetting = np.zeros(self.num_envs, np.bool_)
        self._lengths[:] = 0
        if self._lives is not None:
            self._lives.begin(infos)
        self._check_finite(columns)
        self._act_on(columns)
        return self._observations(), infos

    def _finish_step(self) -> StepBatch[Array]:
        actions = {key: column.copy() for key, column in self._buffers.actions.items()}
        batch = self._step_envs(actions)
        columns, final, infos = cast("Any", batch.obs), cast("Any", batch.final_obs), batch.columns
        self._lengths += batch.end != RESET_ONLY
        self._check_rewards(batch.rewards)
        if batch.ends:
            ended = has_ended(batch.end)
            kept = ended if self.keeps_terminal_obs else batch.end == TRUNCATED
            self._check_finite(final, kept, "final observation")
            columns = self._following(columns, batch.end)
            self._lengths[ended] = 0
            batch.final_obs = final[""] if self._is_single else final
        self._check_finite(columns)
        self._act_on(columns)
        batch.obs = self._observations()
        told = infos.keys() - set(FINAL) if self.step_infos else ()
        batch.columns = {key: infos[key] for key in told}
        if self._lives is not None:
            self._lives.apply(batch, infos)
        return batch

    @property
    def playing(self) -> list[int]:
        """Rows of the environments that the next step does not only reset."""
        return np.flatnonzero(~self._resetting).tolist()

    @abstractmethod
    def _make_call(self, call: EnvCall) -> None:
        """Apply a call to all environments."""

    def _make_calls(self, calls: list[EnvCall]) -> None:
        if self.root_seed is None:
            self._reset_envs(0, None)  # Some methods require a running episode.
        for call in calls:
            try:
                self._make_call(call)
            except ConfigError:
                raise
            except BaseException as error:
                raise self._fault(f"{call.key}: {call.name}()", error) from error

    def _columns(self, leaves: Iterable[tuple[str, Any]]) -> Columns:
        """Return batched observations by leaf, with the dtypes of the space."""
        columns: Columns = {}
        for key, value in leaves:
            leaf = self._observation.leaves[key]
            shape, dtype = (self.num_envs, *(leaf.shape or ())), leaf.dtype
            if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
                value = converted(key, value, shape, np.dtype(dtype)).astype(dtype)
            columns[key] = value
        return columns

    def _ends(self, infos: Sequence[Any] | Mapping[Any, Any], ended: Mask) -> list[EpisodeEnd]:
        """Extract the required values of the episodes that ended."""
        return [
            episode_end(i, info_of(infos, i, self.num_envs), self._keys, self.agents)
            for i in np.flatnonzero(ended).tolist()
        ]

    def _check_rewards(self, rewards: Array) -> None:
        """Raise EnvError if a reward is not finite."""
        for i in faults.non_finite_rewards(rewards).nonzero()[0].tolist():
            with self._failure_of(i):
                faults.check_finite_reward(float(rewards[i]))

    def _check_finite(
        self, columns: Columns, rows: Mask | None = None, name: str = "observation"
    ) -> None:
        """Raise EnvError if an observation in these rows (None: all rows) is not finite."""
        floats = [column for column in columns.values() if column.dtype.kind == "f"]
        if all(faults.are_finite(column).all() for column in floats):
            return
        bad = faults.non_finite_rows(columns)
        for i in (bad if rows is None else bad & rows).nonzero()[0].tolist():
            with self._failure_of(i):
                faults.check_finite({key: column[i] for key, column in columns.items()}, name)

    def _act_on(self, columns: Columns) -> None:
        """Store the observations for the next actions.

        Raises:
            EnvError: If an observation has no legal action.
        """
        obs = self._buffers.obs
        obs.update(columns)
        if self._masks is None:
            return
        if self._fills_masks:
            obs.update(self._masks.filled(obs))
            return
        acting = np.flatnonzero(~self._resetting)
        masks = {leaf: obs[leaf][acting] for leaf in self._masks.leaves}
        row = self._masks.first_illegal_row(masks) if len(acting) else None
        if row is not None:
            problem = self._masks.illegal_part({leaf: rows[row] for leaf, rows in masks.items()})
            with self._failure_of(int(acting[row])):
                raise SpaceError(f"{problem}{FILL_MASKS}")

    def _fault(self, where: str, error: BaseException) -> EnvError:
        return EnvError(f"{where} of {self._name} failed: {faults.explained(error)}")

    @contextmanager
    def _failure_of(self, i: int) -> Iterator[None]:
        """Add the index of the environment and the step to errors in the block."""
        try:
            yield
        except (faults.NonFiniteError, SpaceError) as error:
            step = f"step {self._lengths[i]} of its episode"
            raise EnvError(f"environment {self.first_env + i} failed at {step}: {error}") from error


class GymVectorEnv(ThirdPartyVectorEnv):
    """Adapter of Gymnasium vector environments.

    The behaviour at the end of an episode depends on the autoreset mode of the environment:

    * SAME_STEP: as described in `MazeVectorEnv`.
    * NEXT_STEP: the returned observation is the final observation of the episode. The next step
      only resets the environment: the action is ignored, the reward is 0, the flags are False, the
      returned observation is the first of the next episode, and `infos["ignored"][i]` is True. Rows
      with `ignored` are not transitions. The key exists only if a row is ignored.
    * DISABLED: the adapter resets ended environments in the same step, as in SAME_STEP.

    Args:
        env: The environment. `metadata["autoreset_mode"]` declares the autoreset mode. Closing the
            adapter closes the environment.
        max_episode_steps: Maximum length of an episode, >= 1; allowed only in mode DISABLED.
        **settings: See `ThirdPartyVectorEnv`.

    Raises:
        ConfigError: If `max_episode_steps` is given and the mode is not DISABLED.
        EnvError: If the environment declares no autoreset mode.
        SpaceError: If a space cannot be flattened.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], max_episode_steps: int | None = None, **settings: Any
    ) -> None:
        name, self.mode = type(env.unwrapped).__name__, autoreset_mode(env)
        if max_episode_steps is not None and self.mode is not AutoresetMode.DISABLED:
            raise ConfigError(
                "env.max_episode_steps",
                f"{name} resets itself (mode {self.mode.value}) and does not accept "
                "max_episode_steps: limit the episodes within the environment, and set this to "
                "null and evaluation.max_episode_steps to 0, or use env.backend=gymnasium",
                max_episode_steps,
            )
        spaces = env.single_observation_space, env.single_action_space
        super().__init__(name, env.num_envs, spaces, metadata_of(env), **settings)
        if self.mode is AutoresetMode.NEXT_STEP:
            self.metadata["autoreset_mode"] = self.autoreset_mode = self.mode
        self._env, self.render_mode = env, env.render_mode
        self._limit = max_episode_steps

    def _reset_envs(
        self, seed: int, options: dict[str, Any] | None
    ) -> tuple[Columns, dict[str, Any]]:
        """Begin new episodes in all environments."""
        try:
            obs, infos = self._env.reset(seed=seed_for(self._env, seed), options=options)
        except BaseException as error:
            raise self._fault("reset()", error) from error
        return self._columns(self._observation.read(obs)), infos_by_key(infos, self.num_envs)

    def _step_envs(self, actions: Columns) -> StepBatch[Array]:
        """Step all environments, and convert the results before the environment reuses them."""
        try:
            obs, rewards, *flags, infos = self._env.step(self._action.build(actions))
        except BaseException as error:
            raise self._fault("step()", error) from error
        infos = infos_by_key(infos, self.num_envs)
        numbers = np.array(rewards, np.float64)
        terminated, truncated = (np.array(flag, np.bool_) for flag in flags)
        shapes = [row.shape for row in (numbers, terminated, truncated)]
        if any(shape != (self.num_envs,) for shape in shapes):
            raise EnvError(
                f"{self._name}.step() returned rewards and flags of shapes "
                f"{', '.join(map(str, shapes))}: expected ({self.num_envs},) each"
            )
        columns = self._columns(self._observation.read(obs))
        batch = StepBatch(columns, numbers, end_codes(terminated, truncated), columns=infos)
        if self.mode is AutoresetMode.NEXT_STEP:
            # Results of a step that only resets are arbitrary.
            batch.rewards[self._resetting], batch.end[self._resetting] = 0.0, RESET_ONLY
            batch.has_gaps = bool(self._resetting.any())
            self._resetting = has_ended(batch.end)
        elif self._limit is not None:
            batch.end[(batch.end == RUNNING) & (self._lengths + 1 >= self._limit)] = TRUNCATED
        ended = has_ended(batch.end)
        if ended.any():
            is_same_step = self.mode is AutoresetMode.SAME_STEP
            batch.ends = self._ends(infos.get("final_info", {}) if is_same_step else infos, ended)
            if is_same_step:
                batch.final_obs = self._given_final_obs(infos, ended)
            elif self.mode is AutoresetMode.DISABLED:
                # The reset may overwrite the memory of the observations.
                batch.final_obs = {key: column.copy() for key, column in columns.items()}
            else:
                batch.final_obs = columns
        return batch

    def _following(self, columns: Columns, end: Array) -> Columns:
        """Return the observations for the next actions; in mode DISABLED, reset environments.

        In mode NEXT_STEP, networks also process terminal observations, so non-finite ones are
        replaced by zeros. Multiplying the unused results by a discount of 0 would not remove NaN.
        """
        if self.mode is AutoresetMode.DISABLED:
            ended = has_ended(end)
            columns = {key: column.copy() for key, column in columns.items()}
            try:
                obs, _ = self._env.reset(options={"reset_mask": ended.copy()})
            except BaseException as error:
                raise self._fault("reset() with a reset_mask", error) from error
            for key, column in self._columns(self._observation.read(obs)).items():
                columns[key][ended] = column[ended]
        elif self.mode is AutoresetMode.NEXT_STEP:
            bad = is_terminated(end) & faults.non_finite_rows(columns)
            if bad.any():
                columns = {key: column.copy() for key, column in columns.items()}
                for column in columns.values():
                    column[bad] = 0 if column.dtype.kind == "f" else column[bad]
        return columns

    def _make_call(self, call: EnvCall) -> None:
        call.make_in_vector(self._env, self.num_envs)

    def _call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        if name == "render":
            frames = self._env.render()
            return (None,) * self.num_envs if frames is None else frames
        inner = self._env.unwrapped
        if not isinstance(inner, CallableSingleEnvs):
            return super()._call_envs(name, args, kwargs)
        return inner.call(name, *args, **kwargs)

    def _set_attrs(self, name: str, values: Sequence[Any]) -> None:
        inner = self._env.unwrapped
        if not isinstance(inner, CallableSingleEnvs):
            return super()._set_attrs(name, values)
        return inner.set_attr(name, list(values))

    def close_extras(self, **kwargs: Any) -> None:
        """Close and release the environment; some threads stop only after the release."""
        env = vars(self).pop("_env", None)
        if env is not None:
            IN_USE.discard(env)
            self.root_seed = None
            close_all([env])

    def _given_final_obs(self, infos: Mapping[str, Any], ended: Mask) -> Columns:
        """Return `infos["final_obs"]` by leaf; rows of running episodes are arbitrary."""
        given = infos.get("final_obs")
        rows_given = isinstance(given, np.ndarray) and given.dtype == object
        if given is None or (rows_given and any(given[i] is None for i in np.flatnonzero(ended))):
            raise EnvError(
                f"{self._name} declares the autoreset mode SameStep, but infos['final_obs'] is "
                f"missing after the end of an episode: got infos {sorted(infos)}"
            )
        if not rows_given:
            return self._columns(self._observation.read(given))
        columns = zeroed_columns(self._observation, self.num_envs)
        for i in np.flatnonzero(ended):
            for key, value in self._observation.read(given[i]):
                column = columns[key]
                column[i] = converted(key, value, column.shape[1:], column.dtype)
        return columns


class SimulatorVectorEnv(ThirdPartyVectorEnv):
    """Adapter of a simulator to `MazeVectorEnv`.

    Args:
        simulator: The simulator; closed together with the adapter.
        max_episode_steps: Maximum allowed length of an episode; None disables the check.
        tensors: Whether observations, actions and results are tensors on the device of the
            simulator, which are neither copied nor checked; otherwise they are arrays.
        **settings: See `ThirdPartyVectorEnv`.
    """

    def __init__(
        self,
        simulator: Simulator,
        max_episode_steps: int | None = None,
        *,
        tensors: bool = False,
        **settings: Any,
    ) -> None:
        spaces = simulator.observation_space, simulator.action_space
        super().__init__(simulator.name, simulator.num_envs, spaces, {}, **settings)
        self._closing.callback(simulator.close)
        self.simulator = simulator
        self.offers_own_state = simulator.has_lasting_state
        self._limit = max_episode_steps
        self._before: Columns = {}
        self.device = simulator.device if tensors else None
        self.can_be_restored = tensors and simulator.can_be_restored
        self._obs: Any = None
        self._sent: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all environments; see `ThirdPartyVectorEnv`."""
        if self.device is None:
            return super().reset(seed=seed, options=options)
        self._check_not_stepping("reset()")
        self._obs = self.simulator.reset(distinct_seeds(self._seed_for(seed), 1)[0])
        return self._obs, {}

    def step_async(self, actions: Any) -> None:
        """Start a step; see `MazeVectorEnv`. Tensors are moved to the device."""
        device = self.device
        if device is None:
            super().step_async(actions)
            return
        self._check_not_stepping("step_async()")
        is_dict = isinstance(actions, Mapping)
        self._sent = (
            {k: x.to(device) for k, x in actions.items()} if is_dict else actions.to(device)
        )
        self._is_stepping = True

    def _finish_step(self) -> StepBatch[Any]:
        if self.device is None:
            return super()._finish_step()
        batch: StepBatch[Any] = self.simulator.step(self._sent)
        self._obs = batch.obs
        return batch

    def _note_on_bounds(self) -> None:
        """Print a note; tensors are not checked, since reading them synchronises the device."""
        if self.device is None:
            super()._note_on_bounds()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the simulator, the observations and the calls; see `MazeVectorEnv`.

        Before the first reset, the state is empty.
        """
        if not self.can_be_restored:
            return super().state_dict()
        if self._obs is None:
            return {}
        obs = self._obs  # Cloned, because the simulator may overwrite them.
        clones = {k: x.clone() for k, x in obs.items()} if isinstance(obs, dict) else obs.clone()
        calls = calls_to_state(self.calls_made)
        state = {"simulator": self.simulator.state_dict(), "obs": clones, "calls": calls}
        return {**state, "root_seed": self.root_seed}

    def load_state_dict(
        self, state: dict[str, Any], *, allow_new_episodes: bool = False
    ) -> tuple[Any, Mask]:
        """Restore the simulator; see `MazeVectorEnv`."""
        if not self.can_be_restored:
            return super().load_state_dict(state, allow_new_episodes=allow_new_episodes)
        self.make_calls(calls_from(state.get("calls")))
        self.reset(seed=state.get("root_seed", 0))
        self.simulator.load_state_dict(state["simulator"])
        obs, device = state["obs"], self.device
        is_dict = isinstance(obs, dict)
        self._obs = {k: x.to(device) for k, x in obs.items()} if is_dict else obs.to(device)
        return self._obs, np.zeros(self.num_envs, np.bool_)

    def _reset_envs(
        self, seed: int, options: dict[str, Any] | None
    ) -> tuple[Columns, dict[str, Any]]:
        """Begin new episodes in all environments."""
        obs = self.simulator.reset_arrays(distinct_seeds(seed, 1)[0])
        self._before = self._columns(obs.items())
        return self._before, {}

    def _step_envs(self, actions: Columns) -> StepBatch[Array]:
        """Step all environments.

        Raises:
            EnvError: If an episode exceeds the allowed length.
        """
        before = self._before
        batch: StepBatch[Array] = self.simulator.step_arrays(actions)
        obs, final = cast("Any", batch.obs), cast("Any", batch.final_obs)
        batch.obs = self._before = self._columns(obs.items())
        ended = has_ended(batch.end)
        if self._limit and np.where(ended, 0, self._lengths + 1).max() >= self._limit:
            # The adapter cannot reset a single environment of a simulator.
            raise EnvError(
                f"an episode of {self.simulator.name} did not end within the {self._limit} steps "
                "of evaluation.max_episode_steps: simulators must end episodes themselves, for "
                "example after env.max_episode_steps; or set evaluation.n_episodes=0 "
                "evaluation.metric=train/episode_return_mean"
            )
        if ended.any():
            batch.final_obs = before if final is None else self._columns(final.items())
            batch.ends = self._ends(batch.columns, ended)
        batch.columns = {}
        return batch

    def _make_call(self, call: EnvCall) -> None:
        call.make(self.simulator.called)

    def own_states(self) -> Sequence[dict[str, Any] | None]:
        """Return the state of the simulator; see `MazeVectorEnv`."""
        return [self.simulator.state_dict()] if self.offers_own_state else []

    def load_own_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore the state of the simulator; see `MazeVectorEnv`."""
        for state in states:
            self.simulator.reset(0)
            self.simulator.load_state_dict(state)


# -- building --

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
