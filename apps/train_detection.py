"""Start the training of a detector on drawn shapes; docs/extensions/detection.md has the needs."""

import sys

from mpikfac_apps.detection.train import main

sys.exit(main())
