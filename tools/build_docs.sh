#!/usr/bin/env bash
# Builds the documentation into site/, from README.md, docs/ and the docstrings; a warning is an error.
# Creates .venv if needed. Arguments are passed to mkdocs:  tools/build_docs.sh --site-dir /tmp/site
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/setup_env.sh"
setup_env "$root" docs
cd "$root"
export NO_MKDOCS_2_WARNING=true # pyproject.toml requires mkdocs below 2
exec "$root/.venv/bin/python" -m mkdocs build --strict --clean "$@"
