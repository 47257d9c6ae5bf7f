"""Memory of a host and of a job, from files as the kernel writes them."""

from hpctrain.cluster import memory


def write(tmp_path, **files):
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def available_memory_of(tmp_path, **files):
    write(tmp_path, **files)
    return memory.available(tmp_path)


MEMINFO = "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:   1000 kB\n"


def test_available_memory_of_the_machine(tmp_path):
    assert memory.available(tmp_path) is None
    assert available_memory_of(tmp_path, proc__meminfo=MEMINFO) == 1_024_000
    assert memory.available() > 0


def test_available_memory_of_cgroup_v2(tmp_path):
    group = "sys__fs__cgroup__job__step__"
    files = {
        "proc__meminfo": MEMINFO,
        "proc__self__cgroup": "0::/job/step\n",
        group + "memory_dot_max": "max\n",
        group + "memory_dot_current": "5000\n",
        "sys__fs__cgroup__job__memory_dot_max": "90000\n",
        "sys__fs__cgroup__job__memory_dot_current": "80000\n",
        "sys__fs__cgroup__job__memory_dot_stat": "anon 1\ninactive_file 30000\n",
    }
    assert available_memory_of(tmp_path, **files) == 40_000
    files[group + "memory_dot_max"] = "6000\n"
    assert available_memory_of(tmp_path, **files) == 1_000
    files[group + "memory_dot_current"] = "7000\n"
    assert available_memory_of(tmp_path, **files) == 0


def test_available_memory_of_cgroup_v1(tmp_path):
    group = "sys__fs__cgroup__memory__slurm__job_1__"
    files = {
        "proc__meminfo": MEMINFO,
        "proc__self__cgroup": "5:cpu,cpuacct:/x\n4:memory:/slurm/job_1\n0::/\n",
        group + "memory_dot_limit_in_bytes": "70000\n",
        group + "memory_dot_usage_in_bytes": "60000\n",
        group + "memory_dot_stat": "total_inactive_file 500\n",
    }
    assert available_memory_of(tmp_path, **files) == 10_500


def test_limit_and_kills_of_cgroup_v2(tmp_path):
    group = "sys__fs__cgroup__job__"
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/job/step\n")
    assert (memory.limit(tmp_path), memory.kills(tmp_path)) == (None, 0)
    files = {
        group + "memory_dot_max": "90000\n",
        group + "memory_dot_events": "max 7\noom_kill 2\n",
    }
    write(tmp_path, **files)
    assert (memory.limit(tmp_path), memory.kills(tmp_path)) == (90_000, 2)


def test_limit_and_kills_of_cgroup_v1(tmp_path):
    group = "sys__fs__cgroup__memory__job__"
    files = {
        "proc__self__cgroup": "4:memory:/job\n0::/\n",
        group + "memory_dot_limit_in_bytes": f"{2**63 - 4096}\n",
        group + "memory_dot_oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    }
    write(tmp_path, proc__meminfo=MEMINFO, **files)
    assert (memory.limit(tmp_path), memory.kills(tmp_path)) == (None, 3)
    write(tmp_path, **{group + "memory_dot_limit_in_bytes": "70000\n"})
    assert memory.limit(tmp_path) == 70_000
