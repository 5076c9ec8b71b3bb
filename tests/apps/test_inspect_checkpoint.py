"""Printed contents equal a checkpoint's contents; damage is reported."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

import mpikfac
from mpikfac.preconditioners import named_preconditioner
from mpikfac_apps.inspecting import inspect, spectra
from support import inside, problem
from support.pace import paced
from support.problem import SETTINGS, network, run, sgd


def rows(text, section):
    """Return the words of a section's lines, by first word, without headings."""
    lines = text.partition(f"{section}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return {words[0]: words[1:] for words in map(str.split, lines)}


def table_of_layers(text):
    """Return the heading and the words of the table of layers, by layer."""
    heading = next(line for line in text.splitlines() if line.startswith("Orders"))
    return heading, rows(text, heading)


def close(values):
    """Compare printed numbers to a few digits; numbers below 1e-12 are rounding of eigenvalues."""
    return pytest.approx(values, rel=0.05, abs=1e-12)


def test_eigenvalues_and_conditions_are_those_of_the_dense_matrices(trained, tmp_path, capsys):
    """Oracle: NumPy on the factors of the running K-FAC, and on their damped Kronecker product."""
    assert inspect.main([str(tmp_path / "run")]) == 0
    heading, found = table_of_layers(capsys.readouterr().out)
    assert "damping 0.01 and preconditioner eigen" in heading
    assert list(found) == ["0", "3", "5"]
    for layer, words in found.items():
        packed = (inside.factors(trained)[f"{layer}.{side}"] for side in "AG")
        sides = [mpikfac.numerics.unfold_triangle(triangle).numpy() for triangle in packed]
        expected = []
        for matrix in sides:
            values = np.linalg.eigvalsh(matrix)
            expected += [len(values), np.trace(matrix) / len(values), values[-1], values[0]]
        product = np.kron(*sides)
        damped = product + SETTINGS["damping"] * np.eye(len(product))
        assert [float(word) for word in words] == close([*expected, np.linalg.cond(damped)])


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize(
    "preconditioner", ["eigen", "inverse", problem.UNSPLIT, "shampoo", "kl-shampoo"]
)
def test_conditions_are_those_of_what_each_preconditioner_inverts(preconditioner, relative):
    """Oracle: NumPy's condition number of the dense matrix, the damping shared as documented.

    Shampoo takes fourth roots of each factor, KL-Shampoo square roots.
    """
    power = {"shampoo": 1 / 4, "kl-shampoo": 1 / 2}.get(preconditioner, 1)
    generator = torch.Generator().manual_seed(0)
    a, g = (torch.randn(n, 3 * n, generator=generator).double() for n in (6, 4))
    a, g = (a @ a.T).numpy(), (g @ g.T).numpy() / 100
    means = np.trace(a) / 6, np.trace(g) / 4
    share = (0, 0) if preconditioner == "eigen" else (0.1, 0.1)
    if preconditioner == "inverse":
        pi = 1 if relative else np.sqrt(means[0] / means[1])
        share = pi * np.sqrt(0.1), np.sqrt(0.1) / pi
    if relative:
        share = share[0] * means[0], share[1] * means[1]
    dense = np.kron(a + share[0] * np.eye(6), g + share[1] * np.eye(4))
    if preconditioner == "eigen":
        dense += 0.1 * (means[0] * means[1] if relative else 1) * np.eye(24)
    spectrum = spectra.Spectrum("layer", *map(spectra.eigenvalues, map(torch.from_numpy, (a, g))))
    expected = np.linalg.cond(dense) ** power
    inverted = spectrum.condition(named_preconditioner(preconditioner), 0.1, relative)
    assert inverted == pytest.approx(expected)


def test_factors_of_the_gradient_are_factors():
    """Oracle: the state of the trainer."""
    model, (inputs, labels) = network(), problem.batch(0)
    kfac = mpikfac.KFAC(model, sgd(model), preconditioner="shampoo")
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    kfac.step()
    state, kind = kfac.state_dict(), "kfac/gradient-factors/"
    averages = {n.removeprefix(kind): v for n, v in state.items() if n.startswith(kind)}
    found = {
        f"{layer}.{side}": factor
        for layer in spectra.layers(state)
        for side, factor in spectra.factors(state, layer).items()
    }
    assert found.keys() == averages.keys() and len(found) == 6
    for name, factor in found.items():
        assert torch.equal(factor, mpikfac.numerics.unfold_triangle(averages[name]))


def test_a_singular_layer_without_damping_has_an_infinite_condition():
    """Oracle: by definition; rounding below 0 is no negative condition."""
    values = torch.tensor([-1e-18, 1.0])
    assert spectra.Spectrum("layer", values, values).condition(mpikfac.Eigen(), 0.0) == float("inf")


def test_the_damping_is_the_one_that_was_reached(tmp_path, capsys):
    """Oracle: the damping of the running K-FAC, which began with another damping."""
    model = network()
    damping = mpikfac.LevenbergMarquardt(0.01, damping_adaptation_interval=1)
    settings = {"damping": mpikfac.Damping(relative=damping), "grafting": mpikfac.NoGrafting()}
    kfac = mpikfac.KFAC(model, sgd(model), mpikfac.world(), preconditioner="eigen", **settings)
    run(kfac, mpikfac.world(), [0])
    kfac.update_damping(1.0, -100.0)
    mpikfac.save_checkpoint(mpikfac.world(), tmp_path / "checkpoints", kfac.state_dict(), 1)
    settings = "{preconditioner: {type: eigen}, damping: null, relative_damping: 0.01}"
    (tmp_path / "config.yaml").write_text(f"kfac: {settings}\n")
    assert inspect.main([str(tmp_path)]) == 0
    assert damping.damping != 0.01
    expected = f"with relative damping {damping.damping:g} and preconditioner eigen"
    assert expected in table_of_layers(capsys.readouterr().out)[0]


def test_a_layer_is_judged_by_its_own_preconditioner(tmp_path, capsys):
    """Oracle: the condition of the running K-FAC's factors; vectors have none."""
    model, preconditioners = network(), {"3": "inverse", "5": "eva"}

    def rule(layer):
        return dataclasses.replace(layer, preconditioner=preconditioners.get(layer.name))

    kfac = problem.kfac(model, sgd(model), mpikfac.world(), **SETTINGS, rule=rule)
    run(kfac, mpikfac.world(), [0])
    mpikfac.save_checkpoint(mpikfac.world(), tmp_path / "checkpoints", kfac.state_dict(), 1)
    (tmp_path / "config.yaml").write_text(f"kfac: {{damping: {SETTINGS['damping']}}}\n")
    assert inspect.main([str(tmp_path)]) == 0
    heading, found = table_of_layers(capsys.readouterr().out)
    assert heading.endswith("preconditioner eigen, 3: inverse, 5: eva")
    assert list(found) == ["0", "3"]
    for layer, preconditioner in (("0", "eigen"), ("3", "inverse")):
        packed = (inside.factors(kfac)[f"{layer}.{side}"] for side in "AG")
        values = (spectra.eigenvalues(mpikfac.numerics.unfold_triangle(one)) for one in packed)
        inverse = named_preconditioner(preconditioner)
        expected = spectra.Spectrum(layer, *values).condition(inverse, SETTINGS["damping"])
        assert float(found[layer][-1]) == close(expected)


def test_a_checkpoint_outside_a_run_is_judged_without_damping(trained, tmp_path, capsys):
    (tmp_path / "run" / "config.yaml").unlink()
    assert inspect.main([str(tmp_path / "run" / "checkpoints")]) == 0
    assert "no damping (none is known)" in table_of_layers(capsys.readouterr().out)[0]


@pytest.mark.parametrize("damping", [f"{10**400}", ".nan", "-1", "[1]", "text"])
def test_a_damping_that_no_run_has_is_none(trained, tmp_path, capsys, damping):
    """Oracle: the heading of the table."""
    (tmp_path / "run" / "config.yaml").write_text(
        f"kfac: {{preconditioner: {{type: eigen}}, damping: {damping}}}\n"
    )
    assert inspect.main([str(tmp_path / "run")]) == 0
    assert "no damping (none is known)" in table_of_layers(capsys.readouterr().out)[0]


def test_contents_are_counted(trained, tmp_path, capsys):
    """Oracle: the saved state, and the sizes of files."""
    path = mpikfac.checkpoint.latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert inspect.main([str(path)]) == 0
    text = capsys.readouterr().out
    size = (path / "shard-0.h5").stat().st_size
    assert f"{path}: step {trained.steps}\n" in text
    assert f", {size:,} bytes" in text
    assert rows(text, "Shards") == {"shard-0.h5": [f"{size:,}", "ok"]}
    model = trained.model.state_dict().values()
    factors = inside.factors(trained).values()
    counted = rows(text, "Contents")
    assert counted["model"] == [str(len(model)), f"{sum(t.nbytes for t in model):,}"]
    assert counted["factors"] == [str(len(factors)), f"{sum(t.nbytes for t in factors):,}"]
    assert sum(int(items) for items, _ in counted.values()) == len(trained.state_dict())


@pytest.mark.parametrize(
    ("damage", "told"), [(b"", "0 bytes"), (b"flip", "BLAKE3"), (None, "is missing")]
)
def test_a_damaged_shard_is_told_with_code_1(damage, told, trained, tmp_path, capsys):
    (shard,) = tmp_path.rglob("shard-0.h5")
    content = bytearray(shard.read_bytes())
    shard.unlink()
    if damage is not None:
        content[-1] ^= 1
        shard.write_bytes(content if damage else b"")
    assert inspect.main([str(tmp_path / "run")]) == 1
    text = capsys.readouterr().out
    assert rows(text, "Shards")["shard-0.h5"][1] == "damaged"
    assert told in next(line for line in text.splitlines() if str(shard) in line)
    assert "Orders" not in text


def test_a_damaged_manifest_is_one_line_and_code_1(trained, tmp_path, capsys):
    (manifest,) = tmp_path.rglob("manifest.json")
    manifest.write_text(manifest.read_text().replace("float64", "float32", 1))
    assert inspect.main([str(tmp_path / "run")]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert "manifest.json is damaged" in output.err


@pytest.mark.gate
def test_the_picture_has_a_line_for_every_layer(trained, tmp_path):
    """Oracle: names of the layers as ticks in the SVG file."""
    svg, png = tmp_path / "new" / "spectra.svg", tmp_path / "spectra.png"
    for file in (svg, png):
        assert inspect.main([str(tmp_path / "run"), "--picture", str(file)]) == 0
    assert all(f"<!-- {layer.name} -->" in svg.read_text() for layer in trained.plan.layers)
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gate
def test_factors_that_are_not_finite_are_shown(trained, tmp_path, capsys):
    """Oracle: NaN; a diverged run can be inspected, and the picture is drawn."""
    inside.factors(trained)["3.G"][0, 0] = float("nan")
    root = tmp_path / "diverged"
    mpikfac.save_checkpoint(mpikfac.world(), root, trained.state_dict(), trained.steps)
    picture = tmp_path / "spectra.png"
    assert inspect.main([str(root), "--picture", str(picture)]) == 0
    found = table_of_layers(capsys.readouterr().out)[1]
    assert found["3"][5:] == ["nan"] * 4
    assert "nan" not in found["5"]
    assert picture.exists()


def test_layers_stand_in_natural_order():
    """Oracle: numbers are compared as numbers."""
    names = ["layer10.conv1", "layer2.conv1", "layer2.conv10", "layer2.conv2", "conv1", "10", "9"]
    items = [f"kfac/factors/{name}.{side}" for name in names for side in "AG"]
    order = ["9", "10", "conv1", "layer2.conv1", "layer2.conv2", "layer2.conv10", "layer10.conv1"]
    assert spectra.layers([*items, "kfac/bases/conv1.A.inverse", "model/conv1.weight"]) == order


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "nothing",
            "nothing contains no complete checkpoint; pass the directory of a checkpoint or of a ",
        ),
        ("config.yaml", "contains no complete checkpoint"),
        ("first-order --picture s.gif", "s.gif must end in .pdf, .png or .svg"),
        ("first-order --picture s.png", "no factors to plot"),
        ("", "path"),
        ("--path run", "--path is positional; write only the value of path"),
    ],
)
def test_bad_arguments_are_one_line(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").touch()
    mpikfac.save_checkpoint(mpikfac.world(), "first-order", {"model/w": torch.ones(2)}, 1)
    try:
        code = inspect.main(arguments.split())
    except SystemExit as ended:
        code = ended.code
    output = capsys.readouterr()
    assert (code, output.out, output.err.count("\n")) == (2, "", 1)
    assert told in output.err


@pytest.mark.gate
def test_mpi_is_not_imported(trained, tmp_path):
    """Oracle: the imported modules; a laptop without MPI inspects and exports a cluster's files."""
    program = (
        "import sys; from mpikfac_apps.__main__ import main; run, file = sys.argv[1:]; "
        "code = main(['inspect', run]) or main(['export', run, '--factors', file]); "
        "sys.exit(code or any(name.startswith('mpi4py') for name in sys.modules))"
    )
    arguments = [str(tmp_path / "run"), str(tmp_path / "factors.npz")]
    ran = subprocess.run([sys.executable, "-c", program, *arguments], timeout=paced(240))
    assert ran.returncode == 0
