"""The start of a run, described for experiment trackers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mpikfac import files


class Start:
    """The start of a run, described for experiment trackers.

    Attributes:
        directory: the run directory.
        step: the number of completed steps: 0, or the step of the checkpoint to resume from.
        options: the values of all options by key, such as "kfac.damping".
    """

    def __init__(self, directory: Path, step: int, options: Mapping[str, Any]) -> None:
        self.directory, self.step, self.options = directory, step, options

    @cached_property
    def id(self) -> str:
        """A unique string of 32 hexadecimal digits, the same for all starts in the run directory.

        Raises:
            OSError: the file RUN/tracking_id cannot be read or written.
            ValueError: the file contains something else.
        """
        path = self.directory / "tracking_id"
        try:
            text = files.read_text(path)
        except FileNotFoundError:
            files.write_text(path, text := uuid.uuid4().hex)
        if not re.fullmatch("[0-9a-f]{32}", text):
            raise ValueError(f"{path} is damaged: it must contain 32 hexadecimal digits; delete it")
        return text
