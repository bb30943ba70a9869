"""The learner of a run, as trainers see it: here one, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from maze_train.core.events import Statistics
from maze_train.core.types import Tensor
from maze_train.learner.components import check_chosen
from maze_train.learner.config import LearnerGroupConfig, Progress
from maze_train.learner.learner import Learner
from maze_train.learner.modules import DEFAULT_MODULE, Chosen, ModuleSource, torch_threads

Result = TypeVar("Result")


class Learners:
    """The learners of a trainer. Those of this class are one learner in this process.

    `LearnerGroup` adds learners in other processes, and updates in the background.

    Args:
        learner: The learner.
        settings: Settings of the learners.
    """

    def __init__(self, learner: Learner[Any, Any, Any], settings: LearnerGroupConfig) -> None:
        self.settings = settings
        self._first = learner

    @property
    def weights_seq_no(self) -> int:
        """Updates that the weights have seen."""
        return self._first.weights_seq_no

    @property
    def first(self) -> Learner[Any, Any, Any]:
        """The learner of this process."""
        return self._first

    def update(self, experience: Any, progress: Progress) -> Statistics:
        """Learn from experience; see `Learner.update`."""
        with torch_threads(self.settings.n_cpus_per_learner):
            return self._first.update(experience, progress)

    def wait(self) -> Statistics:
        """Wait for updates in the background; returns the statistics that are left."""
        return Statistics()

    def foreach_learner(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """The results of a function of each learner, which changes all of them alike."""
        return [function(self.first)]

    def shutdown(self) -> None:
        """Release what the learners hold; calling it again does nothing."""

    # -- modules, state --------------------------------------------------------------------------

    def add_module(
        self,
        module_id: str,
        module: ModuleSource,
        *,
        frozen: bool = False,
        like: str = DEFAULT_MODULE,
        overrides: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Add a module to every learner; see `Learner.add_module`.

        Raises:
            ConfigError: As there.
        """
        how: dict[str, Any] = {"frozen": frozen, "like": like, "overrides": overrides}
        added = self.first.add_module(module_id, module, **how)
        self._change()
        return added

    def remove_module(self, module_id: str) -> nn.Module:
        """Remove a module from every learner, and return that of the first one."""
        removed = self.first.remove_module(module_id)
        self._change()
        return removed

    @property
    def policies_to_train(self) -> Chosen:
        """The modules that learn: ids, or a function of id and experience; None: all.

        Setting an unknown id raises a ConfigError.
        """
        return self.first.policies_to_train

    @policies_to_train.setter
    def policies_to_train(self, chosen: Chosen) -> None:
        check_chosen(self.first.modules, chosen)
        self.first.policies_to_train = chosen
        self._change()

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights by module."""
        return self.first.get_weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write weights into the modules of every learner."""
        self.first.set_weights(weights)
        self._change()

    def state_dict(self) -> dict[str, Any]:
        """State of the learners, which is the same for all of them."""
        return {"learner": self.first.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`, of any number of learners."""
        self.first.load_state_dict(state["learner"])
        self._change()

    def _change(self) -> None:
        """Called when the first learner was changed otherwise than by an update."""
