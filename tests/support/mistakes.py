"""Wrong lines of the library, and the test that has to see each of the wrong lines."""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """A wrong line.

    Attributes:
        what: the mistake in words.
        file: the file in `mpikfac/`.
        old: a text that the file has once.
        new: the text in the place of `old`.
        target: a file of tests, or a test.
        ranks: the ranks that run the target.
    """

    what: str
    file: str
    old: str
    new: str
    target: str
    ranks: int = 1


TABLE = (
    # -- the main path
    Mistake(
        "publish: bases are not sent to the workers of a layer",
        "kfac.py",
        "self.grid.exchange(self._messages[self.bases.share], self.bases.arena.flat)",
        "pass",
        "tests/mpi/test_training.py",
        2,
    ),
    Mistake(
        "publish: directions are not sent to the other columns",
        "kfac.py",
        "self.directions.publish()",
        "pass",
        "tests/mpi/test_training.py",
        3,
    ),
    Mistake(
        "clip: the KL clip is ignored",
        "kfac.py",
        "self.directions.clip(self.steps)",
        "pass",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "length: uncovered parameters keep the gradient",
        "engine/directions.py",
        "self._step_beside()",
        "pass",
        "tests/unit/test_step_length.py",
    ),
    Mistake(
        "write back: directions are not written to the gradients",
        "kfac.py",
        "self.gradients.write(self.directions.slots)\n        self.gradients.write(self.gradients",
        "self.gradients.write(self.gradients",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "write back: a layer's bias takes the direction of the layer's first input",
        "layers/layer.py",
        "matrix[..., -1]]",
        "matrix[..., 0]]",
        "tests/unit/test_kinds.py",
    ),
    # -- sums
    Mistake(
        "reduce: the sum of gradients is not divided by the number of ranks",
        "engine/gradients.py",
        "arena.flat /= plan.grid.count",
        "pass",
        "tests/mpi/test_training.py",
        2,
    ),
    Mistake(
        "reduce: sums go over the column instead of the world",
        "plan/messages.py",
        'primitive, "world", parts, ranks, itemsize, 0, root, codec)',
        'primitive, "column", parts, ranks, itemsize, 0, root, codec)',
        "tests/mpi/test_training.py",
        3,
    ),
    # -- averages over time
    Mistake(
        "decay: a new factor has the weight of the old average",
        "engine/statistics/factors.py",
        "(1 - decay) * counts / weights",
        "decay * counts / weights",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "decay: the correction of the bias of early averages is lost",
        "engine/statistics/factors.py",
        "(1 - decay) * counts / weights",
        "(1 - decay) * torch.ones_like(counts)",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "clip: the KL clip takes the learning rate, not the square of the learning rate",
        "engine/directions.py",
        '"kl_clip": lambda: self._along_gradient(2)',
        '"kl_clip": lambda: self._along_gradient(1)',
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "publish: directions come from the denominators of older bases",
        "engine/bases.py",
        "self.ready = True\n        self.rescaled()",
        "self.ready = True",
        "tests/unit/test_kfac.py",
    ),
    # -- placement, layouts, messages
    Mistake(
        "placement: the owner of a factor is off by one",
        "plan/roles.py",
        "dict.fromkeys(names, owner)",
        "dict.fromkeys(names, (owner + 1) % ranks)",
        "tests/property/test_plan.py",
    ),
    Mistake(
        "layouts: a block begins before the end of the block before",
        "plan/layout.py",
        "end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT",
        "end += math.prod(shape) // ALIGNMENT * ALIGNMENT",
        "tests/property/test_plan.py",
    ),
    Mistake(
        "messages: a member of a gather counts the bytes of all members as sent bytes",
        "plan/messages.py",
        "        handed = sizes[own]\n    elif",
        "        handed = size\n    elif",
        "tests/unit/test_plan.py",
    ),
    Mistake(
        "two levels: a broadcast goes inside the nodes first, and then between nodes",
        "plan/messages.py",
        'return first + then if primitive == "Reduce" else then + first',
        "return first + then",
        "tests/property/test_levels.py",
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
        "overlap: a rank sends messages in its own order",
        "comm/messages/outbox.py",
        "common := self._in_common(list(ready))",
        "common := list(ready)",
        "tests/unit/test_outbox.py",
    ),
    Mistake(
        "codecs: losses of the encoding are not kept for the next step",
        "comm/messages/encoded.py",
        "return encode(flat[part], codec, lost[part], velocity)",
        "return encode(flat[part], codec)",
        "tests/mpi/test_wires.py",
        2,
    ),
    Mistake(
        "codecs: numbers are rounded towards 0",
        "numerics/messages/codecs.py",
        ".round_().clamp_(-127, 127)",
        ".trunc_().clamp_(-127, 127)",
        "tests/property/test_codecs.py",
    ),
    Mistake(
        "parts: a rank adds up the parts from the last to the first",
        "comm/messages/collectives.py",
        "for part in parts:",
        "for part in parts.flip(0):",
        "tests/mpi/test_parts.py",
        2,
    ),
    # -- decompositions
    Mistake(
        "damping: A gets all of the damping, and G gets all of the damping",
        "solvers/inverse.py",
        "return tikhonov_share(means.ratio, damping)",
        "return torch.full_like(means.factor, damping)",
        "tests/unit/test_kfac.py",
    ),
    Mistake(
        "damping: eigenvalues are not damped",
        "solvers/eigen.py",
        "out += damping",
        "pass",
        "tests/unit/test_kron.py",
    ),
    Mistake(
        "delay: a decomposition is used one step early",
        "engine/bases.py",
        "step >= self._due",
        "step + 1 >= self._due",
        "tests/unit/test_bases.py",
    ),
    Mistake(
        "stagger: a step refreshes the share of the next turn",
        "settings/settings.py",
        "return step // self._between(name, step, turns) % turns",
        "return (step // self._between(name, step, turns) + 1) % turns",
        "tests/mpi/test_strategies.py",
        3,
    ),
    Mistake(
        "tolerance: a fitting decomposition is made anew, a misfitting decomposition is kept",
        "engine/bases.py",
        "misfit <= tolerance",
        "misfit >= tolerance",
        "tests/unit/test_bases.py",
    ),
    Mistake(
        "curvature ranks: factors are sent without the damping",
        "engine/decomposers.py",
        "request[factor.added].copy_(added[factor.name])",
        "pass",
        "tests/mpi/test_curvature.py",
        3,
    ),
    Mistake(
        "non-finite: a batch without usable statistics ages the average",
        "engine/statistics/factors.py",
        "torch._foreach_mul_([one.count for one in running], list(sound.to(flat.dtype).split(1)))",
        "pass",
        "tests/mpi/test_numbers.py",
        2,
    ),
    Mistake(
        "EKFAC: scales shrink with the number of examples",
        "engine/statistics/scales.py",
        "count**2 if of_loss",
        "count if of_loss",
        "tests/unit/test_scales.py",
    ),
    Mistake(
        "low rank: the mean of the rest counts the kept eigenvalues, too",
        "solvers/eigen.py",
        "others / (order - rank)",
        "others / order",
        "tests/property/test_low_rank.py",
    ),
    Mistake(
        "rank-one: the length of the vectors is not damped",
        "solvers/rank_one.py",
        "along / (size + damping)",
        "along / size",
        "tests/unit/test_kron.py",
    ),
    Mistake(
        "grafting: a direction keeps a length of its own",
        "engine/directions.py",
        "scales = torch.where(own > 0, lengths / own, 1.0)",
        "scales = torch.ones_like(own)",
        "tests/unit/test_step_length.py",
    ),
    Mistake(
        "orthogonal: directions keep their singular values",
        "engine/directions.py",
        "self._orthogonalise()\n            if",
        "pass\n            if",
        "tests/unit/test_step_length.py",
    ),
    Mistake(
        "orthogonal: a step of the polynomial is left out",
        "numerics/orthogonal.py",
        "range(STEPS)",
        "range(STEPS - 1)",
        "tests/unit/test_step_length.py",
    ),
    Mistake(
        "quadratic model: the damping is left out",
        "engine/directions.py",
        "curvatures += self.settings",
        "curvatures += 0 * self.settings",
        "tests/unit/test_quadratic.py",
    ),
    Mistake(
        "quadratic model: ranks do not add up their curvatures",
        "engine/directions.py",
        "mean = summed(self.site.grid.world, numbers.flatten().tolist())",
        "mean = numbers.flatten().tolist()",
        "tests/mpi/test_quadratic.py",
        ranks=2,
    ),
    # -- statistics
    Mistake(
        "convolution: height and width swap their padding",
        "layers/convolution/window.py",
        "for pair in reversed(self.padding) for count in pair",
        "for pair in self.padding for count in pair",
        "tests/unit/test_convolution.py",
    ),
    Mistake(
        "convolution: patches are taken without the stride",
        "layers/convolution/window.py",
        "pixels.unfold(dim, reach + 1, stride)",
        "pixels.unfold(dim, reach + 1, 1)",
        "tests/unit/test_convolution.py",
    ),
    Mistake(
        "convolution: channels are dealt to groups in turn",
        "layers/convolution/autocorrelation.py",
        "x.unflatten(1, (groups, channels)).permute(1, 2, 0, 3, 4)",
        "x.unflatten(1, (channels, groups)).permute(2, 1, 0, 3, 4)",
        "tests/unit/test_convolution.py",
    ),
    Mistake(
        "embedding: the padding entry counts as used",
        "layers/embedding.py",
        "used[self.module.padding_idx] = 0",
        "pass",
        "tests/unit/test_kinds.py",
    ),
    Mistake(
        "attention: the gradient of keys is that of queries",
        "layers/inner/product.py",
        "start = (self._part - number) * outputs",
        "start = 0",
        "tests/unit/test_inner.py",
    ),
    Mistake(
        "attention: statistics of all groups go to the first group",
        "engine/statistics/recorder.py",
        "(planned.shape.groups, -1))[layer.group]",
        "(planned.shape.groups, -1))[0]",
        "tests/unit/test_inner.py",
    ),
    Mistake(
        "subsample: a rank counts the examples of the rank alone",
        "engine/statistics/recorder.py",
        "factors.site.dtype, factors.plan.pooled",
        "factors.site.dtype, 1",
        "tests/mpi/test_subsample.py",
        ranks=2,
    ),
    Mistake(
        "subsample: few examples stand for the whole batch in an embedding's diagonal",
        "engine/statistics/recorder.py",
        "vector or planned.shape.diagonal or planned.rescaled",
        "vector or planned.rescaled",
        "tests/mpi/test_subsample.py",
        ranks=2,
    ),
    Mistake(
        "attention: statistics are sent before all groups are recorded",
        "engine/statistics/recorder.py",
        "all(one.complete for one in",
        "any(one.complete for one in",
        "tests/mpi/test_inner.py",
        ranks=2,
    ),
    Mistake(
        "cell: the search for products goes on to earlier calls",
        "layers/inner/product.py",
        "seen = {value.grad_fn for value in inputs}",
        "seen = set()",
        "tests/unit/test_inner.py",
    ),
    Mistake(
        "normalisation: blocks shrink with the batch",
        "layers/normalization.py",
        "1.0 if vectors else float(batch)",
        "1.0",
        "tests/unit/test_kinds.py",
    ),
    Mistake(
        "sampled Fisher: all labels are equally likely",
        "numerics/fisher.py",
        "rows = probabilities.movedim",
        "rows = torch.ones_like(probabilities).movedim",
        "tests/unit/test_fisher.py",
    ),
    # -- settings, checkpoints, predictions
    Mistake(
        "schedule: an interval ends one step early",
        "settings/schedule.py",
        "return step % int(steps) == 0",
        "return (step + 1) % int(steps) == 0",
        "tests/unit/test_schedule.py",
    ),
    Mistake(
        "checkpoint: checksums of an item on several ranks are not compared",
        "checkpoint/checkpoint.py",
        "_compare(sums)\n",
        "pass\n",
        "tests/mpi/test_checkpoint.py",
        2,
    ),
    Mistake(
        "checkpoint: a restart accepts a stale shard of the right size",
        "checkpoint/shard.py",
        "_compare(path, found, digest)",
        "pass",
        "tests/unit/test_checkpoint.py",
    ),
    Mistake(
        "restarts: the second start from a checkpoint counts as the first start",
        "checkpoint/restarts.py",
        "starts_from(checkpoint) + 1",
        "1",
        "tests/unit/test_starts.py",
    ),
    Mistake(
        "simulate: waiting for gradients takes no time",
        "predict/simulator.py",
        "now = max(now, urgent)\n",
        "pass\n",
        "tests/unit/test_simulator.py",
    ),
    Mistake(
        "tuning: messages within the latency are not merged",
        "predict/tuning.py",
        "at <= start or at - start < latency",
        "at <= start",
        "tests/unit/test_tuning.py",
    ),
    # -- clients and servers
    Mistake(
        "asynchronous: a server does not note the version that a client fetches",
        "engine/server.py",
        "        self._fetched[client] = self.version\n",
        "",
        "tests/mpi/test_asynchronous.py",
        2,
    ),
    Mistake(
        "asynchronous: a meeting does not wait for all clients",
        "engine/server.py",
        "self._waiting >= self._present",
        "self._waiting",
        "tests/mpi/test_asynchronous.py",
        3,
    ),
    Mistake(
        "asynchronous: clients hear of a meeting one step too early",
        "engine/server.py",
        "max(self._steps.values()) + self._asked.push_every",
        "min(self._steps.values())",
        "tests/mpi/test_asynchronous.py",
        3,
    ),
    Mistake(
        "asynchronous: an update of several batches holds the last gradient only",
        "asynchronous.py",
        "sums[name] += arena[name]",
        "sums[name].copy_(arena[name])",
        "tests/mpi/test_asynchronous.py",
        2,
    ),
    Mistake(
        "asynchronous: running statistics become those of the last client",
        "engine/server.py",
        "block.tensor.lerp_(value, 1 / len(self._clients))",
        "block.tensor.copy_(value)",
        "tests/mpi/test_asynchronous.py",
        3,
    ),
    # -- copies of the model, and robust rules
    Mistake(
        "exchange: ranks average gradients between two exchanges of weights",
        "engine/gradients.py",
        "self._in_node, self.arena.flat)\n            return\n",
        "self._in_node, self.arena.flat)\n",
        "tests/mpi/test_exchange.py",
        2,
    ),
    Mistake(
        "exchange: the outer step begins at the first weights of the run",
        "engine/copies/replicas.py",
        "            self.keep()\n            return\n",
        "            return\n",
        "tests/mpi/test_exchange.py",
        2,
    ),
    Mistake(
        "exchange: votes of a rank alone count at an exchange",
        "engine/copies/replicas.py",
        "        self._votes.heard = []  # heard of the rank alone\n",
        "",
        "tests/mpi/test_exchange.py",
        2,
    ),
    Mistake(
        "exchange: the rank with the largest loss leads",
        "engine/copies/merges.py",
        "root = min(team, key=",
        "root = max(team, key=",
        "tests/mpi/test_exchange.py",
        2,
    ),
    Mistake(
        "robust: the sums of a safeguard never begin anew",
        "numerics/messages/shards.py",
        "of_window.zero_()",
        "pass",
        "tests/unit/test_robust.py",
    ),
    Mistake(
        "robust: Krum takes the farthest vector",
        "numerics/messages/robust.py",
        "nearest.sum(1).argmin()",
        "nearest.sum(1).argmax()",
        "tests/unit/test_robust.py",
    ),
)
