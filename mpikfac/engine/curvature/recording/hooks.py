"""Hooks on a model and its layers, which decide which passes belong to the batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn

from mpikfac.engine.curvature.eager import Eagerly
from mpikfac.engine.curvature.recording.comparison import Comparison
from mpikfac.engine.curvature.recording.moments import Moments
from mpikfac.engine.curvature.recording.own_outputs import OwnOutputs
from mpikfac.engine.curvature.recording.retained import RetainedGradients
from mpikfac.engine.curvature.recording.sums import changed_in_place
from mpikfac.engine.part import Part
from mpikfac.layers import Attached, Hook, Layer
from mpikfac.numerics import (
    accumulates,
    at_end_of_backward,
    in_backward,
    in_capture,
    listen,
    makes_gradients,
    outside_of_transforms,
)
from mpikfac.settings import Turn

log = logging.getLogger("mpikfac")


class RecordingHooks(Part):
    """Record the calls of layers that count toward a batch's statistics.

    A call counts if the model is in `train()` mode, recording is not paused, and a backward pass
    computes gradients of parameters from it. Calls that trace or export the model do not count. If
    `KFAC.record` computes the gradients for the Fisher matrix, only its passes count. A pass is
    also excluded if its gradients are set to None or 0 before the next pass: the moments contain
    the same passes as `.grad`.

    Attributes:
        recording: whether passes count.
        paused: whether forward passes are excluded from the batch.
        passes: the number of forward passes of the model so far.
    """

    def __init__(self, model: nn.Module, moments: Moments) -> None:
        super().__init__(moments.site)
        self.recording, self.paused = False, False
        self._model, self._moments = model, moments
        self._closed = False
        self._derivatives_told = self.plan.rank > 0  # only rank 0 warns, and only once
        self.passes = 0
        # Whether the next call of a layer begins a pass, as after a backward pass.
        self._between = True
        # The thread of the forward pass whose backward pass is running; other threads can use the
        # model at the same time.
        self._running: int | None = None
        self._interrupted = False
        self._followed = False  # whether gradients are noted at the end of the backward pass
        self._retained = RetainedGradients(moments.parameters)
        self._removed_told = self.plan.rank > 0
        self._comparison = Comparison(moments.layers, moments.of_loss and self.plan.rank == 0)
        self._turn: Turn | None = None
        self._outputs = OwnOutputs()
        self._hooks: list[Attached] = []
        finalize(self, _remove, self._hooks)

    def attach(self) -> None:
        """Add hooks to the model and its layers; from now on, passes count."""
        if self.recording or self._closed:
            return
        self.recording = True
        layers = self._moments.layers
        if not layers:
            return
        own = ref(self)  # a model can outlive the trainer
        on_pass = self._model.register_forward_pre_hook(Hook(self._on_pass, own))
        self._hooks += [Eagerly(), self._outputs, on_pass]
        for layer in layers:
            self._outputs.attach(layer, Hook(self._on_forward, own, layer))
        self._outputs.come_first()

    def detach(self) -> None:
        """Remove the hooks; until `attach`, the model behaves as it does without K-FAC."""
        if self.recording:
            self.recording = False
            _remove(self._hooks)

    def close(self) -> None:
        """Remove the hooks permanently; later steps that update factors find no statistics."""
        self.detach()
        self.recording = self._closed = True

    def abort_batch(self) -> None:
        """Drop the passes since the last step, including an interrupted backward pass."""
        self._running, self._interrupted = None, False
        self._retained.clear()

    def check_ended(self) -> None:
        """Warn if a step is about to use statistics from a backward pass that did not finish."""
        self._retained.clear()
        if self._running is not None or self._interrupted or self._moments.awaits_pass:
            log.warning(
                "a backward pass before this step was interrupted, so statistics include only some "
                "of its layers; after an interruption, call zero_grad() and "
                "clear_statistics(), and run the batch again"
            )
        self._running, self._interrupted = None, False

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Return a context in which forward passes are excluded from the batch."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @contextmanager
    def standing_for(self, turn: Turn) -> Iterator[None]:
        """Return a context whose backward pass is one of several that replace the loss's own."""
        self._turn = turn
        try:
            yield
        finally:
            self._turn = None

    # -- forward passes --------------------------------------------------------------------------

    @staticmethod
    def _on_pass(own: ref[RecordingHooks], *_: object) -> None:
        self = own()
        if self is None or in_capture():  # operations of the hooks would end up in the graph
            return
        self._outputs.come_first()
        if not self.paused and torch.is_grad_enabled():
            self._begin_pass()

    def _begin_pass(self) -> None:
        self.passes, self._between = self.passes + 1, False

    @staticmethod
    def _on_forward(
        own: ref[RecordingHooks], layer: Layer, module: nn.Module, *called: Any
    ) -> None:
        self = own()
        if self is None or in_capture():
            return
        trained = any(parameter.requires_grad for parameter in layer.parameters)
        if not (module.training and trained) or self.paused:
            return
        thread = get_ident()
        if not in_backward() and self._running in (None, thread):
            self._note_forward()
        call = layer.watch(*called)
        if call is not None:
            x, listen_to = call
            version = -1 if x.is_inference() else x._version
            passed = self.passes, thread
            listen_to(partial(self._on_gradient, layer, [x.detach()], version, passed))

    def _note_forward(self) -> None:
        """Record a layer's call outside of backward passes; the previous pass has then ended."""
        self._interrupted |= self._running is not None
        self._running, self._followed = None, False
        if self._between:  # the program calls parts of the model, not the model itself
            self._begin_pass()

    # -- backward passes -------------------------------------------------------------------------

    def _on_gradient(
        self, layer: Layer, inputs: list[Tensor], version: int, passed: tuple[int, int], g: Tensor
    ) -> None:
        """Add a call to the sums if it counts.

        Args:
            inputs: the call's input; removed when no further backward pass of the call needs it.
            passed: the number of the forward pass, and its thread.
        """
        if self.paused:
            return
        if not makes_gradients(layer.in_use):  # the pass only computes gradients of inputs
            self._await_derivative(layer, g)
            return
        self._follow_gradients(layer)
        if self._turn is None and not self._moments.of_loss:
            inputs.clear()
            return
        if not inputs:
            raise _second_pass(layer)
        x = inputs.pop() if self._turn is None or self._turn.last else inputs[0]
        if version >= 0 and x._version != version and not layer.bias_alone:
            raise changed_in_place(layer, "the input", "backward")
        forward_pass, thread = passed
        self._note_backward(thread)
        self._comparison.add(layer, x, g)
        self._moments.add(layer, x, g, forward_pass, self._turn)

    def _follow_gradients(self, layer: Layer) -> None:
        """Drop passes whose gradients were removed; note this pass's gradients at its end."""
        if self._followed:
            return
        self._followed = True
        self._comparison.begin()
        accumulating = accumulates(layer.in_use)
        at_end_of_backward(partial(self._note_gradients, self._turn is None, accumulating))
        removed = self._retained.removed(accumulating)
        counts = self._moments.of_loss or self._turn is not None
        for name in removed if counts else ():
            self._moments.drop_layer(name)
            self._retained.drop(name)
        if removed and not self._removed_told:
            self._removed_told = True
            _warn_of_removed(removed[0], counts)

    def _note_gradients(self, of_loss: bool, accumulated: bool) -> None:
        """Note the gradients that a pass of the loss has left in the model."""
        self._followed = False
        if not self._derivatives_told:  # derivatives in the loss would explain a difference
            self._comparison.end()
        if of_loss:
            self._retained.note(self._moments.recorded, accumulated)

    def _note_backward(self, thread: int) -> None:
        """Record that a backward pass has reached a call made by a forward pass in `thread`."""
        self._between = True
        if self._running is None:
            self._running = thread
            at_end_of_backward(self._on_end)

    def _on_end(self) -> None:
        self._running = None
        self._moments.end_pass()

    def _await_derivative(self, layer: Layer, g: Tensor) -> None:
        """Warn once if the loss turns out to depend on `g`, a gradient with respect to an input.

        With `create_graph=True`, `g` has a graph; a backward pass that computes gradients of
        parameters runs through this graph only if the loss contains the gradient of the input.
        """
        g = outside_of_transforms(g)
        if not self._derivatives_told and g.grad_fn is not None:
            listen(g, partial(self._on_derivative, layer))

    def _on_derivative(self, layer: Layer, _: Tensor) -> None:
        if not self._derivatives_told and makes_gradients(layer.in_use):
            self._derivatives_told = True
            self._comparison.stop()
            _warn_of_derivatives(layer)


def _second_pass(layer: Layer) -> RuntimeError:
    """Return the error for a second backward pass through a forward pass already recorded."""
    return RuntimeError(
        f"layer {layer.name!r}: a second backward pass through the same forward pass cannot be "
        f"recorded; add the losses and call backward once, pass the outputs of all heads to a "
        f"single record(), and run passes for derivatives of gradients, forward and backward, in "
        f"no_recording()"
    )


def _remove(hooks: list[Attached]) -> None:
    """Remove all hooks from the model."""
    while hooks:
        hooks.pop().remove()


def _warn_of_removed(name: str, dropped: bool) -> None:
    """Warn about a pass whose gradients no step will use."""
    if dropped:
        log.warning(
            "layer %r: the gradients of a backward pass were set to None or 0 before the step, so "
            "factors do not include the pass either; if it belongs to the batch, leave gradients "
            "in .grad until step()",
            name,
        )
    else:
        log.warning(
            "layer %r: the gradients of a backward pass were set to None or 0 after record() of "
            "the next pass, so factors include both; call zero_grad() before record()",
            name,
        )


def _warn_of_derivatives(layer: Layer) -> None:
    """Warn that the loss contains derivatives by the network's inputs, which factors leave out."""
    log.warning(
        "layer %r: the loss contains derivatives of the network with respect to its inputs "
        "(create_graph=True), as in PINNs or with a gradient penalty; the factors do not include "
        "them, so they describe the curvature of the outputs alone. For a PINN, try less damping: "
        "damping=mpikfac.Damping(relative=1.0)",
        layer.name,
    )
