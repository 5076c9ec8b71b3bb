"""Start the measurement of a machine: `mpikfac calibrate`."""

import sys

from mpikfac_apps.__main__ import main

sys.exit(main(["calibrate", *sys.argv[1:]]))
