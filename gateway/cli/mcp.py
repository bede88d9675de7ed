"""`tetrarch mcp`: its flags and help, also where the `mcp` package is not installed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .calling import EPILOG, add_server_flags

EXAMPLES = """\
examples:
  tetrarch mcp                           for a client that starts it, over stdin and stdout
  tetrarch mcp --http 8115               for clients that connect to http://127.0.0.1:8115/mcp

As a client is told of it, in most settings files:
  {"mcpServers": {"tetrarch": {"command": "tetrarch", "args": ["mcp"]}}}

Tools: spawn_subagent, wait, send_input, cancel, list. Sub-agents outlive this process; `tetrarch runs` shows
them. It needs a server (`tetrarch serve`) and the package mcp: pip install 'tetrarch[mcp]'

"""

MISSING = "`tetrarch mcp` needs the package mcp. Install it: pip install 'tetrarch[mcp]' (or pip install mcp)"


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; ends the process for --help and wrong ones."""
    parser = argparse.ArgumentParser(
        prog="tetrarch mcp",
        description="Let agents that speak MCP start sub-agents here, wait for them and steer them.",
        epilog=EXAMPLES + EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--http",
        type=_port,
        metavar="PORT",
        help="streamable HTTP on 127.0.0.1 (0: any port) instead of stdio",
    )
    parser.add_argument("--session", metavar="NAME", help="of sub-agents that name none; left out: a new one")
    add_server_flags(parser)
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 65_536):
        raise argparse.ArgumentTypeError(f"'{text}' is not a port: a number from 0 to 65535")
    return int(text)
