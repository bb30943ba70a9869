"""Interface between trainers and learners, with a single learner in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.events import Statistics
from maze_train.core.types import Tensor
from maze_train.learner.config import LearnerGroupConfig, OptimizerSettings, Progress
from maze_train.learner.learner import Learner
from maze_train.learner.modules import DEFAULT_MODULE, Chosen, ModuleSource, torch_threads

Result = TypeVar("Result")


class Learners:
    """Interface between a trainer and its learners; this class has one learner in this process.

    `LearnerGroup` adds learners in other processes.

    Args:
        learner: The learner.
        settings: Settings of the learner group.
    """

    def __init__(self, learner: Learner[Any, Any, Any], settings: LearnerGroupConfig) -> None:
        self.settings = settings
        self._first = learner

    @property
    def weights_seq_no(self) -> int:
        """Number of updates that have changed the weights."""
        return self._first.weights_seq_no

    @property
    def first(self) -> Learner[Any, Any, Any]:
        """The learner of this process."""
        return self._first

    def update(self, experience: object, progress: Progress) -> Statistics:
        """Learn from experience; see `Learner.update`."""
        with torch_threads(self.settings.n_cpus_per_learner):
            return self._first.update(experience, progress)

    def foreach_learner(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """Call a function with each learner, and return the results."""
        return [function(self.first)]

    def change_settings(self, config: OptimizerSettings) -> None:
        """Replace the settings of every learner; see `Learner.change_settings`."""
        self.first.change_settings(config)
        self._change()

    def shutdown(self) -> None:
        """Release resources; a second call does nothing."""

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
            ConfigError: If `Learner.add_module` raises it, or the module does not support several
                learners.
        """
        how: dict[str, Any] = {"frozen": frozen, "like": like, "overrides": overrides}
        added = self.first.add_module(module_id, module, **how)
        try:
            self.check_modules()
        except ConfigError:
            self.first.remove_module(module_id)
            raise
        self._change()
        return added

    def check_modules(self) -> None:
        """Raise ConfigError if results would depend on the number of learners."""

    def remove_module(self, module_id: str) -> nn.Module:
        """Remove a module from every learner, and return the module of the first learner."""
        removed = self.first.remove_module(module_id)
        self._change()
        return removed

    @property
    def policies_to_train(self) -> Chosen:
        """IDs of modules to train, or a function of ID and experience; None: all.

        Setting an unknown ID raises a ConfigError.
        """
        return self.first.policies_to_train

    @policies_to_train.setter
    def policies_to_train(self, chosen: Chosen) -> None:
        known = ", ".join(self.first.modules)
        if isinstance(chosen, str):
            raise ConfigError("policies_to_train", f"expected a list of ids from: {known}", chosen)
        for module_id in () if chosen is None or callable(chosen) else chosen:
            if module_id not in self.first.modules:
                problem = f"no such module; available: {known}"
                raise ConfigError("policies_to_train", problem, module_id)
        self.first.policies_to_train = chosen
        self._change()

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the weights, keyed by module ID."""
        return self.first.get_weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy weights into the modules of every learner."""
        self.first.set_weights(weights)
        self._change()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is identical for all learners."""
        return {"learner": self.first.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; the number of learners may differ from the saved run."""
        self.first.load_state_dict(state["learner"])
        self._change()

    def _change(self) -> None:
        """Called after the first learner was changed outside an update."""
