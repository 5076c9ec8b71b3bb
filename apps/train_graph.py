"""Start the training of a graph network; docs/extensions/graphs.md has the needs."""

import sys

from mpikfac_apps.graphs.train import main

sys.exit(main())
