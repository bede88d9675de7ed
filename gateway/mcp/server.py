"""The MCP server: the tools of tools.py and a run as a resource, in the words of the protocol.

Owns the protocol's side. What the tools do is doing.py's.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any

import mcp_types as types
import msgspec
from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server

from gateway.client import Client, NotFound, TetrarchError

from .answers import URI, Spawned
from .doing import Answer, do
from .tools import INSTRUCTIONS, READS_ONLY, TOOLS, Arguments, description_of, schema_of

Context = ServerRequestContext[Any]

_RUN_URI = re.compile(re.escape(URI) + r"(run-[0-9a-f]{32})")


def mcp_server(client: Client, session: str) -> Server[Any]:
    """Over an open client. `session`: of the runs that name none."""
    return _Tools(client, session).server()


class _Tools:
    def __init__(self, client: Client, session: str) -> None:
        self._client = client
        self._session = session
        self._schemas = {name: schema_of(tool) for name, tool in TOOLS.items()}

    def server(self) -> Server[Any]:
        return Server(
            "tetrarch",
            version=importlib.metadata.version("tetrarch"),
            title="Tetrarch sub-agents",
            instructions=INSTRUCTIONS,
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_list_resources=self.list_resources,
            on_list_resource_templates=self.list_templates,
            on_read_resource=self.read_resource,
            get_tool_input_schema=self._schemas.get,
        )

    async def list_tools(
        self, _context: Context, _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=name,
                    description=description_of(tool),
                    input_schema=self._schemas[name],
                    annotations=types.ToolAnnotations(
                        read_only_hint=name in READS_ONLY,
                        destructive_hint=name == "cancel",
                        open_world_hint=False,
                    ),
                )
                for name, tool in TOOLS.items()
            ]
        )

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        """What the caller did wrong, or the server cannot now, is told to the model: it may do better."""
        tool = TOOLS.get(params.name)
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"There is no such tool. There are: {', '.join(TOOLS)}.")
        try:
            arguments = _arguments(params.arguments or {}, tool)
            report = context.session.report_progress
            return _told(await do(self._client, self._session, arguments, report))
        except (msgspec.ValidationError, TetrarchError) as error:
            return types.CallToolResult(content=[_text(str(error))], is_error=True)

    async def list_resources(
        self, _context: Context, _params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """This session's runs."""
        lines = [line async for line in self._client.runs(100, session=self._session)]
        return types.ListResourcesResult(resources=[_resource(line.id) for line in lines])

    async def list_templates(
        self, _context: Context, _params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            name="run",
            uri_template=f"{URI}{{run}}",
            description="All there is of a sub-agent's run: state, whole result, usage, budget.",
            mime_type="application/json",
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(
        self, _context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        found = _RUN_URI.fullmatch(str(params.uri))
        try:
            if found is None:
                raise MCPError(types.INVALID_PARAMS, f"Resources here are {URI} and a run's id.")
            run = await self._client.read(found[1])
        except NotFound as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        except TetrarchError as error:
            raise MCPError(types.INTERNAL_ERROR, str(error)) from None
        body = msgspec.json.encode(run).decode()
        contents = types.TextResourceContents(uri=params.uri, text=body, mime_type="application/json")
        return types.ReadResourceResult(contents=[contents])


def _arguments(given: Mapping[str, Any], tool: type[Arguments]) -> Arguments:
    """Raises ValidationError, which names the argument."""
    return msgspec.convert(given, tool)


def _told(answer: Answer) -> types.CallToolResult:
    body = msgspec.json.encode(answer)
    content: list[types.ContentBlock] = [_text(body.decode())]
    if isinstance(answer, Spawned):
        link = _resource(answer.run)
        content.append(types.ResourceLink(name=link.name, uri=link.uri, mime_type=link.mime_type))
    return types.CallToolResult(content=content, structured_content=msgspec.json.decode(body))


def _resource(run_id: str) -> types.Resource:
    """Named by its id alone: labels and names of agents may be anybody's words."""
    return types.Resource(name=run_id, uri=f"{URI}{run_id}", mime_type="application/json")


def _text(text: str) -> types.TextContent:
    return types.TextContent(type="text", text=text)
