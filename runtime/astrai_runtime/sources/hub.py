"""A model on the Hugging Face Hub (or a mirror): a pinned revision and a list of files, kept in the hub's cache layout."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator

from astrai_runtime.errors import SourceError
from astrai_runtime.part import PartConfig
from astrai_runtime.sources._verified import Verified, sha256_of
from astrai_runtime.sources.base import Located, Progress, Source, silent

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class HubConfig(PartConfig):
    """`revision`: a full commit, so that nobody can move it; `files`: name -> sha256, or null where none is known;
    `endpoint`: the hub's address, null for the library's own (HF_ENDPOINT, else huggingface.co)."""

    kind: Literal["hub"]
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    files: dict[str, Sha256 | None] = Field(min_length=1)
    endpoint: str | None = Field(pattern=r"^https?://")

    @field_validator("files")
    @classmethod
    def _plain_names(cls, files: dict[str, str | None]) -> dict[str, str | None]:
        for name in files:
            path = PurePosixPath(name)
            if not name or path.is_absolute() or ".." in path.parts or "\\" in name:
                raise ValueError(f"file name '{name}' leads out of the repository")
        return files


class HubSource(Source):
    Config = HubConfig

    def __init__(self, config: HubConfig) -> None:
        super().__init__(config)
        self._repo, self._revision, self._files = config.repo, config.revision, config.files
        self._endpoint = config.endpoint.rstrip("/") if config.endpoint else None

    def locate(self, *, cache: Path, offline: bool, fetch: bool, progress: Progress = silent) -> Located:
        folder = cache / "hub" / f"models--{self._repo.replace('/', '--')}" / "snapshots" / self._revision
        missing = [name for name in self._files if not (folder / name).is_file()]
        offline = offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        if missing and (offline or not fetch):
            raise self._absent(folder, missing, offline)
        if fetch:
            self._fetch(folder, Verified(cache), cache / "hub", offline, progress)
        weights = [name for name in self._files if name.endswith(".gguf")]
        path = folder / weights[0] if len(weights) == 1 else folder
        host = (self._endpoint or "https://huggingface.co").split("://", 1)[1]
        return Located(path, f"{host}/{self._repo}@{self._revision[:7]}")

    def _absent(self, folder: Path, missing: list[str], offline: bool) -> SourceError:
        what = f"{missing[0]} and {len(missing) - 1} more are" if len(missing) > 1 else f"{missing[0]} is"
        how = "; the network is switched off (offline), so fetch it where there is one" if offline else ""
        return SourceError(
            f"{self._repo}@{self._revision[:7]}: {what} not on this machine, looked for in {folder}{how}: "
            "astrai-deploy fetch, with the same recipe and overrides"
        )

    def _fetch(self, folder: Path, verified: Verified, hub: Path, offline: bool, progress: Progress) -> None:
        """Downloads what is missing, and checks once what has a declared sha256. A wrong file is deleted."""
        for name, sha256 in self._files.items():
            path = folder / name
            present = path.is_file()
            if sha256 is None:
                if not present:
                    self._download(name, hub, progress)
                continue
            if present and verified.holds(path, sha256):
                continue
            if present and sha256_of(path, progress, f"checking {name}") != sha256:
                _delete(path)
                if offline:
                    raise self._absent(folder, [name], offline)
                present = False
            if not present:
                self._download(name, hub, progress)
                found = sha256_of(path, progress, f"checking {name}")
                if found != sha256:
                    _delete(path)
                    raise SourceError(
                        f"{self._repo}@{self._revision[:7]}: {name} has sha256 {found}, but {sha256} was declared; "
                        "it was deleted. Correct model.source.files if the declared one is wrong"
                    )
            verified.note(path, sha256)

    def _download(self, name: str, hub: Path, progress: Progress) -> None:
        """One file into the hub's cache. A connection that breaks is taken up again where it broke.

        Raises:
            SourceError: in place of every error of the hub's library and of the network.
        """
        from huggingface_hub import errors, hf_hub_download

        # Its HTTP library changed its name between releases, so its errors are reached through the hub's own.
        http_error = cast(type[Exception], errors.HfHubHTTPError.__mro__[1])
        xet_error = cast(type[Exception], getattr(errors, "XetDownloadError", RuntimeError))
        try:
            hf_hub_download(
                self._repo,
                name,
                revision=self._revision,
                cache_dir=hub,
                endpoint=self._endpoint,
                tqdm_class=_reporting(progress, f"downloading {name}"),
            )
        except (http_error, xet_error, errors.EntryNotFoundError, OSError, ValueError, RuntimeError) as error:
            raise self._explain(name, error) from error

    def _explain(self, name: str, error: Exception) -> SourceError:
        from huggingface_hub import errors

        where = f"{self._repo}@{self._revision[:7]}"
        answers = (getattr(each, "response", None) for each in (error, error.__cause__))
        status = next((answer.status_code for answer in answers if answer is not None), None)
        site = self._endpoint or "https://huggingface.co"
        if isinstance(error, errors.GatedRepoError) or status == 403:
            return SourceError(
                f"{where}: access is granted only to accounts that accepted its terms at {site}/{self._repo}; "
                "accept them there, then set HF_TOKEN to a token of that account"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return SourceError(f"{where}: the repository has no revision {self._revision}; see model.source.revision")
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return SourceError(f"{where}: has no file {name} in this revision; see model.source.files")
        if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
            return SourceError(
                f"{where}: no such repository at {site}, or it is private or gated; if it is yours to use, accept its terms "
                f"at {site}/{self._repo} and set HF_TOKEN"
            )
        reason = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
        return SourceError(f"{where}: {name} could not be downloaded from {site}: {reason}")


def _delete(path: Path) -> None:
    """Removes a file of the hub's cache: the link in the snapshot, and each blob that it leads to, one after another."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)


def _reporting(progress: Progress, what: str) -> type[Any]:
    """A progress bar for the hub's library that draws nothing and reports to `progress`."""
    from huggingface_hub.utils.tqdm import tqdm as hub_bar

    bars: list[object] = []

    class Reporting(hub_bar):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]  # the hub's has no types
            bars.append(self)
            self._done, self._all = int(kwargs.get("initial") or 0), int(kwargs.get("total") or 0)

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            if bars[0] is self:  # its other protocol (xet) makes a second bar for the same file
                progress(what, self._done, max(self._all, self._done))

    return Reporting


PART = HubSource
