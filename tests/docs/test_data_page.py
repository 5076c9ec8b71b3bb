"""The function of docs/guide/data.md is a data set, and the page names all items of a file."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

from PIL import Image

from mpikfac_apps.images import packed
from mpikfac_apps.problems import datasets

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "data.md").read_text()


def test_the_function_of_the_page_is_a_data_set(tmp_path):
    """Oracle: the numbers in the page's code."""
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    found = datasets.load(f"{tmp_path / 'mine.py'}:data")
    assert (len(found.train_images), len(found.test_images), found.classes) == (800, 200, 7)


def test_the_shards_of_the_page_are_a_data_set(tmp_path, monkeypatch):
    """Oracle: images of one colour, the number of the image; labels by hand."""
    (code,) = re.findall(r"```python\n# shards.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "shards.py").write_text(code)
    (tmp_path / "shards").mkdir()
    for name, numbers in (("train-0", [0, 1, 2]), ("train-1", [3, 4]), ("val-0", [5, 6])):
        with tarfile.open(tmp_path / "shards" / f"{name}.tar", "w") as tar:
            for number in numbers:
                image = io.BytesIO()
                Image.new("RGB", (40, 50), (number, 0, 0)).save(image, "PNG")
                add(tar, f"{number:06}.png", image.getvalue())
                add(tar, f"{number:06}.cls", str(number % 3).encode())
    monkeypatch.chdir(tmp_path)
    found = datasets.load(f"{tmp_path / 'shards.py'}:data")
    assert found.train_images[:, 0, 9, 9].tolist() == [0, 1, 2, 3, 4]
    assert found.train_labels.tolist() == [0, 1, 2, 0, 1]
    assert found.test_images[:, 0, 9, 9].tolist() == [5, 6]
    assert (found.test_labels.tolist(), found.classes) == ([2, 0], 3)


def add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def test_the_page_names_all_items_of_a_packed_file():
    """Oracle: the items that are written."""
    about = PAGE.partition("The file is plain HDF5")[2].partition("\n\n")[0]
    assert {packed.LARGE, "digest", *packed.FORM} <= set(re.findall(r"`(\w+)`", about))
