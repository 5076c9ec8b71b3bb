"""Recommendation: files of clicks, the area under the curve, and runs of the program."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
import torch

from mpikfac_apps.recommendation import clicks
from mpikfac_apps.recommendation.network import Dlrm
from mpikfac_apps.recommendation.train import RecommendationOptions, area, standardised
from support.launch import launch

pytestmark = pytest.mark.lab

PROGRAM = ("-m", "mpikfac_apps", "train-recommendation")
IN_FLOAT64 = """
import sys, torch
from mpikfac_apps.recommendation.train import main
torch.set_default_dtype(torch.float64)
sys.exit(main())
"""
RATINGS = """user_id:token\titem_id:token\trating:float\ttimestamp:float
7\t3\t4\t881253600
9\t3\t2\t881250000
7\t5\t5\t881257200
9\t3\t5\t881260800
"""


@pytest.fixture
def ratings(tmp_path):
    """Return the path of four ratings, of users and of items."""
    path = tmp_path / "few.inter"
    path.write_text(RATINGS)
    path.with_suffix(".user").write_text("user_id:token\tage:token\tgender:token\n7\t24\tM\n")
    path.with_suffix(".item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        '5\tA "Story\t1995\tComedy Drama\n'
    )
    return path


def test_ratings_come_in_the_order_of_time(ratings):
    """Oracle: by hand: counts before each rating, and places of sorted texts."""
    found = clicks.read(str(ratings), 2)
    assert found.labels.tolist() == [0, 1, 1, 1]
    counts = [[0, 0, 0, 0], [0, 0, 1, 0], [1, 1, 0, 0], [1, 0, 2, 1]]
    np.testing.assert_allclose(found.numbers, np.log1p(counts), rtol=1e-6)
    columns = dict(zip(found.sizes, found.categories.T.tolist()))
    assert columns["user"] == [1, 0, 0, 1] and columns["item"] == [0, 0, 1, 0]
    assert columns["age"] == columns["gender"] == [0, 1, 1, 0]  # "" is a category
    assert columns["year"] == columns["genre"] == [0, 0, 1, 0]
    hours = [time.gmtime(second).tm_hour for second in (881250000, 881253600, 881257200, 881260800)]
    assert columns["hour"] == [sorted(map(str, hours)).index(str(hour)) for hour in hours]
    assert found.sizes["hour"] == 4 and found.sizes["occupation"] == 1


def test_rows_of_criteo_are_counts_and_hashed_categories(tmp_path):
    """Oracle: by hand; a missing count is 0, a negative count too, a missing category is row 0."""
    path = tmp_path / "day.tsv"
    numbers = ["5", "", "-1", *"0" * 10]
    path.write_text("\t".join(["1", *numbers, "0b", "", *["5e"] * 24]) + "\n")
    found = clicks.read(str(path), 10)
    assert found.labels.tolist() == [1]
    np.testing.assert_allclose(found.numbers[0, :4], [math.log(6), 0, 0, 0], rtol=1e-6)
    assert found.categories[0, :3].tolist() == [0x0B % 9 + 1, 0, 0x5E % 9 + 1]
    assert found.sizes == {f"C{k}": 10 for k in range(1, 27)}


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "a.inter",
            RATINGS.replace("rating:float", "stars:float"),
            "must have the column 'rating'",
        ),
        ("a.inter", RATINGS + "7\t3\n", "row 6 must have 4 columns, not 2"),
        ("a.inter", RATINGS.replace("881253600", "soon"), "'soon'"),
        ("a.inter", RATINGS.replace("881253600", "inf"), "must be a file of ratings"),
        ("a.inter", RATINGS.replace("\t4\t", "\tnan\t"), "a number must be finite, not 'nan'"),
        ("a.tsv", "1\t2\t3\n", "row 1: 40 columns are needed, not 3"),
        ("a.tsv", "", "it must have at least one row"),
        ("a.tsv", "\t".join(["1"] * 40) + "\n\n", "row 2 must have 40 columns, not 0"),
        ("a.tsv", "\t".join(["1"] * 14 + ["xyz"] * 26) + "\n", "row 1: .*'xyz'"),
        ("a.tsv", "\t".join(["2"] * 40) + "\n", "a label must be 0 or 1, not 2"),
        ("a.tsv", "\t".join(["1", "nan", *["2"] * 38]) + "\n", "row 1: a number must be finite"),
    ],
)
def test_other_files_are_refused(tmp_path, name, content, text):
    """Oracle: the error's text, which names the file."""
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=text) as caught:
        clicks.read(str(tmp_path / name), 10)
    assert f"data={tmp_path / name}" in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """Oracle: the error's text."""
    with pytest.raises(ValueError, match="cannot be read"):
        clicks.read(str(tmp_path / "none.inter"), 10)


def test_movielens_is_found_in_the_package_without_an_import(tmp_path, monkeypatch):
    """Oracle: a package whose import fails; and no package."""
    (tmp_path / "recbole" / clicks.RATINGS.parent).mkdir(parents=True)
    (tmp_path / "recbole/__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    assert clicks.packaged() == tmp_path / "recbole" / clicks.RATINGS
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps recbole"):
        clicks.read(None, 10)


def test_the_area_is_the_share_of_pairs_in_order():
    """Oracle: all pairs one by one; equal scores count a half."""
    draws = np.random.default_rng(0)
    for _ in range(5):
        scores, labels = draws.integers(0, 6, 40).astype(float), draws.integers(0, 2, 40)
        pairs = [(a > b) + (a == b) / 2 for a in scores[labels == 1] for b in scores[labels == 0]]
        assert area(scores, labels) == pytest.approx(np.mean(pairs), rel=1e-12)
    assert area(np.array([1.0, 2.0]), np.array([0, 1])) == 1.0
    assert math.isnan(area(np.array([1.0, 2.0]), np.array([1, 1])))


def test_scores_are_of_products_of_all_pairs():
    """Oracle: numpy, pair by pair."""
    torch.manual_seed(0)
    model = Dlrm(3, 2, 4, [5], [6])
    numbers, rows = torch.randn(7, 3), torch.randn(7, 2, 4)
    first = model.bottom(numbers)
    assert (first >= 0).all()
    a, b, c = (x.detach().numpy() for x in (first, rows[:, 0], rows[:, 1]))
    pairs = [(b * a).sum(1), (c * a).sum(1), (c * b).sum(1)]
    given = torch.from_numpy(np.concatenate([a, np.stack(pairs, 1)], 1))
    torch.testing.assert_close(model(numbers, rows), model.top(given).squeeze(1))


@pytest.mark.parametrize(("ranks", "batch"), [(4, 3), (1, 81)])
def test_a_batch_that_does_not_fit_is_refused(ranks, batch):
    """Oracle: the error's text."""
    with pytest.raises(ValueError, match=rf"batch={batch} .* number of ranks \({ranks}\)"):
        RecommendationOptions(batch=batch).check(ranks, 80, 100)


def test_a_test_without_a_click_is_refused():
    """Oracle: the error's text; a fifth of two clicks is rounded to none."""
    with pytest.raises(ValueError, match=r"tested=0.2 leaves none of the 2 clicks for the test"):
        RecommendationOptions(batch=1).check(1, 2, 2)


def test_numbers_that_are_constant_in_training_keep_their_unit():
    """Oracle: by hand; -1 and 1 have a variance of 2 with one degree of freedom lost."""
    numbers = torch.tensor([[3.0, 5.0], [5.0, 5.0], [6.0, 8.0]])
    expected = [[-(0.5**0.5), 0], [0.5**0.5, 0], [2 * 0.5**0.5, 3]]
    torch.testing.assert_close(standardised(numbers, 2), torch.tensor(expected))


def drawn(path):
    """Write ratings that depend on user and item."""
    draws = np.random.default_rng(2)
    lines = [RATINGS.splitlines()[0]]
    for second in range(200):
        user, item = draws.integers(0, (6, 9))
        lines.append(f"{user}\t{item}\t{3 + (user + item) % 3}\t{881250949 + second}")
    path.write_text("\n".join(lines) + "\n")
    return path


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines) if "test_log_loss" in row}


def test_a_run_goes_on_on_other_ranks(tmp_path):
    """Oracle: the run without a restart; 8 tables move from 2 ranks to 3.

    In float32 the runs may part: K-FAC's directions amplify rounding, and when an input of a ReLU
    changes its sign, the gradient jumps. The log has six digits.
    """
    arguments = [f"--data={drawn(tmp_path / 'drawn.inter')}", "--epochs=3", "--batch=20"]
    arguments += ["--device=cpu", "--table_lr=0.1"]
    ended = launch(1, "-c", IN_FLOAT64, *arguments, f"--run_dir={tmp_path / 'whole'}")
    assert ended.returncode == 0, ended.stderr
    assert "DLRM of 6,865 weights and 8 tables" in ended.stdout
    parts = f"--run_dir={tmp_path / 'parts'}"
    assert launch(2, "-c", IN_FLOAT64, *arguments, parts, "--max_steps=11").returncode == 0
    ended = launch(3, "-c", IN_FLOAT64, *arguments, parts, "--resume=auto")
    assert ended.returncode == 0, ended.stderr
    whole, found = rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts")
    assert whole.keys() == found.keys() == {8, 16, 24}
    for step in whole:
        for name in ("test_log_loss", "test_AUC"):
            assert found[step][name] == pytest.approx(whole[step][name], rel=1e-5)
