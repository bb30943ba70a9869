"""Notes about settings that are valid but may be a mistake, and about results that are missing."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze_train.config.train_config import TrainConfig
from maze_train.core.folders import check_guarded
from maze_train.core.notices import notify
from maze_train.core.run_directory import WHOLE, RunDirectory
from maze_train.core.targets import TARGET, locate
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import GUARD_STEPS, env_name
from maze_train.spaces.describe import flat_spaces, is_image, is_mask_key
from maze_train.tracking.tracker import (
    ENV_STEPS,
    EVAL_RETURN,
    TRAIN_RETURN,
    MetricsWriter,
    RunInfo,
    Tracker,
)
from maze_train.training.evaluators import BestModelSelection
from maze_train.training.trainer import Trainer


def start_notes(config: TrainConfig, observation_space: spaces.Space[Any]) -> Iterator[str]:
    """Yield the notes at the start of a run, at most one per kind.

    Args:
        config: The configuration.
        observation_space: Observation space of one environment.
    """
    yield from config.algorithm.start_notes(
        config.runner.concurrency or config.algorithm.default_concurrency
    )
    leaves = flat_spaces(observation_space) if config.model.policy is None else {}
    leaves = {key: leaf for key, leaf in leaves.items() if not is_mask_key(key)}
    images = {
        key: leaf
        for key, leaf in leaves.items()
        if is_float_image(leaf) and config.model.image_encoder != "flat"
    }
    if images:
        key, leaf = next(iter(images.items()))
        name = f"the observation {key!r}" if key else "the observation"
        others = f" (and {len(images) - 1} others)" if len(images) > 1 else ""
        yield (
            f"{name}{others} has the shape {leaf.shape} of an image, but the dtype {leaf.dtype}, "
            f"so it is flattened to {np.prod(leaf.shape or ()):,} inputs; use uint8 for "
            "convolutions"
        )


class TimeLimitNote(MetricsWriter):
    """Warns about a missing time limit if no episode ended in the first epoch.

    Args:
        config: The configuration.
        notify: Prints a line.
    """

    is_kept = False

    def __init__(self, config: TrainConfig, notify: Callable[[str], object]) -> None:
        self._config, self._notify = config, notify
        self._is_first = False

    def start(self, run: RunInfo) -> None:
        """Enable the check for a new run that steps environments."""
        self._is_first = not run.past_rows and run.step_label == RunInfo().step_label

    def write(self, row: Mapping[str, float]) -> None:
        """Process the metrics of an epoch."""
        is_first, self._is_first = self._is_first, False
        if not is_first or row.get("train/episodes") or not lacks_time_limit(self._config.env):
            return
        settings = self._config.evaluation
        limit = GUARD_STEPS if settings.max_episode_steps is None else settings.max_episode_steps
        cut = f"; evaluation truncates it after {limit:,} steps (evaluation.max_episode_steps)"
        self._notify(
            f"no episode ended in the first {int(row[ENV_STEPS]):,} steps, and "
            f"{env_name(self._config.env)} declares no time limit, so training episodes are never "
            f"truncated{cut if limit and settings.n_episodes else ''}; "
            "set env.max_episode_steps to limit all episodes"
        )


EVALUATION_GAP = (
    "training returns have improved, but evaluation returns stay at or below the initial "
    "training return. Evaluation takes the most likely action, which can get stuck, whereas "
    "training samples actions. Try evaluation.deterministic=false"
)
"""Hint of `EvaluationGapNote`."""

SEVERAL, WINDOW = 3, 5
"""Number of the last `WINDOW` evaluations that must lag behind training to print the hint."""

CLEAR_GAIN = 1 / 3
"""Minimum improvement of the training return, relative to the range of all mean returns so far."""


class EvaluationGapNote(MetricsWriter):
    """Prints a hint if training returns improve but deterministic evaluation returns do not.

    An evaluation lags behind training if its return does not exceed the training return of the
    first epoch, although the training return has gained at least `CLEAR_GAIN` of the range of
    returns so far. The criterion does not depend on the scale of rewards, and ignores epochs before
    training has improved.

    Args:
        notify: Prints a line.
    """

    is_kept = False

    def __init__(self, notify: Callable[[str], object]) -> None:
        self._notify = notify
        self._is_on = True
        self._first = math.nan
        self._low, self._high = math.inf, -math.inf
        self._behind: deque[bool] = deque(maxlen=WINDOW)

    def start(self, run: RunInfo) -> None:
        """Start the check; in a resumed run, process the rows before the checkpoint."""
        samples = not run.config.get("algorithm", {}).get("deterministic", False)
        self._is_on = samples and run.config.get("evaluation", {}).get("deterministic", True)
        for row in run.past_rows:
            self._take(row)

    def write(self, row: Mapping[str, float]) -> None:
        """Process the metrics of an epoch."""
        if self._take(row):
            self._notify(EVALUATION_GAP)

    def _take(self, row: Mapping[str, float]) -> bool:
        """Record the row of an epoch; return True once, when the hint should be printed."""
        train, evaluated = (row.get(name, math.nan) for name in (TRAIN_RETURN, EVAL_RETURN))
        if not (self._is_on and math.isfinite(train)):
            return False
        if math.isnan(self._first):
            self._first = train
        if not math.isfinite(evaluated):
            return False
        self._low = min(self._low, train, evaluated)
        self._high = max(self._high, train, evaluated)
        has_gained = train - self._first > CLEAR_GAIN * (self._high - self._low)
        self._behind.append(has_gained and evaluated <= self._first)
        if sum(self._behind) < SEVERAL:
            return False
        self._is_on = False
        return True


def end_notes(rows: Sequence[Mapping[str, float]], info_keys: Sequence[str]) -> Iterator[str]:
    """Yield a note for each configured info key that no episode reported.

    Args:
        rows: Metrics of the epochs of this process.
        info_keys: Configured info keys.
    """
    names = {name for row in rows for name in row}
    for key in info_keys:
        if rows and not names & {f"train/info/{key}", f"eval/info/{key}"}:
            yield f"tracking.info_keys: the final info of no episode contained a number {key!r}"


def lacks_time_limit(config: EnvConfig) -> bool:
    """Return whether no time limit of training episodes is known."""
    if config.backend == "tensor":
        return False  # Simulators end episodes themselves.
    wrappers = [str(node[TARGET]) for node in (*config.wrappers, *config.training_wrappers)]
    if config.max_episode_steps is not None or any("TimeLimit" in name for name in wrappers):
        return False
    if config.target is not None:
        # An environment returned by a function may have a time limit of its own.
        return inspect.isclass(locate(config.target, key="env._target_"))
    spec = gymnasium.registry.get((config.id or "").rpartition(":")[2])
    # Atari games have a limit in frames.
    is_game = spec is not None and spec.kwargs.get("max_num_frames_per_episode")
    return spec is not None and spec.max_episode_steps is None and not is_game


def is_float_image(space: spaces.Space[Any]) -> bool:
    """Return whether a space has the shape of an image but a float dtype."""
    if not isinstance(space, spaces.Box) or space.dtype == np.uint8 or len(space.shape) < 3:
        return False
    return is_image(spaces.Box(0, 255, space.shape, np.uint8))


def missing_results(
    trainer: Trainer, tracker: Tracker, selection: BestModelSelection, run: RunDirectory
) -> tuple[str, ...]:
    """Return the results that could not be written, for example on a full disk."""
    missing = [*tracker.missing, *map(str, selection.missing)]
    try:
        check_guarded(run.path)
    except OSError:
        missing.insert(0, WHOLE)
    checkpoints = trainer.run.checkpoints
    if checkpoints is not None and not checkpoints.holds(trainer.epoch, trainer.updates, False):
        missing.append("the last checkpoint")
    return tuple(missing)


def tell_stop(trainer: Trainer, resume_hint: str) -> None:
    """Print where an unfinished run stopped and how to resume it."""
    checkpoints = trainer.run.checkpoints
    latest = None if checkpoints is None else checkpoints.latest
    stopped = f"stopped in epoch {trainer.epoch + 1} after {trainer.env_steps:,} steps"
    if latest is None:
        notify(
            f"{stopped}; there is no checkpoint, so the next run in this directory starts at step 0"
        )
    elif not latest.is_dir():
        notify(f"{stopped}; the last checkpoint, {latest}, was moved or removed")
    else:
        notify(f"{stopped}; last checkpoint: {latest}\n{resume_hint}")
