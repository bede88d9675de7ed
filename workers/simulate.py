"""The verb `tetrarch simulate`: flags in, a table or JSON out. Needs neither a model nor MLX."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcache.settings import PAGE_TOKENS

from .errors import SettingsError
from .line import LineRules
from .simulate_device import Device
from .simulate_replay import Capacity, Replay
from .simulate_report import Reports
from .simulate_trace import Trace, read_trace

DESCRIPTION = """\
Replay a trace of agents' calls through the real cache and scheduler on a machine that is only
described: how much of the prompts the cache answers, what that costs in waiting, what is evicted why.

Callers: --agents sessions are in flight, each with one call at a time; the next call follows an answer
after the trace's think time (120 s at most), and when a session ends the next begins. Sessions come in an
order drawn by --seed. Answers are new tokens of the traced length; they hold pages like any others.

Hints: with --hints trace a call says whether its answer is a tool call, whether it is its agent's last
and who its parent is, as an orchestrator would in headers or body. With none the engine is told only
which agent calls, and learns from who comes back; compare both to see what hints are worth here.

Cost of a step: each prefill row (6e9 + 1.97e5 x depth) FLOP; each decode row reads 1.7 GB of weights and
13,056 bytes of KV for each token before it (Qwen3-Next-80B-A3B at 4.5 bits, 8-bit KV); both are added.
Decoding goes on in one jump until a stream ends, a call arrives or a prefill chunk rides along.
"""

EXAMPLES = """\
examples:
  tetrarch simulate trace.jsonl.gz
  tetrarch simulate trace.jsonl.gz --agents 8 --pool-tokens 524288 --states 32 --orders 3
  tetrarch simulate trace.jsonl.gz --policy fifo          without admission and ageing
  tetrarch simulate trace.jsonl.gz --hints none           callers that say nothing about their next calls
  tetrarch simulate trace.jsonl.gz --flops 15e12 --bytes-per-second 270e9 --json

A trace has one JSON object a line: session, agent, think, input_length, output_length, stop and hash_ids
(of chained 64-token blocks); or, without session, Mooncake's input_length, output_length and hash_ids
(512-token blocks), each call a session of its own.
"""


POLICIES = {"agents": LineRules(), "fifo": LineRules(order="arrival")}


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. context_tokens None: as much as the longest call needs and the pool holds."""

    trace: Path
    num_agents: int
    pool_tokens: int
    num_states: int
    num_workers: int
    context_tokens: int | None
    num_orders: int
    has_hints: bool
    seed: int
    rules: LineRules
    device: Device
    check_in_full: bool
    as_json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's flags."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines, gzipped or not")
    parser.add_argument("--agents", type=int, default=8, metavar="N", help="sessions in flight (8)")
    parser.add_argument("--pool-tokens", type=int, default=1_048_576, metavar="N", help="KV pool (1048576)")
    parser.add_argument(
        "--states", type=int, default=32, metavar="N", help="checkpoints; 0: no recurrent layers (32)"
    )
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="streams (4)")
    parser.add_argument("--context", type=int, metavar="N", help="longer calls are skipped (none)")
    parser.add_argument("--orders", type=int, default=1, metavar="N", help="session orders to average (1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first order (0)")
    parser.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        default="agents",
        help="agents: as the engine does; fifo: first come, first served, nobody is held (agents)",
    )
    parser.add_argument(
        "--hints",
        choices=("trace", "none"),
        default="trace",
        help="trace: calls say what the trace knows (tool waited for, last call, parent); none (trace)",
    )
    parser.add_argument("--flops", type=float, default=30e12, metavar="X", help="FLOP a second (30e12)")
    parser.add_argument(
        "--bytes-per-second", type=float, default=500e9, metavar="X", help="memory bandwidth (500e9)"
    )
    parser.add_argument(
        "--check",
        choices=("counts", "full"),
        default="counts",
        help="after each call (counts)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def parse(options: argparse.Namespace) -> Options:
    """Raises SettingsError that names the flag."""
    for flag in ("agents", "pool_tokens", "workers", "orders", "flops", "bytes_per_second"):
        value = getattr(options, flag)
        if value <= 0:
            raise SettingsError(f"--{flag.replace('_', '-')} is {value}: use more than 0")
    if options.states < 0:
        raise SettingsError(f"--states is {options.states}: use 0 or more")
    return Options(
        trace=options.trace,
        num_agents=options.agents,
        pool_tokens=options.pool_tokens,
        num_states=options.states,
        num_workers=options.workers,
        context_tokens=options.context,
        num_orders=options.orders,
        has_hints=options.hints == "trace",
        seed=options.seed,
        rules=POLICIES[options.policy],
        device=Device(flops=options.flops, bytes_per_second=options.bytes_per_second),
        check_in_full=options.check == "full",
        as_json=options.json,
    )


def simulate(options: Options, tell: Callable[[str], None]) -> Reports:
    """Replay every order, telling now and then how far it is.

    Raises TraceError, SettingsError and, for a fault of ours, IntegrityError.
    """
    trace = read_trace(options.trace)
    if not options.has_hints:
        trace = trace.without_hints()
    capacity = _capacity(options, trace)
    num_calls = trace.within(capacity.context_tokens).num_calls
    reports = []
    for order in range(1, options.num_orders + 1):

        def tell_calls(num_ended: int, order: int = order) -> None:
            tell(f"order {order} of {options.num_orders}: {num_ended:,} of {num_calls:,} calls")

        replay = Replay(trace, capacity, options.device, options.seed + order - 1, options.rules)
        reports.append(replay.run(check_in_full=options.check_in_full, tell=tell_calls))
    return Reports.of(reports)


def _capacity(options: Options, trace: Trace) -> Capacity:
    pool_tokens = options.pool_tokens - options.pool_tokens % PAGE_TOKENS
    longest = trace.longest_tokens + 1
    context = min(longest, pool_tokens) if options.context_tokens is None else options.context_tokens
    if not PAGE_TOKENS <= context <= pool_tokens:
        raise SettingsError(
            f"a context of {context} tokens does not fit a pool of {options.pool_tokens}: "
            f"use --context from {PAGE_TOKENS} to the pool, or raise --pool-tokens"
        )
    if not trace.within(context).sessions:
        raise SettingsError(f"every call is longer than --context {context}: raise it to {longest}")
    return Capacity(options.num_agents, pool_tokens, options.num_states, options.num_workers, context)
