"""Selection of the best policy so far, and the patience after which training gives up."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from maze_train.collect.config import SNAPSHOT
from maze_train.collect.episodes import TrainingEpisodeEvents
from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, did_you_mean, nearest
from maze_train.core.files import tell, warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from maze_train.core.types import Tensor


SAME_SCORE = (
    "note: the first two policies have the same mean return. Where agents play against each other "
    "what one gains another one loses: while scores are equal, the newest policy counts as the "
    "best one. evaluation.opponents={random: random} tells policies apart"
)


class ModelSelectionBase(ABC):
    """Selection by the score of the current policy after each evaluation."""

    @abstractmethod
    def update(self, score: float, epoch: int = 0) -> bool:
        """Take in the score of the current policy; returns whether it is the best so far."""


class BestModelSelection(ModelSelectionBase):
    """Keeps a copy of the best weights, on disk as well if there is a function for it.

    A score that is NaN is never the best; of equal scores the earlier one stays.

    Args:
        model: The policy that is being trained.
        save: Writes weights and what is known of their score into a directory; None: weights are
            kept in memory only.
        best_dir: Where the best policy is written to.
        dump_dir: Where `epoch_<n>` directories of regular dumps go.
        dump_interval: Updates of the score from one regular dump to the next; 0: none.
        mode: `max` if larger scores are better, `min` if smaller ones are.
        may_cancel: Whether the score is a mean over agents. Where these play against each other it
            may be the same for all policies, so of equal scores the last one stays then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        save: Callable[[Path, dict[str, Tensor], dict[str, Any]], None] | None = None,
        best_dir: Path | None = None,
        dump_dir: Path | None = None,
        dump_interval: int = 0,
        mode: str = "max",
        may_cancel: bool = False,
    ) -> None:
        check_one_of("mode", mode, ("max", "min"))
        self.model = model
        self.best_score = math.nan
        self.best_epoch = 0
        self.updates = 0
        self.updates_since_best = 0
        self.missing: list[Path] = []
        """Directories of policies that could not be written."""
        self._best_weights: dict[str, Tensor] | None = None
        self._save = save
        self._best_dir = best_dir
        self._dump_dir = dump_dir
        self._dump_interval = dump_interval
        self._sign = 1.0 if mode == "max" else -1.0
        self._may_cancel = may_cancel

    def update(self, score: float, epoch: int = 0) -> bool:
        """Take in the score of the current policy; returns whether it is the best so far."""
        self.updates += 1
        self.updates_since_best += 1
        is_best = self._is_best(score)
        if is_best:
            self.updates_since_best = 0
        elif self._may_cancel and score == self.best_score and self.updates == 2:
            tell(SAME_SCORE)
        if is_best or (self._may_cancel and score == self.best_score):
            self.best_score, self.best_epoch = score, epoch
            self._best_weights = copy_of_weights(self.model)
            self._write(self._best_dir, self._best_weights, score, epoch)
        if self._dump_interval and self._dump_dir and self.updates % self._dump_interval == 0:
            directory = self._dump_dir / f"epoch_{epoch:06d}"
            self._write(directory, copy_of_weights(self.model), score, epoch)
        return is_best

    def keep_if_none(self, epoch: int) -> None:
        """Keep the current policy if no score has selected one: training leaves a policy.

        One that could not be written is tried again.
        """
        if self._best_weights is None:
            self._best_weights = copy_of_weights(self.model)
            self._write(self._best_dir, self._best_weights, math.nan, epoch)
        elif self._best_dir in self.missing:
            self._write(self._best_dir, self._best_weights, self.best_score, self.best_epoch)

    def _is_best(self, score: float) -> bool:
        if math.isnan(score):
            return False
        return math.isnan(self.best_score) or self._sign * score > self._sign * self.best_score

    def _write(
        self, directory: Path | None, weights: dict[str, Tensor], score: float, epoch: int
    ) -> None:
        if self._save is not None and directory is not None:
            finite = score if math.isfinite(score) else None
            self.missing = [path for path in self.missing if path != directory]
            try:
                self._save(directory, weights, {"score": finite, "epoch": epoch})
            except OSError as error:
                # The copy in memory remains, and training is worth more than a file.
                self.missing.append(directory)
                warn(f"{directory} could not be written: {error}")

    def patience_is_exhausted(self, patience: int) -> bool:
        """Whether the last `patience` scores brought no new best; never for 0."""
        return patience > 0 and self.updates_since_best >= patience

    def reset_to_best(self) -> None:
        """Give the model the best weights back, if there are any."""
        if self._best_weights is not None:
            self.model.load_state_dict(self._best_weights)

    def state_dict(self) -> dict[str, Any]:
        """Best score, best weights and counters."""
        return {
            "best_score": self.best_score,
            "best_epoch": self.best_epoch,
            "best_weights": self._best_weights,
            "updates": self.updates,
            "updates_since_best": self.updates_since_best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the best policy on disk becomes that of the state."""
        self.best_score = state["best_score"]
        self.best_epoch = state["best_epoch"]
        self._best_weights = state["best_weights"]
        self.updates = state["updates"]
        self.updates_since_best = state["updates_since_best"]
        if self._best_weights is not None:
            self._write(self._best_dir, self._best_weights, self.best_score, self.best_epoch)


def check_metric(metric: str, present: set[str], model: nn.Module) -> None:
    """Refuse a metric that is never reported: it would select nothing, in silence.

    Args:
        metric: The metric that selects the best policy.
        present: Those that an epoch reported.
        model: The policy that is being trained, or the policies of several agents.

    Raises:
        ConfigError: If it is none of them.
    """
    # These are absent until an episode ends, or until one reports success.
    known = present | {event.tag for event in TrainingEpisodeEvents.events()}
    known.add("eval/success_rate")
    of_agent = TrainingEpisodeEvents.episode_return_mean.of_owner
    known |= {of_agent(agent).tag for agent in getattr(model, "agents", ())}
    # So are results against snapshots, each of which has its own; ratings are always there.
    rated = [tag for tag in present if tag.startswith("league/") and tag.endswith("/elo")]
    known |= {tag.removesuffix("elo") + "win_rate" for tag in rated}
    if metric not in known and re.sub(rf"{SNAPSHOT}\d+(?=/win_rate$)", "", metric) not in known:
        problem = f"not reported{did_you_mean(nearest(metric, known))}"
        raise ConfigError("evaluation.metric", problem, metric)


def copy_of_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model as new tensors on the CPU."""
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
