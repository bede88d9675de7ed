"""The example file names every setting, shows the defaults, and loads with the real loader."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from gateway.settings import SECTION as GATEWAY
from gateway.settings import GatewaySettings
from metrics.settings import fields_of, load
from workers.settings import SECTION as ENGINE
from workers.settings import EngineSettings

EXAMPLE = Path(__file__).parents[2] / "deploy" / "settings.example.toml"
ROOMS: list[tuple[str, type[msgspec.Struct]]] = [(ENGINE, EngineSettings), (GATEWAY, GatewaySettings)]


@pytest.mark.parametrize(("section", "struct_type"), ROOMS)
def test_the_example_holds_the_defaults(section: str, struct_type: type[msgspec.Struct]) -> None:
    loaded = load(struct_type, section, file=EXAMPLE, environ={}, flags={})
    assert loaded == load(struct_type, section, file=None, environ={}, flags={})


@pytest.mark.parametrize(("section", "struct_type"), ROOMS)
def test_every_setting_is_in_the_example_and_its_value_is_taken(
    section: str, struct_type: type[msgspec.Struct], tmp_path: Path
) -> None:
    uncommented = re.sub(r"^# (?=[a-z_]+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    file = tmp_path / "all.toml"
    file.write_text(uncommented)
    load(struct_type, section, file=file, environ={}, flags={})
    for field in fields_of(struct_type):
        table = tomllib.loads(uncommented)[section]
        for name in field.path.split("."):
            assert name in table, f"{field.path} is missing in {EXAMPLE.name}"
            table = table[name]
