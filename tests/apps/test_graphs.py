"""Graphs, partitions, and the program: rows, restarts on other ranks, refused options."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys

import numpy as np
import pytest

from mpikfac_apps.graphs import data, partitions
from support.launch import launch

pytestmark = pytest.mark.lab

PROGRAM = ("-m", "mpikfac_apps", "train-graph")
SHORT = (
    *("--planted.nodes=120", "--planted.inputs=8", "--planted.communities=3", "--known=0.2"),
    *("--epochs=8", "--device=cpu", "--threads=1", "--hidden=8", "--warmup=2"),
)


def clusters(count, size):
    """Return a graph of groups in which all know all, in a ring, with mixed numbers of nodes."""
    names = np.random.default_rng(0).permutation(count * size)
    pairs = [
        *(
            (g * size + a, g * size + b)
            for g in range(count)
            for a in range(size)
            for b in range(a)
        ),
        *((g * size, (g + 1) % count * size + 1) for g in range(count)),
    ]
    edges = data.once(names[np.array(pairs).T])
    return data.Graph(edges, np.zeros((count * size, 1)), np.zeros(count * size, np.intp))


# -- graphs ------------------------------------------------------------------------------------


def test_edges_are_listed_once():
    """Oracle: by hand."""
    pairs = np.array([[3, 0, 1, 2, 0], [1, 0, 3, 0, 2]])
    np.testing.assert_array_equal(data.once(pairs), [[0, 1], [2, 3]])


def test_planted_edges_and_features_follow_the_options():
    """Oracle: expected shares of edges inside of communities, and the spread of features."""
    options = data.Planted(nodes=20000, communities=5, degree=8, mixing=0.3, inputs=3, noise=0.5)
    graph = data.planted(options, 1)
    assert len(graph.labels) == 20000 and (graph.inputs, graph.classes) == (3, 5)
    assert (graph.edges[0] < graph.edges[1]).all()
    assert len({*zip(*graph.edges.tolist())}) == graph.edges.shape[1]
    assert graph.edges.shape[1] == pytest.approx(80000, rel=0.01)
    inside = np.equal(*graph.labels[graph.edges]).mean()
    assert inside == pytest.approx(0.7 + 0.3 / 5, abs=0.01)
    spread = [graph.features[graph.labels == label].std(0) for label in range(5)]
    np.testing.assert_allclose(spread, 0.5, rtol=0.05)
    again, other = data.planted(options, 1), data.planted(options, 2)
    assert all(map(np.array_equal, graph, again))
    assert not np.array_equal(graph.labels, other.labels)


def test_the_karate_club_is_that_of_networkx():
    """Oracle: networkx: edges and clubs of all members."""
    networkx = pytest.importorskip("networkx", reason="networkx is not installed")
    graph, club = data.karate(), networkx.karate_club_graph()
    assert {*zip(*graph.edges.tolist())} == {tuple(sorted(edge)) for edge in club.edges}
    clubs = ["Officer" if label else "Mr. Hi" for label in graph.labels]
    assert clubs == [club.nodes[node]["club"] for node in range(34)]


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nilearn", "nibabel"))),
    reason="nilearn or nibabel is not installed",
)
def test_the_surface_is_a_closed_surface_of_triangles():
    """Oracle: Euler's formula for triangles on a sphere: edges = 3 nodes - 6."""
    graph = data.surface()
    assert graph.features.shape == (10242, 5) and graph.edges.shape == (2, 3 * 10242 - 6)
    np.testing.assert_allclose(graph.features.std(0), 1)
    assert 0.4 < graph.labels.mean() < 0.6


def test_a_missing_package_is_named(monkeypatch):
    """Oracle: the text."""
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ValueError, match="this needs the package networkx: "):
        data.karate()


def test_the_share_of_known_nodes_is_rounded_up():
    """Oracle: by hand; another seed knows other nodes."""
    graph = clusters(4, 5)
    known = data.split(graph, 0.31, 0)
    assert known.sum() == 7 and not np.array_equal(known, data.split(graph, 0.31, 1))
    with pytest.raises(ValueError, match=r"known=0.96 leaves none of the 20 nodes for the test"):
        data.split(graph, 0.96, 0)


# -- partitions --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", partitions.PARTITIONS)
def test_parts_cut_few_edges(name):
    """Oracle: the ring of groups, in which 4 edges lie between groups; parts of equal size."""
    if name == "metis":
        pytest.importorskip("pymetis", reason="pymetis is not installed")
    graph = clusters(4, 20)
    for parts in (1, 2, 4):
        owners = partitions.dealt(name, graph, parts)
        sizes = np.bincount(owners, minlength=parts)
        assert len(owners) == 80 and sizes.max() <= 1.05 * 80 / parts + 1
        between = partitions.crossing(graph.edges, owners)
        assert between == sum(owners[a] != owners[b] for a, b in graph.edges.T)
        if name != "contiguous":
            assert between == {1: 0, 2: 2, 4: 4}[parts]


def test_a_rank_without_a_node_is_refused():
    """Oracle: the text."""
    with pytest.raises(ValueError, match=r"partition=contiguous leaves ranks \[1, 3, 5\] without"):
        partitions.dealt("contiguous", clusters(1, 3), 6)


# -- the program -------------------------------------------------------------------------------


def rows_of(folder):
    """Return the rows of epochs, without times."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    names = ("step", "train_loss", "train_accuracy", "test_accuracy")
    return [[row[name] for name in names] for row in rows if "test_accuracy" in row]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the rows of runs on a single rank without an end, and of late rows on two ranks."""
    root = tmp_path_factory.mktemp("graphs")
    rows = {}
    for ranks, name in ((1, "exact"), (2, "delayed")):
        arguments = (*SHORT, f"--aggregate={name}", "--delay=3", f"--run_dir={root / name}")
        ended = launch(ranks, *PROGRAM, *arguments)
        assert ended.returncode == 0, ended.stderr
        rows[name] = rows_of(root / name)
    return rows


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_run_goes_on_on_other_ranks(tmp_path, unbroken, before, after):
    """Oracle: the run on a single rank without an end, to the digits of float32."""
    arguments = (*SHORT, f"--run_dir={tmp_path / 'run'}")
    assert launch(before, *PROGRAM, *arguments, "--max_steps=5").returncode == 0
    ended = launch(after, *PROGRAM, *arguments, "--resume=auto")
    assert ended.returncode == 0, ended.stderr
    for found, expected in itertools.zip_longest(rows_of(tmp_path / "run"), unbroken["exact"]):
        assert found == pytest.approx(expected, rel=1e-3, abs=0.02)
        assert found[:2] == pytest.approx(expected[:2], rel=1e-4)


def test_late_rows_go_on_with_the_run(tmp_path, unbroken):
    """Oracle: the run without an end, to the last bit; a line where late rows begin anew."""
    arguments = (*SHORT, "--aggregate=delayed", "--delay=3", f"--run_dir={tmp_path / 'run'}")
    assert launch(2, *PROGRAM, *arguments, "--max_steps=5").returncode == 0
    ended = launch(2, *PROGRAM, *arguments, "--resume=auto", "--max_steps=7")
    assert ended.returncode == 0 and "restart from 0" not in ended.stdout + ended.stderr
    assert rows_of(tmp_path / "run") == unbroken["delayed"][:7]
    ended = launch(3, *PROGRAM, *arguments, "--resume=auto")
    assert ended.returncode == 0
    assert (ended.stdout + ended.stderr).count("delayed rows restart from 0") == 1


def test_mistakes_are_told_in_a_line(tmp_path):
    """Oracle: the lines, and the code."""
    for arguments, text in (
        (["--planted.nodes=2", "--known=0.9"], "leaves ranks [2] without a node"),
        (["--aggregate=mean"], "aggregate=mean"),
    ):
        ended = launch(3, *PROGRAM, *SHORT[2:], *arguments, f"--run_dir={tmp_path / 'run'}")
        assert ended.returncode == 2
        assert text in ended.stderr and "Traceback" not in ended.stderr
