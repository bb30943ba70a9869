"""Hostile configurations: no planted code is executed.

Every command that reads a run directory is called with every plant. The marker, a file that each
plant would create, must not exist afterwards.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from strangers import COMMANDS, MARKER, OWN, SHELL, change, rewrite, run, trained

from maze_train.config.stored import PARTS, read_settings
from maze_train.core.errors import MazeTrainError, RunDirectoryError

__all__ = ["run", "trained"]


class Plant(NamedTuple):
    """Setting added to a stored configuration by an attacker."""

    place: str
    """Key of the changed setting."""
    value: Any
    """New value of the setting."""
    target: str = "subprocess.getoutput"
    """Target that the message must name."""
    key: str = ""
    """Key in the message; by default the `_target_` below `place`."""


def nested(outer: str, **inner: Any) -> dict[str, Any]:
    """Return a node with other nodes as arguments."""
    return {"_target_": outer, **inner}


PPO, SAC, BC, ES = (
    f"maze_train.algorithms.{name.lower()}.config.{name}AlgorithmConfig"
    for name in ("PPO", "SAC", "BC", "ES")
)
INNER = nested("torch.nn.Linear", in_features=SHELL)
THROUGH = "torch.nn.parallel.distributed.os.system"
PLANTS = [
    Plant("model.value_transform", SHELL),
    Plant("model.value_transform", nested(THROUGH, command=f"touch {MARKER}"), THROUGH),
    Plant("model.value_transform", nested("hostile:Part"), "hostile:Part"),
    Plant("model.value_transform", nested("torch.nn.Linear"), "torch.nn.Linear"),
    Plant("model.policy", SHELL),
    Plant("model.policy", INNER, key="model.policy.in_features._target_"),
    Plant(
        "model.policy",
        nested("torch.nn.Sequential", modules=[{"deep": [INNER]}]),
        key="model.policy.modules[0].deep[0].in_features._target_",
    ),
    Plant("model.policy", nested("maze_train.train", env="hostile:Env-v0"), "maze_train.train"),
    Plant("model.critic", SHELL),
    Plant("model.trunk", OWN, "hostile.Part"),
    Plant("model.distributions", {"Discrete": SHELL}, key="model.distributions.Discrete._target_"),
    Plant("model.normalization._target_", "hostile.Part", "hostile.Part", key="same"),
    Plant("model._target_", "hostile.Part", "hostile.Part", key="same"),
    Plant("algorithm._target_", "hostile.Part", "hostile.Part", key="same"),
    Plant("algorithm.lr", OWN, "hostile.Part"),
    Plant("algorithm.optimizer", SHELL),
    Plant("algorithm.optimizer", nested("torch.optim.Adam", betas=SHELL),
          key="algorithm.optimizer.betas._target_"),
    Plant("algorithm.lr_scheduler", SHELL),
    Plant("algorithm.overrides", {"default": {"optimizer": SHELL}},
          key="algorithm.overrides.default.optimizer._target_"),
    Plant("algorithm.overrides", {"default": {"lr": OWN}}, "hostile.Part",
          "algorithm.overrides.default.lr._target_"),
    Plant("algorithm.overrides", {"default.optimizer": {"lr": OWN}}, "hostile.Part",
          "algorithm.overrides.default/optimizer.lr._target_"),
    Plant("policies", {"judge": {"agents": ["a"], "model": {"policy": SHELL}}},
          key="policies.judge.model.policy._target_"),
    Plant("policies", {"judge.model.policy": {"agents": ["a"], "model": OWN}}, "hostile.Part",
          "policies.judge/model/policy.model._target_"),
    Plant("algorithm", nested(SAC, replay_buffer=SHELL), key="algorithm.replay_buffer._target_"),
    Plant("algorithm", nested(SAC, initial_sampling_policy=SHELL),
          key="algorithm.initial_sampling_policy._target_"),
    Plant("algorithm", nested(SAC, initial_demonstration_trajectories=SHELL),
          key="algorithm.initial_demonstration_trajectories._target_"),
    Plant("algorithm", nested(BC, loss=SHELL), key="algorithm.loss._target_"),
    Plant("algorithm", nested(ES, policy_wrapper=SHELL), key="algorithm.policy_wrapper._target_"),
    Plant("runner._target_", "hostile.Part", "hostile.Part", key="same"),
    Plant("runner.dataset", SHELL),
    Plant("env", {"_target_": "subprocess.getoutput", "kwargs": {"cmd": f"touch {MARKER}"}}),
    Plant("env", {"_target_": "gymnasium.make", "kwargs": {"id": "hostile:Env-v0"}},
          "gymnasium.make"),
    Plant("env.id", "hostile:Env-v0", "hostile:Env-v0", key="same"),
    Plant("env.id", "hostile:<Env>", "hostile:<Env>", key="same"),
    Plant("env.id", "GymV26Environment-v0", "GymV26Environment-v0", key="same"),
    Plant("env.id", "GymV26Environment", "GymV26Environment", key="same"),
    Plant("env", {"id": "GymV21Environment", "kwargs": {"env_id": "hostile:Env"}},
          "GymV21Environment", "env.id"),
    Plant("env.kwargs", {"env_id": "hostile:Env"}, "hostile:Env", "env.kwargs.env_id"),
    Plant("env.kwargs", {"a": [{"b": "GymV26Environment"}]}, "GymV26Environment",
          "env.kwargs.a[0].b"),
    Plant("env.kwargs", {"a": {"b": SHELL}}, key="env.kwargs.a.b._target_"),
    Plant("env.wrappers", [SHELL], key="env.wrappers[0]._target_"),
    Plant("env.wrappers", [nested("gymnasium.wrappers.RecordVideo", video_folder=".")],
          "gymnasium.wrappers.RecordVideo", "env.wrappers[0]._target_"),
    Plant("env.training_wrappers", [SHELL], key="env.training_wrappers[0]._target_"),
    Plant("evaluation.evaluators", [SHELL], key="evaluation.evaluators[0]._target_"),
    Plant("tracking.writers", [OWN], "hostile.Part", "tracking.writers[0]._target_"),
    Plant("_target_", "hostile.Part", "hostile.Part", key="same"),
]  # fmt: skip
DAMAGED = [
    Plant("algorithm", "../../../../../../../../{cwd}/option"),
    Plant("algorithm", {"name": "../../../../../../../../{cwd}/option"}),
    Plant("env", "hostile:Env-v0"),
    Plant("model", [SHELL]),
    Plant("dotted", None),
]


EVERYDAY = ("load_policy", "run_rollout", "train resume")
"""Commands that are called with every plant; the others read directories with the same code."""


def meetings(plants: list[Plant]) -> list[Any]:
    """Return each plant with all `EVERYDAY` commands and one other command.

    `make test` runs each plant and each command once.
    """
    others = [name for name in COMMANDS if name not in EVERYDAY]
    found = []
    for i, plant in enumerate(plants):
        often = {EVERYDAY[i % len(EVERYDAY)], *others[i : i + 1]}
        found += [(name, plant, name in often) for name in (*EVERYDAY, others[i % len(others)])]
    return [
        pytest.param(
            name,
            plant,
            id=f"{name}: {plant.place}",
            marks=() if is_often else pytest.mark.exhaustive,
        )
        for name, plant, is_often in found
    ]


def part_of(key: str) -> str | None:
    """Return the entry of `PARTS` that contains a key."""
    key = f"{key}.".replace("[", ".")
    for owner in ("overrides.default.", "policies.judge."):  # overrides of a module or policy
        key = key.replace(owner, "")
    found = [part for part in PARTS if key.startswith(f"{part}.")]
    return max(found, key=len, default=None)


@pytest.mark.parametrize(("name", "plant"), meetings(PLANTS))
def test_planted_targets_are_not_called(
    run: Path, capfd: pytest.CaptureFixture[str], name: str, plant: Plant
) -> None:
    """One message names key, target and the required `trust`; unused sections are ignored."""
    change(run, plant.place, plant.value)
    command, text = COMMANDS[name], ""
    try:
        command.run()
    except MazeTrainError as error:
        text = str(error)
    assert not Path(MARKER).exists()
    text += capfd.readouterr().err
    key = {"": f"{plant.place}._target_", "same": plant.place}.get(plant.key, plant.key)
    part = part_of(key)
    if part is None or part in command.uses:
        assert text.count("refers to code that is not provided by") == 1
        assert f"\n  {key} = {plant.target}" in text
        assert "trust=[" in text or plant.target == THROUGH
    else:
        assert "trust" not in text
    if name == "load_policy" and plant.place.startswith(("env", "evaluation", "tracking")):
        assert not text


@pytest.mark.parametrize("signature", ["another key", "copied", "own"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.exhaustive)
        for name in COMMANDS
    ],
)
def test_only_valid_signatures_of_the_user_are_trusted(
    run: Path, capfd: pytest.CaptureFixture[str], name: str, signature: str
) -> None:
    """Signatures with another key, and signatures of edited settings, are rejected."""
    change(run, "model.policy", OWN, signature)
    command, text = COMMANDS[name], ""
    try:
        command.run()
    except MazeTrainError as error:
        text = str(error)
    is_used = "model.policy" in command.uses
    assert Path(MARKER).exists() == (is_used and signature == "own")
    text += capfd.readouterr().err
    assert ("trust=[hostile" in text or "trust=[elsewhere,hostile" in text) == (
        is_used and signature != "own"
    )


@pytest.mark.parametrize(("name", "plant"), meetings(DAMAGED))
def test_invalid_stored_sections_raise(
    run: Path, capfd: pytest.CaptureFixture[str], name: str, plant: Plant
) -> None:
    """Stored sections must be mappings, and stored keys may not contain dots."""
    if plant.place == "dotted":
        rewrite(run, lambda text: text + "env.id: hostile:Env-v0\n")
    else:
        value = plant.value
        text = yaml.safe_dump(value).replace("{cwd}", str(Path.cwd()))
        change(run, plant.place, yaml.safe_load(text))
    with pytest.raises(MazeTrainError) as caught:
        COMMANDS[name].run()
    assert not Path(MARKER).exists()
    assert re.search("damaged|unknown|consent", str(caught.value) + capfd.readouterr().err)


ALIASES = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
HARMFUL = {
    "aliases": (ALIASES, "an alias or a tag in line 2"),
    "depth": ("a: " + "[" * 100_000, "nested deeper than 50 levels in line 1"),
    "depth of mappings": ("".join(f"{' ' * i}a:\n" for i in range(400)), "deeper than 50 levels"),
    "python": ("a: !!python/object/apply:os.system [ls]", "an alias or a tag in line 1"),
    "type": ("a: !!bool maybe", "an alias or a tag in line 1"),
    "twice": ("a:\n  seed: 1\n  seed: 2", "duplicate key 'seed' in line 3"),
    "number": ("a: " + ":".join(["1"] * 100_000), "a number of 199,999 digits"),
    "float": ("a: " + ":".join(["1"] * 400) + ".0", "int too large"),
    "size": ("a: " + "x" * 2_000_000, "larger than 250000 bytes"),
    "no text": (b"\xff", "can't decode"),
}


@pytest.mark.parametrize("text", HARMFUL)
def test_files_that_would_hang_or_crash_raise(tmp_path: Path, text: str) -> None:
    """The error names the file and the location."""
    content, message = HARMFUL[text]
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=rf"config.yaml is damaged: .*{message}"):
        read_settings(tmp_path)


def test_config_file_that_is_a_pipe_raises(tmp_path: Path) -> None:
    """Only regular files are read."""
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(RunDirectoryError, match="not a regular file"):
        read_settings(tmp_path)


@pytest.mark.parametrize("name", ["train resume", "resume", "resume checkpoint"])
@pytest.mark.parametrize("key", ["address", "working_dir"])
def test_no_command_connects_to_a_stored_address(
    name: str, key: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server at the stored address receives no connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        runner = {"_target_": "maze_train.config.train_config.RayRunnerConfig", "concurrency": 2}
        change(run, "runner", {**runner, "address": address, key: address})
        with pytest.raises(MazeTrainError) as caught:
            COMMANDS[name].run()
        assert f"runner.{key} = {address!r}" in f"{caught.value}{capfd.readouterr().err}"
        with pytest.raises(BlockingIOError):
            server.accept()
