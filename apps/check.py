"""Start the check of a model: `mpikfac check`."""

import sys

from mpikfac_apps.checking.check import main

sys.exit(main())
