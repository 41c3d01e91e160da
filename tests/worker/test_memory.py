"""Limits of containers, read from faked control groups."""

import os
import timeit
from pathlib import Path

import pytest

from octavo.worker import memory

GIB = 1 << 30


class Machine:
    """Control groups under a folder, and the files of /proc beside them."""

    def __init__(self, root):
        self.groups, self.proc = root / "cgroup", root / "proc"
        self.groups.mkdir()
        self.write(self.proc / "meminfo", "MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n")

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def mounts(self, *lines):
        """Lines of a root, a mount point under the folder of groups, a file system and its options."""
        lines = [line.split() for line in lines]
        text = [
            f"3{i} 31 0:2{i} {root} {self.groups / point.lstrip('/')} rw shared:9 - {kind} {kind} {options}"
            for i, (root, point, kind, options) in enumerate(lines)
        ]
        self.write(self.proc / "self" / "mountinfo", "\n".join(["1 0 8:1 / / rw - ext4 /dev/vda rw", *text]))

    def belongs_to(self, *lines):
        self.write(self.proc / "self" / "cgroup", "\n".join(lines))

    def group(self, path, **files):
        for name, text in files.items():
            self.write(self.groups / path / name.replace("__", "."), text)

    def path(self, *parts):
        path = Path(*parts)
        return self.proc / path.relative_to("/proc") if path.is_relative_to("/proc") else path


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    machine.mounts("/ / cgroup2 rw", "/ /memory cgroup rw,memory", "/ /cpu cgroup rw,cpu,cpuacct", "/ /systemd cgroup rw,name=systemd")
    memory._groups.cache_clear()
    monkeypatch.setattr(memory, "Path", machine.path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    yield machine
    memory._groups.cache_clear()


def test_without_containers_the_systems_figure_counts(machine):
    assert memory.available_memory() == 32 * GIB
    assert memory.available_processors() == 8


def test_without_proc_half_of_the_physical_memory_is_taken(machine):
    (machine.proc / "meminfo").unlink()
    assert memory.available_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def test_version_2_limit_less_what_is_used_counts(machine):
    machine.belongs_to("0::/box")
    machine.group("box", memory__max=4 * GIB, memory__current=1 * GIB)
    assert memory.available_memory() == 3 * GIB


def test_page_cache_can_be_taken_back(machine):
    machine.belongs_to("0::/box")
    machine.group("box", memory__max=4 * GIB, memory__current=4 * GIB, memory__stat=f"anon 5\ninactive_file {2 * GIB}\nactive_file 7")
    assert memory.available_memory() == 2 * GIB


def test_outer_container_may_be_the_narrower(machine):
    machine.belongs_to("0::/outer/inner")
    machine.group("outer/inner", memory__max=8 * GIB, memory__current=0)
    machine.group("outer", memory__max=2 * GIB, memory__current=GIB)
    assert memory.available_memory() == GIB


@pytest.mark.parametrize("path", ["/", "/box"])
def test_limit_of_the_root_group_is_seen(machine, path):
    machine.belongs_to(f"0::{path}")
    machine.group("", memory__max=2 * GIB, memory__current=0)
    assert memory.available_memory() == 2 * GIB


@pytest.mark.parametrize("limit", ["max", "nonsense", ""])
def test_no_limit_is_no_limit(machine, limit):
    machine.belongs_to("0::/box")
    machine.group("box", memory__max=limit, memory__current=GIB)
    assert memory.available_memory() == 32 * GIB


def test_container_over_its_limit_has_nothing_left(machine):
    machine.belongs_to("0::/box")
    machine.group("box", memory__max=GIB, memory__current=2 * GIB)
    assert memory.available_memory() == 0


def test_version_1_limit_counts(machine):
    machine.belongs_to("11:cpuset:/", "9:memory:/box", "4:cpu,cpuacct:/box")
    machine.group("memory/box", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert memory.available_memory() == GIB


def test_version_1_limit_is_found_at_the_mounted_root_of_a_container(machine):
    machine.belongs_to("9:memory:/docker/0123", "0::/")
    machine.group("memory", memory__limit_in_bytes=GIB, memory__usage_in_bytes=0)
    assert memory.available_memory() == GIB


def test_groups_inside_a_container_are_found_where_they_are_mounted(machine):
    """A process sees its path on the host, and mounted is what lies below the container's own group."""
    machine.mounts("/docker/0123 /memory cgroup rw,memory", "/docker/0123 / cgroup2 rw")
    machine.belongs_to("9:memory:/docker/0123/service", "0::/docker/0123/service")
    machine.group("memory/service", memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=0)
    assert memory.available_memory() == 3 * GIB
    machine.group("service", memory__max=2 * GIB, memory__current=0)
    assert memory.available_memory() == 2 * GIB
    machine.group("", memory__max=GIB, memory__current=0)
    assert memory.available_memory() == GIB


@pytest.mark.parametrize("root", ["/", "/box", "/.."])
@pytest.mark.parametrize("path", ["/../..", "/../other/group", "/elsewhere"])
def test_group_outside_the_namespace_is_bound_by_the_mounted_root(machine, path, root):
    machine.mounts(f"{root} / cgroup2 rw")
    machine.belongs_to(f"0::{path}")
    machine.group("", memory__max=2 * GIB, memory__current=GIB)
    assert memory.available_memory() == GIB


def test_both_versions_at_once_are_looked_at(machine):
    machine.mounts("/ /unified cgroup2 rw", "/ /memory cgroup rw,memory")
    machine.belongs_to("9:memory:/box", "0::/slice")
    machine.group("memory/box", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=0)
    assert memory.available_memory() == 4 * GIB
    machine.group("unified/slice", memory__max=2 * GIB, memory__current=0)
    assert memory.available_memory() == 2 * GIB


def test_a_machine_without_control_groups_has_its_own_limits_only(machine):
    (machine.proc / "self" / "mountinfo").unlink()
    assert memory.available_memory() == 32 * GIB


def test_throttling_begins_before_the_limit(machine):
    machine.belongs_to("0::/box")
    machine.group("box", memory__max=4 * GIB, memory__high=3 * GIB, memory__current=GIB)
    assert memory.available_memory() == 2 * GIB


def test_limit_of_nothing_is_a_limit(machine):
    machine.belongs_to("0::/box")
    machine.group("box", memory__max=0, memory__current=0)
    assert memory.available_memory() == 0


def test_version_1_tells_of_limits_out_of_sight_and_of_cache_in_the_groups_below(machine):
    machine.belongs_to("9:memory:/box")
    statistics = f"inactive_file 5\nhierarchical_memory_limit {4 * GIB}\ntotal_inactive_file {2 * GIB}"
    machine.group("memory/box", memory__limit_in_bytes=0x7FFFFFFFFFFFF000, memory__usage_in_bytes=3 * GIB, memory__stat=statistics)
    assert memory.available_memory() == 3 * GIB


def test_version_1_without_limit_is_no_limit(machine):
    machine.belongs_to("9:memory:/box")
    machine.group("memory/box", memory__limit_in_bytes=0x7FFFFFFFFFFFF000, memory__usage_in_bytes=GIB)
    assert memory.available_memory() == 32 * GIB


@pytest.mark.parametrize(
    ("quota", "processors"),
    [
        ("200000 100000", 2),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("1000000 100000", 8),
        ("max 100000", 8),
        ("nonsense", 8),
        ("30000 10000", 3),
    ],
)
def test_version_2_quota_bounds_the_processors(machine, quota, processors):
    machine.belongs_to("0::/box")
    machine.group("box", cpu__max=quota)
    assert memory.available_processors() == processors


@pytest.mark.parametrize(("quota", "period", "processors"), [(300000, 100000, 3), (-1, 100000, 8), (20000, 10000, 2), (50000, 100000, 1)])
def test_version_1_quota_bounds_the_processors(machine, quota, period, processors):
    machine.belongs_to("4:cpu,cpuacct:/box", "0::/")
    machine.group("cpu/box", cpu__cfs_quota_us=quota, cpu__cfs_period_us=period)
    assert memory.available_processors() == processors


def test_narrowest_quota_counts(machine):
    machine.belongs_to("0::/outer/inner")
    machine.group("outer/inner", cpu__max="400000 100000")
    machine.group("outer", cpu__max="200000 100000")
    assert memory.available_processors() == 2


def test_affinity_bounds_the_processors(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    machine.belongs_to("0::/box")
    machine.group("box", cpu__max="400000 100000")
    assert memory.available_processors() == 1


def test_system_without_affinity_counts_its_processors(machine, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert memory.available_processors() == 6


def test_asking_is_cheap_enough_for_every_step_of_growth():
    memory.available_memory()
    assert min(timeit.repeat(memory.available_memory, number=10, repeat=5)) / 10 < 5e-3


def test_this_machine_answers_sensibly():
    assert memory.available_memory() > 0
    assert 1 <= memory.available_processors() <= os.cpu_count()
