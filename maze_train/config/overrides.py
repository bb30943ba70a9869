"""Parsing of the command-line arguments of `maze-run` that does not require Hydra.

Hydra is slow to import, so code that needs its grammar is in `hydra_input`.
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
"""All options of the command: Hydra's, and the ones handled before Hydra starts."""
PLAIN = re.compile(r"[A-Za-z0-9_/.:+%@-]+")
"""Values that Hydra parses without quotes."""
PATHS = re.compile(
    r"run_dir|resume|base_run|runs?|output|output_dir|record_dir|study|film|runner\.dataset"
    r"|runner\.working_dir|policies\.[^.]+(\.source)?|hydra\.sweep\.dir"
)
"""Settings that name files or directories; their values are quoted verbatim."""
ASSIGNMENT = re.compile(r"(?P<plus>\+{0,2})(?P<key>[^\s=+~][^\s=]*)=(?P<value>.*)", re.DOTALL)


DEBUG_VARIABLE = "HYDRA_FULL_ERROR"
"""Environment variable that enables tracebacks for all errors, as in Hydra."""

RUN_DIR_PROBLEM = "has no effect: a run goes to run_dir=<directory>, a sweep to hydra.sweep.dir"
"""Error message for `hydra.run.dir`."""


def shell_word(key: str, value: str) -> str:
    """Return the override `key=value`, quoted for Hydra's grammar and the shell if necessary."""
    is_plain = PLAIN.fullmatch(value) is not None
    word = f"{key}={value if is_plain else quoted(value)}"
    return shlex.quote(word) if is_plain or set(word) & set('"$`\\!') else f'"{word}"'


def quoted(text: str) -> str:
    """Quote and escape a text so that Hydra reads it verbatim."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def as_typed(message: str, argv: Sequence[str]) -> str:
    """Replace the normalised overrides in a message of Hydra by the overrides as typed."""
    for word in overrides_of(argv):
        match = ASSIGNMENT.fullmatch(word)
        if match is not None:
            pattern = rf"(?<![\w.+])\+*{re.escape(match['key'])}="
            message = word[: match.start("value")].join(re.split(pattern, message))
    return message


def config_name_of(line: str) -> str:
    """Return the primary config chosen by a command line; empty for the default."""
    words = line.split(" ")[:-1]  # Without the word that is being typed.
    return next((b for a, b in pairwise(words) if a in CONFIG_NAME), "")


def completions(line: str, config_names: Iterable[str]) -> list[str] | None:
    """Return completions of the last word of a command line: options, values of `-cn`, or paths.

    Args:
        line: The command line up to the cursor.
        config_names: Allowed values of `-cn`.

    Returns:
        The completions; None for any other override, which Hydra completes.
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
    """Return the user's configuration folders: `--config-dir X` and local `hydra.searchpath`."""
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
    """Return the arguments that are neither options nor values of options."""
    return [word for word, is_override in classified(argv) if is_override]


def classified(argv: Sequence[str]) -> list[tuple[str, bool]]:
    """Return each argument with a flag: whether it is an override (not an option or its value)."""
    return [
        (word, not word.startswith("-") and not _takes(previous, word))
        for previous, word in zip(["", *argv][:-1], argv, strict=True)
    ]


def _takes(option: str, word: str) -> bool:
    """Return whether a word is the value of the preceding option; optional for `--info`."""
    return option in OPTIONS_WITH_VALUE and not (option in INFO and "=" in word)
