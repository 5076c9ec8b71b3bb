"""Create graphs whose nodes have features and classes: planted communities, or real graphs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpikfac_apps.options.fields import bounded

Numbers = NDArray[np.float64]
Places = NDArray[np.intp]
FSAVERAGE = "datasets/data/fsaverage5"  # a folder in the package nilearn


class Graph(NamedTuple):
    """An undirected graph without loops.

    Attributes:
        edges: the two nodes of each edge `[2, edges]`, the smaller index first; each edge occurs
            once.
        features: the features of nodes `[nodes, inputs]`.
        labels: the class of each node `[nodes]`.
    """

    edges: Places
    features: Numbers
    labels: Places

    @property
    def inputs(self) -> int:
        """The number of features per node."""
        return self.features.shape[1]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.labels.max()) + 1


@dataclass(frozen=True)
class Planted:
    """The options of planted communities.

    Args:
        nodes: the number of nodes.
        communities: the number of communities, which are the classes.
        degree: the mean number of neighbours of a node.
        mixing: the fraction of the edges whose second node can be in any community; the other
            edges stay within a community.
        inputs: the number of features per node.
        noise: the standard deviation of the noise in features; the communities' centres have
            standard deviation 1.
    """

    nodes: int = bounded(4000, ">= 2")
    communities: int = bounded(8, ">= 2")
    degree: int = bounded(10, ">= 1")
    mixing: float = bounded(0.4, ">= 0", "<= 1")
    inputs: int = bounded(32, ">= 1")
    noise: float = bounded(6.0, ">= 0")


def package(name: str) -> Any:
    """Import a package.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"this needs the package {name}: {error}") from error


def planted(options: Planted, seed: int) -> Graph:
    """Return a graph with planted communities [Condon & Karp 2001] and noisy features.

    The communities have random sizes, and a node's index does not depend on its community.
    """
    draws = np.random.default_rng(seed)
    labels = draws.integers(options.communities, size=options.nodes)
    first, second = draws.integers(options.nodes, size=(2, options.nodes * options.degree // 2))
    inside = draws.random(len(first)) >= options.mixing
    second[inside] = _companions(labels, first[inside], draws)
    centres = draws.standard_normal((options.communities, options.inputs))
    noise = options.noise * draws.standard_normal((options.nodes, options.inputs))
    return Graph(once(np.stack([first, second])), centres[labels] + noise, labels)


def _companions(labels: Places, nodes: Places, draws: np.random.Generator) -> Places:
    """Return, for each of the nodes, a random node of the same class."""
    by_class, sizes = np.argsort(labels, kind="stable"), np.bincount(labels)
    places = (sizes[labels[nodes]] * draws.random(len(nodes))).astype(np.intp)
    return by_class[(np.cumsum(sizes) - sizes)[labels[nodes]] + places]


def once(pairs: Places) -> Places:
    """Return pairs of nodes `[2, pairs]` as edges `[2, edges]`, without loops or duplicates."""
    pairs = np.sort(pairs[:, pairs[0] != pairs[1]], 0)
    return np.unique(pairs, axis=1)


def karate() -> Graph:
    """Return networkx's karate club [Zachary 1977]: 34 members, 78 friendships, 2 classes.

    The features are the members' one-hot encoded indices, because nothing else is known about them.

    Raises:
        ValueError: networkx is not installed.
    """
    club = package("networkx").karate_club_graph()
    labels = [club.nodes[node]["club"] == "Officer" for node in club]
    return Graph(once(np.array(club.edges).T), np.eye(len(club)), np.array(labels, np.intp))


def surface() -> Graph:
    """Return the left half of nilearn's brain surface fsaverage5 [Fischl et al. 1999].

    The 10,242 nodes are corners of triangles. The features are the standardised position, area and
    thickness of the cortex; a node has class 1 if it is in a furrow, and class 0 otherwise.

    Raises:
        ValueError: nibabel or nilearn is not installed.
    """
    nibabel, folder = package("nibabel"), Path(package("nilearn").__file__).parent / FSAVERAGE

    def read(name: str) -> Any:
        return nibabel.load(folder / f"{name}_left.gii.gz").agg_data()

    places, triangles = read("pial")
    features = np.column_stack([places, read("area"), read("thick")]).astype(float)
    sides = triangles.T[[[0, 1, 2], [1, 2, 0]]].reshape(2, -1)
    labels = (read("sulc") > 0).astype(np.intp)
    return Graph(once(sides), (features - features.mean(0)) / features.std(0), labels)


GRAPHS = ("planted", "karate", "surface")


def graph_of(name: str, options: Planted, seed: int) -> Graph:
    """Return a graph by name.

    Raises:
        ValueError: a package that the graph needs is not installed.
    """
    known_graphs = {"planted": lambda: planted(options, seed), "karate": karate, "surface": surface}
    return known_graphs[name]()


def split(graph: Graph, share: float, seed: int) -> NDArray[np.bool_]:
    """Return, for each node, whether its label is known during training.

    The number of known labels is rounded up.

    Raises:
        ValueError: no node is left for testing.
    """
    order = np.random.default_rng((seed, 1)).permutation(len(graph.labels))
    known = order < np.ceil(share * len(order))
    if known.all():
        raise ValueError(
            f"known={share:g} leaves none of the {len(order)} nodes for the test; use a smaller "
            f"value, or more nodes"
        )
    return known
