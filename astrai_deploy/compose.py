"""Files and overrides -> a checked Deployment that knows where each of its values came from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from astrai_deploy._check import check
from astrai_deploy._hydra_overrides import Overrides, prepare
from astrai_deploy._hydra_sources import Loader, ShippedOptions, loader
from astrai_deploy._problem import ConfigError, Key, Origin, Problem, refusal
from astrai_deploy._yaml import Leaf, leaves, read
from astrai_deploy.origins import Origins, Setting, clash, trace
from astrai_deploy.paths import shown
from astrai_deploy.schema import Deployment
from astrai_runtime.errors import did_you_mean

PRIMARY = "astrai_deploy"
BACKEND_VARIABLE = "ASTR_BACKEND"
NOT_GIVEN = "no value given (it is ???); set it on the command line or in a file"


@dataclass(frozen=True)
class Composed:
    """One composed configuration.

    `files` in the order of composition, later ones win; `shadowed` tells which shipped file a user's file replaced.
    """

    deployment: Deployment
    data: Mapping[str, Any]  # what was validated: plain values, secrets in the clear
    origins: Origins
    files: Sequence[str]
    shadowed: Mapping[str, str]
    recipe: str | None

    def origin(self, key: str) -> Origin | None:
        """Where a dotted key got its value."""
        return self.origins.find(split(key))

    def overridden(self, key: str) -> Sequence[Setting]:
        """What a dotted key's value replaced, the strongest first."""
        return tuple(reversed(self.origins.history(split(key))[:-1]))


def compose(
    overrides: Iterable[str] = (), config_dirs: Iterable[str | Path] = (), environ: Mapping[str, str] | None = None
) -> Composed:
    """Composes and checks. Precedence, lowest first: option files, primary, recipe, environment, command line.

    Writes nothing, and leaves Hydra's globals alone.

    Raises:
        ConfigError: everything that is wrong, with its places.
    """
    environ = os.environ if environ is None else environ
    source = loader(config_dirs, environ)
    wanted = prepare(source, overrides)
    if wanted.problems:
        raise ConfigError(wanted.problems)
    config = _load(source, wanted)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    origins = trace(source, wanted.values)
    _obey_environment(config, origins, environ)
    problems: list[Problem] = []
    data = _plain(config, (), origins, problems)
    deployment = check(data, origins, problems)
    recipe = ", ".join(wanted.recipes) or None
    return Composed(deployment, data, origins, tuple(origins.files), dict(origins.shadowed), recipe)


def split(key: str) -> Key:
    """`protocols.openai.path` or `sampling.pipeline[1]` as a Key."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"[.\[\]]+", key.strip("]")) if part)


def _load(source: Loader, wanted: Overrides) -> DictConfig:
    try:
        config: DictConfig = source.load_configuration(PRIMARY, wanted.lines, RunMode.RUN, from_shell=False)
        return config
    except RecursionError:
        raise refusal("recipes or options extend each other in a circle; look at their defaults lists") from None
    except MissingConfigException as error:
        raise ConfigError([_missing_choice(source, error, wanted.recipes)]) from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        reason = _one_line(error.__cause__ or error)
        if isinstance(error.__cause__, GrammarParseError):
            reason = "this is not a valid interpolation; a literal ${ is written \\${"
        if "Error merging override" in str(error):
            line = str(error).removeprefix("Error merging override ")
            raise refusal(reason, Origin(f"command line: {wanted.said.get(line, line)}")) from None
        clashing = clash(source) if "Cannot merge" in reason else None
        if clashing is not None:
            raise ConfigError([clashing]) from None
        asking = re.match(r"In '([^']+)': (.*)", reason)
        holder = _holder(source, asking[1]) if asking else None
        if asking and holder is not None:
            raise refusal(asking[2], Origin(shown(holder.file(asking[1])))) from None
        raise refusal(reason) from None


def _missing_choice(source: Loader, error: MissingConfigException, recipes: list[str]) -> Problem:
    """A file chose an option that does not exist: says which file, and where it says so."""
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    known = list(error.options or [])
    message = f"no {group} named '{name}'; there are: {', '.join(known) or 'none'}{did_you_mean(name, known)}"
    asking = re.match(r"In '([^']+)'", str(error))
    for leaf in _defaults(source, [asking[1]] if asking else []):
        if name in (leaf.node.value, leaf.key[-1]) and "override" not in str(leaf.key):
            return Problem(leaf.origin, (group,), message)
    for leaf in _defaults(
        source, [f"recipe/{recipe}" for recipe in recipes]
    ):  # Hydra blames the overridden file, not the one that overrides
        if f"override /{group}" in leaf.key or (name == leaf.node.value and len(leaf.key) > 2):
            return Problem(leaf.origin, (group,), message)
    return Problem(None, (group,), message)


def _holder(source: Loader, name: str) -> ShippedOptions | None:
    ours = (one for one in source.get_sources() if isinstance(one, ShippedOptions))
    return next((one for one in ours if one.is_config(name)), None)


def _defaults(source: Loader, names: list[str]) -> Iterator[Leaf]:
    """The defaults lists of some configurations, and of the recipes that they extend."""
    pending, seen = list(names), set[str]()
    while pending:
        name = pending.pop(0)
        holder = _holder(source, name)
        if holder is None or name in seen:
            continue
        seen.add(name)
        tree = read(holder.file(name))[1]
        for leaf in leaves(tree, shown(holder.file(name))) if tree is not None else ():
            if leaf.key[0] == "defaults":
                yield leaf
                if len(leaf.key) == 2 and isinstance(leaf.node, yaml.ScalarNode):
                    pending.append(f"{name.rpartition('/')[0]}/{leaf.node.value}")


def _obey_environment(config: DictConfig, origins: Origins, environ: Mapping[str, str]) -> None:
    """ASTR_BACKEND names the one attention backend that must serve; keys on the command line are stronger."""
    backend = environ.get(BACKEND_VARIABLE)
    typed = [origins.find(("attention", name)) for name in ("priority", "strict")]
    if not backend or any(origin and origin.source.startswith("command line") for origin in typed):
        return
    origin = Origin(f"environment {BACKEND_VARIABLE}={backend}")
    for key, value, text in (("priority", [backend], f"[{backend}]"), ("strict", True, "true")):
        OmegaConf.update(config, f"attention.{key}", value, merge=False, force_add=True)
        origins.set(("attention", key), text, origin)


def _plain(node: DictConfig | ListConfig, at: Key, origins: Origins, problems: list[Problem]) -> Any:
    """The container as plain values. What cannot be resolved becomes a problem, and None in its place."""

    def child(name: Any) -> Any:
        key = (*at, name)
        try:
            value = node[name]
            if isinstance(value, DictConfig | ListConfig):
                inner = value._is_none() or value._is_missing()
                return None if inner else _plain(value, key, origins, problems)
            return value
        except MissingMandatoryValue:
            problems.append(Problem(origins.find(key), key, NOT_GIVEN))
        except RecursionError:
            problems.append(Problem(origins.find(key), key, f"{_written(node, name)} refers to itself"))
        except InterpolationResolutionError as error:
            problems.append(Problem(origins.find(key), key, _unresolved(error, _written(node, name))))
        return None

    if isinstance(node, ListConfig):
        return [child(index) for index in range(len(node))]
    return {str(name): child(name) for name in node}


def _unresolved(error: InterpolationResolutionError, written: str) -> str:
    reason = str(error).partition("\n")[0]
    variable = re.search(r"Environment variable '([^']*)' not found", reason)
    if variable:
        return f"the environment variable '{variable[1]}' is not set; set it, or write ${{oc.env:{variable[1]},DEFAULT}}"
    if "recursi" in reason.lower() or isinstance(error.__cause__, RecursionError):
        return f"{written} refers to itself"
    return f"{written} cannot be resolved: {reason}; a literal ${{ is written \\${{"


def _written(node: DictConfig | ListConfig, name: Any) -> str:
    """The reference itself, without the text around it: that may be a secret."""
    raw = node._get_node(name)
    found = re.search(r"\$\{[^{}]*\}", str(raw._value() if raw is not None else ""))  # type: ignore[union-attr]
    return f"'{found[0]}'" if found else "the value"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
