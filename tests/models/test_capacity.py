"""Brute force: free memory is the least that the system's own files leave, wherever the limit is set."""

from __future__ import annotations

import pytest

from wherewhat.models.suitability import free_memory

_GIB = 1 << 30
_V1 = "4:memory:/jobs/one\n0::/\n"
_V2 = "0::/jobs/one\n"


@pytest.fixture
def system(tmp_path):
    """A machine with 10 GiB that can be had, 1 of them unused."""

    def make(groups="", **files):
        files["proc/meminfo"] = f"MemFree: {1 << 20} kB\nMemAvailable: {10 << 20} kB\n"
        files["proc/self/cgroup"] = groups
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(content))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("groups", "mount", "limit", "used", "cached"),
    [
        (_V2, "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (_V1, "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_has_what_its_limit_leaves(system, groups, mount, limit, used, cached):
    for group in ("", "jobs/", "jobs/one/"):
        folder = f"{mount}/{group}"
        root = system(groups, **{f"{folder}{limit}": 6 * _GIB, f"{folder}{used}": 4 * _GIB})
        assert free_memory(root=root) == 2 * _GIB
        system(groups, **{f"{folder}memory.stat": f"anon {3 * _GIB}\n{cached} {_GIB}\n"})
        assert free_memory(root=root) == 3 * _GIB
        system(groups, **{f"{folder}{limit}": _GIB})
        assert free_memory(root=root) == 0
        system(groups, **{f"{folder}{limit}": 60 * _GIB})
        assert free_memory(root=root) == 10 * _GIB
    if groups == _V2:
        system(groups, **{f"{folder}{limit}": "max\n"})  # no limit
        assert free_memory(root=root) == 10 * _GIB


def test_without_system_files_free_pages_are_counted_or_nothing_is_known(system, tmp_path, monkeypatch):
    assert free_memory(root=tmp_path) > 0
    monkeypatch.setattr("wherewhat.models.suitability.os.sysconf", lambda name: int("not known"))
    assert free_memory(root=tmp_path) is None
    assert free_memory(root=system()) == 10 * _GIB  # memory that only holds files can be had
