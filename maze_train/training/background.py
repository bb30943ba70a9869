"""Evaluation in another process while training continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from maze_train.core.types import Tensor
from maze_train.envs.calls import CALL_ENVS, EnvCall, EnvCalls
from maze_train.training.evaluators import (
    Evaluator,
    MultiEvaluator,
    RolloutEvaluator,
    copy_of_weights,
)
from maze_train.workers.backends import Pickled, RemoteBackend
from maze_train.workers.pool import (
    Worker,
    WorkerContext,
    WorkerFailedError,
    WorkerPool,
    WorkerSpecs,
)

NO_LIMIT_S = 7 * 86_400.0
"""Time limit of an evaluation in seconds; custom evaluators report no progress."""

CALLS = {"evaluate": "an evaluation", "make_calls": f"calls of {CALL_ENVS}"}
"""Description of each method, for messages."""


@dataclass(frozen=True)
class PendingEvaluation:
    """Evaluation whose results have not been used yet."""

    epoch: int
    """Epoch of the policy."""

    env_steps: int
    """Environment steps of training at the evaluation."""

    num_calls: int
    """Number of environment calls before the evaluation."""

    weights: dict[str, Tensor]
    """Weights of the policy."""


class EvaluationWorker(Worker):
    """Worker of `BackgroundEvaluator`.

    Args:
        make_model: Builds the model; the weights do not matter.
        evaluator: The evaluator, and the list of environment calls that its parts use.
        device: Device of the model.
        context: Context of the worker.
    """

    def __init__(
        self,
        make_model: Pickled[Callable[[], nn.Module]],
        evaluator: Pickled[tuple[Evaluator, list[EnvCall]]],
        device: torch.device,
        context: WorkerContext,
    ) -> None:
        self._model = make_model.value().to(device)
        own, self._calls = evaluator.value
        self._evaluator, self._context = own, context
        parts = own.evaluators if isinstance(own, MultiEvaluator) else [own]
        self._players = [part for part in parts if isinstance(part, RolloutEvaluator)]
        for player in self._players:
            player.on_step = context.count

    def evaluate(
        self,
        weights: dict[str, Tensor],
        calls: Sequence[EnvCall],
        seed: int,
        state: dict[str, Any] | None,
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Evaluate weights; return the metrics and the new state of the evaluator.

        Args:
            weights: Weights of the model.
            calls: All environment calls so far.
            seed: Seed of the global random number generators.
            state: State of the evaluator to restore first; None: keep the current state.
        """
        self._context.seed_generators(seed)
        self._prepare(calls, state)
        self._model.load_state_dict(weights)
        return self._evaluator.evaluate(self._model), self._evaluator.state_dict()

    def make_calls(self, calls: Sequence[EnvCall], state: dict[str, Any] | None) -> None:
        """Call methods of the environments; see `RolloutEvaluator.make_calls` and `evaluate`."""
        self._prepare(calls, state)
        for player in self._players:
            player.make_calls()

    def _prepare(self, calls: Sequence[EnvCall], state: dict[str, Any] | None) -> None:
        if state is not None:
            self._evaluator.load_state_dict(state)
        self._calls[:] = calls

    def close(self) -> None:
        """Close the evaluator."""
        self._evaluator.close()


class BackgroundEvaluator(Evaluator):
    """Evaluates a copy of the policy in another process, which is started on first use.

    `begin` starts an evaluation, and `join` waits for its results. The state contains the weights
    of a pending evaluation, which is repeated on resume with identical results. If the process
    fails and workers may be restarted, the evaluation is repeated.

    Args:
        own: The evaluator, which is copied to the process.
        calls: Environment calls of the run. The evaluator takes the place of its parts.
        make_model: Builds a model with the networks of the policy.
        device: Device of this model.
        backend: Backend of the process.

    Raises:
        ConfigError: On first use, if the evaluator cannot be sent to another process.
    """

    def __init__(
        self,
        own: Evaluator,
        calls: EnvCalls,
        make_model: Callable[[], nn.Module],
        device: torch.device,
        backend: RemoteBackend,
    ) -> None:
        calls.in_evaluation_envs[:] = [self.make_calls]
        self._calls = calls.evaluation
        key = "evaluation.asynchronous"
        remedy = "use false"
        self._make_worker = partial(
            EvaluationWorker,
            Pickled(make_model, key, remedy),
            Pickled((own, self._calls), key, remedy),
            device,
        )
        self._backend = replace(backend, timeout_s=NO_LIMIT_S)
        self._pool: WorkerPool | None = None
        self._is_running = False
        self._result: tuple[dict[str, float], dict[str, Any]] | None = None
        self._state = deepcopy(own.state_dict())  # Before the pending evaluation.
        self._has_state = False  # Whether the process has the newest state.
        self.pending: PendingEvaluation | None = None

    def begin(self, policy: nn.Module, epoch: int, env_steps: int) -> None:
        """Start to evaluate the current weights; call `join` first if an evaluation is pending.

        Args:
            policy: The model.
            epoch: Epoch of the weights.
            env_steps: Environment steps so far.
        """
        assert self.pending is None, "join() comes first"
        weights = copy_of_weights(policy)
        self.pending = PendingEvaluation(epoch, env_steps, len(self._calls), weights)
        self._start(self.pending)

    def join(self) -> tuple[PendingEvaluation, dict[str, float]] | None:
        """Wait for the pending evaluation; return it with its metrics, or None if none is pending.

        Raises:
            MazeTrainError: If the evaluation failed.
        """
        pending = self.pending
        if pending is None:
            return None
        metrics, self._state = self._wait(pending)
        self.pending = self._result = None
        return pending, metrics

    def evaluate(self, policy: nn.Module) -> dict[str, float]:
        """Evaluate the current weights and wait for the metrics; `join` is not affected."""
        if self.pending is not None:
            self._wait(self.pending)
        before = self._state, self._result
        self._state, self._result = self._newest_state, None
        now = PendingEvaluation(0, 0, len(self._calls), copy_of_weights(policy))
        metrics, _ = self._wait(now)
        (self._state, self._result), self._has_state = before, False
        return metrics

    def make_calls(self) -> None:
        """Make the calls of the run that have not been made yet, after the pending evaluation."""
        if self.pending is not None:
            self._wait(self.pending)
        try:
            self._workers().ask(0, "make_calls", list(self._calls), self._state_to_send())
        except WorkerFailedError as failure:
            raise failure.as_error() from None

    def _workers(self) -> WorkerPool:
        if self._pool is None:
            specs = WorkerSpecs([self._make_worker], ["evaluation process"], CALLS)
            self._pool = self._backend.pool(specs)
        return self._pool

    @property
    def _newest_state(self) -> dict[str, Any]:
        """State after the pending evaluation, if it has finished, otherwise before it."""
        return self._state if self._result is None else self._result[1]

    def _state_to_send(self) -> dict[str, Any] | None:
        """Return the newest state if the process does not have it yet, otherwise None."""
        has_state, self._has_state = self._has_state, True
        return None if has_state else self._newest_state

    def _start(self, pending: PendingEvaluation) -> None:
        calls = self._calls[: pending.num_calls]
        args = pending.weights, calls, pending.env_steps, self._state_to_send()
        self._workers().call(0, "evaluate", *args)
        self._is_running = True

    def _wait(self, pending: PendingEvaluation) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the metrics and the following state; start the evaluation if necessary."""
        while self._result is None:
            if not self._is_running:
                self._start(pending)
            pool = self._workers()
            try:
                self._result = pool.receive(0)
            except WorkerFailedError as failure:
                self._is_running = self._has_state = False
                pool.restart(failure, failure.text, "and the evaluation is repeated")
        self._is_running = False
        return self._result

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the evaluator, and the pending evaluation."""
        pending = None if self.pending is None else dict(vars(self.pending))
        return {"state": self._state, "pending": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`; `join` repeats the pending evaluation."""
        self.close()
        pending = state["pending"]
        self._state = state["state"]
        self.pending = None if pending is None else PendingEvaluation(**pending)

    def close(self) -> None:
        """End the process."""
        pool, self._pool = self._pool, None
        self._is_running = self._has_state = False
        self._result = None
        if pool is not None:
            pool.close()
