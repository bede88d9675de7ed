"""A checked request becomes an Order: which engine, which tokens, which limits.

The only validation that depends on a model. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog

from gateway.aliases import DEFAULT_MODEL, Aliases
from gateway.callers.hints import Caller
from gateway.derail.tool_loops import PastCall, past_calls
from gateway.dialects.answer import Answer, AnswerShape
from gateway.errors import InvalidField, NoEngine, context_exceeded
from gateway.flow.directory import Directory, EngineView
from gateway.runs.runs import Order
from gateway.text.prompts import (
    Conversation,
    EncodedPrompt,
    Message,
    PromptLibrary,
    Prompts,
    is_small,
)
from gateway.text.structured import Wants
from gateway.text.tokenizer import AnswerPlace, pack_token_ids
from gateway.text.volatile import normalise
from workers.messages import EngineInfo, Finished, Sampling

from .api import ChatRequest, CommonRequest, CompletionRequest
from .fields import MAX_NESTING, bad_field, is_deep
from .wanting import wants_of

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An order, and what learns its answer later: `prompts`, as what continues `place`."""

    order: Order
    prompts: Prompts
    place: AnswerPlace | None = None  # None: no chat, so its answer does not come back as a message
    scope: bytes = b""
    result_schema: bytes = b""  # that the answer is held to, as JSON; b"": none

    async def learn(self, answer: Answer) -> None:
        """The agent's next prompt holds this answer as text: its ids shall be those in the cache. A further
        turn's, as of a steered call, are not learned: they stand behind a prompt that its caller never sends.
        """
        if self.place is not None and answer.turn == 1 and isinstance(answer.turn_end, Finished):
            reading = answer.shape.reading
            await self.prompts.learn(
                self.place, answer.token_ids, answer.text, reading=reading, scope=self.scope
            )


def find_engine(directory: Directory, model: str | None, aliases: Aliases) -> EngineView:
    """A living engine for the model, told by its id or an alias; absent or "default" means the only one.

    Raises UnknownModel, NoEngine, and InvalidField where the only one is meant and there are several.
    """
    named = model or DEFAULT_MODEL
    known = {view.info.model_id for view in directory.engines()}
    if named not in known:
        named = aliases.model(named) or named
    if named != DEFAULT_MODEL:
        return directory.find(named if named in known else str(model))
    models = sorted({view.info.model_id for view in directory.engines() if view.alive})
    if not models:
        raise NoEngine("No engine is running now. It may be starting: try again in a few seconds.")
    if len(models) > 1:
        raise InvalidField("model", f"'model' must be one of {', '.join(models)}.")
    return directory.find(models[0])


async def prepare_chat(
    request: ChatRequest, caller: Caller, engine: EngineView, library: PromptLibrary
) -> Prepared:
    """The order of a chat call. Raises InvalidField."""
    wants = await wants_in(request, wants_of)
    prompts, prompt = await encode_chat(request, caller, engine, library, engine.info.context_length)
    thinks = {"is_thinking": prompt.is_thinking, "has_thought": prompt.has_thought}
    grammar = await prompts.grammar(wants, **thinks)
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    shape = AnswerShape(
        endpoint=request.endpoint,
        echo=request.echoed,
        stream=request.stream,
        include_usage=request.include_usage,
        logprobs=request.logprobs,
        tenant=caller.tenant,
        reading=prompts.reading(
            prompt, request.callable_tools, only_first_call=not request.parallel_tool_calls
        ),
    )
    order = _order(request, caller, engine, prompt.token_ids, top_logprobs, shape)
    order = replace(
        order,
        system_tokens=prompt.system_tokens,
        turn_tokens=prompt.turn_tokens,
        grammar=grammar,
        past_calls=await _past_calls(request),
    )
    schema = b"" if wants.answer is None else msgspec.json.encode(wants.answer.schema)
    return Prepared(order, prompts, prompt.place, caller.scope, schema)


async def _past_calls(request: ChatRequest) -> tuple[PastCall, ...]:
    if is_small(request.raw_messages):
        return past_calls(request.raw_messages)
    return await asyncio.to_thread(past_calls, request.raw_messages)


async def wants_in(request: ChatRequest, read: Callable[[ChatRequest], Wants]) -> Wants:
    """What a chat request demands, read off the event loop where its schemas are large."""
    form = request.response_format
    schema = form.json_schema.schema if form is not None and form.json_schema is not None else None
    if is_small(request.raw_tools, schema):
        return read(request)
    return await asyncio.to_thread(read, request)


async def encode_chat(
    request: ChatRequest, caller: Caller, engine: EngineView, library: PromptLibrary, max_tokens: int
) -> tuple[Prompts, EncodedPrompt]:
    """A chat call's prompt, and who made it. Raises InvalidField, also where more tokens are certain."""
    if is_small(request.raw_messages):
        messages = template_messages(request.raw_messages)
    else:
        messages = await asyncio.to_thread(template_messages, request.raw_messages)
    if library.normalises:
        messages = _normalise(messages)
    prompts = await library.get(engine.info.digest, engine.tokenizer)
    conversation = Conversation(messages, request.tools_in_use, request.chat_template_kwargs)
    return prompts, await prompts.encode(conversation, max_tokens=max_tokens, scope=caller.scope)


async def prepare_completion(
    request: CompletionRequest, caller: Caller, engine: EngineView, library: PromptLibrary
) -> Prepared:
    """The order of a text completion. Raises InvalidField."""
    prompts = await library.get(engine.info.digest, engine.tokenizer)
    prompt = _only_prompt(request.prompt, engine.info.context_length)
    if isinstance(prompt, str):
        token_ids = await prompts.tokenizer.encode_raw(prompt, max_tokens=engine.info.context_length)
    else:
        _check_ids(prompt, "prompt", engine.info)
        token_ids = pack_token_ids(prompt)
    shape = AnswerShape(
        endpoint="text",
        stream=request.stream,
        include_usage=request.include_usage,
        logprobs=request.logprobs is not None,
        tenant=caller.tenant,
    )
    order = _order(request, caller, engine, token_ids, request.logprobs, shape)
    return Prepared(order, prompts)


def _normalise(messages: list[Message]) -> list[Message]:
    normalised = normalise(messages)
    if normalised.counts:
        log.info("prompt_normalised", **normalised.counts)
    return normalised.messages


def _order(
    request: CommonRequest,
    caller: Caller,
    engine: EngineView,
    token_ids: bytes,
    top_logprobs: int | None,
    shape: AnswerShape,
) -> Order:
    room = _room(len(token_ids) // 4, engine.info.context_length, shape)
    wanted = getattr(request, "max_completion_tokens", None) or request.max_tokens or room
    _check_ids(request.stop_token_ids, "stop_token_ids", engine.info)
    if len(request.stop_token_ids) > engine.info.vocab_size:
        raise bad_field("stop_token_ids", request.stop_token_ids)
    return Order(
        engine=engine,
        token_ids=token_ids,
        max_tokens=min(wanted, room),
        sampling=_sampling(request, engine.info, top_logprobs),
        stop=request.stops,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        stops_derailed=not request.ignore_eos,  # who wants all tokens wants those of a cycle too
        tenant=caller.tenant,
        namespace=caller.namespace,
        hints=caller.hints,
        flow=caller.flow,
        request=msgspec.msgpack.encode(shape),
    )


def _room(num_prompt_tokens: int, context_length: int, shape: AnswerShape) -> int:
    """How many tokens the answer may have."""
    param = "prompt" if shape.endpoint == "text" else "messages"
    if num_prompt_tokens == 0:
        raise InvalidField(param, f"'{param}' makes an empty prompt: it must have at least one token.")
    if num_prompt_tokens >= context_length:
        raise context_exceeded(param, str(num_prompt_tokens), context_length)
    return context_length - num_prompt_tokens


def _sampling(request: CommonRequest, info: EngineInfo, top_logprobs: int | None) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=min(request.top_k, info.vocab_size),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_logit_bias(request.logit_bias, info),
        # Negative seeds are as good as others; 63 bits fit every reader.
        seed=None if request.seed is None else request.seed & (2**63 - 1),
        top_logprobs=top_logprobs,
    )


def _logit_bias(bias: Mapping[str, float], info: EngineInfo) -> dict[int, float]:
    token_ids = {}
    for name, value in bias.items():
        if not name.isascii() or not name.isdigit() or len(name) > 10 or int(name) >= info.vocab_size:
            remedy = f"an object whose names are token ids from 0 to {info.vocab_size - 1}"
            raise bad_field("logit_bias", name, remedy=remedy)
        token_ids[int(name)] = value
    return token_ids


def _check_ids(token_ids: list[int], param: str, info: EngineInfo) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < info.vocab_size:
            raise bad_field(param, token_id, remedy=f"token ids from 0 to {info.vocab_size - 1}")


def _only_prompt(prompt: str | list[Any], context_length: int) -> str | list[int]:
    """The single prompt in any of its spellings: "text", ["text"], [1, 2], [[1, 2]]."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and len(prompt) >= context_length:
        raise context_exceeded("prompt", str(len(prompt)), context_length)
    if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
        raise bad_field("prompt", prompt, remedy="one prompt per call: a string or a list of token ids")
    return prompt


def template_messages(messages: list[Message]) -> list[Message]:
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: Message) -> Message:
    """The message as templates expect it: content as one string, call arguments as objects."""
    param = f"messages[{index}].content"
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise bad_field(param, None, remedy="a string or a list of text parts")
    shaped = {**message, "content": _join_parts(content, param) if isinstance(content, list) else content}
    if message.get("tool_calls"):
        shaped["tool_calls"] = [_template_call(call) for call in message["tool_calls"]]
    return shaped


def _join_parts(parts: list[dict[str, Any]], param: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        if part.get("type") != "text":
            where = f"{param}[{index}].type"
            raise bad_field(where, part.get("type"), remedy="'text': this model reads text only")
        if not isinstance(part.get("text"), str):
            raise bad_field(f"{param}[{index}].text", part.get("text"), remedy="a string")
        texts.append(part["text"])
    return "".join(texts)


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are not JSON, or not JSON that a body may hold, stay the text that the model wrote."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)  # refuses lone surrogates and NaN
        except (msgspec.DecodeError, RecursionError):
            return call
    if not isinstance(arguments, dict) or is_deep(arguments, MAX_NESTING):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
