#!/bin/bash
# Sets up everything that the tests need, and passes them.
#
#     bash tests/run.sh [--all | --gpu [--save DIR] | --planted] [--slurm VERSION] [--torch X.Y]
#                       [--strict] [--python PROGRAM] [options of pytest, such as -n 0 -k resume]
#
#     (nothing)         what a change is likely to break: at most 8 minutes on two cores
#     --all             every test that needs no GPU
#     --gpu             what needs a GPU, and the benchmarks of GPUs: at most 8 minutes there;
#                       --save keeps the results of the tests and the figures in a folder
#     --planted         plants each known bug in a copy and prints which test finds it
#     --slurm VERSION   the tests on a real Slurm alone, of this version: 24.11 or newest
#     --torch X.Y       the tests that need torch, without Slurm and Horovod, with the newest patch of
#                       this release of torch, in an environment of its own: .venv-torch-X.Y
#     --strict          a part of the machine that is missing is a failure; on where $CI is set
#     --python PROGRAM  use this interpreter and what it has, and set nothing up
#
# As root on Debian or Ubuntu it installs a real Slurm, starts it on four hosts that live in network
# namespaces of this machine, and stops it again. Without root it runs what it can, and its last
# lines say what was left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh

# Hundreds of interpreters start, and would compile the package each time.
unset PYTHONDONTWRITEBYTECODE

tier=default strict=${CI:+yes} save='' python='' slurm='' torch=''
while :; do
    case "${1:-}" in
    --all | --gpu | --planted) tier=${1#--} ;;
    --strict) strict=yes ;;
    --slurm) slurm=${2:?--slurm needs a version} && shift ;;
    --torch) torch=${2:?--torch needs a release, such as 2.10} && shift ;;
    --save) save=$(realpath -m "${2:?--save needs a folder}") && shift ;;
    --python) python=${2:?--python needs a program} && shift ;;
    *) break ;;
    esac
    shift
done

left_out=()
tell_left_out() { for line in "${left_out[@]}"; do print_line "left out: $line"; done; }

install_packages() {
    local package missing=()
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            missing+=("$package")
    done
    if [ ${#missing[@]} -gt 0 ] && ! apt_install "${missing[@]}"; then
        left_out+=("what needs the packages ${missing[*]}: sudo apt-get install ${missing[*]}")
    fi
}

build_horovod() {
    # Minutes once, and nothing while .venv stays as it is.
    local built=.venv/.horovod
    if [ "$built" -nt .venv/.installed ] || .venv/bin/hpctrain horovod build --cpu --mpi; then
        touch "$built"
    else
        left_out+=("what needs Horovod: .venv/bin/hpctrain horovod build --cpu --mpi")
    fi
}

cluster() { "$python" tests/support/cluster.py "$@"; }

prepare_cluster() {
    local why
    if why=$(cluster available); then
        trap 'cluster stop' EXIT
        # Also what an earlier run that was killed has left.
        cluster stop
    else
        left_out+=("the tests on a real Slurm: $why")
    fi
}

if [ -n "$torch" ]; then
    venv=.venv-torch-$torch
    set_up test "torch==$torch.*"
    python=$venv/bin/python
elif [ -z "$python" ]; then
    set_up test
    python=.venv/bin/python
    # Its requirements hold back NumPy and transformers, and bring the clients of several clouds.
    "$python" -c 'import importlib.util as u; exit(u.find_spec("streaming") is None)' ||
        "$python" -m pip install --disable-pip-version-check -q --no-deps mosaicml-streaming ||
        left_out+=("what needs MosaicML Streaming: pip install --no-deps mosaicml-streaming")
    if [ "$tier" != gpu ]; then
        packages=(slurm-wlm munge iproute2 shellcheck)
        packages+=(openmpi-bin mpich libpmix-dev)
        packages+=(openssh-server) # for horovodrun, on the hosts in network namespaces
        packages+=(environment-modules) # a cluster's `module load`
        packages+=(chromium-headless-shell mate-backgrounds) # to look at a report; photographs
        packages+=(zsh fish) # read the scripts of `hpctrain completion`
        packages+=(strace) # kills a save at each of its system calls
        packages+=(g++ make python3-dev libopenmpi-dev) # to build Horovod
        # For Slurm's accounting.
        [ "$tier" != all ] || packages+=(slurmdbd mariadb-{server,client}-core)
        install_packages "${packages[@]}"
        build_horovod
    fi
else
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi
unset HPCTRAIN_PYTHON # of the set-up; the tests check which variables of hpctrain change
if [ -n "$slurm" ]; then
    [ -n "$(command -v mmdebstrap)" ] || apt_install mmdebstrap
    "$python" tests/support/slurm_roots.py "$slurm"
    export HPCTRAIN_TEST_SLURM=$slurm
fi
[ "$tier" = gpu ] || [ -n "$torch" ] || prepare_cluster
if [ -n "$strict" ] && [ ${#left_out[@]} -gt 0 ]; then
    tell_left_out
    fail "parts are left out, and --strict (or \$CI) wants them all"
fi

if [ "$tier" = planted ]; then
    "$python" tests/planted "$@"
    exit
fi
options=(-rs ${strict:+--strict-parts} ${slurm:+-m slurm})
if [ -n "$torch" ]; then
    options+=(-m 'not (slurm or horovod)')
    options+=(tests/{backends,checkpoint,compat,data,monitoring,precision,process,training})
fi
[ "$tier" = default ] || options+=("--$tier")
# Ranks wait for each other, and jobs for Slurm, about half of the time: two workers a core. On a GPU
# the ranks take turns, and more workers do not help.
workers=$((2 * $(nproc)))
[ "$tier" != gpu ] || workers=$((workers < 12 ? workers : 12))
options+=(-n "$workers" --dist loadgroup --no-loadscope-reorder)
code=0
if [ "$tier" = gpu ]; then
    # Also without --strict: who asks for these tests has a GPU.
    results=${save:-$(mktemp -d)}
    mkdir -p "$results"
    options+=(--strict-parts "--junitxml=$results/tests.xml")
    "$python" -m pytest "${options[@]}" "$@" || code=$?
    "$python" benchmarks --gpu --save "$results" || code=$?
    "$python" tests/support/summary.py "$results/tests.xml"
    [ -n "$save" ] || rm -rf "$results"
else
    "$python" -m pytest "${options[@]}" "$@" || code=$?
fi
tell_left_out
exit "$code"
