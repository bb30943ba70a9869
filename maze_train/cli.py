"""The command `maze-run`: composes a configuration with Hydra, runs it, and returns an exit code.

0    success
1    failure
2    configuration error, reported in one message
130  interrupted (Ctrl-C)
143  terminated (SIGTERM)
129  the terminal was closed (SIGHUP)
138  stopped by SIGUSR1
140  stopped by SIGUSR2
"""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import signal
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path

from maze_train.config.help import help_text
from maze_train.config.options import (
    CONFIG_DIR,
    CONFIG_NAME,
    DEBUG_VARIABLE,
    DONE,
    FAILURE,
    config_folders,
    config_names,
    group_names,
)
from maze_train.core.errors import ConfigError, did_you_mean, nearest
from maze_train.core.names import PROGRAM
from maze_train.core.notices import notify, say
from maze_train.core.signals import Interruption, signal_of

OF_ROLLOUTS = ("enjoy", "eval", "evaluate", "play", "test")
"""Names of the command `rollout` in other libraries."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program name. None: use `sys.argv`, and prepare the process to
            exit after the call.

    Returns:
        The exit code.
    """
    if argv is None:
        # Skip the garbage collection at exit: it takes 0.7 s, and the OS reclaims the memory.
        atexit.register(gc.freeze)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper):
        # Characters that the locale cannot encode are printed as question marks.
        sys.stdout.reconfigure(errors="replace")
    folders = config_folders(arguments)
    arguments = with_command(arguments, config_names(folders))
    if "-h" in arguments or "--help" in arguments:
        say(help_text(folders))
        return DONE
    if "--version" in arguments:
        say(f"{PROGRAM} {version('maze-train')}")
        return DONE
    debug = os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    try:
        _find_modules_here()
        with Interruption():
            return _run(arguments, folders, debug)
    except KeyboardInterrupt as stop:
        number = signal_of(stop)
        name = signal.Signals(number).name
        words = {"SIGINT": "interrupted", "SIGTERM": "terminated"}
        notify(f"{PROGRAM}: {words.get(name, f'ended by {name}')}")
        if argv is None:
            # Another Ctrl-C during clean-up would leave child processes behind.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 128 + number
    except SystemExit as stop:  # Raised by options of Hydra.
        return stop.code if isinstance(stop.code, int) else FAILURE
    except Exception as error:
        from maze_train.hydra_app import report

        return report(error, arguments, debug)


def _run(arguments: list[str], folders: list[str], debug: bool) -> int:
    """Pass the arguments to Hydra, which runs a single job or all jobs of a sweep."""
    from maze_train import hydra_app
    from maze_train.hydra_sweeps import completions, extended_hydra

    options, groups, line = hydra_app.parsed(arguments), group_names(), ""
    config_name = "train"
    if options.shell_completion:
        program, *typed = os.environ.get("COMP_LINE", "").split(" ")
        folders = config_folders(typed)
        *typed, word = with_command(typed, config_names(folders)) or [""]
        found = completions(" ".join([program, *typed, word]), folders)
        if found is not None:
            say("\n".join(found))
            return DONE
        given = hydra_app.parsed(typed)
        config_name = given.config_name or config_name
        line = " ".join([program, *hydra_app.normalise(given.overrides, folders), word])
    else:
        _check_spelling(options.overrides, config_names(folders))
        own_groups = {name for folder in folders for name in group_names(Path(folder))}
        options.overrides = hydra_app.normalise(options.overrides, folders, options.multirun)
        hydra_app.check_choices(options.overrides, [*groups, *own_groups])
    job = hydra_app.Job(arguments, debug)
    with extended_hydra(folders):
        hydra_app.start(job, options, config_name, line)
    return job.exit_code()


def with_command(arguments: list[str], commands: Collection[str]) -> list[str]:
    """Replace a leading command name, after any options, by `-cn <command>`."""
    i = 0
    while i < len(arguments) and arguments[i].startswith("-"):
        i += 2 if arguments[i] in (*CONFIG_DIR, *CONFIG_NAME) else 1
    is_command = i < len(arguments) and arguments[i] in commands
    return [*arguments[:i], "-cn", *arguments[i:]] if is_command else arguments


def _find_modules_here() -> None:
    """Make modules in the current directory importable, for custom environments.

    Raises:
        ConfigError: If the working directory was removed.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        problem = "does not exist; change to an existing directory (cd)"
        raise ConfigError("working directory", problem) from error
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # Appended, so that no installed module is shadowed.


def _check_spelling(words: list[str], commands: Collection[str]) -> None:
    """Raise ConfigError if an argument is not an override."""
    for i, word in enumerate(words):
        key, equals, _ = word.lstrip("+~").partition("=")
        if not key or not (equals or word.startswith("~")):
            if whole := _split_by_shell(words, i):
                problem = f"split by the shell at spaces; use quotes: {shlex.quote(whole)}"
                raise ConfigError(whole, problem)
            if word in OF_ROLLOUTS:
                problem = (
                    f"no such command; episodes are played by {PROGRAM} rollout run=<directory>"
                )
                raise ConfigError(word, problem)
            example = f"{PROGRAM} {word} ..." if word in commands else "env=CartPole-v1"
            kind = "a command comes first: " if word in commands else "such as "
            hint = "" if word in commands else did_you_mean(nearest(word, commands, count=1))
            raise ConfigError(word, f"expected key=value, {kind}{example}{hint}")


def _split_by_shell(words: Sequence[str], i: int) -> str:
    """Return the override whose bracketed value the shell split at argument `i`; empty if none."""
    starts = [j for j in range(i) if "=" in words[j]]
    for end in range(i + 1, len(words) + 1) if starts else ():
        whole = " ".join(words[starts[-1] : end])
        opened = [sum(map(" ".join(words[starts[-1] : k]).count, "[{")) for k in (i, end)]
        closed = [sum(map(" ".join(words[starts[-1] : k]).count, "]}")) for k in (i, end)]
        if opened[0] > closed[0] and opened[1] == closed[1]:
            return whole
    return ""


if __name__ == "__main__":
    sys.exit(main())
