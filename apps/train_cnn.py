"""Start the training: `mpikfac train`."""

import sys

from mpikfac_apps.__main__ import main

sys.exit(main(["train", *sys.argv[1:]]))
