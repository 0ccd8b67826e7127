#!/usr/bin/env bash
# Runs the tests:  ./run_tests.sh [--all] [tests/cli -k flags ...]
# Without --all those marked as slow are left out; all other arguments go to pytest. Makes .venv the first time.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$root/tools/setup_env.sh"
setup_env "$root" dev
cd "$root"
# Several processes of one thread each on few cores; and no test may need the network.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1
# Two files at a time; tests/support/selection.py says which.
exec "$root/.venv/bin/python" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
