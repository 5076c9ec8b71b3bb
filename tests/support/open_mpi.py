"""Interim."""
from __future__ import annotations


def chosen(primitive, sizes, ranks):
    total = sum(sizes)
    if primitive == "Iallreduce":
        return "ring" if ranks > 3 and total >= 65536 else "binomial"
    if primitive == "Allreduce":
        return "rabenseifner" if total >= 16384 else "doubling"
    if primitive == "Reduce_scatter":
        if ranks < 64:
            return "ring" if total >= 2**19 else "butterfly"
        return "butterfly"
    if primitive == "Allgatherv":
        mean = total / ranks
        if mean < 4096:
            return "bruck"
        if ranks < 128:
            return "ring"
        if ranks < 256:
            return "neighbour" if mean < 65536 else "ring"
        if ranks < 512:
            return "ring"
        if ranks < 1024:
            return "neighbour" if mean < 2**20 else "ring"
        return "neighbour"
    return {"Reduce": "binomial", "Bcast": "binomial", "Alltoall": "linear"}.get(primitive, "")
