"""The id of a request: as the client gave it, else a new one; on every answer, log line and audit line."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

REQUEST_KEY = web.RequestKey("tetrarch_request", str)


def request_id(request: web.Request) -> str:
    """The same for all that asks during one request."""
    if REQUEST_KEY not in request:
        given = request.headers.get("x-request-id", "")
        is_clean = re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII)
        request[REQUEST_KEY] = given if is_clean else f"req-{uuid.uuid4().hex}"
    return request[REQUEST_KEY]
