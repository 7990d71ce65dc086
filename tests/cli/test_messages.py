"""What a person types or pastes into a chat, through a pseudo-terminal; and what comes through a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

CODE = """
import sys
from regard.cli.console import read_messages
if sys.stdin.isatty():
    import fcntl, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)    # so that Ctrl-C arrives as a signal
for message in read_messages():
    print("GOT", repr(message), flush=True)
    if message == "/end":
        break
"""


ENV = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}


def piped(text: str | bytes) -> subprocess.CompletedProcess[bytes]:
    data = text.encode() if isinstance(text, str) else text
    return subprocess.run([sys.executable, "-c", CODE], input=data, env=ENV, capture_output=True, timeout=60, check=False)


def messages(said: str) -> list[str]:
    return [eval(line.partition("GOT ")[2]) for line in said.splitlines() if "GOT " in line]


def typed(keys: Sequence[bytes]) -> list[str]:
    """The messages that come of these keys; each is sent when nothing more is said about the one before."""
    import pty
    import select

    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=other, stdout=other, stderr=other, env=ENV, start_new_session=True
    )
    os.close(other)
    said = b""
    try:
        for key in (b"", *keys, b"/end\r"):
            os.write(main, key)
            # The first prompt waits for imports.
            while select.select([main], [], [], 0.4 if said else 60)[0]:
                try:
                    said += os.read(main, 65536)
                except OSError:
                    break
        process.wait(timeout=20)
    finally:
        process.kill()
        process.wait()
        os.close(main)
    return messages(said.decode(errors="replace"))[:-1]


terminal = pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")


@terminal
def test_lines_typed_one_after_another_are_messages_of_their_own():
    assert typed([b"hello\r", "schön\r".encode(), b"\r", b"/who\r"]) == ["hello", "schön", "/who"]


@terminal
def test_a_paste_that_the_terminal_marks_is_one_message_sent_with_enter():
    assert typed([b"\x1b[200~one\ntwo\n\nthree\x1b[201~", b"\r", b"next\r"]) == ["one\ntwo\n\nthree", "next"]


@terminal
def test_lines_that_arrive_together_are_one_message():
    assert typed([b"one\rtwo\r\rthree\r", b"next\r"]) == ["one\ntwo\n\nthree", "next"]


@terminal
def test_the_last_line_of_a_paste_without_its_end_waits_for_enter():
    assert typed([b"one\rtwo", b" and a half\r"]) == ["one\ntwo and a half"]


@terminal
def test_commands_are_never_part_of_a_message():
    assert typed([b"hello\r/quit now\r", b"/new\r/who\r", b"see /usr/bin\r/usr/lib\r"]) == [
        "hello", "/quit now", "/new", "/who", "see /usr/bin\n/usr/lib",
    ]  # fmt: skip


@terminal
def test_quotes_hold_lines_together_and_ctrl_c_lets_go():
    assert typed([b'"""one\r', b"\r", b'two"""\r', b'"""lost\r', b"\x03", b"next\r"]) == ["one\n\ntwo", "next"]


def test_a_pipe_is_read_line_by_line_and_quotes_hold_lines_together():
    text = 'one\n\n  two  \n"""\nthree\n\nfour\n"""\n"""five"""\n""""""\nsix """ not a quote\nlast'
    done = piped(text)
    assert messages(done.stdout.decode()) == ["one", "two", "three\n\nfour", "five", 'six """ not a quote', "last"]
    assert messages(piped('"""\nnever closed\n').stdout.decode()) == ["never closed"]


def test_a_pipe_that_is_no_text_is_one_line():
    done = piped(b"ok\ncaf\xe9\n")
    assert b"stdin is not text in UTF-8" in done.stderr
