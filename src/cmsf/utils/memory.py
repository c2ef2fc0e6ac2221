"""How much memory is available."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Returns the bytes that may be allocated: the minimum of what machine, container and process limits leave."""
    return min(_machine(), _container(), _process())


def _machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):  # not Linux: half of the physical memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _container() -> int:
    try:
        limit, used, details = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        # The page cache counts as used, and is freed on demand.
        idle = next(int(line.split()[1]) for line in details.splitlines() if line.startswith("inactive_file "))
        return max(0, int(limit) - int(used) + idle)
    except (OSError, ValueError, StopIteration):  # no container, or no limit
        return 2**62


def _process() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):  # not Linux
        return 2**62
    return 2**62 if limit == resource.RLIM_INFINITY else max(0, limit - used)
