"""What the machine gives this process: memory and processors, container limits respected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


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
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _container_headroom() -> Iterator[int]:
    for folder in _groups("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and limit < 1 << 60:
            # Page cache counts as used and is given back on demand.
            yield max(0, limit - (used or 0) + _inactive_file(folder))


def _container_quotas() -> Iterator[float]:
    for folder in _groups("cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            quota, period = str(_number(folder / "cpu.cfs_quota_us") or "max"), str(_number(folder / "cpu.cfs_period_us") or 100000)
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


def _groups(controller: str) -> Iterator[Path]:
    """This process's control group and its ancestors, version 2 or the controller's version 1 hierarchy."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUP_ROOT / controller if controllers else CGROUP_ROOT
        folder = root / path.lstrip("/")
        yield folder
        for parent in folder.parents:
            if parent == CGROUP_ROOT.parent:
                break
            yield parent


def _inactive_file(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
