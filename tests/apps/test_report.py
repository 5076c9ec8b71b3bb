"""The report of a study from files of measurements of all cells or few cells."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from matplotlib.figure import Figure

import mpikfac
from mpikfac_apps.lab.study import results, spec, study
from mpikfac_apps.lab.study.measures import MEASURES
from mpikfac_apps.lab.study.report import page as report
from mpikfac_apps.lab.study.report import pictures, style
from mpikfac_apps.lab.study.report.findings import TEST_IMAGES, findings, unclear
from mpikfac_apps.lab.study.seeds import doubt, leaders, mean_of, student
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.text import ms

pytestmark = pytest.mark.lab

STUDY = {
    "name": "a <study>",
    "options": {
        "batch": 120,
        "epochs": 3,
        "kfac.factor_update_steps": 1,
        "kfac.inv_update_steps": 2,
    },
    "target": 0.9,
    "matrix": {"strategy": ["sgd", "comm-opt", "mem-opt", "dp-kfac"], "ranks": [1, 2]},
}
ACCURACY = (0.5, 0.9, 0.95)
ACCURACIES = MEASURES["accuracy"]
SPEEDS = (1000.0, 1200.0, 4000.0)  # images per second of three intervals
ENVIRONMENT = {
    "started": "2026-01-01T00:00:00+00:00",
    "ranks_per_host": {"node7": 2},
    "device": "cpu",
    "threads_per_rank": 1,
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
}
STAGE = {"calls": 1.0, "bytes": 0.0, "waiting": 0.0}


def stages(handed, steps=(2, 3)):
    """Return stages of two ranks: 10 ms forward, 4 ms in a collective, and 6 ms unknown.

    Of the collective's 4 ms the first rank waits 3 ms.
    """
    ranks = []
    for waiting in (0.003, 0.0):
        reduce = {**STAGE, "seconds": 0.004, "waiting": waiting, "bytes": handed}
        named = {"forward": {**STAGE, "seconds": 0.010}, "reduce statistics": reduce}
        ranks.append(
            {"seconds": 0.020, "stages": named | {"new": {**STAGE, "seconds": 0.006}}, "beside": {}}
        )
    return {"steps": list(steps), "seconds": 0.020, "ranks": ranks}


def trace():
    """Return two steps of two ranks; the second rank starts later, the second step refreshes."""
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}]
    for step, work in enumerate(("forward", "decompose")):
        for rank in (0, 1):
            start = {"ph": "X", "pid": rank, "ts": 100.0 * step + 10 * rank}
            events.append({**start, "name": f"step {step}", "tid": 0, "dur": 95.0})
            events.append({**start, "name": work, "tid": 1, "dur": 50.0, "args": {}})
    return {"traceEvents": events}


def fill(place, cell, loss=1.0, handed=0.0, code=0, speeds=SPEEDS, steps=(2, 3)):
    """Write the files of a cell's run; return the run directory."""
    directory = place / "cells" / cell.directory
    run = directory / "run"
    run.mkdir(parents=True, exist_ok=True)
    ended = {"code": code, "why": "no more disk" if code else "", "seconds": 9.0, "cores": 1}
    ended["others"] = 0.25 if cell.strategy == "sgd" else 0.0
    (directory / "result.json").write_text(json.dumps(ended))
    (run / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (run / "stages.json").write_text(json.dumps(stages(handed, steps)))
    (run / "trace.json.gz").write_bytes(gzip.compress(json.dumps(trace()).encode()))
    rows = []
    for epoch, (accuracy, speed) in enumerate(zip(ACCURACY, speeds), start=1):
        row = {"step": 10 * epoch, "epoch": float(epoch), "seconds": 2.0 * epoch}
        rows.append({**row, "images_per_second": speed, "communication": 0.25})
        rows.append({**row, "train_loss": loss / epoch, "test_accuracy": accuracy})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def read(tmp_path, **changes):
    """Return the study of the file, with changes."""
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return spec.read(path)


@pytest.fixture
def asked(tmp_path):
    """Return the study of the file, and a directory for the study's cells."""
    return read(tmp_path), tmp_path


def sentences(wanted, place):
    found = results.read(wanted, place)
    return " ".join(findings(found, wanted.target, results.estimators(wanted.cells)))


def the(found, label):
    (cell,) = (cell for cell in found if cell.cell.label == label)
    return cell


def pictures_of(page):
    """Return the pictures in a page."""
    return re.findall(r"<svg .*?</svg>", page, re.DOTALL)


def texts_of(picture):
    """Return the texts of a picture."""
    return [text.text for text in ElementTree.fromstring(picture).iter("text")]


def row_of(page, name, count):
    """Return the cells of a row of the main table, under a number of ranks."""
    main = page.partition('id="cells"')[2]
    (part,) = re.findall(rf">{count}[^<]*</th></tr>(.*?)</tbody>", main, re.DOTALL)
    (row,) = re.findall(rf'<tr class="row"><td>({re.escape(name)}</td>.*?)</tr>', part)
    return re.sub(r"</?td[^>]*>", "|", row).rstrip("|").split("||")


def test_the_report_holds_every_cell_and_its_pictures_and_needs_nothing_else(asked):
    """Oracle: the numbers of the files, worked out by hand; an XML parser."""
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell)
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    found = row_of(page, "comm-opt", "2 ranks")
    name, letter, step, between, images, ratio, talking, waiting, *_ = found
    assert (name, letter, step, between) == ("comm-opt", "b", "100", "30.0\N{EN DASH}120")
    assert (images, ratio, *found[-3:]) == ("1,200", "1.00 x*", "95.0 %", "20", "4.00")
    assert (talking, waiting) == ("20 %", "8 %")  # 4 ms and, on average, 1.5 ms of 20
    assert len([ElementTree.fromstring(picture) for picture in pictures_of(page)]) == 4
    assert "a &lt;study&gt;" in page
    assert not re.search(r"https?://|<link|\bsrc=|@import", page)


def test_time_by_group_leaves_waiting_out_and_adds_up_to_the_step(asked):
    """Oracle: worked out by hand."""
    wanted, place = asked
    cell = wanted.cells[-1]
    fill(place, cell)
    parts = the(results.read(wanted, place), cell.label).breakdown
    known = {"forward": 0.010, "factor messages": 0.0025, "waiting": 0.0015, "other": 0.006}
    assert {k: v for k, v in parts.items() if v} == pytest.approx(known)
    assert sum(parts.values()) == pytest.approx(0.020)


def test_bytes_are_those_of_the_plan(asked):
    """Oracle: the messages of an interval of two steps; all gradients of SGD in one Allreduce."""
    wanted, place = asked
    found = results.read(wanted, place)
    comm_opt = the(found, "comm-opt on 2 ranks")
    layers, others = mpikfac.layers.covered_shapes(models.build("digits_cnn", 10, 1))
    plan = mpikfac.make_plan(layers, 2, mpikfac.Strategy(), others)
    sums = [
        sum(message.bytes for message in plan.messages(rank, True, refresh))
        for rank in (0, 1)
        for refresh in (True, False)
    ]
    assert comm_opt.handed == sum(sums) / 4
    assert comm_opt.memory == max(sum(plan.memory(rank).values()) for rank in (0, 1))
    sgd = the(found, "sgd on 2 ranks")
    (message,) = sgd.cell.plan.messages(0, True, True)
    assert sgd.handed == sgd.wire == message.bytes
    assert the(found, "sgd on 1 rank").wire == 0


def test_letters_tell_estimators_apart_not_placements(asked):
    wanted, _ = asked
    assert results.estimators(wanted.cells) == {
        **{"sgd": "a", "comm-opt": "b", "mem-opt": "b", "dp-kfac": "c"}
    }


def test_sentences_say_what_the_numbers_say(asked):
    """Oracle: planted losses and counts."""
    wanted, place = asked
    for cell in wanted.cells:
        planned = the(results.read(wanted, place), cell.label).handed
        wrong = cell.strategy == "mem-opt"
        fill(place, cell, loss=1.001 if wrong else 1.0, handed=planned + wrong)
    text = sentences(wanted, place)
    assert "come from comm-opt and mem-opt (b). The mean" in text
    assert "losses of the first epoch differ by at most 1e-03 of their value" in text
    assert "differ from the plan's bytes in mem-opt on 1 rank and mem-opt on 2 ranks: the" in text
    assert "no variant is shown to be first at 90.0 %. Variants needed 4.00 s on average" in text
    assert "needed 4.00 s on average, and SGD 4.00 s. No difference from sgd on 1 rank" in text
    assert "On 2 ranks, the machine has fewer cores than ranks (1)" in text
    assert re.search(r"MiB sent per rank and step on these ranks: from \S+ \(dp-kfac\) to", text)
    assert "While 2 of 8 cells ran, other work took" in text
    assert "up to 25 %: the times" in text
    assert "different estimator of the curvature, by design: dp-kfac; see" in text
    assert "Between groups, accuracy may differ." in text
    assert "cannot be told from waiting for messages" in text and "mainly" not in text
    assert "uncommitted" not in text


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [("digits", {}, 360), ("digits", {"data.test_images": 50}, 50), ("synthetic", {}, None)],
)
def test_the_number_of_test_images_is_said_if_it_is_known(tmp_path, name, changes, told):
    """Oracle: the data set itself; the number of images of synthetic depends on options."""
    options = {**STUDY["options"], "data.name": name, **changes}
    if name == "synthetic":
        options["model"] = "resnet20"
    wanted = read(tmp_path, options=options, matrix={"strategy": ["sgd"], "ranks": [1]})
    fill(tmp_path, wanted.cells[0])
    text = sentences(wanted, tmp_path)
    assert (f"The test has {told} images: each" in text) == (told is not None)
    assert ("The test has" in text) == (told is not None)
    assert TEST_IMAGES["digits"] == len(datasets.digits().test_images)


def test_cells_from_a_changed_checkout_are_counted(asked):
    """Oracle: 3 of 8 cells whose commit is marked."""
    wanted, place = asked
    for number, cell in enumerate(wanted.cells):
        run = fill(place, cell)
        commit = "1a2b-dirty" if number < 3 else "1a2b"
        (run / "environment.json").write_text(json.dumps(ENVIRONMENT | {"commit": commit}))
    assert "3 of 8 cells ran in a checkout with uncommitted changes" in sentences(wanted, place)


def test_times_of_seeds_say_how_much_equal_work_differs(tmp_path):
    """Oracle: steps of 100 and 130 ms; SGD's steps differ more, but beside other work."""
    wanted = read(tmp_path, matrix={"strategy": ["sgd", "comm-opt"], "ranks": [1], "seed": [0, 1]})
    for cell in wanted.cells:
        steps = (50, 200) if cell.strategy == "sgd" else (100, 130)
        fill(tmp_path, cell, speeds=[120e3 / steps[cell.options.seed]] * 3)
    assert "times differ by up to 30 % (comm-opt on 1 rank)" in sentences(wanted, tmp_path)


def test_waiting_for_overlapped_messages_is_unknown(tmp_path):
    """Oracle: the strategies: of these two, only spd-kfac overlaps messages with computation."""
    wanted = read(tmp_path, matrix={"strategy": ["comm-opt", "spd-kfac"], "ranks": [2]})
    for cell in wanted.cells:
        fill(tmp_path, cell)
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    waiting = {name: row_of(page, name, "2 ranks")[7] for name in ("comm-opt", "spd-kfac")}
    assert waiting == {"comm-opt": "8 %", "spd-kfac": "\N{EN DASH}"}
    assert "waiting is unknown, and the bars for messages include it" in page


def test_the_efficiency_on_the_fewest_ranks_has_no_bar(tmp_path):
    """Oracle: two numbers of ranks, three seeds: bars of images per second, 2; efficiency, 1."""
    axes = {"strategy": ["comm-opt"], "ranks": [1, 2], "seed": [0, 1, 2]}
    wanted = read(tmp_path, matrix=axes)
    for cell in wanted.cells:
        fill(tmp_path, cell, speeds=[1000.0 + 100 * cell.options.seed] * 3)
    left, right = pictures.scaling(results.read(wanted, tmp_path)).axes
    bars = [sum(len(c.get_segments()) for c in of.collections) for of in (left, right)]
    assert bars == [2, 1]


NEAR = (
    "On 2 ranks, no variant is shown to have the fastest K-FAC step: steps take 66.7 to 71.7 ms on "
    "average. No difference from comm-opt is shown for mem-opt: 95 % intervals over seeds overlap. "
    "Relative to SGD's, these steps take 1.25 to 1.47 times as long on average. No difference from "
    "SGD is shown for comm-opt and mem-opt: 95 % intervals over seeds cover 1."
)
APART = (
    "On 2 ranks, mem-opt has the fastest K-FAC step: steps take 76.0 to 101 ms on average. "
    "Relative to SGD's, these steps take 1.52 to 2.02 times as long on average. MiB"
)


@pytest.mark.parametrize(
    ("sgd", "comm_opt", "mem_opt", "told"),
    [
        ((50, 40, 60), (100, 10, 90), (60, 75, 80), NEAR),
        ((50, 50, 50), (100, 101, 102), (75, 76, 77), APART),
    ],
)
def test_sentences_claim_only_what_seeds_show(tmp_path, sgd, comm_opt, mem_opt, told):
    """Oracle: means and intervals by hand; first, one cell of comm-opt is an outlier."""
    steps = {"sgd": sgd, "comm-opt": comm_opt, "mem-opt": mem_opt}
    wanted = read(tmp_path, matrix={"strategy": [*steps], "ranks": [2], "seed": [0, 1, 2]})
    for cell in wanted.cells:
        fill(tmp_path, cell, speeds=[120e3 / steps[cell.strategy][cell.options.seed]] * 3)
    text = sentences(wanted, tmp_path)
    assert told in text
    assert "was run once" not in text


def test_variants_that_send_and_keep_the_same_are_not_ordered(tmp_path):
    """Oracle: a damping changes neither messages nor arenas."""
    strategies = {"mine": {"strategy": "comm-opt", "kfac.damping": 0.1}}
    matrix = {"strategy": ["comm-opt", "mine"], "ranks": [2]}
    wanted = read(tmp_path, matrix=matrix, strategies=strategies)
    for cell in wanted.cells:
        fill(tmp_path, cell)
    text = sentences(wanted, tmp_path)
    assert re.search(r"MiB sent per rank and step on these ranks: \S+ for all variants\.", text)
    assert re.search(r"MiB kept on the rank with the largest arenas: \S+ for all variants\.", text)


def test_one_variant_on_several_seeds_is_compared_with_none(tmp_path):
    wanted = read(tmp_path, matrix={"strategy": ["comm-opt"], "ranks": [2], "seed": [0, 1]})
    for cell in wanted.cells:
        fill(tmp_path, cell)
    assert "fastest" not in sentences(wanted, tmp_path)
    wanted = read(tmp_path, matrix={"strategy": ["comm-opt"], "ranks": [2], "seed": [0]})
    assert "Each cell was run once" in sentences(wanted, tmp_path)


def test_jobs_of_a_queue_are_not_judged_by_the_machine_that_queued_them(asked):
    """Oracle: no cores, no other work, and no sentence on either."""
    wanted, place = asked
    for cell in wanted.cells:
        result = fill(place, cell).parent / "result.json"
        ended = json.loads(result.read_text()) | {"cores": None, "others": None}
        result.write_text(json.dumps(ended))
    text = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    assert "fewer cores" not in text and "other work" not in text and "cores where" not in text


def test_steps_that_are_no_whole_interval_do_not_say_where_time_goes(asked):
    """Oracle: three traced steps at a refresh every two."""
    wanted, place = asked
    run = fill(place, wanted.cells[-1])
    (run / "stages.json").write_text(json.dumps(stages(0.0, steps=(2, 3, 4))))
    cell = the(results.read(wanted, place), wanted.cells[-1].label)
    assert (cell.breakdown, cell.traced_seconds, cell.counted) == ({}, None, None)


def test_time_of_jobs_counts_a_run_that_cells_share_once(tmp_path):
    """Oracle: SGD, once for two dampings, and K-FAC with both dampings: three runs of 9 s."""
    axes = {"strategy": ["sgd", "comm-opt"], "ranks": [1], "kfac.damping": [0.1, 0.2]}
    wanted = read(tmp_path, matrix=axes)
    for cell in wanted.cells:
        fill(tmp_path, cell)
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    assert "last start</td><td>0.5 min" in page  # 27 s; 36 s are 0.6 min


def test_each_number_of_ranks_has_a_panel_and_no_panel_is_empty(tmp_path):
    """Oracle: four panels for four numbers of ranks, in two rows of three."""
    wanted = read(tmp_path, matrix={"strategy": ["comm-opt"], "ranks": [1, 2, 3, 4]})
    for cell in wanted.cells:
        fill(tmp_path, cell)
    picture = pictures.breakdown(results.read(wanted, tmp_path))
    assert len(picture.axes) == 4


def test_cells_that_are_not_complete_are_in_no_picture_and_no_ratio(asked):
    """Oracle: SGD, which failed: no baseline, and no name in a picture."""
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell, code=1 if cell.strategy == "sgd" else 0)
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    assert row_of(page, "comm-opt", "2 ranks")[5] == "\N{EN DASH}"
    found = pictures_of(page)
    assert all("sgd" not in " ".join(texts_of(picture)) for picture in found)
    assert sum("comm-opt" in " ".join(texts_of(picture)) for picture in found) == 4


def test_a_report_can_be_made_at_any_time(asked):
    """Oracle: the states of the cells, and a complete page."""
    wanted, place = asked
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    assert "No cell is complete yet." in page
    missing = page.partition("Pictures that are not on this page")[2].partition("</ul>")[0]
    assert missing.count("<li>") == 6
    assert page.rstrip().endswith("</html>")
    failed, cut = (
        the(results.read(wanted, place), f"{name} on 1 rank").cell for name in ("sgd", "comm-opt")
    )
    fill(place, failed, code=2)
    run = fill(place, cut)
    (run.parent / "result.json").unlink()
    (run / "stages.json").write_text('{"steps": [')
    (run / "trace.json.gz").write_bytes((run / "trace.json.gz").read_bytes()[:40])
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 4')
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    assert "<code>no more disk</code>" in page
    assert row_of(page, f"{cut.strategy} (begun)", "1 rank")[2] == "100"
    assert row_of(page, f"{failed.strategy} (failed)", "1 rank")[2] == "100*"
    assert len(pictures_of(page)) == 0  # no complete cell


def test_report_only_runs_nothing(asked, monkeypatch, capsys):
    _, place = asked
    monkeypatch.setenv("MPIRUN", "false")
    assert study.main([str(place / "study.yaml"), f"--run_dir={place}", "--report_only"]) == 0
    assert capsys.readouterr().out == f"report: {place / 'report.html'}\n"


def test_predictions_stand_beside_measurements_where_the_machine_knows_the_network(tmp_path):
    """Oracle: the simulator's prediction of a single cell's plan, by hand."""
    network = {"model": "resnet50", "data": {"name": "synthetic"}, "batch_per_rank": 32}
    axes = {"strategy": ["sgd", "mem-opt"], "ranks": [2, 4]}
    path = tmp_path / "study.yaml"
    text = {"options": {**network, "epochs": 1}, "matrix": axes, "machine": "v100-edr"}
    path.write_text(yaml.safe_dump(text))
    wanted = spec.read(path)
    for cell in wanted.cells:
        fill(tmp_path, cell, steps=range(2, 52))
    found = report.predicted(wanted.machine, results.read(wanted, tmp_path))
    layers, others = mpikfac.layers.covered_shapes(models.build("resnet50", 10, 3))
    plan = mpikfac.make_plan(layers, 4, mpikfac.Strategy(mpikfac.MemOpt()), others)
    job = mpikfac.predict.Job("resnet50", 32)
    machine = mpikfac.predict.load_machine("v100-edr")
    expected = mpikfac.predict.simulate(plan, machine, job).mean.seconds
    assert found["mem-opt on 4 ranks"] == pytest.approx(expected)
    assert len(found) == 4
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    assert row_of(page, "mem-opt", "4 ranks")[4] == ms(expected)
    assert len(pictures_of(page)) == 5
    assert report.predicted(machine, results.read(read(tmp_path), tmp_path)) == {}


def test_curvature_servers_take_no_part_of_the_batch_that_is_predicted_for(tmp_path):
    """Oracle: the simulator's prediction for two training ranks of three, with 32 images each."""
    network = {"model": "resnet50", "data": {"name": "synthetic"}, "batch_per_rank": 32}
    axes = {"strategy": ["curvature-servers"], "ranks": [3]}
    wanted = read(tmp_path, options=network, matrix=axes, machine="v100-edr")
    (cell,) = wanted.cells
    job = mpikfac.predict.Job("resnet50", 32)
    expected = mpikfac.predict.simulate(cell.plan, wanted.machine, job).mean.seconds
    assert cell.plan.ranks == 2
    found = report.predicted(wanted.machine, results.read(wanted, tmp_path))
    assert found == {cell.label: pytest.approx(expected)}


# -- what a page must not claim ------------------------------------------------------------------


def test_an_unfinished_study_claims_nothing_about_cells_that_never_ran(asked):
    """Oracle: 3 complete cells of 8; comm-opt alone is complete on 2 ranks."""
    wanted, place = asked
    done = ("sgd on 1 rank", "comm-opt on 1 rank", "comm-opt on 2 ranks")
    for cell in wanted.cells:
        if cell.label in done:
            fill(place, cell)
    text = sentences(wanted, place)
    assert text.startswith("5 cells of 8 did not run to the end")
    assert "mem-opt" not in text and "dp-kfac" not in text
    assert "fastest" not in text and "first at" not in text and "MiB sent" not in text
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    assert "<strong>3 of 8 cells are complete.</strong>" in page


def test_variants_are_compared_where_all_cells_have_ended(asked):
    """Oracle: all cells on one rank are complete, and none on two; mem-opt is planted quicker."""
    wanted, place = asked
    for cell in wanted.cells:
        if cell.ranks == 1:
            fill(place, cell, speeds=SPEEDS if cell.strategy != "mem-opt" else (5000.0,) * 3)
    text = sentences(wanted, place)
    assert "On 1 rank, mem-opt has the fastest K-FAC step" in text
    assert "the same results come from comm-opt and mem-opt (b)." in text
    assert "first at" not in text  # a cell on 2 ranks may be


def test_a_complete_study_has_no_banner(asked):
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell)
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    assert "cells are complete" not in page and 'class="banner"' not in page


def test_sentences_that_weaken_the_numbers_come_first(asked):
    """Oracle: the order by hand: failed, bytes, busy, crowded, single runs, test; then results."""
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell, code=1 if cell.label == "dp-kfac on 2 ranks" else 0)
    found = list(
        findings(results.read(wanted, place), wanted.target, results.estimators(wanted.cells))
    )
    begins = (
        "1 cell failed",
        "The bytes counted",
        "While 2 of 7 cells",
        "On 2 ranks, the machine has fewer",
        "Each cell",
        "The test has 360 images",
    )
    for sentence, begin in zip(found, begins):
        assert sentence.startswith(begin)
    assert "first at" in found[len(begins)]


# -- names, colours and text of pictures ---------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize("name", ["$x^", "a_$b", "_below", "<b>&amp;", "a\\frac"])
def test_any_name_of_a_strategy_is_drawn_as_it_is(tmp_path, name):
    """Oracle: the name in the page's table and, letter by letter, in the pictures."""
    mine = {name: {"strategy": "mem-opt"}}
    wanted = read(tmp_path, strategies=mine, matrix={"strategy": ["sgd", name], "ranks": [1, 2]})
    for cell in wanted.cells:
        fill(tmp_path, cell)
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    found = pictures_of(page)
    assert len(found) == 4
    assert all(name in " ".join(texts_of(picture)) for picture in found)


def luminance(colour):
    """Return the relative luminance of a colour (WCAG 2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def test_variants_differ_by_more_than_colour():
    """Oracle: 24 variants, of which no two share marker and line, or colour and line."""
    kinds = [style.variant_style(place) for place in range(24)]
    assert len({(kind["marker"], kind["linestyle"]) for kind in kinds}) == 24
    assert len({(kind["color"], kind["linestyle"]) for kind in kinds}) == 24
    assert len({kind["marker"] for kind in kinds[:11]}) == 11


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ([0.85, 0.95, 1.05], "95 % intervals over seeds cover 1."),
        ([0.85, 0.86, 0.87], ""),
        ([0.9, 1.1], "ranges of seeds cover 1."),
        ([1.01, 1.1], ""),
        ([1.0], ""),
    ],
)
def test_a_ratio_that_could_be_1_says_so(ratios, told):
    """Oracle: intervals of 95 % by hand: half of them is 0.25, then 0.025."""
    claim = " No difference from SGD is shown for b: "
    assert unclear({"a": mean_of([2.0, 2.0]), "b": mean_of(ratios)}) == (told and claim + told)


@pytest.mark.parametrize(
    ("heights", "placed"),
    [
        ([0.5, 0.1], [0.5, 0.1]),
        ([0.5, 0.5, 0.55], [0.5, 0.6, 0.7]),
        ([0.95, 1.0, 0.0], [0.9, 1.0, 0.0]),
        ([-0.2, 0.0], [0.0, 0.1]),
    ],
)
def test_names_beside_a_panel_do_not_cover_each_other(heights, placed):
    """Oracle: by hand: at least 0.1 apart, from 0 to 1, in the order of the heights."""
    assert style.spread(heights, 0.1) == pytest.approx(placed)


def test_communication_is_told_from_computing_without_colours():
    """Oracle: the names of the parts; neighbours of one kind differ in luminance."""
    talking = {part for part, (_, hatch) in style.STAGES.items() if hatch}
    assert talking == {*(f"{kind} messages" for kind in ("factor", "basis", "gradient")), "waiting"}
    light = [luminance(colour) + 0.05 for colour, hatch in style.STAGES.values() if not hatch]
    assert all(max(pair) / min(pair) > 1.3 for pair in zip(light, light[1:]))


def test_pictures_take_colours_and_identifiers_of_their_own_from_the_page(asked):
    """Oracle: no identifier is used twice, and every reference has its identifier."""
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell)
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
    assert {word for pair in used for word in pair if word} <= set(names)
    for picture in pictures_of(page):
        assert "var(--ink, #222222)" in picture and not re.search(r"[^ ]#222222", picture)


def names_of_pictures_are_in_the_tables(page, letters):
    """Check the names in the pictures of a page, given the letter of each variant."""
    found = {
        name: picture
        for name in re.findall(r'<svg [^>]*labelledby="([^"]+)-title', page)
        for picture in pictures_of(page)
        if f'labelledby="{name}-title' in picture
    }
    bars, curves, steps, pace = (
        set(texts_of(found[name]))
        for name in ("where-a-steps-time-goes", "accuracy", "one-step", "more-ranks")
    )
    assert set(letters) <= bars
    named = {text for text in curves if re.search(r" \([a-z]\)$", text)}
    assert named == {f"{name} ({letter})" for name, letter in first_of_each(letters).items()}
    ends = {text.partition(" on ")[0] for text in steps if " on " in text}
    assert ends and ends <= set(letters)
    assert pace & set(letters)


def first_of_each(letters):
    """Return the first variant of each letter, with the letter."""
    first = {}
    for name, letter in letters.items():
        first.setdefault(letter, name)
    return {name: letter for letter, name in first.items()}


def test_pictures_name_the_variants_of_the_tables_and_draw_equal_curves_once(asked):
    """Oracle: the letters; mem-opt has the letter of comm-opt, and bars but no curve."""
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell)
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    names_of_pictures_are_in_the_tables(page, results.estimators(wanted.cells))


def test_of_many_different_curves_the_best_are_drawn_and_that_of_sgd(tmp_path):
    """Oracle: planted ends; seven variants, of which SGD is the worst."""
    axes = {"strategy": ["comm-opt"], "ranks": [2], "lr": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}
    matrices = [axes, {"strategy": ["sgd"], "ranks": [2], "lr": [0.1]}]
    wanted = read(tmp_path, matrix=matrices)
    for cell in wanted.cells:
        end = 0.901 if cell.strategy == "sgd" else 0.95 + cell.axes["lr"] / 100
        metrics = fill(tmp_path, cell) / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace("0.95}", f"{end}}}"))
    found = results.read(wanted, tmp_path)
    kept = pictures.distinct(found, results.estimators(wanted.cells), ranks=2)
    assert [*kept] == [*(f"comm-opt, lr 0.{rate}" for rate in (3, 4, 5, 6)), "sgd, lr 0.1"]


def test_the_table_of_variants_lists_the_settings_that_a_name_brings(tmp_path):
    """Oracle: K-FAC-opt of SC20 has eigendecompositions, unless the file names another method."""
    wanted = read(
        tmp_path,
        strategies={"mine": {"strategy": "kfac-opt", "kfac.preconditioner": "inverse"}},
        matrix={"strategy": ["sgd", "comm-opt", "kfac-opt", "mine"], "ranks": [1]},
    )
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    part = page.partition('<h2 id="variants"')[2].partition("</table>")[0]
    rows = re.findall(r'<tr class="row"><td>(.*?)</tr>', part)
    options = {row.partition("<")[0]: re.findall("<code>(.*?)</code>", row) for row in rows}
    assert [len(words) for words in options.values()] == [1, 1, 2, 2]
    assert options["kfac-opt"] == ["strategy=kfac-opt", "kfac.preconditioner=eigen"]
    assert options["mine"] == ["strategy=kfac-opt", "kfac.preconditioner=inverse"]


def test_unreliable_times_are_marked_where_they_stand(tmp_path):
    """Oracle: other work beside SGD's cells; a ratio to SGD is as unreliable as SGD's time."""
    wanted = read(tmp_path, matrix={"strategy": ["sgd", "comm-opt"], "ranks": [2]})
    for cell in wanted.cells:
        fill(tmp_path, cell)
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    _, _, step, between, images, ratio, *_, took = row_of(page, "sgd", "2 ranks")
    assert all(text.endswith("*") for text in (step, between, images, ratio, took))
    _, _, step, between, images, ratio, *_, took = row_of(page, "comm-opt", "2 ranks")
    assert ratio.endswith("*")
    assert not any(text.endswith("*") for text in (step, between, images, took))
    assert "*: other work used over 10 %" in page
    bars = pictures.breakdown(results.read(wanted, tmp_path))
    assert [text.get_text() for text in bars.axes[0].texts] == ["*", ""]


@pytest.mark.parametrize(("cores", "told"), [(1, True), (2, False)])
def test_more_ranks_than_cores_are_said_in_tables_and_pictures(tmp_path, cores, told):
    """Oracle: two ranks on one core, and on two."""
    wanted = read(tmp_path, matrix={"strategy": ["sgd", "comm-opt"], "ranks": [1, 2]})
    for cell in wanted.cells:
        result = fill(tmp_path, cell).parent / "result.json"
        result.write_text(json.dumps(json.loads(result.read_text()) | {"cores": cores}))
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    assert (">2 ranks, more ranks than cores</th>" in page) == told
    for picture in pictures_of(page):
        name = re.search(r'labelledby="([^"]+)-title', picture)[1]
        if name != "one-step":
            assert ("more ranks than cores" in " ".join(texts_of(picture))) == told, name


def test_numbers_of_ranks_share_the_scale_of_a_steps_time(asked):
    """Oracle: the limits of all panels, where messages on one rank take no time."""
    wanted, place = asked
    for cell in wanted.cells:
        run = fill(place, cell)
        if cell.ranks == 1:
            (run / "stages.json").write_text(json.dumps(stages(0.0) | {"seconds": 0.016}))
    panels = pictures.breakdown(results.read(wanted, place)).axes
    assert len({panel.get_xlim() for panel in panels}) == 1


def test_the_factor_of_the_clip_has_a_mean_and_a_range_over_seeds(tmp_path):
    """Oracle: planted factors of three seeds: mean 0.5, range 0.2 to 0.9."""
    axes = {"strategy": ["comm-opt", "mem-opt"], "ranks": [2], "seed": [0, 1, 2]}
    wanted = read(tmp_path, matrix=axes)
    for cell in wanted.cells:
        run = fill(tmp_path, cell)
        scale = (0.2, 0.4, 0.9)[cell.options.seed]
        row = {"step": 40, "epoch": 4.0, "seconds": 8.0, "kl_scale": scale}
        with open(run / "metrics.jsonl", "a") as metrics:
            metrics.write(json.dumps(row) + "\n")
    figure = pictures.bounds(results.read(wanted, tmp_path), results.estimators(wanted.cells))
    (panel,) = figure.axes
    line = next(line for line in panel.lines if len(line.get_xdata()))
    assert list(line.get_ydata()) == pytest.approx([0.5])
    ((bar,),) = (bars.get_segments() for bars in panel.collections)
    assert [height for _, height in bar] == pytest.approx([0.2, 0.9])
    assert "step length relative to that" in panel.get_ylabel()


# -- tables --------------------------------------------------------------------------------------


def test_students_t():
    """Oracle: the published table of the 97.5 % quantile."""
    known = {1: 12.706, 2: 4.303, 9: 2.262, 10: 2.228, 15: 2.131, 30: 2.042, 120: 1.980}
    for freedom, value in known.items():
        assert student(freedom) == pytest.approx(value, rel=2e-3)


def test_means_over_seeds_have_an_interval_of_95_percent():
    """Oracle: by hand: mean 2, standard error 1 / sqrt 3, t = 4.303; and 2,000 samples."""
    mean = mean_of([1.0, None, 2.0, 3.0])
    assert (mean.mean, mean.count) == (2.0, 3)
    assert mean.half == pytest.approx(4.303 / 3**0.5)
    assert mean_of([5.0]).half is mean_of([5.0, 6.0]).half is None
    assert mean_of([None]) is None
    draw = random.Random(0).gauss
    inside = 0
    for _ in range(2000):
        sample = mean_of([draw(0, 1) for _ in range(4)])
        inside += abs(sample.mean) <= sample.half
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


def test_seeds_have_a_table_of_means(tmp_path):
    """Oracle: steps of 100, 110 and 120 ms; a fourth seed failed and does not count."""
    axes = {"strategy": ["sgd", "comm-opt"], "ranks": [2], "seed": [0, 1, 2, 3]}
    wanted = read(tmp_path, matrix=axes)
    for cell in wanted.cells:
        seed = cell.options.seed
        fill(tmp_path, cell, code=int(seed == 3), speeds=[120e3 / (100 + 10 * seed)] * 3)
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    means = page.partition('id="means"')[2].partition('id="cells"')[0]
    assert '<td data-value="3">3 of 4</td>' in means
    half = 4.303 * 10 / 3**0.5
    assert f">110 \N{PLUS-MINUS SIGN} {half:.1f}</td>" in means
    assert "95.0 % \N{PLUS-MINUS SIGN} 0.0 %" in means
    assert "No difference from sgd on 2 ranks is shown" in sentences(wanted, tmp_path)
    found = json.loads((tmp_path / "report.json").read_text())["means"]
    assert found[0]["step_seconds"]["half"] == pytest.approx(half / 1e3, rel=1e-3)


def test_of_a_strategy_with_several_variants_the_page_shows_the_best(tmp_path):
    """Oracle: ends by hand. A rate with one good seed is no rival of a rate with two seeds."""
    matrices = [
        {"strategy": ["sgd"], "ranks": [2], "lr": [0.1, 0.2, 0.3], "seed": [0]},
        {"strategy": ["sgd"], "ranks": [2], "lr": [0.1, 0.2], "seed": [1]},
        {"strategy": ["comm-opt"], "ranks": [2], "lr": [0.1], "seed": [0]},
    ]
    ends = {(0.1, 0): 0.95, (0.1, 1): 0.91, (0.2, 0): 0.93, (0.2, 1): 0.94, (0.3, 0): 0.99}
    wanted = read(tmp_path, matrix=matrices)
    for cell in wanted.cells:
        metrics = fill(tmp_path, cell) / "metrics.jsonl"
        end = ends[cell.axes["lr"], cell.options.seed]
        metrics.write_text(metrics.read_text().replace("0.95}", f"{end}}}"))
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    best = json.loads((tmp_path / "report.json").read_text())["best"]
    assert [row["variant"] for row in best] == ["sgd, lr 0.2", "comm-opt, lr 0.1"]
    assert best[0]["test_accuracy"]["mean"] == pytest.approx(0.935)
    shown = page.partition('<h2 id="best">')[2].partition('<h2 id="means">')[0]
    assert "sgd, lr 0.2" in shown and "sgd, lr 0.3" not in shown
    (curves,) = (picture for picture in pictures_of(page) if "seconds of training" in picture)
    named = {text.rpartition(" (")[0] for text in texts_of(curves)}
    assert {"sgd, lr 0.2", "sgd, lr 0.1"} & named == {"sgd, lr 0.2"}


def test_a_study_of_one_variant_for_each_strategy_has_no_best(asked):
    """Oracle: all curves of the study."""
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell)
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    assert 'id="best"' not in page


def two_seeds(place, steps=(100, 110)):
    """Return a study of SGD and K-FAC with two seeds, with its runs: ms of a step by seed."""
    axes = {"strategy": ["sgd", "comm-opt"], "ranks": [2], "seed": [0, 1]}
    wanted = read(place, matrix=axes)
    for cell in wanted.cells:
        run = fill(place, cell, speeds=[120e3 / steps[cell.options.seed]] * 3)
        metrics = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(
            metrics.replace("0.95}", f"0.9{cell.options.seed + 5}}}")
        )
    return wanted


def test_two_seeds_have_a_range_and_no_interval(tmp_path):
    """Oracle: steps of 100 and 110 ms, accuracies of 95 % and 96 %: Student's interval is 32 %."""
    wanted = two_seeds(tmp_path)
    page = report.write(wanted, tmp_path, ["mpikfac", "study"]).read_text()
    means = page.partition('id="means"')[2].partition('id="cells"')[0]
    assert ">100 to 110</td>" in means and ">95.0 % to 96.0 %</td>" in means
    assert "\N{PLUS-MINUS SIGN}" not in page
    told = "2 of 2 variants have fewer than 3 complete seeds, and therefore a range instead of"
    assert told in sentences(wanted, tmp_path)
    about = json.loads((tmp_path / "report.json").read_text())["means"][0]["step_seconds"]
    assert (about["low"], about["high"]) == pytest.approx((0.1, 0.11)) and about["half"] is None


def test_ranges_of_two_seeds_say_who_may_be_as_quick():
    """Oracle: 1 to 2 and 2 to 3 meet at 2, and 3 to 4 lies apart; a single run says nothing."""
    means = {
        name: mean_of(values) for name, values in (("a", [1, 2]), ("b", [2, 3]), ("c", [3, 4]))
    }
    assert leaders(means) == ["a", "b"]
    assert doubt(means) == " No difference from a is shown for b: ranges of seeds overlap."
    assert doubt({"a": mean_of([1]), "b": mean_of([2])}) == ""
    assert leaders({"a": mean_of([1]), "b": mean_of([1])}) == ["a", "b"]


@pytest.mark.parametrize(("seeds", "bands", "lines"), [(1, 0, 1), (2, 0, 3), (3, 1, 1)])
def test_a_band_needs_three_seeds(seeds, bands, lines):
    """Oracle: the parts of the picture; of two runs, a mean and a line for each run."""
    panel = Figure().subplots()
    runs = [[0.5 + 0.1 * seed, 0.9 + 0.01 * seed] for seed in range(seeds)]
    pictures.line_of_seeds(panel, [1.0, 2.0], runs, style.variant_style(0), ACCURACIES)
    assert (len(panel.collections), len(panel.lines)) == (bands, lines)


def test_no_interval_of_an_accuracy_exceeds_100_percent(tmp_path):
    """Oracle: ends of 96, 99 and 100 %, mean 98.3 %; half of the interval is 5.2 %."""
    assert mean_of([96, 99, 100]).ends[1] > 103
    panel = Figure().subplots()
    runs = [[90.0, end] for end in (96.0, 99.0, 100.0)]
    pictures.line_of_seeds(panel, [1.0, 2.0], runs, style.variant_style(0), ACCURACIES)
    (band,) = panel.collections
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(100)
    strategies = ["sgd", "comm-opt", "dp-kfac", "stale-inverse"]  # four curves: bars at the ends
    wanted = read(tmp_path, matrix={"strategy": strategies, "ranks": [2], "seed": [0, 1, 2]})
    for cell in wanted.cells:
        metrics = fill(tmp_path, cell) / "metrics.jsonl"
        end = (0.96, 0.99, 1.0)[cell.options.seed]
        metrics.write_text(metrics.read_text().replace("0.95}", f"{end}}}"))
    found = results.read(wanted, tmp_path)
    figure = pictures.curves(found, results.estimators(wanted.cells), None)
    bars = [c.get_segments()[0] for c in figure.axes[0].collections]
    assert len(bars) == 4
    assert all(bar[:, 1].max() == pytest.approx(100) for bar in bars)
    assert MEASURES["error"].possible(-0.1) == 0


def test_pictures_stand_as_files_beside_the_page(asked):
    """Oracle: the names of the headings; text stays text in SVG, fonts are TrueType in PDF."""
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell)
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    names = {path.stem for path in (place / "figures").iterdir()}
    assert names == {"where-a-steps-time-goes", "one-step", "accuracy", "more-ranks"}
    assert names <= set(re.findall(r'<h2 id="([^"]+)">', page))
    svg = ElementTree.parse(place / "figures" / "accuracy.svg")
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"comm-opt (b)", "dp-kfac (c)", "seconds of training"} <= set(texts)
    pdf = (place / "figures" / "accuracy.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"/FontFile2" in pdf and b"/Type3" not in pdf
    before = [path.read_bytes() for path in sorted((place / "figures").iterdir())]
    report.write(wanted, place, ["mpikfac", "study"])
    assert [path.read_bytes() for path in sorted((place / "figures").iterdir())] == before


def test_files_of_pictures_that_are_missing_now_are_removed(asked):
    """Oracle: a study whose cells are no longer complete."""
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell)
    report.write(wanted, place, ["mpikfac", "study"])
    for cell in wanted.cells:
        (place / "cells" / cell.directory / "result.json").unlink()
    report.write(wanted, place, ["mpikfac", "study"])
    assert list((place / "figures").iterdir()) == []


def test_a_study_has_a_table_in_latex(tmp_path):
    """Oracle: the rows by hand; a name with signs of LaTeX; cells of a study with a single seed."""
    mine = {"50%_x": {"strategy": "mem-opt"}}
    one = {"strategies": mine, "matrix": {"strategy": ["50%_x"], "ranks": [2]}}
    wanted = read(tmp_path, **one)
    for cell in wanted.cells:
        fill(tmp_path, cell)
    report.write(wanted, tmp_path, ["mpikfac", "study"])
    (row,) = rows_of_latex((tmp_path / "report.tex").read_text())
    assert row[:4] == [r"50\%\_x", "2", "a", "100"]
    assert not (tmp_path / "means.csv").exists()
    wanted = two_seeds(tmp_path)
    report.write(wanted, tmp_path, ["mpikfac", "study"])
    rows = rows_of_latex((tmp_path / "report.tex").read_text())
    assert rows[1] == [
        *("comm-opt", "2", "b", "2 of 2", "100 to 110", "1.00*", r"95.0 \% to 96.0 \%"),
        *("20", "2.0", "4.00"),
    ]
    with open(tmp_path / "means.csv", newline="") as file:
        sgd, kfac = csv.DictReader(file)
    assert (sgd["variant"], kfac["variant"]) == ("sgd", "comm-opt")
    assert float(kfac["test_accuracy_mean"]) == pytest.approx(0.955)
    assert (kfac["test_accuracy_half"], kfac["seconds_to_target_count"]) == ("", "2")


def rows_of_latex(text):
    """Return the cells of a table in LaTeX, without the heading, after a check of the frame."""
    lines = text.splitlines()
    assert lines[0] == r"% \usepackage{booktabs}"
    assert lines[1].startswith(r"\begin{tabular}{l") and lines[-1] == r"\end{tabular}"
    body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
    assert all(line.rstrip().endswith(r"\\") for line in body)
    return [[cell.strip() for cell in line.rstrip().rstrip("\\").split(" & ")] for line in body]


def test_the_table_stands_as_csv_and_json_beside_the_page_and_inside(asked):
    """Oracle: numbers of the files by hand; the page's own copies."""
    wanted, place = asked
    for cell in wanted.cells:
        fill(place, cell)
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    with open(place / "report.csv", newline="") as file:
        rows = {row["cell"]: row for row in csv.DictReader(file)}
    row = rows["comm-opt on 2 ranks"]
    assert (row["state"], row["numbers"], row["ranks"]) == ("complete", "b", "2")
    assert float(row["step_seconds"]) == pytest.approx(0.1)
    assert (float(row["test_accuracy"]), float(row["seconds_to_target"])) == (0.95, 4.0)
    assert row["predicted_step_seconds"] == ""
    about = json.loads((place / "report.json").read_text())
    assert about["target_test_accuracy"] == 0.9 and len(about["cells"]) == len(rows) == 8
    for kind in ("csv", "json"):
        (data,) = re.findall(rf'download="report.{kind}" href="[^,]*,([^"]*)"', page)
        assert base64.b64decode(data) == (place / f"report.{kind}").read_bytes()


def test_a_page_has_contents_sorting_and_tables_that_scroll(asked):
    """Oracle: a heading for each entry of the contents; values to sort by; a style for print."""
    wanted, place = asked
    fill(place, wanted.cells[0])
    page = report.write(wanted, place, ["mpikfac", "study"]).read_text()
    contents = re.findall(r'<li><a href="#([^"]+)">', page)
    headings = re.findall(r'<h2 id="([^"]+)">', page)
    assert contents == headings
    assert "how-much-a-clip-shortens-steps" not in headings  # no picture, no heading
    assert 'data-value="0.1"' in page
    wide = page.count('<div class="wide"')
    assert wide == page.count("<table") + len(pictures_of(page))
    assert "prefers-color-scheme: dark" in page and "@media print" in page


def test_the_showcase_is_a_report_of_the_study_of_the_digits():
    """Oracle: the cells of the study's file; `mpikfac study jobs/studies/digits.yaml` draws it."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "reports" / "digits.html").read_text()
    study_file = yaml.safe_load((root / "jobs" / "studies" / "digits.yaml").read_text())
    cells = {
        (strategy, str(ranks), str(seed))
        for part in study_file["matrix"]
        for strategy in part["strategy"]
        for ranks in part["ranks"]
        for seed in part["seed"]
    }
    (data,) = re.findall(r'download="report.csv" href="[^,]*,([^"]*)"', page)
    rows = list(csv.DictReader(base64.b64decode(data).decode().splitlines()))
    assert {(row["variant"], row["ranks"], row["seed"]) for row in rows} == cells
    assert all(row["test_accuracy"] for row in rows)
    names_of_pictures_are_in_the_tables(page, {row["variant"]: row["numbers"] for row in rows})
    headings = re.findall(r'<h2 id="([^"]+)">', page)
    assert headings == re.findall(r'<li><a href="#([^"]+)">', page)
    assert len([ElementTree.fromstring(picture) for picture in pictures_of(page)]) >= 4
    assert not re.search(r"https?://|<link|\bsrc=|@import", page)
