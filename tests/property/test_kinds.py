"""Any layer of any geometry, in a step of K-FAC: factors and gradient by brute force."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import mpikfac
from mpikfac import layers
from mpikfac.numerics import triangles
from support import brute, inside, problem

COVERS = {**layers.KINDS, **layers.NORMS}
PRECISION = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-4}  # sums in float32
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
small = st.integers(1, 3)


# -- modules and their inputs --------------------------------------------------------------------


@st.composite
def linears(draw, batch):
    """Draw a linear layer over any dimensions of positions."""
    x = torch.randn(batch, *draw(st.lists(small, max_size=2)), draw(st.integers(1, 5)))
    return nn.Linear(x.shape[-1], draw(st.integers(1, 4)), bias=draw(st.booleans())), x


@st.composite
def convolutions(draw, batch):
    """Draw any convolution with an output: of groups, depthwise, and transposed."""
    n, transposed = draw(small), draw(st.booleans())
    groups, inputs, outputs = draw(small), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel, stride, dilation, extra = (draw(st.tuples(*[small] * n)) for _ in range(4))
    mode = "zeros" if transposed else draw(st.sampled_from(["zeros", "reflect", "circular"]))
    padding = draw(st.tuples(*[st.integers(0, 2)] * n))
    reach = [(k - 1) * d for k, d in zip(kernel, dilation)]
    size = [r + e for r, e in zip(reach, extra)]
    options = {"groups": groups, "bias": draw(st.booleans()), "dilation": dilation}
    if transposed:
        size = extra
        over = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation)]
        sizes = zip(size, stride, reach, padding, over)
        assume(all((i - 1) * s + r + o + 1 > 2 * p for i, s, r, p, o in sizes))
        options |= {"output_padding": over}
    elif draw(st.booleans()):
        padding, stride = "same", 1
    around = reach if padding == "same" else padding
    assume(mode == "zeros" or all(p < s for p, s in zip(around, size)))
    kind = getattr(nn, f"ConvTranspose{n}d" if transposed else f"Conv{n}d")
    options |= {"stride": stride, "padding": padding, "padding_mode": mode}
    module = kind(groups * inputs, groups * outputs, kernel, **options)
    return module, torch.randn(batch, groups * inputs, *size)


@st.composite
def embeddings(draw, batch):
    """Draw an embedding of words at any dimensions of positions, perhaps with a padding word."""
    entries = draw(st.integers(1, 5))
    padding = draw(st.none() | st.integers(0, entries - 1))
    x = torch.randint(entries, (batch, *draw(st.lists(small, max_size=2))))
    return nn.Embedding(entries, draw(small), padding_idx=padding), x


@st.composite
def normalisations(draw, batch):
    """Draw a normalisation of units that are not constant, and the units' input."""
    channels, positions = draw(st.integers(2, 4)), draw(st.lists(small, max_size=3))
    kind = draw(st.sampled_from(["layer", "rms", "group", "batch"]))
    bias = draw(st.booleans())
    if kind == "layer":
        return nn.LayerNorm(channels, bias=bias), torch.randn(batch, *positions, channels)
    if kind == "rms":
        return nn.RMSNorm(channels, 1e-6), torch.randn(batch, *positions, channels)
    x = torch.randn(batch, channels, *positions)
    if kind == "group":
        groups = draw(st.sampled_from([1, channels]))
        assume(x.numel() > groups)
        return nn.GroupNorm(groups, channels), x
    assume(x.numel() > channels)
    return getattr(nn, f"BatchNorm{max(1, len(positions))}d")(channels), x


# -- a step and the step's factors ---------------------------------------------------------------


@st.composite
def forms(draw):
    """Draw a rule for all layers."""
    sharing, diagonal = draw(st.sampled_from(["expand", "reduce"])), st.sampled_from("AG")
    chosen = "".join(draw(st.sets(diagonal, max_size=1)))
    largest = draw(st.none() | st.integers(1, 4))

    def rule(layer):
        kept = "".join(side for side in chosen if side in layer.sides)
        return replace(layer, kfac_approx=sharing, diagonal=kept, largest=largest)

    return rule


def step(model, x, rule, preconditioner="eigen"):
    """Return K-FAC after a step, and the loss's gradient at the outputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    choices = {"covers": COVERS, "rule": rule, "preconditioner": preconditioner}
    kfac = problem.kfac(model, optimizer, mpikfac.world(), **choices)
    y = model(x)
    gradient = torch.randn(y.shape).to(y)
    y.backward(gradient)
    kfac.precondition()
    kfac.detach()
    return kfac, gradient


def in_form(shape, side, whole):
    """Return a side's parts of a factor `[groups, n, n]` or vector `[groups, n]`, by name."""
    if side in shape.diagonal and whole.dim() == 3:
        whole = whole.diagonal(dim1=1, dim2=2)
    found, start = {}, 0
    for factor in shape.side(side):
        block = slice(start, start + factor.order)
        if side in shape.diagonal:
            block = slice(None)
        found[factor.name] = whole[:, block, block] if whole.dim() == 3 else whole[:, block]
        start += factor.order
    return found


def by_definition(shape, uses, of_vectors):
    """Return factors or vectors, from every call's `a` and `g` `[batch, shared, groups, n]`."""
    batch = len(uses[0][0])
    if shape.kfac_approx == "reduce":
        uses = [(a.mean(1, keepdim=True), g.sum(1, keepdim=True)) for a, g in uses]
    a, g = (torch.cat([vectors.flatten(0, 1) for vectors in side]) for side in zip(*uses))
    whole = {
        "A": torch.einsum("vgi,vgj->gij", a, a) / len(a),
        "G": torch.einsum("vgi,vgj->gij", g, g) * batch,
    }
    if of_vectors:  # as factors are, if all vectors are equal
        whole = {"A": a.mean(0), "G": math.sqrt(batch * len(g)) * g.mean(0)}
    found = [in_form(shape, side, whole[side]) for side in shape.sides]
    return {name: factor for side in found for name, factor in side.items()}


def assert_as_defined(kfac, layer, uses, dtype):
    """Compare a layer's factors, or vectors, and gradient."""
    uses = [tuple(vectors.double() for vectors in use) for use in uses]
    precision = {"rtol": PRECISION[dtype], "atol": PRECISION[dtype]}
    for name, expected in by_definition(layer.shape, uses, kfac.plan.forms[0].vector).items():
        found = inside.factors(kfac)[name]
        found = (found if kfac.plan.forms[0].vector else triangles.unfold_triangle(found)).double()
        torch.testing.assert_close(found, expected.reshape(found.shape), **precision)
    if dtype != torch.bfloat16:  # gradients of bfloat16 are rounded sums
        expected = sum(torch.einsum("bsgo,bsgi->goi", g, a) for a, g in uses)
        found = inside.gradients(kfac)[layer.name].double()
        torch.testing.assert_close(found.view_as(expected), expected, **precision)


class Watched(nn.Module):
    """A module that is called a given number of times, and keeps inputs and outputs."""

    def __init__(self, module, calls=1, tied=False):
        super().__init__()
        self.module, self.calls = module, calls
        self.other = copy.deepcopy(module) if tied else None
        for name, parameter in module.named_parameters() if tied else ():
            setattr(self.other, name, parameter)
        self.seen = []

    def forward(self, x):
        outputs = []
        for call in range(self.calls):
            module = self.other if self.other is not None and call else self.module
            y = module(x)
            y.retain_grad()
            self.seen.append((x.detach(), y))
            outputs.append(y)
            x = x.flip(0) if call % 2 else x.roll(1, -1)  # other inputs than before
        return sum((call + 1) * y for call, y in enumerate(outputs))


@given(st.data(), st.integers(1, 4), forms(), st.sampled_from(list(PRECISION)))
@settings(max_examples=250)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_layers_that_multiply_by_a_weight(data, batch, rule, dtype):
    """Oracle: autograd's derivatives of every output by the weight; gradients of outputs."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    module, x = data.draw(st.one_of(*(kind(batch) for kind in (linears, convolutions, embeddings))))
    x = x.to(dtype) if x.is_floating_point() else x
    model = Watched(module, calls=data.draw(small), tied=data.draw(st.booleans())).to(dtype)
    if x.dim() in LAST and data.draw(st.booleans()):
        model, x = model.to(memory_format=LAST[x.dim()]), x.to(memory_format=LAST[x.dim()])
    kfac, _ = step(model, x, rule, data.draw(st.sampled_from(["eigen", "eva"])))
    (layer,) = inside.layers(kfac)
    uses = [(brute.vectors(layer, x), brute.rows(layer, y.grad)) for x, y in model.seen]
    assert_as_defined(kfac, layer, uses, dtype)


@given(st.data(), st.integers(1, 4), forms(), st.sampled_from(list(PRECISION)))
@settings(max_examples=200)
def test_normalisations(data, batch, rule, dtype):
    """Oracle: autograd's gradients of scale and shift, with own copies for every example."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    module, x = data.draw(normalisations(batch))
    model = Watched(module.to(dtype))
    x = x.to(dtype)
    if x.dim() in LAST and data.draw(st.booleans()):
        x = x.to(memory_format=LAST[x.dim()])
    x.requires_grad_()  # torch's GroupNorm needs grad with channels last
    kfac, _ = step(model, x, rule)
    (layer,) = inside.layers(kfac)
    _, u = brute.own_gradients(module.double(), x.double(), model.seen[0][1].grad.double())
    whole = batch * torch.einsum("bui,buj->uij", u, u)
    precision = {"rtol": PRECISION[dtype], "atol": PRECISION[dtype] * float(whole.abs().max())}
    for name, expected in in_form(layer.shape, "A", whole).items():
        found = triangles.unfold_triangle(inside.factors(kfac)[name]).double()
        torch.testing.assert_close(found, expected.reshape(found.shape), **precision)


@given(st.data(), st.integers(1, 3), forms(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_attention(data, batch, rule, bias, batch_first, weights):
    """Oracle: attention written out, with the gradients at the projections' outputs."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    heads, width, tokens = data.draw(small), data.draw(small), data.draw(st.integers(1, 4))
    inner, others = heads * width, data.draw(st.integers(0, 4))
    model = Attention(inner, heads, bias, batch_first, weights, others).double()
    x = torch.randn(batch, tokens + others, inner).double()
    kfac, gradient = step(model, x, rule)
    uses = model.written_out(x)
    uses["attention.out_proj"][0][1].backward(gradient)
    assert [layer.name for layer in kfac.plan.layers] == list(uses)
    precision = {"rtol": PRECISION[torch.float64], "atol": PRECISION[torch.float64]}
    for layer in inside.layers(kfac):
        expected = []
        for member, (a, y) in zip(layer.members, uses[layer.name], strict=True):
            a = F.pad(a.detach(), (0, 1), value=1.0) if bias else a.detach()
            use, group = (a.unsqueeze(2), y.grad.unsqueeze(2)), member.group or 0
            for name, factor in by_definition(member.shape, [use], False).items():
                found = triangles.unfold_triangle(inside.factors(kfac)[name])
                found = found.view(len(layer.members), *factor.shape)[group]
                torch.testing.assert_close(found, factor, **precision)
            expected.append(torch.einsum("bso,bsi->oi", y.grad, a))
        found = inside.gradients(kfac)[layer.name]
        torch.testing.assert_close(found, torch.stack(expected).view_as(found), **precision)


class Attention(nn.Module):
    """Torch's attention of tokens `[batch, tokens, width]`, and the same attention written out.

    The first tokens attend to the last `others` tokens, or without `others` to themselves.
    """

    def __init__(self, width, heads, bias, batch_first, weights, others):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, bias=bias, batch_first=batch_first)
        self.weights, self.others = weights, others

    def forward(self, x):
        x, other = self.sides(x if self.attention.batch_first else x.transpose(0, 1))
        y, _ = self.attention(x, other, other, need_weights=self.weights)
        return y if self.attention.batch_first else y.transpose(0, 1)

    def sides(self, x):
        """Return queries, and keys: the queries, or the last tokens."""
        dim = 1 if self.attention.batch_first else 0
        queries, keys = x.split([x.shape[dim] - self.others, self.others], dim)
        return queries, keys if self.others else queries

    def written_out(self, x):
        """Return inputs and outputs `[batch, tokens, n]` of all projections."""
        module = self.attention
        x, other = x.split([x.shape[1] - self.others, self.others], 1)
        other = other if self.others else x
        weights = module.in_proj_weight.chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        inputs = x, other, other
        projected = [F.linear(*given) for given in zip(inputs, weights, biases)]
        heads = (y.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for y in projected)
        q, k, v = heads
        shares = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        context = (shares @ v).transpose(1, 2).flatten(2)
        out = F.linear(context, module.out_proj.weight, module.out_proj.bias)
        for y in (*projected, out):
            y.retain_grad()
        found = list(zip(inputs, projected))
        return {"attention.in_proj": found, "attention.out_proj": [(context, out)]}
