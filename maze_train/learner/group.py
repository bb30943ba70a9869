"""One interface to learners, in this process or elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maze_train.events import Statistics
    from maze_train.learner.config import Progress
    from maze_train.learner.learner import Learner
    from maze_train.types import Tensor


Result = TypeVar("Result")


class LearnerGroup:
    """The learners of a trainer; backend `local`: one learner in this process.

    Args:
        learner: The learner.
    """

    def __init__(self, learner: Learner[Any, Any, Any]) -> None:
        self._learner = learner

    @property
    def weights_seq_no(self) -> int:
        """Updates that the weights have seen."""
        return self._learner.weights_seq_no

    def update(self, experience: Any, progress: Progress) -> Statistics:
        """Learn from experience; see `Learner.update`."""
        return self._learner.update(experience, progress)

    def foreach_learner(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """The results of a function of each learner."""
        return [function(self._learner)]

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights by module."""
        return self._learner.get_weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write weights into the modules of every learner."""
        self._learner.set_weights(weights)

    def state_dict(self) -> dict[str, Any]:
        """State of the learners."""
        return {"learner": self._learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._learner.load_state_dict(state["learner"])
