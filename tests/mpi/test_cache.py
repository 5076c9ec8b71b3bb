"""Copies of a packed file on the disks of nodes: one rank of each node writes, all ranks read."""

from __future__ import annotations

import os

import mpikfac
from mpikfac_apps.images import cache, decoding, packed
from mpikfac_apps.inspecting import pack
from support import pictures


def test_one_rank_of_each_node_writes_the_copy_of_the_node(comm, tmp_path, monkeypatch, caplog):
    """Oracle: two nodes by hand; the packed file's bytes; a file in the place of a directory.

    The second node has a file in the place of the directory, and so no copy.
    """
    root = comm.bcast(tmp_path)
    if comm.rank == 0:
        images = pictures.noise(root / "images")
        assert pack.main([str(images), str(root / "images.h5")]) == 0
        (root / "second").write_text("a file")
    comm.barrier()
    node = 2 * comm.rank // comm.size if comm.size > 1 else 0
    first = comm.allgather(node).index(node)
    monkeypatch.setattr(mpikfac.comm, "lowest_in_node", lambda comm: first)
    found = packed.listed(str(root / "images.h5"))
    expected = [decoding.content(found.train_images.place(i)) for i in range(48)]
    wrote, write = [], cache.write
    monkeypatch.setattr(cache, "write", lambda *given: (wrote.append(1), write(*given)))
    on_node = cache.on_nodes(comm, found, str(root / ["first", "second"][node]))
    assert sum(comm.allgather(len(wrote))) == 1
    assert bool(wrote) == (comm.rank == 0)
    place = on_node.train_images.place(5)
    name = root / "first" / f"{found.content.digest}.images"
    assert place.copy == (None if node else (str(name), place.start - found.content.place.start))
    assert [decoding.content(on_node.train_images.place(i)) for i in range(48)] == expected
    comm.barrier()
    if comm.rank == 0:
        assert os.listdir(root / "first") == [name.name]
        lines = [line for line in caplog.messages if "1 of 2 nodes have no copy" in line]
        assert len(lines) == (comm.size > 1)
