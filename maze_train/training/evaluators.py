"""Evaluators, the test after training, and the selection of the best policy."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze_train.collect.episodes import ReportedInfos, TrainingEpisodeEvents, spread
from maze_train.collect.play import EpisodePlan, EpisodeRunner, PlayedEpisode
from maze_train.collect.row_policies import BatchRows
from maze_train.core.checks import check_at_least, check_one_of
from maze_train.core.errors import CallbackError, ConfigError, EnvError, did_you_mean, nearest
from maze_train.core.notices import notify, warn
from maze_train.core.run_directory import RunDirectory, final_tests
from maze_train.core.targets import build_targets
from maze_train.core.types import Array, Tensor
from maze_train.envs.batch import SUCCESS, numbers_of, required_keys
from maze_train.envs.building import close_quietly
from maze_train.envs.calls import EnvCall
from maze_train.envs.factory import guard_note
from maze_train.envs.vector import MazeVectorEnv
from maze_train.nets.acting import ActingModel
from maze_train.training.config import SNAPSHOT, EvaluationConfig
from maze_train.training.generators import generators_kept
from maze_train.training.outcome import TrainingSummary
from maze_train.training.policy_files import TrainedPolicy

MAX_LOST = 10
"""Maximum number of aborted episodes per evaluation episode."""


ZERO_SUM = (
    "note: the returns of the agents sum to zero, so their mean does not measure skill, and the "
    "newest policy is stored as the best. Set evaluation.opponents={random: random} to select by "
    "eval/vs_random/return_mean"
)


class Evaluator(ABC):
    """Evaluates a policy without any effect on training."""

    @abstractmethod
    def evaluate(self, policy: Any) -> dict[str, float]:
        """Return metrics of a policy by name, such as `eval/episode_return_mean`.

        Args:
            policy: The model. Evaluators of `evaluation.evaluators` are called with a
                `TrainedPolicy` (`act`, `values`, `probabilities`), which also forwards attributes
                to the model.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return state that changes between evaluations, as plain values, arrays and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most have no state)
        """Restore a result of `state_dict`."""

    def close(self) -> None:  # noqa: B027 (most have no resources)
        """Release resources; repeated calls do nothing."""


class MultiEvaluator(Evaluator):
    """Runs several evaluators in order and joins their metrics.

    Args:
        evaluators: The evaluators; metric names must not overlap.
    """

    def __init__(self, evaluators: Sequence[Evaluator]) -> None:
        self.evaluators = list(evaluators)

    def evaluate(self, policy: nn.Module) -> dict[str, float]:
        """Return the metrics of all evaluators.

        Raises:
            ConfigError: If two evaluators report the same metric.
        """
        metrics: dict[str, float] = {}
        for evaluator in self.evaluators:
            found = evaluator.evaluate(policy)
            if twice := sorted(metrics.keys() & found.keys()):
                problem = f"two evaluators report {', '.join(twice)}; change one of the prefixes"
                raise ConfigError("evaluation.evaluators", problem)
            metrics.update(found)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all evaluators in order."""
        return {"evaluators": [evaluator.state_dict() for evaluator in self.evaluators]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of all evaluators."""
        for evaluator, part in zip(self.evaluators, state["evaluators"], strict=True):
            evaluator.load_state_dict(part)

    def close(self) -> None:
        """Close all evaluators."""
        for evaluator in self.evaluators:
            evaluator.close()


class RolloutEvaluator(Evaluator):
    """Plays exactly n episodes and reports their returns.

    Episode j is always played with seed j, in environment j modulo the number of environments, and
    all n episodes are played to the end. Results are therefore reproducible, and with deterministic
    actions independent of the number of environments. Counting the first n finished episodes
    instead would be biased towards short episodes.

    Environments are stepped together, and the policy acts on the whole batch on the training
    device. An environment is reset once per episode, and paused after its last one. `EpisodePool`
    instead acts for each episode separately, so that an episode is bit-for-bit independent of other
    episodes; this is about three times slower for image networks.

    Args:
        make_env: Builds a given number of vectorised environments; called at the first evaluation.
        n_episodes: Episodes per evaluation, >= 1.
        concurrency: Number of parallel environments, at most `n_episodes`.
        seed: Seed of the episodes and, for sampled actions, of the actions.
        deterministic: Whether to take the most likely action instead of a sampled one.
        prefix: Prefix of the metric names.
        info_keys: Keys of final infos whose means are reported as `<prefix>/info/<key>`.
        is_guarded: Whether `make_env` limits episodes to `GUARD_STEPS`; a note is printed when the
            first episode is truncated.
        notes_zero_sum: Whether a note is printed if the returns of the agents sum to zero.
        calls: All method calls made on evaluation environments so far; the caller extends this
            list.
        infos: Treats missing values of final infos; None: those of these evaluations alone.
    """

    def __init__(
        self,
        make_env: Callable[[int], MazeVectorEnv],
        n_episodes: int,
        *,
        concurrency: int = 1,
        seed: int = 0,
        deterministic: bool = True,
        prefix: str = "eval",
        info_keys: Sequence[str] = (),
        is_guarded: bool = False,
        notes_zero_sum: bool = False,
        calls: Sequence[EnvCall] = (),
        infos: ReportedInfos | None = None,
    ) -> None:
        check_at_least("n_episodes", n_episodes, 1)
        check_at_least("concurrency", concurrency, 1)
        self.n_episodes, self.deterministic, self.prefix = n_episodes, deterministic, prefix
        self._info_keys, self._is_guarded = info_keys, is_guarded
        self._notes_zero_sum, self._was_zero = notes_zero_sum, False
        self._make_env = make_env
        self._num_envs = min(concurrency, n_episodes)
        self._seed = seed
        self._env: MazeVectorEnv | None = None
        self._own_states: Sequence[dict[str, Any] | None] | None = None
        self._calls, self._num_called = calls, 0
        self._infos = ReportedInfos() if infos is None else infos
        self.on_step: Callable[[int], object] = lambda count: None
        """Called after each step with the number of stepped environments."""

    def evaluate(self, policy: nn.Module) -> dict[str, float]:
        """Play the episodes and return metrics such as `<prefix>/episode_return_mean`."""
        with generators_kept(), torch.no_grad():
            env = self._environments()
            agents, (returns, lengths, reported) = env.agents, self._play(policy, env)
        if self._is_guarded and (note := guard_note(lengths, "evaluation.max_episode_steps")):
            self._is_guarded = False
            notify(note)
        if self._notes_zero_sum and len(agents) > 1:
            each = np.array([reported[f"{agent}/episode_return_mean"] for agent in agents])
            scale = np.abs(each).sum(0)
            cancels = bool((np.abs(each.sum(0)) <= 1e-6 * scale).all())
            # If all returns are zero, a second evaluation decides.
            if cancels and (scale.any() or self._was_zero):
                notify(ZERO_SUM)
            self._notes_zero_sum = cancels and not (scale.any() or self._was_zero)
            self._was_zero = True
        names = (f"episode_return_{name}" for name in ("mean", "std", "min", "max"))
        metrics = {
            **dict(zip(names, spread(returns), strict=True)),
            "episode_length_mean": lengths.mean(),
            "episodes": float(self.n_episodes),
        }
        for agent in ("", *agents):
            name = f"{agent}/success_rate" if agent else "success_rate"
            missing = np.full(self.n_episodes, np.nan)
            successes = self._infos.successes(reported.pop(name, missing), agent)
            if successes is not None:
                metrics[name] = successes.mean()
        for name, values in reported.items():
            if not np.isnan(values).all():
                metrics[name] = np.nanmean(values)
        return {f"{self.prefix}/{name}": float(value) for name, value in metrics.items()}

    def make_calls(self) -> None:
        """Make new calls in the environments, which are built if necessary; see `EnvCalls`."""
        with generators_kept():
            self._environments()

    def _environments(self) -> MazeVectorEnv:
        """Return the environments; build them on first use and restore a loaded state."""
        if self._env is None:
            self._env = self._make_env(self._num_envs)
            if self._own_states is not None:
                self._env.make_calls(self._calls[: self._num_called])
                self._env.load_own_states(self._own_states)
        self._env.make_calls(self._calls)
        return self._env

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the environments; empty if they do not provide states."""
        states, num_called = self._own_states, self._num_called
        if self._env is not None:
            states = self._env.own_states() if self._env.offers_own_state else None
            num_called = len(self._env.calls_made)
        return {} if states is None else {"own_states": list(states), "num_called": num_called}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`; environments are rebuilt to undo calls."""
        self._own_states = state.get("own_states")
        self._num_called = state.get("num_called", 0)
        self.close()

    def _play(self, policy: nn.Module, env: MazeVectorEnv) -> tuple[Array, Array, dict[str, Array]]:
        """Return the returns, lengths and other metrics of n episodes; missing values are NaN."""
        n, lost, missing = self.n_episodes, 0, self.n_episodes
        returns, lengths = np.zeros(n), np.zeros(n)
        reported: dict[str, Array] = {}
        # A custom evaluator may pass its `TrainedPolicy` to this evaluator.
        model = policy.model if isinstance(policy, TrainedPolicy) else policy
        rows = BatchRows(model, env, self.deterministic, self._seed)
        plan = EpisodePlan(self._seed, n, env.num_envs)
        runner = EpisodeRunner(env, rows, plan, on_step=self.on_step)
        env.begin_all(self._seed)
        while missing:
            for played in runner.step():
                lost += played.lost
                if lost > MAX_LOST * n:
                    raise EnvError(
                        f"{lost} episodes were aborted in an evaluation of {n} episodes: the "
                        "environment repeatedly returns non-finite values, or its workers fail"
                    )
                if played.lost:
                    continue
                number, missing = played.number, missing - 1
                returns[number], lengths[number] = played.fitness, played.length
                for name, value in self._metrics_of(played, env.agents).items():
                    reported.setdefault(name, np.full(n, np.nan))[number] = value
        rows.close()
        return returns, lengths, reported

    def _metrics_of(self, played: PlayedEpisode, agents: Sequence[str]) -> dict[str, float]:
        """Return metrics from the last info of an episode."""
        numbers = numbers_of(played.info, required_keys(self._info_keys, agents), agents)
        asked = {
            f"info/{key}": value
            for key in self._info_keys
            for value in self._infos.finite(key, [numbers[key]] if key in numbers else [])
        }
        successes = {
            key.replace(SUCCESS, "success_rate"): numbers[key]
            for key in required_keys((), agents)
            if key in numbers
        }
        own_returns = played.agent_returns.items()
        returns = {f"{agent}/episode_return_mean": own for agent, own in own_returns}
        return {**successes, **asked, **returns}

    def close(self) -> None:
        """Close the environments; errors are reported as warnings."""
        env, self._env = self._env, None
        if env is not None:
            close_quietly(env)


class EvaluatedPolicy(TrainedPolicy):
    """Policy being trained: acts on raw observations and forwards other attributes to its model.

    Forwarded attributes are, for example, `parameters` and `policy_params`.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "model" or name.startswith("__"):  # Accessed by copy and pickle.
            raise AttributeError(name)
        return getattr(self.model, name)


class CustomEvaluator(Evaluator):
    """Adapts the policy for user-defined evaluators.

    Args:
        evaluator: The evaluator.
        key: Key of the setting for error messages.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        key: str,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
    ) -> None:
        self._evaluator, self._key = evaluator, key
        self._spaces = observation_space, action_space

    def evaluate(self, policy: Any) -> dict[str, float]:
        """Return the metrics of the evaluator as floats.

        Raises:
            CallbackError: If the evaluator raises an exception.
            ConfigError: If the result is not a mapping of names to numbers.
        """
        try:
            found = self._evaluator.evaluate(EvaluatedPolicy(policy, *self._spaces))
        except Exception as error:
            name, reason = type(self._evaluator).__qualname__, f"{type(error).__name__}: {error}"
            raise CallbackError(f"{self._key}: {name}.evaluate failed: {reason}") from error
        if not isinstance(found, Mapping):
            problem = f"evaluate() returned {found!r}; expected a mapping of names to numbers"
            raise ConfigError(self._key, problem)
        metrics = {}
        for name, value in found.items():
            try:
                number = (
                    value.item()
                    if isinstance(value, torch.Tensor | np.ndarray | np.generic)
                    else value
                )
                metrics[name] = number if type(number) is int else float(number)
            except (TypeError, ValueError, RuntimeError) as error:
                problem = f"evaluate() returned {value!r} for {name}; expected a number"
                raise ConfigError(self._key, problem) from error
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the evaluator."""
        return self._evaluator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the evaluator."""
        self._evaluator.load_state_dict(state)

    def close(self) -> None:
        """Close the evaluator."""
        self._evaluator.close()


def own_evaluators(
    config: EvaluationConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
) -> list[Evaluator]:
    """Build the user-defined evaluators.

    Args:
        config: Settings of evaluations.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.

    Raises:
        ConfigError: If an evaluator cannot be built, or has the wrong type.
    """
    key = "evaluation.evaluators"
    with generators_kept():
        built = build_targets(config.evaluators, key, Evaluator)
    return [
        CustomEvaluator(evaluator, f"{key}[{i}]", observation_space, action_space)
        for i, evaluator in enumerate(built)
    ]


RETURNS = {"episode_return_mean", "episode_return_std"}


def final_test(
    evaluator: Evaluator, selection: BestModelSelection, epoch: int
) -> dict[str, dict[str, float]]:
    """Test the last and the best policy on the same episodes; leaves the best weights loaded.

    Args:
        evaluator: Plays the episodes.
        selection: Model selection, whose model has the last weights; also stores a copy of the best
            weights.
        epoch: Number of finished epochs.

    Returns:
        Metrics (without prefix) and `epoch` of the policies `last` and `best`.
    """
    state = deepcopy(evaluator.state_dict())
    last = best = _test(evaluator, selection, epoch)
    if selection.best_epoch not in (0, epoch):
        selection.reset_to_best()
        evaluator.load_state_dict(state)
        best = _test(evaluator, selection, selection.best_epoch)
    return {"last": last, "best": best}


def _test(evaluator: Evaluator, selection: BestModelSelection, epoch: int) -> dict[str, float]:
    metrics = evaluator.evaluate(selection.model)
    return {"epoch": epoch, **{name.partition("/")[2]: x for name, x in metrics.items()}}


def earlier_test(
    run: RunDirectory, summary: TrainingSummary, n_episodes: int
) -> dict[str, dict[str, float]]:
    """Return the stored test results of a run that had already ended; empty if there are none.

    Args:
        run: Directory of the run.
        summary: Current outcome.
        n_episodes: Number of test episodes.
    """
    found = run.outcome
    tests = final_tests(found)
    is_that = found.get("updates") == summary.updates and tests.keys() == {"last", "best"}
    are_whole = (
        test.keys() >= RETURNS and test.get("episodes") == n_episodes for test in tests.values()
    )
    return tests if is_that and all(are_whole) else {}


class ModelSelectionBase(ABC):
    """Base class for model selection by evaluation score."""

    @abstractmethod
    def update(self, score: float, epoch: int = 0) -> bool:
        """Record the score of the current policy; return whether this policy is the best so far."""


class BestModelSelection(ModelSelectionBase):
    """Keeps a copy of the best weights in memory and, with `save`, on disk.

    NaN scores are never the best. If scores are equal, the earlier policy is kept.

    Args:
        model: The policy that is being trained.
        save: Writes weights and score to a directory; None: keep weights in memory only.
        best_dir: Directory of the best policy.
        dump_dir: Parent directory of regular dumps (`epoch_<n>`).
        dump_interval: Number of scores between regular dumps; 0: none.
        dump_interval_steps: Environment steps between dumps (`step_<n>`); 0: none.
        mode: `max` if larger scores are better, `min` if smaller scores are better.
        may_cancel: Whether the score is a mean over agents, which is constant in zero-sum games. If
            scores are equal, the later policy is then kept.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        save: Callable[[Path, dict[str, Tensor], dict[str, Any]], None] | None = None,
        best_dir: Path | None = None,
        dump_dir: Path | None = None,
        dump_interval: int = 0,
        dump_interval_steps: int = 0,
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
        self.dump_interval_steps = dump_interval_steps
        self._sign = 1.0 if mode == "max" else -1.0
        self._may_cancel = may_cancel

    def update(self, score: float, epoch: int = 0) -> bool:
        """Record the score of the current policy; return whether this policy is the best so far."""
        self.updates += 1
        self.updates_since_best += 1
        is_best = self._is_best(score)
        if is_best:
            self.updates_since_best = 0
        if is_best or (self._may_cancel and score == self.best_score):
            self.best_score, self.best_epoch = score, epoch
            self._best_weights = copy_of_weights(self.model)
            self._write(self._best_dir, self._best_weights, score, epoch)
        if self._dump_interval and self._dump_dir and self.updates % self._dump_interval == 0:
            directory = self._dump_dir / f"epoch_{epoch:06d}"
            self._write(directory, copy_of_weights(self.model), score, epoch)
        return is_best

    def dump(self, env_steps: int, epoch: int) -> None:
        """Write the current policy; see `dump_interval_steps`."""
        if self._dump_dir is not None:
            directory = self._dump_dir / f"step_{env_steps:09d}"
            self._write(directory, copy_of_weights(self.model), math.nan, epoch)

    def keep_if_none(self, epoch: int) -> None:
        """Keep the current policy if no policy was selected yet; retry a failed write."""
        if self._best_weights is None:
            self._best_weights = copy_of_weights(self.model)
            self._write(self._best_dir, self._best_weights, math.nan, epoch)
        elif self._best_dir in self.missing:
            self.write_best()

    def write_best(self) -> None:
        """Write the best policy to disk, if any."""
        if self._best_weights is not None:
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
                # Training continues with the copy in memory.
                self.missing.append(directory)
                warn(f"{directory} could not be written: {error}")

    def patience_is_exhausted(self, patience: int) -> bool:
        """Return whether the last `patience` scores did not improve; False if `patience` is 0."""
        return patience > 0 and self.updates_since_best >= patience

    def reset_to_best(self) -> None:
        """Restore the best weights of the model, if any."""
        if self._best_weights is not None:
            self.model.load_state_dict(self._best_weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the best score, the best weights and the counters."""
        return {
            "best_score": self.best_score,
            "best_epoch": self.best_epoch,
            "best_weights": self._best_weights,
            "updates": self.updates,
            "updates_since_best": self.updates_since_best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`; files are unchanged until `write_best`."""
        self.best_score = state["best_score"]
        self.best_epoch = state["best_epoch"]
        self._best_weights = state["best_weights"]
        self.updates = state["updates"]
        self.updates_since_best = state["updates_since_best"]


def metric_of(metrics: Mapping[str, float], metric: str) -> float | None:
    """Return a metric, or None; 0 for a success rate if no episode has reported success yet."""
    prefix = metric.partition("/")[0]
    if metric.endswith("/success_rate") and f"{prefix}/episodes" in metrics:
        return metrics.get(metric, 0.0)
    return metrics.get(metric)


def check_metric(
    metric: str, present: Iterable[str], model: nn.Module, setting: str = "evaluation.metric"
) -> None:
    """Check that a metric is reported.

    Args:
        metric: The metric.
        present: Metrics reported in an epoch.
        model: The trained policy, or the policies of all agents.
        setting: Setting that names the metric.

    Raises:
        ConfigError: If the metric is not reported.
    """
    known, events = set(present), TrainingEpisodeEvents
    agents = model.agents if isinstance(model, ActingModel) else ()
    rates = {"success_rate", *(f"{agent}/success_rate" for agent in agents)}
    known |= {f"{part}/{rate}" for part in ("train", "eval") for rate in rates}
    if events.episodes.tag not in present:  # No episode has ended yet.
        known |= {event.tag for event in events.events()}
        known |= {events.episode_return_mean.of_owner(agent).tag for agent in agents}
        if metric.startswith(events.info.tag):
            known.add(metric)
    # Results against a snapshot may be missing, but ratings are always reported.
    rated = [tag for tag in present if tag.startswith("league/") and tag.endswith("/elo")]
    known |= {tag.removesuffix("elo") + "win_rate" for tag in rated}
    if metric not in known and re.sub(rf"{SNAPSHOT}\d+(?=/win_rate$)", "", metric) not in known:
        problem = f"not reported{did_you_mean(nearest(metric, known))}"
        if key := metric.partition("/info/")[2]:
            problem = (
                f"not reported: the final info of no episode contained a number {key!r}; add it to "
                f"the info of the last step of each episode, and set tracking.info_keys=[{key}]"
            )
        raise ConfigError(setting, problem, metric)


def copy_of_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy the weights of a model to new tensors on the CPU."""
    return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
