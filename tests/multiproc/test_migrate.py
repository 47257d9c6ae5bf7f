"""The scripts of docs/migrate.md, run as they are printed there."""

import importlib.util
import json
import os
import re

import launches
import pytest

PAGE = (launches.TOP / "docs" / "migrate.md").read_text()
SCRIPTS = {
    block.split()[1]: block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
}
# "before" and "after": of the commands, those that start here.
COMMANDS = [line for line in re.findall(r"`([^`\n]+)`", PAGE) if re.search(r"\.py\b.*", line)]
COMMANDS = [line for line in COMMANDS if line.startswith(("horovodrun ", "hpctrain run "))]
ACCURACY = 0.9
PATH = f"{launches.BIN}:{os.environ['PATH']}"


@pytest.fixture
def scripts(tmp_path, lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "hpctrain horovod build")
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_page_has_a_script_before_and_after_and_how_each_is_started():
    assert list(SCRIPTS) == ["by_hand.py", "ported.py"]
    assert len(COMMANDS) == 3
    assert "by_hand.py" in COMMANDS[0]


def test_horovod_by_hand_trains(scripts):
    done = launches.start(["bash", "-c", COMMANDS[0]], scripts, PATH=PATH)
    assert done.returncode == 0, done.stderr
    *_, last = re.findall(r"epoch \d+ .* top1 (\S+)", done.stdout)
    assert float(last) >= ACCURACY
    assert (scripts / "model.pt").is_file()


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_the_ported_script_trains_as_well(command, scripts):
    done = launches.start(["bash", "-c", command], scripts, PATH=PATH)
    assert done.returncode == 0, done.stderr
    (run,) = (scripts / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["backend"], summary["world_size"]) == ("horovod", 2)
    assert summary["metrics"]["top1"] >= ACCURACY
    assert (scripts / "model.pt").is_file()
