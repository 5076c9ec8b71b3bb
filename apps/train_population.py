"""Start the training of a population that searches for learning rate and damping."""

import sys

from mpikfac_apps.populations.run import main

sys.exit(main())
