"""How a chat goes on behind tokens that are there already: for further turns of a run, and for forks.

The prompt so far stays as it is, id by id; the template tells what closes an answer and opens the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.aliases import Aliases
from gateway.callers.hints import Caller, Hints, Names
from gateway.dialects.answer import AnswerShape
from gateway.errors import Conflict, InvalidField, context_exceeded
from gateway.flow.directory import Directory
from gateway.flow.places import Order
from gateway.runs.spec import RunSpec
from gateway.runs.talk import Begun
from gateway.text.prompts import Conversation, Message, PromptLibrary, Prompts, Rendered, is_small
from gateway.text.structured import Wants
from gateway.text.tokenizer import unpack_token_ids

from .api import ChatRequest, JsonSchemaFormat, ResponseFormat, parse_chat
from .requests import Prepared, find_engine, prepare_chat, template_messages, wants_in
from .wanting import later_wants_of, wants_of

PROBE_ANSWER = "Zq7xW4"
"""An answer's text that no template changes and that occurs nowhere else in a rendering."""

_decode_shape = msgspec.msgpack.Decoder(AnswerShape).decode
_decode_request = msgspec.json.Decoder(ChatRequest).decode


@dataclass(frozen=True, slots=True)
class _Suffix:
    """What follows an answer: up to the next one's beginning, and up to before its generation prompt."""

    whole: Rendered
    bare: Rendered


class ChatConversation:
    """One chat's way of going on. `most_tokens`: the limit of an answer as its caller gave it, if any."""

    def __init__(self, request: ChatRequest, prompts: Prompts, most_tokens: int | None) -> None:
        self._prompts = prompts
        self._tools = request.tools_in_use
        self._variables = dict(request.chat_template_kwargs)
        self._most_tokens = most_tokens
        # Few calls go on, and what they demand may take long to read.
        self._request = msgspec.structs.replace(request, messages=[], raw_messages=[], echoed={})
        self._wants: Wants | None = None  # for further turns, once there is one

    @classmethod
    def of(cls, request: ChatRequest, prepared: Prepared) -> ChatConversation:
        """Of a prepared call."""
        return cls(request, prepared.prompts, request.max_completion_tokens or request.max_tokens)

    async def extend(self, order: Order, token_ids: bytes, added: Sequence[bytes]) -> Order:
        """`order` for another turn behind `token_ids`. Raises InvalidField or Conflict `cannot_continue`."""
        messages = template_messages([msgspec.json.decode(message) for message in added])
        return await self.extend_with(order, token_ids, messages)

    async def extend_with(
        self,
        order: Order,
        token_ids: bytes,
        messages: Sequence[Message],
        wants: Wants | None = None,
        *,
        behind_answer: bool = True,
    ) -> Order:
        """The same for messages as templates expect them. `wants`: None for those of further turns; not
        `behind_answer`: the tokens end where a message has ended.
        """
        if is_small(*messages):
            suffix = self._suffix(messages, behind_answer=behind_answer)
        else:
            suffix = await asyncio.to_thread(self._suffix, messages, behind_answer=behind_answer)
        shape = _decode_shape(order.request)
        closing = await self._closing_of_thought(shape, token_ids) if behind_answer else ""
        context = order.engine.info.context_length
        whole = await self._encode(closing, suffix.whole, token_ids, context)
        bare = await self._encode(closing, suffix.bare, token_ids, context)
        prompt = token_ids + whole
        if len(prompt) // 4 >= context:
            raise context_exceeded("messages", str(len(prompt) // 4), context)
        room = context - len(prompt) // 4
        spans = self._prompts.tokenizer.split(suffix.whole.text, suffix.whole.marks)
        is_thinking, has_thought = self._prompts.thought_at_end(spans)
        reading = msgspec.structs.replace(shape.reading, is_thinking=is_thinking)
        return replace(
            order,
            token_ids=prompt,
            turn_tokens=(len(token_ids) + len(bare)) // 4,
            max_tokens=min(self._most_tokens or room, room),
            grammar=await self._prompts.grammar(
                wants or await self._later_wants(), is_thinking=is_thinking, has_thought=has_thought
            ),
            request=msgspec.msgpack.encode(msgspec.structs.replace(shape, reading=reading)),
        )

    def kept_tokens(self, token_ids: bytes, text: str) -> int:
        """How many of an answer's first tokens read `text` or less of it."""
        ids, decode = unpack_token_ids(token_ids), self._prompts.tokenizer.decode
        low, high = 0, len(ids)
        while low < high:  # the text grows with the ids
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(decode(ids[:middle])) <= len(text) else (low, middle - 1)
        while low and not text.startswith(decode(ids[:low])):
            low -= 1  # half a character, or a token that reads other than it was written
        return low

    async def _later_wants(self) -> Wants:
        if self._wants is None:
            self._wants = await wants_in(self._request, later_wants_of)
        return self._wants

    async def _closing_of_thought(self, shape: AnswerShape, token_ids: bytes) -> str:
        """The closing tag for a thought that was cut off: a later turn would take itself to be thought."""
        thinking = shape.reading.thinking
        if thinking is None:
            return ""
        opened, closed = [_last_of(token_ids, await self._ids(tag)) for tag in thinking]
        return f"\n{thinking[1]}\n\n" if opened > closed else ""

    async def _ids(self, text: str) -> bytes:
        tokenizer = self._prompts.tokenizer
        encoded = await tokenizer.encode_spans(tokenizer.split(text, None), max_tokens=len(text))
        return b"".join(encoded.parts)

    async def _encode(self, closing: str, suffix: Rendered, before: bytes, max_tokens: int) -> bytes:
        """Without the control token that ends the answer already."""
        tokenizer = self._prompts.tokenizer
        spans = tokenizer.split(suffix.text, suffix.marks)
        encoded = await tokenizer.encode_spans(spans, max_tokens=max_tokens)
        ids = b"".join(encoded.parts)
        if spans and spans[0].control_id is not None and before[-4:] == encoded.parts[0]:
            return ids[4:]
        if not closing:
            return ids
        return await self._ids(closing) + ids

    def _suffix(self, messages: Sequence[Message], *, behind_answer: bool) -> _Suffix:
        """By a probe: a small chat with a known answer, rendered without and with what follows it."""
        answer, mark = _probe_answer(messages)
        plain = {"role": "assistant", "content": PROBE_ANSWER}
        end = self._after([plain], PROBE_ANSWER, generation=False).text
        closed = self._after([answer], mark, generation=False).text
        whole = self._after([answer, *messages], mark, generation=True)
        bare = self._after([answer, *messages], mark, generation=False)
        if not behind_answer:
            if not (whole.text.startswith(closed) and bare.text.startswith(closed)):
                raise _not_shown()
            end = ""
        return _Suffix(_joined(end, closed, whole), _joined(end, closed, bare))

    def _after(self, messages: Sequence[Message], mark: str, *, generation: bool) -> Rendered:
        """What a rendering holds behind the mark. Raises InvalidField where the template refuses."""
        asked: Message = {"role": "user", "content": "?"}
        variables = {**self._variables, "add_generation_prompt": generation}
        rendered = self._prompts.render(Conversation([asked, *messages], self._tools, variables))
        _, found, rest = rendered.text.rpartition(mark)
        if not found:
            raise _not_shown()
        return Rendered(rest, rendered.marks)


def _not_shown() -> Conflict:
    message = "The model's chat template does not show answers as they are: send another call."
    return Conflict("cannot_continue", message)


def _last_of(token_ids: bytes, wanted: bytes) -> int:
    """How many tokens there are up to where these stand last, their first included; 0: they do not."""
    end = len(token_ids)
    while (start := token_ids.rfind(wanted, 0, end)) % 4 > 0 and start >= 0:
        end = start + len(wanted) - 1
    return start // 4 + 1 if start >= 0 else 0


def _joined(end: str, closed: str, rendered: Rendered) -> Rendered:
    """An answer's own end, then what follows a closed answer in the rendering."""
    if not rendered.text.startswith(closed):
        return rendered
    return Rendered(end + rendered.text.removeprefix(closed), rendered.marks)


def _probe_answer(messages: Sequence[Message]) -> tuple[Message, str]:
    """An answer before these messages, and the last text in it: results need the calls that they answer."""
    results = [message for message in messages if message["role"] == "tool"]
    if not results:
        return {"role": "assistant", "content": PROBE_ANSWER}, PROBE_ANSWER
    calls = [_probe_call(result) for result in results]
    return {"role": "assistant", "content": "", "tool_calls": calls}, PROBE_ANSWER


def _probe_call(result: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": result.get("name") or "tool", "arguments": {"probe": PROBE_ANSWER}}
    return {"id": result.get("tool_call_id") or "call", "type": "function", "function": function}


class ChatTalk:
    """Makes detached runs out of chat requests."""

    def __init__(self, directory: Directory, library: PromptLibrary, aliases: Aliases) -> None:
        self._directory = directory
        self._library = library
        self._aliases = aliases

    async def begin(self, spec: RunSpec, parent_ids: bytes | None) -> Begun:
        """The first turn of a run. Raises GatewayError for a body that cannot be taken."""
        request = _request_of(spec)
        if spec.result_schema:
            request = _held_to(request, spec.result_schema)
        engine = find_engine(self._directory, request.model, self._aliases)
        behind_system = spec.fork is not None and spec.fork.checkpoint == "system"
        whole = _with_system(request) if behind_system else request
        prepared = await prepare_chat(whole, _caller(spec), engine, self._library)
        conversation = ChatConversation.of(request, prepared)
        order = prepared.order
        if parent_ids is not None and behind_system:
            order = _behind_system(order, parent_ids)
        elif parent_ids is not None:
            messages = template_messages(request.raw_messages)
            between = spec.fork is not None and spec.fork.is_between_messages
            order = await conversation.extend_with(
                order, parent_ids, messages, await wants_in(request, wants_of), behind_answer=not between
            )
            order = replace(order, system_tokens=0)
        has_own_limit = spec.deadline is not None or spec.queue_ttl_ms is not None
        flow = replace(order.flow, deadline=spec.deadline, has_own_limit=has_own_limit)
        order = replace(order, flow=flow)
        return Begun(order, conversation, prepared.result_schema)


def kept_body(request: ChatRequest) -> bytes:
    """A call's request for a gateway that takes it over; how its answer is told is kept with its events. b""
    for one that JSON cannot hold.
    """
    kept = msgspec.structs.replace(request, messages=request.messages[:1], echoed={})
    try:
        return msgspec.json.encode(kept)
    except OverflowError:
        return b""


def _request_of(spec: RunSpec) -> ChatRequest:
    """What a detached run or call was asked. Raises InvalidField."""
    if spec.is_background:
        return _decode_request(spec.body)
    return msgspec.structs.replace(parse_chat(spec.body), endpoint="run", stream=True)


def _with_system(request: ChatRequest) -> ChatRequest:
    """With a system text, in place of the parent's. Raises InvalidField for one that has its own."""
    role = request.raw_messages[0]["role"]
    if role in ("system", "developer"):
        message = (
            f"'messages[0].role' is '{role}', but a fork at 'system' has its parent's text: leave it out."
        )
        raise InvalidField("messages[0].role", message)
    stand_in = {"role": "system", "content": PROBE_ANSWER}
    return msgspec.structs.replace(request, raw_messages=[stand_in, *request.raw_messages])


def _behind_system(own: Order, parent_ids: bytes) -> Order:
    """The prompt with the parent's system part in place of its own. Raises InvalidField or Conflict."""
    cut, num_parent = 4 * own.system_tokens, len(parent_ids) // 4
    if not cut or own.token_ids[cut - 4 : cut] != parent_ids[-4:]:
        message = "The model's chat template does not tell its system part from what follows."
        raise Conflict("cannot_continue", message)
    token_ids, context = parent_ids + own.token_ids[cut:], own.engine.info.context_length
    if len(token_ids) // 4 >= context:
        raise context_exceeded("messages", str(len(token_ids) // 4), context)
    return replace(
        own,
        token_ids=token_ids,
        system_tokens=num_parent,
        turn_tokens=own.turn_tokens and own.turn_tokens - own.system_tokens + num_parent,
        max_tokens=min(own.max_tokens, context - len(token_ids) // 4),
    )


def _held_to(request: ChatRequest, result_schema: bytes) -> ChatRequest:
    """A result's schema is that of the answer, unless the body has one of its own."""
    form = request.response_format
    if form is not None and form.type != "text":
        return request
    schema = JsonSchemaFormat("result", msgspec.json.decode(result_schema))
    return msgspec.structs.replace(
        request, response_format=ResponseFormat("json_schema", schema), schema_field="result_schema"
    )


def _caller(spec: RunSpec) -> Caller:
    hints = Hints(
        names=Names(spec.session, spec.agent, spec.parent),
        fork_tokens=spec.fork.num_tokens if spec.fork is not None else 0,
        expects=spec.expects,
        is_final=spec.is_final,
        retain=spec.retain,
        flow_class=spec.flow_class,
        priority=spec.priority,
        expected_output_tokens=spec.expected_output_tokens or None,
    )
    return Caller(spec.tenant, hints, spec.namespace)
