"""Start the training of a recommender on clicks; docs/extensions/recommendation.md has the needs."""

import sys

from mpikfac_apps.recommendation.train import main

sys.exit(main())
