"""Read clicks: MovieLens ratings in RecBole's files, or rows in Criteo's format."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpikfac import files

LIKED = 4.0  # the minimum rating that counts as a click
RATINGS = Path("dataset_example/ml-100k/ml-100k.inter")  # a file in the package recbole
NUMBERS, CATEGORIES = 13, 26  # numbers of columns in Criteo's format, after the label
Row = Mapping[str, str]


@dataclass(frozen=True)
class Clicks:
    """Examples for click prediction, in chronological order.

    Attributes:
        numbers: the numerical features `[examples, numbers]`.
        categories: the index of the example's row in each embedding table `[examples, tables]`.
        labels: 1 for a click, 0 for no click, `[examples]`.
        sizes: the number of rows of each table, by the table's name.
    """

    numbers: Tensor
    categories: Tensor
    labels: Tensor
    sizes: Mapping[str, int]


def read(name: str | None, buckets: int) -> Clicks:
    """Return the clicks in a file: MovieLens with the suffix .inter, otherwise Criteo's format.

    Args:
        name: a path; None for MovieLens-100k in the package recbole.
        buckets: with Criteo's format, the number of rows of each table.

    Raises:
        ValueError: the file cannot be read, or is not in the expected format.
    """
    path = Path(name) if name else packaged()
    try:
        found = movielens(path) if path.suffix == ".inter" else criteo(path, buckets)
        if wrong := set(found.labels.tolist()) - {0, 1}:
            raise ValueError(f"a label must be 0 or 1, not {min(wrong):g}")
    except OSError as error:
        raise ValueError(f"data={path} cannot be read: {files.why(error)}") from error
    except (csv.Error, OverflowError, ValueError) as error:
        kind = "ratings" if path.suffix == ".inter" else "Criteo's format"
        raise ValueError(f"data={path} must be a file of {kind}: {error}") from error
    return found


def packaged() -> Path:
    """Return the path of MovieLens-100k in the package recbole, without importing it.

    Raises:
        ValueError: the package is not installed.
    """
    package = importlib.util.find_spec("recbole")
    if package is None or package.origin is None:
        raise ValueError(
            "data=null needs MovieLens-100k from the package recbole; run "
            "pip install --no-deps recbole, or set data=FILE"
        )
    return Path(package.origin).parent / RATINGS


# -- MovieLens -------------------------------------------------------------------------------------


def movielens(path: Path) -> Clicks:
    """Return the ratings in a file as clicks in chronological order.

    The numerical features are log(1 + n), where n is the number of earlier ratings, or of earlier
    clicks, of the user or the item. Attributes of users and items are read from files of the same
    name with the suffixes .user and .item, if these files exist.
    """
    columns = ("user_id", "item_id", "rating", "timestamp")
    ratings = sorted(listed(path, *columns), key=lambda row: finite(row["timestamp"]))
    users, items = (known(path.with_suffix(f".{kind}"), f"{kind}_id") for kind in ("user", "item"))
    of_user = [users.get(row["user_id"], {}) for row in ratings]
    of_item = [items.get(row["item_id"], {}) for row in ratings]
    times = [time.gmtime(float(row["timestamp"])) for row in ratings]
    tables = {
        "user": [row["user_id"] for row in ratings],
        "item": [row["item_id"] for row in ratings],
        "age": [row.get("age", "") for row in of_user],
        "gender": [row.get("gender", "") for row in of_user],
        "occupation": [row.get("occupation", "") for row in of_user],
        "year": [row.get("release_year", "") for row in of_item],
        "genre": [row.get("class", "").partition(" ")[0] for row in of_item],
        "hour": [str(moment.tm_hour) for moment in times],
    }
    found = {name: np.unique(values, return_inverse=True) for name, values in tables.items()}
    labels = [finite(row["rating"]) >= LIKED for row in ratings]
    everything = [True] * len(ratings)
    numbers = [
        earlier(tables[name], counted)
        for name in ("user", "item")
        for counted in (everything, labels)
    ]
    return Clicks(
        tensor(np.log1p(np.stack(numbers, axis=1))),
        torch.from_numpy(np.stack([places for _, places in found.values()], axis=1)),
        tensor(labels),
        {name: len(values) for name, (values, _) in found.items()},
    )


def listed(path: Path, *columns: str) -> Iterator[Row]:
    """Yield the rows of a RecBole file, keyed by column; the column "age:token" has the key "age".

    Raises:
        ValueError: one of the `columns` is missing.
    """
    head, *rows = rows_of(path)
    names = [name.partition(":")[0] for name in head]
    if missing := [column for column in columns if column not in names]:
        raise ValueError(f"the first line must have the column {missing[0]!r}")
    yield from (dict(zip(names, row)) for row in rows)


def known(path: Path, key: str) -> dict[str, Row]:
    """Return the rows of a file, keyed by the values of a column; empty if there is no file."""
    return {row[key]: row for row in listed(path, key)} if path.exists() else {}


def earlier(values: Sequence[str], counted: Sequence[bool]) -> list[int]:
    """Return, for each value, how often it occurs earlier in the list where `counted` is true."""
    seen, counts = Counter[str](), []
    for value, counts_too in zip(values, counted):
        counts.append(seen[value])
        seen[value] += counts_too
    return counts


# -- Criteo ----------------------------------------------------------------------------------------


def criteo(path: Path, buckets: int) -> Clicks:
    """Return the rows of a file in Criteo's format: a label, 13 counts, 26 hexadecimal categories.

    A table has one row for missing categories; the other categories are hashed to its other rows.
    """
    rows = []
    for number, row in enumerate(rows_of(path), 1):
        try:
            rows.append(parsed(row, buckets))
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
    labels, numbers, categories = zip(*rows)
    return Clicks(
        tensor(np.log1p(np.maximum(numbers, 0.0))),
        torch.tensor(categories),
        tensor(labels),
        {f"C{number}": buckets for number in range(1, 1 + CATEGORIES)},
    )


def parsed(row: Sequence[str], buckets: int) -> tuple[float, list[float], list[int]]:
    """Return a row's label, its counts, and the indices of its rows in the tables.

    Raises:
        ValueError: the row does not have 40 columns, or a column is not a number.
    """
    if len(row) != 1 + NUMBERS + CATEGORIES:
        raise ValueError(f"{1 + NUMBERS + CATEGORIES} columns are needed, not {len(row)}")
    label, *columns = row
    hashed = [int(word, 16) % (buckets - 1) + 1 if word else 0 for word in columns[NUMBERS:]]
    return finite(label), [finite(number or "0") for number in columns[:NUMBERS]], hashed


def finite(number: str) -> float:
    """Parse a finite number.

    Raises:
        ValueError: the string is not a finite number.
    """
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"a number must be finite, not {number!r}")
    return value


def rows_of(path: Path) -> Iterator[list[str]]:
    """Yield the rows of a tab-separated file; all rows have as many columns as the first.

    Raises:
        ValueError: a row has more or fewer columns than the first, or there is no row.
    """
    with io.TextIOWrapper(files.reading(path, links=True), encoding="utf-8", newline="") as text:
        columns = 0
        for number, row in enumerate(csv.reader(text, "excel-tab", quoting=csv.QUOTE_NONE), 1):
            columns = columns or len(row)
            if len(row) != columns:
                raise ValueError(f"row {number} must have {columns} columns, not {len(row)}")
            yield row
        if not columns:
            raise ValueError("it must have at least one row")


def tensor(values: Sequence[float] | np.ndarray) -> Tensor:
    """Return numbers as a tensor in torch's default dtype."""
    return torch.as_tensor(np.asarray(values), dtype=torch.get_default_dtype())
