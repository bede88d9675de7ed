"""What responses leave behind in the store: their input when they begin, their body when they end, and from
both the conversation that a later one goes on with.

Knows which caller may see what; knows no events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog

from gateway.bus import BusLost
from gateway.callers.scopes import Access
from gateway.dialects.responses.ids import item_id, item_place, run_id_of
from gateway.errors import GatewayError, InvalidField, shorten
from gateway.http.fields import bad_field
from gateway.store.responses import ResponseStore, StoredResponse, fits

from .body import RESPONSES_REMEDIES
from .items import Item, item_type

log = structlog.get_logger(__name__)

MAX_CHAIN = 2000
"""Responses of one conversation: each is read when it goes on."""

_decode_items = msgspec.json.Decoder(list[Item]).decode


class _Body(msgspec.Struct, frozen=True):
    output: list[Item] = []


_decode_body = msgspec.json.Decoder(_Body).decode


@dataclass(frozen=True, slots=True)
class History:
    """All that was said before: by whom it may be read is settled."""

    chain: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()


class ResponseNotFound(GatewayError):
    """It never was, was not stored, or has expired; or it is another tenant's (404)."""

    def __init__(self, response: str) -> None:
        super().__init__(
            "response_not_found", f"There is no response '{shorten(response)}', or it is not stored any more."
        )


def previous_not_found(response: str) -> InvalidField:
    """The conversation cannot go on from there."""
    return InvalidField(
        "previous_response_id",
        f"'previous_response_id' '{shorten(response)}' not found: it was not stored, it has not ended, or "
        "part of its conversation has expired. Send the whole conversation as 'input'.",
        kind="previous_response_not_found",
    )


@dataclass(frozen=True, slots=True)
class Shelves:
    """The store as one caller sees it."""

    store: ResponseStore
    access: Access

    async def get(self, response: str) -> StoredResponse | None:
        """The stored response; None where there is none. Raises ResponseNotFound for another tenant's and for
        a deleted one.
        """
        (found,) = await self.store.get([response])
        if found is not None and (found.is_deleted or not self.access.sees(found.tenant)):
            raise ResponseNotFound(response)
        return found

    async def put(self, response: str, stored: StoredResponse) -> None:
        """Keeps it. A store that is away now must not spoil an answer: then it is not kept."""
        try:
            await self.store.put(response, stored)
        except BusLost:
            log.warning("response_not_stored")

    async def conversation(self, response: str, last: StoredResponse) -> History:
        """All up to the end of a stored response. Raises InvalidField."""
        if len(last.chain) >= MAX_CHAIN:
            raise previous_not_found(response)
        before = await self.store.get(last.chain) if last.chain else []
        items: list[Item] = []
        for stored in [*before, last]:
            if stored is None or stored.is_deleted or not stored.body or not self.access.sees(stored.tenant):
                raise previous_not_found(response)
            items += [*_decode_items(stored.items), *_decode_body(stored.body).output]
        return History((*last.chain, response), tuple(items))

    async def resolved(self, items: Sequence[Item]) -> list[Item]:
        """The items with what references stand for in their place. Raises InvalidField."""
        found: list[Item] = []
        for index, item in enumerate(items):
            is_reference = item_type(item) == "item_reference"
            found.append(await self._referred(item, f"input[{index}].id") if is_reference else item)
        return found

    async def _referred(self, item: Item, where: str) -> Item:
        given = item.get("id")
        place = item_place(given) if isinstance(given, str) else None
        remedy = "the id of an item of a stored response: send the item itself"
        try:
            stored = await self.get(place.response) if place is not None else None
        except ResponseNotFound:
            stored = None
        if place is not None and stored is not None:
            items = _decode_items(stored.items) if place.is_input else _output(stored)
            if place.index < len(items):
                return items[place.index]
        raise bad_field(where, given, remedy=remedy, remedies=RESPONSES_REMEDIES)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is to be stored of a response while it comes to be."""

    shelves: Shelves
    response: str
    stored: StoredResponse | None  # None: nothing

    async def begin(self) -> None:
        """Its input: it may be read, and if its gateway dies its end can be put to it."""
        if self.stored is not None:
            await self.shelves.put(self.response, self.stored)

    async def end(self, body: bytes) -> None:
        """Its body, unless that is too large or it was deleted meanwhile."""
        if self.stored is None:
            return
        whole = msgspec.structs.replace(self.stored, body=body)
        try:
            if fits(whole) and await self.shelves.get(self.response) is not None:
                await self.shelves.put(self.response, whole)
        except (BusLost, ResponseNotFound):
            log.info("response_not_stored")


def _output(stored: StoredResponse) -> list[Item]:
    return _decode_body(stored.body).output if stored.body else []


def shown_items(response: str, stored: StoredResponse) -> list[Item]:
    """A response's own input as it is listed: with ids, and contents as parts."""
    return [_shown(response, index, item) for index, item in enumerate(_decode_items(stored.items))]


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def _shown(response: str, index: int, item: Item) -> Item:
    kind = item_type(item) or "message"
    own_id = item_id(_PREFIXES.get(kind, "item"), response, index, is_input=True)
    shown = {"id": own_id, "type": kind, **{name: value for name, value in item.items() if value is not None}}
    if kind == "message":
        shown.setdefault("status", "completed")
        if isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            text = {"type": part, "text": item["content"]}
            shown["content"] = [text | ({"annotations": []} if part == "output_text" else {})]
    return shown


def stored_run(response: str) -> str:
    """The run of a response's id. Raises ResponseNotFound."""
    run_id = run_id_of(response)
    if run_id is None:
        raise ResponseNotFound(response)
    return run_id
