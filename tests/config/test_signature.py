"""Signing keys of users, and signatures of configuration files."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maze_train import ConfigError, load_learner, load_policy, make_env, run_rollout, train
from maze_train.cli import main
from maze_train.config.stored import is_signed, signed

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = "env:\n  _target_: my_env.Own\nseed: 1\n"
QUIET = {"tracking.progress": "quiet", "tracking.plot": False}
SMALL: dict[str, Any] = {
    "env": {"_target_": "own_envs.make_env"},
    "model.policy": {"_target_": "own_parts.OwnNet"},
    "algorithm.batch_size": 16,
    "algorithm.n_rollout_steps": 16,
    "runner.concurrency": 1,
    "evaluation.n_episodes": 1,
    "total_steps": 16,
    **QUIET,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory for the key of a user who has none yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "maze_train"


def test_signing_key_is_created_once_and_private(home: Path) -> None:
    """Checking a signature creates no key; signing creates the key once and reuses it."""
    assert not is_signed(TEXT)
    assert not home.exists()
    text = signed(TEXT)
    key = home / "key"
    assert (home.stat().st_mode & 0o777, key.stat().st_mode & 0o777) == (0o700, 0o600)
    assert (os.listdir(home), len(key.read_bytes())) == (["key"], 32)
    assert text.startswith(TEXT)
    assert signed(TEXT) == text
    assert is_signed(text)


def test_concurrent_processes_share_one_key(home: Path) -> None:
    """Concurrent processes all sign with the same key."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        texts = pool.map(signed, [TEXT] * 32, chunksize=1)
    assert set(texts) == {signed(TEXT)}
    assert is_signed(texts[0])


def test_any_change_invalidates_the_signature(home: Path) -> None:
    """Changes of the settings or of the signature, and appended text, invalidate the signature."""
    text = signed(TEXT)
    line = text[len(TEXT) :]
    for i, letter in enumerate(text):
        other = chr(ord(letter) ^ 1)
        assert not is_signed(text[:i] + other + text[i + 1 :])
    others = [TEXT, "", line, text + "\n", text + text, TEXT + "a: 1\n" + line, text + "a: 1\n"]
    assert [is_signed(other) for other in [*others, text[:-1], text.replace("\n", "\r\n")]] == (
        [False] * 9
    )
    (home / "key").unlink()
    assert not is_signed(text)
    signed(TEXT)
    assert not is_signed(text)


def as_link(key: Path) -> None:
    """Replace the key by a link."""
    shutil.move(key, "elsewhere")
    key.symlink_to(Path("elsewhere").absolute())


def as_linked_folder(key: Path) -> None:
    """Replace the folder of the key by a link."""
    shutil.move(key.parent, "elsewhere")
    key.parent.symlink_to(Path("elsewhere").absolute())


def as_pipe(key: Path) -> None:
    """Replace the key by a named pipe."""
    key.unlink()
    os.mkfifo(key, 0o600)


@pytest.mark.parametrize(
    "harm",
    [
        as_link,
        as_linked_folder,
        as_pipe,
        lambda key: key.chmod(0o640),
        lambda key: key.write_bytes(b"x" * 31),
        lambda key: key.write_bytes(b"x" * 33),
    ],
    ids=["link", "link of the folder", "pipe", "readable by others", "short", "long"],
)
def test_public_key_file_is_not_used(home: Path, harm: Any) -> None:
    """Without a private key nothing is signed, and no signature is valid."""
    text = signed(TEXT)
    harm(home / "key")
    assert not is_signed(text)
    assert signed(TEXT) == TEXT


def test_key_of_another_user_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key owned by another user is ignored, such as the key of the user who calls sudo."""
    text = signed(TEXT)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not is_signed(text)
    assert signed(TEXT) == TEXT


def test_run_continues_unsigned_without_key(home: Path) -> None:
    """A run continues unsigned if the key cannot be stored."""
    home.parent.write_text("")
    train(**SMALL, run_dir="run")
    assert "signature" not in Path("run/config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"not signed by you.*trust=\[own_envs,own_parts\]"):
        train(resume="run", total_steps=32)
    train(resume="run", total_steps=32, trust=["own_envs", "own_parts"])


def calls(run: str) -> list[Callable[..., Any]]:
    """Return a call of every function that reads a run and accepts `trust`."""
    latest = max(Path(run, "checkpoints").glob("epoch_*"))
    start = {key: value for key, value in SMALL.items() if key != "model.policy"}
    start["base_run"] = run
    more = {"total_steps": 100, **QUIET}
    return [
        *(partial(load_policy, name) for name in (run, f"{run}@final", latest)),
        partial(load_learner, run),
        partial(make_env, run),
        partial(run_rollout, run=run, n_episodes=1, progress="quiet"),
        partial(train, **start),
        partial(train, resume=run, **more),
    ]


def test_signed_runs_need_no_trust(home: Path) -> None:
    """Signed runs need no trust in any process or directory, but require the key."""
    result = train(**SMALL, run_dir="run")
    load_policy(result.run_dir)
    shutil.copytree("run", "theirs")
    os.makedirs("moved/to")
    shutil.move("run", "moved/to/here")
    for call in calls("moved/to/here"):
        call()
    assert main(["resume=moved/to/here", "total_steps=120"]) == 0
    (home / "key").unlink()  # as on another machine
    for call in calls("theirs"):
        with pytest.raises(ConfigError, match=r"(?s)trust: .*trust=\[own_"):
            call()
        call(trust=["own_envs", "own_parts"])
