"""Start the comparison of runs: `mpikfac compare`."""

import sys

from mpikfac_apps.__main__ import main

sys.exit(main(["compare", *sys.argv[1:]]))
