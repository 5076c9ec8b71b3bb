"""Compute mean average precision at one overlap, from all points of the precision-recall curve.

    found     a detection is right if it overlaps a shape of its class, in its image, by at least
              `OVERLAP`, and no detection with a higher score has found the shape
    precision the fraction of detections that are right, among those with at least a given score
    average   the mean, over all shapes of a class, of the best precision at which the shape is
              found; 0 for a shape that is never found

The overlap is intersection over union. COCO's metric is different: it averages the precision over
101 recall values and ten minimum overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

OVERLAP = 0.5


@dataclass
class Tally:
    """The detections and shapes of one class, from which its average precision is computed.

    Attributes:
        judged: for each detection, its score, and whether it is right.
        shapes: the number of shapes of the class.
    """

    judged: list[tuple[float, bool]] = field(default_factory=list)
    shapes: int = 0

    def add(self, tally: Tally) -> None:
        """Add the detections and shapes of other images."""
        self.judged += tally.judged
        self.shapes += tally.shapes

    @property
    def average_precision(self) -> float:
        """The area under the precision-recall curve; NaN if the class has no shapes."""
        if not self.shapes:
            return math.nan
        # Wrong detections come first among equal scores, so the order of images does not matter.
        ordered = sorted(self.judged, key=lambda detection: (-detection[0], detection[1]))
        best, area, right = 0.0, 0.0, sum(hit for _, hit in ordered)
        for place, (_, hit) in reversed(list(enumerate(ordered, start=1))):
            if hit:
                best = max(best, right / place)
                area += best
                right -= 1
        return area / self.shapes


def tallied(
    detections: Mapping[str, Tensor], target: Mapping[str, Tensor], overlaps: Tensor
) -> dict[int, Tally]:
    """Return the tally of each class in an image.

    Args:
        detections: the `scores` and `labels` of detections, `[detections]` each.
        target: the `labels` of shapes, `[shapes]`.
        overlaps: the overlaps of detections with shapes, `[detections, shapes]`.
    """
    tallies = {}
    for label in {*detections["labels"].tolist(), *target["labels"].tolist()}:
        detected, drawn = detections["labels"] == label, target["labels"] == label
        scores, order = detections["scores"][detected].sort(descending=True, stable=True)
        hits = right(overlaps[detected][:, drawn][order])
        tallies[label] = Tally(list(zip(scores.tolist(), hits)), int(drawn.sum()))
    return tallies


def right(overlaps: Tensor) -> list[bool]:
    """Return, for each detection, whether it finds a shape that was not found before.

    Args:
        overlaps: `[detections, shapes]`, with detections in order of decreasing scores.
    """
    left, hits = overlaps.clone(), []
    for row in left:
        best = int(row.argmax()) if len(row) else 0
        hits.append(len(row) > 0 and bool(row[best] >= OVERLAP))
        if hits[-1]:
            left[:, best] = -1
    return hits


def merged(parts: Sequence[Mapping[int, Tally]]) -> dict[int, Tally]:
    """Merge the tallies, by class, of several sets of images."""
    total: dict[int, Tally] = {}
    for part in parts:
        for label, tally in part.items():
            total.setdefault(label, Tally()).add(tally)
    return total


def mean_average_precision(tallies: Mapping[int, Tally]) -> float:
    """Return the mean average precision over the classes that have shapes."""
    of_classes = [tally.average_precision for tally in tallies.values() if tally.shapes]
    return sum(of_classes) / len(of_classes)


def overlaps_of_boxes(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the overlaps `[boxes, others]` of boxes, each given as left, top, right and bottom."""
    begin = torch.maximum(boxes[:, None, :2], others[None, :, :2])
    end = torch.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return _shares((end - begin).clamp(min=0).prod(2), _areas(boxes), _areas(others))


def overlaps_of_masks(masks: Tensor, others: Tensor) -> Tensor:
    """Return the overlaps `[masks, others]` of boolean masks `[count, height, width]`."""
    rows, columns = masks.flatten(1).float(), others.flatten(1).float()
    return _shares(rows @ columns.T, rows.sum(1), columns.sum(1))


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).prod(1)


def _shares(common: Tensor, areas: Tensor, others: Tensor) -> Tensor:
    """Return the intersections over unions, given common areas; 0 for two empty areas."""
    return common / (areas[:, None] + others[None] - common).clamp(min=1e-9)
