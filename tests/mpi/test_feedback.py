"""Compressed reductions step by step, in one level and in two, compared with numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mpikfac
from mpikfac import (
    BFloat16,
    CommOpt,
    Compression,
    FirstOrderTrainer,
    Int8,
    MemOpt,
    Strategy,
    Trace,
    Transport,
)
from mpikfac.comm import Grid
from mpikfac.lab import TopK, TopKCodec
from mpikfac.plan import BFloat16Codec, Int8Codec, divisors, lay_out, stages
from mpikfac.plan.messages import in_two_levels, seat, sums
from support import inside, problem

pytestmark = pytest.mark.lab

RANKS = mpikfac.world().size
STEPS, SIZES = 5, (160, 96)
STEPS_OF_TRAINING = range(8)
SIZE = sum(SIZES)
FEEDBACK = [
    TopKCodec(ratio=0.1, feedback=True),
    TopKCodec(ratio=0.1, feedback=True, momentum=0.7),
    Int8Codec(feedback=True),
    BFloat16Codec(),
]


def numbers():
    """Return the numbers that ranks add up, `[steps, ranks, elements]`."""
    return np.random.default_rng(3).standard_normal((STEPS, RANKS, SIZE))


def cut(start, stop, count):
    """Return spans of blocks of 16 numbers, as equal as possible."""
    edges = [start + (stop - start) // 16 * k // count * 16 for k in range(count)]
    return [slice(*span) for span in zip(edges, [*edges[1:], stop])]


def largest(values, share, count=None):
    """Return where the largest of `count` numbers lie; of all numbers if None."""
    return np.argsort(-np.abs(values))[: int(np.ceil(share * (count or len(values))))]


def in_eighths(values):
    """Return numbers in 8 bits: blocks of 16 in units of 1/64 of the largest's power of two."""
    blocks = np.float32(values).reshape(-1, 16)
    unit = 2.0 ** (np.frexp(np.abs(blocks).max(1, keepdims=True))[1] - 7)
    return (np.clip(np.round(blocks / unit), -127, 127) * unit).reshape(-1)


def summed_by_hand(codec, per_node):
    """Yield the sums: plain inside nodes, of the nodes' encoded numbers between nodes."""
    nodes = RANKS // per_node
    lost, velocity = np.zeros((nodes, SIZE)), np.zeros((nodes, SIZE))
    for step in numbers().reshape(STEPS, nodes, per_node, SIZE).sum(2):
        total = np.zeros(SIZE)
        velocity = getattr(codec, "momentum", 0) * velocity + step
        lost += velocity
        for shard in cut(0, SIZE, per_node):
            if codec.name == "bfloat16":
                parts = torch.from_numpy(lost[:, shard]).bfloat16()
                total[shard] = parts.sum(0).double().numpy()  # of two nodes
                lost[:, shard] = 0
            for node in range(nodes) if codec.name == "top-k" else ():
                places = largest(lost[node, shard], codec.ratio)
                total[shard][places] += lost[node, shard][places]
                lost[node, shard][places] = velocity[node, shard][places] = 0
            if codec.name == "int8":
                sent = np.array([in_eighths(one) for one in lost[:, shard]])
                lost[:, shard] -= sent
                again = in_eighths(sent.sum(0))
                length = -(-len(again) // 16 // nodes) * 16  # of the part that a node adds up
                for node in range(nodes):
                    mine = slice(node * length, (node + 1) * length)
                    lost[node, shard][mine] += (sent.sum(0) - again)[mine]
                total[shard] = again
        yield total


def in_levels(messages, per_node):
    """Return the rank's messages, in two levels where there are two."""
    at = seat(range(RANKS), mpikfac.world().rank, per_node)
    return in_two_levels(messages, at, 8) if at else messages


@pytest.mark.skipif(RANKS == 1, reason="one rank sends nothing")
@pytest.mark.parametrize("per_node", divisors(RANKS)[:-1])
@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_sums_of_encoded_numbers_step_by_step(comm, codec, per_node):
    """Oracle: numpy, with the residuals of every node; the bytes of the plan."""
    if codec.name == "bfloat16" and RANKS // per_node > 2:
        pytest.skip("MPI chooses the order of more than two parts")
    layout = lay_out([[(f"{k}", (size,)) for k, size in enumerate(SIZES)]])
    found = in_levels(sums("stage", layout, lambda name: 0, RANKS, 8, None, codec), per_node)
    grid = Grid(comm, 1, Trace(), per_node)
    for step, expected in zip(numbers(), summed_by_hand(codec, per_node)):
        flat = torch.from_numpy(step[comm.rank].copy())
        grid.trace.clear()
        grid.exchange(found, flat)
        np.testing.assert_allclose(flat.numpy(), expected, rtol=0, atol=1e-12)
        assert grid.trace.sent["stage"] == sum(message.bytes for message in found)
    over = "world between nodes" if per_node > 1 else "world"
    assert {m.over for m in found if m.codec} == {over}


@pytest.mark.skipif(RANKS != 4, reason="two nodes of two ranks")
@pytest.mark.parametrize("wire", [BFloat16(), Int8(), TopK()], ids=str)
def test_inside_nodes_numbers_travel_as_they_are(comm, wire):
    """Oracle: the plan; a message between nodes is smaller, and no message inside is encoded."""
    plain = Strategy(CommOpt(), transport=Transport(ranks_per_node=2))
    model, sent = problem.network(), {}
    for strategy in (plain, replace(plain, compression=Compression(gradients=wire))):
        kfac = problem.kfac(model, problem.sgd(model), comm, strategy)
        found = stages.reduce_gradients(kfac.plan.of(comm.rank))
        assert all(m.codec is None for m in found if m.over == "world in node")
        sent[strategy] = sum(m.wire for m in found if m.over == "world between nodes")
        kfac.detach()
    first, second = sent.values()
    assert second < first


@pytest.mark.skipif(RANKS == 1, reason="one rank sends nothing")
@pytest.mark.parametrize("to_owners", [False, True])
@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_overlapped_messages_send_the_same_bits(comm, codec, to_owners):
    """Oracle: the same messages in turn; blocks are ready in another order on every rank."""
    if codec.name == "bfloat16" and RANKS > 2:
        pytest.skip("MPI chooses the order of more than two parts")
    names = [f"{k}" for k in range(2 * RANKS)]
    blocks = [(name, (SIZE // 16 * 16,)) for name in names]
    segments = [blocks[2 * k : 2 * k + 2] for k in range(RANKS)] if to_owners else [blocks]
    layout = lay_out(segments)
    messages = sums("stage", layout, lambda name: name, RANKS, 8, None, codec)
    own = slice(*layout.segments()[comm.rank]) if to_owners else slice(None)
    turn, beside = Grid(comm, 1, Trace()), Grid(comm, 1, Trace())
    flat = torch.zeros(layout.size, dtype=torch.float64)
    sender = beside.overlapped(messages, layout, flat, urgency=0)
    for step in range(STEPS):
        generator = np.random.default_rng([step, comm.rank])
        expected = torch.from_numpy(generator.standard_normal(layout.size)).to(flat)
        flat.copy_(expected)
        turn.exchange(messages, expected)
        for name in generator.permutation(names):
            sender.ready(str(name))
        sender.wait()
        assert torch.equal(flat[own], expected[own])
    assert turn.trace.sent == beside.trace.sent
    assert beside.encoded.memory.keys() == turn.encoded.memory.keys()


def gradients_by_hand(model, layout, batch):
    """Return a process's gradients of a batch in the places of a layout."""
    images, labels = batch
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    flat = np.zeros(layout.size)
    for name, parameter in model.named_parameters():
        found = parameter.grad.reshape(-1).cpu().numpy()
        flat[layout.offsets[name] :][: len(found)] = found
    return flat


def share_at(step, warmup):
    """Return the published share of sent numbers: 0.1 after four stages of the warm-up."""
    return 0.1 ** ((1 + 4 * step // warmup) / 5) if step < warmup else 0.1


@pytest.mark.parametrize(
    "choices",
    [
        *({}, {"momentum": 0.9}, {"warmup_steps": 6}, {"clip_norm": 0.2}),
        {"momentum": 0.9, "warmup_steps": 3, "clip_norm": 0.4},
    ],
    ids=str,
)
def test_training_with_the_largest_gradients(comm, choices):
    """Oracle: numpy with the gradients of all ranks' shards [DGC, Lin et al. 2018], and SGD.

    The model has 9 * 18 + 9 + 9 + 4 * 82 + 185 = 693 numbers, and padding.
    """
    compressor = TopK(ratio=0.1, **choices)
    momentum, warmup, clip = compressor.momentum, compressor.warmup_steps, compressor.clip_norm
    model, by_hand = problem.network(), problem.network()
    strategy = Strategy(MemOpt(), compression=Compression(gradients=compressor))
    sgd = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, by_hand)]
    trainer = FirstOrderTrainer(model, sgd[0], comm, strategy)
    layout = trainer.plan.of(0).layouts.gradients
    trained = max(layout.offsets[name] for name, _ in model.named_parameters())
    size = trained + 16  # the last parameter has 5 numbers
    velocity, lost = np.zeros((RANKS, size)), np.zeros((RANKS, size))
    for step in STEPS_OF_TRAINING:
        total = np.zeros(size)
        for rank, batch in enumerate(problem.shards(step, RANKS)):
            found = gradients_by_hand(by_hand, layout, batch)[:size] / RANKS
            if clip:
                found *= min(1, clip / np.sqrt(RANKS) / np.linalg.norm(found))
            velocity[rank] = momentum * velocity[rank] + found
            lost[rank] += velocity[rank]
            share = share_at(step, warmup)
            places = largest(lost[rank], share, 693) if RANKS > 1 else slice(None)
            total[places] += lost[rank][places]
            lost[rank][places] = velocity[rank][places] = 0
        for name, parameter in by_hand.named_parameters():
            mine = total[layout.offsets[name] :][: parameter.numel()]
            parameter.grad.copy_(torch.from_numpy(mine).view_as(parameter))
        sgd[1].step()
        found = problem.run(trainer, comm, [step])
        torch.testing.assert_close(found, problem.state(by_hand), rtol=0, atol=1e-12)
    assert inside.memory(trainer).get("wires", 0) == trainer.plan.memory(comm.rank).get("wires", 0)


def test_a_momentum_is_not_taken_twice(comm):
    """Oracle: the line, from both trainers, before any communication."""
    strategy = Strategy(compression=Compression(gradients=TopK(momentum=0.9)))
    line = "momentum=0.9 needs an optimizer with momentum 0, not 0.9"
    model = problem.network()
    for make in (problem.kfac, FirstOrderTrainer):
        for optimizer in (problem.sgd(model), problem.adam(model)):
            with pytest.raises(ValueError, match=line):
                make(model, optimizer, comm, strategy)
