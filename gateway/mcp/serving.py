"""Serves MCP: over stdin and stdout, or as streamable HTTP on this machine alone.

Owns the transport and its end. Runs that were started go on without it.
"""

from __future__ import annotations

import argparse
import socket
import uuid
from collections.abc import Mapping

import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from gateway.cli.calling import client_of, run_command, say
from gateway.client import Patience

from .server import mcp_server

HOST = "127.0.0.1"

PATIENCE = Patience(seconds=45.0)
"""Most clients give up a tool's call after a minute, and then hear nothing of why."""


def serve_mcp(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Until stdin ends, or until Ctrl-C."""
    return run_command(_serve(options, environ))


async def _serve(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    session = options.session or f"mcp-{uuid.uuid4().hex[:12]}"
    async with client_of(options, environ, PATIENCE) as client:
        server = mcp_server(client, session)
        if options.http is None:
            await _serve_stdio(server)
        else:
            await _serve_http(server, options.http)
    return 0


async def _serve_stdio(server: Server) -> None:
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


async def _serve_http(server: Server, port: int) -> None:
    """On loopback; pages of a browser cannot reach it, since Host and Origin must be this machine's."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()
        say(f"MCP at http://{HOST}:{listener.getsockname()[1]}/mcp")
        app = server.streamable_http_app(host=HOST)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, ws="none"
        )
        await uvicorn.Server(config).serve(sockets=[listener])
