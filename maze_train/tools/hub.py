"""Upload a policy with a model card to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from maze_train.config.commands import PushConfig
from maze_train.config.compose import load_settings
from maze_train.config.train_config import DevRunnerConfig, TrainConfig
from maze_train.config.trust import given_in_python, modules_to_trust
from maze_train.core.checks import expanded
from maze_train.core.conversion import config_to_dict, dotted_name, join
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import read_regular, versions
from maze_train.core.hub import HUB, first_line, hub_package
from maze_train.core.names import CURVE, METRICS, POLICY_FILES
from maze_train.core.plain_yaml import dump_yaml
from maze_train.core.run_directory import EPOCH, RunDirectory, final_tests
from maze_train.core.targets import TARGET
from maze_train.core.text import importable
from maze_train.distributions.mapping import FAMILIES
from maze_train.learner.config import Schedule
from maze_train.run.saved_policies import SavedPolicy, read_saved_policy
from maze_train.run.train import TrainingResult
from maze_train.tools.runs import task_name
from maze_train.training.config import RANDOM
from maze_train.training.models import with_networks
from maze_train.training.policy_files import PolicyWriter

VIDEO, CARD = "replay.mp4", "README.md"
OWN_FILES = (*POLICY_FILES, METRICS, CURVE, VIDEO, "results.json")
"""Files of a push; earlier versions wrote results.json."""

MAX_NBYTES = 1 << 28

SHOWN = ("env", "model", "policies", "algorithm")
"""Sections of the settings in the model card."""

SHARED = (*SHOWN, "policies_to_train", "seed", "total_steps")
SHARED_OF_RUNNER = ("concurrency", "envs_per_actor", "dataset")
"""Settings that are published because they affect the results. Other settings, such as directories
or the addresses and tokens of writers and callbacks, are private."""

SHARED_TEXTS = (
    *("env.id", f"*.{TARGET}", "policies.*.agents", "policies_to_train"),
    *("model.normalization.exclude", "policies.*.model.normalization.exclude"),
)
"""Patterns of text settings that are published in addition to predefined choices."""

OMITTED = "left_out"
"""Placeholder for all other texts (paths, secrets, arguments of custom environments)."""


class Score(NamedTuple):
    """Mean return of a policy in an evaluation."""

    mean: float
    std: float
    episodes: int
    origin: str
    """Description of the evaluation."""


def score_of_epoch(run_dir: Path, epoch: int | None) -> Score | None:
    """Return the score of an epoch, from the test after training if available.

    Returns None if the epoch was not evaluated or the files of the run are missing.

    Raises:
        RunDirectoryError: If the metrics are damaged.
    """
    run = RunDirectory(run_dir)
    tested = "test after training, in episodes not used for selection"
    evaluated = "evaluation during training, by which the policy was selected"
    rows = [("", tested, test) for test in final_tests(run.outcome).values()]
    rows += [("eval/", evaluated, row) for row in run.rows()]
    for prefix, origin, row in rows:
        if row.get(EPOCH) == epoch:
            with suppress(KeyError, TypeError, ValueError):
                mean, std = (float(row[f"{prefix}episode_return_{n}"]) for n in ("mean", "std"))
                return Score(mean, std, int(row[f"{prefix}episodes"]), origin)
    return None


CARD_TEXT = """---
{metadata}
---

# {title}

{pictures}{score}{versions}, epoch {epoch}, seed {seed}.

## Use

```bash
pip install ".[hub]"  # in a checkout of maze_train
maze-run rollout run={name}{trust}
```

```python
from maze_train import load_policy

policy = load_policy("{name}"{trusted})
action = policy.act(observation)
```

{code}## Settings

These settings affect the results; `config.yaml` has all published settings.

```yaml
{settings}```
"""


def model_card(
    saved: SavedPolicy, settings: Mapping[str, Any], name: str, files: Collection[str]
) -> str:
    """Return the README.md of a repository.

    Args:
        saved: The policy.
        settings: The settings to publish.
        name: The argument of `load_policy`.
        files: Names of the files of the repository.
    """
    package, kind, task = hub_package(), "reinforcement-learning", task_name(settings)
    algorithm, epoch = saved.config.algorithm.name, saved.score.get("epoch")
    score, results, told = score_of_epoch(saved.run_dir, epoch), None, ""
    if score is not None:
        value = f"{score.mean:.2f} +/- {score.std:.2f}"
        told = f"Mean return: {value} over {score.episodes} episodes: {score.origin}.\n\n"
        metric = {"metric_type": "mean_reward", "metric_name": "mean_reward", "task_name": kind}
        results = [package.EvalResult(kind, task, task, metric_value=value, **metric)]
    title = f"{algorithm.upper()} on {task}"
    metadata = package.ModelCardData(
        library_name="maze-train",
        pipeline_tag=kind,
        tags=["maze-train", kind, "deep-reinforcement-learning", algorithm, task],
        model_name=title,
        eval_results=results,
    )
    modules, own = importable(modules_to_trust(saved.config)), given_in_python(saved.config)
    code = f"Loading the policy executes code of {', '.join(modules)}.\n\n" if modules else ""
    if own:
        code += f"Python objects that must be passed to `load_policy`: {', '.join(own)}.\n\n"
    pictures = f"![Returns over environment steps]({CURVE})\n\n" if CURVE in files else ""
    pictures += f"[Video of an episode]({VIDEO})\n\n" if VIDEO in files else ""
    networks = with_networks(settings, saved.config.model, saved.config.algorithm, saved.spaces)
    return CARD_TEXT.format(
        metadata=metadata,
        title=title,
        pictures=pictures,
        score=told,
        versions=", ".join(f"{key} {version}" for key, version in versions().items()),
        epoch=epoch,
        seed=saved.config.seed,
        name=name,
        trust=f" trust=[{','.join(modules)}]" if modules else "",
        trusted=f", trust={modules!r}" if modules else "",
        code=code,
        settings=dump_yaml({key: networks[key] for key in SHOWN if networks.get(key)}),
    )


def write_repository(
    folder: Path, saved: SavedPolicy, settings: Mapping[str, Any], config: PushConfig, name: str
) -> None:
    """Write the files of a repository and check that the policy loads from them.

    Args:
        folder: An empty directory.
        saved: The policy.
        settings: The settings to publish.
        config: Settings of the upload.
        name: The name for `load_policy`.

    Raises:
        ConfigError: If a file cannot be read.
        RunDirectoryError: If the policy cannot be loaded from the written files.
    """

    def is_inside(path: Path) -> bool:  # After resolving links.
        return path.is_file() and path.resolve().is_relative_to(saved.run_dir.resolve())

    for path in filter(Path.exists, (saved.directory / file for file in POLICY_FILES)):
        if not is_inside(path):
            problem = f"{path} is a link to a file outside the run directory; copy the file"
            raise ConfigError("run", problem, str(saved.run_dir))
    own = {key: saved.score.get(key) for key in ("score", "epoch")}
    PolicyWriter(*saved.spaces, dump_yaml(settings))(folder, saved.weights, own)
    read_saved_policy(folder, config.trust).make_model()
    run = RunDirectory(saved.run_dir)
    found = {METRICS: run.metrics, CURVE: run.plots / CURVE}
    sources = {file: path for file, path in found.items() if is_inside(path)}
    if config.video_file is not None:
        sources[VIDEO] = Path(expanded(config.video_file))
    for file, path in sources.items():
        try:
            (folder / file).write_bytes(read_regular(path, MAX_NBYTES))
        except OSError as error:
            key = "video_file" if file == VIDEO else "run"
            raise ConfigError(key, f"cannot be read: {error}", str(path)) from error
    if config.card:
        files = {path.name for path in folder.iterdir()}
        card = model_card(saved, settings, name, files)
        (folder / CARD).write_text(card, encoding="utf-8")


def shared_settings(
    config: TrainConfig, share: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings to publish with a policy, as plain values.

    Numbers, Booleans, predefined choices and the texts in `SHARED_TEXTS` are published. Any other
    text may be a path or a secret and is replaced by `OMITTED`.

    Args:
        config: The settings.
        share: Additional text settings to publish: dotted names or patterns.

    Returns:
        The settings, and the keys of all replaced texts.
    """
    settings = config_to_dict(config)
    found = {key: settings[key] for key in SHARED}
    runner = {key: settings["runner"][key] for key in SHARED_OF_RUNNER}
    found["runner"] = {TARGET: dotted_name(DevRunnerConfig), **runner}
    words = {RANDOM, "cpu", *FAMILIES, *_words(type(config)), *_words(type(config.algorithm))}
    left_out: list[str] = []

    def shared(node: object, key: str) -> Any:
        if isinstance(node, dict):
            return {name: shared(value, join(key, name)) for name, value in node.items()}
        if isinstance(node, list):
            return [shared(value, key) for value in node]
        if not isinstance(node, str) or node in words or _is_schedule(node):
            return node
        if any(fnmatchcase(key, pattern) for pattern in (*SHARED_TEXTS, *share)):
            return node
        left_out.append(key)
        return OMITTED

    return shared(found, ""), list(dict.fromkeys(left_out))


def _words(hint: object) -> Iterator[str]:
    """Yield the literal options of a settings type, at any depth."""
    if get_origin(hint) is Literal:
        yield from (word for word in get_args(hint) if isinstance(word, str))
    inner = get_type_hints(hint).values() if is_dataclass(hint) else get_args(hint)
    for one in inner:
        yield from _words(one)


def _is_schedule(text: str) -> bool:
    with suppress(ConfigError):
        return bool(Schedule.from_text(text))
    return False


@dataclass(frozen=True)
class PushedPolicy:
    """An uploaded policy."""

    name: str
    """Name for `load_policy`: `hf://<owner>/<name>`, with the revision unless the revision is
    `main`."""

    url: str
    """Address of the commit."""

    files: list[str]
    """Names of the uploaded files."""

    left_out: list[str]
    """Keys of omitted text settings, which may contain paths or secrets."""

    def __str__(self) -> str:
        """Format the upload for a terminal."""
        lines = [f"{self.name}: {', '.join(self.files)}"]
        if self.left_out:
            keys, remedy = ", ".join(self.left_out), "set share=[<setting>] to upload them"
            lines.append(f"texts omitted from config.yaml: {keys}; {remedy}")
        return "\n".join([*lines, self.url])


def push_to_hub(
    run: str | Path | TrainingResult, repo_id: str, *, token: str | None = None, **settings: object
) -> PushedPolicy:
    """Upload a policy to the Hugging Face hub, like `maze-run push`.

        pushed = push_to_hub("outputs/a", "me/cartpole-ppo", private=True)
        policy = load_policy(pushed.name)

    Uploads the policy, metrics, the learning curve, the video (if any) and a model card. The
    uploaded configuration only contains settings that affect the results, without texts that may be
    paths or secrets.

    Args:
        run: A run directory (selects the best policy), the directory of a saved policy, or the
            result of `train`.
        repo_id: Repository, `<owner>/<name>`.
        token: Access token of the hub; None to use `HF_TOKEN` or the login of `hf auth login`.
        **settings: Additional settings of `PushConfig` by name.

    Raises:
        ConfigError: If a setting is invalid, or the policy requires untrusted code.
        MissingExtraError: If the extra `hub` is not installed.
        RunDirectoryError: If there is no policy, the policy cannot be loaded again, or the upload
            fails.
    """
    directory = str(run.run_dir if isinstance(run, TrainingResult) else run)
    given = {"run": directory, "repo_id": repo_id, **settings}
    return push(load_settings(PushConfig, given), token)


def push(config: PushConfig, token: str | None = None) -> PushedPolicy:
    """Upload a policy according to a configuration, see `push_to_hub`."""
    package, saved = hub_package(), read_saved_policy(str(config.run), config.trust)
    name = f"{HUB}{config.repo_id}" + (f"@{config.revision}" if config.revision else "")
    settings, left_out = shared_settings(saved.config, config.share)
    with TemporaryDirectory() as place:
        folder = Path(place)
        write_repository(folder, saved, settings, config, name)
        files = sorted(path.name for path in folder.iterdir())
        try:
            api = package.HfApi(token=token, library_name="maze_train")
            api.create_repo(config.repo_id, private=config.private, exist_ok=True)
            if config.revision:
                api.create_branch(config.repo_id, branch=config.revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=config.repo_id,
                folder_path=folder,
                revision=config.revision,
                commit_message=f"{saved.config.algorithm.name.upper()} on {task_name(settings)}",
                # Delete files from an earlier push unless they are replaced.
                delete_patterns=[file for file in OWN_FILES if file not in files],
            )
        except Exception as error:  # Raised by huggingface_hub or its HTTP library.
            problem = f"{config.run} was not pushed to {config.repo_id}: {first_line(error)}"
            remedy = "set a token with write access by `hf auth login` or HF_TOKEN"
            raise RunDirectoryError(f"{problem}; {remedy}") from error
    return PushedPolicy(name, str(commit.commit_url), files, left_out)
