"""What this machine is: the BLAS that MLX will use, the memory that may be used, the device's name.

Imports no MLX: `load_blas` must run before anything does. Does not know models or settings.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SLOW_BLAS = "reference BLAS (slow): install libopenblas0-pthread"

_OPENBLAS_NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so")
_OPENBLAS_FOLDERS = (
    "usr/lib/*/openblas-pthread",
    "usr/lib/*/openblas-openmp",
    "usr/lib/*",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "opt/OpenBLAS/lib",
)
_PARALLEL_KINDS = {0: "serial", 1: "pthread", 2: "openmp"}


@functools.cache
def load_blas() -> str:
    """Put a fast BLAS in front of the reference one that MLX's Linux wheel links; say which is in force.

    Symbols bind when MLX is imported, so a later call cannot help and says so. Never raises.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    if "mlx.core" in sys.modules and not _openblas_is_mapped():
        return "reference BLAS (slow): MLX was imported before OpenBLAS was loaded"
    for name in openblas_candidates(Path("/")):
        try:
            return _describe_openblas(ctypes.CDLL(name, ctypes.RTLD_GLOBAL))
        except OSError:
            continue
    return SLOW_BLAS


def openblas_candidates(root: Path) -> Iterator[str]:
    """Names for the loader's own search, then full paths below `root`, best first."""
    yield from _OPENBLAS_NAMES
    for folder in _OPENBLAS_FOLDERS:
        for name in _OPENBLAS_NAMES:
            yield from (str(path) for path in sorted(root.glob(f"{folder}/{name}")))


def _openblas_is_mapped() -> bool:
    try:
        return "libopenblas" in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def _describe_openblas(library: ctypes.CDLL) -> str:
    """For example `OpenBLAS 0.3.21 pthread`; old builds without the questions are just `OpenBLAS`."""
    words = ["OpenBLAS"]
    try:
        library.openblas_get_config.restype = ctypes.c_char_p
        config = library.openblas_get_config().decode().split()
        words += [word for word in config[1:2] if word[:1].isdigit()]
        words.append(_PARALLEL_KINDS.get(library.openblas_get_parallel(), "unknown threading"))
    except AttributeError:
        pass
    return " ".join(words)


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use: physical, or the tightest cgroup limit (v1 or v2) if smaller."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            yield from _limits_upwards(root / "sys/fs/cgroup", group, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_upwards(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes")


def _limits_upwards(mount: Path, group: str, file_name: str) -> Iterator[int]:
    """Limits of the group and of all above it; a container sees its own group as the mount."""
    folder = Path(group.lstrip("/"))
    for part in (folder, *folder.parents):
        try:
            text = (mount / part / file_name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # v2 writes `max` for no limit; v1's "no limit" is larger than any memory
            yield int(text)


def describe_device() -> str:
    """For example `Apple M5 Ultra, 96 GiB, macOS 26.1` or `AMD EPYC, 2 cores, 24 GiB, Linux glibc 2.36`."""
    if sys.platform == "darwin":
        system = f"macOS {platform.mac_ver()[0]}"
    else:
        system = f"{platform.system()} {' '.join(platform.libc_ver())}".strip()
    gibibytes = memory_limit_bytes() / 2**30
    return f"{_processor_name()}, {os.cpu_count()} cores, {gibibytes:.0f} GiB, {system}"


def _processor_name() -> str:
    fallback = platform.processor() or platform.machine()
    try:
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return (
                subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip() or fallback
            )
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except (OSError, subprocess.SubprocessError):
        return fallback
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else fallback
