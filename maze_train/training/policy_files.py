"""Saved policies: weights, spaces and configuration, in files that cannot run code.

policy.pt       weights, tensors only
spaces.json     observation and action space
config.yaml     configuration of the run
score.json      score and epoch of the policy, sha256 of policy.pt
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.spaces import Discrete, MultiDiscrete
from torch import nn

from maze_train.core.errors import ConfigError, RunDirectoryError, ShapeError, SpaceError
from maze_train.core.files import atomic_write, read_json, read_regular, writable
from maze_train.core.folders import make_folders
from maze_train.core.names import CONFIG, SCORE, SPACES, WEIGHTS
from maze_train.core.state_files import load_archive
from maze_train.core.text import json_text
from maze_train.core.types import Array, Tensor, TensorTree, tree_leaves, tree_map
from maze_train.envs.faults import NonFiniteError, check_finite
from maze_train.envs.vector import as_array, row_writer
from maze_train.nets.acting import Actor, acting, as_arrays, device_of
from maze_train.nets.policy_model import PolicyModel
from maze_train.spaces.agents import ACTS, agent_spaces
from maze_train.spaces.describe import (
    MAX_NUMBERS,
    FlatView,
    flat_space,
    space_from_dict,
    space_to_dict,
    unflatten_value,
)
from maze_train.spaces.masks import mask_layout
from maze_train.spaces.tensors import as_tensors

DIGEST = "sha256"
MAX_WEIGHTS_NBYTES = 1 << 32

WITHOUT_INFO = "pass the observation alone: obs, info = env.reset(); policy.act(obs)"
"""Hint if `act` is called with the result of `reset` instead of an observation."""

JOINT_OBSERVATION = (
    "a multi-agent policy acts on the joint observation of all agents, as returned by reset() and "
    "step() of maze_train.JointEnv(env) or of maze_train.EnvFactory(env_config)()"
)
"""Hint if `act` is called with observations by agent, such as those of PettingZoo."""


@runtime_checkable
class HasValues(Protocol):
    """Model with state values."""

    def values(self, obs: TensorTree, *state: Tensor) -> Tensor:
        """Return the values of observations, `[...]`; recurrent models require their states."""
        ...


class PolicyWriter:
    """Writes the weights, spaces and configuration of a policy to a directory.

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
        self._spaces = json_text(
            {
                "observation_space": space_to_dict(observation_space),
                "action_space": space_to_dict(action_space),
            },
        )

    def __call__(
        self, directory: Path, weights: dict[str, torch.Tensor], score: dict[str, Any]
    ) -> None:
        """Write spaces and configuration, then the weights, then the score.

        The score contains the digest of the weights. If the process is killed before the score is
        written, the score is missing but the policy is valid.
        """
        buffer = io.BytesIO()
        torch.save(weights, buffer)
        data = buffer.getvalue()
        described = json_text({**score, DIGEST: hashlib.sha256(data).hexdigest()})
        for name, text in ((SPACES, self._spaces), (CONFIG, self._config_text)):
            with atomic_write(directory / name) as file:
                file.write(text.encode())
        with atomic_write(directory / WEIGHTS) as file:
            file.write(data)
            (directory / SCORE).unlink(missing_ok=True)  # The score of earlier weights.
        with atomic_write(directory / SCORE) as file:
            file.write(described.encode())


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a saved policy.

    Raises:
        RunDirectoryError: If the files are missing or damaged.
    """
    path, score = directory / WEIGHTS, read_score(directory)
    while True:
        try:
            data = read_regular(path, MAX_WEIGHTS_NBYTES)
        except OSError as error:
            raise RunDirectoryError(f"{path} is missing or damaged: {error}") from error
        if not score or hashlib.sha256(data).hexdigest() == score.get(DIGEST):
            break
        before, score = score, read_score(directory)
        if score == before:  # If not, a run has just replaced both files.
            raise RunDirectoryError(f"{path} is damaged: its sha256 differs from {SCORE}")
    try:
        weights = load_archive(data)
    except Exception:  # Untrusted files can cause any exception.
        weights = None
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in weights.items()
    ):
        raise RunDirectoryError(
            f"{path} is damaged: expected a mapping of names to tensors; no code in the file was "
            "run"
        )
    return weights


def read_score(directory: Path) -> dict[str, Any]:
    """Read the score of a policy and the digest of its weights; empty without a file.

    Raises:
        RunDirectoryError: If the file is damaged.
    """
    return read_json(directory / SCORE)


def read_spaces(directory: Path) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Read observation and action space of a saved policy.

    Raises:
        RunDirectoryError: If the files are missing or damaged.
    """
    path = directory / SPACES
    try:
        data = read_json(path)
        observation_space, action_space = (
            _checked_space(data[key]) for key in ("observation_space", "action_space")
        )
    except SpaceError as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunDirectoryError(f"{path} is missing or damaged: {error}") from error
    return observation_space, action_space


def _checked_space(data: dict[str, Any]) -> spaces.Space[Any]:
    """Return the described space, after checking that networks support the space.

    Raises:
        SpaceError: If the space is not supported.
    """
    space = space_from_dict(data)
    for leaf in FlatView(space).leaves.values():
        choices = leaf.n if isinstance(leaf, Discrete) else 0
        if isinstance(leaf, MultiDiscrete):
            choices = leaf.nvec.max(initial=0)
        if choices > MAX_NUMBERS:
            raise SpaceError(f"a space has {choices} choices: at most {MAX_NUMBERS} can be read")
    return space


class TrainedPolicy:
    """Policy that acts on raw observations of the environment.

    Recurrent policies keep their state between calls: call `reset` at the start of each episode. If
    the batch size changes, the state is reset.

    Args:
        model: The model with its weights.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
        seed: Seed of sampled actions.
        settings: Configuration of the run as text, for `save`.
        missing: Setting whose object was not passed when the policy was loaded, so that `values`
            are unknown; empty: none.
    """

    def __init__(
        self,
        model: nn.Module,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        seed: int = 0,
        *,
        settings: str = "",
        missing: str = "",
    ) -> None:
        self._settings, self._missing = settings, missing
        self.model = model
        self.observation_space = observation_space
        self.action_space = action_space
        self._flat_space = flat_space(observation_space)
        self._view = FlatView(observation_space)
        hidden = model.critic_keys if isinstance(model, PolicyModel) else ()
        self._acting_view = FlatView(observation_space, hidden) if hidden else self._view
        self._masks = mask_layout(observation_space, action_space)
        self._has_agents = agent_spaces(observation_space, action_space) is not None
        self._generator = torch.Generator().manual_seed(seed)
        self._actor: Actor | None = None

    def save(self, path: str | Path) -> Path:
        """Write the policy to a directory, from which `load_policy(path)` loads it.

        Args:
            path: The directory; created if necessary. The files of another policy are replaced.

        Raises:
            ConfigError: If the policy was created neither by training nor by `load_policy`, or the
                directory cannot be written.
        """
        if not self._settings:
            problem = "cannot be saved without the settings of its run; policies of train() and "
            problem += "load_policy() have them"
            raise ConfigError("policy", problem, type(self.model).__name__)
        directory = Path(path)
        with writable("path", directory):
            make_folders(directory)
            write = PolicyWriter(self.observation_space, self.action_space, self._settings)
            write(directory, dict(self.model.state_dict()), {})
        return directory

    def reset(self, ended: object = None) -> None:
        """Reset the recurrent state; call at the start of an episode.

        Args:
            ended: For a batch, whether the episode of each environment ended, `[n]` bool; None:
                all.

        Raises:
            ShapeError: If the size of `ended` differs from the size of the last batch.
        """
        if ended is None:
            self._actor = None
        elif self._actor is not None:
            self._actor.forget(_flags("ended", ended, len(self._actor.hidden_state)))

    @torch.no_grad()
    def act(self, observation: object, deterministic: bool = True) -> Any:
        """Return the action for one observation, or the actions for a batch.

        Args:
            observation: One observation of the space, or a batch with one leading dimension (for
                Dict and Tuple spaces, in every subspace). Keys of `model.critic_obs` may be
                missing.
            deterministic: Whether to take the most likely action instead of a sampled one.

        Returns:
            An action of the action space, or a batch of actions with a leading dimension.

        Raises:
            SpaceError: If the observation is invalid: the shape matches neither one observation nor
                a batch, the values are outside the space (floats for uint8, an unknown
                category), a value is NaN or infinite, or no action is legal.
        """
        obs, batched = self._read(observation, self._acting_view)
        return self._act(self._actor_for(obs), obs, batched, deterministic)

    @torch.no_grad()
    def predict(
        self,
        observation: object,
        state: Array | None = None,
        episode_start: object = None,
        deterministic: bool = False,
    ) -> tuple[Any, Array | None]:
        """Return actions and the next recurrent state, like `predict` of Stable-Baselines3.

        Unlike `act`, the recurrent state is passed in and returned, so calls are independent.

        Args:
            observation: See `act`.
            state: Recurrent state returned by the last call, `[n, S]`; None: zeros, as at the start
                of an episode.
            episode_start: For a batch, whether an episode of each environment starts, `[n]` bool;
                the state of these environments is set to zeros. None: no episode starts.
            deterministic: Whether to take the most likely action instead of a sampled one.

        Returns:
            The actions as returned by `act`, and the next recurrent state `[n, S]` (n = 1 for one
            observation), None for feed-forward policies.

        Raises:
            ShapeError: If the batch sizes of `state`, `episode_start` and `observation` differ.
            SpaceError: See `act`.
        """
        obs, batched = self._read(observation, self._acting_view)
        actor = Actor(self.model, len(tree_leaves(obs)[0]))
        if state is not None:
            given = torch.as_tensor(state, dtype=actor.hidden_state.dtype)
            if given.shape != actor.hidden_state.shape:
                expected = list(actor.hidden_state.shape)
                raise ShapeError(f"state has shape {list(given.shape)}, expected {expected}")
            actor.hidden_state = given.to(actor.hidden_state.device)
        if episode_start is not None:
            actor.forget(_flags("episode_start", episode_start, len(actor.hidden_state)))
        actions = self._act(actor, obs, batched, deterministic)
        return actions, actor.hidden_state.cpu().numpy() if actor.state_size else None

    @torch.no_grad()
    def values(self, observation: object) -> Any:
        """Return state values in units of (scaled) returns.

        A2C, PPO and IMPALA: output of the critic. DQN: maximum of the action values. The recurrent
        state does not change.

        Args:
            observation: See `act`; no keys may be missing. For recurrent policies, the observation
                after the last call of `act`.

        Returns:
            A float, or an array `[n]` for a batch.

        Raises:
            ConfigError: If the policy has no state values.
            SpaceError: See `act`.
        """
        model = self.model
        if self._missing:
            problem = "was passed in Python; the policy was loaded without it and only acts. Pass "
            problem += f"it again: load_policy(run_dir, **{{{self._missing!r}: ...}})"
            raise ConfigError(self._missing, problem)
        if not isinstance(model, HasValues):
            problem = "has no state values; available for A2C, PPO, IMPALA and DQN"
            raise ConfigError("policy", problem, type(model).__name__)
        obs, batched = self._read(observation, self._view)
        memory = self._actor_for(obs).hidden_state
        found = model.values(obs, memory) if memory.shape[1] else model.values(obs)
        return found.cpu().numpy() if batched else float(found)

    @torch.no_grad()
    def probabilities(self, observation: object) -> Any:
        """Return probabilities of discrete actions; for DQN, including exploration.

        The recurrent state does not change.

        Args:
            observation: See `act`.

        Returns:
            `[N]`, in the order of the actions, or `[n, N]` for a batch. MultiDiscrete and
            MultiBinary: the probabilities of all components, concatenated. Dict and Tuple spaces:
            one array per subspace, by key.

        Raises:
            SpaceError: If actions are not discrete, or the observation is invalid.
        """
        obs, batched = self._read(observation, self._acting_view)
        actor = self._actor_for(obs)
        memory, model, n = actor.hidden_state, actor.model, len(actor.hidden_state)
        # Random opponents require noise to act; the noise does not affect probabilities.
        noise = model.noise_for(n, torch.Generator(), True, memory.device)
        params = model.act(obs, memory, noise, True).params
        found = {
            key: part.choice_probs(own)[0].cpu().numpy()[slice(None) if batched else 0]
            for key, (part, own) in model.parts(params).items()
        }
        return found.get("", found)

    def _read(self, observation: Any, view: FlatView) -> tuple[TensorTree, bool]:
        """Convert observations to a batch; also return whether the input was a batch."""
        try:
            lead = self._leading_shape({key: as_array(key, v) for key, v in view.read(observation)})
            columns = {
                key: np.empty((1, *lead, *(leaf.shape or ())), leaf.dtype)
                for key, leaf in view.leaves.items()
            }
            row_writer(view, columns)(0, observation)
        except SpaceError as error:
            pair = isinstance(observation, tuple) and len(observation) == 2
            if pair and isinstance(observation[1], dict):
                raise SpaceError(f"{error}; {WITHOUT_INFO}") from error
            if self._has_agents and isinstance(observation, Mapping) and ACTS not in observation:
                raise SpaceError(f"{error}; {JOINT_OBSERVATION}") from error
            raise
        # Inputs have a batch dimension, which has size 1 for a single observation.
        parts = {key: column[0] for key, column in columns.items()} if lead else columns
        self._check_values(parts)
        tensors = as_tensors(self._flat_space, parts.get("", parts))
        model = acting(self.model)
        if self._has_agents and not model.state_size:
            # Return the actions of all agents, like an exported policy.
            joint = cast("dict[str, Tensor]", tensors)
            tensors = {**joint, ACTS: torch.ones_like(joint[ACTS])}
        device = device_of(model)
        return tree_map(lambda x: x.to(device), tensors), bool(lead)

    def _check_values(self, parts: dict[str, Any]) -> None:
        """Raise SpaceError for non-finite values and observations without a legal action."""
        try:
            check_finite(parts)
        except NonFiniteError as error:
            raise SpaceError(str(error)) from None
        row = None if self._masks is None else self._masks.first_illegal_row(parts)
        if row is not None and self._masks is not None:
            problem = self._masks.illegal_part({key: value[row] for key, value in parts.items()})
            raise SpaceError(f"observation {row}: {problem}")

    def _act(self, actor: Actor, obs: TensorTree, batched: bool, deterministic: bool) -> object:
        """Return actions of the action space."""
        n, device = len(actor.hidden_state), actor.hidden_state.device
        noise = actor.model.noise_for(n, self._generator, deterministic, device)
        result = as_arrays(actor.act(obs, noise, deterministic).env_actions)
        if not batched:
            result = tree_map(lambda x: x[0], result)
        return unflatten_value(self.action_space, result)

    def _actor_for(self, obs: TensorTree) -> Actor:
        """Return the actor for a batch; create a new actor if the batch size has changed."""
        n = len(tree_leaves(obs)[0])
        if self._actor is None or len(self._actor.hidden_state) != n:
            self._actor = Actor(self.model, n)
        return self._actor

    def _leading_shape(self, parts: dict[str, Array]) -> tuple[int, ...]:
        """Return `(n,)` for a batch of n observations, `()` for a single observation."""
        shapes = {key: leaf.shape or () for key, leaf in self._view.leaves.items()}
        leads = {
            value.shape[: max(value.ndim - len(shapes[key]), 0)] for key, value in parts.items()
        }
        lead = next(iter(leads))
        fits = all(value.shape == (*lead, *shapes[key]) for key, value in parts.items())
        if fits and len(lead) <= 1:
            return lead
        given = {key: list(value.shape) for key, value in parts.items()}
        raise SpaceError(
            f"an observation of shape {given.get('', given)} is neither one observation of "
            f"{self.observation_space} nor a batch of them"
        )


def _flags(name: str, given: object, n: int) -> Array:
    """Convert one flag per environment to an array.

    Raises:
        ShapeError: If the number of flags is not n.
    """
    flags = np.asarray(given, np.bool_)
    if flags.size != n or flags.ndim > 1:
        raise ShapeError(f"{name} has shape {list(flags.shape)}, expected [{n}]")
    return np.atleast_1d(flags)
