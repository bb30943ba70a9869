"""Failures of environments: their messages, and numbers that are not finite."""

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
"""Reactions to numbers that are not finite."""


READERS = ("maze_train.", "gymnasium.")
"""Packages that read what an environment returns."""

DRAWERS = ("gymnasium.envs.mujoco.mujoco_rendering", "mujoco.egl", "mujoco.osmesa", "OpenGL")
"""Packages by which MuJoCo draws."""

NO_DISPLAY = (
    "; on a machine without a display MuJoCo draws with MUJOCO_GL=egl or MUJOCO_GL=osmesa in the "
    "environment of the command, which need the libraries of libegl1 or of libosmesa6"
)
"""Remedy for those who lack what they load."""

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


SEVERAL_REWARDS = (
    "; if each agent has its own reward, derive the environment from maze_train.MultiAgentEnv, "
    "whose step returns rewards by agent"
)
"""Remedy for environments of several agents in the form of one."""


def explained(error: BaseException) -> str:
    """Describe an exception of an environment, with the remedy if it is known.

    Every caller that catches all exceptions of an environment gets its message here.

    Raises:
        KeyboardInterrupt: The error itself, if it is one: Ctrl-C is no fault of an environment.
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
    # It was raised where something was read that the environment had returned.
    reward = frame.f_locals.get("reward", 0.0)
    if not is_number(reward):
        several = SEVERAL_REWARDS if isinstance(reward, (list, tuple, dict, np.ndarray)) else ""
        return f"{type(error).__name__}: reward is {reward!r}, expected a number{several}"
    return text + NEW_SIGNATURES + SHIMMY if OLD_SIGNATURE.search(str(error)) else text


def checked_info(info: Any) -> dict[str, Any]:
    """`info` itself.

    Raises:
        TypeError: If it is not a dict.
    """
    if not isinstance(info, dict):
        raise TypeError(f"info is {info!r}, expected a dict")
    return info


def own_processes(num_envs: object) -> str:
    """How each environment gets a process of its own.

    Args:
        num_envs: Number of training environments.
    """
    return (
        f"give each a process of its own with runner=local runner.n_workers={num_envs} and "
        f"evaluation.concurrency={num_envs} or less"
    )


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


class EpisodeError(EnvError):
    """An episode failed.

    Args:
        text: Description of the failure, with place and time.
        seed: Seed of the episode.
    """

    def __init__(self, text: str, seed: int) -> None:
        super().__init__(text, seed)
        self.text, self.seed = text, seed

    def __str__(self) -> str:
        return printable(self.text)


MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""Largest number of the type in which rewards and observations of floats are stored."""

PIECE = 2**13
"""Numbers per dot product: BLAS uses threads for longer ones."""

WEIGHT = 2.0**-20
"""So small that a piece of the largest numbers does not overflow."""


class NonFiniteError(EnvError):
    """An environment returned NaN or an infinity."""

    is_final = True  # A worker that is started again would see the same number.


class FiniteCheck:
    """Quick test whether arrays hold only numbers that are finite in float32.

    It is built once and called after every step. Each array takes one dot product, the fastest
    test that NumPy offers: with a small constant, which keeps NaN and infinities, or of float64
    with the array itself, since float64 holds the squares of all numbers of float32.

    Args:
        columns: Contiguous arrays; those that do not hold floats are skipped.
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
        """Return True only if all numbers are finite in float32 now.

        Several float64 numbers near the largest float32 may fail the test: `non_finite_rows` is
        exact.
        """
        try:
            for part, weights, limit in self._pieces:
                if not abs(float(part.dot(weights))) <= limit:
                    return False
        except RuntimeWarning:  # overflow, or infinities of both signs, if warnings are errors
            return False
        return True


def are_finite(values: Array) -> npt.NDArray[np.bool_]:
    """Mask of the floats that are finite where they are stored, in float32."""
    with np.errstate(over="ignore"):
        finite: npt.NDArray[np.bool_] = np.isfinite(values.astype(np.float32, copy=False))
    return finite


def check_finite(columns: Mapping[str, Any], what: str = "observation") -> None:
    """Refuse leaves of one observation that hold NaN, infinities, or what float32 cannot hold.

    Args:
        columns: Leaves by key; the key of a lone leaf is empty.
        what: Name in the message.

    Raises:
        NonFiniteError: Naming the leaf, the value and its index.
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
    limit = f" that float32 can hold, up to {MAX_FLOAT32:.2g}" if math.isfinite(value) else ""
    return f"expected a finite number{limit}"


def check_finite_reward(reward: float) -> None:
    """Refuse a reward that is NaN, or infinite in single precision.

    Raises:
        NonFiniteError: Naming the value.
    """
    if not abs(reward) <= MAX_FLOAT32:
        raise NonFiniteError(f"reward is {reward}, {_expected(reward)}")


def non_finite_rewards(rewards: Array) -> Mask:
    """Mask of the rewards [n] that `check_finite_reward` refuses, [n]."""
    return ~(np.abs(rewards) <= MAX_FLOAT32)


def non_finite_rows(columns: Mapping[str, Array]) -> Mask:
    """Mask of the rows of arrays [n, ...] that `check_finite` refuses, [n]."""
    bad = np.zeros(len(next(iter(columns.values()))), np.bool_)
    for column in columns.values():
        if column.dtype.kind == "f":
            bad |= ~are_finite(column).reshape(len(column), -1).all(axis=1)
    return bad
