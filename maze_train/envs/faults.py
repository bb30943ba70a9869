"""Messages about environments that fail."""

from __future__ import annotations

import re
import traceback
from typing import Any

__all__ = ["SHIMMY", "episode_fault", "explained"]

READERS = ("maze_train.", "gymnasium.")
"""Packages that read what an environment returns."""

OLD_SIGNATURE = re.compile(r"unpack|unexpected keyword argument '(seed|options)'|^info is ")

NEW_SIGNATURES = (
    "; expected reset(*, seed=None, options=None) -> (observation, info) and step(action) -> "
    "(observation, reward, terminated, truncated, info). "
)
SHIMMY = (
    "An environment of OpenAI Gym is used by the compatibility wrapper "
    "shimmy.GymV21CompatibilityV0(env=...), or as env=shimmy:GymV21Environment-v0 "
    "env.kwargs.env_id=<its id> (pip install shimmy gym)"
)
"""Remedy for environments of the old interface: a compatibility wrapper."""


def explained(error: BaseException) -> str:
    """Describe what an environment raised, with the remedy where it is known.

    Every caller that catches all exceptions of an environment gets its message here.

    Raises:
        KeyboardInterrupt: The error itself, if it is one: Ctrl-C is no fault of an environment.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    frame = next((f for f, _ in reversed(list(traceback.walk_tb(error.__traceback__)))), None)
    text = f"{type(error).__name__}: {error}"
    if frame is None or not str(frame.f_globals.get("__name__")).startswith(READERS):
        return text
    # It was raised where something was read that the environment had returned.
    reward = frame.f_locals.get("reward", 0.0)
    if not is_number(reward):
        return f"{type(error).__name__}: reward is {reward!r}, expected a number"
    return text + NEW_SIGNATURES + SHIMMY if OLD_SIGNATURE.search(str(error)) else text


def is_number(reward: Any) -> bool:
    """Whether a reward can be read as a number."""
    try:
        float(reward)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def episode_fault(number: int, step: int, seed: int, error: BaseException) -> str:
    """Describe the failure of an environment in an episode.

    Args:
        number: Number of the environment.
        step: Steps of the episode, with the one that failed; 0: its reset.
        seed: Seed of the episode.
        error: The exception.

    Raises:
        KeyboardInterrupt: The error itself, if it is one.
    """
    when = f"at step {step}" if step else "in the reset"
    return f"environment {number} failed {when} of the episode with seed {seed}: {explained(error)}"
