from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from gateway.settings import GatewaySettings
from metrics.settings import (
    PROCESS_VARIABLES,
    SHORT_VARIABLES,
    SettingsError,
    add_flags,
    as_dict,
    fields_of,
    given_flags,
    load,
    mask,
)
from workers.settings import EngineSettings


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """A room inside.

    bits: how keys and values
        are stored
    keep: not shown, the field has its own.
    """

    bits: Literal["8", "native"] = "8"
    keep: Annotated[bool, Meta(description="Keep prefixes.")] = True


class Room(msgspec.Struct, frozen=True, kw_only=True):
    workers: Annotated[int, Meta(ge=1, le=16, description="Streams.")] = 4
    model: Annotated[str | None, Meta(description="Which model.", extra={"variable": "TETRARCH_MODEL"})] = (
        None
    )
    seconds: float | None = None
    hosts: tuple[str, ...] = ()
    folder: Path = Path("here")
    bus_url: Annotated[str | None, Meta(extra={"variable": "TETRARCH_REDIS_URL", "secret": True})] = None
    cache: Annotated[
        Cache,
        Meta(
            extra={
                "flags": {"bits": "kv-bits", "keep": "prefix-cache"},
                "variables": {"bits": "TETRARCH_KV_BITS"},
            }
        ),
    ] = Cache()

    def __post_init__(self) -> None:
        if self.workers == 13:
            raise ValueError("13 workers would be unlucky; choose another number")


def load_room(
    file: Path | None = None, environ: dict[str, str] | None = None, flags: dict[str, str] | None = None
) -> Room:
    return load(Room, "engine", file=file, environ=environ or {}, flags=flags or {})


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_without_any_source() -> None:
    assert load_room() == Room()


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(
        tmp_path, "[engine]\nworkers = 1\nmodel = 'a'\nseconds = 1\n[engine.cache]\nbits = 'native'\n"
    )
    environ = {"TETRARCH_ENGINE_WORKERS": "2", "TETRARCH_MODEL": "b", "TETRARCH_ENGINE_CACHE_KEEP": "false"}
    room = load_room(file, environ, {"workers": "3"})
    assert (room.workers, room.model, room.seconds, room.cache) == (
        3,
        "b",
        1.0,
        Cache(bits="native", keep=False),
    )


def test_the_full_variable_wins_over_its_short_name() -> None:
    assert load_room(environ={"TETRARCH_MODEL": "short", "TETRARCH_ENGINE_MODEL": "full"}).model == "full"


def test_text_becomes_the_fields_type() -> None:
    environ = {
        "TETRARCH_ENGINE_CACHE_BITS": "8",
        "TETRARCH_ENGINE_HOSTS": "a, b",
        "TETRARCH_ENGINE_FOLDER": "x",
    }
    room = load_room(environ=environ)
    assert (room.cache.bits, room.hosts, room.folder) == ("8", ("a", "b"), Path("x"))


def test_a_number_in_the_file_may_name_a_choice(tmp_path: Path) -> None:
    assert load_room(write(tmp_path, "[engine.cache]\nbits = 8\n")).cache.bits == "8"


def test_an_empty_variable_is_unset() -> None:
    assert load_room(environ={"TETRARCH_ENGINE_WORKERS": ""}).workers == 4


def test_a_variable_may_name_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\nworkers = 7\n")
    assert load_room(environ={"TETRARCH_SETTINGS": str(file)}).workers == 7


def test_the_other_process_table_is_not_ours_to_judge(tmp_path: Path) -> None:
    assert load_room(write(tmp_path, "[gateway]\nunknown_here = 1\n")) == Room()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\nworker = 2\n", "engine.worker: unknown setting; did you mean workers?"),
        ("[engine.cache]\nbit = 2\n", "engine.cache.bit: unknown setting; did you mean bits?"),
        ("[enigne]\nworkers = 2\n", "unknown table [enigne]; did you mean engine?"),
        ("engine = 3\n", "write [engine]"),
        ("[engine]\ncache = 3\n", "engine.cache = 3 must be a table"),
        ("[engine]\nworkers = '2'\n", "engine.workers = '2': give an integer from 1 to 16"),
        ("[engine]\nworkers = 99\n", "engine.workers = 99: give an integer from 1 to 16"),
        ("[engine]\nworkers = true\n", "engine.workers = True: give an integer"),
        ("[engine]\nhosts = 'a'\n", "engine.hosts = 'a': give a list of text"),
        ("[engine.cache]\nbits = 4\n", "engine.cache.bits = 4: give one of 8, native"),
        ("[engine.cache]\nkeep = 'yes'\n", "engine.cache.keep = 'yes': give true or false"),
        ("[engine]\nworkers = 13\n", "engine settings: 13 workers would be unlucky"),
        ("[engine\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        load_room(write(tmp_path, text))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml"):
        load_room(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TETRARCH_ENGINE_WORKRES": "2"}, "TETRARCH_ENGINE_WORKRES: unknown setting; did you mean"),
        (
            {"TETRARCH_ENGINE_WORKERS": "many"},
            "TETRARCH_ENGINE_WORKERS = 'many': give an integer from 1 to 16",
        ),
        ({"TETRARCH_ENGINE_SECONDS": "soon"}, "give a number or nothing (leave it out)"),
        ({"TETRARCH_ENGINE_MODEL": "x" * 500, "TETRARCH_ENGINE_WORKERS": "y" * 500}, "yyy..."),
    ],
)
def test_a_wrong_variable_is_refused_by_name(environ: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        load_room(environ=environ)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TETRARCH_ENGIN_X", "TETRARCH_ENGIN_X: unknown setting; did you mean TETRARCH_ENGINE_"),
        ("TETRARCH_WORKRES", "did you mean TETRARCH_WORKERS?"),
        ("TETRARCH_KVBITS", "did you mean TETRARCH_KV_BITS?"),
        ("TETRARCH_", "unknown setting"),
    ],
)
def test_a_variable_of_no_process_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        load_room(environ={name: "1"})
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_rooms_inside_has_short_names_too() -> None:
    assert load_room(environ={"TETRARCH_KV_BITS": "native"}).cache.bits == "native"


def test_variables_of_other_processes_and_programs_are_not_ours_to_judge() -> None:
    environ = dict.fromkeys((*PROCESS_VARIABLES - {"TETRARCH_SETTINGS"}, *SHORT_VARIABLES), "8")
    environ |= {"TETRARCH_GATEWAY_UNKNOWN": "1", "OTHER": "1", "XTETRARCH_Y": "1", "TETRARCHY": "1"}
    assert load_room(environ=environ).cache.bits == "8"


def test_each_short_name_of_a_process_is_known_to_the_other() -> None:
    fields = [*fields_of(EngineSettings), *fields_of(GatewaySettings)]
    short = {field.variable for field in fields if field.variable} - PROCESS_VARIABLES
    assert short - {"TETRARCH_ENGINE_ID"} == SHORT_VARIABLES  # that one has the engine's own beginning


def test_a_wrong_flag_is_refused_by_its_flag_name() -> None:
    with pytest.raises(SettingsError, match=r"--kv-bits = '4': give one of 8, native"):
        load_room(flags={"cache.bits": "4"})


def test_a_required_field_is_asked_for() -> None:
    class Needy(msgspec.Struct, frozen=True, kw_only=True):
        name: str

    with pytest.raises(SettingsError, match="TETRARCH_ENGINE_NAME"):
        load(Needy, "engine", file=None, environ={}, flags={})


def parse(*arguments: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    add_flags(parser, Room)
    return given_flags(parser.parse_args(arguments), Room)


def test_flags_reach_the_settings() -> None:
    flags = parse("--workers", "2", "--kv-bits", "native", "--no-prefix-cache")
    assert flags == {"workers": "2", "cache.bits": "native", "cache.keep": "false"}
    assert load_room(flags=flags).cache == Cache(bits="native", keep=False)


def test_help_shows_meaning_default_and_choices() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Room)
    text = parser.format_help()
    assert "8|native  how keys and values are stored (default: 8)" in text.replace("\n", " ")
    assert "Keep prefixes." in text
    assert "Streams. (default: 4)" in text
    assert "--no-prefix-cache" in text


def test_the_report_holds_every_value_and_no_secret() -> None:
    report: dict[str, Any] = as_dict(Room(bus_url="rediss://user:word@host:1/0", hosts=("a",)))
    assert report["bus_url"] == "rediss://***@host:1/0"
    assert report["cache"] == {"bits": "8", "keep": True}
    assert report["folder"] == "here"


def test_masking_keeps_what_helps() -> None:
    assert mask(None) is None
    assert mask("word") == "***"
    assert mask("unix:///run/bus.sock") == "unix:///run/bus.sock"
    assert mask("unix:///run/bus.sock?password=x") == "unix:///run/bus.sock?***"


def test_a_secret_is_not_quoted_in_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refusal:
        load_room(write(tmp_path, "[engine]\nbus_url = 424242\n"))
    assert "424242" not in str(refusal.value)
