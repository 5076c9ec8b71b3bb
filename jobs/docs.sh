#!/usr/bin/env bash
# Builds the site from the pages and the docstrings: site/index.html opens in a browser. A warning,
# such as a broken link, is an error. The site's search needs a server:
set -euo pipefail
# shellcheck source=jobs/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
make_venv
install docs
cd "$ROOT"
NO_MKDOCS_2_WARNING=1 "$PYTHON" -m mkdocs build
