"""The configuration of an upload: a policy, and the repository that it goes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maze_train.checks import absolute_path
from maze_train.config.loading import build_config, values_by_field
from maze_train.conversion import convert_fields
from maze_train.errors import ConfigError
from maze_train.hub import BRANCH, REPOSITORY, is_on_hub

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(kw_only=True)
class PushConfig:
    """Everything that defines an upload to the Hugging Face hub."""

    run: str | None = None
    """Directory of a training run, whose best policy is pushed, of one of its saved policies
    (`<run>/policies/epoch_<n>`), or `<run>@final`."""

    repo_id: str | None = None
    """Repository on the hub, `<owner>/<name>`; it is made if it is not there."""

    private: bool = False
    """Whether a repository that is made is private; one that is there stays as it is."""

    revision: str | None = None
    """Branch that is written, and made if it is not there; null: the main one."""

    card: bool = True
    """Whether README.md is written; false keeps that of the repository."""

    film: str | None = None
    """A film of the policy, an .mp4 file; null: the newest one of rollouts of this policy
    (`maze-run -cn rollout run=<run> video=true`), if there is one."""

    trust: list[str] = field(default_factory=list)
    """Modules other than this package and PyTorch that the configuration of `run` may name, such as
    `[my_nets]`: their code is run."""

    def __post_init__(self) -> None:
        convert_fields(self)
        if self.run is None or is_on_hub(self.run):
            problem = "expected the directory of a run, or of one of its saved policies"
            raise ConfigError("run", problem, self.run)
        if self.repo_id is None or not REPOSITORY.fullmatch(self.repo_id):
            problem = "expected <owner>/<name>, such as repo_id=me/cartpole-ppo"
            raise ConfigError("repo_id", problem, self.repo_id)
        if self.revision is not None and not BRANCH.fullmatch(self.revision):
            problem = "expected the name of a branch, of letters, digits and . _ - /, or null"
            raise ConfigError("revision", problem, self.revision)
        if self.film is not None and not self.film.endswith(".mp4"):
            raise ConfigError("film", "expected a file that ends in .mp4, or null", self.film)
        self.run = absolute_path("run", self.run)


def load_push_config(node: Mapping[str, Any]) -> PushConfig:
    """The configuration of an upload from plain values.

    Raises:
        ConfigError: If a key is unknown, or a value is missing, has a wrong type or form.
    """
    return build_config(PushConfig, values_by_field(PushConfig, node))
