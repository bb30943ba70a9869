"""One interface to learners, in this process and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from maze_train.learner.config import LearnerGroupConfig
from maze_train.learner.modes import torch_threads
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.targets import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from maze_train.events import Statistics
    from maze_train.learner.config import Progress
    from maze_train.learner.learner import Learner
    from maze_train.learner.modules import Chosen, ModuleSource
    from maze_train.learner.others import OtherLearners
    from maze_train.types import Tensor
    from maze_train.workers.places import Place


Result = TypeVar("Result")

OTHER_LEARNERS = "maze_train.learner.others.OtherLearners"
"""Found when there are several, since one learner needs nothing of it."""


class LearnerGroup:
    """The learners of a trainer: one in this process, and further ones in processes of their own.

    All get the same experience, and have the same weights and the same state to the bit. Each
    computes a part of the values of experience and every n-th sample of a minibatch; one exchange
    per gradient step sums the gradients (see `Shard`). The first learner, whose modules act and are
    saved, is that of this process. The others are started at the first call that needs them.

    A learner that dies or hangs is started again where `place` says so: all learners then go on
    from before the update.

    Args:
        learner: The first learner.
        settings: Settings of the group; a number: so many learners, and defaults.
        place: Settings of processes, where they are `LocalProcesses`; else those have their
            defaults.

    Raises:
        ConfigError: If the modules can not be trained by several learners, or there are too few
            GPUs.
    """

    def __init__(
        self,
        learner: Learner[Any, Any, Any],
        settings: LearnerGroupConfig | int = 1,
        place: Place | None = None,
    ) -> None:
        if isinstance(settings, int):
            settings = LearnerGroupConfig(n_learners=settings)
        self.settings = settings
        self._learner = learner
        self._others: OtherLearners | None = None
        if settings.n_learners > 1:
            self._others = locate(OTHER_LEARNERS)(learner, settings, place)

    @property
    def n_learners(self) -> int:
        """Number of learners."""
        return self.settings.n_learners

    @property
    def weights_seq_no(self) -> int:
        """Updates that the weights have seen."""
        return self._learner.weights_seq_no

    def update(self, experience: Any, progress: Progress) -> Statistics:
        """Learn from experience; see `Learner.update`.

        Raises:
            WorkerError: If a learner died or hung, and is not to be started again.
        """
        with torch_threads(self.settings.n_cpus_per_learner):
            if self._others is None:
                return self._learner.update(experience, progress)
            return self._others.update(experience, progress)

    def foreach_learner(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """The results of a function of each learner, which changes all of them alike.

        Raises:
            WorkerError: If a learner died or hung, and is not to be started again.
        """
        if self._others is None:
            return [function(self._learner)]
        return self._others.apply(function)

    def shutdown(self) -> None:
        """End the other learners; calling it again does nothing. They start again when needed."""
        if self._others is not None:
            self._others.shutdown()

    # -- modules, state --------------------------------------------------------------------------

    def add_module(
        self,
        module_id: str,
        module: ModuleSource,
        *,
        frozen: bool = False,
        like: str = DEFAULT_MODULE,
    ) -> nn.Module:
        """Add a module to every learner; see `Learner.add_module`.

        Raises:
            ConfigError: As there, or if several learners can not train it.
        """
        added = self._learner.add_module(module_id, module, frozen=frozen, like=like)
        if self._others is not None:
            try:
                self._others.check_modules()
            except Exception:
                self._learner.remove_module(module_id)
                raise
        self._change()
        return added

    def remove_module(self, module_id: str) -> nn.Module:
        """Remove a module from every learner, and return that of the first one."""
        removed = self._learner.remove_module(module_id)
        self._change()
        return removed

    @property
    def policies_to_train(self) -> Chosen:
        """Who learns from now on: ids, or a function of id and experience; None: all modules."""
        return self._learner.policies_to_train

    @policies_to_train.setter
    def policies_to_train(self, chosen: Chosen) -> None:
        self._learner.policies_to_train = chosen
        self._change()

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights by module."""
        return self._learner.get_weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write weights into the modules of every learner."""
        self._learner.set_weights(weights)
        self._change()

    def state_dict(self) -> dict[str, Any]:
        """State of the learners, which is the same for all of them."""
        return {"learner": self._learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, of however many learners."""
        self._learner.load_state_dict(state["learner"])
        self._change()

    def _change(self) -> None:
        """Make the other learners equal to the first one, which was changed, before they go on."""
        if self._others is not None:
            self._others.are_equal = False
