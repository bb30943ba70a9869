"""MkDocs hooks of the site: API reference, tabs, equations, titles of code blocks.

Pages are written so that they read well on GitHub; what it cannot show is made here.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

PACKAGE = Path(__file__).parents[1] / "maze_train"
IMPORT = re.compile(r"^from (maze_train\.(\w+)\S*) import (\w+) as \w+", re.MULTILINE)
VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
CODE = re.compile(r"`([^`]*)`|([^`]+)")
PIPE = r"\|"
FILE_BLOCK = re.compile(r"^```(\w+) +([\w./-]+)$", re.MULTILINE)
COMMANDS = re.compile(r"^```text\n(?=\$|(python|pip|make|maze-run) )", re.MULTILINE)
EQUATIONS = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.DOTALL | re.MULTILINE)
TABS = re.compile(r"^<!-- tabs:begin -->\n(.*?)^<!-- tabs:end -->$", re.DOTALL | re.MULTILINE)
TAB = re.compile(r"^### (.+)\n", re.MULTILINE)
SETTINGS = re.compile(r"^<!-- settings:begin .*? -->\n(.*?)^<!-- settings:end -->$", re.S | re.M)

CALLED = (
    *("train", "load_policy", "evaluate", "run_rollout", "make_env", "compare_runs", "search"),
    *("export_policy", "push_to_hub", "open_dataset", "load_learner", "load_config"),
    *("TrainingResult", "RolloutResult", "TrainedPolicy", "Learner", "LearnerGroup", "Callback"),
    *("StopAtReturn", "TrainingView", "Evaluator", "MetricsWriter", "MultiAgentEnv", "EnvFactory"),
    *("Trajectory", "TrajectoryWriter", "TrajectoryDataset", "ConfigError", "MazeTrainError"),
)
"""Names on the main page of the API reference, in order; other names are on package pages."""


def public_names() -> dict[str, list[str]]:
    """Return the dotted paths of the public names for each page, as in the stub of the package."""
    found = IMPORT.findall((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    homes = {name: module for module, _, name in found}
    rooms: dict[str, list[str]] = {}
    for module, room, name in found:
        if name not in CALLED:
            rooms.setdefault(room, []).append(f"{module}.{name}")
    return {"calls": [f"{homes[name]}.{name}" for name in CALLED], **dict(sorted(rooms.items()))}


def on_config(config: Any) -> Any:
    """Add the API reference to the navigation, and the version to every page."""
    first, *packages = (f"api/{page}.md" for page in public_names())
    modules = [{Path(page).stem: page} for page in packages]
    reference = next(entry["Reference"] for entry in config.nav if "Reference" in entry)
    reference[:0] = [{"Python API": first}, {"Python API by package": modules}]
    (version,) = VERSION.findall((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    config.copyright = f"maze_train {version}, MIT licence"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the API reference, which show the docstrings of public names."""
    from mkdocs.structure.files import File  # The tests of equations do without MkDocs.

    for page, names in public_names().items():
        title = "Python API" if page == "calls" else page
        blocks = "\n".join(f"::: {name}\n" for name in names)
        text = f"# {title}\n\n`from maze_train import ...`\n\n{blocks}"
        files.append(File.generated(config, f"api/{page}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Convert the Markdown of a page for MkDocs; the source also renders on GitHub."""
    markdown = TABLE_ROW.sub(lambda row: CODE.sub(_as_html, row[0]), markdown)
    markdown = FILE_BLOCK.sub(r'```\1 title="\2"', markdown)
    markdown = COMMANDS.sub("```console\n", markdown)
    markdown = EQUATIONS.sub(lambda match: equations(match[1]), markdown)
    markdown = SETTINGS.sub(r'<div class="settings" markdown>\n\1\n</div>', markdown)
    return TABS.sub(lambda match: _as_tabs(match[1]), markdown)


def equations(latex: str) -> str:
    r"""Convert the LaTeX lines of a `$$` block to MathML; `&` aligns, `\\` ends a line."""
    inner = re.sub(r"\\(begin|end)\{aligned\}", "", latex)
    rows = []
    for line in re.split(r"\\\\(?:\[\w+\])?", inner):
        cells = [convert(cell.strip() or "{}") for cell in line.split("&")]
        contents = (re.sub(r"^<math[^>]*>|</math>$", "", cell) for cell in cells)
        rows.append("".join(f"<mtd>{content}</mtd>" for content in contents))
    table = "".join(f"<mtr>{row}</mtr>" for row in rows)
    head = '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">'
    table = f'<mtable displaystyle="true">{table}</mtable>'
    return f'<div class="equations">{head}{table}</math></div>'


def _as_tabs(text: str) -> str:
    """Convert headings and their sections to tabs."""
    _, *parts = TAB.split(text)
    tabs = []
    for title, content in zip(parts[::2], parts[1::2], strict=True):
        body = re.sub(r"^(?=.)", "    ", content.strip("\n"), flags=re.MULTILINE)
        tabs.append(f'=== "{title}"\n\n{body}\n')
    return "\n".join(tabs)


def _as_html(match: re.Match[str]) -> str:
    """Escape a table cell: keep `|` within code, and escape `<name>` outside code."""
    code, text = match.groups()
    if code is None:
        return text.replace("<", "&lt;")
    return f"<code>{escape(code).replace(PIPE, '&#124;')}</code>" if PIPE in code else match[0]
