"""`astrai-deploy --help`: verbs, flags, and what can be chosen, read from the folders without Hydra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from astrai_deploy.paths import shipped, user_dirs

_USE = """astrai-deploy [VERB] [OPTION...] [KEY=VALUE...]

  astrai-deploy +recipe=chat_paged                     serve a recipe
  astrai-deploy plan +recipe=chat_paged machine=h100   plan it for another machine
  astrai-deploy config --why kv.page_size +recipe=chat_paged kv.page_size=32
"""


def help_text(config_dirs: Sequence[str], verbs: Mapping[str, str], flags: Mapping[str, str]) -> str:
    """Everything that a newcomer can type.

    Raises:
        NotADirectoryError: a folder that was named is not there.
    """
    own = user_dirs(config_dirs)
    found = recipes([*(folder / "recipes" for folder in own), shipped("recipes")])
    options = {name: ", ".join(choices) for name, choices in groups([*own, shipped("conf")]).items() if choices}
    sections = {
        "Verbs": columns(verbs),
        "Recipes (+recipe=NAME)": columns(found),
        "Groups (GROUP=OPTION); any key inside them can be set too (kv.page_size=32)": columns(options),
        "Options": columns(flags) + "  Hydra's own flags work too: --cfg job, --info defaults, -m, --shell-completion\n"
        "  (--cfg job --resolve shows secrets in the clear; config hides them)\n",
    }
    return _USE + "".join(f"\n{title}\n{body}" for title, body in sections.items())


def recipes(folders: Sequence[Path]) -> dict[str, str]:
    """Every recipe's promise by name; the first folder that has a name wins."""
    found: dict[str, str] = {}
    for folder in folders:
        for file in sorted(folder.glob("*.yaml")):
            try:
                content = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError):
                content = None
            promise = content.get("promise") if isinstance(content, dict) else None
            found.setdefault(file.stem, str(promise or "(makes no promise)"))
    return found


def groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Every configuration group's options."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for group in (child for child in folder.iterdir() if child.is_dir() and child.name != "recipes"):
            found.setdefault(group.name, set()).update(file.stem for file in group.glob("*.yaml"))
    return {name: sorted(options) for name, options in sorted(found.items())}


def columns(rows: Mapping[str, str], indent: str = "  ") -> str:
    """Names and their explanations, aligned."""
    width = max(map(len, rows), default=0)
    return "".join(f"{indent}{name.ljust(width)}  {text}\n" for name, text in rows.items())
