"""Wrong lines for the library, and the test that must detect each of them.

The table is kept by hand, and has only mistakes that no random operator makes, such as a wrong
communicator or a missing message; `programs/mutation_score.py` makes the others.
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """A wrong line.

    Attributes:
        what: a description of the mistake.
        file: the file in `mpikfac/`.
        old: text that occurs exactly once in the file.
        new: the replacement of `old`.
        target: a test file, or a test.
        ranks: the number of ranks that run the target.
    """

    what: str
    file: str
    old: str
    new: str
    target: str
    ranks: int = 1


TABLE = (
    # -- messages: what is sent, to whom, in which order
    Mistake(
        "publish: bases are not sent to the workers of a layer",
        "engine/curvature/bases.py",
        "self.site.grid.exchange(self._messages[self.turn], self.arena.flat)",
        "pass",
        "tests/mpi/test_training.py",
        2,
    ),
    Mistake(
        "publish: directions are not sent to the other columns",
        "engine/curvature/directions.py",
        "self.publish()",
        "pass",
        "tests/mpi/test_training.py",
        3,
    ),
    Mistake(
        "publish: owners do not send the weights",
        "engine/update.py",
        "self._publish()",
        "pass",
        "tests/mpi/test_training.py",
        2,
    ),
    Mistake(
        "reduce: reductions are over the column instead of the world",
        "plan/messages/messages.py",
        'primitive, "world", parts, ranks, itemsize, 0, root, codec)',
        'primitive, "column", parts, ranks, itemsize, 0, root, codec)',
        "tests/mpi/test_training.py",
        3,
    ),
    Mistake(
        "overlap: a rank sends messages in its own order",
        "comm/messages/outbox.py",
        "for number in common()}",
        "for number in [common(), list(waiting)][1]}",
        "tests/unit/test_outbox.py",
    ),
    Mistake(
        "Reduce_scatter: every piece is the first piece of every part",
        "comm/messages/collectives.py",
        "return start + size * turn // turns, ",
        "return start, ",
        "tests/mpi/test_grid.py",
        2,
    ),
    Mistake(
        "shards: what is passed on counts for the member that receives",
        "comm/messages/collectives.py",
        "if m.source == rank)",
        "if m.target == rank)",
        "tests/mpi/test_strategies.py",
        3,
    ),
    Mistake(
        "two levels: the communicator between nodes has the ranks of a node",
        "comm/grid.py",
        "team.Split(inside.rank)",
        "team.Split(node)",
        "tests/mpi/test_nodes.py",
        4,
    ),
    Mistake(
        "overlap: reductions in place, whose bytes a rank of Open MPI sends log2(ranks) times",
        "comm/messages/patient.py",
        "sent = np.asarray(received).copy()",
        "pass",
        "tests/unit/test_counters.py",
    ),
    Mistake(
        "process groups: a reduction overwrites what other ranks have sent",
        "comm/process_group.py",
        "_summed(_flat(sent).clone(), op)",
        "_summed(_flat(sent), op)",
        "tests/mpi/test_process_group.py",
        2,
    ),
    Mistake(
        "quadratic model: ranks do not sum their curvatures",
        "lab/quadratic_model/graft.py",
        "mean = summed(site.grid.world, numbers.flatten().tolist())",
        "mean = numbers.flatten().tolist()",
        "tests/mpi/test_quadratic.py",
        ranks=2,
    ),
    Mistake(
        "curvature servers: factors are sent without the damping",
        "lab/curvature_servers/decomposer.py",
        "sent[factor.added].copy_(request.added[factor.name])",
        "pass",
        "tests/mpi/test_curvature.py",
        3,
    ),
    # -- sums and averages over ranks
    Mistake(
        "reduce: the sum of gradients is not divided by the number of ranks",
        "comm/messages/senders.py",
        "torch._foreach_div_(self.divided, self.grid.world.size)",
        "pass",
        "tests/mpi/test_training.py",
        2,
    ),
    Mistake(
        "reduce: a block sent in the backward pass is not divided by the number of ranks",
        "comm/messages/senders.py",
        "self.arena[name] /= self.grid.world.size",
        "pass",
        "tests/mpi/test_strategies.py",
        2,
    ),
    Mistake(
        "parts: the sum of parts is not divided by the number of parts",
        "comm/messages/senders.py",
        "torch._foreach_div_(self.divided, len(self._parts) * self.grid.world.size)",
        "pass",
        "tests/mpi/test_parts.py",
        2,
    ),
    Mistake(
        "reduce: local averages are decomposed, as delayed factors are not reduced",
        "engine/curvature/factors.py",
        "self.sender.add_up(turn)",
        "pass",
        "tests/mpi/test_strategies.py",
        3,
    ),
    Mistake(
        "subsample: a rank counts only its own examples",
        "engine/curvature/recording/sums.py",
        "shares = factors.plan.pooled",
        "shares = 1",
        "tests/mpi/test_subsample.py",
        ranks=2,
    ),
    Mistake(
        "codecs: errors of the encoding are not kept for the next step",
        "comm/messages/encoded.py",
        "return encode(flat[part], codec, residuals[part], velocity)",
        "return encode(flat[part], codec)",
        "tests/mpi/test_wires.py",
        2,
    ),
    Mistake(
        "rows: a row counts as a single number",
        "comm/group.py",
        "return math.prod(x.shape[1:]) * (1",
        "return (1",
        "tests/mpi/test_rows.py",
        2,
    ),
    Mistake(
        "asynchronous: running statistics become those of the last client",
        "lab/parameter_server/server.py",
        "block.tensor.lerp_(value, 1 / len(self._clients))",
        "block.tensor.copy_(value)",
        "tests/mpi/test_asynchronous.py",
        3,
    ),
    # -- what ranks compare, own and keep
    Mistake(
        "votes: weights are not compared",
        "trainer.py",
        'return {"tensors": checksums(self.model, self._own_tensors())}',
        "return {}",
        "tests/mpi/test_equality.py",
        ranks=3,
    ),
    Mistake(
        "precision: ranks do not compare it",
        "settings/settings.py",
        '            "matmul_precision": self.matmul_precision,\n',
        "",
        "tests/mpi/test_mixed_precision.py",
        2,
    ),
    Mistake(
        "factors of the gradient: every rank averages all factors, not those it decomposes",
        "plan/of_rank.py",
        "return self.decomposed()",
        "return self.factors",
        "tests/mpi/test_gradient_preconditioners.py",
        2,
    ),
    Mistake(
        "state: ranks that average gradients keep separate copies",
        "engine/extension.py",
        """Return the part of a state for the rank's copy of the model."""
        + '"""\n        return state',
        """Return the part of a state for the rank's copy of the model."""
        + '"""\n        own = f"copies/{self.plan.rank}/"\n'
        + "        return {name.removeprefix(own): value for name, value in state.items()}",
        "tests/mpi/test_replicas.py",
        2,
    ),
    Mistake(
        "take over: new owners of a block lose the optimizer's state",
        "trainer.py",
        "hand_over_state(self.built.grid.world, self.model, self.optimizer, *steps)",
        "pass",
        "tests/mpi/test_changes.py",
        2,
    ),
    Mistake(
        "start at the identity: all ranks restart averages after a checkpoint",
        "engine/curvature/factors.py",
        "self._at_identity = list(saved)",
        "list(saved)",
        "tests/mpi/test_state.py",
        2,
    ),
    Mistake(
        "exchange: all copies continue with the outer momentum of one",
        "lab/local_sgd/replicas.py",
        "    OF_EXCHANGE + OWN_MOMENTUM,\n",
        "",
        "tests/mpi/test_replicas.py",
        2,
    ),
    # -- factors, decompositions and directions
    Mistake(
        "factors of the gradient: they are updated before gradients are averaged",
        "engine/curvature/gradient_factors.py",
        '"""Do nothing before gradients are averaged; see `make_directions`."""',
        "super().learn(numbers)",
        "tests/mpi/test_gradient_preconditioners.py",
        2,
    ),
    Mistake(
        "KL-Shampoo: a factor takes the root of its own side",
        "preconditioners/gradient/kl_shampoo.py",
        "x, y = numerics.between(g, gradient, ()), numerics.between((), gradient, a)",
        "x, y = numerics.between((), gradient, a), numerics.between(g, gradient, ())",
        "tests/unit/test_shampoo.py",
    ),
    Mistake(
        "KL-Shampoo: A and G are made of each other's matrices",
        "engine/curvature/gradient_factors.py",
        "x, y = preconditioner.squared(gradient, held)",
        "y, x = preconditioner.squared(gradient, held)",
        "tests/unit/test_shampoo.py",
    ),
    Mistake(
        "KL-Shampoo: moments are not means over the opposite side",
        "preconditioners/gradient/kl_shampoo.py",
        "y.to(gradient.dtype) / math.sqrt(inputs)",
        "y.to(gradient.dtype)",
        "tests/unit/test_shampoo.py",
    ),
    Mistake(
        "Newton-Muon: the damping is split as if there were a G",
        "preconditioners/newton_muon.py",
        "return numerics.damping_unit(means.factor) * damping",
        "return numerics.damping_unit(means.factor) * damping**0.5",
        "tests/unit/test_newton_muon.py",
    ),
    Mistake(
        "damping: A gets all of the damping, and G gets all of the damping",
        "preconditioners/inverse.py",
        "return numerics.tikhonov_share(ratio, damping)",
        "return means.factor.new_full(means.factor.shape, damping)",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "write back: directions are not written to the gradients",
        "engine/curvature/distributed.py",
        "self.gradients.write(self.directions.slots)\n        self.gradients.write(self.gradients",
        "self.gradients.write(self.gradients",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "convolution: height and width swap their padding",
        "layers/convolution/window.py",
        "for pair in reversed(self.padding) for count in pair",
        "for pair in self.padding for count in pair",
        "tests/unit/test_convolution.py",
    ),
    Mistake(
        "convolution: channels are assigned to groups cyclically",
        "layers/convolution/autocorrelation.py",
        "x.unflatten(1, (groups, channels)).permute(1, 2, 0, 3, 4)",
        "x.unflatten(1, (channels, groups)).permute(2, 1, 0, 3, 4)",
        "tests/unit/test_convolution.py",
    ),
    Mistake(
        "attention: the gradient of keys is that of queries",
        "layers/inner/product.py",
        "start = (self._part - number) * outputs",
        "start = 0",
        "tests/unit/test_inner.py",
    ),
    Mistake(
        "sampled Fisher: all labels are equally likely",
        "numerics/fisher.py",
        "rows = probabilities.movedim",
        "rows = torch.ones_like(probabilities).movedim",
        "tests/unit/test_fisher.py",
    ),
    # -- steps that run again with other values
    Mistake(
        "publish: directions come from the denominators of older bases",
        "engine/curvature/bases.py",
        "self.ready = True\n        self.rescaled()",
        "self.ready = True",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "capture: a replay divides by the averages' weights of the recorded step",
        "numerics/steps.py",
        "divisors: Any = self._divisors[0] if self.even else self._divisors.unbind()",
        "divisors: Any = self._weights.tolist()",
        "tests/unit/test_capture.py",
    ),
    Mistake(
        "capture: a step with another damping replays the recorded one",
        "engine/curvature/directions.py",
        "return numbers.damping, numbers.momentum, *self.gradients.broken, self.graft.key()",
        "return numbers.momentum, *self.gradients.broken, self.graft.key()",
        "tests/unit/test_capture.py",
    ),
    Mistake(
        "capture: weights at new addresses are read at the old ones",
        "engine/curvature/grafting.py",
        "return self._adam.even, *places, *stepped",
        "return self._adam.even, *stepped",
        "tests/unit/test_capture.py",
    ),
)
