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
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from glob import escape, glob
from itertools import pairwise
from typing import Any

from maze_train.core.errors import ConfigError

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
NO_TEXT = re.compile(r"[-+]?\.?\d[\d._]*(e[-+]?\d+)?|true|false|null|inf|nan", re.IGNORECASE)
"""Values that Hydra does not read as text, which it wants for a choice."""
PLAIN = re.compile(r"[A-Za-z0-9_/.:+%@-]+")
"""Texts that Hydra reads without quotes."""
PATHS = re.compile(
    r"run_dir|resume|base_run|runs?|output|output_dir|record_dir|study|film|runner\.dataset"
    r"|runner\.working_dir|policies\.[^.]+(\.source)?|hydra\.sweep\.dir"
)
"""Settings that name files or directories, whose letters are the user's."""
ASSIGNMENT = re.compile(r"(?P<plus>\+{0,2})(?P<key>[^\s=+~][^\s=]*)=(?P<value>.*)", re.DOTALL)


RUN_DIR_PROBLEM = "has no effect: a run goes to run_dir=<directory>, a sweep to hydra.sweep.dir"
"""What is wrong with `hydra.run.dir`."""


def normalise(
    argv: Sequence[str], groups: Collection[str], own_groups: Collection[str] = ()
) -> list[str]:
    """The arguments with every override in the form in which Hydra accepts it, options first.

    Hydra's parser wants overrides in one row, and `--` before them says where it begins.
    `+algorithm=ppo` becomes `algorithm=ppo`, `algorithm.lr=1` and `+algorithm.lr=1` become
    `++algorithm.lr=1`. A path gets quotes where it needs some. Options, deletions (`~key`),
    settings of Hydra, and keys with a package (`env@eval_env`) or a path stay as they are.

    Args:
        argv: The arguments after the name of the program.
        groups: Groups of the shipped configuration, all of which its defaults list names.
        own_groups: Further groups in folders of the user; how they are spelled is left to him.
    """
    if any(word in COMPLETION for word in argv):
        return list(argv)
    options = [word for word, is_override in _classified(argv) if not is_override and word != "--"]
    words = [_with_quotes(word, is_sweep=bool({*SWEEP} & {*argv})) for word in overrides_of(argv)]
    overrides = [_normalise_override(word, groups, own_groups) for word in words]
    return [*options, "--", *overrides] if options and overrides else options + overrides


def shell_word(key: str, value: str) -> str:
    """The override `key=value` for a shell, in quotes where Hydra's grammar or the shell asks."""
    is_plain = PLAIN.fullmatch(value) is not None
    word = f"{key}={value if is_plain else quoted(value)}"
    return shlex.quote(word) if is_plain or set(word) & set('"$`\\!') else f'"{word}"'


def as_typed(message: str, argv: Sequence[str]) -> str:
    """A message of Hydra, which knows the form of `normalise`, with the overrides as in `argv`."""
    for word in overrides_of(argv):
        match = ASSIGNMENT.fullmatch(word)
        if match is not None:
            pattern = rf"(?<![\w.+])\+*{re.escape(match['key'])}="
            message = word[: match.start("value")].join(re.split(pattern, message))
    return message


def normalise_completion(line: str, groups: Collection[str]) -> str:
    """A command line that a shell wants completed: only the word being typed stays as it is."""
    words = line.split(" ")
    if words[-2:-1] and words[-2] in OPTIONS_WITH_VALUE:  # no override is being typed
        return line
    return " ".join([*words[:1], *normalise(words[1:-1], groups), *words[1:][-1:]])


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
    return [word for word, is_override in _classified(argv) if is_override]


def _classified(argv: Sequence[str]) -> list[tuple[str, bool]]:
    """Every argument with whether it is an override: no option, and no value of one."""
    return [
        (word, not word.startswith("-") and not _takes(previous, word))
        for previous, word in zip(["", *argv][:-1], argv, strict=True)
    ]


def _takes(option: str, word: str) -> bool:
    """Whether a word is the value of the option before it; `--info` has one or none."""
    return option in OPTIONS_WITH_VALUE and not (option in INFO and "=" in word)


def _with_quotes(word: str, is_sweep: bool) -> str:
    """An override as it is; the path of one that names a path is taken letter by letter."""
    match = ASSIGNMENT.fullmatch(word)
    if match is None or PATHS.fullmatch(match["key"]) is None:
        return word
    return word[: match.start("value")] + as_path(match["value"], is_sweep)


def _normalise_override(word: str, groups: Collection[str], own_groups: Collection[str]) -> str:
    match = ASSIGNMENT.fullmatch(word)
    if match is None:
        return word
    key = match["key"]
    if key in groups and not match["value"].startswith("{"):
        value = match["value"]
        return f"{key}='{value}'" if NO_TEXT.fullmatch(value) else f"{key}={value}"
    is_hydras = key == "hydra" or key.startswith(("hydra.", "hydra/"))
    if is_hydras or key in own_groups or "@" in key or "/" in key:
        return word
    return f"++{key}={match['value']}"


def quoted(text: str) -> str:
    """A text in the quotes in which Hydra reads it letter by letter."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


def as_path(value: str, is_sweep: bool) -> str:
    """The value of a setting that names a file or directory, in quotes where it needs some.

    Hydra reads it as it is if that gives a text, null, a list, or the values of a sweep.

    Args:
        value: What was typed: a path, several in brackets, or in a sweep several with commas.
        is_sweep: Whether commas divide the values of a sweep.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    with suppress(HydraException):
        read = OverridesParser.create().parse_override(f"path={value}").value()
        if not isinstance(read, (bool, int, float)):
            return value
    if value[:1] + value[-1:] == "[]":
        return f"[{_each_as_path(value[1:-1])}]"
    return _each_as_path(value) if is_sweep and "," in value else quoted(value)


def _each_as_path(values: str) -> str:
    return ",".join(as_path(value.strip(), is_sweep=False) for value in values.split(","))


def check_choices(overrides: Iterable[str], groups: Collection[str]) -> None:
    """Refuse choices that are not names of options; Hydra has no message for them.

    Args:
        overrides: Overrides in the form in which Hydra accepts them.
        groups: All groups but those of Hydra, whose names have a slash.

    Raises:
        ConfigError: If there is such a choice.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString
    from hydra.errors import HydraException

    for word in overrides:
        key = word.lstrip("+~").partition("=")[0].partition("@")[0]
        is_group = key in groups or "/" in key or key == "hydra"
        if not is_group and key != "hydra.verbose":
            continue
        texts = (str, QuotedString, Glob if is_group else bool)
        with suppress(HydraException):  # Hydra reports what it cannot read
            override = OverridesParser.create().parse_override(word)
            value: Any = override.value()
            if override.is_delete() and value is None:
                continue
            for choice in value.list if isinstance(value, ChoiceSweep) else [value]:
                if is_group and isinstance(choice, dict):
                    continue  # settings may stand in the place of an option
                entries = choice if isinstance(choice, list) else [choice]
                if not all(isinstance(entry, texts) for entry in entries):
                    expected = "the name of an option" if is_group else "true, false or names"
                    raise ConfigError(key, f"expected {expected}", word.partition("=")[2])
