"""How much memory there is to use."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that may be taken without hurting anybody: what the machine has free, what a container and a process may
    have."""
    return min(_of_the_machine(), _of_the_container(), _of_the_process())


def _of_the_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):  # not Linux: half of what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _of_the_container() -> int:
    try:
        limit, used, details = ((_GROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        # Files that were read once count as used, and give way when memory is asked for.
        idle = next(int(line.split()[1]) for line in details.splitlines() if line.startswith("inactive_file "))
        return max(0, int(limit) - int(used) + idle)
    except (OSError, ValueError, StopIteration):  # no container, or no limit
        return 2**62


def _of_the_process() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):  # not Linux
        return 2**62
    return 2**62 if limit == resource.RLIM_INFINITY else max(0, limit - used)
