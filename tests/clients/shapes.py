"""What clients send, by shape: names and types of headers and fields, never a value. Kept for each version.

A field that no record has fails its test, so that a new version's ways are seen and thought about.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .recorder import Recorded

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "shapes"
RECORDS = bool(os.environ.get("TETRARCH_RECORD"))

OPAQUE = {"parameters", "input_schema", "schema", "input", "arguments"}
"""Objects under these names are others' schemas and arguments. An array is looked into."""

_KIND = re.compile(r"[a-z][a-z0-9_.-]{0,40}")
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}

Shapes = dict[str, dict[str, Any]]
"""By `METHOD path`: `bytes`, smallest and largest body to the next thousand, and `sent`, its lines."""


def version(package: str) -> str:
    """As deploy/clients pins it."""
    pinned = json.loads((ROOT / "deploy" / "clients" / "package.json").read_text())["dependencies"]
    if package in pinned:
        return str(pinned[package])
    for line in (ROOT / "deploy" / "clients" / "hermes.txt").read_text().splitlines():
        name, _, found = line.partition("==")
        if name == package:
            return found
    raise LookupError(f"deploy/clients pins no {package}")


def check_shapes(client: str, package: str, requests: Iterable[Recorded]) -> None:
    """Compares with the record of this version, or adds to it where TETRARCH_RECORD says so."""
    file = FOLDER / f"{client}-{version(package)}.json"
    known: Shapes = json.loads(file.read_text()) if file.exists() else {}
    seen = shapes_of(requests)
    if RECORDS:
        file.write_text(json.dumps(merged(known, seen), indent=1, sort_keys=True) + "\n")
        return
    new = {
        path: fresh
        for path, shape in seen.items()
        if (fresh := sorted(set(shape["sent"]) - set(known.get(path, {}).get("sent", ()))))
    }
    assert not new, (
        f"{client} sends what {file.name} has not: {json.dumps(new, indent=1)}\n"
        "Look at what it means for the gateway, then record: TETRARCH_RECORD=1 make test-clients"
    )


def shapes_of(requests: Iterable[Recorded]) -> Shapes:
    """All requests to one path together."""
    found: Shapes = {}
    for request in requests:
        size = round(request.num_bytes, -3)
        shape = {"bytes": [size, size], "sent": sorted(set(sent_by(request)))}
        found = merged(found, {f"{request.method} {request.path}": shape})
    return found


def sent_by(request: Recorded) -> Iterator[str]:
    """One line for each header, query field and body field."""
    yield from (f"header {name}" for name in request.headers)
    yield from (f"query {part.partition('=')[0]}" for part in request.query.split("&") if part)
    if request.body is not None:
        yield from (f"body {line}" for line in fields(request.body))


def fields(value: Any, path: str = "") -> Iterator[str]:
    """`path: type` of everything in a JSON value. Elements of arrays go by their `type` or `role`."""
    match value:
        case dict() if path.rpartition(".")[2] in OPAQUE:
            yield f"{path}: object"
        case dict():
            for name, item in value.items():
                yield from fields(item, f"{path}.{name}" if path else name)
        case list() if value:
            for item in value:
                yield from fields(item, f"{path}[{kind_of(item)}]")
        case list():
            yield f"{path}: array"
        case _:
            yield f"{path}: {_TYPES[type(value)]}"


def kind_of(item: Any) -> str:
    """A word of the protocol, or nothing."""
    told = (item.get("type") or item.get("role")) if isinstance(item, dict) else None
    return told if isinstance(told, str) and _KIND.fullmatch(told) else ""


def merged(one: Shapes, other: Shapes) -> Shapes:
    """What either has."""
    found = dict(one)
    for path, shape in other.items():
        known = found.get(path, shape)
        sizes = [*known["bytes"], *shape["bytes"]]
        sent = sorted({*known["sent"], *shape["sent"]})
        found[path] = {"bytes": [min(sizes), max(sizes)], "sent": sent}
    return found
