"""A model's gradients on a rank: from local to averaged to a step of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac.comm import summed
from mpikfac.engine.checks import Block
from mpikfac.engine.gradients.slices import Slices
from mpikfac.engine.gradients.slots import Slot, share_out, slots_in
from mpikfac.engine.site import Site
from mpikfac.layers import SKIP, Counts, Layer, Other, Statistic, Trained, Votes
from mpikfac.numerics import Parts, copy_all, not_finite
from mpikfac.plan import check_count, check_size, lay_out


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


class Gradients:
    """A model's gradients in an arena, from local to averaged to a step of the optimizer.

    Running statistics travel with the gradients, to stay equal on all ranks.

    Attributes:
        layers: the layers covered by K-FAC.
        others: parameters and running statistics without a covering layer.
        broken: names of blocks with NaN or infinity in the average, among blocks stepped by the
            rank; the step does not change broken blocks.
        shortened: the multiplier of `clip` in the step, `[]`; 1.0 without a bound.
    """

    others: Sequence[Other] = ()
    _alone = False  # whether the present average is of this rank alone

    def __init__(
        self, site: Site, model: nn.Module, layers: Sequence[Layer], others: Sequence[Other]
    ) -> None:
        self.site, self.grid, self.plan = site, site.grid, site.plan
        self.layers, self.others = layers, others
        self.blocks: list[Block] = [*layers, *others]
        (self.votes,) = (block for block in others if isinstance(block, Votes))
        self._trained = Trained(model, [p for block in self.blocks for p in block.parameters])
        self.broken: Collection[str] = ()
        self.arena = site.arena(site.plan.layouts.gradients)
        self.shortened: Tensor | float = 1.0
        self.parts = Parts(self.arena, site.plan.parts)
        self.statistics = [block for block in others if isinstance(block, Statistic)]
        self._counts = Counts(self.statistics if self.parts else [])
        self.slots = slots_in(self.arena, self.blocks, site)
        self.of_others = slots_in(self.arena, others, site)
        self._to_reduce = site.plan.reduce_gradients()
        self._in_node = site.plan.reduce_in_node()
        self._slices = Slices(site, model, self.slots)
        self._to_publish = site.plan.publish_weights()
        # Weights before a step, where only changes travel; 0 for blocks that travel as they are.
        changing = self.arena.layout if site.plan.publishes_changes else lay_out([])
        self._before = site.arena(changing)
        encoded = [block for block in self.blocks if block.name in site.plan.messages_of]
        self._changing = slots_in(self._before, encoded, site)
        self._beside = None
        # Gradients that were sent early, and their versions, by the parameter's id.
        self._sent: dict[int, tuple[Tensor | None, int]] = {}
        self._hooks = [model.register_load_state_dict_post_hook(self._on_load)]
        if site.plan.strategy.transport.overlap and self._to_reduce:
            layout, flat = self.arena.layout, self.arena.flat
            self._beside = site.grid.overlapped(self._to_reduce, layout, flat, urgency=0)
            self._send_early()
        self.keep()

    def __reduce__(self) -> Any:
        # A copied or saved model takes its hooks along; a copy's hooks do nothing.
        return Gradients.__new__, (Gradients,)

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def look(self, values: object) -> bool:
        """Vote on a change of the model, and on `values`, which all ranks must have alike.

        New parameters stay as they are in this step.

        Returns:
            Whether the trained parameters of the rank's model have changed.

        Raises:
            ValueError: a parameter was converted or moved.
        """
        changed = self._trained.changed()
        if changed:
            self._trained.leave_changed()
            self._sent.clear()  # gradients that were left are no mistake of the program
        self.votes.mark(values, changed)
        return changed

    def _on_load(self, *_: object) -> None:
        """Keep the running statistics that the user's program has loaded."""
        if self.others:
            self.keep()

    def keep(self) -> None:
        """Keep the present running statistics, for `discard` to go back to."""
        copy_all(one for block in self.statistics for one in block.kept())
        self._counts.keep()

    def discard(self) -> None:
        """Forget collected parts; running statistics go back to those after the last step."""
        self.parts.clear()
        self._counts.leave()
        self._take_back()

    def recall(self) -> None:
        """Forget what overlapped messages have sent of a batch without a step.

        Collective over: world.
        """
        if self._beside is not None:
            self._beside.drop(self.grid.world)
            self._sent.clear()

    def check_unsent(self) -> None:
        """Check that a batch can be forgotten by this rank alone.

        Raises:
            ValueError: with `overlap`, as the backward pass has sent the sums.
        """
        if self.plan.strategy.transport.overlap:
            raise ValueError("with overlap=True a batch is sent as it is made; call step()")

    def _take_back(self) -> None:
        for block in self.statistics:
            block.leave()

    def read(self) -> None:
        """Copy the model's gradients into the arena.

        Raises:
            ValueError: a gradient was changed after the gradient was sent.
        """
        with self.site.trace.stage("read gradients"):
            if self._beside is None:
                copy_all(one for s in self.slots for one in s.block.gradients_to(s.parts))
                return
            for slot in self.slots:
                if slot.block.name not in self._beside.ready_blocks:
                    self._send(slot)
                else:
                    self._check_unchanged(slot)
            self._sent.clear()

    def _check_unchanged(self, slot: Slot) -> None:
        for parameter in slot.block.parameters:
            if id(parameter) not in self._sent:
                continue
            gradient, version = self._sent[id(parameter)]
            if parameter.grad is not gradient or _version(gradient) != version:
                raise ValueError(
                    f"the gradient of {slot.block.name!r} was changed after the backward pass; "
                    f"with overlap=True the gradient was sent before: clip by step(max_norm=...)"
                )

    def _send_early(self) -> None:
        """From now on, send gradients as soon as the backward pass has made them."""
        for slot in self.slots:
            on_gradient = partial(self._on_gradient, slot, [])
            for parameter in slot.block.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(on_gradient))

    def _on_gradient(self, slot: Slot, made: list[Tensor], parameter: Tensor) -> None:
        made.append(parameter)
        if len(made) == len(slot.block.parameters):
            made.clear()
            with torch.no_grad():
                self._send(slot)

    def _send(self, slot: Slot) -> None:
        assert self._beside is not None
        name = slot.block.name
        copy_all(slot.block.gradients_to(slot.parts))
        for parameter in slot.block.parameters:
            self._sent[id(parameter)] = parameter.grad, _version(parameter.grad)
        self.arena[name] /= self.plan.grid.count
        self._beside.ready(name)

    def collect(self) -> None:
        """Keep the gradients of a part of the rank's share, and make room for the next part."""
        self.read()
        self.parts.add()
        self._counts.collect()
        self._take_back()

    def reduce(self, alone: bool = False) -> None:
        """Average the arena over ranks: everywhere, or a block on the updater only.

        Collective over: world; if `alone`, the ranks that step the same copy, or none.

        Args:
            alone: the rank steps a copy of the model by the rank's own gradient, or by the mean of
                the ranks that step the same copy.

        Raises:
            ValueError: parts of the batch are missing.
        """
        self._alone = alone
        if alone:
            if self._in_node:
                self.arena.flat /= self.plan.node
                self.grid.exchange(self._in_node, self.arena.flat)
            return
        ranks = self.plan.grid.count
        if self.parts:
            self.grid.sum_in_order(self.parts.take(), self.arena.flat, "reduce gradients")
            self.arena.flat /= len(self.parts) * ranks
            return
        if self._beside is not None:
            self._beside.wait()
            return
        share_out(self.arena, self.plan)
        self.grid.exchange(self._to_reduce, self.arena.flat)
        self._slices.reduce()

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite; running statistics and votes do not count."""
        return not not_finite({b.name: self.arena[b.name] for b in self.blocks if b.parameters})

    def weigh(self, examples: int) -> float:
        """Weigh the rank's gradients and running statistics by the number of examples.

        Returns:
            The weight of the rank; the mean weight of the ranks is 1.

        Collective over: world.

        Raises:
            ValueError: the ranks have no example, or sums are sent before the weight is known.
        """
        check_count("examples", examples, 0)
        transport, exchange = self.plan.strategy.transport, self.plan.strategy.exchange
        if exchange.of_copies:
            raise ValueError(f"examples={examples} needs exchanged='gradients', not 'weights'")
        if transport.overlap or transport.parts is not None:
            raise ValueError(
                f"examples={examples} needs overlap=False and parts=None, not "
                f"overlap={transport.overlap} and parts={transport.parts}"
            )
        total = sum(self._counted_examples(examples))
        if not total:
            raise ValueError(f"examples={examples} on all ranks; a step needs an example")
        weight = examples * self.plan.grid.count / total
        for block in self.blocks:
            if not isinstance(block, Votes):
                values = self.arena[block.name]
                values.mul_(weight) if examples else values.zero_()  # a mean over nothing is NaN
        return weight

    def _counted_examples(self, examples: int) -> list[float]:
        """Return the sum over ranks; with split layers the numbers of all ranks.

        Collective over: world.

        Raises:
            ValueError: the ranks of a group have different numbers.
        """
        split, ranks = self.plan.split, self.plan.grid.count
        if not split.parameters:
            return summed(self.grid.world, [examples])
        counts = summed(self.grid.world, [examples * (r == self.plan.rank) for r in range(ranks)])
        for rank, count in enumerate(counts):
            first = split.distribution.group(rank, ranks)[0]
            if count != counts[first]:
                raise ValueError(
                    f"examples={count:.0f} on rank {rank} and {counts[first]:.0f} on rank {first}: "
                    f"the ranks of a group of split layers need equally many"
                )
        return counts

    def clip(self, max_norm: float) -> None:
        """Scale the averaged gradients, if the norm of all gradients together is above `max_norm`.

        Collective over: world with update="owner", else none.

        Raises:
            ValueError: the bound is negative or not finite.
        """
        check_size("max_norm", max_norm)
        mine = [s.block.name for s in self.slots if s.block.parameters and self._in_norm(s)]
        square = sum(
            (self.arena[name].square().sum() for name in mine), self.arena.flat.new_zeros(())
        )
        if self.owner_updates:
            square = square.new_tensor(summed(self.grid.world, [float(square)])[0])
        scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        self.shortened = scale.clamp(min=torch.finfo(scale.dtype).tiny)
        for slot in self.slots:
            if slot.block.parameters:
                self.arena[slot.block.name].mul_(scale)

    def _in_norm(self, slot: Slot) -> bool:
        """Return whether the rank adds a block's gradient to the norm of all gradients."""
        name = slot.block.name
        mine = not self.owner_updates or self.plan.updaters[name] == self.plan.rank
        return mine and name not in self.broken

    def skip(self) -> None:
        """Leave all as before the reduced batch; only the votes are taken.

        Losses of encoding and the memory of a robust rule are dropped: a part of both may belong
        to the batch.

        Collective over: world.
        """
        self.discard()
        self.grid.forget()
        self.grid.combiner.forget()
        self.grid.exchange([m for m in self._to_publish if not m.codec], self.arena.flat)
        for slot in self.of_others:
            if isinstance(slot.block, Votes):
                slot.parts[0][SKIP] = 0
                copy_all(slot.block.values_from(slot.parts))

    def check(self, step: int) -> None:
        """Find the `broken` blocks; a rank's NaN is in the sum, and no message is needed.

        The host reads all flags of the step, and the votes if the rank has the votes of all ranks.

        Raises:
            UserError: a gradient was not finite for too many steps in a row.
        """
        self.broken, self.shortened = (), 1.0
        numbers = [self.arena.flat.sum(0, keepdim=True)]
        if not self.owner_updates:
            numbers.append(self.votes.counted(self.arena[self.votes.name]))
        total, *votes = self.site.flags.read(torch.cat(numbers))
        self.votes.heard = votes
        if not math.isfinite(total):
            stepped = [slot.block.name for slot in self.slots if slot.steps]
            self.broken = not_finite({name: self.arena[name] for name in stepped})
        mine = [n for n in self.broken if self._alone or self.plan.updaters[n] == self.plan.rank]
        self.site.nonfinite.note("gradient", mine, step, "left as they are in this step")

    def write(self, slots: Iterable[Slot]) -> None:
        """Make the values of `slots` the gradients of the blocks stepped by the rank."""
        written: list[tuple[Tensor, Tensor]] = []
        with self.site.trace.stage("write back"):
            for slot in slots:
                parameters = slot.block.parameters
                if slot.block.name in self.broken or not all(p.requires_grad for p in parameters):
                    slot.block.leave()  # also parameters that were frozen since the last step
                elif slot.steps:
                    written += slot.block.gradients_from(slot.parts)
            copy_all(written)

    def update(self, optimizer: Optimizer) -> None:
        """Step the model: on every rank, or a block on the updater, with values sent to all.

        Gradients of blocks stepped elsewhere are dropped: the optimizer keeps no state for the
        blocks.

        Collective over: world.
        """
        for slot in self.slots if self.owner_updates else ():
            if not slot.steps:
                for parameter in slot.block.parameters:
                    parameter.grad = None
        self._counts.step()
        copy_all(one for s in self._changing for one in s.block.values_to(s.parts))
        with self.site.trace.stage("optimizer"):
            optimizer.step()
        if self.owner_updates:
            self._publish_weights()

    def _publish_weights(self) -> None:
        stepped = [slot for slot in self.slots if slot.steps]
        copy_all(one for s in stepped for one in s.block.values_to(s.parts))
        if self._before:
            self.arena.flat -= self._before.flat
        self.grid.exchange(self._to_publish, self.arena.flat)
        if self._before:
            self.arena.flat += self._before.flat
        # If changes were encoded, their sender too keeps the decoded ones.
        received = [slot for slot in self.slots if self._before or not slot.steps]
        copy_all(one for s in received for one in s.block.values_from(s.parts))

    @property
    def owner_updates(self) -> bool:
        """Whether a block is stepped by the updater only."""
        return self.plan.owner_updates

    def stepped(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters stepped by the rank's optimizer, by name."""
        mine = {id(p) for slot in self.slots if slot.steps for p in slot.block.parameters}
        return {name: p for name, p in model.named_parameters() if id(p) in mine}
