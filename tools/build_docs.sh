#!/usr/bin/env bash
# Builds the documentation into site/, from README.md, docs/ and the docstrings; a warning is an error.
# Makes .venv the first time. Arguments go to mkdocs:  tools/build_docs.sh --site-dir /tmp/site
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/setup_env.sh"
setup_env "$root" docs
cd "$root"
export NO_MKDOCS_2_WARNING=true # mkdocs is held below 2
exec "$root/.venv/bin/python" -m mkdocs build --strict --clean "$@"
