"""Start the measurement of a machine: `mpikfac calibrate`."""

import sys

from mpikfac_apps.planning.calibrate import main

sys.exit(main())
