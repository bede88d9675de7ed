"""A model's chat template, compiled as transformers compiles it: its sandbox, its options, its functions.

Knows no messages and no tokens.
"""

from __future__ import annotations

import json
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

from gateway.errors import shorten

log = structlog.get_logger(__name__)


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


def strftime_now(form: str) -> str:
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
        "strftime_now": strftime_now,
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


def compiled(source: str) -> jinja2.Template | BrokenTemplate | None:
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
