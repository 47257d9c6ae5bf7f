# Sourced by examples/quickstart.sh and tests/run.sh: makes a virtual environment at the top of the
# repository and installs hpctrain and what it needs into it. A second call is quick.
#
#     set_up EXTRAS [REQUIREMENT...]
#         EXTRAS         "" or a list of extras of setup.cfg such as "test,vision"
#         REQUIREMENT    what pip has to install as well, such as "torch==2.10.*"

venv=.venv # its name

print_line() { printf '%s\n' "== $*"; }

fail() {
    printf '%s\n' "hpctrain: error: $*" >&2
    exit 2
}

# The first Python that is new enough.
find_python() {
    local candidate
    for candidate in "${HPCTRAIN_PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "found no Python 3.11 or newer
  fix:      on Debian or Ubuntu: apt-get install python3 python3-venv; on a cluster: module avail python;
            on macOS: brew install python"
}

# apt-get install, as root only; the first call updates the lists.
apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    print_line "installing Debian packages: $*"
    [ -n "${apt_updated:-}" ] || apt-get update -qq || return 1
    apt_updated=yes
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

make_venv() {
    local python version
    python=$(find_python) || exit 2
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        apt_install "python$version-venv" || apt_install python3-venv ||
            fail "$python cannot make virtual environments (it has no ensurepip)
  fix:      sudo apt-get install python3-venv"
    fi
    print_line "making $venv with $python ($("$python" --version))"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$python -m venv $venv failed; see the lines above"
}

set_up() {
    local extras=$1 wanted stamp=$venv/.installed
    shift
    # Two calls at once would install into each other's half-made environment.
    exec 9>.venv.lock
    if command -v flock >/dev/null; then flock 9; fi # macOS has none
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
    wanted="$extras $* $(cat setup.cfg setup.py | cksum)"
    if ! grep -qxF "$wanted" "$stamp" 2>/dev/null; then
        print_line "installing hpctrain${extras:+[$extras]} into $venv (with torch: some minutes, some GB)"
        "$venv/bin/python" -m pip install --disable-pip-version-check -q -e ".${extras:+[$extras]}" \
            "$@" ||
            fail "pip failed; see the lines above, then run this script again"
        printf '%s\n' "$wanted" >>"$stamp"
    fi
    exec 9>&-
}
