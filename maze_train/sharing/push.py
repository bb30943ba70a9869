"""A policy as a repository on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from maze_train.config.push_config import load_push_config
from maze_train.errors import RunDirectoryError
from maze_train.hub import HUB, first_line, hub_package
from maze_train.runners.saved_policies import read_saved_policy
from maze_train.sharing.card import title_of
from maze_train.sharing.repository import OWN_FILES, write_repository

if TYPE_CHECKING:
    from maze_train.config.push_config import PushConfig
    from maze_train.runners.parts import TrainingResult


@dataclass(frozen=True)
class PushedPolicy:
    """A policy that was uploaded."""

    name: str
    """What `load_policy` takes: `hf://<owner>/<name>`, with the revision if it is not the main one.
    """

    url: str
    """Address of the commit."""

    files: list[str]
    """Files that were uploaded."""

    left_out: list[str]
    """Keys of settings that were left out, or shortened, since they hold a path of this machine or
    a secret."""

    def __str__(self) -> str:
        """Lines for people."""
        lines = [f"{self.name}: {', '.join(self.files)}"]
        if self.left_out:
            keys, reason = ", ".join(self.left_out), "paths of this machine, secrets"
            lines.append(f"left out of config.yaml, or shortened ({reason}): {keys}")
        return "\n".join([*lines, self.url])


def push_to_hub(
    run: str | Path | TrainingResult, repo_id: str, *, token: str | None = None, **settings: Any
) -> PushedPolicy:
    """Upload a policy to the Hugging Face hub: `maze-run -cn push`.

        pushed = push_to_hub("outputs/a", "me/cartpole-ppo", private=True)
        policy = load_policy(pushed.name)

    What goes there: the policy, its metrics, curve and film, and a card. Of the configuration that
    is what the policy needs, without directories of this machine.

    Args:
        run: Directory of a run, whose best policy is pushed, of one saved policy, or the result of
            `train`.
        repo_id: Repository, `<owner>/<name>`.
        token: Access token of the hub; None: that of `HF_TOKEN`, or of `hf auth login`.
        **settings: Further settings of `PushConfig` by name.

    Raises:
        ConfigError: If a setting is wrong, or the policy names what is not trusted.
        MissingExtraError: If the extra `hub` is not installed.
        RunDirectoryError: If there is no policy, it can not be loaded again, or the hub refuses it.
    """
    directory = str(getattr(run, "run_dir", run))
    return push(load_push_config({"run": directory, "repo_id": repo_id, **settings}), token)


def push(config: PushConfig, token: str | None = None) -> PushedPolicy:
    """Upload the policy of a configuration, see `push_to_hub`."""
    package, saved = hub_package(), read_saved_policy(str(config.run), config.trust)
    name = f"{HUB}{config.repo_id}" + (f"@{config.revision}" if config.revision else "")
    with TemporaryDirectory() as place:
        folder = Path(place)
        left_out = write_repository(folder, saved, config, name)
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
                commit_message=title_of(saved),
                # Those of an earlier push that has them.
                delete_patterns=[file for file in OWN_FILES if file not in files],
            )
        except Exception as error:  # of the hub's library, or of the HTTP library that it uses
            problem = f"{config.run} was not pushed to {config.repo_id}: {first_line(error)}"
            remedy = "a token that may write is set by `hf auth login`, or by HF_TOKEN"
            raise RunDirectoryError(f"{problem}; {remedy}") from error
    return PushedPolicy(name, str(commit.commit_url), files, left_out)
