"""The rules of the classes: what is set, what is refused, and what the page of metrics shows of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.flow.classes import CLASSES, Classes, next_up
from gateway.settings import GatewaySettings
from metrics.exposition import render
from metrics.instruments import Instruments
from metrics.settings import SettingsError, as_dict, load

from .http_gateway import Gateway


def loaded(tmp_path: Path, text: str) -> GatewaySettings:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return load(GatewaySettings, "gateway", file=file, environ={}, flags={})


def test_a_class_is_set_in_a_table_of_its_own_and_keeps_its_other_defaults(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "[gateway.classes.bulk]\nmax_waiting = 7\npromote_seconds = 5")
    assert settings.classes.bulk.max_waiting == 7
    assert settings.classes.promote_seconds("bulk") == 5
    assert settings.classes.bulk.floor == Classes().bulk.floor
    assert settings.classes.default == Classes().default
    assert as_dict(settings)["classes"]["bulk"]["max_waiting"] == 7


def test_the_environment_and_flags_set_classes_too() -> None:
    settings = load(
        GatewaySettings,
        "gateway",
        file=None,
        environ={"TETRARCH_GATEWAY_CLASSES_DEFAULT_FLOOR": "0.1"},
        flags={"classes.interactive.timeout_seconds": "9"},
    )
    assert settings.classes.default.floor == 0.1
    assert settings.classes.interactive.timeout_seconds == 9


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[gateway.classes.urgent]\nfloor = 0.1", "urgent"),
        ("[gateway.classes.bulk]\nfloor = 0.6", "gateway.classes.bulk.floor"),
        ("[gateway.classes.bulk]\nmax_waiting = 0", "gateway.classes.bulk.max_waiting"),
        ("[gateway.classes.system]\npromote_seconds = 1.0", "promote_seconds"),
        ("[gateway.classes.default]\nfloor = 0.5", "add up to 0.75"),
    ],
)
def test_rules_that_cannot_be_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        loaded(tmp_path, text)


def test_floors_are_whole_places() -> None:
    classes = Classes()
    assert [classes.floor_places(name, 8) for name in CLASSES] == [1, 1, 2, 1]
    assert [classes.floor_places(name, 2) for name in CLASSES] == [0, 0, 0, 0]


def test_only_the_lower_classes_are_promoted() -> None:
    classes = Classes()
    assert [classes.promote_seconds(name) < float("inf") for name in CLASSES] == [False, False, True, True]
    assert [next_up(name) for name in CLASSES] == ["system", "system", "interactive", "default"]


async def test_health_shows_the_rules_in_force(gateway: Gateway) -> None:
    async with gateway.http.get(f"{gateway.url}/health") as response:
        classes = (await response.json())["gateway"]["settings"]["classes"]
    assert set(classes) == set(CLASSES)
    assert classes["bulk"] == {
        "floor": 0.125,
        "max_waiting": 1024,
        "timeout_seconds": 86_400.0,
        "promote_seconds": 120.0,
    }


def test_the_page_shows_the_lines_by_class() -> None:
    instruments = Instruments()
    instruments.flow.waiting("bulk", 3)
    instruments.flow.released("interactive", 0.2)
    instruments.flow.promoted("bulk")
    instruments.flow.refused("default", "queue_full")
    page = render(instruments.registry).decode()
    assert 'tetrarch_class_runs_waiting{class="bulk"} 3.0' in page
    assert 'tetrarch_class_queue_seconds_count{class="interactive"} 1.0' in page
    assert 'tetrarch_class_promotions_total{class="bulk"} 1.0' in page
    assert 'tetrarch_class_refusals_total{class="default",reason="queue_full"} 1.0' in page
