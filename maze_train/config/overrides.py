"""Brings the arguments of `maze-run` into the form in which Hydra accepts them.

Hydra has one spelling for each kind of override: `algorithm=ppo` where a defaults list names the
group, `+a.b=c` for a key that is new, `++a.b=c` for either. Users should not have to know which is
which, and an unknown key should be reported by the configuration classes, which know the nearest
correct one. Hydra is imported where its grammar is needed: it takes its time.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from glob import escape, glob
from itertools import pairwise

OPTIONS_WITH_VALUE = (
    "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--package", "-p",
    "--cfg", "-c", "--info", "-i", "--experimental-rerun",
)  # fmt: skip
INFO = ("--info", "-i")
CONFIG_NAME = ("--config-name", "-cn")
CONFIG_DIR = ("--config-dir", "-cd")
SWEEP = ("--multirun", "-m")
COMPLETION = ("--shell_completion", "-sc", "--shell-completion")
OPTIONS = (
    *OPTIONS_WITH_VALUE, *COMPLETION, "--help", "-h", "--hydra-help", "--version", "--resolve",
    "--run", "-r", *SWEEP, "--",
)  # fmt: skip
"""All options of the command: Hydra's, and those that are answered before it is called."""
PLAIN = re.compile(r"[A-Za-z0-9_/.:+%@-]+")
"""Texts that Hydra reads without quotes."""
PATHS = re.compile(
    r"run_dir|resume|base_run|runs?|output|output_dir|record_dir|study|film|runner\.dataset"
    r"|runner\.working_dir|policies\.[^.]+(\.source)?|hydra\.sweep\.dir"
)
"""Settings that name files or directories, whose letters are the user's."""
ASSIGNMENT = re.compile(r"(?P<plus>\+{0,2})(?P<key>[^\s=+~][^\s=]*)=(?P<value>.*)", re.DOTALL)


DEBUG_VARIABLE = "HYDRA_FULL_ERROR"
"""Environment variable with which tracebacks of all errors are shown, here as in Hydra."""

RUN_DIR_PROBLEM = "has no effect: a run goes to run_dir=<directory>, a sweep to hydra.sweep.dir"
"""What is wrong with `hydra.run.dir`."""


def shell_word(key: str, value: str) -> str:
    """The override `key=value` for a shell, in quotes where Hydra's grammar or the shell asks."""
    is_plain = PLAIN.fullmatch(value) is not None
    word = f"{key}={value if is_plain else quoted(value)}"
    return shlex.quote(word) if is_plain or set(word) & set('"$`\\!') else f'"{word}"'


def quoted(text: str) -> str:
    """Return a text in the quotes in which Hydra reads it letter by letter."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def as_typed(message: str, argv: Sequence[str]) -> str:
    """A message of Hydra, which knows the form of `normalise`, with the overrides as in `argv`."""
    for word in overrides_of(argv):
        match = ASSIGNMENT.fullmatch(word)
        if match is not None:
            pattern = rf"(?<![\w.+])\+*{re.escape(match['key'])}="
            message = word[: match.start("value")].join(re.split(pattern, message))
    return message


def config_name_of(line: str) -> str:
    """The primary config that a command line chooses; empty: the usual one."""
    words = line.split(" ")[:-1]  # without the word that is being typed
    return next((b for a, b in pairwise(words) if a in CONFIG_NAME), "")


def completions(line: str, config_names: Iterable[str]) -> list[str] | None:
    """What the last word of a command line may become: an option, its value, or a path.

    Args:
        line: The command line up to the cursor.
        config_names: Names that `-cn` takes.

    Returns:
        The words; None for an override that is no path, which Hydra completes.
    """
    before, _, word = line.rpartition(" ")
    previous = before.rpartition(" ")[2]
    if previous in CONFIG_NAME:
        return [name for name in sorted(config_names) if name.startswith(word)]
    if word.startswith("-"):
        return [option for option in OPTIONS if option.startswith(word)]
    key, equals, value = word.rpartition("=")
    if not (previous in CONFIG_DIR or (equals and PATHS.fullmatch(key.lstrip("+")))):
        return None
    found = sorted(glob(f"{escape(value)}*"))
    return [f"{key}{equals}{path}{'/' if os.path.isdir(path) else ''}" for path in found]


def config_folders(argv: Sequence[str]) -> list[str]:
    """The user's folders: `--config-dir X`, and plain ones in `hydra.searchpath`."""
    folders: list[str] = []
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name in CONFIG_DIR:
            folders.append(value if equals else following)
        elif name.lstrip("+") == "hydra.searchpath":
            entries = (entry.strip(" '\"") for entry in value.strip("[]").split(","))
            plain = (entry.removeprefix("file://") for entry in entries)
            folders += [entry for entry in plain if "://" not in entry]
    return [folder for folder in folders if folder]


def overrides_of(argv: Sequence[str]) -> list[str]:
    """The arguments that are neither options nor values of options."""
    return [word for word, is_override in classified(argv) if is_override]


def classified(argv: Sequence[str]) -> list[tuple[str, bool]]:
    """Every argument with whether it is an override: no option, and no value of one."""
    return [
        (word, not word.startswith("-") and not _takes(previous, word))
        for previous, word in zip(["", *argv][:-1], argv, strict=True)
    ]


def _takes(option: str, word: str) -> bool:
    """Whether a word is the value of the option before it; `--info` has one or none."""
    return option in OPTIONS_WITH_VALUE and not (option in INFO and "=" in word)
