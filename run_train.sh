#!/usr/bin/env bash
# Trains with a recipe file:  ./run_train.sh toml_configs/debug_cpu.toml --training.steps 500
# Makes .venv the first time. Without arguments it prints the help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$root/tools/setup_env.sh"
setup_env "$root"
if [ $# -eq 0 ]; then
    set -- --help
fi
exec "$root/.venv/bin/titan-async" train "$@"
