"""Access tokens: only hashes are kept, in a private file, and another process's changes count at once."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.__main__ import main
from gateway.callers.tokens import Grant, TokenError, TokenStore, grant_of, told


def test_a_token_is_found_until_it_is_revoked(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "new folder" / "tokens.json")
    phone, laptop = store.add("phone"), store.add("laptop")
    assert phone != laptop and len(phone) >= 43
    found = store.find(phone)
    assert found is not None and found.name == "phone"
    assert store.find(phone + "x") is None and store.find("") is None and store.find("\udcff") is None
    store.revoke("phone")
    assert store.find(phone) is None
    assert [token.name for token in store.tokens()] == ["laptop"]


def test_the_file_holds_no_secret_and_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    secret = TokenStore(path).add("phone")
    assert secret.encode() not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [child.name for child in tmp_path.iterdir()] == ["tokens.json"]


def test_a_running_gateway_sees_what_a_command_changed(tmp_path: Path) -> None:
    running, command = TokenStore(tmp_path / "t.json"), TokenStore(tmp_path / "t.json")
    assert running.tokens() == []
    secret = command.add("phone")
    assert running.find(secret) is not None
    command.revoke("phone")
    assert running.find(secret) is None


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb"])
def test_an_unusable_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TokenError):
        TokenStore(tmp_path / "t.json").add(name)


def test_taken_and_unknown_names_are_refused(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "t.json")
    store.add("phone")
    with pytest.raises(TokenError, match="already"):
        store.add("phone")
    with pytest.raises(TokenError, match="no token"):
        store.revoke("laptop")


@pytest.mark.parametrize(("name", "group"), [("local", ""), ("local", "x"), ("phone", "local")])
def test_nobody_takes_the_name_of_calls_without_a_token(
    tmp_path: Path, name: str, group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TokenError, match="'local'"):
        TokenStore(tmp_path / "t.json").add(name, Grant(group=group))
    options = ["--group", group, "--tokens-file", str(tmp_path / "t.json")]
    assert main(["token", "add", name, *options]) == 2
    told = capsys.readouterr()
    assert not told.out and "calls without a token" in told.err
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b'[{"name": 1}]', b"\xff"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TokenError, match=r"t\.json"):
        TokenStore(path).find("x")


def test_a_token_made_before_there_were_scopes_keeps_what_it_could_do(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('[{"name": "phone", "created": 1, "sha256": "00"}]')
    (token,) = TokenStore(path).tokens()
    assert token.scopes == ("read", "control", "approve")
    assert (token.tenant, token.calls_per_minute, token.flow_class) == ("phone", None, "default")


def test_what_is_granted_is_kept_in_full(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "t.json")
    secret = store.add("sweep", grant_of("control, read", "nightly", 600, "bulk"))
    token = TokenStore(tmp_path / "t.json").find(secret)
    assert token is not None
    assert token.scopes == ("read", "control") and token.tenant == "nightly"
    assert told(token) == "sweep  scopes=read,control  group=nightly  calls-per-minute=600  class=bulk"
    store.add("phone")
    assert '"approve"' in (tmp_path / "t.json").read_text()  # written out: a later default changes nothing


def test_a_name_does_not_join_a_group_by_chance(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "t.json")
    store.add("a", Grant(group="nightly"))
    with pytest.raises(TokenError, match="--group"):
        store.add("nightly")
    store.add("nightly", Grant(group="nightly"))
    with pytest.raises(TokenError, match="group"):
        store.add("b", Grant(group="x\ny"))


@pytest.mark.parametrize(
    ("grant", "named"),
    [
        (("read,foo", "", None, "default"), "foo"),
        ((",", "", None, "default"), "scope"),
        ((None, "", None, "huge"), "huge"),
        ((None, "", -1, "default"), "-1"),
    ],
)
def test_an_unusable_grant_is_named(grant: tuple[str | None, str, int | None, str], named: str) -> None:
    with pytest.raises(TokenError, match=named):
        grant_of(*grant)


def test_the_command_tells_what_tokens_may_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--tokens-file", str(tmp_path / "t.json")]
    assert main(["token", "add", "sweep", "--scopes", "read", "--class", "bulk", *file]) == 0
    assert capsys.readouterr().out.startswith("tet-")
    assert main(["token", "add", "w", "--scopes", "all", *file]) == 2
    assert "choose from read, control, approve, admin" in capsys.readouterr().err
    assert main(["token", "list", *file]) == 0
    assert capsys.readouterr().out == "sweep  scopes=read  class=bulk\n"
