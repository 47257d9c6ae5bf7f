"""Ranks that are copies of one process: what they see, and how they end, as new interpreters do."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import launches
import pytest
from processes import until

from hpctrain.errors import StartError, UsageError
from hpctrain.launch.rank_processes import ForkServer, Imports

# Facts that a script can find out about its process.
FACTS = '''
"""Write facts about this process."""
import builtins, gc, json, locale, os, random, resource, signal, sys, threading, warnings
import __main__
facts = {f"__main__.{name}": repr(value).split(" at 0x")[0]
         for name, value in list(vars(__main__).items()) if name.startswith("__")}
import numpy.random
facts |= {name: getattr(sys, name) for name in (
    "argv", "orig_argv", "path", "flags", "warnoptions", "executable", "_xoptions")}
facts["filters"] = list(map(repr, warnings.filters))
facts["locale"] = locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding()
facts["umask"] = os.umask(0); os.umask(facts["umask"])
facts["limits"] = [resource.getrlimit(getattr(resource, one)) for one in dir(resource)
                   if one.startswith("RLIMIT")]
facts["files"] = {one: os.readlink(f"/proc/self/fd/{one}").split(":")[0]
                  for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")}
facts["signals"] = [repr(signal.getsignal(one)).split(" at 0x")[0]
                    for one in signal.valid_signals()]
kernel = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
facts["kernel"] = {name: kernel.get(name) for name in (
    "Name", "SigBlk", "SigIgn", "SigCgt", "ShdPnd", "NoNewPrivs", "Seccomp", "Groups", "CapEff")}
facts["cores"] = sorted(os.sched_getaffinity(0))
facts["threads"] = [one.name for one in threading.enumerate()]
facts["leads"] = os.getpgid(0) == os.getpid() == os.getsid(0)
facts["folder"] = os.getcwd()
facts["environ"] = dict(os.environ)
facts["environ in /proc"] = open("/proc/self/environ").read().split("\\0")
facts["title"] = open("/proc/self/cmdline").read().split("\\0")
facts["cgroup"] = open("/proc/self/cgroup").read()
facts["memory first"] = open("/proc/self/oom_score_adj").read()
facts["random"] = random.random(), numpy.random.rand()
facts["hash of a text"] = hash("text")
facts["collector"] = gc.isenabled(), gc.get_threshold()
facts["objects left out by the collector"] = gc.get_freeze_count() > 0
facts["streams"] = [(one.name, one.isatty(), one.line_buffering, one.write_through, one.encoding,
                     one.errors, one.seekable()) for one in (sys.stdin, sys.stdout, sys.stderr)]
facts["hooks"] = repr(sys.excepthook), sys.getrecursionlimit(), sys.getswitchinterval(), os.nice(0)
facts["__builtins__ is a module"] = __builtins__ is builtins
facts["input"] = sys.stdin.read()
facts["parent"] = os.getppid()
frame, facts["stack"] = sys._getframe(), []
while frame := frame.f_back:
    facts["stack"].append(frame.f_code.co_filename)
json.dump(facts, open(os.environ["FACTS"], "w"), default=repr)
'''
# What docs/launching.md names as different. `runpy` is on the stack of -m in both.
DIFFERENT = {"random", "hash of a text", "objects left out by the collector", "parent", "stack"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return a server that has imported numpy, and can fork ranks."""
    environ = {**launches.environ(), "PYTHONUNBUFFERED": "1"}
    imports = Imports(["numpy", "numpy.random"], [sys.executable], environ, None)
    started = ForkServer(None, imports=imports)
    until(lambda: started.is_ready(0.1))
    yield started
    started.end()


def end_of(rank):
    """Return the exit code, standard output and standard error of a rank."""
    out, err = rank.stdout.read(), rank.stderr.read()
    rank.wait()
    rank.close()
    return rank.code, out.decode(), err.decode()


@pytest.fixture
def both(server, tmp_path):
    """Return a function that runs lines of Python as a fork and as a new interpreter."""

    def run(source, *arguments, cores=None, **env):
        script = tmp_path / "script.py"
        command = [sys.executable, str(script), *arguments]
        ends = []
        for forks in (True, False):
            script.write_text(source)
            environ = {**launches.environ(), "PYTHONUNBUFFERED": "1", "N": "0", **env}
            rank = server.start(0, command, environ, cores, str(tmp_path), forks=forks)
            ends.append(end_of(rank))
        return ends

    return run


@pytest.mark.parametrize("words", [["tool.py", "a", "--b"], ["-m", "tool"], ["-m", "package.tool"]])
def test_forked_rank_sees_what_a_new_interpreter_shows(server, tmp_path, words):
    (tmp_path / "package").mkdir()
    for name in ("tool.py", "package/tool.py", "package/__init__.py"):
        (tmp_path / name).write_text(FACTS if "tool" in name else "")
    core = min(os.sched_getaffinity(0))
    found = []
    for forks in (True, False):
        environ = {**launches.environ(), "PYTHONUNBUFFERED": "1", "FACTS": str(tmp_path / "facts")}
        command = [sys.executable, *words]
        rank = server.start(0, command, environ, {core}, str(tmp_path), forks=forks)
        assert end_of(rank) == (0, "", "")
        found.append(json.loads((tmp_path / "facts").read_text()))
    forked, new = found
    assert forked.keys() == new.keys()
    # Both are children of the server here; a new interpreter in a start without imports, too.
    print(forked["files"], new["files"])
    assert {name for name in new if forked[name] != new[name]} == DIFFERENT - {"parent"}
    assert [one for one in forked["stack"] if "fork" not in one] == new["stack"]
    assert forked["cores"] == [core]


@pytest.mark.parametrize(
    "lines",
    [
        "raise ValueError('two\\nlines')",
        "def f():\n    1 / 0\n"
        "try:\n    f()\nexcept ZeroDivisionError as error:\n    raise KeyError(1) from error",
        "this is no Python",
        "import sys; sys.exit()",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a text')",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; os._exit(5)",
        "import os; os.abort()",
        "import sys; sys.excepthook = lambda *a: print(a[0], a[2].tb_frame.f_code.co_name)\n1 / 0",
        "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()",
        "import atexit; atexit.register(print, 'at exit'); print('before', end='')",
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "t = threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))); t.start()",
        "import sys; print('no end of line', end=''); print('error', file=sys.stderr, end='')",
        "import os; os.remove(__file__); os.chdir('/'); print(__file__ == os.sys.argv[0]); 1 / 0",
        "import sys; print(sys.stdin.read())",
        "import warnings; warnings.warn('first'); warnings.warn('deprecated', DeprecationWarning)",
        "import multiprocessing as m\n"
        "def f(x):\n    print('child', x, __name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    for how in 'fork', 'spawn':\n"
        "        p = m.get_context(how).Process(target=f, args=(how,)); p.start(); p.join()",
        "import pickle, os\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__)",
        "import numpy; a = numpy.ones((600, 600)); print((a @ a).sum())",
        "import faulthandler, sys; faulthandler.enable(); print(faulthandler.is_enabled())",
        "import atexit, os\n"
        "files = [os.open('/dev/null', os.O_RDONLY) for _ in range(20)]\n"
        "atexit.register(lambda: print(all(map(os.fstat, files))))",
    ],
)  # fmt: skip
def test_forked_rank_ends_as_a_new_interpreter(both, lines):
    forked, new = both(lines)
    assert forked == new


def test_variables_that_only_a_rank_has_are_those_of_the_rank(both):
    lines = "import os; print(os.environ['N'], os.environ.get('M'), ascii(os.getenv('NAME')))"
    assert both(lines, N="5", NAME="\udcff") == [(0, "5 None '\\udcff'\n", "")] * 2


def test_forked_ranks_draw_different_random_numbers(server, tmp_path):
    (tmp_path / "draw.py").write_text(
        "import random, numpy; print(random.random(), numpy.random.rand(), numpy.random.rand())"
    )
    ranks = [
        server.start(number, [sys.executable, "draw.py"], launches.environ(), None, str(tmp_path),
                     forks=True)
        for number in range(4)
    ]  # fmt: skip
    drawn = [end_of(rank)[1].split() for rank in ranks]
    assert all(len(set(numbers)) == 4 for numbers in zip(*drawn, strict=True))


def test_output_of_the_import_is_in_each_rank(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import sys, warnings; print('printed'); warnings.warn('warned')"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.py").write_text("import loud; print('trained')")
    environ = {**launches.environ(), "PYTHONPATH": str(tmp_path)}
    server = ForkServer(None, imports=Imports(["loud"], [sys.executable], environ, None))
    try:
        ends = []
        for number in range(2):
            command = [sys.executable, str(tmp_path / "run" / "train.py")]
            rank = server.start(number, command, environ, forks=True)
            ends.append(end_of(rank))
    finally:
        server.end()
    assert not server.obstacle
    for code, out, err in ends:
        assert (code, out) == (0, "printed\ntrained\n")
        assert "UserWarning: warned" in err


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["socket.py"], "has the name of a module that is imported before"),
        (["numpy/__init__.py"], "has the name of a module that is imported before"),
        (["numpy/data.txt", "models/__init__.py", "forked_rank.py", "os.py"], ""),
    ],
)
def test_script_beside_a_module_of_a_name_that_is_imported_gets_a_new_interpreter(
    server, tmp_path, files, reason
):
    """Python would import the script's own one."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("found = 'own'")
    (tmp_path / "train.py").write_text("import socket; print(getattr(socket, 'found', 'library'))")
    server.obstacle = ""
    rank = server.start(
        0, [sys.executable, "train.py"], launches.environ(), None, str(tmp_path), forks=True
    )
    assert end_of(rank)[:2] == (0, "own\n" if files == ["socket.py"] else "library\n")
    assert server.obstacle.endswith(reason)
    assert bool(server.obstacle) == bool(reason)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("import threading, time\n"
         "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
         "an import has started a thread"),
        # A file in place of a device, which this machine may not have.
        ("import sys\n"
         "frame = sys._getframe()\n"
         "while '_ACCELERATORS' not in frame.f_globals:\n"
         "    frame = frame.f_back\n"
         "frame.f_globals['_ACCELERATORS'] = ('/dev/full',)\n"
         "file = open('/dev/full')\n", "an import has opened /dev/full"),
        ("import no_such_module", ""),
    ],
)  # fmt: skip
def test_import_that_does_not_survive_a_fork_makes_new_interpreters(tmp_path, lines, reason):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "imported.py").write_text(lines)
    environ = {**launches.environ(), "PYTHONPATH": str(tmp_path / "modules")}
    (tmp_path / "train.py").write_text("print('trained')")
    server = ForkServer(None, imports=Imports(["imported"], [sys.executable], environ, None))
    try:
        command = [sys.executable, str(tmp_path / "train.py")]
        assert end_of(server.start(0, command, environ, forks=True))[:2] == (0, "trained\n")
    finally:
        server.end()
    assert server.obstacle.startswith(reason)
    assert bool(server.obstacle) == bool(reason)


def test_interpreter_that_cannot_import_is_no_server(tmp_path):
    (tmp_path / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    environ = {**launches.environ(), "PYTHONPATH": str(tmp_path)}
    server = ForkServer(None, imports=Imports(["killed"], [sys.executable], environ, None))
    with pytest.raises(StartError, match="the fork server has ended"):
        until(lambda: server.is_ready(0.1))
    server.end()


@pytest.mark.parametrize("forks", [True, False])
def test_no_process_is_left_at_the_end_of_a_server(tmp_path, forks):
    """Daemons neither: processes that left the group of their rank and lost their parent."""
    (tmp_path / "train.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.environ.clear()\n"
        "        open('daemon', 'w').write(f'{os.getpid()}\\n')\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "time.sleep(600)\n"
    )
    environ = launches.environ()
    imports = Imports(["numpy"], [sys.executable], environ, None) if forks else None
    server = ForkServer(None, imports=imports)
    rank = server.start(0, [sys.executable, "train.py"], environ, None, str(tmp_path), forks=forks)
    daemon = tmp_path / "daemon"
    until(lambda: daemon.exists() and daemon.read_text())
    assert rank.code is None
    server.end()
    rank.wait()
    rank.close()
    assert rank.code == -signal.SIGKILL
    assert not Path(f"/proc/{daemon.read_text().strip()}").exists()


def test_ranks_end_with_a_killed_server(server, tmp_path):
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    environ = launches.environ()
    own = ForkServer(None, imports=Imports(["numpy"], [sys.executable], environ, None))
    command = [sys.executable, str(tmp_path / "train.py")]
    ranks = [own.start(number, command, environ, forks=True) for number in range(2)]
    os.kill(own._process.pid, signal.SIGKILL)
    for rank in ranks:
        assert end_of(rank)[0] == -signal.SIGKILL
    with pytest.raises(StartError):
        own.start(2, command, environ)
    own.end()


def test_server_whose_launcher_was_killed_ends_the_ranks_and_removes_the_folder(tmp_path):
    (tmp_path / "start").mkdir()
    (tmp_path / "launch.py").write_text(
        "import os, pathlib, signal, sys\n"
        "from hpctrain.launch.rank_processes import ForkServer\n"
        "server = ForkServer(pathlib.Path('start'))\n"
        "command, environ = ['sleep', '600'], dict(os.environ)\n"
        "ranks = [server.start(number, command, environ) for number in range(2)]\n"
        "print(*[rank.pid for rank in ranks], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "launch.py"]
    done = subprocess.run(
        command, env=launches.environ(), capture_output=True, text=True, check=False
    )
    ranks = done.stdout.split()
    assert len(ranks) == 2, done.stderr
    until(lambda: not (tmp_path / "start").exists())
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_answer_that_a_killed_launcher_had_not_read_does_not_stop_its_server(tmp_path):
    (tmp_path / "start").mkdir()
    (tmp_path / "launch.py").write_text(
        "import os, pathlib, select, signal\n"
        "from hpctrain.launch.rank_processes import ForkServer\n"
        "server = ForkServer(pathlib.Path('start'))\n"
        "select.select([server._socket], [], [])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "launch.py"]
    subprocess.run(command, env=launches.environ(), capture_output=True, check=False)
    until(lambda: not (tmp_path / "start").exists())


def test_orphans_of_ranks_are_reaped_while_the_ranks_run(server, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "for _ in range(5):\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0:\n"
        "            os._exit(0)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "print('done')\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "train.py"]
    rank = server.start(0, command, launches.environ(), None, str(tmp_path))
    rank.stdout.readline()

    def children():
        server_pid = server._process.pid
        return Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()

    until(lambda: str(rank.pid) == children()[-1])
    rank.signal(signal.SIGTERM)
    assert end_of(rank)[0] == -signal.SIGTERM


def test_signal_to_a_rank_that_has_just_begun_is_not_lost(server, tmp_path):
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the tests may run where others are ignored
        rank = server.start(
            0, [sys.executable, "train.py"], launches.environ(), None, str(tmp_path), forks=True
        )
        rank.signal(number, everything=False)
        assert end_of(rank)[0] == -number


def test_ignored_signals_stay_ignored(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGHUP); print('goes on')"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    environ = launches.environ()
    try:
        own = ForkServer(None, imports=Imports(["numpy"], [sys.executable], environ, None))
    finally:
        signal.signal(signal.SIGHUP, before)
    command = [sys.executable, str(tmp_path / "train.py")]
    try:
        for forks in (True, False):
            assert end_of(own.start(0, command, environ, forks=forks)) == (0, "goes on\n", "")
    finally:
        own.end()


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"},
         "import numpy; a = numpy.ones((700, 700)); print((a @ a).sum())"),
        ({"PYTHONFAULTHANDLER": "1"},
         "import faulthandler, os; print(faulthandler.is_enabled()); os._exit(3)"),
        ({"PYTHONUNBUFFERED": "", "PYTHONIOENCODING": "latin-1"},
         "import sys; print(sys.stdout.encoding, sys.stdout.write_through, '\xe9' == 'é')"),
        ({"PYTHONWARNINGS": "error", "PYTHONHASHSEED": "5"},
         "import warnings; print(hash('text')); warnings.warn('an error')"),
        ({"PYTHONSAFEPATH": "1"}, "import sys; print(sys.path, sys.flags.safe_path)"),
    ],
)  # fmt: skip
def test_settings_of_python_and_its_libraries_hold_in_forked_ranks(tmp_path, variables, lines):
    (tmp_path / "train.py").write_text(lines)
    environ = {**launches.environ(), **variables}
    own = ForkServer(None, imports=Imports(["numpy"], [sys.executable], environ))
    command = [sys.executable, str(tmp_path / "train.py")]
    try:
        ends = [end_of(own.start(0, command, environ, forks=forks)) for forks in (True, False)]
    finally:
        own.end()
    assert not own.obstacle
    assert ends[0] == ends[1]


def test_rank_that_crashes_shows_its_stack(tmp_path):
    (tmp_path / "train.py").write_text("import ctypes\nctypes.string_at(0)\n")
    environ = {**launches.environ(), "PYTHONFAULTHANDLER": "1"}
    own = ForkServer(None, imports=Imports(["numpy"], [sys.executable], environ))
    try:
        command = [sys.executable, str(tmp_path / "train.py")]
        code, _, err = end_of(own.start(0, command, environ, forks=True))
    finally:
        own.end()
    assert code == -signal.SIGSEGV
    assert f'File "{tmp_path}/train.py", line 2 in <module>' in err


def test_program_or_folder_that_is_missing_is_an_error(server, tmp_path):
    environ = launches.environ()
    with pytest.raises(UsageError):
        server.start(0, ["no-such-program"], environ)
    with pytest.raises(UsageError):
        server.start(0, [sys.executable, "-c", "1"], environ, folder=str(tmp_path / "no"))
    command = [sys.executable, "-c", "print(1)"]
    assert end_of(server.start(0, command, environ)) == (0, "1\n", "")


def test_many_and_long_variables_reach_a_rank(server, tmp_path):
    (tmp_path / "show.py").write_text(
        "import os; print(len(os.environ['LONG']), os.environ['V99'])"
    )
    environ = {
        **launches.environ(),
        "LONG": "x" * 100_000,
        **{f"V{i}": "y" * 5000 for i in range(100)},
    }
    for forks in (True, False):
        rank = server.start(
            0, [sys.executable, "show.py"], environ, None, str(tmp_path), forks=forks
        )
        assert end_of(rank)[1] == f"100000 {'y' * 5000}\n"


def test_title_of_a_forked_rank_is_that_of_its_script(server, tmp_path):
    (tmp_path / "train.py").write_text("import time; print(flush=True); time.sleep(600)")
    command = [sys.executable, "train.py", "--epochs", "5"]
    rank = server.start(0, command, launches.environ(), None, str(tmp_path), forks=True)
    rank.stdout.readline()
    shown = subprocess.run(
        ["ps", "-o", "args=", "-p", str(rank.pid)], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == command
    rank.signal(signal.SIGTERM)
    assert end_of(rank)[0] == -signal.SIGTERM
