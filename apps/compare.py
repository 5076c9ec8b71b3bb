"""Start the comparison of runs: `mpikfac compare`."""

import sys

from mpikfac_apps.study.compare import main

sys.exit(main())
