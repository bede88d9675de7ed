"""Pages of a list as OpenAI's clients turn them: `limit`, `order`, `after`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.errors import InvalidField

MAX_PAGE, USUAL_PAGE = 100, 20

Item = dict[str, Any]


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """The page that the query asks for, newest first unless it says otherwise. Raises InvalidField."""
    limit = query.get("limit", str(USUAL_PAGE))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
        raise InvalidField("limit", f"'limit' must be a whole number from 1 to {MAX_PAGE}.")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidField("order", "'order' must be 'asc' or 'desc'.")
    ordered = [*items] if order == "asc" else [*reversed(items)]
    ordered = _behind(ordered, query.get("after"))
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }


def _behind(items: list[Item], after: str | None) -> list[Item]:
    if after is None:
        return items
    index = next((index for index, item in enumerate(items) if item["id"] == after), None)
    if index is None:
        raise InvalidField("after", "'after' must be the id of an item of this list.")
    return items[index + 1 :]
