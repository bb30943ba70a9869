"""Policies on the Hugging Face Hub: pushed, loaded and played, with a local server."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from cases import everyday
from hub_server import OWNER_TOKEN, HubServer

from maze_train import load_policy, make_env, push_to_hub, run_rollout, train
from maze_train.cli import main
from maze_train.config.compose import load_config
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.run.saved_policies import read_source
from maze_train.tools.hub import OMITTED, score_of_epoch, shared_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maze_train.run.runner import TrainingResult

NAME, CONSTANTS = "me/cartpole", "huggingface_hub.constants"
POLICY = ("config.yaml", "policy.pt", "score.json", "spaces.json")
TOLD = ("README.md", "learning_curve.png", "metrics.csv")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """Return the result of a short run, with a writer whose settings must stay private."""
    place = tmp_path_factory.mktemp("home")
    return train(
        "CartPole-v1",
        total_steps=128,
        run_dir=str(place / "run"),
        seed=1,
        writers=[{"_target_": "maze_train.JSONSummaryWriter", "filename": "writer_token.json"}],
        evaluation={"n_episodes": 3, "final_episodes": 4},
        model={"hidden_sizes": [8]},
        **{
            "algorithm.n_rollout_steps": 16,
            "algorithm.batch_size": 16,
            "algorithm.epoch_length": 1,
            "runner.concurrency": 2,
            "tracking.progress": "quiet",
            "tracking.tensorboard": False,
        },
    )


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    """Start a local hub; this process has the token of its owner."""
    pytest.importorskip("huggingface_hub")
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_TOKEN", OWNER_TOKEN)
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        # huggingface_hub reads these variables on import, which an earlier test may have done.
        for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
            patch.delitem(sys.modules, name)
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """Return the hub without repositories, with an empty cache and working directory."""
    constants = importlib.import_module(CONSTANTS)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    server.repositories.clear()
    server.sizes.clear()
    server.requests.clear()
    server.is_down = False
    return server


def observations(n: int = 20) -> np.ndarray[Any, Any]:
    """Return random observations of CartPole."""
    return np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32)


def test_a_pushed_policy_acts_as_that_of_the_run(hub: HubServer, trained: TrainingResult) -> None:
    """A pushed policy is loaded by repository, branch or commit, also from a private repository."""
    (video := trained.run_dir.parent / "a.mp4").write_bytes(b"film")
    pushed = push_to_hub(trained, NAME, private=True, video_file=str(video))
    assert pushed.name == f"hf://{NAME}"
    assert pushed.left_out == []
    assert sorted(pushed.files) == sorted((*POLICY, *TOLD, "replay.mp4"))
    assert hub.repositories[NAME].private
    expected = load_policy(trained.run_dir).act(observations())
    commit = pushed.url.rpartition("/")[2]
    branch = push_to_hub(str(trained.run_dir), NAME, revision="v1/old")
    for name in (pushed.name, f"hf://{NAME}@{commit}", branch.name):
        assert (load_policy(name).act(observations()) == expected).all()
    assert sorted(hub.repositories[NAME].branches) == ["main", "v1/old"]


def test_only_what_a_policy_needs_is_downloaded(hub: HubServer, trained: TrainingResult) -> None:
    """Loading a policy downloads its four files once."""
    push_to_hub(trained, NAME)
    hub.requests.clear()
    load_policy(f"hf://{NAME}")
    asked = [line for line in hub.requests if line.startswith("GET") and "/resolve/" in line]
    assert sorted(line.rpartition("/")[2] for line in asked) == sorted(POLICY)
    hub.requests.clear()
    load_policy(f"hf://{NAME}")
    assert not [line for line in hub.requests if "/resolve/" in line]
    commit = hub.repositories[NAME].branches["main"]
    hub.requests.clear()
    load_policy(f"hf://{NAME}@{commit}")
    assert hub.requests == []


def test_what_a_later_push_has_not_is_removed(hub: HubServer, trained: TrainingResult) -> None:
    """Files of an earlier policy are deleted; a custom model card and other files are kept."""
    push_to_hub(trained, NAME)
    repository = hub.repositories[NAME]
    more = {"README.md": b"mine", "notes.txt": b"mine", "replay.mp4": b"film"}
    repository.commit("main", {**repository.files(), **more})
    epoch = 3 if trained.summary.best_epoch == 4 else 4
    push_to_hub(f"{trained.run_dir}@epoch_{epoch:06d}", NAME, card=False)
    files = repository.files()
    assert "replay.mp4" not in files
    assert (files["README.md"], files["notes.txt"]) == (b"mine", b"mine")
    assert json.loads(files["score.json"])["epoch"] == epoch


def test_nothing_of_the_machine_is_uploaded(hub: HubServer, trained: TrainingResult) -> None:
    """No uploaded file contains the run directory or the settings of writers."""
    push_to_hub(trained, NAME)
    files = hub.repositories[NAME].files()
    assert "writer_token" in (trained.run_dir / "config.yaml").read_text()
    for words in (str(trained.run_dir.parent), "writer_token"):
        assert not [name for name, data in files.items() if words.encode() in data]


PRIVATE = {
    "env.kwargs": {
        "map": "/home/me/maps/a.txt",
        "api_key": "abc",
        "nested": [{"auth_token": "b", "size": 3}, "C:\\maps\\b.txt"],
        "known": "words",
        "flag": True,
    },
    "env.wrappers": [{"_target_": "my.Wrapper", "url": "https://me:pass@host/x"}],
    "model": {"activation": "relu", "distributions": {"Box": {"name": "beta"}}},
    "algorithm.lr": "linear_0.001",
    "algorithm.device": "cpu",
    "runner.dataset": "records/expert",
    "tracking.writers": [{"_target_": "maze_train.WandbWriter", "project": "secret"}],
    "callbacks": [{"_target_": "maze_train.StopAtReturn", "threshold": 5}],
    "base_run": "/home/me/runs/b",
}


def test_paths_and_secrets_stay_here() -> None:
    """Texts are uploaded only if they are allowed values, class names or keys in `share`."""
    config = load_config({"algorithm": "bc", "env": "CartPole-v1", **PRIVATE})
    settings, left_out = shared_settings(config, ["env.kwargs.known"])
    assert settings["env"]["id"] == "CartPole-v1"
    assert settings["env"]["kwargs"] == {
        "map": OMITTED,
        "api_key": OMITTED,
        "nested": [{"auth_token": OMITTED, "size": 3}, OMITTED],
        "known": "words",
        "flag": True,
    }
    assert settings["env"]["wrappers"] == [{"_target_": "my.Wrapper", "url": OMITTED}]
    assert settings["runner"]["dataset"] == OMITTED
    assert not {"tracking", "callbacks", "base_run", "checkpoint"} & settings.keys()
    keys = ("kwargs.map", "kwargs.api_key", "kwargs.nested.auth_token", "kwargs.nested")
    assert left_out == [*(f"env.{key}" for key in keys), "env.wrappers.url", "runner.dataset"]
    again = load_config(settings)
    assert (again.algorithm, again.model) == (config.algorithm, config.model)


def test_the_card(hub: HubServer, trained: TrainingResult) -> None:
    """The YAML header is valid for the hub, the results match the run, and the commands work."""
    push_to_hub(trained, NAME)
    _, head, text = hub.repositories[NAME].files()["README.md"].decode().split("---\n", 2)
    header = yaml.safe_load(head)
    assert header["library_name"] == "maze-train"
    assert {"ppo", "CartPole-v1", "reinforcement-learning"} <= set(header["tags"])
    test = trained.summary.final_test["best"]
    mean, std = (test[f"episode_return_{name}"] for name in ("mean", "std"))
    (result,) = header["model-index"][0]["results"]
    assert result["dataset"] == {"name": "CartPole-v1", "type": "CartPole-v1"}
    assert result["metrics"][0]["value"] == f"{mean:.2f} +/- {std:.2f}"
    for words in (f"{mean:.2f} +/- {std:.2f} over 4 episodes: test after", "n_rollout_steps: 16"):
        assert words in text
    assert "![Returns over environment steps](learning_curve.png)" in text
    command = next(line for line in text.splitlines() if line.startswith("maze-run"))
    assert main([*command.split()[1:], "n_episodes=1", "progress=quiet"]) == 0
    code = text.partition("```python\n")[2].partition("```")[0]
    exec(code, {"observation": observations()[0]})


def test_the_score_of_a_policy(trained: TrainingResult, tmp_path: Path) -> None:
    """An untested epoch has the score of its evaluation; without files there is no score."""
    with (trained.run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    epoch = 1 if trained.summary.best_epoch == 2 else 2
    score = score_of_epoch(trained.run_dir, epoch)
    assert score is not None
    assert score.mean == float(rows[epoch - 1]["eval/episode_return_mean"])
    assert (score.episodes, "evaluation" in score.origin) == (3, True)
    assert score_of_epoch(trained.run_dir, 99) is None
    assert score_of_epoch(tmp_path, 1) is None


def test_a_run_elsewhere_is_not_followed(hub: HubServer, trained: TrainingResult) -> None:
    """Files outside the run that a link points to are not uploaded."""
    run, secret = Path(shutil.copytree(trained.run_dir, "run")), Path("secret.txt")
    secret.write_text("mine")
    Path("own").mkdir()
    (picture := run / "plots" / "learning_curve.png").unlink()
    picture.symlink_to(secret.absolute())
    assert "learning_curve.png" not in push_to_hub(str(run), NAME).files
    hub.requests.clear()
    for place in ("best/policy.pt", "best"):  # links to a private policy
        shutil.move(run / place, own := Path("own").absolute() / Path(place).name)
        (run / place).symlink_to(own)
        with pytest.raises(ConfigError, match="a link to a file outside the run directory"):
            push_to_hub(str(run), NAME)
        (run / place).unlink()
        shutil.move(own, run / place)
    assert hub.requests == []


def test_the_command_line(
    hub: HubServer, trained: TrainingResult, capfd: pytest.CaptureFixture[str]
) -> None:
    """`push` and `run=hf://...` work; results of a rollout are not written to the cache."""
    assert main(["-cn", "push", f"run={trained.run_dir}", f"repo_id={NAME}"]) == 0
    assert f"hf://{NAME}: README.md, config.yaml" in capfd.readouterr().out
    hub.requests.clear()
    words = ["-cn", "rollout", f"run=hf://{NAME}", "n_episodes=2", "progress=quiet"]
    assert main(words) == 0
    assert len([line for line in hub.requests if line.endswith("?blobs=true")]) == 1
    (folder,) = (hub_folder := os.path.abspath("outputs")) and os.listdir(hub_folder)
    assert folder == "CartPole-v1-ppo-rollout"
    assert main(["-cn", "export", f"run=hf://{NAME}"]) == 2
    assert "set a file, such as output=policy.onnx" in capfd.readouterr().err
    assert main(["-cn", "push", "run=nowhere", "repo_id=me"]) == 2
    assert "repo_id = 'me': expected <owner>/<name>" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_other_places_take_the_name(hub: HubServer, trained: TrainingResult) -> None:
    """Policy sources, `make_env` and `base_run` accept the name of a repository."""
    push_to_hub(trained, NAME)
    assert read_source(f"hf://{NAME}").spaces[1] == trained.policy.action_space
    with pytest.raises(RunDirectoryError, match="has only one policy; remove :wolf"):
        read_source(f"hf://{NAME}@main:wolf")
    with make_env(f"hf://{NAME}") as env:
        assert env.observation_space == trained.policy.observation_space
    result = train(
        "CartPole-v1",
        base_run=f"hf://{NAME}",
        total_steps=32,
        **{"runner.fast_dev_run": True, "tracking.progress": "quiet"},
    )
    assert result.summary.updates


class Opens:
    """Object that creates a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch marker",)


def stranger(trained: TrainingResult, **settings: Any) -> dict[str, bytes]:
    """Return the files of the best policy, with changed settings of the model."""
    best = trained.run_dir / "best"
    config = yaml.safe_load((best / "config.yaml").read_text())
    config["model"].update(settings)
    text = yaml.safe_dump(config).encode()
    return {path.name: path.read_bytes() for path in best.iterdir()} | {"config.yaml": text}


def test_a_hostile_repository_runs_nothing(hub: HubServer, trained: TrainingResult) -> None:
    """Pickles, targets in settings and file names with `..` execute and write nothing."""
    files = stranger(trained)
    pickled = pickle.dumps(Opens())
    score = json.dumps({"score": 1.0, "sha256": hashlib.sha256(pickled).hexdigest()}).encode()
    shell = {"_target_": "subprocess.getoutput", "cmd": "touch marker"}
    hub.publish("x/pickle", {**files, "policy.pt": pickled, "score.json": score})
    hub.publish("x/target", stranger(trained, policy=shell))
    others = ("../marker", "a/../../../marker", "policy.pt/../../marker", "hostile.py", "best/x.pt")
    hub.publish("x/paths", {**files, **dict.fromkeys(others, b"x")})
    with pytest.raises(RunDirectoryError, match="no code in the file was run"):
        load_policy("hf://x/pickle")
    with pytest.raises(ConfigError, match=r"model\.policy\._target_ = subprocess\.getoutput"):
        load_policy("hf://x/target")
    with pytest.raises(ConfigError, match=r"subprocess\.getoutput"):
        run_rollout("hf://x/target", n_episodes=1)
    hub.requests.clear()
    load_policy("hf://x/paths")
    asked = {line.partition("/resolve/")[2] for line in hub.requests if "/resolve/" in line}
    assert {name.partition("/")[2] for name in asked} == set(POLICY)
    names = {name for _, _, names in os.walk(".") for name in names}
    assert not names & {"marker", "hostile.py", "x.pt"}


def test_a_policy_that_fills_the_disk_is_not_downloaded(
    hub: HubServer, trained: TrainingResult
) -> None:
    """File sizes are checked before the download."""
    hub.publish("x/large", stranger(trained))
    hub.sizes["policy.pt"] = 1 << 40
    with pytest.raises(RunDirectoryError, match=r"has 1,099,5.* bytes; the limit is 4,294,967,296"):
        load_policy("hf://x/large")
    assert not [line for line in hub.requests if "/resolve/" in line]


@pytest.mark.parametrize("how", everyday(1, ["down", "offline", "gone"]))
def test_without_the_hub_the_last_download_is_used(
    hub: HubServer,
    trained: TrainingResult,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A note names the cached commit; without an earlier download an error is raised."""
    hub.publish(NAME, stranger(trained))
    hub.publish("me/other", stranger(trained))
    load_policy(f"hf://{NAME}")
    capfd.readouterr()
    package, constants = map(importlib.import_module, ("huggingface_hub", CONSTANTS))
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        package.close_session()  # the session caches the offline mode
    elif how == "gone":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.is_down = True
    try:
        load_policy(f"hf://{NAME}")
        commit = hub.repositories[NAME].branches["main"]
        assert f"using commit {commit[:12]} from the cache" in capfd.readouterr().err
        with pytest.raises(RunDirectoryError, match="no earlier download in the cache"):
            load_policy("hf://me/other")
    finally:
        package.close_session()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hf://nobody/nothing", "the repository does not exist or is private: log in"),
        (f"hf://{NAME}@v9", "the repository has no revision v9"),
        ("hf://alone", "is not a repository: expected hf://<owner>/<repository>"),
        (f"hf://{NAME}@", "is not a repository"),
        (f"hf://{NAME}@../../../x", "is not a repository"),
        ("hf://../x", "is not a repository"),
    ],
)
def test_names_that_lead_nowhere(
    hub: HubServer, trained: TrainingResult, name: str, problem: str
) -> None:
    """The error names the problem; a malformed name causes no request."""
    hub.publish(NAME, stranger(trained))
    with pytest.raises(RunDirectoryError, match=problem):
        load_policy(name)
    assert bool(hub.requests) == ("is not a repository" not in problem)


def test_who_may_not_write(
    hub: HubServer, trained: TrainingResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected push raises an error with the remedy; a token can be passed."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    with pytest.raises(RunDirectoryError, match=r"was not pushed to .*HF_TOKEN"):
        push_to_hub(trained, NAME)
    assert push_to_hub(trained, NAME, token=OWNER_TOKEN).files


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"repo_id": "me"}, r"repo_id = 'me': expected <owner>/<name>"),
        ({"run": "hf://me/x"}, "run = 'hf://me/x': expected the directory of a run"),
        ({"revision": "../x"}, "revision = '../x': expected the name of a branch"),
        ({"video_file": "a.gif"}, r"video_file = 'a.gif': expected a file that ends in \.mp4"),
        ({"video_file": "none.mp4"}, r"video_file = '.*none.mp4': cannot be read"),
        ({"privat": True}, r"privat.*did you mean private\?"),
    ],
)
def test_invalid_search_settings_raise(
    hub: HubServer, trained: TrainingResult, settings: dict[str, Any], problem: str
) -> None:
    """One message contains key, value and what is expected; no repository is created."""
    given = {"run": trained.run_dir, "repo_id": NAME, **settings}
    with pytest.raises(ConfigError, match=problem):
        push_to_hub(**given)
    assert hub.repositories == {}
