"""API keys: from the configuration and from a file, kept as digests, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import stat
from dataclasses import dataclass
from pathlib import Path

from astrai_runtime import log
from astrai_runtime.errors import AstraiError
from astrai_runtime.server.config import ServerConfig

MAX_FILE_BYTES = 1024 * 1024
ID_CHARACTERS = 8


class KeyFileError(AstraiError):
    code = "invalid_key_file"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `id` names a key in logs without being it; None: no key was sent."""

    id: str | None
    admin: bool = False


class Keyring:
    """Every key of a deployment.

    Raises:
        KeyFileError: `server.api_key_file` cannot be read or holds no key.
    """

    def __init__(self, config: ServerConfig) -> None:
        own = [key.get_secret_value() for key in config.api_keys]
        if config.api_key_file is not None:
            own += _keys_of(Path(config.api_key_file).expanduser())
        self._callers = {_digest(key.encode()): Caller(_id(key.encode())) for key in own}
        for key in config.admin_keys:
            secret = key.get_secret_value().encode()
            self._callers[_digest(secret)] = Caller(_id(secret), admin=True)
        self.asks = bool(own)  # whether requests need a key
        self.asks_admins = bool(config.admin_keys)

    def find(self, given: bytes) -> Caller | None:
        """Whose key it is. Every key is compared, so that the time says nothing about which one is near."""
        digest = _digest(given)
        found = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(digest, known):
                found = caller
        return found


def _keys_of(path: Path) -> list[str]:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_FILE_BYTES:
            raise KeyFileError(f"server.api_key_file={path} is no file of keys; name a file with one key a line")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KeyFileError(f"server.api_key_file={path} cannot be read: {error.strerror or 'unreadable'}") from None
    except UnicodeDecodeError:
        raise KeyFileError(f"server.api_key_file={path} is no UTF-8 text") from None
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        said = line.partition("#")[0].split()
        if len(said) > 1:
            raise KeyFileError(f"server.api_key_file={path}, line {number}: one key a line, without spaces")
        keys += said
    if not keys:
        raise KeyFileError(f"server.api_key_file={path} holds no key; write one a line, or set it to null")
    if about.st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        log.get("server").warning(
            "key_file_open_to_others",
            path=str(path),
            mode=f"{stat.S_IMODE(about.st_mode):o}",
            would_help=f"chmod 600 {path}",
        )
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _id(key: bytes) -> str:
    return hashlib.sha256(b"id:" + key).hexdigest()[:ID_CHARACTERS]
