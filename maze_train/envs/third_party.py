"""Adapters of third-party vector environments to `MazeVectorEnv`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from gymnasium.vector import VectorEnv

from maze_train.core.errors import ConfigError, EnvError, SpaceError
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
from maze_train.envs import backends, faults
from maze_train.envs.batch import episode_end, required_keys
from maze_train.envs.building import close_all, closed_on_error
from maze_train.envs.calls import CallableSingleEnvs, EnvCall
from maze_train.envs.config import EnvConfig
from maze_train.envs.facade import info_of, infos_by_key
from maze_train.envs.lives import AtariLives
from maze_train.envs.monitoring import metadata_of
from maze_train.envs.simulated import simulator_of
from maze_train.envs.types import Mask, Space
from maze_train.envs.vector import (
    FILL_MASKS,
    Array,
    ArrayTree,
    MazeVectorEnv,
    StepBuffers,
    converted,
    zeroed_columns,
)
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
            Atari episode, and rewards are replaced by their sign.
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
    backends.check_settings(config)
    settings: dict[str, Any] = {"empty_mask": config.empty_mask, "info_keys": info_keys}
    settings |= {"copy": False, "step_infos": False}
    if config.backend == "tensor":
        simulator = simulator_of(config, num_envs, device, max_episode_steps)
        with closed_on_error([simulator]):
            return SimulatorVectorEnv(simulator, max_episode_steps, **settings)
    build = backends.build_native if config.backend == "native" else backends.build_envpool
    backend = build(config, num_envs, num_threads, max_episode_steps)
    with closed_on_error([backend.env]):
        return third_party_env(
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

    mode = AutoresetMode.SAME_STEP

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
        self.metadata["autoreset_mode"] = self.autoreset_mode = self.mode
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


class SameStepVectorEnv(ThirdPartyVectorEnv):
    """Adapter of Gymnasium vector environments with autoreset mode SAME_STEP."""

    def __init__(self, env: VectorEnv[Any, Any, Any], **settings: Any) -> None:
        name = type(env.unwrapped).__name__
        spaces = env.single_observation_space, env.single_action_space
        super().__init__(name, env.num_envs, spaces, metadata_of(env), **settings)
        self._env, self.render_mode = env, env.render_mode

    def _reset_envs(
        self, seed: int, options: dict[str, Any] | None
    ) -> tuple[Columns, dict[str, Any]]:
        """Begin new episodes in all environments."""
        try:
            obs, infos = self._env.reset(seed=backends.seed_for(self._env, seed), options=options)
        except BaseException as error:
            raise self._fault("reset()", error) from error
        return self._columns(self._observation.read(obs)), infos_by_key(infos, self.num_envs)

    def _step_envs(self, actions: Columns) -> StepBatch[Array]:
        """Step all environments, and convert the results."""
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
        self._finish(batch, columns, infos)
        return batch

    def _finish(self, batch: StepBatch[Array], columns: Columns, infos: Mapping[str, Any]) -> None:
        """Add episode ends to a step, before the environment overwrites the infos."""
        ended = has_ended(batch.end)
        if ended.any():
            batch.final_obs = self._given_final_obs(infos, ended)
            batch.ends = self._ends(infos.get("final_info", {}), ended)

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
            backends.IN_USE.discard(env)
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


class NextStepVectorEnv(SameStepVectorEnv):
    """Adapter of Gymnasium vector environments with autoreset mode NEXT_STEP.

    The step after the end of an episode only resets the environment. The action of this step is
    ignored, and the results are arbitrary.
    """

    mode = AutoresetMode.NEXT_STEP

    def _finish(self, batch: StepBatch[Array], columns: Columns, infos: Mapping[str, Any]) -> None:
        """Add episode ends to a step, and mark the environments that were only reset."""
        batch.rewards[self._resetting] = 0.0
        batch.end[self._resetting] = RESET_ONLY
        batch.has_gaps = bool(self._resetting.any())
        self._resetting = has_ended(batch.end)
        batch.final_obs, batch.ends = columns, self._ends(infos, self._resetting)

    def _following(self, columns: Columns, end: Array) -> Columns:
        """Return the final observations; non-finite terminal observations are replaced by zeros.

        Networks also process terminal observations. Multiplying the unused results by a discount or
        weight of 0 would not remove NaN.
        """
        bad = is_terminated(end) & faults.non_finite_rows(columns)
        if bad.any():
            columns = {key: column.copy() for key, column in columns.items()}
            for column in columns.values():
                column[bad] = 0 if column.dtype.kind == "f" else column[bad]
        return columns


class DisabledVectorEnv(SameStepVectorEnv):
    """Adapter of Gymnasium vector environments without autoreset; resets ended episodes.

    Args:
        env: The environment.
        max_episode_steps: Maximum length of an episode, >= 1; None disables truncation.
        **settings: See `ThirdPartyVectorEnv`.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], max_episode_steps: int | None = None, **settings: Any
    ) -> None:
        super().__init__(env, **settings)
        self._limit = max_episode_steps

    def _finish(self, batch: StepBatch[Array], columns: Columns, infos: Mapping[str, Any]) -> None:
        """Apply the time limit to a step, and add episode ends."""
        if self._limit is not None:
            batch.end[(batch.end == RUNNING) & (self._lengths + 1 >= self._limit)] = TRUNCATED
        batch.ends = self._ends(infos, has_ended(batch.end))
        if batch.ends:  # The reset may overwrite the memory of the observations.
            batch.final_obs = {key: column.copy() for key, column in columns.items()}

    def _following(self, columns: Columns, end: Array) -> Columns:
        """Reset the environments whose episodes ended; return the next observations."""
        ended = has_ended(end)
        columns = {key: column.copy() for key, column in columns.items()}
        try:
            obs, _ = self._env.reset(options={"reset_mask": ended.copy()})
        except BaseException as error:
            raise self._fault("reset() with a reset_mask", error) from error
        for key, column in self._columns(self._observation.read(obs)).items():
            columns[key][ended] = column[ended]
        return columns


class SimulatorVectorEnv(ThirdPartyVectorEnv):
    """Adapter of a simulator to `MazeVectorEnv`.

    Args:
        simulator: The simulator; closed together with the adapter.
        max_episode_steps: Maximum allowed length of an episode; None disables the check.
        **settings: See `ThirdPartyVectorEnv`.
    """

    def __init__(
        self, simulator: Simulator, max_episode_steps: int | None = None, **settings: Any
    ) -> None:
        spaces = simulator.observation_space, simulator.action_space
        super().__init__(simulator.name, simulator.num_envs, spaces, {}, **settings)
        self._closing.callback(simulator.close)
        self.simulator = simulator
        self.offers_own_state = simulator.has_lasting_state
        self._limit = max_episode_steps
        self._before: Columns = {}

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


def third_party_env(
    env: VectorEnv[Any, Any, Any], *, max_episode_steps: int | None = None, **settings: object
) -> ThirdPartyVectorEnv:
    """Adapt any Gymnasium vector environment to `MazeVectorEnv`.

    The behaviour at the end of an episode depends on the autoreset mode of the environment:

    * SAME_STEP: as described in `MazeVectorEnv`.
    * NEXT_STEP: the returned observation is the final observation of the episode. The next step
      only resets the environment: the action is ignored, the reward is 0, the flags are False, the
      returned observation is the first of the next episode, and `infos["ignored"][i]` is True. Rows
      with `ignored` are not transitions. The key exists only if a row is ignored.
    * DISABLED: the adapter resets ended environments in the same step, as in SAME_STEP.

    Args:
        env: The vector environment. `metadata["autoreset_mode"]` declares the autoreset mode.
            Closing the adapter closes the environment.
        max_episode_steps: Maximum length of an episode, >= 1; allowed only in mode DISABLED.
        **settings: See `ThirdPartyVectorEnv`.

    Raises:
        ConfigError: If `max_episode_steps` is given and the mode is not DISABLED.
        EnvError: If the environment declares no autoreset mode.
        SpaceError: If a space cannot be flattened.
    """
    mode = backends.autoreset_mode(env)
    if mode is AutoresetMode.DISABLED:
        return DisabledVectorEnv(env, max_episode_steps, **settings)
    if max_episode_steps is not None:
        raise ConfigError(
            "env.max_episode_steps",
            f"{type(env.unwrapped).__name__} resets itself (mode {mode.value}) and does not accept "
            "max_episode_steps: limit the episodes within the environment, and set this to null "
            "and evaluation.max_episode_steps to 0, or use env.backend=gymnasium",
            max_episode_steps,
        )
    kind = SameStepVectorEnv if mode is AutoresetMode.SAME_STEP else NextStepVectorEnv
    return kind(env, **settings)
