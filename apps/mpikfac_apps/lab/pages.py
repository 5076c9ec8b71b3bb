"""Fill page templates with values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def rendered(template: Path, **values: Any) -> str:
    """Return a template's text, filled with `values`, which are escaped in an .html template.

    Raises:
        jinja2.UndefinedError: the template uses a name that is not in `values`.
    """
    environment = jinja2.Environment(
        autoescape=template.suffix == ".html",
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.from_string(template.read_text("utf-8")).render(values)
