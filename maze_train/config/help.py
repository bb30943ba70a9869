"""The text of `maze-run --help`: made without Hydra, gymnasium and torch, so it comes at once."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from maze_train.config.options import describe_options, group_names, list_options

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
  --info defaults|searchpath   show where the configuration comes from
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
        head = f"  {f'algorithm={name}':<28} "
        lines += textwrap.wrap(head + text, 96, subsequent_indent=" " * len(head))
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
