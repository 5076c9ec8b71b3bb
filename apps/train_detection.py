"""Start the training of a detector on drawn shapes; needs torchvision, see docs/detection.md."""

import sys

from mpikfac_apps.detection.train import main

sys.exit(main())
