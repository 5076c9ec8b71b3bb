"""Start the training of a recommender; docs/extensions/recommendation.md has the needs."""

import sys

from mpikfac_apps.recommendation.train import main

sys.exit(main())
