"""Objects that a trainer uses and that do not depend on the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from maze_train.collect.episodes import ReportedInfos
from maze_train.envs.calls import EnvCalls
from maze_train.learner.parallel import SingleProcess
from maze_train.tracking.tracker import RunInfo, Tracker
from maze_train.training.callbacks import Callback
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.evaluators import BestModelSelection, Evaluator
from maze_train.training.outcome import Interruption, Limits

if TYPE_CHECKING:
    from maze_train.training.background import BackgroundEvaluator


@dataclass(frozen=True, kw_only=True)
class TrainerServices:
    """Algorithm-independent objects that a trainer uses.

    Attributes:
        tracker: Records the metrics; by default, metrics are kept in `history` and nothing is
            written.
        evaluator: Evaluates the policy; None: the training return selects the best policy.
        background: The evaluator, if it evaluates in another process; otherwise None.
        model_selection: Stores the best policy; None: not stored.
        limits: Limits at which training stops; None: limits of the algorithm.
        evaluation_interval: Epochs between evaluations.
        evaluation_interval_steps: Environment steps between evaluations; 0: use
            `evaluation_interval`.
        selection_metric: Metric for `model_selection`.
        around_update: Functions that return a context manager around an update, given the number of
            the update (from 1); the first function provides the outermost context.
        checkpoints: Writes checkpoints; None: no checkpoints.
        interruption: Handles signals; None: signals are not handled.
        callbacks: Callbacks of the run.
        env_calls: Environment method calls requested by callbacks; see `BuildContext`.
        processes: Processes of the run.
        infos: Treats missing values of final infos.
    """

    tracker: Tracker = field(default_factory=lambda: Tracker([], RunInfo()))
    evaluator: Evaluator | None = None
    background: BackgroundEvaluator | None = None
    model_selection: BestModelSelection | None = None
    limits: Limits | None = None
    evaluation_interval: int = 1
    evaluation_interval_steps: int = 0
    selection_metric: str = "eval/episode_return_mean"
    around_update: Sequence[Callable[[int], AbstractContextManager[None]]] = ()
    checkpoints: CheckpointStore | None = None
    interruption: Interruption | None = None
    callbacks: Sequence[Callback] = ()
    env_calls: EnvCalls = field(default_factory=EnvCalls)
    processes: SingleProcess = field(default_factory=SingleProcess)
    infos: ReportedInfos = field(default_factory=ReportedInfos)
