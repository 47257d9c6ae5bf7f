"""Scripts ported to hpctrain train as before, in every world, and resume with the same bits."""

import ports
import pytest
import ranks  # noqa: F401 - the marker of tests with ranks


def scripts(*by_default):
    """Return all names of scripts; those that are not named are tested with `--all` only."""
    return [
        pytest.param(name, marks=() if name in by_default else pytest.mark.slow)
        for name in ports.NAMES
    ]


@pytest.fixture
def script(request, lacking):
    """Return the name of a script whose packages are installed."""
    if package := ports.missing(request.param):
        lacking(package, f"no module named {package}")
    return request.param


def test_every_script_is_ported():
    after = sorted(path.stem for path in (ports.HERE / "after").glob("*.py"))
    assert after == ports.NAMES == sorted(ports.KNOWN)


@pytest.mark.parametrize("script", scripts("ddp_weighted"), indirect=True)
def test_ported_script_has_the_numbers_of_the_script_before(script, tmp_path):
    for size in ports.SIZES:
        before = ports.run_before(script, size, tmp_path / f"before-{size}")
        after = ports.run_after(script, size, tmp_path / f"after-{size}")
        assert ports.difference(before, after) < ports.TOLERANCE, f"{size} ranks"


@pytest.mark.parametrize("script", scripts("gan"), indirect=True)
def test_ported_script_resumes_with_the_bits_of_an_undisturbed_run(script, tmp_path):
    size = ports.SIZES[-1]
    whole = ports.run_after(script, size, tmp_path / "whole", "--deterministic")
    killed = tmp_path / "killed"
    saved = ports.run_killed(script, size, killed)
    resumed = ports.run_after(script, size, killed, "--deterministic", "--resume")
    first, again = ports.resumed_from(killed)
    assert first == 0
    assert again == saved > 0
    assert ports.same_bits(whole, resumed)
