"""Loads one room's settings: flags, then TETRARCH_* variables, then a TOML table, then the struct's defaults.

It lives in metrics, the leaf that both processes share, because a setting in force is the setting reported
(DESIGN.md invariant 8): `load` and `as_dict` are the two ends of one rule. It knows no room's fields.
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

SECTIONS = ("engine", "gateway")
"""The tables a settings file may hold: one per process, nested tables for the rooms inside it."""

FILE_VARIABLE = "TETRARCH_SETTINGS"

LOCAL_BUS_VARIABLE = "TETRARCH_LOCAL_BUS"
"""The bus of this machine's `tetrarch serve`, for an engine that was told of none."""

PROCESS_VARIABLES = frozenset(
    {
        "TETRARCH_CACHE",
        "TETRARCH_HOME",
        "TETRARCH_LISTEN_FD",
        LOCAL_BUS_VARIABLE,
        FILE_VARIABLE,
        "TETRARCH_SOAK",
        "TETRARCH_SUPERVISOR_FD",
    }
)
"""Variables that are no room's setting."""

SHORT_VARIABLES = frozenset(
    {
        "TETRARCH_CONTEXT",
        "TETRARCH_HOST",
        "TETRARCH_KV_BITS",
        "TETRARCH_MEMORY",
        "TETRARCH_MODEL",
        "TETRARCH_POOL_TOKENS",
        "TETRARCH_PORT",
        "TETRARCH_REDIS_URL",
        "TETRARCH_SMALL_STATES",
        "TETRARCH_STATES",
        "TETRARCH_WEIGHTS",
        "TETRARCH_WORKERS",
    }
)
"""The rooms' short names (`extra={"variable": ...}`): each process must know those of the other."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)

Settings = TypeVar("Settings", bound=msgspec.Struct)


class SettingsError(Exception):
    """A setting that cannot be used. Its text is one line: where it came from, its value, the remedy."""


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of a settings struct. `path` is dotted below the section ("kvcache.bits")."""

    path: str
    type: Any
    default: Any  # msgspec.NODEFAULT when it must be given
    help: str
    flag: str  # without the leading dashes
    variable: str | None  # a further environment variable, fully spelled
    secret: bool
    is_size: bool = False  # bytes, which text may give as 96GB


@dataclass(frozen=True, slots=True)
class _Given:
    """A value with the words that name its source in an error."""

    value: Any
    source: str
    is_text: bool = True  # False for TOML, whose values have types of their own


def load(
    struct_type: type[Settings],
    section: str,
    *,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str],
) -> Settings:
    """The settings in force. `flags` maps dotted fields to text (see `given_flags`).

    Without `file` the variable TETRARCH_SETTINGS may name one. An empty variable counts as unset. A
    variable or flag for a list is split at commas. Raises SettingsError.
    """
    fields = {field.path: field for field in fields_of(struct_type)}
    given: dict[str, _Given] = {}
    given.update(_from_file(file_in_force(file, environ), section, struct_type))
    given.update(_from_environ(environ, section, fields))
    given.update({path: _Given(text, f"--{fields[path].flag}") for path, text in flags.items()})
    values = {path: _converted(fields[path], value) for path, value in given.items()}
    return _built(struct_type, section, values, prefix="")


def fields_of(struct_type: type[msgspec.Struct]) -> list[Field]:
    """The leaves in order. A field's `Meta` gives its `description`, and in `extra`: `flag` (another flag
    name), `variable` (a short environment alias), `secret`, `is_size`; a nested struct's `flags` and
    `variables` give its fields'. Without a description, the line `name: what it does` of the struct's
    docstring is the help.
    """
    return list(_walk(struct_type, prefix="", outer={}))


def add_flags(parser: argparse.ArgumentParser, struct_type: type[msgspec.Struct]) -> None:
    """Adds `--field-name` for each leaf; a boolean also gets `--no-field-name`."""
    group = parser.add_argument_group("settings (flags, then TETRARCH_* variables, then the file)")
    for field in fields_of(struct_type):
        text = field.help.replace("%", "%%")
        if _bare(field.type) is bool:
            _add_switch(group, field, text)
            continue
        if field.default not in (None, msgspec.NODEFAULT):
            text += f" (default: {field.default})".replace("%", "%%")
        metavar = "|".join(map(str, _choices(field.type))) or field.path.rpartition(".")[2].upper()
        group.add_argument(f"--{field.flag}", dest=field.path, metavar=metavar, help=text)


def given_flags(arguments: argparse.Namespace, struct_type: type[msgspec.Struct]) -> dict[str, str]:
    """The flags of `add_flags` that were typed, by dotted field, for `load`."""
    values = vars(arguments)
    return {f.path: values[f.path] for f in fields_of(struct_type) if values.get(f.path) is not None}


def as_dict(settings: msgspec.Struct) -> dict[str, Any]:
    """Plain values for /health and the bus; secrets are masked."""
    shown: dict[str, Any] = {}
    for field in fields_of(type(settings)):
        value: Any = settings
        for name in field.path.split("."):
            value = getattr(value, name)
        target = shown
        *tables, leaf = field.path.split(".")
        for name in tables:
            target = target.setdefault(name, {})
        target[leaf] = mask(value) if field.secret else msgspec.to_builtins(value, enc_hook=str)
    return shown


def mask(secret: Any) -> str | None:
    """A secret as a report may show it: a URL keeps scheme, host and path; else only that it is set."""
    if secret is None:
        return None
    scheme, separator, rest = str(secret).partition("://")
    if not separator:
        return "***"
    location, question, _ = rest.partition("?")
    _, at, host = location.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{host}{'?***' if question else ''}"


def _walk(struct_type: type[msgspec.Struct], prefix: str, outer: Mapping[str, Any]) -> Iterator[Field]:
    flags, variables = outer.get("flags", {}), outer.get("variables", {})
    for info in msgspec.structs.fields(struct_type):
        meta = _meta(info.type)
        extra = meta.extra or {}
        path = prefix + info.name
        nested = _bare(info.type)
        if isinstance(nested, type) and issubclass(nested, msgspec.Struct):
            yield from _walk(nested, f"{path}.", extra)
            continue
        flag = flags.get(info.name) or extra.get("flag") or path.replace(".", "-").replace("_", "-")
        yield Field(
            path=path,
            type=info.type,
            default=info.default,
            help=meta.description or _described_in(struct_type.__doc__ or "", info.name),
            flag=flag,
            variable=variables.get(info.name) or extra.get("variable"),
            secret=bool(extra.get("secret")),
            is_size=bool(extra.get("is_size")),
        )


def _described_in(docstring: str, name: str) -> str:
    match = re.search(rf"^\s*{name}: (.+?)(?=^\s*\w+: |^\s*$|\Z)", docstring, re.MULTILINE | re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def file_in_force(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The settings file: as given, else by its variable."""
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    return None if file is None else file.expanduser()


def _from_file(file: Path | None, section: str, struct_type: type[msgspec.Struct]) -> dict[str, _Given]:
    if file is None:
        return {}
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"settings file {file}: {error.strerror or error}; name a readable TOML file"
        raise SettingsError(message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {file} is not TOML: {error}") from error
    for table, value in document.items():
        if table not in SECTIONS:
            raise SettingsError(f"{file}: unknown table [{table}]; {_nearest(table, SECTIONS)}")
        if not isinstance(value, dict):
            raise SettingsError(f"{file}: {table} = {_short(value)} must be a table: write [{table}]")
    return dict(_leaves(document.get(section, {}), struct_type, f"{file}: {section}.", ""))


def _leaves(
    table: Mapping[str, Any], struct_type: type[msgspec.Struct], where: str, prefix: str
) -> Iterator[tuple[str, _Given]]:
    known = {info.name: _bare(info.type) for info in msgspec.structs.fields(struct_type)}
    for key, value in table.items():
        if key not in known:
            raise SettingsError(f"{where}{key}: unknown setting; {_nearest(key, known)}")
        nested = known[key]
        if not (isinstance(nested, type) and issubclass(nested, msgspec.Struct)):
            yield prefix + key, _Given(value, f"{where}{key}", is_text=False)
        elif isinstance(value, dict):
            yield from _leaves(value, nested, f"{where}{key}.", f"{prefix}{key}.")
        else:
            raise SettingsError(f"{where}{key} = {_short(value)} must be a table of its own")


def _from_environ(environ: Mapping[str, str], section: str, fields: Mapping[str, Field]) -> dict[str, _Given]:
    start = f"TETRARCH_{section.upper()}_"
    names = {f.variable: f.path for f in fields.values() if f.variable is not None}
    names |= {start + path.replace(".", "_").upper(): path for path in fields}
    others = tuple(f"TETRARCH_{other.upper()}_" for other in SECTIONS if other != section)
    known = sorted({*names, *PROCESS_VARIABLES, *SHORT_VARIABLES})
    for variable in environ:
        if variable.startswith("TETRARCH_") and not variable.startswith(others) and variable not in known:
            raise SettingsError(f"{variable}: unknown setting; {_nearest(variable, known)}")
    return {path: _Given(environ[name], name) for name, path in names.items() if environ.get(name)}


def _converted(field: Field, given: _Given) -> Any:
    value = _size(given.value) if field.is_size else given.value
    if given.is_text and _is_list(field.type):
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif isinstance(value, int) and str(value) in _choices(field.type):
        value = str(value)  # bits = 8 means "8"
    try:
        return msgspec.convert(value, field.type, strict=not given.is_text, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        shown = "***" if field.secret else _short(given.value)
        right = "a size like 96GB, 512MB or plain bytes" if field.is_size else _describe(field.type)
        raise SettingsError(f"{given.source} = {shown}: give {right}") from error


def _size(value: Any) -> Any:
    """Bytes of a text like 96GB, 1.5 GiB or 512MB, all powers of 2^10; anything else as it is."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    return int(float(match[1]) * 2 ** (10 * (1 + "KMGT".index(match[2].upper()))))


def _built(struct_type: type[Settings], section: str, values: Mapping[str, Any], prefix: str) -> Settings:
    members: dict[str, Any] = {}
    for info in msgspec.structs.fields(struct_type):
        path = prefix + info.name
        nested = _bare(info.type)
        if isinstance(nested, type) and issubclass(nested, msgspec.Struct):
            members[info.name] = _built(nested, section, values, f"{path}.")
        elif path in values:
            members[info.name] = values[path]
        elif info.required:
            variable = f"TETRARCH_{section}_{path}".replace(".", "_").upper()
            raise SettingsError(f"{section}.{path} must be given: set it in the file or as {variable}")
    try:
        return struct_type(**members)
    except (ValueError, TypeError) as error:  # the struct's own __post_init__
        raise SettingsError(f"{section} settings: {error}") from error


def _decode_path(target: type, value: Any) -> Any:
    if issubclass(target, Path) and isinstance(value, str):
        return Path(value).expanduser()
    raise NotImplementedError(target)


def _add_switch(group: Any, field: Field, text: str) -> None:
    on, off = (text, argparse.SUPPRESS) if field.default is not True else (argparse.SUPPRESS, text)
    group.add_argument(f"--{field.flag}", dest=field.path, action="store_const", const="true", help=on)
    group.add_argument(f"--no-{field.flag}", dest=field.path, action="store_const", const="false", help=off)


def _meta(annotation: Any) -> msgspec.Meta:
    merged = msgspec.Meta()
    if typing.get_origin(annotation) is typing.Annotated:
        for item in annotation.__metadata__:
            if isinstance(item, msgspec.Meta):
                merged = msgspec.Meta(
                    description=item.description or merged.description,
                    extra={**(merged.extra or {}), **(item.extra or {})},
                )
    return merged


def _bare(annotation: Any) -> Any:
    return annotation.__origin__ if typing.get_origin(annotation) is typing.Annotated else annotation


def _options(annotation: Any) -> tuple[Any, ...]:
    bare = _bare(annotation)
    is_union = isinstance(bare, types.UnionType) or typing.get_origin(bare) is typing.Union
    return typing.get_args(bare) if is_union else (annotation,)


def _is_list(annotation: Any) -> bool:
    kinds = [typing.get_origin(_bare(option)) for option in _options(annotation)]
    return any(kind in (tuple, list, frozenset) for kind in kinds)


def _choices(annotation: Any) -> list[Any]:
    options = [_bare(option) for option in _options(annotation)]
    return [c for o in options if typing.get_origin(o) is typing.Literal for c in typing.get_args(o)]


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}


def _describe(annotation: Any) -> str:
    """What would be right, in words: "an integer from 1 to 16", "one of auto, native, fp32"."""
    outer = _limits(annotation)
    words = []
    for option in _options(annotation):
        bare = _bare(option)
        if bare is type(None):
            words.append("nothing (leave it out)")
        elif typing.get_origin(bare) is typing.Literal:
            words.append("one of " + ", ".join(str(choice) for choice in typing.get_args(bare)))
        elif _is_list(bare):
            item = typing.get_args(bare)[0]
            words.append("a list of " + (", ".join(_choices(item)) or str(_WORDS.get(item, "values"))))
        else:
            words.append(str(_WORDS.get(bare, bare)) + (_limits(option) or outer))
    return " or ".join(words)


def _limits(annotation: Any) -> str:
    words = ""
    for item in getattr(annotation, "__metadata__", ()):
        if isinstance(item, msgspec.Meta):
            words += "".join(
                f" {word} {limit}"
                for word, limit in (
                    ("from", item.ge),
                    ("above", item.gt),
                    ("to" if item.ge is not None else "up to", item.le),
                    ("below", item.lt),
                    ("of at least", item.min_length),
                    ("matching", item.pattern),
                )
                if limit is not None
            )
    return words


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
