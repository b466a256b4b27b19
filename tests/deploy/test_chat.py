"""The terminal chat as a process: it streams, remembers, cancels a reply on Ctrl-C, and leaves on /exit."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

import pytest

Launch = Callable[..., "subprocess.Popen[str]"]


def test_chat_answers_each_line_and_leaves_on_exit(launch: Launch) -> None:
    process = launch("chat", "+recipe=tiny", "sampling=greedy", "protocols.openai.max_tokens=64")
    out, err = process.communicate("hello\n/reset\nhello\n/exit\nnever read\n", timeout=60)
    assert process.returncode == 0, err
    replies = out.splitlines()
    assert "tiny is loaded" in err
    assert len(out) > 40
    assert replies[: len(replies) // 2] == replies[len(replies) // 2 :]  # the same question after /reset, greedy


def test_ctrl_c_cancels_the_reply_and_not_the_chat(launch: Launch) -> None:
    process = launch("chat", "+recipe=tiny", "sampling=greedy")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the reply has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/exit\n", timeout=60)
    assert "(cancelled)" in out
    assert process.returncode == 0, err


def test_the_end_of_input_ends_the_chat(launch: Launch) -> None:
    process = launch("chat", "+recipe=tiny")
    process.communicate("", timeout=60)
    assert process.returncode == 0


@pytest.mark.demo
def test_the_real_model_chats_about_bridges(launch: Launch, demo_package: None) -> None:
    process = launch("chat", "+recipe=chat_paged", "sampling=greedy")
    out, err = process.communicate("What is a bridge?\n/exit\n", timeout=120)
    assert process.returncode == 0, err
    assert "structure" in out
    assert not out.startswith(" ")
    assert "User:" not in out
