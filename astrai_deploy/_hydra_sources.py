"""Where Hydra looks for files: the user's folders first, then what is shipped; `recipes/` is the group `recipe`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import DictConfig
from omegaconf.errors import GrammarParseError
from omegaconf.grammar_parser import parse

from astrai_deploy._problem import REDACTED, ConfigError, Problem, refusal, sounds_secret
from astrai_deploy._yaml import leaves, read, refusals
from astrai_deploy.paths import shipped, shown, user_dirs


class ShippedOptions(FileConfigSource):  # type: ignore[misc]  # Hydra's classes have no types
    """conf/: DIR/kv/paged.yaml is the option `paged` of the group `kv`. Every file is examined before Hydra reads it."""

    foreign = False
    recipes = False

    @staticmethod
    def scheme() -> str:
        return "shipped"

    def file(self, config_path: str) -> Path:
        """The file behind a configuration's name."""
        return Path(self.path, self._normalize_file_name(config_path))

    def load_config(self, config_path: str) -> ConfigResult:
        self.examine(self.file(config_path))
        return super().load_config(config_path)

    def examine(self, file: Path) -> None:
        """Raises ConfigError when the file says what it must not say."""
        text, tree = read(file)
        problems = _grammar(tree, shown(file)) if isinstance(tree, yaml.MappingNode) else []
        told = {problem.key for problem in problems}
        said = refusals(file, text, tree, foreign=self.foreign, recipe=self.recipes)
        problems += [problem for problem in said if not problem.key or problem.key not in told]
        if problems:
            raise ConfigError(problems)


class UserOptions(ShippedOptions):
    """The same in a folder of the user's; such a file is not trusted with everything."""

    foreign = True

    @staticmethod
    def scheme() -> str:
        return "user"

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found: list[str] = super().list(config_path, results_filter)
        return [name for name in found if config_path.strip("/") or name != "recipes"]


class ShippedRecipes(ShippedOptions):
    """recipes/: DIR/tiny.yaml is the option `tiny` of the group `recipe`; there is no folder of that name."""

    recipes = True

    @staticmethod
    def scheme() -> str:
        return "recipes"

    @staticmethod
    def _inside(config_path: str) -> str | None:
        head, _, rest = config_path.strip("/").partition("/")
        return rest if head == "recipe" else None

    def file(self, config_path: str) -> Path:
        return super().file(self._inside(config_path) or "")

    def load_config(self, config_path: str) -> ConfigResult:
        inside = self._inside(config_path)
        if not inside:
            raise ConfigLoadError(f"no recipe: {config_path}")
        self.examine(self.file(config_path))
        return FileConfigSource.load_config(self, inside)

    def is_group(self, config_path: str) -> bool:
        inside = self._inside(config_path)
        return not config_path.strip("/") or (inside is not None and bool(super().is_group(inside)))

    def is_config(self, config_path: str) -> bool:
        inside = self._inside(config_path)
        return bool(inside) and bool(FileConfigSource.is_config(self, inside))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if not config_path.strip("/"):
            return ["recipe"] if results_filter in (None, ObjectType.GROUP) else []
        inside = self._inside(config_path)
        if inside is None or results_filter is ObjectType.GROUP:
            return []
        return sorted(file.stem for file in Path(self.path, inside).glob("*.yaml"))


class UserRecipes(ShippedRecipes):
    """`recipes/` inside a folder of the user's."""

    foreign = True

    @staticmethod
    def scheme() -> str:
        return "user-recipes"


class Loader(ConfigLoaderImpl):  # type: ignore[misc]  # Hydra's classes have no types
    """Hydra's loader, which remembers what it composed: finding that out again costs as much as composing."""

    composed: Sequence[ResultDefault] = ()

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        self.composed = tuple(defaults)
        config: DictConfig = super()._compose_config_from_defaults_list(defaults=defaults, repo=repo)
        return config


def search_path(config_dirs: Iterable[str | Path] = (), environ: Mapping[str, str] | None = None) -> ConfigSearchPathImpl:
    """Hydra's search path; the first folder that has a file wins, so that users may shadow what is shipped.

    Raises:
        ConfigError: a folder that was named is not there.
    """
    for source in (ShippedOptions, UserOptions, ShippedRecipes, UserRecipes):
        Plugins.instance().register(source)
    try:
        folders = user_dirs(config_dirs, environ)
    except NotADirectoryError as error:
        raise refusal(str(error)) from None
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder in folders:
        path.append("user", f"user://{folder}")
        if (folder / "recipes").is_dir():
            path.append("user", f"user-recipes://{folder / 'recipes'}")
    path.append("main", f"shipped://{shipped('conf')}")
    path.append("main", f"recipes://{shipped('recipes')}")
    path.append("schema", "structured://")
    return path


def loader(config_dirs: Iterable[str | Path] = (), environ: Mapping[str, str] | None = None) -> Loader:
    """A loader over our search path; touches no global of Hydra's but the version whose behaviour we ask for."""
    version.setbase("1.3")
    return Loader(config_search_path=search_path(config_dirs, environ))


def _grammar(tree: yaml.MappingNode, name: str) -> list[Problem]:
    """Malformed `${...}`, found while we still know the place."""
    found = []
    for leaf in leaves(tree, name):
        value: Any = leaf.node.value
        if isinstance(leaf.node, yaml.ScalarNode) and "${" in value:
            try:
                parse(value)
            except GrammarParseError:
                said = REDACTED if sounds_secret(leaf.key) else f"'{value}'"
                message = f"{said} is not a valid interpolation; a literal ${{ is written \\${{"
                found.append(Problem(leaf.origin, leaf.key, message))
    return found
