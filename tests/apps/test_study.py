"""A study from the study's file to cells, with cells run by a launcher."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import mpikfac
from mpikfac.lab import DiLoCo, Parle, TopK
from mpikfac_apps.guard.processes import processes_with
from mpikfac_apps.lab.study import jobs, progress, results, spec, study
from support.pace import paced

pytestmark = pytest.mark.lab

STUDY = {
    "name": "a study",
    "options": {"batch": 120, "epochs": 1, "data": {"train_images": 240}, "threads": 1},
    "matrix": {"strategy": ["sgd", "mine"], "ranks": [1, 2]},
    "strategies": {"mine": {"strategy": "mem-opt", "kfac": {"inv_update_steps": 2}}},
}
# A launcher that runs the program on a single rank, in this process's own MPI.
ALONE = "#!/bin/sh\nwhile [ $1 != -n ]; do shift; done; shift 2; exec "


def written(path, **changes):
    file = path / "study.yaml"
    file.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return file


def labels(path):
    return [cell.label for cell in spec.read(path).cells]


def launcher(tmp_path, monkeypatch, script):
    """Make `script` the launcher of the cells."""
    path = tmp_path / "mpirun"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setenv("MPIRUN", str(path))
    monkeypatch.setenv("MPIRUN_FLAGS", "")


def test_cells_are_all_combinations_with_the_options_of_each(tmp_path):
    """Oracle: the product, written out."""
    axes = {"strategy": ["sgd", "mine"], "ranks": [2], "kfac.damping": [0.1, 0.2], "seed": [7, 8]}
    found = spec.read(written(tmp_path, matrix=axes)).cells
    assert [cell.label for cell in found] == [
        f"{strategy}, damping {damping} on 2 ranks, seed {seed}"
        for strategy in ("sgd", "mine")
        for damping in (0.1, 0.2)
        for seed in (7, 8)
    ]
    last = found[-1].options
    assert (last.optimizer, last.kfac.damping.value) == ("kfac", 0.2)
    assert last.distribution.strategy == "mem-opt"
    assert (last.seed, last.batch, last.data.train_images) == (8, 120, 240)
    runs = [len({cell.directory for cell in half}) for half in (found[:4], found[4:])]
    assert runs == [2, 4]  # SGD has no damping


def test_what_comes_later_goes_before_what_comes_first(tmp_path):
    """Oracle: base, options, strategy, matrix, in this order."""
    base = tmp_path / "base.yaml"
    base.write_text("batch: 60\nlr: 0.1\nmomentum: 0.1\nweight_decay: 0.1\nrun_dir: elsewhere\n")
    options = {"lr": 0.2, "momentum": 0.2, "weight_decay": 0.2}
    mine = {"mine": {"momentum": 0.3, "weight_decay": 0.3}}
    axes = {"strategy": ["mine"], "ranks": [1], "weight_decay": [0.4]}
    file = written(tmp_path, base=str(base), options=options, strategies=mine, matrix=axes)
    (cell,) = spec.read(file).cells
    chosen = cell.options
    assert (chosen.batch, chosen.lr, chosen.momentum, chosen.weight_decay) == (60, 0.2, 0.3, 0.4)


def test_other_options_for_a_known_strategy_leave_it_what_it_is(tmp_path):
    """Oracle: the known options, written out."""
    own = {"mem-opt": {"kfac.inv_update_steps": 50}, "hybrid": {"assignment.grad_workers": 1}}
    axes = {"strategy": ["mem-opt", "hybrid"], "ranks": [2]}
    mem_opt, hybrid = spec.read(written(tmp_path, strategies=own, matrix=axes)).cells
    assert mem_opt.options.distribution.strategy == "mem-opt"
    assert mem_opt.options.kfac.inv_update_steps == 50
    chosen = hybrid.options.distribution
    assert (chosen.strategy, chosen.assignment) == ("hybrid", mpikfac.HybridOpt(grad_workers=1))


def test_methods_and_their_settings_are_axes(tmp_path):
    """Oracle: the types, by hand; an axis has the short name of its option."""

    def found(**axes):
        matrix = {"strategy": ["comm-opt"], "ranks": [4], **axes}
        return spec.read(written(tmp_path, strategies={}, matrix=matrix)).cells

    workers = found(**{"assignment": ["hybrid-opt"], "assignment.grad_workers": [1, 2, 4]})
    assert [cell.plan.grid.workers for cell in workers] == [1, 2, 4]
    assert workers[1].variant == "comm-opt, grad_workers 2"
    methods = found(sync=["parle", "diloco"])
    assert [cell.plan.strategy.sync for cell in methods] == [Parle(), DiLoCo()]
    assert [cell.variant for cell in methods] == ["comm-opt, sync parle", "comm-opt, sync diloco"]
    stale = found(**{"refresh.staleness": [0, 1]})
    assert [cell.plan.strategy.refresh.staleness for cell in stale] == [0, 1]
    codecs = found(**{"compression.gradients": [None, "top-k"]})
    assert [cell.plan.strategy.compression.gradients for cell in codecs] == [None, TopK()]


def test_an_interval_of_null_grows_as_in_the_training_program(tmp_path):
    """Oracle: the program's usual options. A trace would not hold whole intervals."""
    axes = {"strategy": ["comm-opt", "mine"], "ranks": [1]}
    options = {"kfac": {"factor_update_steps": None, "inv_update_steps": None}}
    mine = {"mine": {"kfac.factor_update_steps": 1}}
    cells = spec.read(written(tmp_path, strategies=mine, matrix=axes, options=options)).cells
    found = [
        (cell.options.kfac.factor_update_steps, cell.options.kfac.inv_update_steps)
        for cell in cells
    ]
    assert found == [(None, None), (1, None)]
    assert [cell.options.trace_steps for cell in cells] == [None, None]
    axes = {"strategy": ["comm-opt", "mine"], "ranks": [1]}  # mine has an interval of 2
    whole = [cell.options for cell in spec.read(written(tmp_path, matrix=axes)).cells]
    assert [(o.kfac.factor_update_steps, o.kfac.inv_update_steps) for o in whole] == [
        (10, 50),
        (10, 2),
    ]
    assert [o.trace_steps for o in whole] == [50, 10]


def test_a_name_has_the_axes_that_a_part_of_the_study_lacks(tmp_path):
    """Oracle: names by hand; a single value beside none makes a difference, too."""
    first = {"strategy": ["mine"], "ranks": [1], "lr": [0.1]}
    changed = {**first, "kfac.inv_update_steps": [5]}
    cells = spec.read(written(tmp_path, matrix=[first, changed])).cells
    assert [cell.variant for cell in cells] == ["mine", "mine, inv_update_steps 5"]
    assert [cell.options.kfac.inv_update_steps for cell in cells] == [2, 5]


def test_cells_of_old_studies_keep_their_directories(tmp_path):
    """Oracle: stored names, of SGD from before batch had a usual value.

    Names of K-FAC are new where the usual intervals are.
    """
    base = tmp_path / "base.yaml"
    base.write_text(
        "{model: digits_cnn, batch: 256, lr: 0.05, kfac: {damping: 0.03, inv_update_steps: 10}}"
    )
    sgd = {"sgd": {"optimizer": "sgd", "lr": 0.2, "weight_decay": 0.005}}
    axes = {"strategy": ["sgd", "kfac-opt"], "ranks": [1, 2]}
    file = written(tmp_path, base=str(base), options={"epochs": 8}, strategies=sgd, matrix=axes)
    assert [cell.directory for cell in spec.read(file).cells] == [
        *("sgd-1-7f13575a", "sgd-2-dd59d3d4", "kfac-opt-1-51eebc03", "kfac-opt-2-ad1f096c")
    ]


def test_a_target_may_be_in_per_cent(tmp_path):
    """Oracle: 97 % is 0.97."""
    assert spec.read(written(tmp_path, target=97)).target == 0.97
    assert spec.read(written(tmp_path, target=0.97)).target == 0.97
    assert spec.read(written(tmp_path, target=1)).target == 1


def test_the_target_of_autoencoders_is_an_error(tmp_path):
    """Oracle: 97 as the squared error of an image; accuracy and error cannot share a target."""
    axes = {"strategy": ["sgd"], "ranks": [1]}
    file = written(
        tmp_path, target=97, matrix=axes, strategies={}, options={"model": "autoencoder_small"}
    )
    found = spec.read(file)
    assert (found.target, found.measure.name) == (97, "error")
    assert found.measure.reaches(96, 97) and not found.measure.reaches(98, 97)
    assert not found.measure.reaches(math.nan, 97)
    mixed = axes | {"model": ["digits_cnn", "autoencoder_small"]}
    with pytest.raises(ValueError, match="classifiers are measured by accuracy, autoencoders by"):
        spec.read(written(tmp_path, matrix=mixed, strategies={}, options={}))


def test_a_cell_is_another_one_once_an_option_has_changed(tmp_path):
    before = spec.read(written(tmp_path)).cells
    same = spec.read(written(tmp_path, name="another name")).cells
    changed = spec.read(written(tmp_path, options=STUDY["options"] | {"lr": 0.3})).cells
    names = [[cell.directory for cell in found] for found in (before, same, changed)]
    assert names[0] == names[1]
    assert not set(names[0]) & set(names[2])


def test_ranks_that_a_strategy_cannot_use_are_left_out(tmp_path):
    """Oracle: the training program's own words."""
    axes = {"strategy": ["sgd", "hybrid"], "ranks": [2, 3]}
    found = spec.read(written(tmp_path, matrix=axes))
    assert [c.label for c in found.cells] == [
        "sgd on 2 ranks",
        "sgd on 3 ranks",
        "hybrid on 2 ranks",
    ]
    ((label, why),) = found.left_out
    assert label == "hybrid on 3 ranks"
    assert "grad_worker_fraction=0.5 of 3 ranks is not a whole number of workers" in why


@pytest.mark.parametrize("name", sorted(spec.NAMED))
def test_every_named_strategy_can_be_used(tmp_path, name):
    """Oracle: the training program's parser."""
    file = written(tmp_path, strategies={}, matrix={"strategy": [name], "ranks": [6]})
    assert labels(file) == [f"{name} on 6 ranks"]


def test_the_digits_study_has_eight_strategies_on_three_numbers_of_ranks(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    found = spec.read(root / "jobs" / "studies" / "digits.yaml")
    assert len({cell.strategy for cell in found.cells}) >= 8
    assert {cell.ranks for cell in found.cells} == {1, 2, 4}
    assert all(label == "hybrid on 1 rank" for label, _ in found.left_out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrx": {}}, "unknown key matrx; did you mean matrix?"),
        ({"matrix": {"ranks": [1]}}, "matrix.strategy=None must be a list of at least one value"),
        ({"matrix": {"strategy": "sgd", "ranks": [1]}}, "matrix.strategy=sgd must be a list"),
        ({"matrix": {"strategy": ["sgd"], "ranks": [0]}}, "matrix.ranks: 0 must be a whole number"),
        ({"matrix": {"strategy": ["sgd"], "ranks": [2, 2]}}, "must not contain a value twice"),
        (
            {"matrix": {"strategy": ["sdg"], "ranks": [1]}},
            "unknown strategy sdg; did you mean sgd",
        ),
        ({"options": {"lrr": 1}}, "options: unknown key lrr; did you mean lr?"),
        (
            {"strategies": {"mine": {"kfac.solvr": 1}}},
            "strategies.mine: unknown key kfac.solvr",
        ),
        ({"strategies": {"mine": ["lr"]}}, "strategies.mine=['lr'] must have lines of the form"),
        ({"options": {"run_dir": "x"}}, "options: run_dir is set by the study itself; leave it"),
        ({"options": [1]}, "options=[1] must have lines of the form `key: value`"),
        ({"launcher": "pbs"}, "launcher=pbs must be one of mpirun, slurm"),
        ({"target": 970}, "target=970 must be at most 100: an accuracy in per cent"),
        ({"options": {"batch_size": 1}}, "options: unknown key batch_size; did you mean batch?"),
        ({"machine": "nowhere.json"}, "machine=nowhere.json is not a readable file"),
        ({"base": "nowhere.yaml"}, "base=nowhere.yaml is not a file"),
        (
            {"options": {"batch": "60 until 1, 120"}},
            "batch=60 until 1, 120 must be a single number, so steps can be compared",
        ),
        ({"options": {"batch": 120, "lr": -1}}, "lr=-1.0 must be a finite number > 0"),
        (
            {"matrix": {"strategy": ["hybrid"], "ranks": [3]}},
            "hybrid on 3 ranks: assignment.grad_worker_fraction",
        ),
        (
            {"strategies": {"mine": {"kfac.skip": ["fcc"]}}},
            "mine on 2 ranks: skip names 'fcc', which is not a module of the model",
        ),
        (
            {"strategies": {"mine": {"strategy": "staggered", "kfac.inv_update_steps": 4}}},
            "mine on 2 ranks: inv_update_steps=4 must be a multiple of refresh.stagger=5",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_run(tmp_path, capsys, changes, message):
    place = tmp_path / "place"
    assert study.main([str(written(tmp_path, **changes)), f"--run_dir={place}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mpikfac study: {tmp_path / 'study.yaml'}: ")
    assert message in line
    assert not place.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file must have lines of the form `key: value`"),
        ("name: [", "line 1 is not YAML"),
        ("name: a\nname: b\n", "line 2: name is given twice; give it once"),
        ("matrix:\n  ranks: [1]\n  ranks: [2]\n", "line 3: matrix.ranks is given twice"),
        ("options:\n  kfac.lr: 1\n  kfac: {lr: 2}\n", "line 3: options.kfac.lr is given twice"),
    ],
)
def test_a_file_that_is_no_study_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        spec.read(path)
    with pytest.raises(ValueError, match="No such file"):
        spec.read(tmp_path / "missing.yaml")


def test_a_study_runs_what_is_not_complete_and_writes_a_report(tmp_path, monkeypatch, capsys):
    """Oracle: the cells' files, and the output of the second start."""
    file = written(tmp_path, matrix={"strategy": ["sgd", "mine"], "ranks": [1]})
    place = tmp_path / "place"
    launcher(tmp_path, monkeypatch, f'{ALONE}"$@"\n')
    assert study.main([str(file), f"--run_dir={place}"]) == 0
    first = capsys.readouterr().out
    assert "[1/2] sgd on 1 rank: " in first
    assert "complete" not in first
    for cell in spec.read(file).cells:
        found = place / "cells" / cell.directory
        assert jobs.result(found).code == 0
        assert 0 <= jobs.result(found).others < 1
        assert json.loads((found / "run" / "environment.json").read_text())["ranks"] == 1
    assert "mine" in (place / "report.html").read_text()
    launcher(tmp_path, monkeypatch, "#!/bin/sh\nexit 9\n")
    assert study.main([str(file), f"--run_dir={place}"]) == 0
    assert capsys.readouterr().out.count("was complete") == 2


def test_progress_tells_the_part_of_a_cell_and_the_time_to_the_end(tmp_path, monkeypatch, capsys):
    """Oracle: by hand: a quarter of the second of four cells after 30 s; ended cells took 60 s."""
    file = written(tmp_path, options={"batch": 120, "epochs": 4})
    wanted = spec.read(file)
    clock = iter((0.0, 0.0, 30.0, 100.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown = progress.StudyProgress(wanted.cells, tmp_path)
    shown.on_terminal = True
    cell = wanted.cells[1]
    run = tmp_path / "cells" / cell.directory / "run"
    run.mkdir(parents=True)
    shown.end(1, wanted.cells[0], "60 s", 60.0)
    assert capsys.readouterr().out == "\r\x1b[K[1/4] sgd on 1 rank: 60 s; about 3 min to go\n"
    shown.begin()
    (run / "metrics.jsonl").write_text('{"step": 1, "epoch": 0.5}\n{"step": 2, "epoch": 1.0}\n{"')
    shown.look(2, cell)  # 3 x 30 s here, 2 x 60 s of the others
    assert capsys.readouterr().out == "\r\x1b[K[2/4] sgd on 2 ranks: 25%; about 4 min to go"
    shown.on_terminal = False
    shown.look(2, cell)
    assert capsys.readouterr().out.startswith("[2/4] sgd on 2 ranks: 25%; about")
    (run / "metrics.jsonl").write_text("damaged")
    assert progress.done_part(run, cell) == 0


def test_a_running_cell_is_watched(tmp_path, monkeypatch):
    """Oracle: the number of calls in a job of three looks."""
    file = written(tmp_path, matrix={"strategy": ["sgd"], "ranks": [1]})
    monkeypatch.setattr(jobs, "LOOK", 0.1)
    launcher(tmp_path, monkeypatch, "#!/bin/sh\nsleep 0.6\nexit 3\n")
    (cell,) = spec.read(file).cells
    calls = []
    assert jobs.run(cell, tmp_path / "place", "mpirun", lambda: calls.append(1)).code == 3
    assert len(calls) >= 3


# A launcher that leaves a rank behind, as after SIGKILL: the rank never ends.
LEAVES = "#!/bin/sh\nsleep 600 > /dev/null 2>&1 &\necho $! > {pid}\n"


@pytest.mark.parametrize("killed", ["the launcher", "the study"])
def test_what_a_killed_job_has_left_is_ended_before_the_next(tmp_path, monkeypatch, killed):
    """Oracle: the process of the rank that never ends; the study itself, and its next start."""
    file = written(tmp_path, matrix={"strategy": ["sgd"], "ranks": [1]})
    (cell,), pid = spec.read(file).cells, tmp_path / "pid"
    place = tmp_path / "place"
    if killed == "the launcher":
        launcher(tmp_path, monkeypatch, LEAVES.format(pid=pid) + "kill -9 $$\n")
        ended = jobs.run(cell, place / "cells" / cell.directory, "mpirun")
        assert ended.why == "code -9: ended by signal 9 (Killed), perhaps for lack of memory"
    else:
        launcher(tmp_path, monkeypatch, LEAVES.format(pid=pid) + "wait\n")
        words = [sys.executable, "-m", "mpikfac_apps", "study", str(file), f"--run_dir={place}"]
        with subprocess.Popen(words) as job:
            while not pid.exists() or not pid.read_text():
                assert job.poll() is None
                time.sleep(0.05)
            job.kill()
        assert Path("/proc", pid.read_text().strip()).exists()
        launcher(tmp_path, monkeypatch, "#!/bin/sh\nexit 3\n")
        assert jobs.run(cell, place / "cells" / cell.directory, "mpirun").code == 3
    assert list(processes_with(f"{jobs.CELLS}={place / 'cells'}")) == []


RULE = 74 * "-"
NOTE = f"{RULE}\nprterun noticed that process rank 1 exited on signal 9.\n{RULE}\n"


@pytest.mark.parametrize(
    ("output", "code", "why"),
    [
        (f"epoch 1: loss 2\n{NOTE}", 137, "ended by signal 9 (Killed), perhaps for lack of memory"),
        (f"epoch 1: loss 2\n{NOTE}", 139, "ended by signal 11 (Segmentation fault)"),
        (f"ImportError: no module\n{NOTE}", 1, "ImportError: no module"),
        (f"mpikfac: no progress for 9 s\n{NOTE}", 137, "no progress for 9 s"),
        (NOTE, 1, "exit code 1, without a message"),
        ("", 134, "ended by signal 6 (Aborted)"),
    ],
)
def test_the_reason_of_a_failure_is_no_note_of_a_launcher(tmp_path, monkeypatch, output, code, why):
    """Oracle: by hand, as Open MPI 5 writes its notes."""
    (tmp_path / "output").write_text(output)
    launcher(tmp_path, monkeypatch, f"#!/bin/sh\ncat {tmp_path}/output\nexit {code}\n")
    (cell,) = spec.read(written(tmp_path, matrix={"strategy": ["sgd"], "ranks": [1]})).cells
    told = jobs.run(cell, tmp_path / "cells" / "a", "mpirun").why
    assert told.removeprefix(f"code {code}: ") == why


@pytest.mark.slow
def test_a_cell_that_fails_is_noted_with_its_line_and_run_again(tmp_path, monkeypatch, capsys):
    """Oracle: the program's line among lines of a launcher."""
    file = written(tmp_path, matrix={"strategy": ["sgd", "mine"], "ranks": [1]})
    place = tmp_path / "place"
    words = 'echo "mpikfac: reading data: the disk is gone" >&2; echo "prterun noise" >&2; exit 2'
    fails = f'#!/bin/sh\ncase "$*" in *mem-opt*) {words};; esac\n'
    launcher(tmp_path, monkeypatch, f'{fails}{ALONE.partition(chr(10))[2]}"$@"\n')
    assert study.main([str(file), f"--run_dir={place}"]) == 1
    out = capsys.readouterr().out
    assert "[2/2] mine on 1 rank: failed: reading data: the disk is gone" in out
    assert "reading data: the disk is gone" in (place / "report.html").read_text()
    launcher(tmp_path, monkeypatch, f'{ALONE}"$@"\n')
    assert study.main([str(file), f"--run_dir={place}"]) == 0


@pytest.mark.slow
def test_exit_code_0_alone_does_not_make_a_cell_complete(tmp_path, monkeypatch, capsys):
    """Oracle: a launcher that starts nothing, and a program that stops within the epoch."""
    file = written(tmp_path, matrix={"strategy": ["sgd"], "ranks": [1]})
    words = [str(file), f"--run_dir={tmp_path / 'place'}"]
    launcher(tmp_path, monkeypatch, "#!/bin/sh\nexit 0\n")
    assert study.main(words) == 1
    assert "metrics.jsonl is missing" in capsys.readouterr().out
    launcher(tmp_path, monkeypatch, f'{ALONE}"$@" --max_steps=1\n')
    assert study.main(words) == 1
    assert "code 0, but its metrics end at step 0" in capsys.readouterr().out
    launcher(tmp_path, monkeypatch, f'{ALONE}"$@"\n')
    assert study.main(words) == 0


@pytest.mark.gate
def test_a_run_that_is_to_end_within_an_epoch_is_complete_there(tmp_path, monkeypatch):
    """Oracle: 13 of 24 steps; the only line of metrics is at step 10."""
    options = {**STUDY["options"], "epochs": 12, "max_steps": 13}
    file = written(tmp_path, options=options, matrix={"strategy": ["sgd"], "ranks": [1]})
    launcher(tmp_path, monkeypatch, f'{ALONE}"$@"\n')
    assert study.main([str(file), f"--run_dir={tmp_path / 'place'}"]) == 0


def test_a_cell_that_is_asked_to_stop_ends_the_study(tmp_path, monkeypatch, capsys):
    """Oracle: the number of starts; the report, which is written in any case."""
    file = written(tmp_path, matrix={"strategy": ["sgd", "mine"], "ranks": [1]})
    launcher(tmp_path, monkeypatch, f"#!/bin/sh\necho >> {tmp_path}/starts\nexit 75\n")
    assert study.main([str(file), f"--run_dir={tmp_path / 'place'}"]) == 75
    assert (tmp_path / "starts").read_text() == "\n"
    out = capsys.readouterr().out
    assert "[1/2] sgd on 1 rank: stopped; the same command resumes the study" in out
    page = (tmp_path / "place" / "report.html").read_text()
    assert "Failed" not in page
    assert "the same command resumes the study): sgd on 1 rank; mine on 1 rank." in page


@pytest.mark.gate
def test_an_interrupted_study_ends_its_job_and_leaves_the_cell_to_be_run_again(tmp_path):
    """Oracle: the launcher has ended, which takes 2 s, and the cell has no result."""
    file = written(tmp_path, matrix={"strategy": ["sgd"], "ranks": [1]})
    mpirun = tmp_path / "mpirun"
    ends = f'trap "sleep 2; echo > {tmp_path}/ended; exit 143" TERM'
    lives = f"echo $$ > {tmp_path}/pid\nfor _ in $(seq 300); do sleep 0.1; done\n"
    mpirun.write_text(f"#!/bin/sh\n{ends}\n{lives}")
    mpirun.chmod(0o755)
    environment = os.environ | {"MPIRUN": str(mpirun), "MPIRUN_FLAGS": ""}
    interrupt(file, tmp_path / "place", environment, once=tmp_path / "pid")
    assert (tmp_path / "ended").exists()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    (cell,) = spec.read(file).cells
    assert jobs.result(tmp_path / "place" / "cells" / cell.directory) is None


def test_an_interruption_while_a_job_starts_ends_the_job(tmp_path, monkeypatch):
    """Oracle: the launcher's own last word; the interruption comes before Popen returns."""
    launcher(
        tmp_path,
        monkeypatch,
        f'#!/bin/sh\ntrap "echo > {tmp_path}/ended; exit 143" TERM\n'
        f"echo > {tmp_path}/started\nfor _ in $(seq 300); do sleep 0.1; done\n",
    )
    (cell,) = spec.read(written(tmp_path, matrix={"strategy": ["sgd"], "ranks": [1]})).cells
    real = subprocess.Popen

    def interrupted(*words, **options):
        job = real(*words, **options)
        while not (tmp_path / "started").exists():
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)
        return job

    monkeypatch.setattr(jobs.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jobs.run(cell, tmp_path / "place", "mpirun")
    assert (tmp_path / "ended").exists()


def interrupt(file, place, environment, once):
    """Start a study, and interrupt the study once the file `once` has content."""
    words = [sys.executable, "-m", "mpikfac_apps", "study", str(file), f"--run_dir={place}"]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as job:
        while not once.exists() or not once.read_text():
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=paced(240))
    assert job.returncode == 130
    assert errors == "mpikfac study: interrupted; the same command resumes the study\n"


@pytest.mark.gate
def test_a_queued_job_is_cancelled_and_waited_for(tmp_path):
    """Oracle: the arguments of a stand-in for scancel; sbatch ends without a kill."""
    file = written(tmp_path, launcher="slurm", matrix={"strategy": ["mine"], "ranks": [2]})
    (tmp_path / "bin").mkdir()
    scripts = {
        "sbatch": "echo '17;west'; echo > $0.up; while ! test -e $0.off; do sleep 0.1; done; "
        "sleep 1; echo > $0.ended; exit 1",
        "scancel": f'echo "$@" > {tmp_path}/words; echo > {tmp_path}/bin/sbatch.off',
    }
    for name, script in scripts.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    interrupt(file, tmp_path / "place", environment, once=tmp_path / "bin" / "sbatch.up")
    assert (tmp_path / "words").read_text() == "--clusters=west 17\n"
    assert (tmp_path / "bin" / "sbatch.ended").exists()


def test_slurm_is_asked_for_a_job_of_each_cell_and_its_code_counts(tmp_path, monkeypatch):
    """Oracle: the arguments of a stand-in for sbatch."""
    file = written(tmp_path, launcher="slurm", matrix={"strategy": ["mine"], "ranks": [2]})
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho 17\nprintf "%s\\n" "$@" > {tmp_path}/words\nexit 3\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("MPIRUN_FLAGS", raising=False)
    (cell,) = spec.read(file).cells
    place = tmp_path / "place"
    ended = jobs.run(cell, place, "slurm")
    assert (ended.code, ended.cores, ended.others) == (3, None, None)  # it ran elsewhere
    words = (tmp_path / "words").read_text().splitlines()
    assert {"--wait", "--parsable", "--ntasks=2", f"--output={place}/output.txt"} <= set(words)
    assert words[-1].startswith("srun --mpi=pmix ")
    assert words[-1].endswith(f"--run_dir={place}/run --resume=auto --exit_code=75")


def test_slurm_without_sbatch_is_refused(tmp_path, monkeypatch, capsys):
    file = written(tmp_path, launcher="slurm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert study.main([str(file), f"--run_dir={tmp_path / 'place'}"]) == 2
    assert "launcher=slurm needs sbatch on PATH" in capsys.readouterr().err


def test_preconditioners_and_clips_are_axes(tmp_path):
    """Oracle: the types by hand; variants with different results have different letters."""
    own = {"soft": {"strategy": "comm-opt", "kfac.preconditioner": "eigen"}}
    matrix = {
        "strategy": ["comm-opt", "soft"],
        "ranks": [2],
        "kfac.clip": ["kl", None],
    }
    found = spec.read(written(tmp_path, strategies=own, matrix=matrix))
    kinds = [type(cell.options.kfac.preconditioner).__name__ for cell in found.cells]
    assert kinds == ["NoneType", "NoneType", "Eigen", "Eigen"]
    assert len(set(results.estimators(found.cells).values())) == 4


def test_bytes_of_local_steps_are_those_of_their_exchanges(tmp_path):
    """Oracle: by hand: every fourth step sends the weights, which are as many as gradients."""
    own = {
        "local": {"strategy": "local-sgd", "optimizer": "sgd", "sync.sync_every": 4},
        "each": {"strategy": "local-sgd", "optimizer": "sgd", "sync.sync_every": 2},
    }
    matrix = {"strategy": ["local", "each"], "ranks": [2]}
    found = spec.read(written(tmp_path, strategies=own, matrix=matrix))
    local, each = results.read(found, tmp_path)
    assert each.handed == pytest.approx(2 * local.handed) and local.handed > 0
    assert each.wire == pytest.approx(2 * local.wire)
    assert (local.interval % 4, each.interval % 2) == (0, 0)
