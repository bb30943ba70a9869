"""Policies on disk: what is needed to act, in files that can not run code.

policy.pt       weights, tensors only
spaces.json     observation and action space
config.yaml     configuration of the run
score.json      score and epoch of the policy
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.errors import RunDirectoryError, ShapeError, SpaceError
from maze_train.files import atomic_write
from maze_train.rollout.acting import Actor, device_of, env_actions
from maze_train.spaces.describe import FlatView, flat_space, unflatten_value
from maze_train.spaces.masks import mask_layout
from maze_train.spaces.serialize import space_from_dict, space_to_dict
from maze_train.spaces.tensors import as_tensors
from maze_train.trees import tree_leaves, tree_map

if TYPE_CHECKING:
    from pathlib import Path

    from gymnasium import spaces

    from maze_train.rollout.acting import ActingModel, RecurrentModel

__all__ = ["PolicyWriter", "TrainedPolicy", "read_spaces", "read_weights"]

WEIGHTS, SPACES, CONFIG, SCORE = "policy.pt", "spaces.json", "config.yaml", "score.json"


class PolicyWriter:
    """Writes weights, with all that is needed to act, into a directory.

    Args:
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        config_text: Configuration of the run, as YAML.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config_text: str,
    ) -> None:
        self._config_text = config_text
        self._spaces = json.dumps(
            {
                "observation_space": space_to_dict(observation_space),
                "action_space": space_to_dict(action_space),
            },
        )

    def __call__(
        self, directory: Path, weights: dict[str, torch.Tensor], score: dict[str, Any]
    ) -> None:
        """Write the policy; the weights come last: a directory that has them is complete."""
        texts = {SPACES: self._spaces, CONFIG: self._config_text, SCORE: json.dumps(score)}
        for name, text in texts.items():
            with atomic_write(directory / name) as file:
                file.write(text.encode())
        with atomic_write(directory / WEIGHTS) as file:
            torch.save(weights, file)


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of a saved policy.

    Raises:
        RunDirectoryError: If there are none, or they are damaged.
    """
    path = directory / WEIGHTS
    if not path.is_file():
        raise RunDirectoryError(f"{directory} holds no saved policy: there is no {WEIGHTS}")
    try:
        weights: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    if not isinstance(weights, dict):
        raise RunDirectoryError(f"{path} is damaged: it holds no weights by name")
    return weights


def read_spaces(directory: Path) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Observation and action space of a saved policy.

    Raises:
        RunDirectoryError: If they are missing or damaged.
    """
    path = directory / SPACES
    try:
        data = json.loads(path.read_text())
        return space_from_dict(data["observation_space"]), space_from_dict(data["action_space"])
    except SpaceError as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AssertionError) as error:
        raise RunDirectoryError(f"{path} is missing or damaged: {error}") from error


class TrainedPolicy:
    """A policy that acts on observations as the environment gives them.

    A policy with a memory remembers from one call to the next: call `reset` where an episode
    begins. A batch of another size begins anew.

    Args:
        model: The model with its weights.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of sampled actions.
    """

    def __init__(
        self,
        model: ActingModel | RecurrentModel,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        seed: int = 0,
    ) -> None:
        self.model = model
        self.observation_space = observation_space
        self.action_space = action_space
        self._flat_space = flat_space(observation_space)
        self._view = FlatView(observation_space)
        self._masks = mask_layout(observation_space, action_space)
        self._generator = torch.Generator().manual_seed(seed)
        self._actor: Actor | None = None

    def reset(self, ended: Any = None) -> None:
        """Forget what was seen; call it where an episode begins.

        Args:
            ended: For a batch of environments: in which of them an episode ended, `[n]` bool. None:
                in all.

        Raises:
            ShapeError: If `ended` has another size than the last batch.
        """
        if ended is None:
            self._actor = None
        elif self._actor is not None:
            flags, n = np.asarray(ended, np.bool_), len(self._actor.state)
            if flags.shape != (n,):
                raise ShapeError(f"ended has shape {list(flags.shape)}, expected [{n}]")
            self._actor.forget(flags)

    @torch.no_grad()
    def act(self, observation: Any, deterministic: bool = True) -> Any:
        """The action for one observation, or the actions for a batch of them.

        Args:
            observation: One observation of the space, or a batch with one leading dimension (for
                Dict and Tuple spaces on every part).
            deterministic: Whether to take the most likely action instead of a sampled one.

        Returns:
            An action of the action space, or a batch of actions with a leading dimension.

        Raises:
            SpaceError: If the shape fits neither one observation nor a batch, or no action is
                legal.
        """
        parts = {key: np.asarray(value) for key, value in self._view.read(observation)}
        batched = self._is_batch(parts)
        if not batched:
            parts = {key: value[None] for key, value in parts.items()}
        self._check_masks(parts)
        obs = as_tensors(self._flat_space, parts.get("", parts))
        params = self._actor_for(len(tree_leaves(obs)[0])).params(obs)
        distribution = self.model.distribution
        if deterministic:
            actions = distribution.mode(params)
        else:
            noise = distribution.draw_noise(
                tuple(params.shape[:1]), self._generator, torch.device("cpu")
            )
            actions = distribution.sample(params, noise)
        result = env_actions(distribution, actions)
        if not batched:
            result = tree_map(lambda x: x[0], result)
        return unflatten_value(self.action_space, result)

    def _check_masks(self, parts: dict[str, Any]) -> None:
        """Refuse observations in which no action is legal."""
        row = None if self._masks is None else self._masks.first_illegal_row(parts)
        if row is not None and self._masks is not None:
            problem = self._masks.illegal_part({key: value[row] for key, value in parts.items()})
            raise SpaceError(f"observation {row}: {problem}")

    def _actor_for(self, n: int) -> Actor:
        """What acts in n environments; another number of them begins anew."""
        if self._actor is None or len(self._actor.state) != n:
            self._actor = Actor(self.model, n, device_of(self.model))
        return self._actor

    def _is_batch(self, parts: dict[str, Any]) -> bool:
        shapes = {key: leaf.shape or () for key, leaf in self._view.leaves.items()}
        if all(value.shape == shapes[key] for key, value in parts.items()):
            return False
        if all(value.ndim and value.shape[1:] == shapes[key] for key, value in parts.items()):
            return True
        given = {key: list(value.shape) for key, value in parts.items()}
        raise SpaceError(
            f"an observation of shape {given.get('', given)} is neither one observation of "
            f"{self.observation_space} nor a batch of them"
        )
