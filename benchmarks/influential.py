"""Describe and draw the training images that help and harm test images of CIFAR-10 most.

mpikfac influence RUN --queries 50 --out scores.h5
PYTHONPATH=apps python benchmarks/influential.py scores.h5 --data DIR --picture influence.jpg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import torch
from matplotlib import pyplot
from torch import Tensor

from mpikfac_apps.problems import datasets

TOP = 5
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def shares(scores: Tensor, labels: Tensor, query_labels: Tensor, predicted: Tensor) -> None:
    """Print how often the labels of the images agree with those of the queries."""
    missed = predicted != query_labels
    print(
        f"{len(scores)} queries, {len(labels):,} images; {missed.sum()} queries are misclassified"
    )
    for name, order in (("helpful", scores), ("harmful", -scores)):
        found = labels[order.topk(TOP).indices]
        same, as_predicted = (found == x[:, None] for x in (query_labels, predicted))
        text = f"{TOP} most {name}: {100 * same.double().mean():.0f} % have the query's label"
        if missed.any():
            share = 100 * as_predicted[missed].double().mean()
            text += f"; of misclassified queries, {share:.0f} % have the predicted label"
        print(text)


def draw(
    path: Path, data: datasets.Dataset, queries: list[int], scores: Tensor, predicted: Tensor
) -> None:
    """Draw a row for each query: the image, the most helpful images, the most harmful ones."""
    size = 1 + 2 * TOP
    figure, axes = pyplot.subplots(
        len(queries), size, figsize=(size, 1.25 * len(queries)), layout="constrained", squeeze=False
    )
    for row, query in zip(axes, queries):
        orders = [order.topk(TOP).indices.tolist() for order in (scores[query], -scores[query])]
        shown = [(data.test_images[query], data.test_labels[query])]
        shown += [(data.train_images[i], data.train_labels[i]) for order in orders for i in order]
        for panel, (image, label) in zip(row, shown):
            panel.imshow(image.permute(1, 2, 0).numpy())
            panel.axis("off")
            panel.set_title(NAMES[label], fontsize=8, pad=2)
        row[0].set_title(f"{row[0].get_title()} ({NAMES[predicted[query]]})", fontsize=8, pad=2)
    heads = {0: "query (predicted)", 1: "most helpful", 1 + TOP: "most harmful"}
    for column, text in heads.items():
        axes[0, column].annotate(text, (0, 1.35), xycoords="axes fraction", weight="bold", size=8)
    figure.savefig(path, dpi=80, pil_kwargs={"quality": 80} if path.suffix == ".jpg" else None)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scores", type=Path, help="the file of mpikfac influence --out")
    parser.add_argument("--data", required=True, help="the directory of CIFAR-10")
    parser.add_argument("--picture", type=Path, help="a file to draw into")
    parser.add_argument("--queries", type=int, nargs="+", default=[0, 1], help="those to draw")
    options = parser.parse_args()
    with h5py.File(options.scores) as file:
        names = "scores", "labels", "query_labels", "predicted", "self"
        found = {name: torch.from_numpy(file[name][()]) for name in names}
    own = found.pop("self")
    shares(**found)
    data = datasets.load("cifar10", options.data)
    print("largest self-influence:", *(NAMES[data.train_labels[i]] for i in own.topk(10).indices))
    if options.picture:
        draw(options.picture, data, options.queries, found["scores"], found["predicted"])


if __name__ == "__main__":
    main()
