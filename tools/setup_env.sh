# Sourced by run_train.sh, run_tests.sh and build_docs.sh: defines setup_env, which creates or updates .venv.
#
# The environment is updated when pyproject.toml changes; otherwise the check takes a few milliseconds. PYTHON
# selects the interpreter; the default is the first of the usual names that is 3.11 or newer.

find_python() {
    local candidates=(python3.13 python3.12 python3.11 python3) candidate
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON is not a Python 3.11 or newer; set it to one." >&2
    else
        echo "No Python 3.11 or newer was found; install one, or set PYTHON to its path." >&2
    fi
    return 1
}

# setup_env ROOT [EXTRA]: installs the checkout in ROOT, with an extra of pyproject.toml if given.
# Each extra has its own stamp, so that training does not install again after the tests.
setup_env() {
    local root=$1 extra=${2:-}
    local venv="$root/.venv" python
    local stamp="$venv/.installed${extra:+-$extra}" wanted
    wanted=$(cksum <"$root/pyproject.toml")
    # An environment does not work after it was moved, so this file contains its path. It is written when the
    # environment is complete.
    local made_for="$venv/.made-for"
    if is_ready; then
        return 0
    fi

    # One process at a time; others wait here.
    exec 9<"$root/tools/setup_env.sh"
    if command -v flock >/dev/null && ! flock -n 9; then
        echo "Waiting for another setup of .venv ..." >&2
        flock 9
    fi
    if is_ready; then
        exec 9<&-
        return 0
    fi

    if [ "$(cat "$made_for" 2>/dev/null)" = "$root" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        echo "Updating .venv: pyproject.toml has changed, or the ${extra:-training} packages are missing ..." >&2
    else
        python=$(find_python) || return 1
        rm -rf "$venv"
        echo "Setting up .venv with $("$python" --version); the first time this takes some minutes ..." >&2
        if ! "$python" -m venv "$venv"; then
            echo "$python -m venv failed; on Debian and Ubuntu install python3-venv." >&2
            return 1
        fi
    fi
    rm -f "$stamp"
    if ! "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        --editable "$root${extra:+[$extra]}"; then
        echo "Installing titan_async into .venv failed; the reason is above. Start again to retry." >&2
        return 1
    fi
    printf '%s\n' "$root" >"$made_for"
    printf '%s\n' "$wanted" >"$stamp"
    exec 9<&-
}

is_ready() { # reads the variables of setup_env
    [ -x "$venv/bin/python" ] && [ "$(cat "$made_for" 2>/dev/null)" = "$root" ] \
        && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]
}
