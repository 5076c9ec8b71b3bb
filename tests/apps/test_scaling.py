"""The time to a target at many ranks: measured steps, times predicted seconds of a step."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

import mpikfac
from mpikfac_apps.lab.study import results, scaling, spec
from mpikfac_apps.lab.study.report import at_ranks
from mpikfac_apps.lab.study.report import page as report
from mpikfac_apps.options.strategy import make_plan
from mpikfac_apps.problems import models

pytestmark = pytest.mark.lab

SECONDS = {
    **{"forward": 1e-3, "backward": 2e-3, "statistics": 1e-3, "gradients": 1e-4},
    **{"optimizer": 4e-4, "precondition": 5e-4},
}
LEVEL = mpikfac.predict.Level(1e-6, 1e10)
MACHINE = mpikfac.predict.Machine(
    name="two cores",
    inside=LEVEL,
    networks=(mpikfac.predict.Network("digits_cnn", 8, **SECONDS),),
    decompositions={"inverse": ((10.0, 1e-4), (100.0, 1e-3))},
)
STUDY = {
    "options": {"model": "digits_cnn", "epochs": 2, "kfac.inv_update_steps": 5},
    "target": 0.9,
    "predict_ranks": [2, 16, 64],
    "matrix": [
        {"strategy": ["sgd", "adamw"], "ranks": [1], "batch": [16, 64], "lr": [0.1, 0.2]},
        {"strategy": ["comm-opt", "dp-kfac"], "ranks": [2], "batch": [64], "seed": [0, 1]},
    ],
    "strategies": {"adamw": {"optimizer": "adamw"}},
}
REACHED = {  # steps to the target by label; cells that are not named are not complete
    "sgd, batch 16, lr 0.1 on 1 rank": 400,
    "sgd, batch 16, lr 0.2 on 1 rank": None,
    "sgd, batch 64, lr 0.1 on 1 rank": 300,
    "sgd, batch 64, lr 0.2 on 1 rank": 200,
    "adamw, batch 16, lr 0.2 on 1 rank": 100,
    "comm-opt, batch 64 on 2 ranks, seed 0": 40,
    "comm-opt, batch 64 on 2 ranks, seed 1": 60,
    "dp-kfac, batch 64 on 2 ranks, seed 0": 10,
}
OWN = {"sgd": 1e-3, "adamw": 3e-3}  # seconds of the optimizer's part of a traced step


@pytest.fixture
def study(tmp_path):
    """Return a study whose machine is `MACHINE`, with the results above in `tmp_path`."""
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    wanted = read(tmp_path)
    for cell in wanted.cells:
        if cell.label in REACHED:
            fill(tmp_path / "cells" / cell.directory, cell, REACHED[cell.label])
    return wanted


def read(place, **changes):
    path = place / "study.yaml"
    machine = {"machine": str(place / "machine.json")}
    path.write_text(yaml.safe_dump({**STUDY, **machine, **changes}, sort_keys=False))
    return spec.read(path)


def fill(directory, cell, steps):
    """Write a complete run that is at the target after `steps`, if at all."""
    run = directory / "run"
    run.mkdir(parents=True)
    ended = {"code": 0, "why": "", "seconds": 9.0, "cores": 2, "others": 0.0}
    (directory / "result.json").write_text(json.dumps(ended))
    rows = [
        {"step": step, "epoch": float(epoch), "seconds": 2.0 * epoch, "test_accuracy": value}
        for epoch, (step, value) in enumerate([(5, 0.5), (steps or 900, 0.95 if steps else 0.6)], 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if own := OWN.get(cell.options.optimizer):
        stage = {"calls": 1.0, "bytes": 0.0, "waiting": 0.0, "seconds": own}
        interval = spec.shown_interval(cell.options, cell.ranks)
        rank = {"seconds": 0.02, "stages": {"optimizer": stage}, "beside": {}}
        means = {"steps": list(range(interval)), "seconds": 0.02, "ranks": [rank]}
        (run / "stages.json").write_text(json.dumps(means))


def test_each_batch_takes_the_variant_with_the_fewest_steps(study, tmp_path):
    """Oracle: the fewest steps of complete variants by hand; the mean over all seeds."""
    found = scaling.steps_to_target(results.read(study, tmp_path), 0.9)
    assert [(each.kind, each.batch, each.steps.mean, each.steps.count) for each in found] == [
        *(("sgd", 16, 400, 1), ("sgd", 64, 200, 1)),
        *(("adamw", 16, 100, 1), ("kfac", 64, 50, 2)),  # a seed of dp-kfac is missing
    ]


def test_the_largest_batch_that_takes_twice_the_images(study, tmp_path):
    """Oracle: 6,400 images with batches of 16, 12,800 with 64; one more step is too many."""
    cells = results.read(study, tmp_path)
    assert scaling.efficient_batches(scaling.steps_to_target(cells, 0.9)) == {"sgd": 64}
    sgd = next(cell for cell in study.cells if cell.label == "sgd, batch 64, lr 0.2 on 1 rank")
    shutil.rmtree(tmp_path / "cells" / sgd.directory)
    fill(tmp_path / "cells" / sgd.directory, sgd, 201)
    steps = scaling.steps_to_target(results.read(study, tmp_path), 0.9)
    assert scaling.efficient_batches(steps) == {"sgd": 16}
    (said,) = at_ranks.efficiency(steps)
    assert said.endswith("best batch: 16 (sgd).")


def test_more_seeds_go_before_fewer_steps(tmp_path):
    """Oracle: the search has one seed, the chosen setting three."""
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    matrix = [
        {"strategy": ["sgd"], "ranks": [1], "lr": [0.1, 0.2], "seed": [0]},
        {"strategy": ["sgd"], "ranks": [1], "lr": [0.1], "seed": [1, 2]},
    ]
    wanted = read(tmp_path, matrix=matrix)
    for steps, cell in zip((30, 20, 40, 50), wanted.cells):
        fill(tmp_path / "cells" / cell.directory, cell, steps)
    (found,) = scaling.steps_to_target(results.read(wanted, tmp_path), 0.9)
    assert (found.steps.mean, found.steps.count) == (40, 3)


def test_a_forecast_is_steps_times_the_predicted_step(study, tmp_path):
    """Oracle: the simulator's mean step of plans made by hand; the least time over batches."""
    cells = results.read(study, tmp_path)
    found = {(f.name, f.ranks): f for f in scaling.forecasts(MACHINE, (2, 16, 64), cells, 0.9)}
    sgd = next(c.cell for c in cells if c.cell.strategy == "sgd" and c.cell.options.batch == 64)
    by_hand = {
        ranks: mpikfac.predict.simulate(
            spec.plan_of(sgd.options, ranks),
            MACHINE,
            mpikfac.predict.Job("digits_cnn", 64 // ranks, 1, 5),
        ).mean.seconds
        for ranks in (2, 64)
    }
    assert found["sgd", 64].seconds == pytest.approx(200 * by_hand[64])
    assert found["sgd", 64].measured.batch == 64
    assert found["sgd", 2].seconds <= 200 * by_hand[2]
    # AdamW's own part of a step takes three times as long, so the machine's 0.4 ms become 1.2 ms.
    step = mpikfac.predict.simulate(
        spec.plan_of(sgd.options, 16), MACHINE, mpikfac.predict.Job("digits_cnn", 1, 1, 5)
    ).mean.seconds
    assert found["adamw", 16].seconds == pytest.approx(100 * (step + 8e-4))
    assert ("adamw", 64) not in found  # 16 images are too few for 64 ranks


def test_every_strategy_of_the_same_numbers_has_a_forecast(study, tmp_path):
    """Oracle: plans of two strategies, made from their definitions."""
    cells = results.read(study, tmp_path)
    found = {(f.name, f.ranks): f for f in scaling.forecasts(MACHINE, (16,), cells, 0.9)}
    kfac = {name for name, _ in found if name.startswith("kfac")}
    assert kfac == {f"kfac ({name})" for name in scaling.STRATEGIES}
    assert not {"dp-kfac", "eva", "comm-opt-int8", "stale-inverse"} & set(scaling.STRATEGIES)
    options = next(c.cell.options for c in cells if c.cell.strategy == "comm-opt")
    layers, others = mpikfac.layers.covered_shapes(
        models.build("digits_cnn", 10, 1), mpikfac.Coverage()
    )
    job = mpikfac.predict.Job("digits_cnn", 4, options.kfac.lasting_factor_update_steps, 5)
    for strategy in ("comm-opt", "mem-opt"):
        chosen, _ = mpikfac.get_strategy(strategy)
        plan = make_plan(options.kfac, layers, others, 16, chosen, mpikfac.Inverse())
        expected = 50 * mpikfac.predict.simulate(plan, MACHINE, job).mean.seconds
        assert found[f"kfac ({strategy})", 16].seconds == pytest.approx(expected)


def test_the_page_has_a_table_a_picture_and_a_sentence(study, tmp_path):
    """Oracle: the forecasts themselves; SGD is the quickest of SGD by definition."""
    page = report.write(study, tmp_path, ["mpikfac", "study"]).read_text()
    assert page.count("Time to the target at many ranks") >= 2
    assert 'id="at-ranks-' in page and "kfac (mem-opt)" in page
    assert "mathdefault" not in page  # matplotlib's own labels of logarithmic axes
    rows = json.loads((tmp_path / "report.json").read_text())["at_ranks"]
    sgd = [row for row in rows if row["name"] == "sgd"]
    assert [(row["ranks"], row["against_sgd"]) for row in sgd] == [(2, 1), (16, 1), (64, 1)]
    cells = results.read(study, tmp_path)
    forecasts = scaling.forecasts(MACHINE, study.predict_ranks, cells, 0.9)
    best = {f.ranks: min(g.seconds for g in forecasts if g.ranks == f.ranks) for f in forecasts}
    assert [row["seconds"] for row in rows if row["seconds"] == best[row["ranks"]]] == [
        best[ranks] for ranks in (2, 16, 64)
    ]
    (said,) = at_ranks.sentences(forecasts, study.measure, 0.9)
    assert said.startswith("Predicted for 64 ranks: a test accuracy of 90.0 % is reached by ")
    assert "sgd after" in said and "batch of 64" in said


def test_without_a_measured_batch_the_page_says_so(tmp_path):
    """Oracle: no cell has run."""
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    page = report.write(read(tmp_path), tmp_path, ["mpikfac", "study"]).read_text()
    assert at_ranks.NOTHING in page


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"predict_ranks": 4}, "predict_ranks=4 must be a list"),
        ({"predict_ranks": [0]}, "predict_ranks: 0 must be a whole number from 1 to 1,048,576"),
        ({"predict_ranks": [10**9]}, "predict_ranks: 1000000000 must be a whole number from 1 to"),
        ({"predict_ranks": [10**20]}, "100000000000000000000 must be within ±4,611,"),
        ({"matrix": {"strategy": ["sgd"], "ranks": [10**9]}}, "ranks: 1000000000 must be a whole"),
        ({"predict_ranks": [4, 4]}, "predict_ranks=[4, 4] must not contain a value twice"),
        ({"machine": None}, "predict_ranks needs machine: a file from mpikfac calibrate, or a"),
        ({"matrix": []}, "matrix=[] must have lines of the form `key: value`"),
        ({"matrix": [3]}, "matrix 1=3 must have lines of the form `key: value`"),
        ({"matrix": [{"ranks": [1]}]}, "matrix 1.strategy=None must be a list of at least one"),
        (
            {"matrix": 2 * [{"strategy": ["sgd"], "ranks": [1]}]},
            "matrix: two cells are named 'sgd on 1 rank'; remove one",
        ),
    ],
)
def test_what_a_study_cannot_predict_is_refused_in_one_line(tmp_path, change, words):
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    with pytest.raises(ValueError, match="study.yaml: ") as caught:
        read(tmp_path, **change)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
