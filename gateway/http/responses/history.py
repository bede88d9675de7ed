"""What responses leave behind in the store: their input when they begin, their body when they end, and from
both the conversation that a later one goes on with.

Knows which caller may see what; knows no events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import structlog

from gateway.bus import BusLost
from gateway.callers.scopes import Access
from gateway.dialects.responses.ids import ItemPlace, item_id, item_place, run_id_of
from gateway.errors import GatewayError, InvalidField, shorten
from gateway.http.api import INLINE_BODY_BYTES
from gateway.http.fields import bad_field
from gateway.store.responses import ResponseStore, StoredResponse, fits

from .body import RESPONSES_REMEDIES
from .items import Item, item_type

log = structlog.get_logger(__name__)

MAX_CHAIN = 2000
"""Responses of one conversation: each is read when it goes on."""

MAX_REFERRED_BYTES = 8 << 20
"""Of one body's references together: the same item may be referred to again and again."""

Read = TypeVar("Read")

_decode_items = msgspec.json.Decoder(list[Item]).decode


class _Body(msgspec.Struct, frozen=True):
    output: list[Item] = []


_decode_body = msgspec.json.Decoder(_Body).decode


@dataclass(frozen=True, slots=True)
class History:
    """All that was said before: by whom it may be read is settled."""

    chain: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class _Sides:
    """What a stored response's items are."""

    input: list[Item] = field(default_factory=list)
    output: list[Item] = field(default_factory=list)

    def find(self, item: str, place: ItemPlace) -> Item | None:
        """The item of that id. Items of the output have their ids; calls that were dropped have left gaps."""
        if place.is_input:
            return self.input[place.index] if place.index < len(self.input) else None
        return next((one for one in self.output if one.get("id") == item), None)


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
        told: list[StoredResponse] = []
        for stored in [*before, last]:
            if stored is None or stored.is_deleted or not stored.body or not self.access.sees(stored.tenant):
                raise previous_not_found(response)
            told.append(stored)
        return History((*last.chain, response), await _off_loop(_all_items, told))

    async def resolved(self, items: Sequence[Item]) -> list[Item]:
        """The items with what references stand for in their place. Raises InvalidField."""
        found: list[Item] = []
        seen: dict[str, _Sides] = {}
        room = MAX_REFERRED_BYTES
        for index, item in enumerate(items):
            if item_type(item) != "item_reference":
                found.append(item)
                continue
            where = f"input[{index}].id"
            referred = await self._referred(item, where, seen)
            room -= len(msgspec.json.encode(referred))
            if room < 0:
                remedy = f"left out: all that is referred to has more than {MAX_REFERRED_BYTES} bytes"
                raise bad_field(where, item.get("id"), remedy=remedy, remedies=RESPONSES_REMEDIES)
            found.append(referred)
        return found

    async def _referred(self, item: Item, where: str, seen: dict[str, _Sides]) -> Item:
        given = item.get("id")
        place = item_place(given) if isinstance(given, str) else None
        if isinstance(given, str) and place is not None:
            if place.response not in seen:
                seen[place.response] = await self._sides(place.response)
            found = seen[place.response].find(given, place)
            if found is not None:
                return found
        remedy = "the id of an item of a stored response: send the item itself"
        raise bad_field(where, given, remedy=remedy, remedies=RESPONSES_REMEDIES)

    async def _sides(self, response: str) -> _Sides:
        try:
            stored = await self.get(response)
        except ResponseNotFound:
            stored = None
        return _Sides() if stored is None else await _off_loop(_sides_of, [stored])


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
            is_kept = fits(whole) and await self.shelves.store.end(self.response, whole)
        except BusLost:
            is_kept = False
        if not is_kept:
            log.info("response_not_stored")


async def _off_loop(read: Callable[[list[StoredResponse]], Read], stored: list[StoredResponse]) -> Read:
    """Reads in a thread where there is much to read."""
    if sum(len(one.items) + len(one.body) for one in stored) <= INLINE_BODY_BYTES:
        return read(stored)
    return await asyncio.to_thread(read, stored)


def _all_items(stored: list[StoredResponse]) -> tuple[Item, ...]:
    return tuple(item for one in stored for item in (*_decode_items(one.items), *_output(one)))


def _sides_of(stored: list[StoredResponse]) -> _Sides:
    return _Sides(_decode_items(stored[0].items), _output(stored[0]))


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
