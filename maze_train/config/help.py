"""Help and messages: the text of `--help`, short errors, names of other libraries."""

from __future__ import annotations

import textwrap
import traceback
from typing import TYPE_CHECKING

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from maze_train.config.loading import unknown_option
from maze_train.config.options import describe_options, group_names, list_options, shipped_root
from maze_train.config.overrides import as_typed, config_folders
from maze_train.core.errors import ConfigError, MissingExtraError, SpaceError, did_you_mean, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence


HEAD = """\
maze-run: train a reinforcement-learning agent from configuration, let a policy play, compare runs,
search for settings, export a policy, share it.

Usage: maze-run [options] algorithm=<name> env=<id> [key=value ...]
       maze-run -cn rollout [options] run=<directory of a run> [key=value ...]
       maze-run -cn compare runs=[<directories of runs>] [key=value ...]
       maze-run -cn export run=<directory of a run> [key=value ...]
       maze-run -cn push run=<directory of a run> repo_id=<owner>/<name> [key=value ...]
       maze-run -cn search search=<name> algorithm=<name> env=<id> [key=value ...]
"""

KEYS = """\
Common keys (all of them, with defaults: maze-run algorithm=ppo --cfg job)
  total_steps=100_000          environment steps after which training stops
  seed=1                       seed of every random stream
  run_dir=<directory>          where the results go
  env._target_=<dotted path>   an environment class or function of your own
  env.kwargs.<name>=<value>    an argument of the environment
  algorithm.lr=1e-3            a setting of the algorithm
  model.hidden_sizes=[64,64]   a setting of the networks
  runner.concurrency=16        environments that collect experience in parallel
  runner.fast_dev_run=true     one short iteration of everything
  checkpoint.interval=10       epochs from one checkpoint to the next
  evaluation.interval=5        epochs from one evaluation to the next
  tracking.progress=quiet      display of progress: auto, bar, lines, quiet
"""

OPTIONS = """\
Options
  -m, --multirun               one run for each combination of values with commas, and a table;
                               in parallel: hydra/launcher=local hydra.launcher.n_jobs=4
  --config-dir <folder>        a folder with YAML of your own: <folder>/algorithm/my.yaml
  -cn <name>                   another primary config: --config-dir <run dir> -cn config;
                               -cn rollout: play episodes (keys: maze-run -cn rollout --cfg job);
                               -cn compare: runs side by side;
                               -cn export: a policy as one file for other programs;
                               -cn push: a policy to the Hugging Face hub;
                               -cn search: settings that make the best runs
  --cfg job                    print the configuration, do not run
  --info defaults|searchpath   tell where the configuration comes from
  -sc install=bash             print the shell completion: eval "$(maze-run -sc install=bash)"
  --version, -h, --help, --hydra-help
"""

EXAMPLES = """\
Examples
  maze-run algorithm=ppo env=CartPole-v1
  maze-run experiment=ppo/CartPole-v1 seed=1
  maze-run algorithm=ppo env=Pendulum-v1 runner=local algorithm.lr=1e-3 total_steps=1e6
  maze-run algorithm=a2c env=ALE/Pong-v5
  maze-run algorithm=ppo 'algorithm.lr={start: 0.001, end: 0}' env=Acrobot-v1
  maze-run algorithm=ppo env._target_=my_package.MyEnv env.kwargs.size=5
  maze-run -m algorithm=a2c,ppo env=CartPole-v1 seed=0,1,2
  maze-run --config-dir my_conf algorithm=my_ppo env=my_env
  maze-run resume=outputs/<run> total_steps=2e6
  maze-run algorithm=ppo env=CartPole-v1 run_dir=runs/a resume=auto
  maze-run -cn rollout run=runs/a n_episodes=20 runner=local record=true video=true
  maze-run -cn rollout env=CartPole-v1 policy=random
  maze-run -cn push run=runs/a repo_id=me/cartpole-ppo private=true
  maze-run -cn rollout run=hf://me/cartpole-ppo
  maze-run -cn compare runs=outputs/sweeps/<date> threshold=475
  maze-run -cn export run=runs/a format=onnx output=policy.onnx
  maze-run -cn search algorithm=ppo env=CartPole-v1 search=ppo n_trials=20 n_jobs=2

Exit codes: 0 done, 1 failure, 2 configuration error, 130 interrupted,
143 terminated, 129 ended by SIGHUP, 138 ended by SIGUSR1. Configuration errors and
expected failures are reported in one message; HYDRA_FULL_ERROR=1 shows the traceback as well.
"""


def help_text(folders: Sequence[str] = ()) -> str:
    """Return the text of `maze-run --help`: groups with their options, common keys, examples.

    Args:
        folders: Folders with configuration of the user, whose options are listed too.
    """
    return "\n".join([HEAD, _groups(folders), KEYS, OPTIONS, EXAMPLES]).rstrip()


def _groups(folders: Sequence[str]) -> str:
    lines = ["Choices"]
    for name, text in describe_options("algorithm", folders).items():
        lines.append(f"  {f'algorithm={name}':<28} {text}".rstrip())
    lines.append(f"  {'env=<id>':<28} any registered gymnasium id, such as CartPole-v1")
    for group in group_names():
        options = [name for name in list_options(group, folders) if name != "default"]
        if group != "algorithm" and options:
            text = f"{group}={'| '.join(options)}"  # with places where a line may end
            wrapped = textwrap.wrap(
                text, 96, initial_indent="  ", subsequent_indent="    ", break_long_words=False
            )
            lines += [line.replace("| ", "|") for line in wrapped]
    return "\n".join(lines) + "\n"


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
        return str(_missing_config(error, config_folders(argv)))
    if isinstance(error, OverrideParseException):
        return as_typed(f"{error.override}: cannot be read: {_first_line(error)}", argv)
    if isinstance(error, HydraException):
        return as_typed(_composition(error), argv)
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].strip()


def _missing_config(error: MissingConfigException, folders: Sequence[str]) -> ConfigError:
    """The error for an option, or a primary config, that no folder has."""
    missing = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, slash, name = missing.partition("/")
    if not slash:
        searched = ", ".join([*folders, str(shipped_root())])
        return ConfigError("-cn", f"there is no {missing}.yaml in {searched}", missing)
    if group == "env":
        return _unknown_environment(name, folders)
    if group in group_names():
        return unknown_option(group, name, folders)
    group, _, name = missing.rpartition("/")
    available = ", ".join(error.options or ()) or "none"
    return ConfigError(group, f"no such option; available: {available}", name)


def _unknown_environment(env_id: str, folders: Sequence[str]) -> ConfigError:
    from maze_train.envs.registered import missing_package, nearest_ids

    missing = missing_package(env_id)
    if missing is not None:
        return ConfigError("env", str(missing), env_id)
    own = [name for name in list_options("env", folders) if name != "default"]
    close = list(dict.fromkeys([*nearest(env_id, own), *nearest_ids(env_id)]))
    hint = did_you_mean(close) or "."
    return ConfigError(
        "env",
        f"no such environment{hint} Give a registered gymnasium id, `my_module:MyEnv-v0` to "
        "import a module first, or env._target_=<class or function>",
        env_id,
    )


def _composition(error: HydraException) -> str:
    """The message for overrides that do not fit the configuration."""
    text = _first_line(error)
    if text.startswith("Ambiguous value for argument"):
        override = text.partition("'")[2].removesuffix("'")
        return f"{override}: a value with commas: add -m for one run each, or write a list [a,b]"
    if "No match in the defaults list" in text:
        group = text.split("'")[1]
        return (
            f"{group}: the primary config (-cn) has no choice of this name; "
            f"set single values ({group}.<key>=<value>) instead"
        )
    if "@experiment." in text:
        return f"{text.rstrip('.')}: begin the file with the line `# @package _global_`"
    cause = error.__cause__
    detail = "" if cause is None or _first_line(cause) in text else _first_line(cause)
    return ": ".join(part for part in (text.rstrip("."), detail) if part)
