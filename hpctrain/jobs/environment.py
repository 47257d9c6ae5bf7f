"""Setup before anything runs: site, modules, environments, variables. Pure bash text."""

import os.path

from hpctrain.jobs.quoting import quote
from hpctrain.jobs.spec import JobSpec

__all__ = ["surroundings", "variables"]

_SITE = """\
# Settings for all jobs on this cluster. Such files often fail with -e and -u.
site=${HPCTRAIN_SITE:-${HOME:-}/.config/hpctrain/site.sh}
if [ -n "${HPCTRAIN_SITE:-}" ] || [ -e "$site" ]; then
    case $site in */*) ;; *) site=./$site ;; esac # or the dot command searches the PATH
    code=0
    set +eu
    trap 'echo "$site calls exit, which ends the job; it may use return" >&2; exit 2' EXIT
    # shellcheck source=/dev/null
    . "$site" || code=$?
    trap - EXIT
    set -eu
    if [ "$code" != 0 ]; then echo "$site ended with $code" >&2; fi
fi"""

_MODULES = """\
# A batch shell is not a login shell, so `module` may not be defined yet.
set +eu
for init_file in /etc/profile.d/{{lmod,z00_lmod,modules}}.sh "${{LMOD_PKG:-}}/init/bash" \\
    "${{MODULESHOME:-}}/init/bash" /usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash; do
    # shellcheck source=/dev/null
    if ! type module >/dev/null 2>&1 && [ -r "$init_file" ]; then . "$init_file"; fi
done
modules=({names})
for module_name in "${{modules[@]}}"; do
    if ! module load "$module_name"; then
        printf '%s: this module could not be loaded\\n' "$module_name" >&2
        exit 2
    fi
done
set -eu"""

_SETUP = """\
# Setup lines of the job.
set +u
{lines}
set -eu"""

_VENV = """\
venv={path}
if [ ! -r "$venv/bin/activate" ]; then
    printf '%s: no virtual environment on %s, seen from %s\\n' "$venv" "$HOSTNAME" "$PWD" >&2
    exit 2
fi
# shellcheck source=/dev/null
. "$venv/bin/activate\""""

_CONDA = """\
# `conda activate` is a shell function, which a batch shell has to define first.
conda=$(type -P conda || true)
conda=${{CONDA_EXE:-$conda}}
if [ -z "$conda" ]; then
    echo "no conda on the PATH: add it in a setup line or in site.sh" >&2
    exit 2
fi
set +eu
eval "$("$conda" shell.bash hook)"
if ! conda activate {name}; then
    printf '%s: this conda environment could not be activated\\n' {name} >&2
    exit 2
fi
set -eu"""


def surroundings(spec: JobSpec) -> str:
    """Return the lines for site file, modules, setup lines and Python environment, in this shell.

    These may use any variable name: variables of the script itself begin with hpctrain_, or are
    set later. A later part may override an earlier one.
    """
    parts = [_SITE, _modules(spec), _setup(spec), _environment_of_python(spec)]
    return "\n\n".join(part for part in parts if part)


def variables(spec: JobSpec) -> str:
    """Return the exports of the spec's own variables, which override all others."""
    lines = [f"export {name}={quote(value)}" for name, value in spec.environment.items()]
    if lines and spec.container and spec.container_runtime != "pyxis":
        lines.append("# These override the variables of the image.")
        lines += [f'export APPTAINERENV_{name}="${name}"' for name in spec.environment]
    return "\n".join(lines)


def _modules(spec: JobSpec) -> str:
    names = " ".join(quote(name) for name in spec.modules)
    return _MODULES.format(names=names) if names else ""


def _setup(spec: JobSpec) -> str:
    return _SETUP.format(lines="\n".join(spec.setup)) if spec.setup else ""


def _environment_of_python(spec: JobSpec) -> str:
    if spec.venv:
        # With a folder in front, bash cannot read the path as an option of the dot command.
        path = spec.venv if os.path.isabs(spec.venv) else f"./{spec.venv}"
        return _VENV.format(path=quote(path))
    return _CONDA.format(name=quote(spec.conda)) if spec.conda else ""
