"""Start the check of a model: `mpikfac check`."""

import sys

from mpikfac_apps.__main__ import main

sys.exit(main(["check", *sys.argv[1:]]))
