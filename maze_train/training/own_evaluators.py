"""Evaluators of a user, and the policy as they get it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maze_train.errors import CallbackError, ConfigError
from maze_train.targets import build_target
from maze_train.training.evaluators import Evaluator
from maze_train.training.policy_files import TrainedPolicy

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.training.config import EvaluationConfig


class JudgedPolicy(TrainedPolicy):
    """A policy in training: acts on observations of the environment, and is its model besides.

    Attributes that a `TrainedPolicy` does not have, such as `parameters` and `policy_params`, are
    those of `model`.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "model" or name.startswith("__"):  # asked for by those who copy it
            raise AttributeError(name)
        return getattr(self.model, name)


class OwnEvaluator(Evaluator):
    """Gives an evaluator of a user the policy in a form that acts.

    Args:
        evaluator: The evaluator.
        key: Where the settings name it.
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
        # Its state and its end are its own.
        self.state_dict = evaluator.state_dict  # type: ignore[method-assign]
        self.load_state_dict = evaluator.load_state_dict  # type: ignore[method-assign]
        self.close = evaluator.close  # type: ignore[method-assign]

    def evaluate(self, policy: Any) -> dict[str, float]:
        """The metrics of the evaluator, as plain numbers.

        Raises:
            CallbackError: If it raises.
            ConfigError: If it gives anything but numbers by name.
        """
        try:
            found = self._evaluator.evaluate(JudgedPolicy(policy, *self._spaces))
        except Exception as error:
            name, told = type(self._evaluator).__qualname__, f"{type(error).__name__}: {error}"
            raise CallbackError(f"{self._key}: {name}.evaluate failed: {told}") from error
        if not isinstance(found, Mapping):
            problem = f"evaluate() gave {found!r}; expected numbers by name"
            raise ConfigError(self._key, problem)
        metrics = {}
        for name, value in found.items():
            try:
                number = value.item() if hasattr(value, "item") else value
                metrics[name] = number if type(number) is int else float(number)
            except (TypeError, ValueError, RuntimeError) as error:
                problem = f"evaluate() gave {value!r} for {name}; expected a number"
                raise ConfigError(self._key, problem) from error
        return metrics


def own_evaluators(
    config: EvaluationConfig,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
) -> list[Evaluator]:
    """The evaluators of the user.

    Args:
        config: Names them.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.

    Raises:
        ConfigError: If one can not be built, or is none.
    """
    named = {f"evaluation.evaluators[{i}]": node for i, node in enumerate(config.evaluators)}
    return [
        OwnEvaluator(
            build_target(node, key=key, kind=Evaluator), key, observation_space, action_space
        )
        for key, node in named.items()
    ]
