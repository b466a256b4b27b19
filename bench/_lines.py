"""A side of a comparison as a process of its own: it reads one JSON request a line and answers each with one JSON line.

Standard library only: sides run in other virtual environments than ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def answer_lines(start: Callable[[], Mapping[str, Callable[..., Any]]], about: Callable[[], Mapping[str, Any]]) -> None:
    """The worker's main loop: `start` loads and returns the verbs; `about` describes what was loaded, sent first.

    Whatever libraries print goes to standard error, so that standard output holds answers only. Ends with its input.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    verbs = start()
    print(json.dumps({"ok": dict(about())}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": verbs[request.pop("do")](**request)}
        except Exception as error:  # noqa: BLE001  the other side of the pipe decides what it means
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


class Refused(RuntimeError):
    """A side could not do what it was asked for; the message is its own."""


class Remote:
    """A worker as its parent sees it. `about` is what the worker said when it was ready."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """Starts it and waits until it is ready.

        Raises:
            Refused: it ended instead; the message holds the end of what it wrote to standard error.
        """
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                list(command), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=dict(env)
            )
        self.pid = self._process.pid
        self.about: dict[str, Any] = self._answer()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Raises `Refused` when the worker could not do it or is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone; `_answer` says so
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise Refused(f"the worker ended: {self._log.read_text()[-1500:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        """Ends the worker; safe to call twice."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
