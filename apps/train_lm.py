"""Start the training of a language model: `mpikfac train` with the options of a file."""

import sys
from pathlib import Path

from mpikfac_apps.__main__ import main

CONFIG = Path(__file__).parents[1] / "jobs" / "configs" / "text_kfac.yaml"

sys.exit(main(["train", "--config", str(CONFIG), *sys.argv[1:]]))
