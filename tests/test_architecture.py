"""The map as a test: who may import whom, what is pure, who reads the variables, how large files are."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "metrics": set[str](),
    "kvcache": set[str](),
    "moe": set[str](),
    "workers": {"kvcache", "moe", "metrics"},
    "gateway": {"workers", "metrics"},
}
PURE = [
    "kvcache/pool.py",
    "kvcache/tree.py",
    "kvcache/eviction.py",
    "kvcache/nodes.py",
    "kvcache/matching.py",
    "kvcache/checkpoints.py",
    "kvcache/paths.py",
    "kvcache/state_rows.py",
    "kvcache/pins.py",
    "kvcache/store.py",
    "kvcache/integrity.py",
    "kvcache/cache.py",
    "kvcache/reads.py",
    "workers/facts.py",
    "workers/messages.py",
    "workers/plan.py",
    "workers/turn.py",
    "workers/scheduler.py",
    "workers/turns.py",
    "workers/outcomes.py",
    "workers/derail.py",
    "workers/agents.py",
    "workers/cuts.py",
    "workers/drafting.py",
    "workers/gaps.py",
    "workers/leaving.py",
    "workers/line.py",
    "workers/misses.py",
    "workers/pins.py",
    "workers/places.py",
    "workers/sharing.py",
    "workers/starting.py",
    "workers/simulate_device.py",
    "workers/simulate_report.py",
    "workers/simulate_sessions.py",
    "workers/simulate_trace.py",
    "workers/pace.py",
    "workers/ledger.py",
    "workers/memory_request.py",
    "workers/architectures.py",
    "workers/config_numbers.py",
    "workers/families.py",
    "workers/parameters.py",
    "workers/scratch.py",
    "workers/shapes.py",
    "gateway/following.py",
    "gateway/runs/event_ids.py",
    "gateway/aliases.py",
    "gateway/callers/hints.py",
    "gateway/callers/kin.py",
    "gateway/callers/lineage.py",
    "gateway/callers/rates.py",
    "gateway/callers/scopes.py",
    "gateway/http/chat_tools.py",
    "gateway/http/custom_tools.py",
    "gateway/http/wanting.py",
    "gateway/text/structured/calls.py",
    "gateway/text/structured/grammars.py",
    "gateway/text/structured/lark.py",
    "gateway/text/structured/results.py",
    "gateway/text/structured/schemas.py",
    "gateway/text/structured/wants.py",
    "gateway/text/structured/written_calls.py",
    "gateway/text/parsing/__init__.py",
    "gateway/text/parsing/formats.py",
    "gateway/text/parsing/json_calls.py",
    "gateway/text/parsing/parts.py",
    "gateway/text/parsing/python_calls.py",
    "gateway/text/parsing/reader.py",
    "gateway/text/parsing/tape.py",
    "gateway/text/parsing/xml_calls.py",
    "gateway/cli/screen.py",
    "gateway/client/budgets.py",
    "gateway/client/errors.py",
    "gateway/client/fields.py",
    "gateway/client/patience.py",
    "gateway/client/sse.py",
    "gateway/derail/body.py",
    "gateway/derail/ladder.py",
    "gateway/derail/rules.py",
    "gateway/derail/text_loops.py",
    "gateway/derail/tool_loops.py",
    "gateway/dialects/answer.py",
    "gateway/dialects/custom_calls.py",
    "gateway/dialects/frames.py",
    "gateway/dialects/messages/blocks.py",
    "gateway/dialects/messages/errors.py",
    "gateway/dialects/messages/signature.py",
    "gateway/dialects/messages/teller.py",
    "gateway/dialects/openai.py",
    "gateway/dialects/responses/echo.py",
    "gateway/dialects/responses/ids.py",
    "gateway/dialects/responses/items.py",
    "gateway/dialects/responses/teller.py",
    "gateway/dialects/table.py",
    "gateway/flow/admission.py",
    "gateway/flow/classes.py",
    "gateway/flow/fairness.py",
    "gateway/flow/rates.py",
    "gateway/flow/router.py",
    "gateway/http/messages/typed_tools.py",
    "gateway/http/responses/items.py",
    "gateway/http/responses/listing.py",
    "gateway/http/responses/tools.py",
    "gateway/mcp/answers.py",
    "gateway/mcp/tools.py",
    "gateway/runs/commands.py",
    "gateway/runs/ends.py",
    "gateway/runs/events.py",
    "gateway/runs/families.py",
    "gateway/runs/limits.py",
    "gateway/runs/outcomes.py",
    "gateway/runs/spec.py",
    "gateway/runs/state.py",
    "gateway/runs/steps.py",
    "gateway/runs/checking.py",
    "gateway/runs/told.py",
    "gateway/runs/transcript.py",
    "gateway/runs/wishes.py",
    "gateway/text/parsing/open_calls.py",
    "gateway/text/spellings.py",
    "gateway/text/volatile.py",
    "gateway/text/written.py",
    "gateway/runs/told.py",
    "gateway/native/bodies.py",
    "gateway/native/showing.py",
    "gateway/native/structs.py",
    "gateway/native/telling.py",
    "gateway/native/trees.py",
    "metrics/bus_rules.py",
    "metrics/quantiles.py",
]
IMPURE = {"mlx", "asyncio", "redis", "aiohttp", "threading", "time"}
TOUCHES_MLX = {
    "kvcache/attention.py",
    "kvcache/exponent.py",
    "kvcache/pages.py",
    "kvcache/rows.py",
    "kvcache/states.py",
    "moe/delta.py",
    "workers/delta_mixer.py",
    "workers/doctor.py",
    "workers/gguf.py",
    "workers/linear.py",
    "workers/mixers.py",
    "workers/model.py",
    "workers/process.py",
    "workers/runner.py",
    "workers/sampling.py",
    "workers/weights.py",
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50


def sources(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported_modules(source: Path) -> set[str]:
    """Absolute imports anywhere in the file, functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module or ""}
    return names


def imported_packages(source: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(source)}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    for source in sources(room):
        rooms = imported_packages(source) & MAY_IMPORT.keys()
        assert rooms - {room} <= MAY_IMPORT[room], source
        assert "tests" not in imported_packages(source), source


def test_the_gateway_imports_only_the_messages_of_workers() -> None:
    for source in sources("gateway"):
        from_workers = {name for name in imported_modules(source) if name.split(".")[0] == "workers"}
        assert from_workers <= {"workers", "workers.messages"}, source


def test_the_gateway_loads_without_mlx() -> None:
    script = (
        "import gateway.http.app, gateway.serving.process, sys; "
        "print('mlx' in sys.modules or 'mlx.core' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert printed.strip() == "False"


@pytest.mark.parametrize("path", PURE)
def test_policy_is_plain_python(path: str) -> None:
    assert not imported_packages(ROOT / path) & IMPURE


def test_mlx_is_touched_only_where_the_map_says() -> None:
    touching = {
        str(source.relative_to(ROOT))
        for room in MAY_IMPORT
        for source in sources(room)
        if imported_packages(source) & {"mlx", "mlx_lm"}
    }
    assert touching == TOUCHES_MLX


def test_variables_of_the_process_are_read_in_few_places() -> None:
    for source in (source for room in MAY_IMPORT for source in sources(room)):
        reads = "os.environ" in source.read_text() or "getenv" in source.read_text()
        assert not reads or source.name in {"settings.py", "__main__.py", "supervisor.py"}, source


@pytest.mark.parametrize("room", [*MAY_IMPORT, "tests"])
def test_a_room_is_ours(room: str) -> None:
    spec = find_spec(room)
    assert spec and spec.origin == str(ROOT / room / "__init__.py")


def test_files_and_functions_stay_small() -> None:
    for room in MAY_IMPORT:
        for source in sources(room):
            tree = ast.parse(source.read_text())
            num_lines = len(source.read_text().splitlines())
            if num_lines > MAX_FILE_LINES:
                warnings.warn(f"{source.relative_to(ROOT)}: {num_lines} lines", SizeWarning, stacklevel=1)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > MAX_FUNCTION_LINES:
                        warnings.warn(
                            f"{source.name}: {node.name} has {length} lines", SizeWarning, stacklevel=1
                        )


class SizeWarning(UserWarning):
    """Something outgrew the budget: redesign it before it grows on."""
