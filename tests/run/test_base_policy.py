"""Training that starts from the policy of an earlier run: BC, then reinforcement learning."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from own_envs import SpacesEnv
from recorded import record
from short_runs import ALGORITHMS, QUIET, SMALL, settings, short_run

from maze_train import load_policy, train
from maze_train.core.errors import ConfigError
from maze_train.distributions.gaussian import DiagonalGaussian
from maze_train.training.checkpoints import CheckpointStore

if TYPE_CHECKING:
    from pathlib import Path

    import gymnasium

BOX = {"_target_": "own_envs.SpacesEnv", "kwargs": {"action": "box"}}
NETS: dict[str, Any] = {
    "model.hidden_sizes": [8],
    "model.activation": "relu",
    "model.orthogonal_init": False,
}
SQUASHED: dict[str, Any] = {"model.distributions": {"Box": "squashed_gaussian"}}
RUNNING: dict[str, Any] = {"model.normalization.mode": "running", "model.normalization.n_steps": 16}
STILL: dict[str, Any] = {"algorithm.lr": 1e-30, "total_steps": 64}


def cloned(tmp_path: Path, action: str = "discrete", name: str = "bc", **changes: Any) -> Path:
    """The directory of a run of behavioral cloning."""
    data = tmp_path / f"data-{action}"
    if not data.exists():
        record(data, SpacesEnv(action=action))
    given = {"runner.dataset": str(data), "algorithm.n_epochs": 3, "algorithm.batch_size": 16}
    train(
        algorithm="bc",
        **{**given, "run_dir": tmp_path / name, **NETS, **QUIET, "seed": 3, **changes},
    )
    return tmp_path / name


def started(
    tmp_path: Path, base: Path | str, algorithm: str, action: str = "box", **changes: Any
) -> Path:
    """The directory of a run that starts from a base, and makes no update that counts.

    Nothing is said about its networks, unless the changes do.
    """
    given = {
        "env": {"_target_": "own_envs.SpacesEnv", "kwargs": {"action": action}},
        **{k: v for k, v in SMALL.items() if not k.startswith("model.")},
        "algorithm": algorithm,
        **ALGORITHMS.get(algorithm, {}),
        "base_run": str(base),
        "run_dir": tmp_path / "next",
        **STILL,
        **changes,
    }
    if algorithm in ("es", "bc"):
        del given["algorithm.n_rollout_steps"]
    given = {k: v for k, v in given.items() if not k.startswith("model.") or k in changes}
    train(**given)
    return tmp_path / "next"


def written(run_dir: Path) -> Any:
    """The model section of config.yaml."""
    return yaml.safe_load((run_dir / "config.yaml").read_text())["model"]


def same_policy(base: Path, run_dir: Path, besides: tuple[str, ...] = ()) -> bool:
    """Whether two runs have the same policy to the bit; its statistics may have continued."""
    before, after = policy_weights(base), policy_weights(run_dir)
    kept = [key for key in before if not key.startswith(besides or ("nothing",))]
    return before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in kept)


def policy_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights of the policy alone."""
    weights = torch.load(run_dir / "best" / "policy.pt")
    return {k: v for k, v in weights.items() if k.startswith(("policy.", "normalizer."))}


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("mode", ["none", "running"])
def test_networks_come_along_where_nothing_is_said_of_them(tmp_path, algorithm, mode):
    """Those of the default settings of BC, which are not the defaults of SAC."""
    normalised = {"model.normalization.mode": mode, "model.normalization.n_steps": 16}
    unset = {"model.hidden_sizes": None, "model.activation": None, "model.orthogonal_init": None}
    family = "squashed_gaussian" if mode == "none" else "diagonal_gaussian"
    families = SQUASHED if mode == "none" else {}
    base = cloned(tmp_path, "box", **unset, **families, **normalised)
    changes: dict[str, Any] = {}
    if algorithm == "es":
        changes = {"algorithm.noise_stddev": 1e-30, "algorithm.l2_penalty": 0.0, "total_steps": 10}
    run_dir = started(tmp_path, base, algorithm, **changes)
    assert same_policy(base, run_dir, ("normalizer.",))
    model = written(run_dir)
    assert (model["hidden_sizes"], model["activation"]) == ([64, 64], "tanh")
    assert model["orthogonal_init"] is True
    assert model["distributions"] == {"Box": family}
    assert model["normalization"]["mode"] == mode
    if mode == "running":
        before, after = policy_weights(base), policy_weights(run_dir)
        assert before["normalizer.count"] < after["normalizer.count"]


def test_networks_come_along_in_a_trial(tmp_path):
    """What a trial shortens counts as nothing that was said of the networks."""
    base = cloned(tmp_path, **RUNNING)
    run_dir = started(tmp_path, base, "ppo", "discrete", **{"runner.fast_dev_run": True})
    assert written(run_dir)["hidden_sizes"] == [8]
    normalization = written(run_dir)["normalization"]
    assert (normalization["mode"], normalization["n_steps"]) == ("running", 1)


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_bc_goes_on_from_the_policy_of_another(tmp_path, algorithm):
    """With the networks that it had there, those of SAC included."""
    networks = {**RUNNING, "model.hidden_sizes": None}
    short_run(tmp_path / "base", algorithm, env=BOX, **networks)
    data = record(tmp_path / "data", SpacesEnv(action="box"))
    learned = {"runner.dataset": str(data), "algorithm.batch_size": 16}
    run_dir = started(tmp_path, tmp_path / "base", "bc", **learned)
    assert same_policy(tmp_path / "base", run_dir)
    sac, ppo = ([256, 256], "relu", "squashed_gaussian"), ([64, 64], "tanh", "diagonal_gaussian")
    model = written(run_dir)
    found = (model["hidden_sizes"], model["activation"], model["distributions"]["Box"])
    assert found == (sac if algorithm == "sac" else ppo)


class Unscaled(DiagonalGaussian):
    """A family that does not say what critics of actions read."""

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        super().__init__(space)
        self.critic_input_size = 0


def test_sac_says_how_to_train_its_base(tmp_path):
    """Not all families have what SAC needs; what does is reported, whatever is set besides."""
    family = {"Box": {"_target_": "test_base_policy.Unscaled"}}
    base = cloned(tmp_path, "box", **{"model.distributions": family})
    advice = r"train the base with 'model\.distributions=\{Box: squashed_gaussian\}'"
    with pytest.raises(ConfigError, match=rf"base_run = .*sac cannot learn .*{advice}"):
        started(tmp_path, base, "sac", trust=["test_base_policy"])
    with pytest.raises(ConfigError, match=advice):
        started(tmp_path, base, "sac", trust=["test_base_policy"], **NETS)
    assert not (tmp_path / "next").exists()


def test_sac_refuses_a_base_whose_entropy_is_fixed(tmp_path):
    """Its temperature would grow or fall for ever; one that stays as it is does no harm."""
    family = {"Box": {"_target_": "maze_train.algorithms.td3.model.NoisyActions"}}
    base = cloned(tmp_path, "box", **{"model.distributions": family})
    advice = r"'NoisyActions': its entropy is fixed.*squashed_gaussian.*entropy_tuning=false"
    with pytest.raises(ConfigError, match=rf"model\.distributions = {advice}"):
        started(tmp_path, base, "sac")
    assert not (tmp_path / "next").exists()
    assert same_policy(base, started(tmp_path, base, "sac", **{"algorithm.entropy_tuning": False}))


@pytest.mark.parametrize("algorithm", ["bc", "sac"])
def test_a_memory_is_refused_by_what_learns_from_single_steps(tmp_path, algorithm):
    """All that is in the way is reported at once: the shared layers too."""
    short_run(tmp_path / "base", env=BOX, **{"model.rnn.size": 4})
    data: dict[str, Any] = {}
    if algorithm == "bc":
        recorded = record(tmp_path / "data", SpacesEnv(action="box"))
        data = {"runner.dataset": str(recorded), "algorithm.batch_size": 16}
    with pytest.raises(ConfigError) as caught:
        started(tmp_path, tmp_path / "base", algorithm, **data)
    text = str(caught.value)
    assert "model.rnn=null" in text
    assert "model.shared_trunk=false" in text


@pytest.mark.parametrize(("mode", "count"), [("running", 40 + 32), ("estimated", 40)])
@pytest.mark.parametrize("mode_of_base", ["running", "estimated"])
def test_the_new_run_says_whether_statistics_go_on(tmp_path, mode_of_base, mode, count):
    """Frozen ones of the base do not stay so under `running`, and the other way round."""
    key = "model.normalization.mode"
    base = cloned(tmp_path, **{**RUNNING, key: mode_of_base})
    changes = {**RUNNING, key: mode, "total_steps": 32}
    started(tmp_path, base, "ppo", "discrete", **changes)
    after = policy_weights(tmp_path / "next")
    assert bool(policy_weights(base)["normalizer.frozen"]) == (mode_of_base == "estimated")
    assert bool(after["normalizer.frozen"]) == (mode == "estimated")
    assert float(after["normalizer.count"]) == count


def test_networks_that_do_not_fit(tmp_path):
    """What differs is named, and exactly what to set; nothing has been written."""
    base = cloned(tmp_path)
    with pytest.raises(ConfigError) as caught:
        started(
            tmp_path,
            base,
            "ppo",
            "discrete",
            **{"model.hidden_sizes": [9], "model.activation": "tanh"},
        )
    text = str(caught.value)
    assert "base_run" in text
    assert "[8] there, [9] here" in text
    assert "activation: relu there, tanh here" in text  # weights would fit
    assert "set model.hidden_sizes=[8] model.activation=relu" in text
    assert not (tmp_path / "next").exists()
    with pytest.raises(ConfigError, match=r"set model\.normalization\.mode=none$"):
        started(tmp_path, base, "ppo", "discrete", **{"model.normalization.mode": "running"})
    base = cloned(tmp_path, "box", "other", **SQUASHED)
    other: dict[str, Any] = {"Box": {"name": "squashed_gaussian", "log_std_max": 1.0}}
    with pytest.raises(ConfigError, match=r"set 'model\.dist.*=\{Box: squashed_gaussian\}'$"):
        started(tmp_path, base, "ppo", **{"model.distributions": other})


def test_settings_that_may_be_given(tmp_path):
    """Those of the base, a default by its name, and how weights and statistics begin."""
    base = cloned(tmp_path, "box", **RUNNING)
    changes = {
        **RUNNING,
        "model.hidden_sizes": [8],
        "model.distributions": {"Box": "diagonal_gaussian", "Discrete": "categorical"},
        "model.normalization.n_steps": 20,
        "model.orthogonal_init": True,
    }
    run_dir = started(tmp_path, base, "ppo", **changes)
    assert same_policy(base, run_dir, ("normalizer.",))
    assert written(run_dir)["activation"] == "relu"
    assert written(run_dir)["orthogonal_init"] is True


@pytest.mark.parametrize(
    ("algorithm", "changes", "advice"),
    [
        ("dqn", {"algorithm.dueling": True}, r"set algorithm\.dueling=False, as it has$"),
        ("dqn", {"algorithm.num_quantiles": 3}, r"set algorithm\.num_quantiles=0, as it has$"),
        ("sac", {}, "dqn learns another kind of policy; expected one of sac$"),
    ],
)
def test_settings_of_dqn_that_its_base_has_not(tmp_path, algorithm, changes, advice):
    """They are named where weights do not fit, and so is another algorithm."""
    small = {key: value for key, value in ALGORITHMS["sac"].items() if key != "algorithm"}
    train(**{**settings("sac"), "algorithm": "dqn", "run_dir": tmp_path / "base"})
    with pytest.raises(ConfigError, match=rf"do not fit those of this run .*: {advice}"):
        started(tmp_path, tmp_path / "base", algorithm, "discrete", **{**small, **changes})


def test_own_networks_of_other_sizes(tmp_path):
    """Settings say the same, weights do not: what a dotted path names may have changed."""
    base = cloned(tmp_path)
    weights = torch.load(base / "best" / "policy.pt")
    name = next(key for key in weights if key.endswith("weight"))
    weights[name] = weights[name][:, :-1]
    torch.save(weights, base / "best" / "policy.pt")
    (base / "best" / "score.json").unlink()
    with pytest.raises(ConfigError, match=r"the weights of its policy .*\[8, 2\] there, \[8, 3\]"):
        started(tmp_path, base, "ppo", "discrete")


def test_other_spaces(tmp_path):
    """A policy for other actions is refused by its spaces, not by its weights."""
    base = cloned(tmp_path, "box")
    message = (
        r"its policy has the action space Box\(.*\), the environment has Discrete\(3, start=-1"
    )
    for networks in ({}, NETS):
        with pytest.raises(ConfigError, match=message):
            started(tmp_path, base, "ppo", "discrete", **networks)


def test_no_policy_there(tmp_path):
    """A directory without a policy, and one that does not exist."""
    for name in (".", "nowhere"):
        with pytest.raises(ConfigError, match=r"base_run.*holds no saved policy"):
            started(tmp_path, tmp_path / name, "ppo", "discrete")


def test_versions_of_the_base(tmp_path):
    """The best policy, the last one, one of an epoch; the error lists those that there are."""
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
        f"base_run = '{base}@epoch_000001': {base} holds no saved policy 'epoch_000001': expected "
        "one of best, final, epoch_000002, epoch_000003, epoch_000004; did you mean 'epoch_000004'?"
    )
    shutil.rmtree(base / "best")
    shutil.rmtree(base / "policies")
    with pytest.raises(ConfigError, match=r"has no spaces.json yet: continue with the run"):
        started(tmp_path, f"{base}@final", "ppo", "discrete", run_dir=tmp_path / "no")
    with pytest.raises(ConfigError, match=r"no saved policy 'final': it has none"):
        started(tmp_path, f"{tmp_path}/nowhere@final", "ppo", "discrete", run_dir=tmp_path / "no")


def test_critics_are_taken_over_where_there_is_one(tmp_path, capsys):
    """From PPO to PPO everything goes along; from BC the critic stays as it was made."""
    base = cloned(tmp_path)
    short_run(tmp_path / "ppo", **NETS)
    started(tmp_path, tmp_path / "ppo", "ppo", "discrete")
    paths = (tmp_path / "ppo", tmp_path / "next")
    critics = [load_policy(path).model.critic.state_dict() for path in paths]
    assert all(torch.equal(critics[0][key], critics[1][key]) for key in critics[0])
    assert "base_run: took over policy, critic\n" in capsys.readouterr().err
    started(tmp_path, base, "ppo", "discrete", run_dir=tmp_path / "other")
    assert "base_run: took over policy; new: critic\n" in capsys.readouterr().err
    scaled = {"algorithm.reward_scaling": True, "run_dir": tmp_path / "scaled"}
    started(tmp_path, tmp_path / "ppo", "ppo", "discrete", **scaled)
    assert "base_run: took over policy; new: critic\n" in capsys.readouterr().err
    transform = {"_target_": "maze_train.ReduceScaleValueTransform"}
    transformed = {"model.value_transform": transform, "run_dir": tmp_path / "third"}
    started(tmp_path, tmp_path / "ppo", "ppo", "discrete", **transformed)
    assert "base_run: took over policy; new: critic\n" in capsys.readouterr().err


def test_temperatures_are_those_of_the_new_run(tmp_path, capsys):
    """They are settings; critics and their targets go along."""
    base, run_dir = tmp_path / "base", tmp_path / "next"
    short_run(base, "sac", env=BOX, **RUNNING)
    fixed = {"algorithm.entropy_coef": 0.05, "algorithm.entropy_tuning": False}
    started(tmp_path, base, "sac", **fixed)
    told = "took over normalizer, policy, critics, target_critics; new: log_temperatures"
    assert told in capsys.readouterr().err
    before, after = (torch.load(path / "best" / "policy.pt") for path in (base, run_dir))
    assert float(after["log_temperatures"].exp()) == pytest.approx(0.05)
    critics = [key for key in before if key.startswith("critics.")]
    assert critics
    assert all(torch.equal(before[key], after[key]) for key in critics)


@pytest.mark.parametrize("says_networks", [True, False])
def test_a_continued_run_does_not_need_its_base(tmp_path, says_networks):
    """Its checkpoint has everything, and its config.yaml the networks; the base may be gone."""
    base = cloned(tmp_path, "box")
    given = {"total_steps": 64, **(NETS if says_networks else {})}
    started(tmp_path, base, "ppo", **given)
    shutil.rmtree(base)
    result = train(resume=tmp_path / "next", total_steps=128, trust=["own_envs"])
    assert result.summary.env_steps >= 128
    # The same command again, which says as little about networks as before.
    started(tmp_path, base, "ppo", **{**given, "resume": "auto", "total_steps": 192})


@pytest.mark.parametrize("damage", ["algorithm: {_target_: no.such.Thing}", "- 1"])
def test_a_configuration_that_can_not_be_read(tmp_path, damage):
    """The error is one of base_run, whatever is wrong there."""
    base = cloned(tmp_path)
    (base / "best" / "config.yaml").write_text(damage)
    with pytest.raises(ConfigError, match=r"^base_run = "):
        started(tmp_path, base, "ppo", "discrete")
