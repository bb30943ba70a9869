"""Presents vector environments of other packages as vector environments of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector import VectorEnv

from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.step_end import RESET_ONLY, TERMINATED, TRUNCATED, end_codes
from maze_train.envs.backends import (
    IN_USE,
    autoreset_mode,
    build_envpool,
    build_native,
    check_settings,
    seed_for,
)
from maze_train.envs.batch import EpisodeEnd, Mask, StepBatch, asked_keys, episode_end
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import simulator_of
from maze_train.envs.faults import (
    NonFiniteError,
    are_finite,
    check_finite,
    check_finite_reward,
    explained,
    non_finite_rewards,
    non_finite_rows,
)
from maze_train.envs.monitoring import metadata_of
from maze_train.envs.stepped import close_all, closed_on_error
from maze_train.envs.vector import (
    FILL_MASKS,
    Array,
    ArrayTree,
    MazeVectorEnv,
    StepBuffers,
    converted,
    zeroed_columns,
)
from maze_train.spaces.agents import AGENT_RETURNS
from maze_train.spaces.autoreset import AutoresetMode
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import mask_layout

Columns: TypeAlias = dict[str, Array]


FINAL = ("final_obs", "_final_obs", "final_info", "_final_info")
"""Keys of gymnasium's infos about episodes that ended."""


def info_of(infos: Any, i: int, num_envs: int) -> dict[str, Any]:
    """Return the info of environment i from gymnasium's infos.

    Args:
        infos: One array per key, with the mask of environments that have a value under the key
            after `_`, nested for dicts; or one dict for each environment.
        i: Index of the environment.
        num_envs: Number of environments.
    """
    if not isinstance(infos, Mapping):
        return dict(infos[i]) if isinstance(infos[i], Mapping) else {}
    masks = {
        key: value
        for key, value in infos.items()
        if str(key)[:1] == "_" and str(key)[1:] in infos and is_mask(value, num_envs)
    }
    found = {}
    for key, value in infos.items():
        is_given = masks.get(f"_{key}")
        if key in masks or (is_given is not None and not is_given[i]):
            continue
        if isinstance(value, Mapping):
            found[key] = info_of(value, i, num_envs)
        else:
            is_column = np.shape(value)[:1] == (num_envs,)
            found[key] = value[i] if is_column else value
    return found


def is_mask(value: Any, num_envs: int) -> bool:
    """Whether a value of gymnasium's infos has the form of a mask of environments."""
    return getattr(value, "dtype", None) == np.bool_ and value.shape == (num_envs,)


def without_bad_rows(columns: Columns, terminated: Mask) -> Columns:
    """Zero terminal observations that are not finite: networks read them, no one uses the result.

    A product with a discount or a weight of 0 would keep NaN.
    """
    bad = terminated & non_finite_rows(columns)
    if not bad.any():
        return columns
    return {
        key: np.where(_broad(bad, column), 0, column) if column.dtype.kind == "f" else column
        for key, column in columns.items()
    }


def _broad(rows: Mask, column: Array) -> Mask:
    """A mask of rows in a form that broadcasts with a column."""
    return rows.reshape(-1, *[1] * (column.ndim - 1))


def make_foreign_env(
    config: EnvConfig,
    num_envs: int,
    *,
    training: bool,
    num_threads: int = 0,
    max_episode_steps: int | None = None,
    device: Any = "cpu",
    info_keys: Sequence[str] | None = None,
) -> MazeVectorEnv:
    """Build the vector environment of a configuration whose backend is not `gymnasium`.

    Args:
        config: Settings of the environment.
        num_envs: Number of environments.
        training: Whether it is for training, where on Atari life losses end episodes and rewards
            are signs.
        num_threads: Threads that step the environments, where the backend has such; 0: it decides.
        max_episode_steps: Steps after which an episode is truncated at the latest, >= 1; a limit of
            the environment's own that is smaller stays.
        device: Device of a simulator, unless the settings name one.
        info_keys: See `ForeignVectorEnv`.

    Raises:
        ConfigError: If the settings name no such environment, or do not fit its backend.
        EnvError: If building the environment failed, or it does not say how it resets.
        MissingExtraError: If a package that it needs is not installed.
        SpaceError: If a space cannot be flattened.
    """
    check_settings(config)
    if config.backend == "tensor":
        from maze_train.simulators.simulator import SimulatorVectorEnv  # needs PyTorch

        simulator = simulator_of(config, num_envs, device, max_episode_steps)
        with closed_on_error([simulator]):
            vector = SimulatorVectorEnv(simulator, max_episode_steps)
            return ForeignVectorEnv(
                vector,
                empty_mask=config.empty_mask,
                copy=False,
                step_infos=False,
                info_keys=info_keys,
            )
    build = build_native if config.backend == "native" else build_envpool
    backend = build(config, num_envs, num_threads, max_episode_steps)
    with closed_on_error([backend.env]):
        return ForeignVectorEnv(
            backend.env,
            atari_training=training and backend.is_atari,
            frame_stack=backend.frame_stack,
            max_episode_steps=backend.limit_left,
            empty_mask=config.empty_mask,
            copy=False,
            step_infos=False,
            info_keys=info_keys,
        )


class ForeignVectorEnv(MazeVectorEnv):
    """Presents any vector environment of gymnasium as a `MazeVectorEnv`.

    What happens where an episode ends depends on the autoreset mode of the environment:

    * SAME_STEP: passed through, as described at `MazeVectorEnv`.
    * NEXT_STEP: the returned observation is the last one of the episode. The next step only resets
      this environment: its action is ignored, its reward is 0, its flags are False, the returned
      observation is the first of the next episode, and `infos["ignored"][i]` is True. Such a row is
      not a transition. The key is there only when a row is ignored.
    * DISABLED: environments whose episodes ended are reset here, which gives SAME_STEP.

    In `atari_training` the loss of a life ends an episode (Mnih et al. 2015, Methods): `terminated`
    is set, and the game continues, so the next episode begins with the frame that the last one
    ended with. Rewards are their signs. `infos["final_info"]["episode"]` has the raw return `r` and
    the length `l` of whole games, under the mask `infos["final_info"]["_episode"]`.

    Args:
        env: The vector environment, with its autoreset mode in `metadata["autoreset_mode"]`. It is
            closed with this one.
        atari_training: Whether life losses end episodes and rewards are signs; needs
            `infos["lives"]`.
        frame_stack: Number of stacked frames by leaf of the observation; None: what the metadata of
            the environment says.
        max_episode_steps: Steps after which an episode is truncated, >= 1; mode DISABLED only.
        empty_mask: See `EnvConfig.empty_mask`.
        copy: Whether to return copies of the observations.
        step_infos: Whether to return the infos of every step.
        info_keys: Keys of the numbers to keep of last infos; None: keep them as they are.

    Attributes:
        mode: Autoreset mode of the environment.

    Raises:
        ConfigError: If `max_episode_steps` is given for another mode.
        EnvError: If the environment does not say how it resets.
        SpaceError: If a space cannot be flattened.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        atari_training: bool = False,
        frame_stack: Mapping[str, int] | None = None,
        max_episode_steps: int | None = None,
        empty_mask: str = "error",
        copy: bool = True,
        step_infos: bool = True,
        info_keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(copy=copy, step_infos=step_infos)
        self.mode = autoreset_mode(env)
        self._follows_lives = atari_training
        self.max_episode_steps = max_episode_steps
        if max_episode_steps is not None and self.mode is not AutoresetMode.DISABLED:
            raise ConfigError(
                "env.max_episode_steps",
                f"{type(env.unwrapped).__name__} resets itself (mode {self.mode.value}) and takes "
                "no max_episode_steps: let it limit its episodes, and set this to null and "
                "evaluation.max_episode_steps to 0, or use env.backend=gymnasium",
                max_episode_steps,
            )
        self._env = env
        self.simulator = getattr(env, "simulator", None)
        self.offers_own_state = self.simulator is not None and self.simulator.has_lasting_state
        n = env.num_envs
        metadata = {**metadata_of(env), "monitored": atari_training}
        if frame_stack is not None:
            metadata["frame_stack"] = frame_stack
        self._describe(env.single_observation_space, env.single_action_space, n, metadata)
        if self.mode is AutoresetMode.NEXT_STEP:
            self.metadata["autoreset_mode"] = self.mode
        self.render_mode = env.render_mode
        self._keys = None if info_keys is None else asked_keys(info_keys, self.agents)
        self._names: set[str] | None = None
        if self._keys is not None:
            names = {key.partition("/")[0] for key in self._keys} | {*self._keys, AGENT_RETURNS}
            self._names = names | {f"_{name}" for name in names}
        self._observation = FlatView(env.single_observation_space)
        self._masks = mask_layout(env.single_observation_space, env.single_action_space)
        actions = zeroed_columns(self._action, n)
        self._buffers = StepBuffers({}, {}, actions, np.zeros(n), np.zeros(n, np.uint8))
        self._fills_masks = empty_mask == "all_legal"
        self._resetting = np.zeros(n, np.bool_)
        self._returns, self._lengths = np.zeros(n), np.zeros(n, np.int64)
        self._lives = np.zeros(n, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ArrayTree, dict[str, Any]]:
        """Start a run of episodes.

        Args:
            seed: Names the run of episodes, an integer >= 0; None draws one. Environments that take
                a seed each get seeds that have nothing in common.
            options: Passed to the reset of the environment, not to later autoresets.

        Returns:
            The first observations, [num_envs, ...], and the infos of the reset.

        Raises:
            EnvError: If the environment raises or returns something invalid.
        """
        if self.closed:
            raise EnvError("reset() was called after close()")
        self._check_not_stepping("reset()")
        root = self._seed_for(seed, options)
        try:
            obs, infos = self._env.reset(seed=seed_for(self._env, root), options=options)
        except BaseException as error:
            raise self._fault("reset()", error) from error
        columns = self._columns(obs)
        self._resetting = np.zeros(self.num_envs, np.bool_)
        self._returns[:] = 0.0
        self._lengths[:] = 0
        if self._follows_lives:
            self._lives = self._read_lives(infos)
        self._check_finite(columns)
        self._buffers.obs.update(columns)
        self._check_masks()
        return self._observations(), dict(infos)

    def _finish_step(self) -> StepBatch:
        columns, rewards, terminated, truncated, infos = self._step_env()
        resetting = self._resetting
        has_gaps = bool(resetting.any())
        if has_gaps:
            rewards[resetting] = 0.0  # Whatever it was: no one learns from it.
            terminated &= ~resetting
            truncated &= ~resetting
        self._lengths += ~resetting
        self._returns += rewards
        if self.max_episode_steps is not None:
            truncated |= self._lengths >= self.max_episode_steps
        ended, end = terminated | truncated, end_codes(terminated, truncated)
        if has_gaps:
            end[resetting] = RESET_ONLY
        same_step = self.mode is AutoresetMode.SAME_STEP
        # Else the rows of episodes that ended are their last ones; terminal ones are not used.
        used = None if same_step or self.keeps_terminal_obs else ~terminated
        self._check_finite(columns, used, rewards)
        self._resetting = ended if self.mode is AutoresetMode.NEXT_STEP else self._resetting
        lost = self._lost_lives(infos, ended | resetting) if self._follows_lives else None
        ends: list[EpisodeEnd] = []
        final = None
        if ended.any() or (lost is not None and lost.any()):
            # Before the reset: the environment may use the memory of its infos again.
            ends = self._ends(infos, ended, lost)
            final = self._final_obs(columns, infos, ended)
            if same_step:
                self._check_final(final, ended if self.keeps_terminal_obs else end == TRUNCATED)
            columns = self._start_episodes(columns, ended)
            if self.mode is AutoresetMode.NEXT_STEP:
                columns = without_bad_rows(columns, terminated)
        if lost is not None:
            rewards = np.sign(rewards)
            end[lost] = TERMINATED
        self._buffers.obs.update(columns)
        self._check_masks()
        batch = StepBatch(self._observations(), rewards, end, ends=ends, has_gaps=has_gaps)
        if final is not None:
            batch.final_obs = final[""] if self._is_single else final
        if self.step_infos:
            batch.columns = {key: value for key, value in infos.items() if key not in FINAL}
        return batch

    def own_states(self) -> Sequence[dict[str, Any] | None]:
        """Return the state of the simulator, see `MazeVectorEnv`."""
        return [self.simulator.state_dict()] if self.offers_own_state else []

    def load_own_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore the state of the simulator, see `MazeVectorEnv`."""
        for state in states:
            self.simulator.reset(0)
            self.simulator.load_state_dict(state)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment, and let go of it: some end their threads only then."""
        if hasattr(self, "_env"):
            env = self._env
            del self._env
            IN_USE.discard(env)
            self.root_seed = None
            close_all([env])

    def _step_env(self) -> tuple[Columns, Array, Array, Array, dict[str, Any]]:
        """Step the environment, and convert the results to our types."""
        taken = {key: column.copy() for key, column in self._buffers.actions.items()}
        try:
            obs, rewards, terminated, truncated, infos = self._env.step(self._action.build(taken))
        except BaseException as error:
            raise self._fault("step()", error) from error
        rows: list[Array] = [
            np.array(rewards, np.float64),
            np.array(terminated, np.bool_),
            np.array(truncated, np.bool_),
        ]
        if any(row.shape != (self.num_envs,) for row in rows):
            shapes = ", ".join(str(row.shape) for row in rows)
            raise EnvError(
                f"{type(self._env.unwrapped).__name__}.step() returned rewards and flags of shapes "
                f"{shapes}: expected ({self.num_envs},) each"
            )
        return self._columns(obs), rows[0], rows[1], rows[2], infos

    def _columns(self, obs: Any) -> Columns:
        """Batched observations by leaf, in the dtypes of the space."""
        columns: Columns = {}
        for key, value in self._observation.read(obs):
            leaf = self._observation.leaves[key]
            shape, dtype = (self.num_envs, *(leaf.shape or ())), leaf.dtype
            if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
                value = converted(key, value, shape, np.dtype(dtype)).astype(dtype)
            columns[key] = value
        return columns

    def _read_lives(self, infos: Mapping[str, Any]) -> Array:
        if "lives" not in infos:
            raise EnvError(
                f"{type(self._env).__name__} does not report infos['lives'], which training on "
                f"Atari needs: got {sorted(infos)}"
            )
        return np.array(infos["lives"])

    def _lost_lives(self, infos: Mapping[str, Any], excluded: Mask) -> Mask:
        """Mask of the environments where a life was lost while the game continues."""
        before, self._lives = self._lives, self._read_lives(infos)
        # At 0 lives some games show a few more frames before they end, which then is the end.
        lost: Mask = (self._lives < before) & (self._lives > 0) & ~excluded
        return lost

    def _ends(self, infos: dict[str, Any], ended: Mask, lost: Mask | None) -> list[EpisodeEnd]:
        """Read what is needed of the episodes that ended, and of those with a lost life."""
        same_step = self.mode is AutoresetMode.SAME_STEP
        done = ended if lost is None else ended | lost
        given = infos.get("final_info", {}) if same_step else infos
        if self._names is not None and isinstance(given, Mapping):
            given = {key: given[key] for key in self._names & given.keys()}
        ends = []
        for i in np.flatnonzero(done).tolist():
            info = info_of(given, i, self.num_envs) if ended[i] else {}
            end = episode_end(i, info, self._keys, self.agents)
            if self._follows_lives and ended[i]:
                end.counted = float(self._returns[i]), int(self._lengths[i])
            ends.append(end)
        return ends

    def _final_obs(self, columns: Columns, infos: Mapping[str, Any], ended: Mask) -> Columns:
        """The last observations of episodes that ended, and of those with a lost life."""
        if self.mode is AutoresetMode.DISABLED:  # its reset may use the memory again
            return {key: column.copy() for key, column in columns.items()}
        if self.mode is AutoresetMode.NEXT_STEP or not ended.any():
            return columns
        final = self._given_final_obs(infos, ended)
        if self._follows_lives:
            for key, column in final.items():
                final[key] = np.where(_broad(ended, column), column, columns[key])
        return final

    def _given_final_obs(self, infos: Mapping[str, Any], ended: Mask) -> Columns:
        """`infos["final_obs"]` by leaf; rows of episodes that continue mean nothing."""
        given = infos.get("final_obs")
        rows_given = isinstance(given, np.ndarray) and given.dtype == object
        if given is None or (rows_given and any(given[i] is None for i in np.flatnonzero(ended))):
            raise EnvError(
                f"{type(self._env.unwrapped).__name__} declares the autoreset mode SameStep, but "
                "infos['final_obs'] is missing where an episode ended: got infos "
                f"{sorted(infos)}"
            )
        if not rows_given:
            return self._columns(given)
        columns = zeroed_columns(self._observation, self.num_envs)
        for i in np.flatnonzero(ended):
            for key, value in self._observation.read(given[i]):
                column = columns[key]
                column[i] = converted(key, value, column.shape[1:], column.dtype)
        return columns

    def _start_episodes(self, columns: Columns, ended: Mask) -> Columns:
        """The observations to continue from; counts start over."""
        self._returns[ended] = 0.0
        self._lengths[ended] = 0
        if self.mode is AutoresetMode.DISABLED and ended.any():
            columns = {key: column.copy() for key, column in columns.items()}
            try:
                obs, _ = self._env.reset(options={"reset_mask": ended.copy()})
            except BaseException as error:
                raise self._fault("reset() with a reset_mask", error) from error
            for key, column in self._columns(obs).items():
                columns[key][ended] = column[ended]
            self._check_finite(columns, ended)
        return columns

    def _check_finite(
        self, columns: Columns, rows: Mask | None = None, rewards: Array | None = None
    ) -> None:
        """Refuse NaN and infinities in observations of these rows (None: all), and in rewards."""
        floats = [column for column in columns.values() if column.dtype.kind == "f"]
        bad_rewards = np.False_ if rewards is None else non_finite_rewards(rewards)
        if not bad_rewards.any() and all(are_finite(column).all() for column in floats):
            return
        bad = non_finite_rows(columns)
        if rows is not None:
            bad &= rows
        for i in (bad | bad_rewards).nonzero()[0].tolist():
            try:
                if rewards is not None:
                    check_finite_reward(float(rewards[i]))
                check_finite({key: column[i] for key, column in columns.items()})
            except NonFiniteError as error:
                raise self._failed(i, error) from error

    def _check_final(self, columns: Columns, kept: Mask) -> None:
        """Refuse NaN and infinities in the last observations of these rows."""
        for i in kept.nonzero()[0].tolist():
            try:
                check_finite(
                    {key: column[i] for key, column in columns.items()}, "final observation"
                )
            except NonFiniteError as error:
                raise self._failed(i, error) from error

    def _check_masks(self) -> None:
        """Refuse observations to act on without a legal action."""
        if self._masks is None:
            return
        if self._fills_masks:
            self._buffers.obs.update(self._masks.filled(self._buffers.obs))
            return
        acting = np.flatnonzero(~self._resetting)
        obs = {leaf: self._buffers.obs[leaf][acting] for leaf in self._masks.leaves}
        row = self._masks.first_illegal_row(obs) if len(acting) else None
        if row is not None:
            problem = self._masks.illegal_part({leaf: rows[row] for leaf, rows in obs.items()})
            raise self._failed(acting[row], f"{problem}{FILL_MASKS}")

    def _failed(self, i: int, problem: object) -> EnvError:
        when = f"environment {self.first_env + i} failed at step {self._lengths[i]} of its episode"
        return EnvError(f"{when}: {problem}")

    def _fault(self, where: str, error: BaseException) -> EnvError:
        name = type(self._env.unwrapped).__name__
        return EnvError(f"{where} of {name} failed: {explained(error)}")
