"""``tokenspeed run`` without a prompt on a terminal: a chat, driven through a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_artifact import cli_environment, command

SPEED = re.compile(r"\[(\d+) tokens, \d+ tokens/s(?:, (\d+) prompt tokens cached)?\]")


class Chat:
    """A chat process on a terminal of its own; stdout and stderr both show there."""

    def __init__(self, artifact: Path, *args: str):
        leader, follower = pty.openpty()
        self.terminal = leader
        self.process = subprocess.Popen(
            command("run", artifact, "--temperature", "0", *args),
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=cli_environment(TERM="dumb"),
            start_new_session=True,
        )
        os.close(follower)
        self._shown = b""
        self.banner = self.until("> ")

    def until(self, pattern: str, seconds: float = 20.0) -> str:
        """What is shown up to and with the first match of ``pattern``; the rest is kept for the next call."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern.encode(), self._shown)) is None:
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self._shown!r}"
            try:
                self._shown += os.read(self.terminal, 65536)
            except OSError as e:  # the other end was closed
                raise AssertionError(f"ended before {pattern!r}: {self._shown!r}") from e
        shown, self._shown = self._shown[: found.end()], self._shown[found.end() :]
        return shown.decode("utf-8", "replace").replace("\r\n", "\n")

    def send(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def say(self, line: str) -> str:
        """Type a line; returns what it gives, up to the next prompt."""
        self.send(line + "\n")
        self.until(re.escape(line) + "\r?\n")  # the terminal's echo
        return self.until("> " if line.startswith("/") else f"({SPEED.pattern}|error: [^\n]*)\r?\n> ")

    def finish(self) -> int:
        return self.process.wait(timeout=20)


@pytest.fixture
def chat(tiny_artifact: Path) -> Iterator[Chat]:
    chat = Chat(tiny_artifact, "--max-tokens", "12")
    yield chat
    chat.process.kill()
    chat.process.wait()
    os.close(chat.terminal)


def test_a_conversation(chat: Chat) -> None:
    assert "tiny-llama on cpu:" in chat.banner and "/reset forgets the conversation" in chat.banner
    first = chat.say("hello")
    assert SPEED.search(first)
    second = chat.say("hello")
    assert text(second) != text(first)  # it now sees the first exchange
    chat.say("/reset")
    assert text(chat.say("hello")) == text(first)
    chat.say("/system Be brief.")
    chat.say("/reset")
    assert text(chat.say("hello")) != text(first)  # the system message outlives a reset
    chat.say("/system")
    chat.say("/reset")
    assert text(chat.say("hello")) == text(first)
    assert "unknown command /nonsense; /reset forgets" in chat.say("/nonsense")
    chat.send("/quit\n")
    assert chat.finish() == 0


def text(shown: str) -> str:
    return SPEED.split(shown)[0]


def test_ctrl_d_leaves_and_ctrl_c_at_the_prompt_does_not(chat: Chat) -> None:
    chat.send("half a line")
    chat.until("half a line")
    time.sleep(0.3)  # a signal between two characters is noticed with the next one only: let it wait for that first
    chat.process.send_signal(signal.SIGINT)
    chat.until("> ")
    assert SPEED.search(chat.say("hello"))
    chat.send("\x04")
    assert chat.finish() == 0


def test_ctrl_c_ends_a_reply_and_the_chat_goes_on(tiny_artifact: Path) -> None:
    chat = Chat(tiny_artifact)  # without --max-tokens a reply has some 65000 tokens
    try:
        chat.send("hello\n")
        chat.until("hello\r?\n")
        chat.until(r"[\s\S]")  # it talks
        chat.process.send_signal(signal.SIGINT)
        found = SPEED.search(chat.until(SPEED.pattern))
        assert found is not None and int(found[1]) < 60000
        chat.until("> ")
        chat.send("/quit\n")
        assert chat.finish() == 0
    finally:
        chat.process.kill()
        os.close(chat.terminal)


def test_a_refused_message_does_not_end_the_chat(tiny_artifact: Path) -> None:
    chat = Chat(tiny_artifact, "--max-tokens", "65500")
    try:
        assert "error: max_tokens 65500 does not fit" in chat.say("x" * 60)
        chat.send("/quit\n")
        assert chat.finish() == 0
    finally:
        chat.process.kill()
        os.close(chat.terminal)
