"""What the machine gives this process: memory and processors, container limits respected."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60
"""Version 1 says so with a number beyond this one."""


def available_memory(device_type: str = "cpu") -> int:
    """Bytes that can be taken now: the least of the system's and of what each enclosing container leaves."""
    if device_type == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    return min([_system_available(), *_container_headroom()])


def available_processors() -> int:
    """Processors this process may use: its affinity, or its container's quota where that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota in _container_quotas():
        count = min(count, max(1, int(quota)))
    return count


def _system_available() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_headroom() -> Iterator[int]:
    for folder in _groups("memory"):
        statistics = {words[0]: int(words[1]) for line in _lines(folder / "memory.stat") if len(words := line.split()) == 2}
        # Above memory.high nothing fails and everything stalls. Version 1 tells of limits that lie outside this container.
        limits = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        limits.append(statistics.get("hierarchical_memory_limit"))
        limit = min((limit for limit in limits if limit is not None), default=UNLIMITED)
        if limit < UNLIMITED:
            used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
            # Page cache counts as used and is given back on demand; only version 1's plain figure leaves the groups below out.
            yield max(0, limit - used + statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))


def _container_quotas() -> Iterator[float]:
    for folder in _groups("cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            quota, period = str(_number(folder / "cpu.cfs_quota_us") or "max"), str(_number(folder / "cpu.cfs_period_us") or 100000)
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


@functools.cache
def _groups(controller: str) -> list[Path]:
    """This process's control groups that may limit it, each with its ancestors as far as they are mounted here."""
    paths = {}  # of each version 1 controller, and of version 2 under no name
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    folders = []
    for line in _lines(Path("/proc/self/mountinfo")):
        place, _, kind = line.partition(" - ")
        root, point = place.split()[3:5]
        version, _, options = kind.split(" ", 2)
        name = "" if version == "cgroup2" else controller
        if version == "cgroup2" or (version == "cgroup" and controller in options.split(",")):
            # A path outside what is mounted, or of another namespace: the root of the mount is an ancestor.
            inner = PurePosixPath(paths.get(name, "/"))
            parts = inner.relative_to(root).parts if inner.is_relative_to(root) else ()
            folders += [Path(point, *parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
