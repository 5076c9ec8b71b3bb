"""TODO engine.gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mpikfac.comm import Grid
from mpikfac.engine.nonfinite import Troubles
from mpikfac.engine.state import Block
from mpikfac.layers import Statistic, Votes
from mpikfac.numerics import Arena, Parts, all_finite, end_step, not_finite
from mpikfac.plan import Plan, lay_out


class Gradients:
    """A model's gradients in one arena, from local to averaged to a step of the optimizer.

    Running statistics travel with them, so that ranks stay equal in BatchNorm's too.

    Attributes:
        broken: names of blocks whose average is not finite, of those that this rank steps; they
            are left as they are.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        plan: Plan,
        grid: Grid,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self.plan = plan
        self.grid = grid
        self.broken: Collection[str] = ()
        self.arena = Arena(plan.gradients(), dtype, device)
        self.parts = Parts(self.arena, plan.parts_per_rank)
        self._to_reduce = plan.reduce_gradients(grid.world.rank)
        self._to_publish = plan.publish_weights(grid.world.rank)
        # Weights before a step, where only changes travel; 0 for what travels as it is.
        changing = plan.gradients() if plan.publishes_changes else lay_out([])
        self._before = Arena(changing, dtype, device)
        self._beside = None
        self._hooks: list[RemovableHandle] = []
        if plan.strategy.transport.overlap and self._to_reduce:
            layout, flat = self.arena.layout, self.arena.flat
            self._beside = grid.beside(self._to_reduce, layout, flat, urgency=0)
            self._send_early()
        self.keep()

    def detach(self) -> None:
        """Removes the hooks that send gradients early."""
        for hook in self._hooks:
            hook.remove()

    def keep(self) -> None:
        """Makes the present running statistics those that `discard` goes back to."""
        for block in self.blocks:
            if isinstance(block, Statistic):
                block.keep()

    def discard(self) -> None:
        """Forgets collected parts; running statistics are those after the last step again."""
        self.parts.clear()
        self._take_back()

    def _take_back(self) -> None:
        for block in self.blocks:
            if isinstance(block, Statistic):
                block.leave()

    def read(self) -> None:
        """Copies the model's gradients into the arena."""
        with self.grid.trace.stage("read gradients"):
            for block in self.blocks:
                if self._beside is None:
                    block.read_gradient(self.arena[block.name])
                elif block.name not in self._beside.ready_blocks:
                    self._send(block)

    def _send_early(self) -> None:
        """From now on a block's gradient is sent as soon as the backward pass has made it."""
        for block in self.blocks:
            on_gradient = partial(self._on_gradient, block, [])
            for parameter in block.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(on_gradient))

    def _on_gradient(self, block: Block, made: list[Tensor], parameter: Tensor) -> None:
        made.append(parameter)
        if len(made) == len(block.parameters):
            made.clear()
            with torch.no_grad():
                self._send(block)

    def _send(self, block: Block) -> None:
        assert self._beside is not None
        block.read_gradient(self.arena[block.name])
        self.arena[block.name] /= self.plan.ranks
        self._beside.ready(block.name)

    def collect(self) -> None:
        """Keeps the gradients of one part of this rank's share, and makes room for the next."""
        self.read()
        self.parts.add()
        self._take_back()

    def reduce(self) -> None:
        """Averages the arena over ranks: everywhere, or each block on the rank that steps it.

        Collective over: world.

        Raises:
            ValueError: parts of the batch are missing.
        """
        if self.parts:
            self.grid.sum_in_order(self.parts.take(), self.arena.flat, "reduce gradients")
            self.arena.flat /= len(self.parts) * self.plan.ranks
            return
        if self._beside is not None:
            self._beside.wait()
            return
        if self.plan.ranks > 1:
            self.arena.flat /= self.plan.ranks
        self.grid.exchange(self._to_reduce, self.arena.flat)

    def checked(self, scaler: GradScaler | None) -> GradScaler | None:
        """A scaler that can be stepped with; None for one that is not enabled.

        Raises:
            ValueError: gradients are sent before their scale can be taken out, or a rank that
                steps nothing would not know which steps to skip.
        """
        if scaler is None or not scaler.is_enabled():
            return None
        if self.plan.strategy.transport.overlap:
            raise ValueError(
                "with overlap=True gradients are sent before their scale can be taken out; "
                "step(scaler) needs overlap=False"
            )
        counts = self.arena.layout.counts()
        if self.owner_updates and 0 in counts:
            raise ValueError(
                f"with update='owner' rank {counts.index(0)} of {self.plan.ranks} has nothing to "
                f"step, so it would not know of steps to skip; step(scaler) needs update='everyone'"
            )
        return scaler

    def reduce_scaled(self, scaler: GradScaler, finite: bool = True) -> bool:
        """Averages gradients of a scaled loss; whether all of all ranks are finite.

        A rank on which they are not, or for which the caller says so, sends nothing but NaN: other
        ranks know, whatever part of the sum they get. The scaler hears the same on all.

        Collective over: world.
        """
        collected, scale = self.parts.collected, scaler.get_scale()
        for block in self.blocks:
            if block.parameters:
                collected[..., self.arena.span(block.name)] /= scale
        if not (finite and all_finite(collected)):
            self._spoil(collected)
        self.reduce()
        rank, flat = self.grid.world.rank, self.arena.flat
        mine = self.arena.segment(rank) if self.owner_updates else flat
        usable = bool(mine.isfinite().all())
        end_step(scaler, usable, flat.device)
        return usable

    def _spoil(self, collected: Tensor) -> None:
        """Makes all that this rank sends NaN; of votes, which are to arrive, the last one."""
        for block in self.blocks:
            values = collected[..., self.arena.span(block.name)]
            (values[..., -1] if isinstance(block, Votes) else values).fill_(torch.nan)

    def skip(self) -> None:
        """Leaves all as it was before this batch, which was reduced, but for the votes.

        What encoding lost is dropped, as it may be of this batch.

        Collective over: world.
        """
        self.discard()
        self.grid.encoded.forget()
        self.grid.exchange([m for m in self._to_publish if not m.codec], self.arena.flat)
        for block in self.blocks:
            if isinstance(block, Votes):
                self.arena[block.name][-1] = 0
                block.write_values(self.arena[block.name])

    def check(self, troubles: Troubles, step: int) -> None:
        """Finds out what is `broken`; a rank's NaN is in the sum, so no message is needed.

        Raises:
            UserError: for too many steps in a row.
        """
        self.broken = ()
        if not all_finite(self.arena.flat):
            stepped = {b.name: self.arena[b.name] for b in self.blocks if self.steps(b)}
            self.broken = not_finite(stepped)
        rank, updaters = self.grid.world.rank, self.plan.updaters
        mine = [name for name in self.broken if updaters[name] == rank]
        troubles.note("gradient", mine, step, "left as they are in this step")

    def write(self, blocks: Sequence[Block], values: Mapping[str, Tensor]) -> None:
        """Makes `values` the gradients of those of `blocks` that this rank steps."""
        with self.grid.trace.stage("write back"):
            for block in blocks:
                if block.name in self.broken:
                    block.leave()
                elif self.steps(block):
                    block.write_gradient(values[block.name])

    def update(self, optimizer: Optimizer) -> None:
        """Steps the model: on every rank, or each block on its owner, whose values then go to all.

        Other ranks' gradients are dropped, so an optimizer neither steps nor keeps state for them.

        Collective over: world.
        """
        if self.owner_updates:
            for block in self.blocks:
                if not self.steps(block):
                    for parameter in block.parameters:
                        parameter.grad = None
        for block in self.blocks if self._before else ():
            if block.name in self.plan.shapes:
                block.read_values(self._before[block.name])
        with self.grid.trace.stage("optimizer"):
            optimizer.step()
        if self.owner_updates:
            self._publish_weights()

    def _publish_weights(self) -> None:
        for block in self.blocks:
            if self.steps(block):
                block.read_values(self.arena[block.name])
        if self._before:
            self.arena.flat -= self._before.flat
        self.grid.exchange(self._to_publish, self.arena.flat)
        if self._before:
            self.arena.flat += self._before.flat
        for block in self.blocks:
            # Of changes that were encoded, the one who sent them keeps what the others got.
            if self._before or not self.steps(block):
                block.write_values(self.arena[block.name])

    @property
    def owner_updates(self) -> bool:
        """Whether a block is stepped by its owner only."""
        return self.plan.strategy.update == "owner"

    def steps(self, block: Block) -> bool:
        """Whether this rank's optimizer steps `block`."""
        return not self.owner_updates or self.plan.updaters[block.name] == self.grid.world.rank

    def stepped(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that this rank's optimizer steps, by name."""
        mine = {id(p) for block in self.blocks if self.steps(block) for p in block.parameters}
        return {name: p for name, p in model.named_parameters() if id(p) in mine}
