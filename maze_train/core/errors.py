"""Exceptions of maze_train, and helpers for error messages."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path


def printable(text: str) -> str:
    r"""Escape characters that are neither printable nor line breaks, for example as `\x1b`.

    Names from untrusted files could otherwise control the terminal.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


class MazeTrainError(Exception):
    """Base class of all exceptions of maze_train."""

    def __str__(self) -> str:
        return printable(super().__str__())


def user_cause(error: BaseException) -> BaseException | None:
    """Return the third-party exception that caused an error of maze_train, or None."""
    while isinstance(error, MazeTrainError):
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return error


PASSING_ON = frozenset((*sys.stdlib_module_names, "torch", "gymnasium", "hydra"))
"""Packages through which maze_train calls user code."""

LIBRARIES = frozenset(
    (
        *("ale_py", "brax", "cv2", "envpool", "gymnax", "huggingface_hub", "imageio_ffmpeg", "jax"),
        *("matplotlib", "minari", "mlflow", "mujoco", "numpy", "omegaconf", "onnx", "optuna"),
        *("onnxruntime", "onnxscript", "pettingzoo", "ray", "rich", "tensorboard", "wandb", "yaml"),
    )
)
"""Dependencies for which maze_train provides error messages."""


def failed_in_user_code(error: BaseException) -> bool:
    """Return whether an error was caused by an exception in user code.

    User code is all code called by maze_train except its dependencies.
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
    """Invalid configuration value.

    Args:
        key: Dotted name of the setting, such as `algorithm.lr`.
        problem: What is wrong, what is allowed, and how to fix it, in one or two sentences.
        value: The invalid value; omitted from the message if not given.
        remedy: Maps the full dotted name of the setting to the end of the message; must be
            picklable.
    """

    def __init__(
        self,
        key: str,
        problem: str,
        value: object = ...,
        remedy: Callable[[str], str] | None = None,
    ) -> None:
        self.key = key
        self.problem = problem
        self.value = value
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        given = "" if self.value is ... else f" = {self.value!r}"
        remedy = "" if self.remedy is None else self.remedy(self.key)
        return printable(f"{self.key}{given}: {self.problem}{remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.key, self.problem, self.value, self.remedy)

    def below(self, prefix: str) -> ConfigError:
        """Return the same error with the key prefixed by the parent node `prefix`."""
        key = f"{prefix}.{self.key}" if prefix and self.key else prefix or self.key
        return type(self)(key, self.problem, self.value, self.remedy)


class ShapeError(MazeTrainError):
    """Shapes of tensors do not match."""


class SpaceError(MazeTrainError):
    """Unsupported space, or a value outside its space."""


class EnvError(MazeTrainError):
    """An environment could not be built, raised an error, or returned an invalid value.

    Attributes:
        seed: Seed of the failed episode; None: unknown.
        is_final: Whether a restarted worker would fail in the same way.
    """

    seed: int | None = None
    is_final: bool = False


class WorkerError(EnvError):
    """A worker process that steps environments raised an error, died or timed out."""


class TrainingError(MazeTrainError):
    """Training cannot continue."""


class CallbackError(TrainingError):
    """A callback or a user-defined evaluator raised an error.

    Attributes:
        checkpoint: Checkpoint from which the run can be resumed; None before the checkpoint is
            saved.
        is_common: Whether every process of the run raised the error.
    """

    at_once = False
    is_common = False
    checkpoint: Path | None = None


class RunDirectoryError(MazeTrainError):
    """A run directory is missing, incomplete, damaged, or in use."""


class ExportError(MazeTrainError):
    """A policy cannot be exported, or the exported policy returns different actions."""


class DatasetError(MazeTrainError):
    """A trajectory dataset is missing, damaged, in an unknown format, or incompatible."""


class DependencyError(MazeTrainError):
    """An installed dependency is too old."""


class MissingExtraError(MazeTrainError):
    """An optional dependency is not installed or does not work.

    Args:
        package: Name of the package.
        extra: Extra of `maze-train` that installs the package.
        purpose: Feature that requires the package.
        problem: Reason why the installed package does not work; None: the package is not
            installed.
    """

    def __init__(self, package: str, extra: str, purpose: str, problem: str | None = None) -> None:
        self.package, self.extra, self.purpose = package, extra, purpose
        self.problem = problem
        found = f'is not installed: pip install "maze-train[{extra}]"'
        if problem is not None:
            found = f"is installed, but does not work: {problem}"
        super().__init__(f"{purpose} needs the package {package!r}, which {found}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.package, self.extra, self.purpose, self.problem)


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the candidates closest in spelling to `word`, best first, ignoring case."""
    by_lower: dict[str, str] = {}
    for candidate in candidates:
        by_lower.setdefault(candidate.lower(), candidate)
    return [by_lower[m] for m in get_close_matches(word.lower(), by_lower, n=count, cutoff=0.6)]


def did_you_mean(names: Iterable[object], before: str = "; ", after: str = "") -> str:
    """Format a "did you mean" question; empty without names."""
    listed = " or ".join(map(str, names))
    return f"{before}did you mean {listed}?{after}" if listed else ""


def one_of(word: str, allowed: Iterable[str]) -> str:
    """List the allowed names for an error message, and suggest the name closest to `word`."""
    names = list(allowed)
    meant = did_you_mean(map(repr, nearest(word, names, count=1)))
    return f"expected one of {', '.join(names)}{meant}"
