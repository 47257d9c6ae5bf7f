#!/bin/bash
# Sets up everything that the tests need, and passes them.
#
#     bash tests/run.sh [--long] [options of pytest]
#
# As root on Debian or Ubuntu it installs a real Slurm, starts it on four hosts that live in network
# namespaces of this machine, and stops it again. Without root it runs what it can, and its last
# lines say what was left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh

long=
if [ "${1:-}" = --long ]; then
    long=--long
    shift
fi

packages=(slurm-wlm munge iproute2 dataset-fashion-mnist shellcheck openmpi-bin mpich libpmix-dev)
packages+=(openssh-server) # for horovodrun, on the hosts in network namespaces
packages+=(environment-modules) # a cluster's `module load`
[ -z "$long" ] || packages+=(slurmdbd mariadb-{server,client}-core) # for Slurm's accounting
packages+=(chromium-headless-shell mate-backgrounds) # to look at a report; photographs
packages+=(strace) # kills a save at each of its system calls
packages+=(g++ make python3-dev libopenmpi-dev) # to build Horovod
set_up test
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
        missing+=("$package")
done
left_out=()
if [ ${#missing[@]} -gt 0 ] && ! apt_install "${missing[@]}"; then
    left_out+=("what needs the packages ${missing[*]}: sudo apt-get install ${missing[*]}")
fi

cluster() { .venv/bin/python tests/slurm/cluster.py "$@"; }
required=(--require submitit)
[ ! -d /usr/share/datasets/fashion-mnist ] || required+=(--require fashion-mnist)
for part in shellcheck:shellcheck openmpi:mpirun.openmpi mpich:mpirun.mpich ssh:/usr/sbin/sshd \
    strace:strace browser:chromium-headless-shell; do
    ! command -v "${part#*:}" >/dev/null || required+=(--require "${part%:*}")
done
[ ! -d /usr/share/backgrounds/mate ] || required+=(--require photographs)
[ "$(id -u)" != 0 ] || required+=(--require mount)
[ ! -e /usr/share/modules/init/bash ] || required+=(--require modules)
[ "$(nproc)" -lt 2 ] || required+=(--require two-cores)
[ -e /dev/nvidiactl ] || required+=(--require no-driver)
[ ! -e /dev/nvidiactl ] || required+=(--require gpu)
! dpkg-query -W libpmix-dev >/dev/null 2>&1 || required+=(--require pmix)
# Minutes once, and nothing while .venv stays as it is.
built=.venv/.horovod
if [ "$built" -nt .venv/.installed ] || .venv/bin/hpctrain horovod build --cpu --mpi; then
    touch "$built"
    required+=(--require horovod)
else
    left_out+=("what needs Horovod: .venv/bin/hpctrain horovod build --cpu --mpi")
fi
half=
why=$(PYTHONPATH=tests/slurm .venv/bin/python -c 'import cluster; print(cluster.available())')
trap '[ -z "$half" ] || kill "$half" 2>/dev/null || true; [ -n "$why" ] || cluster stop' EXIT
if [ -z "$why" ]; then
    required+=(--require slurm)
    # Also what an earlier run that was killed has left.
    cluster stop
else
    left_out+=("the tests on a real Slurm: $why")
fi

tests() { .venv/bin/python -m pytest -rs "${required[@]}" $long "$@"; }
code=0
if [ $# -gt 0 ]; then
    tests "$@" || code=$?
else
    # Ranks wait for each other, and jobs for Slurm, about half of the time: two halves at once.
    log=$(mktemp)
    hangs=tests/multiproc/test_hangs.py
    tests tests/slurm tests/unit "$hangs" >"$log" 2>&1 &
    half=$!
    tests tests/multiproc tests/gpu --ignore="$hangs" || code=$?
    wait "$half" || code=$?
    cat "$log"
    rm -f "$log"
fi
for line in "${left_out[@]}"; do say "left out: $line"; done
exit "$code"
