"""Messages to a prompt's token ids: the model's chat template, rendered as transformers renders it.

A caller's text never becomes a control token. Knows no engines, no sampling and no HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import structlog
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from workers.messages import TokenizerBundle

from .control_tokens import Marks
from .errors import GatewayError, InvalidField, shorten
from .tokenizer import PromptTokenizer

INLINE_RENDER_CHARS = 32_768
"""A bigger conversation is marked and rendered in a thread."""

VALUE_CHARS = 16
"""What a value of any kind costs to walk, in characters of text."""

log = structlog.get_logger(__name__)

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
    """A prompt's ids, and the plain text that its answer continues (after the last control token)."""

    token_ids: bytes  # little-endian uint32
    answer_prefix: str = ""


class _Generation(Extension):
    """`{% generation %}` frames the assistant's words for training; a prompt ignores the frame."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it without ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """jinja2's namespace without underscore names, through which templates have left the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the template stores the underscore name {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position or name
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _PlainDict:
    """`dict(...)` in templates, without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def compile_template(source: str) -> jinja2.Template:
    """The template in transformers' sandbox and with its options. Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _PlainDict(),
        "namespace": _PlainNamespace,
    }
    return environment.from_string(source)


@dataclass(frozen=True, slots=True)
class BrokenTemplate:
    """A chat template that does not compile: `where` and why."""

    where: str
    problem: str

    @property
    def message(self) -> str:
        """What callers of chat are told."""
        return (
            f"This model's chat template is broken ({self.where}: {self.problem}). Correct it in the model's "
            "tokenizer_config.json or chat_template.jinja and restart the engine; /v1/completions works."
        )


def _compiled(source: str) -> jinja2.Template | BrokenTemplate | None:
    """None: there is none. A broken one is logged, once: it breaks chat, and nothing else."""
    if not source:
        return None
    try:
        return compile_template(source)
    except jinja2.exceptions.TemplateSyntaxError as error:
        broken = BrokenTemplate(f"line {error.lineno}", shorten(error.message or "not a template", 200))
    except (jinja2.exceptions.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        broken = BrokenTemplate("as a whole", type(error).__name__)
    log.warning("chat_template_broken", where=broken.where, problem=broken.problem)
    return broken


class Prompts:
    """Renders and encodes prompts for one tokenizer bundle. Building it takes up to a second."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.tokenizer = PromptTokenizer(bundle)
        self._special_tokens = dict(bundle.special_tokens)
        self._knows_developer = "developer" in bundle.chat_template
        self._template = _compiled(bundle.chat_template)

    async def encode(
        self, conversation: Conversation, *, max_tokens: int, scope: bytes = b""
    ) -> EncodedPrompt:
        """The prompt's ids. Raises InvalidField when the template refuses the messages, when they cannot be
        written as UTF-8, or when more than `max_tokens` are certain without encoding, GatewayError for a
        broken template. `scope`: see `learn`.
        """
        try:
            if is_small(conversation.messages, conversation.tools, conversation.variables):
                rendered = self.render(conversation)
            else:
                rendered = await asyncio.to_thread(self.render, conversation)
            self.tokenizer.check_length(rendered.text, max_tokens, "messages")
            token_ids = await self.tokenizer.encode_prompt(
                rendered.text, rendered.marks, max_tokens=max_tokens, scope=scope
            )
        except (UnicodeEncodeError, RecursionError) as error:
            problem = "are nested too deep" if isinstance(error, RecursionError) else "hold what is not UTF-8"
            raise InvalidField("messages", f"The messages {problem}.") from None
        return EncodedPrompt(token_ids, self._answer_prefix(rendered.text))

    def render(self, conversation: Conversation) -> Rendered:
        """The prompt's text up to where the answer starts."""
        if self._template is None:
            raise InvalidField("messages", "This model has no chat template: use /v1/completions.")
        if isinstance(self._template, BrokenTemplate):
            raise GatewayError("broken_template", self._template.message)
        messages = [self._prepare(message) for message in conversation.messages]
        conversation = Conversation(messages, conversation.tools, conversation.variables)
        control = self.tokenizer.control
        marks = None
        if any(control.occur_in(text) for text in _strings(conversation)):
            marks = Marks.absent_from(_strings(conversation))
            conversation = self._mark(conversation, marks)
        try:
            return Rendered(self._fill(conversation), marks)
        except InvalidField:
            spelled_out = _with_empty_contents(conversation)
            if spelled_out is None:
                raise
        return Rendered(self._fill(spelled_out), marks)

    def learn(self, answer_prefix: str, token_ids: Sequence[int], text: str, *, scope: bytes = b"") -> None:
        """An answer is encoded as the model wrote it when it comes back as history in the same scope."""
        self.tokenizer.learn(answer_prefix, token_ids, text, scope=scope)

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

    def _answer_prefix(self, text: str) -> str:
        """The prompt's plain text after its last control token: the answer continues that span."""
        ends = [found.end() for found in self.tokenizer.control.hard_pattern.finditer(text[-200:])]
        return text[-200:][ends[-1] :] if ends else ""


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


def _with_empty_contents(conversation: Conversation) -> Conversation | None:
    """The content "" where an assistant only calls tools; None where no message is such."""
    is_bare = [
        message["role"] == "assistant" and bool(message.get("tool_calls")) and "content" not in message
        for message in conversation.messages
    ]
    if not any(is_bare):
        return None
    messages = [
        {**message, "content": ""} if bare else message
        for message, bare in zip(conversation.messages, is_bare, strict=True)
    ]
    return Conversation(messages, conversation.tools, conversation.variables)


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
    """One `Prompts` per tokenizer digest, built once and off the event loop."""

    def __init__(self) -> None:
        self._building: dict[str, asyncio.Task[Prompts]] = {}

    async def get(self, digest: str, bundle: TokenizerBundle) -> Prompts:
        """The prompts of a digest. The first caller of a new one waits up to a second."""
        task = self._building.get(digest)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(asyncio.to_thread(Prompts, bundle))
            self._building[digest] = task
        return await asyncio.shield(task)
