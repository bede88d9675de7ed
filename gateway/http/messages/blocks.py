"""Content blocks of a request as text: each checked by hand, so that an error names the very block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from gateway.errors import InvalidField
from gateway.http.fields import bad_field

from .remedies import MESSAGES_REMEDIES

Block = Mapping[str, Any]
Value = TypeVar("Value")

NO_IMAGES = "this model reads text only: leave the block out, or describe it in words"


def wrong(where: str, value: object, remedy: str | None = None) -> InvalidField:
    """The error for one field of a Messages body."""
    return bad_field(where, value, remedy=remedy, remedies=MESSAGES_REMEDIES)


def need(block: Block, name: str, kind: type[Value], where: str) -> Value:
    """A field that must be there. Raises InvalidField."""
    value = block.get(name)
    if not isinstance(value, kind):
        raise wrong(f"{where}.{name}", value)
    return value


def may(block: Block, name: str, kind: type[Value], where: str, default: Value) -> Value:
    """A field that may be absent or null. Raises InvalidField."""
    return default if block.get(name) is None else need(block, name, kind, where)


def blocks_of(content: Any, where: str) -> list[tuple[str, Block]]:
    """The blocks of a content with their paths; a string is one block of text. Raises InvalidField."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise wrong(where, content)
    blocks: list[tuple[str, Block]] = []
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise wrong(f"{where}[{index}]", block)
        blocks.append((f"{where}[{index}]", block))
    return blocks


def block_text(block: Block, where: str) -> str:
    """The text of a block that a user or a tool sends. Raises InvalidField for what is no text."""
    match block.get("type"):
        case "text":
            return need(block, "text", str, where)
        case "document":
            return _titled(block, _source_text(need(block, "source", dict, where), f"{where}.source"), where)
        case "search_result":
            found = need(block, "content", list, where)
            return _titled(block, joined_text(found, f"{where}.content"), where)
        case "image":
            raise wrong(f"{where}.type", "image", NO_IMAGES)
        case other:
            raise wrong(f"{where}.type", other, "'text', or a document or search result of plain text")


def joined_text(content: Any, where: str) -> str:
    """All blocks of a content as one text, see `join`. Raises InvalidField."""
    return join([block_text(block, path) for path, block in blocks_of(content, where)])


def join(texts: list[str]) -> str:
    """Texts one after the other, each on its own line."""
    joined = ""
    for text in filter(None, texts):
        is_apart = not joined or joined.endswith("\n") or text.startswith("\n")
        joined += text if is_apart else f"\n{text}"
    return joined


def _source_text(source: Block, where: str) -> str:
    match source.get("type"):
        case "text":
            return need(source, "data", str, where)
        case "content":
            return joined_text(source.get("content"), f"{where}.content")
        case other:
            raise wrong(f"{where}.type", other, f"'text' or 'content': {NO_IMAGES}")


def _titled(block: Block, text: str, where: str) -> str:
    heads = [may(block, name, str, where, "") for name in ("title", "context")]
    if block["type"] == "search_result":
        heads.append(need(block, "source", str, where))
    return join([*filter(None, heads), text])
