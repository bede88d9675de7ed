"""How the command line reaches a server: its flags and variables, and errors as one line.

Owns exit codes. Knows no verb.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Mapping
from typing import Any

from gateway.client import URL, Client, Patience, Refused, TetrarchError

from .screen import one_line

BRIEF = Patience(seconds=2.0)
"""A person rather hears at once that nothing listens there."""

EPILOG = """\
The server is --url or TETRARCH_URL; a token is needed only beyond this machine, or where the server asks for
one: TETRARCH_TOKEN (or --token, which others on this machine may see).
"""


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """--url and --token."""
    server = parser.add_argument_group("the server")
    server.add_argument("--url", metavar="URL", help=f"its address; else TETRARCH_URL, else {URL}")
    server.add_argument("--token", metavar="TOKEN", help="an access token; better: TETRARCH_TOKEN")


def client_of(
    options: argparse.Namespace, environ: Mapping[str, str], patience: Patience | None = None
) -> Client:
    """A client of the server that flags and variables name. Raises ValueError for a bad address."""
    url = options.url or environ.get("TETRARCH_URL") or URL
    return Client(url, options.token or environ.get("TETRARCH_TOKEN"), patience=patience)


def run_command(work: Coroutine[Any, Any, int]) -> int:
    """Its exit code: 1 when the server is not there or busy, 2 when it refuses, 130 when it was stopped.

    SIGTERM stops it as Ctrl-C does.
    """
    try:
        return asyncio.run(_stoppable(work))
    except TetrarchError as error:
        say(str(error))
        return 2 if isinstance(error, Refused) and not error.is_retryable else 1
    except ValueError as error:
        say(str(error))
        return 2
    except BrokenPipeError:  # whoever read our output has enough
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def say(words: str) -> None:
    """A line on stderr."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        sys.stderr.write(f"tetrarch: {one_line(words, 2000)}\n")
        sys.stderr.flush()


def text_given(text: str) -> str:
    """The text, or what stdin holds for `-`."""
    return sys.stdin.read() if text == "-" else text


async def _stoppable(work: Coroutine[Any, Any, int]) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work
