"""The card of a policy: what it is, how good it is, and how to use it."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from maze_train.comparison.runs import task_name
from maze_train.config.stored import given_in_python, modules_to_trust
from maze_train.config.writing import config_to_dict
from maze_train.files import read_regular
from maze_train.runners.parts import METRICS, SUMMARY
from maze_train.tracking.rows import read_rows
from maze_train.tracking.tracker import ENV_STEPS, EPOCH
from maze_train.versions import versions

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from maze_train.runners.saved_policies import SavedPolicy


CURVE, FILM = "learning_curve.png", "replay.mp4"
SHOWN = ("env", "model", "policies", "algorithm")
"""Sections of the settings that the card shows."""


class Score(NamedTuple):
    """Return of a policy in the episodes of an evaluation."""

    mean: float
    std: float
    episodes: int
    origin: str
    """Evaluation that it comes from."""

    def __str__(self) -> str:
        """Mean and deviation, in the form that the hub's lists of results have."""
        return f"{self.mean:.2f} +/- {self.std:.2f}"


def score_of(run_dir: Path, epoch: int | None) -> Score | None:
    """The return of the policy of an epoch: of the test after training, else of its evaluation.

    None: it was not evaluated, or the files of its run are not there.

    Raises:
        RunDirectoryError: If the metrics are damaged.
    """
    origin, row = "the test after training, in episodes that selected nothing", None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        tests = json.loads(read_regular(run_dir / SUMMARY))["final_test"].values()
        row = next((test for test in tests if test["epoch"] == epoch), None)
    if row is None:
        origin = "the evaluation in training that selected it"
        rows = {of.get(EPOCH): of for of in read_rows(run_dir / METRICS)}
        row = {name.removeprefix("eval/"): value for name, value in rows.get(epoch, {}).items()}
    with suppress(KeyError, TypeError, ValueError):
        mean, std = (float(row[f"episode_return_{name}"]) for name in ("mean", "std"))
        return Score(mean, std, int(row["episodes"]), origin)
    return None


def model_card(
    saved: SavedPolicy, settings: Mapping[str, Any], name: str, files: Collection[str]
) -> str:
    """The README.md of a repository.

    Args:
        saved: The policy.
        settings: Those that others get.
        name: What `load_policy` takes.
        files: Names of the picture and the film, as far as they are there.
    """
    task, epoch = task_name(settings), saved.score.get("epoch")
    algorithm, title = saved.config.algorithm.name, title_of(saved)
    score = score_of(saved.run_dir, epoch)
    rows = {row.get(EPOCH): row for row in read_rows(saved.run_dir / METRICS)}
    steps = rows.get(epoch, {}).get(ENV_STEPS)
    facts = {
        "algorithm": algorithm,
        "environment": f"`{task}`",
        "mean return": score and f"{score} over {score.episodes} episodes: {score.origin}",
        "environment steps": steps and f"{steps:,.0f}",
        "epoch, seed": f"{epoch}, {saved.config.seed}",
        "versions": ", ".join(f"{key} {value}" for key, value in versions().items()),
    }
    shown = {key: settings[key] for key in SHOWN if settings.get(key)}
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(_header(algorithm, task, title, score), sort_keys=False)}---",
            f"# {title}\n",
            *([f"![Returns over environment steps]({CURVE})\n"] if CURVE in files else []),
            *([f"[A film of an episode]({FILM})\n"] if FILM in files else []),
            "| | |\n| --- | --- |",
            *(f"| {key} | {value} |" for key, value in facts.items() if value),
            f"\n## Use\n\n{_use(saved, name)}",
            "## Settings\n\nThose that make the numbers; `config.yaml` has all that were pushed.\n",
            f"```yaml\n{yaml.safe_dump(shown, sort_keys=False)}```\n",
        ]
    )


def title_of(saved: SavedPolicy) -> str:
    """Algorithm and environment of a policy, for people."""
    return f"{saved.config.algorithm.name.upper()} on {task_name(config_to_dict(saved.config))}"


def _header(algorithm: str, task: str, title: str, score: Score | None) -> dict[str, Any]:
    """What the hub reads: words to search for, and the result."""
    tags = ["maze-train", "reinforcement-learning", "deep-reinforcement-learning", algorithm, task]
    header: dict[str, Any] = {
        "library_name": "maze-train",
        "pipeline_tag": "reinforcement-learning",
        "tags": tags,
    }
    if score is not None:
        kind = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        metric = {"type": "mean_reward", "name": "mean_reward", "value": str(score)}
        result = {
            "task": kind,
            "dataset": {"name": task, "type": task},
            "metrics": [{**metric, "verified": False}],
        }
        header["model-index"] = [{"name": title, "results": [result]}]
    return header


def _use(saved: SavedPolicy, name: str) -> str:
    """Commands and code that use the policy."""
    modules, own = modules_to_trust(saved.config), given_in_python(saved.config)
    word = f" trust=[{','.join(modules)}]" if modules else ""
    argument = f", trust={modules!r}" if modules else ""
    lines = [
        f'```bash\npip install "maze-train[hub]"\nmaze-run -cn rollout run={name}{word}\n```\n',
        "```python\nfrom maze_train import load_policy\n",
        f'policy = load_policy("{name}"{argument})',
        "action = policy.act(observation)\n```\n",
    ]
    if modules:
        lines.append(f"It needs the code of {', '.join(modules)}, which is run.\n")
    if own:
        lines.append(f"These parts were given in Python, and have to be given: {', '.join(own)}.\n")
    return "\n".join(lines)
