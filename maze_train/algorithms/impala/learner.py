"""Learner and events of IMPALA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

import torch

from maze_train.algorithms.actor_critic.batch import (
    ActorCriticBatch,
    EvaluatedRollout,
    PreparedRollout,
    next_values_of,
    with_new_states,
)
from maze_train.algorithms.actor_critic.learner import ActorCriticEvents, ActorCriticLearner
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.core.errors import ShapeError
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor, rows_of
from maze_train.data.rollout import Rollout, select_envs
from maze_train.functional.returns import scale_advantages
from maze_train.functional.vtrace import importance_weights, vtrace
from maze_train.learner.config import Progress
from maze_train.learner.modules import LearnerOptions, Modules
from maze_train.nets.actor_critic import ActorCriticModel


class ImpalaEvents(ActorCriticEvents):
    """Statistics of IMPALA learners."""

    policy_lag_mean = Event(
        "Mean policy lag: number of updates between the acting weights and the learner."
    )
    policy_lag_max = Event("Maximum policy lag, in updates.", reduce="max")
    rho_mean = Event("Unclipped importance weight pi(a|s) / mu(a|s) of the actions.")
    rho_clip_fraction = Event(
        "Fraction of importance weights above the bound of the value targets."
    )


class ActorEvents(EventInterface, prefix="actors"):
    """Statistics of actors."""

    queue_before = Event("Number of queued rollouts before the learner takes a batch.")
    queue_after = Event("Number of queued rollouts after the learner has taken a batch.")
    steps_made = Event("Environment steps of all actors since training began.", reduce="last")
    steps_dropped = Event(
        "Steps dropped because of failed actors, dropped episodes, or the end of a run.",
        reduce="last",
    )
    steps_in_flight = Event("Steps in queued or unfinished rollouts.", reduce="last")


class ActorTimeEvents(EventInterface, prefix="time"):
    """Wall-clock time of updates."""

    learner_wait_fraction = Event(
        "Fraction of time in which the learner waits for a batch, or collects it (`runner=dev`)."
    )


class ImpalaLearner(ActorCriticLearner[ImpalaAlgorithmConfig]):
    """Learner of IMPALA: V-trace actor-critic with one gradient step per batch of rollouts.

    With rho_t = pi(a_t | s_t) / mu(a_t | s_t), behaviour policy mu and target policy pi,

    policy loss = -mean(log pi(a_t | s_t) * min(rho_pg, rho_t) * (r_t + discount_t v_{t+1} - V_t))

    value loss = mean((v_t - V_t)^2)

    where v are the V-trace targets and all values V are computed with the learner's weights.

    Source: Espeholt et al. (2018), arXiv:1802.01561, section 4.2.
    """

    most_empty_updates: ClassVar[int] = 100
    analytic_gradients: ClassVar[Mapping[str, object]] = {"loss_reduction": "mean"}

    def __init__(
        self, modules: Modules, config: ImpalaAlgorithmConfig, **options: Unpack[LearnerOptions]
    ) -> None:
        self._outputs: dict[str, tuple[Tensor, Tensor]] = {}
        super().__init__(modules, config, **options)

    @torch.no_grad()
    def preprocess(
        self, module_id: str, experience: Rollout, statistics: Statistics
    ) -> PreparedRollout:
        """Compute V-trace advantages and value targets of rollouts.

        Raises:
            ShapeError: If the rollout has no log-probabilities of the behaviour policy.
        """
        if experience.log_probs is None:
            raise ShapeError(
                "the rollout has no log_probs of the behaviour policy: collect it with "
                "RolloutCollector(..., records_log_probs=True)"
            )
        # The stored recurrent states depend on the actor's weights; only the first row is used.
        rollout = with_new_states(self.model(module_id), experience.to(self.device))
        prepared = super().preprocess(module_id, rollout, statistics)
        new = _new_columns(rollout)
        # Replayed observations are already included in the statistics.
        self._observed[module_id] = new
        if prepared.num_units:
            self._record_importance(prepared, rollout, self.config_of(module_id), statistics)
        if new.weights_seq_no is not None:
            lags = (self.weights_seq_no - new.weights_seq_no).float()
            statistics.record(ImpalaEvents.policy_lag_mean, lags.mean())
            statistics.record(ImpalaEvents.policy_lag_max, lags.max())
        return prepared

    def evaluate(self, module_id: str, rollout: Rollout) -> EvaluatedRollout:
        """Evaluate the model on a rollout; if possible, in one pass for targets and loss."""
        model = self.model(module_id)
        # Two passes are required for recurrent policies (the loss uses sequences), networks that
        # differ in training mode, data-parallel learners (the loss uses a shard of the rows), and
        # autocast (used only for losses).
        if (
            model.state_size
            or module_id in self.modules.with_modes
            or not self.uses_autograd(module_id)
            or self.ranks.count > 1
            or self.settings.autocast != "none"
        ):
            return super().evaluate(module_id, rollout)
        evaluated, self._outputs[module_id] = evaluate_with_graph(model, rollout)
        return evaluated

    def outputs(self, module_id: str, batch: ActorCriticBatch) -> tuple[Tensor, Tensor]:
        """Return distribution parameters and critic outputs for the samples of the batch."""
        known = self._outputs.pop(module_id, None)
        return super().outputs(module_id, batch) if known is None else known

    def advantages_and_returns(
        self,
        rollout: Rollout,
        evaluated: EvaluatedRollout,
        log_probs: Tensor,
        config: ImpalaAlgorithmConfig,
    ) -> tuple[Tensor, Tensor]:
        """Compute V-trace advantages and value targets."""
        assert rollout.log_probs is not None
        bound = config.vtrace_clip_rho_threshold
        discounts, lambdas = self.discounts_and_lambdas(rollout, config)
        targets = vtrace(
            log_probs.view_as(rollout.log_probs) - rollout.log_probs,
            discounts,
            rollout.rewards,
            evaluated.values,
            evaluated.next_values,
            lambdas,
            clip_rho_threshold=bound,
            clip_pg_rho_threshold=config.vtrace_clip_pg_rho_threshold,
            # The paper requires c_bar <= rho_bar.
            clip_c_threshold=1.0 if bound is None else min(1.0, bound),
        )
        return targets.pg_advantages, targets.vs

    def normalized(self, advantages: Tensor) -> Tensor:
        """Scale advantages without shifting, because the actions were sampled by older policies."""
        return scale_advantages(advantages)

    def _record_importance(
        self,
        prepared: PreparedRollout,
        rollout: Rollout,
        config: ImpalaAlgorithmConfig,
        statistics: Statistics,
    ) -> None:
        """Record statistics of the importance weights of transitions."""
        assert rollout.log_probs is not None
        log_rhos = prepared.old_log_probs - rollout.log_probs.flatten()
        rhos = importance_weights(prepared.transitions(log_rhos))
        statistics.record(ImpalaEvents.rho_mean, rhos.mean())
        bound = config.vtrace_clip_rho_threshold
        if bound is not None:
            # On-policy weights are 1 up to rounding errors, which depend on the batch size.
            clipped = rhos > bound * (1.0 + 1e-4)
            statistics.record(ImpalaEvents.rho_clip_fraction, clipped.float().mean())

    def after_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Discard the outputs of modules without a minibatch."""
        super().after_gradient_based_update(progress, statistics)
        self._outputs.clear()

    def compute_loss_for_module(
        self, module_id: str, batch: ActorCriticBatch, statistics: Statistics
    ) -> Tensor:
        """Weighted sum of policy loss, value loss and entropy bonus, 0-d."""
        loss = super().compute_loss_for_module(module_id, batch, statistics)
        if self.config_of(module_id).loss_reduction == "mean":
            return loss
        share = self.shares.get(module_id)
        return loss * (batch.size if share is None else share.whole)


def _new_columns(rollout: Rollout) -> Rollout:
    """Return the rollout without the replayed columns, which are last."""
    if rollout.replayed is None:
        return rollout
    return select_envs(rollout, slice(0, int(rollout.replayed.logical_not().sum())))


@torch.no_grad()
def evaluate_with_graph(
    model: ActorCriticModel, rollout: Rollout
) -> tuple[EvaluatedRollout, tuple[Tensor, Tensor]]:
    """Evaluate a feedforward model on a rollout, and return its outputs with the autograd graph.

    Learners with one gradient step per batch can use one forward pass for targets and loss.

    Returns:
        Detached values and parameters, and a pair of distribution parameters and critic outputs
        with an autograd graph, for rows that are transitions.
    """
    obs, num_envs, samples = rollout.flat_obs(), rollout.num_envs, rollout.rewards.numel()
    with torch.enable_grad():
        params, raw_values = model(rows_of(obs, slice(0, samples + num_envs)))
        rows = slice(0, samples) if rollout.valid is None else rollout.valid.flatten()
        outputs = params[:samples][rows], raw_values[:samples][rows]
    all_values = model.value_head.values(raw_values.detach()).view(-1, num_envs)
    next_values = next_values_of(model, rollout, all_values, None)
    return EvaluatedRollout(all_values[:-1], next_values, params[:samples].detach()), outputs
