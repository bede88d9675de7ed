"""Messages to a prompt's token ids: the model's chat template, rendered as transformers renders it.

A caller's text never becomes a control token. Knows no engines, no sampling and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from msgspec import structs

from gateway.errors import GatewayError, InvalidField, shorten
from workers.messages import Grammar, TokenizerBundle

from .boundaries import PROBE, Frame, Frames
from .control_tokens import Marks
from .parsing import Reading, parameter_types, thinking_tags
from .spellings import is_system, takes_late_system, with_empty_contents, with_reminders
from .structured import CallForm, GrammarChecks, Thought, Wants
from .template import BrokenTemplate, compiled, strftime_now
from .tokenizer import AnswerPlace, PromptTokenizer, Span, span_keys
from .written import WrittenCalls, restore, said_links

INLINE_RENDER_CHARS = 32_768
"""A bigger conversation is marked and rendered in a thread."""

VALUE_CHARS = 16
"""What a value of any kind costs to walk, in characters of text."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is given. Message contents are strings; absent fields are absent, never None."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None  # chat_template_kwargs


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text. `marks` wrap the control literals that callers wrote, if there are any."""

    text: str
    marks: Marks | None = None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's ids, where its answer continues them, and its boundaries as in Submit (0: not told)."""

    token_ids: bytes  # little-endian uint32
    place: AnswerPlace
    system_tokens: int = 0
    turn_tokens: int = 0
    is_thinking: bool = False  # it ends in an open thought
    has_thought: bool = False  # it ends in a thought that is closed


@dataclass(frozen=True, slots=True)
class _Layout:
    """A rendered prompt taken apart."""

    spans: list[Span]
    frame: Frame
    said: bytes  # the digest of the messages as the caller sent them


class Prompts:
    """Renders and encodes prompts for one tokenizer bundle. Building it takes up to a second."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.tokenizer = PromptTokenizer(bundle)
        self._special_tokens = dict(bundle.special_tokens)
        self._knows_developer = "developer" in bundle.chat_template
        self._template = compiled(bundle.chat_template)
        self._is_dated = "strftime_now" in bundle.chat_template
        self._frames = Frames()
        self._written = WrittenCalls()
        self._call_form = CallForm.of(bundle.chat_template)
        self._grammars = GrammarChecks()
        self._thinking = thinking_tags(bundle.chat_template)
        self._takes_late_system = takes_late_system(self._probe_text)

    async def encode(
        self, conversation: Conversation, *, max_tokens: int, scope: bytes = b""
    ) -> EncodedPrompt:
        """The prompt's ids. Raises InvalidField when the template refuses the messages, when they cannot be
        written as UTF-8, or when more than `max_tokens` are certain without encoding, GatewayError for a
        broken template. `scope`: see `learn`.
        """
        try:
            if is_small(conversation.messages, conversation.tools, conversation.variables):
                layout = self._lay_out(conversation, max_tokens, scope)
            else:
                layout = await asyncio.to_thread(self._lay_out, conversation, max_tokens, scope)
            encoded = await self.tokenizer.encode_spans(layout.spans, max_tokens=max_tokens, scope=scope)
        except (UnicodeEncodeError, RecursionError) as error:
            problem = "are nested too deep" if isinstance(error, RecursionError) else "hold what is not UTF-8"
            raise InvalidField("messages", f"The messages {problem}.") from None
        system_end = layout.frame.system_end(encoded.keys)
        if all(span.control_id is not None for span in layout.spans[:system_end]):
            system_end = (
                0  # what opens any prompt is no system part: a checkpoint there would be one of nothing
            )
        is_thinking, has_thought = self.thought_at_end(layout.spans)
        return EncodedPrompt(
            b"".join(encoded.parts),
            replace(encoded.place, said=layout.said),
            system_tokens=encoded.num_tokens(0, system_end),
            turn_tokens=encoded.num_tokens(0, layout.frame.turn_end(encoded.keys)),
            is_thinking=is_thinking,
            has_thought=has_thought,
        )

    def thought_at_end(self, spans: Sequence[Span]) -> tuple[bool, bool]:
        """Whether a prompt of these spans ends in an open thought, and whether in one that is closed."""
        if self._thinking is None:
            return False, False
        opening, closing = self._thinking
        return _ends_in(opening, spans), _ends_in(closing, spans)

    def reading(
        self,
        prompt: EncodedPrompt,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        only_first_call: bool = False,
    ) -> Reading:
        """How the answer to a prompt is to be read; without `tools` calls are not looked for."""
        types = parameter_types(tools or ())
        return Reading(
            calls=self._call_form.format if tools else None,
            thinking=self._thinking,
            is_thinking=prompt.is_thinking,
            only_first_call=only_first_call,
            tools=types if self._call_form.format == "xml" else {name: {} for name in types},
        )

    async def grammar(self, wants: Wants, *, is_thinking: bool, has_thought: bool) -> Grammar | None:
        """What holds the answer to a prompt that ends so to its caller's wants. Raises InvalidField."""
        thought = Thought()
        if self._thinking is not None and not has_thought:
            thought = Thought("open" if is_thinking else "possible", *self._thinking)
        return await self._grammars.grammar(wants, self._call_form, thought)

    def _lay_out(self, conversation: Conversation, max_tokens: int, scope: bytes) -> _Layout:
        spans = self._spans(conversation, max_tokens)
        frame = self._frame(conversation) if self.tokenizer.by_span else Frame()
        links = said_links(conversation.messages)
        answers = self._written.remembered(conversation.messages, links, scope=scope)
        for _ in range(2):
            restored = restore(conversation.messages, answers)
            if restored is None:
                break
            as_written = Conversation(restored.messages, conversation.tools, conversation.variables)
            with contextlib.suppress(InvalidField):
                written = self._spans(as_written, max_tokens)
                if _differ_only_in(restored.spans, spans, written):
                    return _Layout(written, frame, links[-1])
                # Templates leave old thoughts out: those answers are encoded as the caller sends them.
                texts = {span.text for span in written}
                answers = {index: answer for index, answer in answers.items() if answer.span in texts}
        return _Layout(spans, frame, links[-1])

    def _spans(self, conversation: Conversation, max_tokens: int) -> list[Span]:
        rendered = self.render(conversation)
        self.tokenizer.check_length(rendered.text, max_tokens, "messages")
        return self.tokenizer.split(rendered.text, rendered.marks)

    def _frame(self, conversation: Conversation) -> Frame:
        """What the prompts of this system part share: two small renderings, once for each."""
        system = list(itertools.takewhile(is_system, conversation.messages))
        today = strftime_now("%F") if self._is_dated else ""
        made_of = repr((system, conversation.tools, conversation.variables, today))
        key = hashlib.blake2b(made_of.encode(errors="surrogatepass"), digest_size=16).digest()
        frame = self._frames.get(key)
        if frame is None:
            frame = self._probe([*system, {"role": "user", "content": PROBE}], conversation)
            self._frames.put(key, frame)
        return frame

    def _probe(self, messages: list[Message], conversation: Conversation) -> Frame:
        variables = conversation.variables or {}
        bare = {**variables, "add_generation_prompt": False}
        rendered = []
        try:
            for given in (variables, bare):
                prompt = self.render(Conversation(messages, conversation.tools, given))
                rendered.append(span_keys(self.tokenizer.split(prompt.text, prompt.marks)))
        except InvalidField:
            return Frame()
        return Frame.of(*rendered)

    def render(self, conversation: Conversation) -> Rendered:
        """The prompt's text up to where the answer starts."""
        if self._template is None:
            raise InvalidField("messages", "This model has no chat template: use /v1/completions.")
        if isinstance(self._template, BrokenTemplate):
            raise GatewayError("broken_template", self._template.message)
        messages = [self._prepare(message) for message in conversation.messages]
        if not self._takes_late_system:
            messages = with_reminders(messages)
        conversation = Conversation(messages, conversation.tools, conversation.variables)
        control = self.tokenizer.control
        marks = None
        if any(control.occur_in(text) for text in _strings(conversation)):
            marks = Marks.absent_from(_strings(conversation))
            conversation = self._mark(conversation, marks)
        try:
            return Rendered(self._fill(conversation), marks)
        except InvalidField:
            spelled_out = with_empty_contents(conversation.messages)
            if spelled_out is None:
                raise
        return Rendered(self._fill(replace(conversation, messages=spelled_out)), marks)

    async def learn(
        self,
        place: AnswerPlace,
        token_ids: Sequence[int],
        text: str,
        *,
        reading: Reading | None = None,
        scope: bytes = b"",
    ) -> None:
        """An answer is encoded as the model wrote it when it comes back as history in the same scope, its
        tool calls also when they come back taken apart as `reading` (None: as usual for this model) tells.
        """
        await self.tokenizer.learn(place, token_ids, text, scope=scope)
        if self.tokenizer.by_span:
            if reading is None:
                is_open = self._thinking is not None and place.prefix.rstrip().endswith(self._thinking[0])
                reading = Reading(thinking=self._thinking, is_thinking=is_open)
            reading = structs.replace(reading, calls=self._call_form.format)
            self._written.learn(place.prefix, text, reading, scope=scope, said_before=place.said)

    def _probe_text(self, messages: Sequence[Message]) -> str | None:
        try:
            return self._fill(Conversation(messages)) if isinstance(self._template, jinja2.Template) else None
        except InvalidField:
            return None

    def _fill(self, conversation: Conversation) -> str:
        assert isinstance(self._template, jinja2.Template)
        variables = {"documents": None, "add_generation_prompt": True, **self._special_tokens}
        variables |= conversation.variables or {}
        try:
            return self._template.render(
                messages=conversation.messages, tools=conversation.tools, **variables
            )
        except jinja2.exceptions.TemplateError as error:
            raise InvalidField(
                "messages",
                f"The model's chat template refuses these messages: {shorten(str(error), 300)}",
                kind="template_error",
            ) from None
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            # The template ran into a shape that it does not expect.
            raise InvalidField(
                "messages",
                f"The model's chat template cannot render these messages ({type(error).__name__}): "
                "check roles, contents, tools and chat_template_kwargs.",
                kind="template_error",
            ) from None

    def _prepare(self, message: Message) -> Message:
        prepared = {name: value for name, value in message.items() if value is not None}
        if prepared["role"] == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        reasoning = next((prepared[name] for name in _REASONING_NAMES if name in prepared), None)
        if reasoning is not None:
            prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
        return prepared

    def _mark(self, conversation: Conversation, marks: Marks) -> Conversation:
        messages = []
        for message in conversation.messages:
            keep_soft = message["role"] not in ("user", "tool")
            marked = self._mark_value({**message, "role": ""}, marks, keep_soft=keep_soft)
            messages.append({**marked, "role": message["role"]})
        tools = self._mark_value(conversation.tools, marks, keep_soft=False)
        variables = self._mark_value(conversation.variables, marks, keep_soft=False)
        return Conversation(messages, tools, variables)

    def _mark_value(self, value: Any, marks: Marks, *, keep_soft: bool) -> Any:
        match value:
            case str():
                return self.tokenizer.control.mark(value, marks, keep_soft=keep_soft)
            case dict():
                return {
                    self._mark_value(name, marks, keep_soft=keep_soft): self._mark_value(
                        item, marks, keep_soft=keep_soft
                    )
                    for name, item in value.items()
                }
            case list():
                return [self._mark_value(item, marks, keep_soft=keep_soft) for item in value]
            case _:
                return value


def _differ_only_in(texts: Container[str], spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether both are the same but for whole spans that read one of the texts in `others`."""
    pairs = zip(spans, others, strict=False)
    return len(spans) == len(others) and all(one == other or other.text in texts for one, other in pairs)


def _ends_in(literal: str, spans: Sequence[Span]) -> bool:
    """Whether the template, and no caller, wrote the literal as the last words of a prompt."""
    last = next((span for span in reversed(spans) if not span.text.isspace()), None)
    return last is not None and not last.is_literal and last.text.rstrip().endswith(literal)


def is_small(*values: Any) -> bool:
    """Whether walking and rendering these takes about a millisecond. Looks no further than it must."""
    left = INLINE_RENDER_CHARS
    open_values = list(values)
    while open_values and left >= 0:
        value = open_values.pop()
        left -= VALUE_CHARS
        if isinstance(value, str):
            left -= len(value)
        elif isinstance(value, dict):
            open_values += [*value, *value.values()]
        elif isinstance(value, list):
            open_values += value
    return left >= 0


def _strings(conversation: Conversation) -> Iterator[str]:
    """Every string of a caller, except roles and the fixed names of message fields."""
    for message in conversation.messages:
        for name, value in message.items():
            if name != "role":
                yield from _strings_of(value)
    yield from _strings_of(conversation.tools)
    yield from _strings_of(conversation.variables)


def _strings_of(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for name, item in value.items():
                yield name
                yield from _strings_of(item)
        case list():
            for item in value:
                yield from _strings_of(item)


class PromptLibrary:
    """One `Prompts` per tokenizer digest, built once and off the event loop.

    `normalises`: whether known volatile lines of clients are made constant first.
    """

    def __init__(self, *, normalises: bool = True) -> None:
        self.normalises = normalises
        self._building: dict[str, asyncio.Task[Prompts]] = {}

    async def get(self, digest: str, bundle: TokenizerBundle) -> Prompts:
        """The prompts of a digest. The first caller of a new one waits up to a second."""
        task = self._building.get(digest)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(asyncio.to_thread(Prompts, bundle))
            self._building[digest] = task
        return await asyncio.shield(task)
