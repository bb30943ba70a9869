"""Hooks of the site: a reference of the public names, and titles of blocks that are files."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

STUB = Path(__file__).parents[1] / "maze_train" / "__init__.pyi"
IMPORT = re.compile(r"^from (maze_train\.(\w+)\S*) import (\w+) as \w+", re.MULTILINE)
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
CODE = re.compile(r"`([^`]*)`|([^`]+)")
PIPE = r"\|"
FILE_BLOCK = re.compile(r"^```(\w+) +([\w./-]+)$", re.MULTILINE)


def public_names() -> dict[str, list[str]]:
    """Dotted paths of the public names by room, as the stub of the package has them."""
    rooms: dict[str, list[str]] = {}
    for module, room, name in IMPORT.findall(STUB.read_text(encoding="utf-8")):
        rooms.setdefault(room, []).append(f"{module}.{name}")
    return dict(sorted(rooms.items()))


def on_config(config: Any) -> Any:
    """Add the pages of the reference to the navigation."""
    config.nav.append({"Reference": [{room: f"api/{room}.md"} for room in public_names()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each room, which shows the docstrings of its public names."""
    for room, names in public_names().items():
        blocks = "\n".join(f"::: {name}\n" for name in names)
        text = f"# {room}\n\n`from maze_train import ...`\n\n{blocks}"
        files.append(File.generated(config, f"api/{room}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show the file name of a block above it, and tables as their source reads on GitHub."""
    markdown = TABLE_ROW.sub(lambda row: CODE.sub(_as_html, row[0]), markdown)
    return FILE_BLOCK.sub(r'```\1 title="\2"', markdown)


def _as_html(match: re.Match[str]) -> str:
    """A piece of a row: code with `|` keeps it, `<name>` outside of code is no tag."""
    code, text = match.groups()
    if code is None:
        return text.replace("<", "&lt;")
    return f"<code>{escape(code).replace(PIPE, '&#124;')}</code>" if PIPE in code else match[0]
