"""A model whose chat template does not compile: chat calls are told why, text completions work."""

from __future__ import annotations

import msgspec
import pytest

from tests.conftest import Logged

from .fake_runs import engine_view
from .http_gateway import HELLO, TEXT, Gateway
from .samples import chatml_bundle

BROKEN = {
    "{% for m in messages %}\n{{ m['content'] }\n{% endfor %}": "line 2: ",
    "{% for m in messages %}\n{{ m['content'] }}": "line 2: Unexpected end of template",
    "\n\n{% nonsense %}": "line 3: Encountered unknown tag 'nonsense'",
    "{{ x | no_such_filter }}": "line 1: No filter named 'no_such_filter'",
    "{{ " + "(" * 5000 + " }}": "as a whole: RecursionError",
}


@pytest.mark.parametrize("template", BROKEN, ids=["brace", "end", "tag", "filter", "depth"])
async def test_a_broken_template_is_named_and_breaks_chat_alone(
    gateway: Gateway, logged: Logged, template: str
) -> None:
    bundle = msgspec.structs.replace(chatml_bundle(), chat_template=template)
    gateway.directory.views = [engine_view(bundle)]
    for stream in (False, True):
        status, body = await gateway.post({**HELLO, "stream": stream})
        assert status == 500, body
        assert body["error"]["code"] == "broken_template"
        assert BROKEN[template] in body["error"]["message"]
        assert "chat template" in body["error"]["message"]
        assert "\n" not in body["error"]["message"]
    assert (await gateway.post({"prompt": "x"}, TEXT))[0] == 200
    (line,) = logged.lines("chat_template_broken")
    assert f"{line['where']}: {line['problem']}".startswith(BROKEN[template])
    assert not logged.lines("incident")
