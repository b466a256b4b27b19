"""YAML files read for their places: every key with file, line and column, and what a file must not contain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from astrai_deploy._problem import Key, Origin, Problem, refusal
from astrai_deploy.paths import shown

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)")
_HYDRA_DEFAULT = re.compile(r"(^|[\s/@])hydra([/@.\s]|$)")
# Innermost first, each is replaced by a mark; what is left with a "${" is more than a file from outside may say.
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_READS_ENV = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)\s*(?:,[^{}]*)?\}")
_DECODES_ENV = re.compile(
    r"\$\{\s*oc\.decode\s*:\s*(\$\{\s*oc\.env\s*:\s*[A-Za-z_]\w*\s*\})\s*\}"
)  # no default: it would run
_READS_KEY = re.compile(r"\$\{[\w.\[\]\s\x01-]+\}")
_ENV = re.compile(r"ASTRAI_\w+|XDG_\w+|HOME|HF_(HOME|ENDPOINT|HUB_CACHE|HUB_OFFLINE)")  # HF_TOKEN is a secret
MOST_VALUES, MOST_LEVELS = 20_000, 60
ENV_ALLOWED = "ASTRAI_*, XDG_*, HOME, HF_HOME, HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE"
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge")}


@dataclass(frozen=True)
class Leaf:
    """A key of a file. `node` is what it holds."""

    key: Key
    origin: Origin
    node: yaml.Node


def read(file: Path) -> tuple[str, yaml.Node | None]:
    """A file's text and its YAML tree.

    Raises:
        ConfigError: it cannot be read, is no UTF-8 or no YAML; the message names the place.
    """
    name = shown(file)
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=_Loader)
        if tree is not None and not _is_modest(tree):
            message = (
                f"too large or too deep: at most {MOST_VALUES:,} values and {MOST_LEVELS} levels, aliases (*) written out"
            )
            raise refusal(message, Origin(name))
        return text, tree
    except RecursionError:
        raise refusal(f"too deep: at most {MOST_LEVELS} levels", Origin(name)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Origin(name, mark.line + 1, mark.column + 1) if mark else Origin(name)
        raise refusal(f"this is not YAML: {error.problem or error.context}", place) from None
    except yaml.YAMLError as error:
        raise refusal(f"this is not YAML: {' '.join(str(error).split())}", Origin(name)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(f"cannot be read: {error}", Origin(name)) from None


def _is_modest(tree: yaml.Node) -> bool:
    """False for files whose aliases multiply without end: Hydra would copy each of them."""
    pending, count = [(tree, 0)], 0
    while pending:
        node, level = pending.pop()
        count += 1
        if count > MOST_VALUES or level > MOST_LEVELS:
            return False
        if isinstance(node, yaml.MappingNode):
            pending += [(value, level + 1) for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            pending += [(value, level + 1) for value in node.value]
    return True


def leaves(node: yaml.Node, name: str, prefix: Key = ()) -> Iterator[Leaf]:
    """Every key of a tree, parents first. A list yields itself, then its items."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            key = (*prefix, str(key_node.value))
            yield Leaf(key, _origin(key_node, value, name), value)
            yield from leaves(value, name, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield Leaf((*prefix, index), _origin(value, value, name), value)
            yield from leaves(value, name, (*prefix, index))


def written(node: yaml.Node) -> str:
    """A value as its file wrote it, on one line."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(written(item) for item in node.value)}]"
    if isinstance(node, yaml.MappingNode):
        return f"{{{', '.join(f'{key.value}: {written(value)}' for key, value in node.value)}}}"
    quoted = isinstance(node, yaml.ScalarNode) and node.style
    return " ".join(str(node.value).split()) or ("''" if quoted else "")


def refusals(file: Path, text: str, tree: yaml.Node | None, *, foreign: bool, recipe: bool) -> Iterator[Problem]:
    """What a file may not say.

    No file names code (`_target_`). A recipe declares that it speaks for the whole deployment, and neither recipes nor
    files from outside (`foreign`) touch Hydra itself, which could write files anywhere. A file from outside reads only
    environment variables that are meant for us, so that a recipe from a stranger cannot carry others into a prompt.
    """
    name, first = shown(file), text.partition("\n")[0]
    header = _PACKAGE.match(first)
    if recipe and not (header and header[1] == "_global_"):
        yield Problem(Origin(name, 1, 1), (), "the first line of a recipe must be '# @package _global_'")
    if header and (foreign or recipe) and header[1].partition(".")[0] == "hydra":
        yield Problem(Origin(name, 1, 1), (), "a file of yours cannot change Hydra itself; choose another package")
    if tree is None:
        return
    if not isinstance(tree, yaml.MappingNode):
        place = Origin(name, tree.start_mark.line + 1, tree.start_mark.column + 1)
        yield Problem(place, (), "a configuration file holds keys and values")
        return
    seen: set[Key] = set()
    for leaf in leaves(tree, name):
        if leaf.key in seen:
            yield Problem(leaf.origin, leaf.key, "this key is written twice in one file; keep one")
        seen.add(leaf.key)
        if leaf.node.tag not in _TAGS:
            yield Problem(leaf.origin, leaf.key, f"YAML tags such as {leaf.node.tag} are refused; write plain values")
        last = leaf.key[-1]
        if last == "_target_":
            yield Problem(leaf.origin, leaf.key, "YAML names parts by their kind, never code; remove this key")
        if foreign or recipe:
            yield from _touches_hydra(leaf)
        if foreign and isinstance(leaf.node, yaml.ScalarNode):
            yield from _reads_too_much(leaf)


def _touches_hydra(leaf: Leaf) -> Iterator[Problem]:
    said = leaf.key[-1] if isinstance(leaf.key[-1], str) else leaf.node.value
    in_defaults = leaf.key[0] == "defaults" and isinstance(said, str) and _HYDRA_DEFAULT.search(said)
    if in_defaults or (len(leaf.key) == 1 and str(said).partition(".")[0] == "hydra"):
        yield Problem(leaf.origin, leaf.key, "a recipe or a file of yours cannot change Hydra itself; remove this")


def _reads_too_much(leaf: Leaf) -> Iterator[Problem]:
    value, before = _DECODES_ENV.sub(r"\1", _ESCAPED.sub("", leaf.node.value)), ""
    while value != before:
        before = value
        for variable in _READS_ENV.findall(value):
            if not _ENV.fullmatch(variable):
                message = f"the environment variable '{variable}' is not for this file to read; it may read {ENV_ALLOWED}"
                yield Problem(leaf.origin, leaf.key, message)
        value = _READS_KEY.sub("\x01", _READS_ENV.sub("\x01", value))
    if "${" in value:
        message = "a file of yours may use ${key} and ${oc.env:NAME,default}, and nothing else that starts with ${"
        yield Problem(leaf.origin, leaf.key, message)


def _origin(place: yaml.Node, value: yaml.Node, name: str) -> Origin:
    plain = isinstance(value, yaml.ScalarNode) and not value.style  # libyaml says '', PyYAML None
    return Origin(name, place.start_mark.line + 1, place.start_mark.column + 1, value.value if plain else None)
