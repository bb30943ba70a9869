"""Error messages for failing environments, and checks for non-finite values."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from maze_train.core.errors import EnvError, printable
from maze_train.core.targets import headless_hint
from maze_train.envs.types import Mask

if TYPE_CHECKING:
    from maze_train.envs.vector import Array

ON_NON_FINITE = ("raise", "skip")
"""Reactions to non-finite values."""


READERS = ("maze_train.", "gymnasium.")
"""Packages that process the results of environments."""

DRAWERS = ("gymnasium.envs.mujoco.mujoco_rendering", "mujoco.egl", "mujoco.osmesa", "OpenGL")
"""Packages that MuJoCo uses for rendering."""

NO_DISPLAY = (
    "; on a machine without a display, set the environment variable MUJOCO_GL=egl (requires "
    "libegl1) or MUJOCO_GL=osmesa (requires libosmesa6)"
)
"""Hint for rendering errors."""

OLD_SIGNATURE = re.compile(r"unpack|unexpected keyword argument '(seed|options)'|^info is ")

NEW_SIGNATURES = (
    "; expected reset(*, seed=None, options=None) -> (observation, info) and step(action) -> "
    "(observation, reward, terminated, truncated, info). "
)
SHIMMY = (
    "Environments of OpenAI Gym need the compatibility wrapper "
    "shimmy.GymV21CompatibilityV0(env=...), or env=shimmy:GymV21Environment-v0 "
    "env.kwargs.env_id=<its id> (pip install shimmy gym)"
)
"""Hint for environments with the old gym interface."""


SEVERAL_REWARDS = (
    "; if each agent has a separate reward, derive the environment from maze_train.MultiAgentEnv, "
    "whose step returns rewards by agent"
)
"""Hint for multi-agent environments that imitate the single-agent interface."""


ONE_REWARD = "return float(reward[0])"
"""Remedy for rewards of shape (1,)."""


def explained(error: BaseException) -> str:
    """Return the text of an exception of an environment, with a hint if the cause is known.

    Code that catches arbitrary exceptions of an environment must call this function.

    Raises:
        KeyboardInterrupt: If `error` is a KeyboardInterrupt.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    text = f"{type(error).__name__}: {error}"
    if any(module.startswith(DRAWERS) for module in modules):
        return text + NO_DISPLAY
    text += headless_hint(error)
    if not frames or not modules[-1].startswith(READERS):
        return text
    frame = frames[-1]
    # The error was raised while the result of the environment was processed.
    reward = frame.f_locals.get("reward", 0.0)
    if isinstance(reward, (list, tuple, np.ndarray)) and np.size(reward) == 1:
        return f"{type(error).__name__}: reward is {reward!r}, expected a number: {ONE_REWARD}"
    if not is_number(reward):
        several = SEVERAL_REWARDS if isinstance(reward, (list, tuple, dict, np.ndarray)) else ""
        return f"{type(error).__name__}: reward is {reward!r}, expected a number{several}"
    for name in ("terminated", "truncated"):
        flag = frame.f_locals.get(name)
        if isinstance(flag, (str, list, tuple, np.ndarray)) and not is_flag(flag):
            return f"{type(error).__name__}: {name} is {flag!r}, expected True or False"
    return text + NEW_SIGNATURES + SHIMMY if OLD_SIGNATURE.search(str(error)) else text


def checked_info(info: object) -> dict[str, Any]:
    """Return `info` after checking its type.

    Raises:
        TypeError: If `info` is not a dict.
    """
    if not isinstance(info, dict):
        raise TypeError(f"info is {info!r}, expected a dict")
    return info


def separate_processes(num_envs: object) -> str:
    """Return instructions for running each environment in a separate process.

    Args:
        num_envs: Number of training environments.
    """
    return (
        f"run each in a separate process with runner=local runner.n_workers={num_envs} and "
        f"evaluation.concurrency={num_envs} or less"
    )


def is_flag(flag: object) -> bool:
    """Whether a value is a bool or a number; None counts as False."""
    array = np.asarray(flag)
    is_one = array.size == 1 and not isinstance(flag, (list, tuple))
    return flag is None or (is_one and array.dtype.kind in "biuf")


def checked_flags(terminated: object, truncated: object) -> None:
    """Check the types of the flags at the end of an episode.

    Raises:
        TypeError: If a flag is neither a bool nor a number.
    """
    if not (is_flag(terminated) and is_flag(truncated)):
        raise TypeError("a flag is not a bool")


def is_number(reward: Any) -> bool:
    """Whether a reward can be converted to float."""
    try:
        float(reward)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def episode_fault(number: int, step: int, seed: int, error: BaseException) -> str:
    """Describe the failure of an environment during an episode.

    Args:
        number: Index of the environment.
        step: Number of the failed step in the episode; 0 for the reset.
        seed: Seed of the episode.
        error: The exception.

    Raises:
        KeyboardInterrupt: If `error` is a KeyboardInterrupt.
    """
    when = f"at step {step}" if step else "in the reset"
    return f"environment {number} failed {when} of the episode with seed {seed}: {explained(error)}"


class EpisodeError(EnvError):
    """Error raised when an episode fails.

    Args:
        text: Description of the failure.
        seed: Seed of the episode.
    """

    def __init__(self, text: str, seed: int) -> None:
        super().__init__(text, seed)
        self.text, self.seed = text, seed

    def __str__(self) -> str:
        return printable(self.text)


MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""Largest finite float32; rewards and float observations are stored as float32."""

PIECE = 2**13
"""Number of elements per dot product; BLAS uses several threads for longer vectors."""

WEIGHT = 2.0**-20
"""Weight small enough to prevent overflow of the dot product."""


class NonFiniteError(EnvError):
    """Error raised when an environment returns NaN or infinity."""

    is_final = True  # Restarting the worker would reproduce the value.


class FiniteCheck:
    """Fast check that arrays contain only values that are finite in float32.

    Each array is checked by one dot product, the fastest check in NumPy. The second factor is a
    small constant, which preserves NaN and infinity. A float64 array is multiplied by itself,
    because float64 can represent the square of any float32.

    Args:
        columns: Contiguous arrays; arrays of other dtypes are skipped.
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self._pieces: list[tuple[Array, Array, float]] = []
        for column in columns.values():
            if column.dtype.kind == "f":
                flat = column.reshape(-1)
                for part in (flat[k : k + PIECE] for k in range(0, len(flat), PIECE)):
                    is_wide = column.dtype.itemsize > 4
                    weights = part if is_wide else np.full_like(part, WEIGHT)
                    self._pieces.append((part, weights, MAX_FLOAT32 ** (1 + is_wide)))

    def passes(self) -> bool:
        """Return True only if all current values are finite in float32.

        The result may be False for finite float64 values near the largest float32;
        `non_finite_rows` is exact.
        """
        try:
            for part, weights, limit in self._pieces:
                if not abs(float(part.dot(weights))) <= limit:
                    return False
        except RuntimeWarning:  # Overflow, or infinities of both signs.
            return False
        return True


def are_finite(values: Array) -> npt.NDArray[np.bool_]:
    """Return the mask of values that are finite in float32, the storage dtype."""
    with np.errstate(over="ignore"):
        finite: npt.NDArray[np.bool_] = np.isfinite(values.astype(np.float32, copy=False))
    return finite


def check_finite(columns: Mapping[str, Any], what: str = "observation") -> None:
    """Check that the leaves of an observation are finite in float32.

    Args:
        columns: Leaves by key; the key of a single leaf is empty.
        what: Name in the message.

    Raises:
        NonFiniteError: If a value is not finite. The message contains the leaf, the value and its
            index.
    """
    for key, value in columns.items():
        array = np.asarray(value)
        if array.dtype.kind != "f" or (finite := are_finite(array)).all():
            continue
        index = tuple(int(k) for k in np.argwhere(~finite)[0])
        where = f" at index {index}" if index else ""
        name = f"{what} {key!r}" if key else f"the {what}"
        raise NonFiniteError(f"{name} is {array[index]}{where}, {_expected(array[index])}")


def _expected(value: float) -> str:
    limit = f" in the range of float32, up to {MAX_FLOAT32:.2g}" if math.isfinite(value) else ""
    return f"expected a finite number{limit}"


def check_finite_reward(reward: float) -> None:
    """Check that a reward is finite in float32.

    Raises:
        NonFiniteError: If the reward is NaN or infinite in float32.
    """
    if not abs(reward) <= MAX_FLOAT32:
        raise NonFiniteError(f"reward is {reward}, {_expected(reward)}")


def non_finite_rewards(rewards: Array) -> Mask:
    """Return the mask [n] of rewards that are not finite in float32."""
    return ~(np.abs(rewards) <= MAX_FLOAT32)


def non_finite_rows(columns: Mapping[str, Array]) -> Mask:
    """Return the mask [n] of rows of arrays [n, ...] that are not finite in float32."""
    bad = np.zeros(len(next(iter(columns.values()))), np.bool_)
    for column in columns.values():
        if column.dtype.kind == "f":
            bad |= ~are_finite(column).reshape(len(column), -1).all(axis=1)
    return bad
