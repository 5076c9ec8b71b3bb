"""Average a model's gradients over ranks, and write them back into the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from weakref import finalize, ref

from torch import Tensor, nn

from mpikfac.comm import summed
from mpikfac.engine.readers import Block, EarlyReader, Reader, Slot, remove, slots_in
from mpikfac.engine.shards import ShardReader
from mpikfac.engine.site import Site
from mpikfac.layers import SKIP, Counts, Hook, Layer, Other, Statistic, Trained, Votes
from mpikfac.numerics import Arena, copy_all, not_finite
from mpikfac.plan import Plan, RankPlan, check_count, names, stages


def divided_by_ranks(arena: Arena, plan: RankPlan) -> list[Tensor]:
    """Return the views of the arena that receive means over ranks instead of sums.

    Vectors for a robust aggregation rule are not divided, nor are gradients that `fully_shard` has
    averaged.
    """
    if plan.strategy.sync.aggregation.sums and not plan.sharding:
        return [arena.flat]
    return [arena[name] for name in plan.means]


class Gradients:
    """Hold a model's gradients in an arena, average them over ranks, and write them back.

    Running statistics are sent with the gradients, so that they stay equal on all ranks.

    Attributes:
        layers: the layers covered by K-FAC.
        uncovered: the parameters and running statistics that no layer covers.
        trained: the trained parameters.
        sender: reduces the arena over ranks; an extension can replace it.
        reader: copies gradients from the model, and directions to it.
        broken: the names of blocks whose average contains NaN or infinity, among the blocks that
            this rank updates; the step does not change them.
        shortened: the factor by which `max_norm` scales the gradients of the step, `[]`; 1.0
            without a bound.
        weight: the rank's weight in averages; its mean over ranks is 1.
        weight_of_statistics: the weight of the rank's statistics, applied in addition to their
            numbers of examples.
        counts: the batch counts of normalisation layers, for batches accumulated in parts.
    """

    def __init__(
        self, site: Site, model: nn.Module, layers: Sequence[Layer], uncovered: Sequence[Other]
    ) -> None:
        self.site, self.plan, self.layers, self.uncovered = site, site.plan, layers, uncovered
        self.blocks: list[Block] = [*layers, *uncovered]
        (self.votes,) = (block for block in uncovered if isinstance(block, Votes))
        self.trained = Trained(model, [p for block in self.blocks for p in block.parameters])
        self.arena = site.arena(site.plan.layouts.gradients)
        self.slots = slots_in(self.arena, self.blocks, site)
        self.uncovered_slots = slots_in(self.arena, uncovered, site)
        self.broken: Collection[str] = ()
        self.shortened: Tensor | float = 1.0
        self.weight = self.weight_of_statistics = 1.0
        # The reader keeps this sender, because extensions never replace a sender that sends in the
        # backward pass or accepts a batch in parts.
        messages = {None: stages.reduce_gradients(site.plan)}
        means = divided_by_ranks(self.arena, site.plan)
        self.sender = site.sender(names.REDUCE_GRADIENTS, self.arena, messages, 0, means)
        self.statistics = [block for block in uncovered if isinstance(block, Statistic)]
        self.counts = Counts(self.statistics if self.sender.in_parts else [])
        self.reader = self._reader_of(model)
        # A weak reference; otherwise, the model would keep a deleted trainer's arena alive.
        self._hooks = [model.register_load_state_dict_post_hook(Hook(self._on_load, ref(self)))]
        finalize(self, remove, self._hooks)
        self.keep()

    def _reader_of(self, model: nn.Module) -> Reader:
        """Return the reader that suits the sender or, for a sharded model, the shards."""
        if self.plan.sharding:
            return ShardReader(self.slots, self.sender, self.site, self.blocks, model)
        return (EarlyReader if self.sender.early else Reader)(self.slots, self.sender)

    def detach(self) -> None:
        """Remove the hooks."""
        remove(self._hooks)
        self.reader.detach()

    # -- local gradients -------------------------------------------------------------------------

    def look(self, values: object) -> bool:
        """Vote on whether the rank's model has changed, and whether `values` agree on all ranks.

        New parameters are not updated in this step.

        Returns:
            Whether the trained parameters of the rank's model have changed.

        Raises:
            ValueError: a parameter was converted to another dtype or moved to another device.
        """
        self.reader.begin_step()
        changed = self.trained.changed()
        if changed:
            self.trained.leave_changed()
            self.reader.abort_batch()  # so that leftover gradients raise no error
        self.votes.mark(values, changed)
        return changed

    def look_at_parts(self, values: object) -> None:
        """Update the votes of all accumulated parts with `values`, which only the step knows."""
        self.votes.mark(values, self.trained.changed())
        votes = self.sender.accumulated[..., self.arena.span(self.votes.name)]
        self.votes.counted(votes).copy_(self.votes.counted(self.votes.tensor))

    def unknown(self, stepped: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters in `stepped` that have gradients but belong to no block."""
        return [p for p in stepped if p.grad is not None and p not in self.trained]

    def read(self) -> None:
        """Copy the model's gradients into the arena.

        Raises:
            ValueError: a gradient was changed after it had been sent.
        """
        self.weight = self.weight_of_statistics = 1.0
        with self.site.trace.stage(names.READ_GRADIENTS):
            self.reader.read()

    def accumulate(self) -> None:
        """Store the gradients of one part of the local batch, and prepare for the next part."""
        self.read()
        self.sender.accumulate()
        self.counts.accumulate()
        self._take_back()

    def weigh(self, examples: int, seen: int) -> None:
        """Weight the rank's contributions to averages by its number of examples.

        Args:
            examples: the number of examples over which the rank's loss is a mean.
            seen: the number of examples in the rank's statistics. From now on, the statistics are
                weighted like the gradients, and scaled so that the total number of examples over
                all ranks does not change.

        Collective over: world.

        Raises:
            ValueError: no rank has any examples, or the ranks of a group of split layers have
                different numbers of examples.
        """
        examples = int(examples)
        total, all_seen = self._counted_examples(examples, seen if examples else 0)
        if not total:
            raise ValueError(f"examples={examples} on all ranks; a step needs at least one example")
        weight = examples * self.plan.grid.count / total
        for block in self.blocks:
            if not isinstance(block, Votes):
                values = self.arena[block.name]
                if examples:
                    values.mul_(weight)
                else:
                    values.zero_()  # the mean over no examples is NaN
        self.weight = weight
        self.weight_of_statistics = examples * all_seen / (seen * total) if seen else 1.0

    def _counted_examples(self, examples: int, seen: int) -> tuple[float, float]:
        """Return the sums of `examples` and `seen` over ranks.

        Collective over: world.

        Raises:
            ValueError: the ranks of a group of split layers have different numbers of examples.
        """
        split, ranks, world = self.plan.split, self.plan.grid.count, self.site.grid.world
        of_ranks = [examples * (rank == self.plan.rank) for rank in range(ranks)]
        *counts, all_seen = summed(world, [*of_ranks, seen])
        for rank, count in enumerate(counts if split.parameters else ()):
            first = split.tp_plan.group(rank, ranks)[0]
            if count != counts[first]:
                raise ValueError(
                    f"examples={count:.0f} on rank {rank} and {counts[first]:.0f} on rank {first}: "
                    f"all ranks of a group of split layers must pass the same number"
                )
        return sum(counts), all_seen

    # -- averages --------------------------------------------------------------------------------

    def average(self) -> None:
        """Average the arena over ranks.

        Afterwards, all ranks have the averages of all blocks, or only the rank that updates a block
        has its average.

        Collective over: world, or the ranks that update the same replica of the model, or none.

        Raises:
            ValueError: not all parts of the batch have been accumulated.
        """
        self.sender.add_up()
        self.reader.complete()

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite, regardless of running statistics and votes."""
        return not not_finite({b.name: self.arena[b.name] for b in self.blocks if b.parameters})

    def check(self, step: int) -> None:
        """Find the `broken` blocks; no message is needed, as NaN on one rank makes the sum NaN.

        The host reads all flags of the step, and the votes if this rank has their means.

        Raises:
            UserError: a gradient was not finite in too many consecutive steps.
        """
        self.broken, self.shortened = (), 1.0
        numbers = [self.arena.flat.sum(0, keepdim=True)]
        if not self.plan.owner_updates:
            numbers.append(self.votes.counted(self.arena[self.votes.name]))
        total, *votes = self.site.flags.read(*numbers)
        self.votes.heard = votes
        if not math.isfinite(total):
            stepped = [slot.block.name for slot in self.slots if slot.steps]
            self.broken = not_finite({name: self.arena[name] for name in stepped})
        alone, updaters, rank = self.sender.alone, self.plan.updaters, self.plan.rank
        answered = [name for name in self.broken if alone or updaters[name] == rank]
        self.site.nonfinite.note("gradient", answered, step, "not changed in this step")

    def write(self, slots: Iterable[Slot]) -> None:
        """Set the gradients of the blocks that the rank updates to the values of `slots`."""
        copies: list[tuple[Tensor, Tensor]] = []
        with self.site.trace.stage(names.WRITE_BACK):
            for slot in slots:
                parameters = slot.block.parameters
                if slot.block.name in self.broken or not all(p.requires_grad for p in parameters):
                    slot.block.abort_batch()  # even if the parameter was frozen after the last step
                elif slot.steps:
                    copies += self.reader.write(slot)
            copy_all(copies)

    def take_votes(self) -> None:
        """Copy the votes from the arena, for a batch that the ranks skip."""
        for slot in self.uncovered_slots:
            if isinstance(slot.block, Votes):
                slot.parts[0][SKIP] = 0
                copy_all(slot.block.values_from(slot.parts))

    # -- running statistics, and batches without a step ------------------------------------------

    @staticmethod
    def _on_load(own: ref[Gradients], *_: object) -> None:
        """Adopt the running statistics that the user's program has loaded."""
        if (self := own()) is not None:
            self.keep()

    def keep(self) -> None:
        """Store the current running statistics, so that `abort_batch` can restore them."""
        copy_all(pair for block in self.statistics for pair in block.snapshot())
        self.counts.keep()

    def abort_batch(self) -> None:
        """Drop the gradients read or sent; reset running statistics to those after the last step.

        Collective over: world with `overlap`, otherwise none.
        """
        self.sender.abort_batch()
        self.reader.abort_batch()
        self.counts.abort_batch()
        self._take_back()

    def check_unsent(self) -> None:
        """Check that this rank can drop a batch by itself.

        Raises:
            ValueError: `overlap` is used, so the backward pass has sent the gradients.
        """
        if self.plan.strategy.transport.overlap:
            raise ValueError(
                "with transport.overlap=True the backward pass has already sent gradients; call "
                "step()"
            )

    def _take_back(self) -> None:
        for block in self.statistics:
            block.abort_batch()

    def stepped(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that the rank's optimizer updates, by name."""
        stepped = {id(parameter) for parameter in self.reader.stepped}
        return {name: p for name, p in model.named_parameters() if id(p) in stepped}


def check_weighable(examples: int, plan: Plan) -> None:
    """Check that ranks can weight gradients before the reduction.

    Raises:
        ValueError: `examples` is not a valid count; or the trainer does not average the gradients,
            or sends them before the weight is known.
    """
    check_count("examples", examples, 0)
    transport, sync = plan.strategy.transport, plan.strategy.sync
    if plan.sharding:
        raise ValueError(
            f"examples={examples} needs whole gradients on every rank: fully_shard has averaged "
            f"them with equal weights; use batches of equal size"
        )
    if sync.local_steps:
        raise ValueError(
            f"examples={examples} needs sync='synchronous', not {sync.name!r}: ranks do not "
            f"average gradients"
        )
    if transport.overlap or transport.virtual_ranks is not None:
        raise ValueError(
            f"examples={examples} needs transport.overlap=False and "
            f"transport.virtual_ranks=None, not "
            f"overlap={transport.overlap} and virtual_ranks={transport.virtual_ranks}"
        )
