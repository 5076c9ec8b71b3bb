"""Start the training: `mpikfac train`."""

import sys

from mpikfac_apps.training.run import main

sys.exit(main())
