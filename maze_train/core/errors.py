"""All exceptions of the package; each class says when it is raised."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def printable(text: str) -> str:
    r"""A text for a terminal: what is neither to be seen nor a line break, as its code: `\x1b`.

    Names from a stranger's files could move the cursor or change the terminal otherwise.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


class MazeTrainError(Exception):
    """Base of every exception that the package raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


def foreign_cause(error: BaseException) -> BaseException | None:
    """Return the exception of other code that caused an error of this package; otherwise None."""
    while isinstance(error, MazeTrainError):
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return error


PASSING_ON = frozenset((*sys.stdlib_module_names, "torch", "gymnasium", "hydra"))
"""Packages through which this one calls the code of users."""

LIBRARIES = frozenset(
    (
        *("ale_py", "brax", "cv2", "envpool", "gymnax", "huggingface_hub", "imageio_ffmpeg", "jax"),
        *("matplotlib", "minari", "mlflow", "mujoco", "numpy", "omegaconf", "onnx", "optuna"),
        *("onnxruntime", "onnxscript", "pettingzoo", "ray", "rich", "tensorboard", "wandb", "yaml"),
    )
)
"""Packages that this one uses itself; what they raise is explained by our message."""


def failed_in_user_code(error: BaseException) -> bool:
    """Whether an error was caused by one that code of the user raised.

    That code is what this package called, apart from its own dependencies.
    """
    cause = error.__cause__
    if cause is None:
        return False
    is_next = False
    for frame, _ in traceback.walk_tb(cause.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == "maze_train":
            is_next = True
        elif is_next and package not in PASSING_ON:
            if package not in LIBRARIES:
                return True
            is_next = False
    return failed_in_user_code(cause)


class ConfigError(MazeTrainError):
    """A setting is wrong.

    Args:
        key: Dotted name of the setting, such as `algorithm.lr`.
        problem: The fault, the allowed values, and the remedy, in one or two sentences.
        value: The value that was given; left out of the message when it is not passed.
    """

    def __init__(self, key: str, problem: str, value: Any = ...) -> None:
        self.key = key
        self.problem = problem
        self.value = value
        super().__init__(str(self))

    def __str__(self) -> str:
        given = "" if self.value is ... else f" = {self.value!r}"
        return printable(f"{self.key}{given}: {self.problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key, self.problem, self.value)

    def below(self, prefix: str) -> ConfigError:
        """The same error seen from the node that holds this setting under `prefix`."""
        key = f"{prefix}.{self.key}" if prefix and self.key else prefix or self.key
        return type(self)(key, self.problem, self.value)


class ShapeError(MazeTrainError):
    """Tensors that must agree in shape do not."""


class SpaceError(MazeTrainError):
    """A space that the package cannot handle, or a value outside its space."""


class EnvError(MazeTrainError):
    """An environment could not be built, raised, or returned something invalid."""


class WorkerError(EnvError):
    """A process that steps environments raised, died or hung."""


class TrainingError(MazeTrainError):
    """Training cannot continue."""


class CallbackError(TrainingError):
    """A callback or an evaluator of the user raised.

    Attributes:
        checkpoint: From where the run can be continued, once it was saved.
    """

    at_once = False
    checkpoint: Path | None = None


class RunDirectoryError(MazeTrainError):
    """A run directory is missing, incomplete, damaged, or already taken."""


class ExportError(MazeTrainError):
    """A policy cannot be exported, or the file would act otherwise."""


class DatasetError(MazeTrainError):
    """A data set of trajectories is missing, damaged, foreign, or does not fit."""


class DependencyError(MazeTrainError):
    """An installed package is too old."""


class MissingExtraError(MazeTrainError):
    """An optional dependency is not installed, or broken.

    Args:
        package: Name of the package.
        extra: Name of the extra of `maze-train` that installs it.
        purpose: Feature that needs it.
        problem: Why it does not work; None: it is not installed.
    """

    def __init__(self, package: str, extra: str, purpose: str, problem: str | None = None) -> None:
        self.package, self.extra, self.purpose = package, extra, purpose
        self.problem = problem
        found = f'is not installed: pip install "maze-train[{extra}]"'
        if problem is not None:
            found = f"is installed, but does not work: {problem}"
        super().__init__(f"{purpose} needs the package {package!r}, which {found}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.package, self.extra, self.purpose, self.problem)


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates closest in spelling to `word`, best first, compared without regard to case."""
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    return [by_lower[m] for m in get_close_matches(word.lower(), by_lower, n=count, cutoff=0.6)]


def did_you_mean(names: Iterable[object], before: str = "; ", after: str = "") -> str:
    """The question whether one of some names was meant; empty without any."""
    listed = " or ".join(map(str, names))
    return f"{before}did you mean {listed}?{after}" if listed else ""


def one_of(word: str, allowed: Iterable[str]) -> str:
    """Name the words that are expected in place of `word`, and the nearest one."""
    names = list(allowed)
    meant = did_you_mean(map(repr, nearest(word, names, count=1)))
    return f"expected one of {', '.join(names)}{meant}"
