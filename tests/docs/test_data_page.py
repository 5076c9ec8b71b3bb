"""docs/data.md: the function of the page is a data set, and the page names all items of a file."""

from __future__ import annotations

import re
from pathlib import Path

from mpikfac_apps.images import packed
from mpikfac_apps.problems import datasets

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_the_function_of_the_page_is_a_data_set(tmp_path):
    """Oracle: the numbers in the page's code."""
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    found = datasets.load(f"{tmp_path / 'mine.py'}:data")
    assert (len(found.train_images), len(found.test_images), found.classes) == (800, 200, 7)


def test_the_page_names_all_items_of_a_packed_file():
    """Oracle: the items that are written."""
    about = PAGE.partition("The file is plain HDF5")[2].partition("\n\n")[0]
    assert {packed.LARGE, *packed.FORM} <= set(re.findall(r"`(\w+)`", about))
