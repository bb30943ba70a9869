"""Architecture: imports point to lower layers, files and functions are short.

A string that names a module of the package counts as an import of the module.

The table here and the table in docs/architecture.md must match.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGE = "maze_train"
TORCH_FREE = tuple(
    f"{PACKAGE}.{name}"
    for name in ("config.loading", "spaces.columns", "spaces.describe", "spaces.masks")
)
ROOT = Path(__file__).parents[1]

FLOORS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("functional", "spaces", "workers"),
    ("distributions", "cluster"),
    ("nets", "data", "simulators"),
    ("learner", "envs"),
    ("collect", "tracking"),
    ("training",),
    ("algorithms",),
    ("config",),
    ("run",),
    ("tools",),
    ("jobs",),
    ("cli", "api", "compat"),
    ("__main__",),
)
"""Packages by layer, from the lowest. A package imports only from lower layers."""

MAX_FILE_LINES = 600
LONG_FILES = {"maze_train/learner/learner.py": 720}
"""Files with one class that would be harder to read if split."""
MAX_TEXTS = 62

NAMES_PARTS = (f"{PACKAGE}.algorithms.td3.model",)
"""Modules besides settings that name classes by string, because they complete settings."""

STARTS_QUICKLY = (
    *("cli", "jobs", "config.", "run.resuming", "run.assembly", "workers.backends"),
    *("envs.factory", "envs.third_party", "envs.simulated"),
)
"""Modules that import inside functions, because they run before PyTorch is needed."""
MAX_FUNCTION_LINES = 60


@dataclass
class Module:
    """File of the package, with the modules of the package that it imports."""

    name: str
    path: Path
    tree: ast.Module
    imports: set[str] = field(default_factory=set)
    """All imports in the file, including those inside functions and for type checkers."""
    runtime_imports: set[str] = field(default_factory=set)
    """Imports executed when the file is imported, including other packages."""
    texts: list[str] = field(default_factory=list)
    """Strings in the file that are dotted names below the package, except docstrings."""
    named: set[str] = field(default_factory=set)
    """Modules that contain the objects named by `texts`."""

    @property
    def room(self) -> str:
        """Package of the module, i.e. the first part of its name; empty for the root."""
        return room_of(self.name)

    @property
    def is_settings(self) -> bool:
        """Whether the module defines settings, whose values name classes by string."""
        return self.name.endswith(".config") or self.room == "config"


def room_of(name: str) -> str:
    """Return the package of a module."""
    return name.split(".")[1] if "." in name else ""


@cache
def modules() -> dict[str, Module]:
    """Return all modules of the package by name."""
    found: dict[str, Module] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    for module in found.values():
        module.imports = {
            name for node in ast.walk(module.tree) for name in imported(node, module, found)
        }
        module.imports = {name for name in module.imports if name in found} - {module.name}
        module.runtime_imports = {
            name
            for node in runtime_statements(module.tree.body)
            for name in imported(node, module, found)
        }
        module.texts = list(texts(module.tree))
        module.named = {home for text in module.texts if (home := home_of(text, found))}
        module.named -= {module.name}
    return found


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the strings in a file that are dotted names below the package."""
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    for node in constants:
        text = node.value if id(node) not in docs else None
        if isinstance(text, str) and re.fullmatch(rf"{PACKAGE}(\.\w+)+", text):
            yield text


def home_of(text: str, known: Mapping[str, Module]) -> str:
    """Return the module that contains a dotted or public name, or an empty string."""
    stub = (ROOT / PACKAGE / "__init__.pyi").read_text(encoding="utf-8")
    found = re.findall(r"from ([\w.]+) import \w+ as (\w+)", stub)
    homes = {f"{PACKAGE}.{name}": home for home, name in found}
    name = homes.get(text, text)
    while name not in known:
        name = name.rpartition(".")[0]
    return name if name != PACKAGE else ""


def imported(node: ast.AST, module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """Yield the modules that an import statement names; nothing for other nodes."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module.path}:{node.lineno}: relative import"
        base = node.module or ""
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def runtime_statements(body: list[ast.stmt], *, called: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements executed on import, except those for type checkers.

    If `called`, also yield the statements inside functions.
    """
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from runtime_statements(statement.orelse, called=called)
        elif called or not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(statement, "handlers", [])]
            for block in blocks:
                yield from runtime_statements(block, called=called)


def edges() -> Iterator[tuple[str, str]]:
    """Yield every import between modules of the package, including imports by string."""
    for module in modules().values():
        for target in sorted(module.imports | module.named):
            yield module.name, target


def floor_of(room: str) -> int:
    """Return the index of the layer that contains a package."""
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def test_every_room_is_in_the_table() -> None:
    """The table lists exactly the existing packages."""
    listed = {room for rooms in FLOORS for room in rooms}
    assert {module.room for module in modules().values()} - {""} == listed


def test_imports_point_downward() -> None:
    """No package imports a higher layer, or another package of its layer."""
    wrong = []
    for name, target in edges():
        room, other = room_of(name), room_of(target)
        if not room or room == other:
            continue
        assert other, f"{name} imports from the package itself: name the module"
        if floor_of(other) >= floor_of(room):
            wrong.append(f"{name} -> {target}")
    assert wrong == []


def shared_algorithms() -> set[str]:
    """Return the folders below `algorithms/` that a family of algorithms shares."""
    return {
        module.name.split(".")[2]
        for module in modules().values()
        if module.room == "algorithms"
        and module.name.endswith(".config")
        and not any(
            isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "name"
            for node in ast.walk(module.tree)
        )
    }


def test_algorithms_do_not_import_each_other() -> None:
    """Algorithms import only lower layers and folders shared by a family."""
    wrong, shared = [], shared_algorithms()
    assert shared == {"actor_critic", "off_policy"}
    for name, target in edges():
        if room_of(name) != "algorithms" or room_of(target) != "algorithms":
            continue
        own, other = name.split(".")[2:3], target.split(".")[2:3]
        if own != other and not shared.issuperset(other):
            wrong.append(f"{name} -> {target}")
    assert wrong == []


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes of a cycle, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_cycle_of_modules() -> None:
    """No module imports itself indirectly, including imports inside functions and by string.

    Strings in settings are exempt: they name classes that import the settings.
    """
    graph = {
        name: module.imports | (set() if module.is_settings else module.named)
        for name, module in modules().items()
    }
    assert find_cycle(graph) == []


def test_no_cycle_of_rooms() -> None:
    """No package imports itself indirectly."""
    graph: dict[str, set[str]] = {}
    for name, target in edges():
        if room_of(name) != room_of(target):
            graph.setdefault(room_of(name), set()).add(room_of(target))
    assert find_cycle(graph) == []


def test_only_settings_name_modules_by_text() -> None:
    """Classes are imported, except those selected by the value of a setting."""
    wrong = [
        f"{module.name}: {sorted(module.named)}"
        for module in modules().values()
        if module.named and not module.is_settings and module.name not in NAMES_PARTS
    ]
    assert wrong == []
    assert sum(len(module.texts) for module in modules().values()) <= MAX_TEXTS


def test_imports_stand_at_the_top() -> None:
    """Imports inside functions are limited to modules that run before PyTorch is needed."""
    known = modules().keys() - {f"{PACKAGE}.learner.compiled"}
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules().values()
        if not module.name.removeprefix(f"{PACKAGE}.").startswith(STARTS_QUICKLY)
        for function in ast.walk(module.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if any(name in known for name in imported(node, module, modules()))
    ]
    assert wrong == []


def test_texts_are_followed() -> None:
    """Names of modules, their objects and public names are resolved; other strings are not."""
    known = modules()
    assert home_of("maze_train.nets.template.resolve", known) == "maze_train.nets.template"
    assert home_of("maze_train.nets.template", known) == "maze_train.nets.template"
    assert home_of("maze_train.MetricsWriter", known) == "maze_train.tracking.tracker"
    assert home_of("maze_train.json", known) == ""


def test_find_cycle_finds_one() -> None:
    """`find_cycle` finds a cycle."""
    assert set(find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_files_are_short() -> None:
    """No file exceeds 600 lines, except those in `LONG_FILES`."""
    lengths = {
        str(module.path.relative_to(ROOT)): len(module.path.read_text().splitlines())
        for module in modules().values()
    }
    long = {path: n for path, n in lengths.items() if n > LONG_FILES.get(path, MAX_FILE_LINES)}
    assert long == {}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function without its signature and docstring."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short() -> None:
    """No function body exceeds 60 lines."""
    long = [
        f"{module.name}.{node.name}: {body_lines(node)}"
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and body_lines(node) > MAX_FUNCTION_LINES
    ]
    assert long == []


KNOW_HYDRA = ("config.hydra_input", "config.plugins", "config.launchers")


def test_one_way_in_and_the_plugins_know_hydra() -> None:
    """Only modules in `KNOW_HYDRA` import Hydra and OmegaConf."""
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules().values()
        if module.name.removeprefix(f"{PACKAGE}.") not in KNOW_HYDRA
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(
            name.split(".")[0] in ("hydra", "omegaconf")
            for name in imported(node, module, modules())
        )
    ]
    assert wrong == []


def test_text_leaves_in_one_place() -> None:
    """Only core/notices.py prints, so that unprintable characters are always escaped."""
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules().values()
        if module.name != f"{PACKAGE}.core.notices"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and re.fullmatch(r"print|.*\.print_exc\w*|sys\.std\w+\.write", ast.unparse(node.func))
    ]
    assert wrong == []


def test_checked_protocols_have_only_methods() -> None:
    """Since Python 3.12, `isinstance` ignores submodules and buffers of PyTorch modules.

    `core` does not check modules.
    """
    wrong = [
        f"{module.name}.{node.name}.{ast.unparse(member)}"
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and module.room != "core"
        and any("runtime_checkable" in ast.unparse(marker) for marker in node.decorator_list)
        for member in node.body
        if isinstance(member, ast.AnnAssign)
        or (isinstance(member, ast.FunctionDef) and member.decorator_list)
    ]
    assert wrong == []


def without_torch() -> list[str]:
    """Return the modules that must not import PyTorch: configuration and worker processes."""
    return [
        name
        for name in modules()
        if name.endswith(".config") or name.startswith(f"{PACKAGE}.envs") or name in TORCH_FREE
    ]


def path_to(target: str, start: str) -> list[str]:
    """Return the chain of imports from `start` to the package `target`, or an empty list."""
    before: dict[str, str] = {start: ""}
    queue = [start]
    for name in queue:
        # importing a.b.c imports a and a.b first
        parents = {name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)}
        for following in sorted(modules()[name].runtime_imports | parents):
            if following.split(".")[0] == target:
                path = [following]
                while name:
                    path.insert(0, name)
                    name = before[name]
                return path
            if following in modules() and following not in before:
                before[following] = name
                queue.append(following)
    return []


def test_configuration_and_environments_do_not_import_torch() -> None:
    """Configuration errors are reported quickly, and worker processes use little memory."""
    assert [path for name in without_torch() if (path := path_to("torch", name))] == []


def test_every_folder_is_a_package() -> None:
    """A folder without `__init__.py` would be missing from the wheel."""
    folders = {module.path.parent for module in modules().values()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


TWO_UPDATES = """
import sys
import maze_train
settings = {"algorithm.n_epochs": 1, "algorithm.epoch_length": 2, "tracking.progress": "quiet"}
maze_train.train("CartPole-v1", "ppo", run_dir=sys.argv[1], seed=0, **settings)
print(*(name for name in sys.modules if name.startswith("maze_train.")))
"""

FEATURES = {
    "other algorithms": ("algorithms.a2c", "algorithms.off_policy", "algorithms.es"),
    "several agents": (
        "training.multi_agent_models",
        "training.league",
        "nets.joint",
        "data.turns",
        "envs.agents",
    ),
    "opponents": ("run.opponents", "run.policies", "collect.fixed_policies"),
    "actors": ("training.actors", "collect.actors", "collect.actor_worker"),
    "learners in processes": ("learner.group", "learner.peers", "learner.update_queue"),
    "processes and clusters": (
        "workers.process",
        "workers.process_pool",
        "cluster.pool",
        "workers.task_queue",
    ),
    "other environments": (
        "envs.atari",
        "envs.pettingzoo",
        "envs.third_party",
        "envs.backends",
        "envs.wrappers",
    ),
    "stored settings": ("config.stored", "config.reach"),
    "simulators": ("simulators", "envs.simulated", "collect.simulators"),
    "replay and data sets": ("data.replay", "data.trajectories", "data.datasets", "data.minari"),
    "rollouts and videos": (
        "collect.player",
        "collect.row_agents",
        "collect.recording",
        "run.rollout",
    ),
    "resuming": ("run.resuming", "run.saved_policies", "core.hub"),
    "tools and services": ("tools", "tracking.services", "config.sweeps", "config.search_config"),
}
"""Modules and packages of features that single-agent PPO does not use."""


@pytest.fixture(scope="module")
def loaded_by_ppo(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the modules of the package that are loaded after two updates of PPO."""
    command = [sys.executable, "-c", TWO_UPDATES, str(tmp_path_factory.mktemp("loaded") / "run")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(found.stdout.splitlines()[-1].split())


@pytest.fixture(scope="module")
def imported_by_ppo() -> set[str]:
    """Return the modules that PPO can import, including imports inside functions never called."""
    found = [f"{PACKAGE}.algorithms.ppo.learner", f"{PACKAGE}.run.runner"]
    for module in (modules()[name] for name in found):
        statements = runtime_statements(module.tree.body, called=True)
        names = {name for node in statements for name in imported(node, module, modules())}
        found += sorted((names & modules().keys()).difference(found))
    return set(found)


@pytest.mark.parametrize("feature", FEATURES)
def test_ppo_loads_no_other_features(
    feature: str, loaded_by_ppo: set[str], imported_by_ppo: set[str]
) -> None:
    """Features are passed in by `run/assembly.py` or selected by settings."""
    wrong = []
    for name in FEATURES[feature]:
        module = f"{PACKAGE}.{name}"
        assert module in modules(), f"{module} does not exist"
        found = loaded_by_ppo | imported_by_ppo
        wrong += [other for other in found if f"{other}.".startswith(f"{module}.")]
    assert wrong == []
    assert f"{PACKAGE}.algorithms.ppo.learner" in loaded_by_ppo
