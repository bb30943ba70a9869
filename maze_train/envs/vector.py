"""What all vector environments of the package have in common."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from maze_train.envs.journal import Journal, read_state
from maze_train.errors import EnvError, ShapeError, SpaceError
from maze_train.seeding import draw_seed
from maze_train.spaces.describe import FlatView, flat_space

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from maze_train.envs.buffers import StepBuffers
    from maze_train.envs.journal import EpisodeRecord
    from maze_train.envs.stepping import StepReport

__all__ = ["MazeVectorEnv", "StepResult"]

Array: TypeAlias = npt.NDArray[Any]
ArrayTree: TypeAlias = "Array | dict[str, Array]"
StepResult: TypeAlias = "tuple[ArrayTree, npt.NDArray[np.float64], Array, Array, dict[str, Any]]"


class MazeVectorEnv(VectorEnv[Any, Any, Any]):
    """Base of vector environments that step into `StepBuffers`.

    Autoreset is SAME_STEP: where an episode ends, the returned observation is the first of the next
    episode, and `infos["final_obs"][i]` and `infos["final_info"]` belong to the last step of the
    old one, under the masks `infos["_final_obs"]` and `infos["_final_info"]`. Every episode starts
    from a seed of its own, see `maze_train.seeding.EpisodeSeeds`.

    Observations of Dict and Tuple spaces are flat dicts of arrays, see
    `maze_train.spaces.describe`. The returned observation arrays are the internal buffers and are
    overwritten by the next step, unless `copy` is set; final observations, rewards and flags are
    always copies.

    An episode that was given up in a step, because a worker process could not be repaired or a
    number that is not finite was skipped, is in `infos["lost"]`, a mask `[num_envs]` that is there
    only then. Such a row is no transition: `infos["ignored"][i]` is True as well, the reward is 0,
    the flags are False, and the returned observation is the first of the next episode.

    `state_dict` and `load_state_dict` let the running episodes go on in other objects: an episode
    is played again from its seed and its actions. An environment that offers `state_dict()` and
    `load_state_dict(state)` itself, as all of its wrappers have to, is not played again.

    Args:
        copy: Whether to return copies of the observations.
        step_infos: Whether to return the infos of every step and autoreset; else only those of
            reset and `final_info`.

    Attributes:
        env_observation_space: Observation space of one environment, as the environment gives it.
        single_observation_space: The same, flat.
        single_action_space: Action space of one environment, as the environment gives it.
        root_seed: The seed of the last reset, given or drawn; None before the first one.
        frame_stack: Observations that are stacks of the last n frames along their first dimension,
            newest last: n by key (the key of a lone observation is empty).
        monitored: Whether `final_info["episode"]` alone tells the ends, returns (`r`) and lengths
            (`l`) of episodes, because wrappers end them early or change rewards for training.
        worker_restarts: Number of worker processes that were started again; 0 without workers.
    """

    root_seed: int | None = None
    worker_restarts: int = 0
    frame_stack: dict[str, int]
    monitored: bool
    _buffers: StepBuffers
    _journal: Journal
    _action: FlatView
    _is_single: bool

    def __init__(self, *, copy: bool = False, step_infos: bool = False) -> None:
        self.copy = copy
        self.step_infos = step_infos

    def __enter__(self) -> MazeVectorEnv:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def can_be_restored(self) -> bool:
        """Whether the running episodes can be kept: not those of vector environments of others."""
        return hasattr(self, "_journal")

    def state_dict(self) -> dict[str, Any]:
        """Where every environment is, as plain values and arrays; between two calls only.

        It does not depend on how the environments are spread over processes.

        Returns:
            `root_seed` and, in `envs`, one dict per environment: the fields of
            `maze_train.envs.journal.EpisodeRecord`. No seed and no dicts before the first reset.

        Raises:
            EnvError: If the state is not known because the last call failed, or holds something
                else than plain values.
        """
        self._check_has_state("state_dict()")
        if self.root_seed is None:
            return {"root_seed": None, "envs": []}
        for i, own in enumerate(self._own_states()):
            if own is not None:
                self._journal.rebase(i, own)
        records = self._records(self._buffers.obs, self._buffers.rewards)
        envs = [record.to_dict(i) for i, record in enumerate(records)]
        return {"root_seed": self.root_seed, "envs": envs}

    def load_state_dict(
        self, state: dict[str, Any], *, allow_new_episodes: bool = False
    ) -> tuple[ArrayTree, npt.NDArray[np.bool_]]:
        """Put every environment where it was.

        Args:
            state: What `state_dict` returned, of as many environments of the same kind.
            allow_new_episodes: Whether an environment that does not do the same again begins its
                next episode instead.

        Returns:
            The observations to act on, [num_envs, ...], which mean nothing after a state from
            before the first reset; and which environments begin a new episode, [num_envs].

        Raises:
            EnvError: If the state does not fit, an environment raises, or it does not do the same
                again and must not begin a new episode.
        """
        self._check_has_state("load_state_dict()")
        buffers = self._buffers
        root, records = read_state(state, buffers.actions, buffers.obs)
        began: npt.NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self.root_seed = None
        if root is None:
            return self._observations(), began
        problems = self._restore(root, records, allow_new_episodes)
        if problems and not allow_new_episodes:
            raise EnvError(
                f"{problems[0][1]}: the environment does not do the same again from the same seed "
                "and actions; checkpoint.allow_new_episodes=true lets such environments begin new "
                "episodes"
            )
        self.root_seed = root
        self._journal.load(records)
        began[[i for i, _ in problems]] = True
        self._journal.ended(began.nonzero()[0].tolist())
        return self._observations(), began

    def _check_has_state(self, call: str) -> None:
        if self.closed:
            raise EnvError(f"{call} was called after close()")
        if not self.can_be_restored:
            raise EnvError(
                f"{call}: the running episodes of {type(self).__name__} can not be kept, because "
                "vector environments of others neither tell their state nor take one seed per "
                "episode: use env.backend=gymnasium"
            )

    def _own_states(self) -> Sequence[dict[str, Any] | None]:
        """What each environment tells of its own state."""
        raise NotImplementedError

    def _restore(
        self, root: int, records: Sequence[EpisodeRecord], allow_new_episodes: bool
    ) -> list[tuple[int, str]]:
        """Put the environments where their records say, see `EnvSlice.restore`."""
        raise NotImplementedError

    def _records(self, obs: Mapping[str, Array], rewards: Array) -> list[EpisodeRecord]:
        """What puts each environment where it is, or was when these were its last numbers."""
        return [self._journal.record_of(i, obs, rewards) for i in range(self.num_envs)]

    def _describe(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        metadata: Mapping[str, Any],
    ) -> None:
        """Set the public attributes that follow from one environment.

        Args:
            observation_space: Its observation space, as the environment gives it.
            action_space: Its action space.
            num_envs: Number of environments.
            metadata: Its metadata, see `maze_train.envs.wrappers.described_metadata`.
        """
        self.num_envs = num_envs
        self.metadata = {**metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.env_observation_space = observation_space
        self.single_observation_space = flat_space(observation_space)
        self.observation_space = batched(self.single_observation_space, num_envs)
        self.single_action_space = action_space
        self.action_space = batch_space(action_space, num_envs)
        self.frame_stack = fitting_stacks(observation_space, metadata.get("frame_stack", {}))
        self.monitored = bool(metadata.get("monitored", False))
        self._action = FlatView(action_space)
        self._is_single = not isinstance(self.single_observation_space, gymnasium.spaces.Dict)

    def _seed_for(self, seed: int | None) -> int:
        """The seed of a reset, drawn when none is given."""
        if seed is not None and (not isinstance(seed, (int, np.integer)) or seed < 0):
            raise SpaceError(f"reset(seed={seed!r}): expected an integer >= 0, or None")
        self.root_seed = draw_seed() if seed is None else int(seed)
        return self.root_seed

    def _put_actions(self, actions: Any) -> None:
        """Copy actions into the buffers.

        Raises:
            EnvError: If there was no reset before.
            ShapeError: If they do not have one row per environment, in the shape of the space.
            SpaceError: If they are floats where the space holds integers, or a part is missing.
        """
        if self.root_seed is None:
            raise EnvError("step() was called before the first reset(): call reset() first")
        parts = {"": actions} if self._action.is_single else actions
        for key, column in self._buffers.actions.items():
            if key not in parts:
                raise SpaceError(f"actions[{key!r}] is missing: got {sorted(parts)}")
            part = np.asarray(parts[key])
            name = f"actions[{key!r}]" if key else "actions"
            if part.shape != column.shape:
                raise ShapeError(f"{name} has shape {part.shape}, expected {column.shape}")
            if part.dtype.kind == "f" and column.dtype.kind != "f":
                raise SpaceError(f"{name} has dtype {part.dtype}, its space says {column.dtype}")
            column[...] = part

    def _observations(self) -> ArrayTree:
        """The observations to return."""
        columns = self._buffers.obs
        if self.copy:
            columns = {key: column.copy() for key, column in columns.items()}
        return columns[""] if self._is_single else columns

    def _step_result(self, report: StepReport | None) -> StepResult:
        """Keep what was done in the journal; returns what `step` returns."""
        buffers, journal = self._buffers, self._journal
        journal.record()
        if report is not None:
            journal.ended([i for i, _ in report.final], report.continuing)
            journal.ended(report.lost)
        return (
            self._observations(),
            buffers.rewards.copy(),
            buffers.terminated.copy(),
            buffers.truncated.copy(),
            self._infos(report) if report is not None else {},
        )

    def _infos(self, report: StepReport) -> dict[str, Any]:
        """Infos in gymnasium's form for SAME_STEP."""
        infos: dict[str, Any] = {}
        final_columns = self._buffers.final_obs
        for i, info in report.final:
            final_obs: Any = {key: column[i].copy() for key, column in final_columns.items()}
            if self._is_single:
                final_obs = final_obs[""]
            infos = self._add_info(infos, {"final_obs": final_obs, "final_info": info}, i)
        for i, info in report.ordinary:
            infos = self._add_info(infos, info, i)
        if report.lost:
            lost = np.zeros(self.num_envs, np.bool_)
            lost[report.lost] = True
            infos |= {"lost": lost, "ignored": lost.copy()}
        return infos

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        """Gymnasium's, but values of one key may differ in type and shape."""
        for key, value in env_info.items():
            if key in vector_infos and key != "final_obs":
                vector_infos[key] = able_to_hold(vector_infos[key], value)
        return super()._add_info(vector_infos, env_info, env_num)


def fitting_stacks(space: gymnasium.Space[Any], declared: Mapping[str, int]) -> dict[str, int]:
    """The declared stacks of frames whose leaf really has n as its first dimension."""
    shapes = {key: leaf.shape or () for key, leaf in FlatView(space).leaves.items()}
    return {key: n for key, n in declared.items() if shapes.get(key, ())[:1] == (n,)}


def batched(space: gymnasium.Space[Any], n: int) -> gymnasium.Space[Any]:
    """The space of n values, with the order of the keys kept."""
    if not isinstance(space, gymnasium.spaces.Dict):
        return batch_space(space, n)
    parts = OrderedDict((key, batch_space(part, n)) for key, part in space.spaces.items())
    return gymnasium.spaces.Dict(parts)


def able_to_hold(column: Any, value: Any) -> Any:
    """`column` itself, or its content in an array with a dtype that can hold `value` in a row.

    Gymnasium takes dtype and shape from the first value. A later 0.5 would become 0 in a column of
    integers, and an array of another length would end the run.
    """
    if isinstance(column, dict) or isinstance(value, dict) or column.dtype == object:
        return column
    array = np.asarray(value)
    if array.dtype.kind in "biufc" and column.dtype.kind in "biufc":
        if array.shape == column.shape[1:]:
            wide = np.result_type(column.dtype, array.dtype)
            return column if wide == column.dtype else column.astype(wide)
    elif array.dtype == column.dtype:
        return column
    rows = np.full(len(column), None, dtype=object)
    for i, row in enumerate(column):
        rows[i] = row
    return rows
