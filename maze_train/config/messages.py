"""Says in one short message what is wrong with a configuration that Hydra refuses."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from maze_train.config.loading import unknown_option
from maze_train.config.options import config_names, group_names, list_options, shipped_root
from maze_train.config.overrides import as_typed, config_folders
from maze_train.core.errors import ConfigError, MissingExtraError, SpaceError, did_you_mean, nearest
from maze_train.core.targets import TARGET, target_name

CONFIGURATION_ERRORS = (
    ConfigError,
    SpaceError,
    MissingExtraError,
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
)
"""Errors of the configuration: `maze-run` ends with exit code 2."""


def explain(error: BaseException, argv: Sequence[str] = ()) -> str:
    """The message of an error that is one of `CONFIGURATION_ERRORS`.

    Args:
        error: The error.
        argv: Arguments of the command as the user typed them: options in his folders count as
            available, and overrides are shown in his spelling.
    """
    if isinstance(error, MissingConfigException):
        return _line_of(error, argv) + str(_missing_config(error, config_folders(argv)))
    if isinstance(error, OverrideParseException):
        return as_typed(f"{error.override}: cannot be read: {_first_line(error)}", argv)
    if isinstance(error, HydraException):
        return _line_of(error, argv) + as_typed(_composition(error), argv)
    if isinstance(error, OmegaConfBaseException):
        key = f"{error.full_key}: " if error.full_key else ""
        return f"{key}{_first_line(error)}"
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    return str(error)


def unsettable(error: BaseException) -> ConfigError | None:
    """The error for an override that Hydra cannot set, where it raises one of Python's own.

    A key below a list is one: `model.hidden_sizes.a=1` where the list is given, too. The override
    is known to the function of Hydra alone.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        override = frame.f_locals.get("override")
        if frame.f_code.co_name == "_apply_overrides_to_config" and override is not None:
            problem = f"cannot be set in the configuration: {_first_line(error)}"
            return ConfigError(override.key_or_group, problem, override.value())
    return None


def _line_of(error: HydraException, argv: Sequence[str]) -> str:
    """File and line of an `override /<group>: <name>` that Hydra refuses; else an empty text."""
    folders = [*config_folders(argv), str(shipped_root())]
    group, _, name = (getattr(error, "missing_cfg_file", "") or "").rpartition("/")
    if "No match in the defaults list" in str(error):
        group, name = _not_overridden(str(error)), ""
    wanted = re.compile(rf"\s*-?\s*override\s+/?{re.escape(group)}\s*:\s*{re.escape(name)}")
    chosen = re.findall(r"experiment=(\S+)", " ".join(argv)) if group else []
    for option in chosen:
        for path in (Path(folder, "experiment", f"{option}.yaml") for folder in folders):
            lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
            for number, line in enumerate(lines, 1):
                if wanted.match(line):
                    return f"{path}, line {number}: "
    return ""


def _not_overridden(text: str) -> str:
    """The group that Hydra could not override, as the user named it."""
    found = text.split("Could not override '")[1].partition("'")[0].partition("@")[0]
    return found.removeprefix("experiment/")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].strip()


def _missing_config(error: MissingConfigException, folders: Sequence[str]) -> ConfigError:
    """The error for an option, or a primary config, that no folder has."""
    missing = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, slash, name = missing.partition("/")
    if not slash:
        searched = [*folders, str(shipped_root())]
        names = config_names(folders)
        hint = did_you_mean(nearest(missing, names, count=1))
        problem = f"there is no {missing}.yaml in {', '.join(searched)}{hint or ';'}"
        return ConfigError("-cn", f"{problem} available: {', '.join(names)}", missing)
    if group == "env":
        return _unknown_environment(name, folders)
    if group in group_names():
        return unknown_option(group, name, folders)
    group, _, name = missing.rpartition("/")
    available = ", ".join(error.options or ()) or "none"
    return ConfigError(group, f"no such option; available: {available}", name)


def _unknown_environment(env_id: str, folders: Sequence[str]) -> ConfigError:
    from maze_train.envs.pettingzoo import nearest_names
    from maze_train.envs.registered import known_about, missing_package, nearest_ids

    missing = missing_package(env_id)
    if missing is not None:
        return ConfigError("env", str(missing), env_id)
    own = [name for name in list_options("env", folders) if name != "default"]
    path = target_name(env_id)
    if path:
        close = [f"env.{TARGET}={path}"]
    else:
        ids = nearest_ids(env_id)
        same = [found for found in ids if found.endswith(f"/{env_id}")]
        close = [*nearest(env_id, own), *same, *nearest_names(env_id), *ids]
        close = list(dict.fromkeys(close))
    hint = did_you_mean(close) or "."
    return ConfigError(
        "env",
        f"no such environment{hint} Give a registered gymnasium id, `my_module:MyEnv-v0` to "
        f"import a module first, or env._target_=<class or function>{known_about(env_id)}",
        env_id,
    )


def _without_comma(override: str) -> str:
    """Say how the number is written that `100,000` or `0,001` may mean; else an empty text."""
    key, _, value = override.partition("=")
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", value):
        number = value.replace(",", "")
    elif re.fullmatch(r"-?\d+,\d+(e-?\d+)?", value):
        number = value.replace(",", ".")
    else:
        return ""
    return f"; a number has no comma: {key}={number}"


def _composition(error: HydraException) -> str:
    """The message for overrides that do not fit the configuration."""
    text = _first_line(error)
    if text.startswith("Ambiguous value for argument"):
        override = text.partition("'")[2].removesuffix("'")
        return (
            f"{override}: a value with commas: add -m for one run each, or write a list [a,b]"
            f"{_without_comma(override)}"
        )
    if "No match in the defaults list" in text:
        group = _not_overridden(text)
        if text.startswith("In 'experiment/") and "@" in text:
            return f"{group}: groups of an experiment begin with a slash: override /{group}"
        return (
            f"{group}: the primary config (-cn) has no choice of this name; "
            f"set single values ({group}.<key>=<value>) instead"
        )
    if "@experiment." in text:
        return f"{text.rstrip('.')}: begin the file with the line `# @package _global_`"
    cause = error.__cause__
    detail = "" if cause is None or _first_line(cause) in text else _first_line(cause)
    return ": ".join(part for part in (text.rstrip("."), detail) if part)
