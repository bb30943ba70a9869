"""Architecture: imports point to lower layers, without cycles.

The table here and the table in docs/architecture.md must match.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACKAGE = "maze_train"
TORCH_FREE = tuple(
    f"{PACKAGE}.{name}"
    for name in ("config.compose", "spaces.columns", "spaces.describe", "spaces.masks")
)
ROOT = Path(__file__).parents[1]

LAYERS: tuple[tuple[str, ...], ...] = (
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
    ("hydra_app",),
    ("hydra_sweeps",),
    ("cli", "api", "compat"),
    ("__main__",),
)
"""Packages by layer, from the lowest. A package imports only from lower layers."""


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

    @property
    def package(self) -> str:
        """Package of the module, i.e. the first part of its name; empty for the root."""
        return package_of(self.name)


def package_of(name: str) -> str:
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
    return found


def imported(node: ast.AST, module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """Yield the modules that an import statement names; nothing for other nodes."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module.path}:{node.lineno}: relative import"
        base = node.module or ""
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def runtime_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements executed on import, except those for type checkers."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from runtime_statements(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(statement, "handlers", [])]
            for block in blocks:
                yield from runtime_statements(block)


def edges() -> Iterator[tuple[str, str]]:
    """Yield every import between modules of the package."""
    for module in modules().values():
        for target in sorted(module.imports):
            yield module.name, target


def layer_of(package: str) -> int:
    """Return the index of the layer that contains a package."""
    return next(i for i, packages in enumerate(LAYERS) if package in packages)


def test_table_lists_every_package() -> None:
    """The table lists exactly the existing packages."""
    listed = {package for packages in LAYERS for package in packages}
    assert {module.package for module in modules().values()} - {""} == listed


def test_packages_import_lower_layers_only() -> None:
    """No package imports a higher layer, or another package of its layer."""
    wrong = []
    for name, target in edges():
        package, other = package_of(name), package_of(target)
        if not package or package == other:
            continue
        assert other, f"{name} imports from the package itself: name the module"
        if layer_of(other) >= layer_of(package):
            wrong.append(f"{name} -> {target}")
    assert wrong == []


def shared_algorithms() -> set[str]:
    """Return the directories below `algorithms/` that a family of algorithms shares."""
    return {
        module.name.split(".")[2]
        for module in modules().values()
        if module.package == "algorithms"
        and module.name.endswith(".config")
        and not any(
            isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "name"
            for node in ast.walk(module.tree)
        )
    }


def test_algorithms_do_not_import_each_other() -> None:
    """Algorithms import only lower layers and directories shared by a family."""
    wrong, shared = [], shared_algorithms()
    assert shared == {"actor_critic", "off_policy"}
    for name, target in edges():
        if package_of(name) != "algorithms" or package_of(target) != "algorithms":
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


def test_modules_have_no_import_cycle() -> None:
    """No module imports itself indirectly, including imports inside functions."""
    assert find_cycle({name: module.imports for name, module in modules().items()}) == []


def test_find_cycle_returns_a_cycle() -> None:
    """`find_cycle` finds a cycle."""
    assert set(find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


HYDRA_MODULES = ("config.compose", "hydra_app", "hydra_sweeps")


def test_only_listed_modules_import_hydra() -> None:
    """Only modules in `HYDRA_MODULES` import Hydra and OmegaConf."""
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules().values()
        if module.name.removeprefix(f"{PACKAGE}.") not in HYDRA_MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(
            name.split(".")[0] in ("hydra", "omegaconf")
            for name in imported(node, module, modules())
        )
    ]
    assert wrong == []


def test_only_notices_print() -> None:
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
        and module.package != "core"
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


def test_every_directory_has_an_init_file() -> None:
    """A directory without `__init__.py` would be missing from the wheel."""
    directories = {module.path.parent for module in modules().values()}
    assert [
        directory for directory in directories if not (directory / "__init__.py").exists()
    ] == []
