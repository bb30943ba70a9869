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
from maze_train.config.named_code import given_in_python, modules_to_trust
from maze_train.config.train_config import DevRunnerConfig, TrainConfig
from maze_train.core.checks import expanded
from maze_train.core.conversion import config_to_dict, dotted_name, join
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.files import read_regular, versions
from maze_train.core.folders import files_below
from maze_train.core.hub import HUB, first_line, hub_package
from maze_train.core.names import CURVE, METRICS, POLICY_FILES, SUMMARY
from maze_train.core.notices import notify
from maze_train.core.plain_yaml import dump_yaml
from maze_train.core.run_directory import EPOCH, RunDirectory, final_tests
from maze_train.core.targets import TARGET
from maze_train.core.text import json_text
from maze_train.distributions.mapping import FAMILIES
from maze_train.learner.config import Schedule
from maze_train.run.rollout import VIDEOS
from maze_train.run.saved_policies import SavedPolicy, read_saved_policy
from maze_train.run.train import TrainingResult
from maze_train.tools.runs import task_name
from maze_train.tracking.tracker import ENV_STEPS
from maze_train.training.config import RANDOM
from maze_train.training.models import with_networks
from maze_train.training.policy_files import PolicyWriter

VIDEO, CARD, RESULTS = "replay.mp4", "README.md", "results.json"
OWN_FILES = (*POLICY_FILES, METRICS, CURVE, VIDEO, RESULTS)
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

    def __str__(self) -> str:
        """Format mean and standard deviation as in the hub's result lists."""
        return f"{self.mean:.2f} +/- {self.std:.2f}"

    def results(self) -> dict[str, float]:
        """Return the entries of `results.json`, in the format of leaderboards."""
        named = {"mean_reward": self.mean, "std_reward": self.std}
        return {**named, "n_eval_episodes": self.episodes}


def score_of_epoch(run_dir: Path, epoch: int | None) -> Score | None:
    """Return the score of an epoch, from the test after training if available.

    Returns None if the epoch was not evaluated or the files of the run are missing.

    Raises:
        RunDirectoryError: If the metrics are damaged.
    """
    origin = "test after training, in episodes not used for selection"
    tests = final_tests(RunDirectory(run_dir).outcome).values()
    row = next((test for test in tests if test.get(EPOCH, -1) == epoch), None)
    if row is None:
        origin = "evaluation during training, by which the policy was selected"
        row = {name.removeprefix("eval/"): value for name, value in _row_of(run_dir, epoch).items()}
    with suppress(KeyError, TypeError, ValueError):
        mean, std = (float(row[f"episode_return_{name}"]) for name in ("mean", "std"))
        return Score(mean, std, int(row["episodes"]), origin)
    return None


def _row_of(run_dir: Path, epoch: int | None) -> Mapping[str, float]:
    """Return the metrics of an epoch; empty if there are no metrics."""
    return next((row for row in RunDirectory(run_dir).rows() if row.get(EPOCH) == epoch), {})


def model_card(
    saved: SavedPolicy,
    settings: Mapping[str, Any],
    name: str,
    files: Collection[str],
    score: Score | None,
) -> str:
    """Return the README.md of a repository.

    Args:
        saved: The policy.
        settings: The settings to publish.
        name: The argument of `load_policy`.
        files: Names of the files of the repository.
        score: Score of the policy, if known.
    """
    task, epoch = task_name(settings), saved.score.get("epoch")
    algorithm, title = saved.config.algorithm.name, title_of(saved, settings)
    steps = _row_of(saved.run_dir, epoch).get(ENV_STEPS)
    facts = {
        "algorithm": algorithm,
        "environment": f"`{task}`",
        "mean return": score and f"{score} over {score.episodes} episodes: {score.origin}",
        "environment steps": steps and f"{steps:,.0f}",
        "epoch, seed": f"{epoch}, {saved.config.seed}",
        "versions": ", ".join(f"{key} {value}" for key, value in versions().items()),
    }
    settings = with_networks(settings, saved.config.model, saved.config.algorithm, saved.spaces)
    shown = {key: settings[key] for key in SHOWN if settings.get(key)}
    lines = [
        f"---\n{_metadata(algorithm, task, title, score)}\n---",
        f"# {title}\n",
        *([f"![Returns over environment steps]({CURVE})\n"] if CURVE in files else []),
        *([f"[Video of an episode]({VIDEO})\n"] if VIDEO in files else []),
        "| | |\n| --- | --- |",
        *(f"| {key} | {value} |" for key, value in facts.items() if value),
        f"\n## Use\n\n{_use(saved, name)}",
        "## Settings\n\nThese settings affect the results; `config.yaml` has all published "
        "settings.\n",
        f"```yaml\n{dump_yaml(shown)}```\n",
    ]
    return "\n".join(lines)


def title_of(saved: SavedPolicy, settings: Mapping[str, Any]) -> str:
    """Return the title of a policy: algorithm and environment."""
    return f"{saved.config.algorithm.name.upper()} on {task_name(settings)}"


def _metadata(algorithm: str, task: str, title: str, score: Score | None) -> str:
    """Return metadata for the hub as YAML: tags and the result."""
    package, kind = hub_package(), "reinforcement-learning"
    given = {"metric_type": "mean_reward", "metric_name": "mean_reward", "task_name": kind}
    result = package.EvalResult(kind, task, task, metric_value=str(score), **given)
    data = package.ModelCardData(
        library_name="maze-train",
        pipeline_tag=kind,
        tags=["maze-train", kind, "deep-reinforcement-learning", algorithm, task],
        model_name=title,
        eval_results=[result] if score else None,
    )
    return str(data)


def _use(saved: SavedPolicy, name: str) -> str:
    """Return commands and code that use the policy."""
    modules, own = modules_to_trust(saved.config), given_in_python(saved.config)
    word = f" trust=[{','.join(modules)}]" if modules else ""
    argument = f", trust={modules!r}" if modules else ""
    lines = [
        '```bash\npip install ".[hub]"  # in a checkout of maze_train',
        f"maze-run rollout run={name}{word}\n```\n",
        "```python\nfrom maze_train import load_policy\n",
        f'policy = load_policy("{name}"{argument})',
        "action = policy.act(observation)\n```\n",
    ]
    if modules:
        lines.append(f"Loading the policy executes code of {', '.join(modules)}.\n")
    if own:
        lines.append(f"Python objects that must be passed to `load_policy`: {', '.join(own)}.\n")
    return "\n".join(lines)


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
    for path in filter(Path.exists, (saved.directory / file for file in POLICY_FILES)):
        if not lies_in(saved.run_dir, path):
            problem = f"{path} is a link to a file outside the run directory; copy the file"
            raise ConfigError("run", problem, str(saved.run_dir))
    own = {key: saved.score.get(key) for key in ("score", "epoch")}
    text = dump_yaml(settings)
    PolicyWriter(*saved.spaces, text)(folder, saved.weights, own)
    read_saved_policy(folder, config.trust).make_model()
    run = RunDirectory(saved.run_dir)
    found = {METRICS: run.metrics, CURVE: run.plots / CURVE}
    sources = {file: path for file, path in found.items() if lies_in(saved.run_dir, path)}
    video = newest_video(saved) if config.video_file is None else Path(expanded(config.video_file))
    if video is not None:
        sources[VIDEO] = video
    for file, path in sources.items():
        try:
            (folder / file).write_bytes(read_regular(path, MAX_NBYTES))
        except OSError as error:
            if file == VIDEO and config.video_file is None:
                notify(f"note: the video is not uploaded: {error}")
                continue
            key = "video_file" if file == VIDEO else "run"
            raise ConfigError(key, f"cannot be read: {error}", str(path)) from error
    score = score_of_epoch(saved.run_dir, saved.score.get("epoch"))
    if score is not None:
        results = {"env_id": task_name(settings), **score.results()}
        results["is_deterministic"] = saved.config.evaluation.deterministic
        (folder / RESULTS).write_text(json_text(results, indent=1) + "\n", encoding="utf-8")
    if config.card:
        files = {path.name for path in folder.iterdir()}
        card = model_card(saved, settings, name, files, score)
        (folder / CARD).write_text(card, encoding="utf-8")


def newest_video(saved: SavedPolicy) -> Path | None:
    """Return the newest video of a policy from the rollouts of its run; None without videos.

    Links that lead out of the run directory are not followed.
    """
    rollouts = RunDirectory(saved.run_dir).rollouts
    played = {"algorithm": saved.config.algorithm.name, "epoch": saved.score.get("epoch")}
    videos = []
    for path in files_below(rollouts, SUMMARY):
        policy = RunDirectory(path.parent).outcome.get("policy")
        if isinstance(policy, dict) and played.items() <= policy.items():
            videos += files_below(path.parent / VIDEOS, "*.mp4")
    videos = [path for path in videos if lies_in(saved.run_dir, path)]
    return max(videos, key=lambda path: path.stat().st_mtime, default=None)


def lies_in(run: Path, path: Path) -> bool:
    """Return whether a file is inside a run directory, after resolving links."""
    return path.is_file() and path.resolve().is_relative_to(run.resolve())


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
                commit_message=title_of(saved, settings),
                # Delete files from an earlier push unless they are replaced.
                delete_patterns=[file for file in OWN_FILES if file not in files],
            )
        except Exception as error:  # Raised by huggingface_hub or its HTTP library.
            problem = f"{config.run} was not pushed to {config.repo_id}: {first_line(error)}"
            remedy = "set a token with write access by `hf auth login` or HF_TOKEN"
            raise RunDirectoryError(f"{problem}; {remedy}") from error
    return PushedPolicy(name, str(commit.commit_url), files, left_out)
