"""Vector environments whose running episodes can go on in other objects."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.envs.info_masks import IGNORED_MASK, ignores_mask
from maze_train.envs.journal import Journal, read_state
from maze_train.envs.vector import MazeVectorEnv
from maze_train.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from maze_train.envs.journal import EpisodeRecord
    from maze_train.envs.stepping import StepReport
    from maze_train.envs.vector import Array, ArrayTree, StepResult

__all__ = ["JournaledVectorEnv"]


class JournaledVectorEnv(MazeVectorEnv):
    """Base of vector environments of single environments, which are stepped by `EnvSlice`.

    A journal keeps the actions of the running episodes: an episode is played again from its seed
    and its actions. An environment that offers `state_dict()` and `load_state_dict(state)` itself,
    as all of its wrappers have to, is not played again.
    """

    can_be_restored = True
    _journal: Journal

    def state_dict(self) -> dict[str, Any]:
        """State of every environment, see `MazeVectorEnv.state_dict`.

        Returns:
            `root_seed` and, in `envs`, one dict per environment: the fields of
            `maze_train.envs.journal.EpisodeRecord`. No seed and no dicts before the first reset.

        Raises:
            EnvError: If the state is not known because the last call failed, or holds something
                else than plain values, or a step is on its way.
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
        """Put every environment where it was, see `MazeVectorEnv.load_state_dict`."""
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
        self._check_not_stepping(call)

    @abstractmethod
    def _own_states(self) -> Sequence[dict[str, Any] | None]:
        """State that each environment gives of itself."""

    @abstractmethod
    def _restore(
        self, root: int, records: Sequence[EpisodeRecord], allow_new_episodes: bool
    ) -> list[tuple[int, str]]:
        """Put the environments where their records say, see `EnvSlice.restore`."""

    def _records(self, obs: Mapping[str, Array], rewards: Array) -> list[EpisodeRecord]:
        """Records that put environments back where they are, or were with these numbers."""
        return [self._journal.record_of(i, obs, rewards) for i in range(self.num_envs)]

    def _step_result(self, report: StepReport | None) -> StepResult:
        """Record the step in the journal; returns the result of `step`."""
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
        if self.tell is not None and ignores_mask(
            infos, self.env_observation_space, self.single_action_space
        ):
            self.tell(IGNORED_MASK)
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
