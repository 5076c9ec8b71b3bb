"""Start the training: `mpikfac train`."""

import sys

from mpikfac_apps.training.train import main

sys.exit(main())
