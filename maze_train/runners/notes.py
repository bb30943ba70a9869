"""Notes for the user about a run, before it begins and when it ends."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze_train.envs.factory import env_name
from maze_train.runners.speed import speed_notes
from maze_train.spaces.describe import (
    choice_sizes,
    flat_spaces,
    image_layout,
    is_image,
    is_mask_key,
)
from maze_train.targets import TARGET, locate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from maze_train.config.train_config import TrainConfig
    from maze_train.envs.config import EnvConfig
    from maze_train.training.builder import AlgorithmBuilder
    from maze_train.training.policy_files import TrainedPolicy


LEAST_RUN_S = 5.0
"""Seconds of a run from which on its speed is worth a line."""

LARGE_IMAGE = 10_000
"""Pixels of an image from which on it is worth a line."""

LARGE_ONE_HOT = 10_000
"""Inputs of a one-hot observation from which on it is worth a line."""


def start_notes(config: TrainConfig, observation_space: spaces.Space[Any]) -> Iterator[str]:
    """The lines that a run begins with.

    Args:
        config: The configuration.
        observation_space: Observation space of one environment.
    """
    limit = config.evaluation.max_episode_steps if config.evaluation.n_episodes else 0
    if lacks_time_limit(config.env):
        cut = f"; evaluation cuts it after {limit:,} steps (evaluation.max_episode_steps)"
        yield (
            f"{env_name(config.env)} declares no time limit: an episode goes on until it ends "
            f"by itself{cut if limit else ''}; env.max_episode_steps sets one for training as well"
        )
    for key, leaf in flat_spaces(observation_space).items():
        name = f"the observation {key!r}" if key else "the observation"
        if is_mask_key(key) or config.model.policy is not None:
            continue
        if is_float_image(leaf) and config.model.image_encoder != "flat":
            yield (
                f"{name} has the shape {leaf.shape} of an image, but numbers of type {leaf.dtype}: "
                f"it is flattened to {np.prod(leaf.shape or ()):,} inputs; convolutions read uint8"
            )
        size = sum(choice_sizes(leaf))
        if size >= LARGE_ONE_HOT:
            yield (
                f"{name} is one-hot with {size:,} inputs: nothing that is learned about one value "
                "holds for others; numbers that describe them are easier to learn from"
            )
    yield from large_image_notes(config.env, observation_space)


def large_image_notes(config: EnvConfig, space: spaces.Space[Any]) -> Iterator[str]:
    """The line about the largest image, if it is so large that updates take long."""
    images = {
        key: image_layout(leaf)
        for key, leaf in flat_spaces(space).items()
        if isinstance(leaf, spaces.Box) and is_image(leaf)
    }
    key = max(images, key=lambda key: images[key].height * images[key].width, default=None)
    if key is None:
        return
    image = images[key]
    factor = math.ceil(math.sqrt(image.height * image.width / LARGE_IMAGE))
    if factor > 1:
        small = f"{image.height // factor} x {image.width // factor}"
        remedy = f"let the environment give smaller ones, such as {small}"
        if config.backend == "gymnasium":
            node = f"{{_target_: maze_train.ShrinkImagesWrapper, factor: {factor}}}"
            also = "..., " if config.wrappers else ""
            remedy = f"with {small} it is faster: 'env.wrappers=[{also}{node}]'"
        yield (
            f"{f'the observation {key!r}' if key else 'the observation'} is an image of "
            f"{image.height} x {image.width} pixels, and the network reads all of them: {remedy}"
        )


def end_notes(
    rows: Sequence[Mapping[str, float]],
    info_keys: Sequence[str],
    builder: AlgorithmBuilder[Any],
    policy: TrainedPolicy,
) -> Iterator[str]:
    """The lines that a run ends with.

    Args:
        rows: Metrics of the epochs of this process.
        info_keys: Keys of infos that are to be metrics.
        builder: What the run was built with.
        policy: The policy of the run.
    """
    names = {name for row in rows for name in row}
    for key in info_keys:
        if rows and not names & {f"train/info/{key}", f"eval/info/{key}"}:
            yield f"tracking.info_keys: no episode ended with a number under {key!r} in its info"
    if sum(row.get("time/epoch_s", 0.0) for row in rows) >= LEAST_RUN_S:
        yield from speed_notes(rows, builder, policy)


def lacks_time_limit(config: EnvConfig) -> bool:
    """Whether nothing cuts the episodes of training, as far as it is known without playing."""
    wrappers = [str(node[TARGET]) for node in (*config.wrappers, *config.training_wrappers)]
    if config.max_episode_steps is not None or any("TimeLimit" in name for name in wrappers):
        return False
    if config.target is not None:
        # The environment that a function returns may have a limit.
        return inspect.isclass(locate(config.target, key="env._target_"))
    spec = gymnasium.registry.get((config.id or "").rpartition(":")[2])
    # Atari games have a limit of their own, in frames.
    is_game = spec is not None and spec.kwargs.get("max_num_frames_per_episode")
    return spec is not None and spec.max_episode_steps is None and not is_game


def is_float_image(space: spaces.Space[Any]) -> bool:
    """Whether a space would be an image if its numbers were bytes."""
    if not isinstance(space, spaces.Box) or space.dtype == np.uint8 or len(space.shape) < 3:
        return False
    return is_image(spaces.Box(0, 255, space.shape, np.uint8))
