"""Training from the policy of an earlier run: cloning, then reinforcement learning."""

from __future__ import annotations

import shutil
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from cases import everyday
from own_envs import SpacesEnv
from recorded import record
from short_runs import ALGORITHMS, QUIET, SMALL, settings, short_run

from maze_train import CheckpointStore, ConfigError, DiagonalGaussian, load_policy, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import gymnasium

BOX = {"_target_": "own_envs.SpacesEnv", "kwargs": {"action": "box"}}
NETS: dict[str, Any] = {
    "model.hidden_sizes": [8],
    "model.activation": "relu",
    "model.orthogonal_init": False,
}
UNSAID: dict[str, Any] = dict.fromkeys(NETS)
SQUASHED: dict[str, Any] = {"model.distributions": {"Box": "squashed_gaussian"}}
RUNNING: dict[str, Any] = {"model.normalization.mode": "running", "model.normalization.n_steps": 16}
VALUES = {"_target_": "maze_train.ReduceScaleValueTransform"}
STILL: dict[str, Any] = {"algorithm.lr": 1e-30, "total_steps": 64}


class Unscaled(DiagonalGaussian):
    """Distribution that does not define how Q-networks read its actions."""

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        super().__init__(space)
        self.critic_input_size = 0


def cloned(place: Path, name: str, action: str = "discrete", **changes: Any) -> Path:
    """Run behavioral cloning; return the run directory."""
    data = place / f"data-{action}"
    if not data.exists():
        record(data, SpacesEnv(action=action))
    given = {"runner.dataset": str(data), "algorithm.n_epochs": 3, "algorithm.batch_size": 16}
    train(
        algorithm="bc", **{**given, "run_dir": place / name, **NETS, **QUIET, "seed": 3, **changes}
    )
    return place / name


def trained(place: Path, name: str, algorithm: str = "ppo", **changes: Any) -> Path:
    """Run reinforcement learning; return the run directory."""
    like = settings("sac" if algorithm == "dqn" else algorithm, **changes)
    train(**{**like, "algorithm": algorithm, "run_dir": place / name})
    return place / name


def damaged(place: Path, name: str) -> Path:
    """Return a run directory with an invalid configuration or networks of another size."""
    best = cloned(place, name) / "best"
    if name in OTHER_CONFIGS:
        (best / "config.yaml").write_text(OTHER_CONFIGS[name])
        return best.parent
    weights = torch.load(best / "policy.pt")
    key = next(key for key in weights if key.endswith("weight"))
    torch.save({**weights, key: weights[key][:, :-1]}, best / "policy.pt")
    (best / "score.json").unlink()
    return best.parent


OTHER_CONFIGS = {"no such class": "algorithm: {_target_: no.such.Thing}", "a list": "- 1"}
FAMILIES: dict[str, Any] = {
    "unscaled box": {"_target_": "test_base_policy.Unscaled"},
    "fixed box": {"_target_": "maze_train.algorithms.td3.model.NoisyActions"},
    "squashed box": "squashed_gaussian",
}
BASES: dict[str, Callable[[Path, str], Path]] = {
    "bc": cloned,
    "bc box": partial(cloned, action="box"),
    "bc running": partial(cloned, **RUNNING),
    "bc estimated": partial(cloned, **{**RUNNING, "model.normalization.mode": "estimated"}),
    "unsaid none box": partial(cloned, action="box", **UNSAID, **SQUASHED),
    "unsaid running box": partial(cloned, action="box", **UNSAID, **RUNNING),
    "bc running box": partial(cloned, action="box", **RUNNING),
    "recurrent box": partial(trained, env=BOX, **{"model.rnn.size": 4}),
    "dqn": partial(trained, algorithm="dqn"),
    "ppo": partial(trained, **NETS),
    "sac box": partial(trained, algorithm="sac", env=BOX, **RUNNING, **UNSAID),
    "ppo box": partial(trained, env=BOX, **RUNNING, **UNSAID),
    "nowhere": lambda place, name: place / name,
    "no run": lambda place, _: place,
    **dict.fromkeys((*OTHER_CONFIGS, "narrow"), damaged),
    **{
        name: partial(cloned, action="box", **{"model.distributions": {"Box": family}})
        for name, family in FAMILIES.items()
    },
}
"""Earlier runs by name; names that end in `box` have continuous actions, others discrete."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that creates a base run once; tests do not modify it."""
    place = tmp_path_factory.mktemp("bases")
    return cache(lambda name: BASES[name](place, name))


def started(
    tmp_path: Path, of: Path | str, algorithm: str, action: str = "box", **changes: Any
) -> Path:
    """Start a run from a base with negligible updates; return its directory.

    No settings of networks are passed, except those in `changes`.
    """
    given = {
        "env": {"_target_": "own_envs.SpacesEnv", "kwargs": {"action": action}},
        **{k: v for k, v in SMALL.items() if not k.startswith("model.")},
        **ALGORITHMS.get("sac" if algorithm == "dqn" else algorithm, {}),
        "algorithm": algorithm,
        "base_run": str(of),
        "run_dir": tmp_path / "next",
        **STILL,
        **changes,
    }
    if algorithm in ("es", "bc"):
        del given["algorithm.n_rollout_steps"]
    if algorithm == "bc":
        data = record(tmp_path / "data", SpacesEnv(action=action))
        given = {**given, "runner.dataset": str(data), "algorithm.batch_size": 16}
    given = {k: v for k, v in given.items() if not k.startswith("model.") or k in changes}
    train(**given)
    return tmp_path / "next"


def written(run_dir: Path) -> Any:
    """Return the model section of config.yaml."""
    return yaml.safe_load((run_dir / "config.yaml").read_text())["model"]


def same_policy(base: Path, run_dir: Path, besides: tuple[str, ...] = ()) -> bool:
    """Return whether two runs have bit-for-bit identical policies, except for `besides`."""
    before, after = policy_weights(base), policy_weights(run_dir)
    kept = [key for key in before if not key.startswith(besides or ("nothing",))]
    return before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in kept)


def policy_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the policy, without critics."""
    weights = torch.load(run_dir / "best" / "policy.pt")
    return {k: v for k, v in weights.items() if k.startswith(("policy.", "normalizer."))}


@pytest.mark.parametrize("algorithm", everyday(2, ["sac", "es", "ppo", "a2c", "impala"]))
@pytest.mark.parametrize("mode", ["none", "running"])
def test_base_run_provides_networks_by_default(tmp_path, base, algorithm, mode):
    """Without settings of networks, all algorithms use those of the base run."""
    earlier = base(f"unsaid {mode} box")
    changes: dict[str, Any] = {}
    if algorithm == "es":
        changes = {"algorithm.noise_stddev": 1e-30, "algorithm.l2_penalty": 0.0, "total_steps": 10}
    run_dir = started(tmp_path, earlier, algorithm, **changes)
    assert same_policy(earlier, run_dir, ("normalizer.",))
    model = written(run_dir)
    assert (model["hidden_sizes"], model["activation"]) == ([64, 64], "tanh")
    assert model["orthogonal_init"] is True
    family = "squashed_gaussian" if mode == "none" else "diagonal_gaussian"
    assert model["distributions"] == {"Box": family}
    assert model["normalization"]["mode"] == mode
    if mode == "running":
        before, after = policy_weights(earlier), policy_weights(run_dir)
        assert before["normalizer.count"] < after["normalizer.count"]


@pytest.mark.parametrize(
    ("name", "networks"),
    everyday(
        1,
        [
            ("sac box", ([256, 256], "relu", "squashed_gaussian")),
            ("ppo box", ([64, 64], "tanh", "diagonal_gaussian")),
        ],
        are_rows=True,
    ),
)
def test_bc_continues_from_a_base_run(tmp_path, base, name, networks):
    """BC continues with the networks of its base run, also if that was trained with SAC."""
    run_dir = started(tmp_path, base(name), "bc")
    assert same_policy(base(name), run_dir)
    model = written(run_dir)
    found = (model["hidden_sizes"], model["activation"], model["distributions"]["Box"])
    assert found == networks


TRUST = {"trust": ["test_base_policy"]}
TO_TRAIN = r"train the base with 'model\.distributions=\{Box: squashed_gaussian\}'"
FIXED = r"model\.distributions = 'NoisyActions': the entropy of .* is fixed.*_tuning=false"
NO_RNN = r"train the base with model\.rnn=null$"
OTHERS = {"model.hidden_sizes": [9], "model.activation": "tanh"}
NOT_OTHERS = (
    r"base_run .*\[8\] there, \[9\] here; activation: relu there, tanh here\).*"
    r"set 'model\.hidden_sizes=\[8\]' model\.activation=relu$"
)
WIDE = {"model.distributions": {"Box": {"name": "squashed_gaussian", "log_std_max": 1.0}}}
WEIGHTS = "do not fit the networks of this run .*: "
CHOICES = {"env": {"_target_": "own_envs.SpacesEnv"}}
SPACES = r"its policy has the action space Box\(.*\), the environment has Discrete\(3, start=-1"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    # Networks that the algorithm does not support: how to train the base.
    ("unscaled box", "sac", TRUST, rf"base_run = .*sac cannot learn .*{TO_TRAIN}"),
    ("unscaled box", "sac", {**TRUST, **NETS}, TO_TRAIN),
    ("fixed box", "sac", {}, FIXED),
    ("recurrent box", "sac", {}, NO_RNN),
    ("recurrent box", "bc", {}, NO_RNN),
    # Different settings: what to set, even if the weights would fit.
    ("bc", "ppo", OTHERS, NOT_OTHERS),
    ("bc", "ppo", {"model.normalization.mode": "running"}, r"set model\.norma.*\.mode=none$"),
    # Settings that the user wrote, although they have the defaults.
    ("bc running", "ppo", {"model.normalization.mode": "none"}, r"set model\.norm.*=running$"),
    ("recurrent box", "ppo", {"model.rnn": None}, r"rnn: .* there, null here"),
    ("squashed box", "ppo", {"model.distributions": {}}, r"set 'model\.dist.*squashed"),
    ("bc", "ppo", {"model.hidden_sizes": None}, r"set 'model\.hidden_sizes=\[8\]'$"),
    ("squashed box", "ppo", WIDE, r"set 'model\.dist.*=\{Box: squashed_gaussian\}'$"),
    # Different weights: settings of the algorithm, another algorithm, changed networks.
    (
        "dqn",
        "dqn",
        {"algorithm.dueling": True},
        rf"{WEIGHTS}set algorithm\.dueling=False, as",
    ),
    ("dqn", "dqn", {"algorithm.num_quantiles": 3}, rf"{WEIGHTS}set algorithm\.num_quantiles=0, as"),
    ("dqn", "sac", {}, rf"{WEIGHTS}dqn trains another type of policy; use a policy of sac$"),
    ("narrow", "ppo", {}, r"weights of its policy .*\[8, 2\] there, \[8, 3\]"),
    # Different spaces are reported before weights.
    ("bc box", "ppo", CHOICES, SPACES),
    ("bc box", "ppo", {**CHOICES, **NETS}, SPACES),
    # No policy, or an invalid configuration.
    ("no run", "ppo", {}, r"base_run.*contains no saved policy"),
    ("nowhere", "ppo", {}, r"base_run.*contains no saved policy"),
    ("no such class", "ppo", {}, r"^base_run = "),
    ("a list", "ppo", {}, r"^base_run = "),
]


@pytest.mark.parametrize(
    ("name", "algorithm", "changes", "words"),
    REFUSED,
    ids=[f"{number}-{case[0]}-{case[1]}" for number, case in enumerate(REFUSED)],
)
def test_incompatible_base_run_raises(tmp_path, base, name, algorithm, changes, words):
    """The error contains key, value, allowed values and remedy; nothing is written."""
    action = "box" if name.endswith("box") else "discrete"
    with pytest.raises(ConfigError, match=words):
        started(tmp_path, base(name), algorithm, action, **changes)
    assert not (tmp_path / "next").exists()


def test_sac_with_fixed_entropy_base_requires_fixed_temperature(tmp_path, base):
    """A policy with fixed entropy requires a fixed temperature."""
    fixed = {"algorithm.entropy_tuning": False}
    run_dir = started(tmp_path, base("fixed box"), "sac", **fixed)
    assert same_policy(base("fixed box"), run_dir)


@pytest.mark.parametrize(("mode", "count"), [("running", 40 + 32), ("estimated", 40)])
@pytest.mark.parametrize("mode_of_base", ["running", "estimated"])
def test_new_run_decides_whether_statistics_are_updated(tmp_path, base, mode_of_base, mode, count):
    """The mode of the new run decides whether statistics are updated."""
    earlier = base(f"bc {mode_of_base}")
    changes = {**RUNNING, "model.normalization.mode": mode, "total_steps": 32}
    after = policy_weights(started(tmp_path, earlier, "ppo", "discrete", **changes))
    frozen = bool(policy_weights(earlier)["normalizer.frozen"])
    assert frozen == (mode_of_base == "estimated")
    assert bool(after["normalizer.frozen"]) == (mode == "estimated")
    assert float(after["normalizer.count"]) == count


def test_settings_equal_to_the_base_are_allowed(tmp_path, base):
    """Settings equal to the base, and settings of initialisation and statistics, are allowed."""
    changes = {
        **RUNNING,
        "model.hidden_sizes": [8],
        "model.distributions": {"Box": "diagonal_gaussian", "Discrete": "categorical"},
        "model.normalization.n_steps": 20,
        "model.orthogonal_init": True,
    }
    run_dir = started(tmp_path, base("bc running box"), "ppo", **changes)
    assert same_policy(base("bc running box"), run_dir, ("normalizer.",))
    assert written(run_dir)["activation"] == "relu"
    assert written(run_dir)["orthogonal_init"] is True


def test_base_run_accepts_policy_versions(tmp_path):
    """The best, final or an epoch's policy; the error lists the available versions."""
    base = tmp_path / "base"
    dumped = {"evaluation.dump_interval": 2, "evaluation.mode": "min", "total_steps": 256}
    short_run(base, **NETS, **dumped)
    assert "epoch_000004" not in (base / "best" / "score.json").read_text()
    store = CheckpointStore(base / "checkpoints")
    states = {name: store.load(name).state for name in ("epoch_000003", "epoch_000004")}
    weights = {
        name: state["learners"]["learner"]["modules"]["default"] for name, state in states.items()
    }
    weights["epoch_000002"] = torch.load(base / "policies" / "epoch_000002" / "policy.pt")
    weights["best"] = torch.load(base / "best" / "policy.pt")
    weights["final"] = weights["epoch_000004"]
    weights["no version"] = weights["best"]
    places = {name: f"{base}@{name}" for name in weights} | {"no version": str(base)}
    places |= {"epoch_000003": f"{base}/checkpoints/epoch_000003"}
    for name, place in places.items():
        run_dir = started(tmp_path, place, "ppo", "discrete", run_dir=tmp_path / name)
        found = policy_weights(tmp_path / name)
        assert found
        assert all(torch.equal(found[key], weights[name][key]) for key in found), run_dir
    with pytest.raises(ConfigError) as caught:
        started(tmp_path, f"{base}@epoch_000001", "ppo", "discrete", run_dir=tmp_path / "no")
    assert str(caught.value) == (
        f"base_run = '{base}@epoch_000001': {base} contains no saved policy 'epoch_000001': "
        "expected one of best, final, epoch_000002, epoch_000003, epoch_000004; "
        "did you mean 'epoch_000004'?"
    )
    shutil.rmtree(base / "best")
    shutil.rmtree(base / "policies")
    with pytest.raises(ConfigError, match=r"has no spaces.json yet; resume the run"):
        started(tmp_path, f"{base}@final", "ppo", "discrete", run_dir=tmp_path / "no")
    with pytest.raises(ConfigError, match=r"no saved policy 'final': it has no saved policies"):
        started(tmp_path, f"{tmp_path}/nowhere@final", "ppo", "discrete", run_dir=tmp_path / "no")


@pytest.mark.parametrize(
    ("name", "changes", "new"),
    [
        ("ppo", {}, ""),
        ("bc", {}, "critic"),
        ("ppo", {"algorithm.reward_scaling": True}, "critic"),
        ("ppo", {"model.value_transform": VALUES}, "critic"),
    ],
    ids=["same", "no critic", "other rewards", "other values"],
)
def test_ppo_critics_are_loaded_from_the_base(tmp_path, base, capsys, name, changes, new):
    """Critics are loaded from PPO to PPO; otherwise they are newly initialised."""
    run_dir = started(tmp_path, base(name), "ppo", "discrete", **changes)
    parts = f"policy; new: {new}" if new else "policy, critic"
    assert f"base_run: loaded {parts}\n" in capsys.readouterr().err
    if not new:
        critics = [load_policy(path).model.critic.state_dict() for path in (base(name), run_dir)]
        assert all(torch.equal(critics[0][key], critics[1][key]) for key in critics[0])


def test_temperatures_come_from_the_new_settings(tmp_path, base, capsys):
    """Critics and their targets are loaded, but temperatures are settings."""
    fixed = {"algorithm.entropy_coef": 0.05, "algorithm.entropy_tuning": False}
    run_dir = started(tmp_path, base("sac box"), "sac", **fixed)
    told = "loaded normalizer, policy, critics, target_critics; new: log_temperatures"
    assert told in capsys.readouterr().err
    before, after = (torch.load(p / "best" / "policy.pt") for p in (base("sac box"), run_dir))
    assert float(after["log_temperatures"].exp()) == pytest.approx(0.05)
    critics = [key for key in before if key.startswith("critics.")]
    assert critics
    assert all(torch.equal(before[key], after[key]) for key in critics)


@pytest.mark.parametrize("says_networks", [True, False])
def test_resume_does_not_require_the_base_run(tmp_path, says_networks):
    """Resuming a run does not require its base run."""
    base = cloned(tmp_path, "bc", "box")
    given = {"total_steps": 64, **(NETS if says_networks else {})}
    started(tmp_path, base, "ppo", **given)
    shutil.rmtree(base)
    result = train(resume=tmp_path / "next", total_steps=128, trust=["own_envs"])
    assert result.summary.env_steps >= 128
    # The same command again, with the same settings of networks.
    started(tmp_path, base, "ppo", **{**given, "resume": "auto", "total_steps": 192})
