#!/bin/bash
# Sets up everything that the tests need, and passes them.
#
#     bash tests/run.sh [--all | --gpu [--save DIR] | --planted] [--strict] [options of pytest]
#
#     (nothing)      what a change is likely to break: at most 8 minutes on two cores
#     --all          every test that needs no GPU
#     --gpu          what needs a GPU, and the benchmarks of GPUs; --save keeps their figures
#     --planted      plants each known bug in a copy and prints which test finds it
#     --strict       a part of the machine that is missing is a failure; on where $CI is set
#
# As root on Debian or Ubuntu it installs a real Slurm, starts it on four hosts that live in network
# namespaces of this machine, and stops it again. Without root it runs what it can, and its last
# lines say what was left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh

tier=default strict=${CI:+yes} save=
while :; do
    case "${1:-}" in
    --all | --gpu | --planted) tier=${1#--} ;;
    --strict) strict=yes ;;
    --save)
        save=${2:?--save needs a folder}
        shift
        ;;
    *) break ;;
    esac
    shift
done

packages=(slurm-wlm munge iproute2 dataset-fashion-mnist shellcheck openmpi-bin mpich libpmix-dev)
packages+=(openssh-server) # for horovodrun, on the hosts in network namespaces
packages+=(environment-modules) # a cluster's `module load`
packages+=(chromium-headless-shell mate-backgrounds) # to look at a report; photographs
packages+=(strace) # kills a save at each of its system calls
packages+=(g++ make python3-dev libopenmpi-dev) # to build Horovod
[ "$tier" != all ] || packages+=(slurmdbd mariadb-{server,client}-core) # for Slurm's accounting
set_up test
left_out=()
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
        missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ] && ! apt_install "${missing[@]}"; then
    left_out+=("what needs the packages ${missing[*]}: sudo apt-get install ${missing[*]}")
fi
# Minutes once, and nothing while .venv stays as it is.
built=.venv/.horovod
if [ "$built" -nt .venv/.installed ] || .venv/bin/hpctrain horovod build --cpu --mpi; then
    touch "$built"
else
    left_out+=("what needs Horovod: .venv/bin/hpctrain horovod build --cpu --mpi")
fi
cluster() { .venv/bin/python tests/support/cluster.py "$@"; }
if why=$(cluster available); then
    trap 'cluster stop' EXIT
    # Also what an earlier run that was killed has left.
    cluster stop
else
    left_out+=("the tests on a real Slurm: $why")
fi
tell_left_out() { for line in "${left_out[@]}"; do say "left out: $line"; done; }
if [ -n "$strict" ] && [ ${#left_out[@]} -gt 0 ]; then
    tell_left_out
    fail "parts are left out, and --strict (or \$CI) wants them all"
fi

options=(-rs ${strict:+--strict-parts})
case "$tier" in
planted) exec .venv/bin/python tests/planted "$@" ;;
all | gpu) options+=("--$tier") ;;
esac
# Ranks wait for each other, and jobs for Slurm, about half of the time: two workers a core.
[ $# -gt 0 ] || options+=(-n "$((2 * $(nproc)))" --dist loadgroup --no-loadscope-reorder)
code=0
.venv/bin/python -m pytest "${options[@]}" "$@" || code=$?
tell_left_out
exit "$code"
