"""Documentation: links are valid, code blocks run, commands are accepted.

A fenced block of Python is run, page by page in one namespace and an empty directory. One with a
file name after the language is written there instead, as is YAML. Commands of `bash` blocks are
composed, and environment and networks are built, but nothing is trained. Those that need an extra
which is not installed here are passed over.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shlex
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_architecture import FLOORS

import maze_train
from maze_train import DevRunnerConfig, EventInterface, TrainingRunner
from maze_train.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TREES = ("maze_train", "tests", "benchmarks", "docs", "examples")
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```(\w+) *(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
EXTRAS = re.compile(r"\[([\w,]+)\]")
MODULES_OF_EXTRAS = {
    "ALE/": ("ale_py", "cv2"),
    "my_pong": ("ale_py", "cv2"),
    "FetchReach": ("gymnasium_robotics",),
    "env.backend=envpool": ("envpool",),
    " search ": ("optuna",),
    "policy.onnx": ("onnx", "onnxscript", "onnxruntime"),
    "env=pettingzoo:": ("pettingzoo", "mpe2"),
    "env=gymnax:": ("gymnax",),
    "env._target_=mpe2": ("mpe2",),
    "experiment=ppo/tictactoe_v3": ("pettingzoo",),
    "experiment=tag": ("pettingzoo", "mpe2"),
}
"""What a command needs that holds these words."""


def without_blocks(page: Path) -> str:
    """The text of a page around its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    titles = HEADING.findall(without_blocks(page))
    words = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in words}


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file of the repository, and a heading where it has an anchor."""
    broken = []
    for link in LINK.findall(without_blocks(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached() -> None:
    """The list of pages links to all of docs/, and the menu of the site has them."""
    overview = ROOT / "docs" / "pages.md"
    linked = {(overview.parent / link).resolve() for link in LINK.findall(without_blocks(overview))}
    pages = set((ROOT / "docs").rglob("*.md"))
    assert pages - {overview} <= linked
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    menu = re.findall(r"[:-] ([\w/-]+\.md)$", settings, re.MULTILINE)
    assert {str(page.relative_to(ROOT / "docs")) for page in pages} == set(menu)


def test_pages_are_short() -> None:
    """A page answers one question in at most 2,000 words, but for those that list everything."""
    words = {
        page.name: len(page.read_text("utf-8").split()) for page in (ROOT / "docs").rglob("*.md")
    }
    long = {name for name, count in words.items() if count > 2_000}
    assert long <= {"architecture.md", "scores.md"}


def test_settings_are_there() -> None:
    """Every setting that a page names with its section is one of some option of this section."""
    keys = {
        f"{path.parent.name}.{key}"
        for path in (ROOT / "conf").glob("*/*.yaml")
        for key in re.findall(r"^(\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    sections = "|".join({key.partition(".")[0] for key in keys} - {"env"})
    named = re.compile(rf"`((?:{sections})\.\w+)")
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    found = {name for page in pages for name in named.findall(page.read_text(encoding="utf-8"))}
    others = {"model.py", "evaluation.csv", "search.png", "algorithm.power"}
    assert found - keys == others


def test_figures_of_speed_are_those_of_the_picture() -> None:
    """The table of docs/benchmarks.md has the numbers that the picture of the front page shows."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = json.loads((ROOT / "benchmarks" / "throughput.json").read_text(encoding="utf-8"))
    assert len(figures) == 6
    for name, (ours, peer, ratio) in figures.items():
        env, runner = name.split()
        row = rf"^\| {env} `{runner}`.* \| {ours:,} \| {peer:,} \| {ratio:.2f} \|"
        assert re.search(row, page, re.MULTILINE), name


def test_equations_become_mathml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of LaTeX is left in the equations of the site."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    hooks = importlib.import_module("site_hooks")
    found: list[str] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        equations = hooks.EQUATIONS.findall(text)
        assert len(equations) == len(re.findall(r"^\$\$$", text, re.MULTILINE)) / 2, page
        found += equations
    assert found
    for latex in found:
        assert re.search(r"\\|\$|<mi>&<", hooks.equations(latex)) is None, latex


def test_readme_is_short_and_names_the_test_command_of_ci() -> None:
    """At most 110 lines; CI runs all tests with a command of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 110
    assert "`make test-all`" in readme
    assert "make --no-print-directory test-all\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory from which Python imports; forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_snippets_run(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, Python is run, commands are checked, in the order of the page."""
    namespace: dict[str, Any] = {"__name__": "docs_page"}
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        language, file_name, content = block.groups()
        if file_name:
            path = workplace / file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
            importlib.invalidate_caches()
        elif language == "python":
            if not lacks_an_extra(content):
                # Blank lines in front give errors the line numbers of the page.
                source = "\n" * text[: block.start(3)].count("\n") + content
                exec(compile(source, str(page), "exec"), namespace)
        elif language == "bash":
            for line in content.splitlines():
                check_command(line, monkeypatch)
        else:
            assert language == "text", f"a block of {language} without a file name is not checked"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_notebook_runs(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run from top to bottom, without Jupyter; curve and film are there to be shown."""
    pytest.importorskip("imageio_ffmpeg")
    shown: list[Path] = []

    def show(path: str, **_: Any) -> None:
        assert Path(path).stat().st_size > 1_000
        shown.append(Path(path))

    display = ModuleType("IPython.display")
    display.Image = display.Video = show  # type: ignore[attr-defined]
    parent = ModuleType("IPython")  # matplotlib asks for its version
    parent.version_info = (9, 0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setitem(sys.modules, "IPython", parent)
    cells = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    namespace: dict[str, Any] = {"__name__": "docs_page"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "tutorial.ipynb", "exec"), namespace)
    assert [path.suffix for path in shown] == [".png", ".mp4"]
    assert namespace["warm"].best_metric > namespace["chance"].summary.return_mean + 500


def check_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a command that a reader could not run."""
    # There is no cluster here.
    program, *arguments = shlex.split(line.replace("launcher=ray", "launcher=local"))
    if lacks_an_extra(line):
        return
    if " search " in line:  # each is its own study, whose trials are alike
        arguments += ["n_trials=1", f"study=studies/{abs(hash(line))}"]
    if program == "torchrun":
        program, arguments = "maze-run", arguments[arguments.index("maze_train") + 1 :]
    if program == "maze-run":
        with monkeypatch.context() as patch:
            patch.setattr(TrainingRunner, "run", build_only)
            assert main(arguments) == 0, line
    elif program == "pip":
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for extra in ",".join(EXTRAS.findall(line)).split(","):
            assert not extra or re.search(rf"^{extra} = \[", project, re.MULTILINE), line
    else:
        assert program == "tensorboard", f"no check for {line}"


def lacks_an_extra(line: str) -> bool:
    """Whether a command, or code, needs a module that is not installed here."""
    needed = [name for words, names in MODULES_OF_EXTRAS.items() if words in line for name in names]
    return any(importlib.util.find_spec(name) is None for name in needed)


def build_only(runner: TrainingRunner) -> Any:
    """In place of a run: build environments and networks, unless that starts processes."""
    with runner:
        if isinstance(runner.config.runner, DevRunnerConfig):
            runner.builder.prepare(runner.builder.build_model())
    history = [{runner.builder.selection_metric: 0.0}]
    return SimpleNamespace(best_metric=0.0, missing=(), history=history)


def all_event_groups() -> list[type[EventInterface]]:
    """The groups of events that the package declares."""
    for entry in pkgutil.walk_packages(maze_train.__path__, "maze_train."):
        importlib.import_module(entry.name)
    found: list[type[EventInterface]] = []
    classes = [EventInterface]
    for cls in classes:
        classes += cls.__subclasses__()
        if cls is not EventInterface and cls.__module__.startswith("maze_train."):
            found.append(cls)
    return found


def test_every_metric_is_explained() -> None:
    """The pages of metrics have a row for each event, with the text of its declaration."""
    pages = sorted((ROOT / "docs").glob("metrics*.md"))
    page = "".join(path.read_text(encoding="utf-8") for path in pages)
    rows = {
        f"| `{event.tag}` | {event.reduce} | {event.doc.replace('|', chr(92) + '|')} |"
        for group in all_event_groups()
        for event in group.events()
    }
    assert {row for row in rows if row not in page} == set()


def test_floors_are_those_of_the_architecture_test() -> None:
    """The table of docs/architecture.md names the same rooms on the same floors."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| L(\d+) \| ([^|]+) \|", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(FLOORS)))
    documented = [
        tuple(name.split("/")[0] for name in re.findall(r"`([\w/<>]+)`", cells))
        for _, cells in rows
    ]
    assert documented == list(FLOORS)


def test_the_path_to_the_optimizer_is_the_documented_one(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most ten files are on the stack at `optimizer.step()`, and the page lists them."""
    stacks: list[list[str]] = []
    step = torch.optim.Adam.step

    def recorded(*args: Any, **kwargs: Any) -> Any:
        stacks.append([frame.filename for frame in traceback.extract_stack()])
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", recorded)
    assert main(["algorithm=ppo", "env=CartPole-v1", "runner.fast_dev_run=true"]) == 0
    package = ROOT / "maze_train"
    inside = [Path(name) for name in stacks[0] if Path(name).is_relative_to(package)]
    passed = list(dict.fromkeys(str(path.relative_to(ROOT)) for path in inside))
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert passed == re.findall(r"^\d+\. `(maze_train/[\w/]+\.py)`", page, re.MULTILINE)
    assert len(passed) <= 10


def test_named_tests_exist() -> None:
    """The pages refer to tests that are there."""
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page))
    missing = []
    for path in sorted({path for path, _ in named}):
        found = {"", *re.findall(r"^def (\w+)", (ROOT / path).read_text(encoding="utf-8"), re.M)}
        missing += [
            f"{path}::{name}" for other, name in named if other == path and name not in found
        ]
    assert missing == []


OTHER_NAMES = {
    *("my_envs.py", "mine.py", "my_heating.py", "train.py"),  # files of the reader
    *("maze_train.json", "algo.train", "AlgorithmConfig.learners"),  # a file, and names of RLlib
    "space.start",  # an attribute of a Gymnasium space
    *("AlgorithmConfig.build_learner", "AlgorithmConfig.build_learner_group"),
}
"""Names in texts that look like names of this repository."""


def named_objects() -> dict[str, list[Any]]:
    """Modules of the package by every end of their dotted names; classes and functions by name."""
    found: dict[str, list[Any]] = {"maze_train": [maze_train]}
    for entry in pkgutil.walk_packages(maze_train.__path__, "maze_train."):
        module = importlib.import_module(entry.name)
        parts = entry.name.split(".")[1:]
        for i in range(len(parts)):
            found.setdefault(".".join(parts[i:]), []).append(module)
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == entry.name:
                found.setdefault(name, []).append(value)
    return found


def has_attributes(owner: Any, names: list[str]) -> bool:
    """Whether a path of attributes exists; instance attributes are looked for in the source."""
    if not names:
        return True
    if hasattr(owner, names[0]):
        return has_attributes(getattr(owner, names[0]), names[1:])
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    return any(
        re.search(rf"^ +(self\.)?{names[0]}\b.*[:=]", inspect.getsource(cls), re.MULTILINE)
        for cls in classes
        if cls.__module__.startswith("maze_train.")
    )


def test_names_in_texts_lead_somewhere() -> None:
    """Files, modules, classes and attributes that docstrings, comments and pages name exist."""
    known = named_objects()
    functions = {name for name, found in known.items() if any(map(inspect.isfunction, found))}
    sections = {path.name for path in (ROOT / "conf").iterdir()}  # settings have their own test
    rooms = "|".join(room for rooms in FLOORS for room in rooms)
    # Shorter names in lower case may be attributes of a variable that is called like a module.
    ours = re.compile(rf"maze_train\.|({rooms})\.\w+\.|[A-Z]")
    sources = [path for name in TREES for path in (ROOT / name).rglob("*.py")]
    scripts = (ROOT / "examples").glob("*.py")
    files = [f"/{path.relative_to(ROOT)}" for path in (*sources, *scripts)]

    def leads_somewhere(name: str) -> bool:
        if name.endswith(".py"):
            return any(file.endswith(f"/{name}") for file in files)
        first, *_, last = parts = name.split(".")
        if first in sections or not (last in functions or (ours.match(name) and first in known)):
            return True
        parts = parts[1:] if first == "maze_train" else parts
        ends = range(len(parts), 0, -1)
        heads = ((owner, i) for i in ends for owner in known.get(".".join(parts[:i]), ()))
        return (
            has_attributes(maze_train, parts)
            or any(has_attributes(owner, parts[i:]) for owner, i in heads)
            or (first not in known and importlib.util.find_spec(first) is not None)
        )

    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    texts |= {page: without_blocks(page) for page in PAGES if page.name != "CHANGELOG.md"}
    broken = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        for name in set(re.findall(r"`([\w/]+\.py|\w+(?:\.\w+)+)(?:\(\))?`", text)) - OTHER_NAMES
        if not leads_somewhere(name)
    ]
    assert broken == []
