"""The rules by which an exchange changes a rank's replica of the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpikfac.comm import summed
from mpikfac.engine import Gradients, Site, divided_by_ranks, slots_in
from mpikfac.errors import UserError
from mpikfac.lab.local_sgd.messages import PlannedCopies
from mpikfac.numerics import Arena, all_finite, copy_all, elastic_gradient, nesterov
from mpikfac.plan import Layout, lay_out
from mpikfac.plan.names import OWN_MOMENTUM

LARGEST = 700.0  # an exponent for which exp does not yet overflow in float64
DIVERGED = (
    "the weights of a rank are not finite; try a smaller learning rate, or exchange weights more "
    "often"
)


class Merge:
    """Base class for weight-exchange rules. All replicas start out equal.

    Attributes:
        unites: whether an exchange makes all replicas equal.
        kept: the named tensors that a checkpoint stores; all except `OWN_MOMENTUM` are equal on all
            ranks.
        copies: the plan of the replicas.
        copy: a buffer for the rank's replica: weights, followed by running statistics and votes.
        weights: the part of the buffer that contains trained weights.
    """

    unites = True

    def __init__(self, site: Site, gradients: Gradients) -> None:
        self.site, self.plan = site, site.plan
        self.sync: Any = site.plan.strategy.sync
        self.copies = PlannedCopies(site.plan)
        self.kept: Mapping[str, Mapping[str, Tensor]] = {}
        self.copy = self._arena()
        self.weights = self.trained(self.copy)
        self._slots = slots_in(self.copy, gradients.blocks, site)
        self._messages = self.copies.exchange_weights()
        self._divided = divided_by_ranks(self.copy, site.plan)

    def _arena(self, used: bool = True) -> Arena:
        nothing: Layout = lay_out([])
        return self.site.arena(self.copies.layout if used else nothing)

    def trained(self, arena: Arena) -> Tensor:
        """Return the part of an arena that contains trained weights, as a vector."""
        return arena.flat[: self.copies.trained]

    def read(self) -> None:
        """Copy the model into the buffer."""
        copy_all(pair for s in self._slots for pair in s.block.values_to(s.parts))

    def write(self) -> None:
        """Copy the buffer into the model."""
        copy_all(pair for s in self._slots for pair in s.block.values_from(s.parts))

    def keep(self) -> None:
        """Adopt the current weights, which are equal on all ranks, as the result of an exchange."""

    def report_loss(self, loss: float | Tensor) -> None:
        """Store the mean loss of the rank's shard of the batch.

        Raises:
            ValueError: the rule does not use a loss.
        """
        raise ValueError(
            "exchange.report_loss(loss) needs sync=LSGD(...); other exchanges do not use a loss"
        )

    def begin_step(self, alone: bool) -> None:
        """Begin a step; if `alone`, the rank takes the step independently."""

    def before_step(self) -> None:
        """Modify the gradients of an independent step."""

    def end_step(self, step: int) -> bool:
        """End an independent step; return whether all ranks' votes have now been exchanged.

        Collective over: world, if an exchange is due.
        """
        due = self.sync.due(step)
        if due:
            self.merge()
        else:
            self.after_step()
        return due

    def after_step(self) -> None:
        """Change the replica after an independent step without an exchange."""

    def merge(self) -> None:
        """Change the replicas at an exchange.

        Collective over: world.
        """
        raise NotImplementedError

    def unite(self) -> None:
        """Make all replicas equal.

        Collective over: world.
        """
        self.merge()

    def average(self) -> None:
        """Average the buffer over ranks.

        Raises:
            UserError: the result is not finite.
        """
        torch._foreach_div_(self._divided, self.plan.grid.count)
        self.site.grid.exchange(self._messages, self.copy.flat)
        if not all_finite(self.copy.flat):
            raise UserError(DIVERGED)

    def reset(self) -> None:
        """Discard the state from earlier steps."""
        for tensors in self.kept.values():
            for tensor in tensors.values():
                tensor.zero_()


class AverageMerge(Merge):
    """Replace all replicas by the mean (or other aggregate) of their weights or changes."""

    def __init__(self, site: Site, gradients: Gradients) -> None:
        super().__init__(site, gradients)
        self._before = self._arena(self.copies.changes)
        trained = [slot.block for slot in self._slots if slot.block.parameters]
        self._last = slots_in(self._before, trained, site)

    def keep(self) -> None:
        """Store the current weights as the weights after the last exchange."""
        copy_all(pair for s in self._last for pair in s.block.values_to(s.parts))

    def merge(self) -> None:
        """Average the replicas, or their changes, and take the outer step."""
        self.read()
        if self._before:
            self.copy.flat -= self._before.flat
        self.average()
        if self._before:
            self.step()
            self.copy.flat += self._before.flat
        self.write()
        self.keep()

    def step(self) -> None:
        """Convert the mean change in the buffer, in place, to the change to apply."""


class OuterStep(AverageMerge):
    """Replace all replicas by the result of an outer step along the mean change."""

    def __init__(self, site: Site, gradients: Gradients) -> None:
        super().__init__(site, gradients)
        self._momentum = self._arena(self.sync.outer_momentum > 0)
        self.kept = {"momentum": self._momentum}

    def step(self) -> None:
        """Convert the mean change in the buffer, in place, to the outer step."""
        if self._momentum:
            momentum = self.trained(self._momentum)
            nesterov([self.weights], [momentum], self.sync.outer_momentum)
        self.weights *= self.sync.outer_lr


class Streamed(OuterStep):
    """Average parts of the model one after another in the background, and use the means later.

    When a mean is used, it is mixed with the rank's current weights [Douillard et al. 2025].
    """

    unites = False

    def __init__(self, site: Site, gradients: Gradients) -> None:
        super().__init__(site, gradients)
        # For each part sent: when its mean is used, and which rank of each node sends the part.
        self._under_way: dict[int, tuple[int, int]] = {}
        parts = range(self.sync.fragments)
        names = self.copies.fragments
        self._parts = [[s for s in self._slots if names[s.block.name] == part] for part in parts]
        layout = self.copy.layout
        self._spans = [span for span in layout.spans(names.get) if span.kind is not None]
        sums = [m for m in self._messages if m.primitive != "Bcast"]
        self._inside = [m for m in self._messages if m.primitive == "Bcast"]
        self._sums = {
            span.kind: site.grid.overlapped([m], layout, self.copy.flat, 0, m.over)
            for span, m in zip(self._spans, sums)
        }
        delay, mixing = self.sync.delay, self.sync.mixing
        self._own = 2 * delay / (2 * delay + self.copies.count) if mixing is None else mixing

    def end_step(self, step: int) -> bool:
        """Send the part that is due, and use the means of parts sent `delay` steps earlier.

        Votes are exchanged together with the last part.
        """
        turn = self.sync.turn(step)
        if turn is not None:
            part, place = turn % len(self._parts), turn % self.copies.node
            self._send(part, step + self.sync.delay, place)
        due = [part for part, (use, _) in self._under_way.items() if use == step]
        for part in due:
            self._use(part, self._own)
        return len(self._parts) - 1 in due

    def unite(self) -> None:
        """Use all means in flight, and then exchange all parts without mixing."""
        for part in list(self._under_way):
            self._use(part, self._own)
        for part in range(len(self._parts)):
            self._send(part)
        for part in range(len(self._parts)):
            self._use(part, 0.0)
        self.keep()

    def _send(self, part: int, use: int = 0, place: int = 0) -> None:
        """Start averaging the changes of a part since its last exchange.

        Args:
            use: the step in which the mean is used.
            place: the index, within each node, of the rank that sends.
        """
        self._under_way[part] = use, place
        slots = self._parts[part]
        copy_all(pair for s in slots for pair in s.block.values_to(s.parts))
        for span in self._of(part):
            self.copy.flat[span] -= self._before.flat[span]
            self.copy.flat[span] /= self.copies.count
        if part in self._sums and self._sends(place):
            for slot in slots:
                self._sums[part].ready(slot.block.name)

    def _use(self, part: int, mixing: float) -> None:
        """Wait for a part's mean change, take the outer step, and mix in the rank's own weights.

        Args:
            mixing: the coefficient of the replica's own weights.
        """
        _, place = self._under_way.pop(part)
        if part in self._sums and self._sends(place):
            self._sums[part].wait()
        for message in self._inside:
            if message.spans[0][0] in [span.start for span in self._of(part)]:
                sent = replace(message, root=place, bytes=message.size * self._sends(place))
                self.site.grid.exchange([sent], self.copy.flat)
        for span in self._of(part):
            self._step_of(slice(span.start, min(span.stop, self.copies.trained)))
        for slot in self._parts[part]:
            for value, mean in slot.block.values_from(slot.parts):
                if slot.block.parameters:
                    value.lerp_(mean.to(value.dtype), 1 - mixing)
                else:
                    value.copy_(mean)

    def _step_of(self, span: slice) -> None:
        """Replace a mean change in the buffer by the new common weights, and store these."""
        change, before = self.copy.flat[span], self._before.flat[span]
        if not all_finite(change):
            raise UserError(DIVERGED)
        if self._momentum:
            nesterov([change], [self._momentum.flat[span]], self.sync.outer_momentum)
        change *= self.sync.outer_lr
        before += change
        change.copy_(before)

    def _sends(self, place: int) -> bool:
        """Return whether this rank, as the member at `place`, sends for its node."""
        return self.plan.rank % self.copies.node == place

    def reset(self) -> None:
        """Discard the state from earlier steps and, after waiting for them, the means in flight.

        Collective over: world.
        """
        super().reset()
        for part, (_, place) in self._under_way.items():
            if part in self._sums and self._sends(place):
                self._sums[part].wait()
        self._under_way.clear()

    def _of(self, part: int) -> list[slice]:
        return [slice(span.start, span.stop) for span in self._spans if span.kind == part]


class SeparateMerge(Merge):
    """Base class for rules whose replicas stay separate; the run's state is their mean."""

    unites = False

    def unite(self) -> None:
        """Replace all replicas by their mean."""
        self.read()
        self.average()
        self.write()
        self.keep()


class Leader(SeparateMerge):
    """Move each replica towards the one with the lowest mean loss [Teng et al. 2019].

    The replicas in a node with several replicas also move towards the node's own leader. All
    leaders start with the common weights.
    """

    def __init__(self, site: Site, gradients: Gradients) -> None:
        super().__init__(site, gradients)
        self._leaders = [self._arena() for _ in self.copies.led]
        of_node = [self.sync.in_node] * (len(self._leaders) - 1)
        # The exchange intervals of the leader of all ranks and of the node's leader.
        self._every = [self.sync.sync_every, *of_node]
        self._statistics = self.copies.average_statistics()
        self._messages = self.copies.average_copies()
        self._heard: list[float | Tensor] = []
        self._next: float | Tensor | None = None

    def keep(self) -> None:
        """Use the current weights as the leaders' weights."""
        self.read()
        for leader in self._leaders:
            leader.flat.copy_(self.copy.flat)
        self._heard = []

    def report_loss(self, loss: float | Tensor) -> None:
        """Store the mean loss of the rank's shard of a batch, before the step."""
        self._next = loss.detach() if isinstance(loss, Tensor) else loss

    def begin_step(self, alone: bool) -> None:
        """Begin a step; if `alone`, record the rank's loss.

        Raises:
            ValueError: no loss was reported.
        """
        loss, self._next = self._next, None
        if not alone:
            return
        if loss is None:
            raise ValueError(
                "sync='lsgd' needs exchange.report_loss(loss) before each step, to find the best "
                "replica"
            )
        self._heard.append(loss)

    def end_step(self, step: int) -> bool:
        """Receive the replicas of leaders whose exchange is due; move towards all leaders."""
        due = [self.sync.due(step, every) for every in self._every]
        self.read()
        if any(due):
            self._follow(due)
        if due[0]:
            self.copy.flat[self.copies.trained :] /= self.plan.grid.count
            self.site.grid.exchange(self._statistics, self.copy.flat)
        self._move(due)
        self.write()
        return due[0]

    def reset(self) -> None:
        """Discard the state and the losses from earlier steps."""
        super().reset()
        self._heard, self._next = [], None

    def _follow(self, due: Sequence[bool]) -> None:
        """Receive the replicas of the leaders whose exchange is due."""
        losses, node = self._losses(), self.copies.node
        begins = [rank // node * node for rank in range(len(losses))]
        of_copies = [sum(losses[begin : begin + node]) for begin in begins]
        teams = zip(self._leaders, self.copies.led.items())
        for leader, (over, team) in itertools.compress(teams, due):
            root = min(team, key=of_copies.__getitem__)
            if root == self.copies.first:
                leader.flat.copy_(self.copy.flat)
            self.site.grid.exchange(self.copies.from_leader(over, root), leader.flat)

    def _losses(self) -> list[float]:
        """Return the mean loss of each rank since the last exchange.

        Raises:
            UserError: a loss or a weight is not finite.
        """
        loss = sum(map(float, self._heard)) / len(self._heard)
        self._heard = []
        of_rank = [0.0] * self.plan.grid.count
        of_rank[self.plan.rank] = loss if all_finite(self.weights) else math.nan
        losses = summed(self.site.grid.world, of_rank)
        if not all(map(math.isfinite, losses)):
            raise UserError(DIVERGED)
        return losses

    def _move(self, due: Sequence[bool]) -> None:
        """Move the replica in the buffer towards each leader.

        The fraction of the distance is `leader_step` if the leader's exchange is due; otherwise,
        it is `leader_pull` divided by the number of steps between exchanges.
        """
        rule, before = self.sync, self.weights.clone()
        for leader, now, every in zip(self._leaders, due, self._every):
            share = rule.leader_step if now else rule.leader_pull / every
            self.weights.add_(self.trained(leader) - before, alpha=share)


class Elastic(SeparateMerge):
    """Move each replica to its average over steps, and towards the mean of all averages.

    Between exchanges, replicas are pulled towards their weights after the last exchange [Chaudhari
    et al. 2018].
    """

    def __init__(self, site: Site, gradients: Gradients) -> None:
        super().__init__(site, gradients)
        self._anchor, self._of_steps = self._arena(), self._arena()
        self._exchanges = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._momentum = self._arena(self.sync.outer_momentum > 0)
        self.kept = {"exchanges": {"count": self._exchanges}, OWN_MOMENTUM: self._momentum}

    def _pull(self, pull: float, most: float) -> float:
        """Return the current strength of a pull, which grows with each exchange up to `most`."""
        growth = int(self._exchanges) * math.log1p(self.sync.growth)
        return min(pull * math.exp(min(growth, LARGEST)), most)

    def keep(self) -> None:
        """Restart the running average from the current weights, and pull towards these."""
        self.read()
        for arena in (self._anchor, self._of_steps):
            arena.flat.copy_(self.copy.flat)

    def before_step(self) -> None:
        """Add to the gradients a multiple of the weights' change since the last exchange."""
        self.read()
        self.weights -= self.trained(self._anchor)
        self.weights *= self._pull(self.sync.gamma, self.sync.max_gamma)
        for slot in self._slots:
            parameters = slot.block.parameters
            if parameters and all(p.grad is not None for p in parameters):
                for gradient, pull in slot.block.gradients_from(slot.parts):
                    gradient.add_(pull)

    def after_step(self) -> None:
        """Update the running average of the weights over steps."""
        self.read()
        decay = self.sync.alpha
        self.trained(self._of_steps).mul_(decay).add_(self.weights, alpha=1 - decay)

    def merge(self) -> None:
        """Average the ranks' running averages; step from the weights after the last exchange."""
        self.after_step()
        anchor, average = self.trained(self._anchor), self.trained(self._of_steps)
        self.weights.copy_(average)
        self.average()
        self._exchanges += 1
        pull = self._pull(self.sync.rho, self.sync.max_rho)
        gradient = elastic_gradient(anchor, average, self.weights, pull)
        if self._momentum:
            momentum = self.trained(self._momentum)
            nesterov([gradient], [momentum], self.sync.outer_momentum)
        torch.sub(anchor, gradient, alpha=self.sync.outer_lr, out=self.weights)
        self.write()
        self.keep()
