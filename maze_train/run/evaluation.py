"""Evaluators, model selection and the final test of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from maze_train.config.train_config import TrainConfig
from maze_train.core.run_directory import RunDirectory
from maze_train.spaces.agents import agents_of
from maze_train.tracking.tracker import EVAL_RETURN, TRAIN_RETURN
from maze_train.training.builder import AlgorithmBuilder
from maze_train.training.config import check_selection
from maze_train.training.evaluators import (
    BestModelSelection,
    Evaluator,
    MultiEvaluator,
    earlier_test,
    final_test,
    own_evaluators,
)
from maze_train.training.policy_files import PolicyWriter
from maze_train.training.trainer import Trainer

if TYPE_CHECKING:
    from maze_train.run.assembly import Assembly


def selection_mode(builder: AlgorithmBuilder[Any]) -> Literal["max", "min"]:
    """Return `max` if larger values of the selection metric are better, otherwise `min`."""
    return builder.config.evaluation.selection_mode(builder.selection_metric)


def build_evaluator(
    config: TrainConfig, builder: AlgorithmBuilder[Any], assembly: Assembly
) -> Evaluator | None:
    """Build the evaluator of a run and check the selection metric; None without evaluation.

    Args:
        config: Configuration of the run.
        builder: Builder of the algorithm.
        assembly: Builds the evaluator for opponents.

    Raises:
        ConfigError: If the metric is not reported, or an evaluator cannot be built.
    """
    check_selection(config.evaluation, agents_of(builder.spaces))
    evaluators = builder.build_evaluators()
    if config.evaluation.evaluators:
        own = own_evaluators(config.evaluation, *builder.spaces)
        for evaluator in own:
            builder.context.closing.callback(evaluator.close)
        evaluators = [*evaluators, *own]
    if config.evaluation.opponents:
        evaluators.append(assembly.opponent_evaluator(config, builder))
    if len(evaluators) > 1:
        return MultiEvaluator(evaluators)
    return evaluators[0] if evaluators else None


def build_selection(
    builder: AlgorithmBuilder[Any], model: nn.Module, run: RunDirectory, settings: str
) -> BestModelSelection:
    """Build the model selection; only the first process writes the best policy.

    Args:
        builder: Builder of the algorithm.
        model: The policy.
        run: Directory of the run.
        settings: Configuration of the run as text.
    """
    evaluation, metric = builder.config.evaluation, builder.selection_metric
    is_first = builder.context.processes.is_first
    return BestModelSelection(
        model,
        save=PolicyWriter(*builder.spaces, settings) if is_first else None,
        best_dir=run.best,
        dump_dir=run.policies,
        dump_interval=evaluation.dump_interval,
        dump_interval_steps=evaluation.dump_interval_steps,
        mode=selection_mode(builder),
        may_cancel=bool(agents_of(builder.spaces)) and metric in (EVAL_RETURN, TRAIN_RETURN),
    )


def final_results(
    builder: AlgorithmBuilder[Any],
    evaluator: Evaluator | None,
    trainer: Trainer,
    selection: BestModelSelection,
    resumed: RunDirectory | None,
) -> dict[str, dict[str, float]]:
    """Return the test results of the last and the best policy; empty without an evaluator.

    Args:
        builder: Builder of the algorithm.
        evaluator: Plays the episodes of the test.
        trainer: The trainer.
        selection: Model selection of the run.
        resumed: Directory of a resumed run, whose results are returned if that run had already
            finished.
    """
    if evaluator is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    if resumed is not None:
        summary, n_episodes = trainer.summary(), builder.config.evaluation.final_episodes
        found = builder.context.processes.first(lambda: earlier_test(resumed, summary, n_episodes))
    return found or final_test(evaluator, selection, trainer.epoch)
