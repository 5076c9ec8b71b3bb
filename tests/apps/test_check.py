"""A good model passes `mpikfac check`; a bad model's error is named."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from torch import nn

import mpikfac
from mpikfac.layers.inner.attention import ProjectionLayer
from mpikfac_apps.checking import check, comparison
from mpikfac_apps.checking.options import CHECK
from mpikfac_apps.problems import models
from support.launch import launch

PROGRAM = ("-m", "mpikfac_apps", "check")
MODELS = """
import torch
from torch import nn
import mpikfac

class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x / 3)

class ScaledLayer(mpikfac.Layer):
    def inputs(self, x):
        return super().inputs(x / 3)

class Reversed(ScaledLayer):
    def outputs(self, g):
        return super().outputs(g).flip(-1)

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, groups=2, padding="same", padding_mode="reflect")
        self.bn = nn.BatchNorm2d(4)
        self.position = nn.Parameter(torch.randn(4))
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight, self.two.bias = self.one.weight, self.one.bias
        self.entries = nn.Embedding(5, 4, padding_idx=1)
        self.scaled, self.unused = Scaled(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, images):
        x = torch.relu_(self.bn(self.conv(images))).flatten(2).transpose(1, 2) + self.position
        x = self.two(nn.functional.dropout(torch.tanh(self.one(x)), 0.5, self.training))
        entries = (3 * images[:, 0, 0]).long().abs() % 5
        x = self.frozen(self.scaled(torch.cat([x, self.entries(entries)], 1)))
        return self.head(self.lstm(x)[0][:, -1])

def mixed():
    return Mixed()

class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(4, 2, batch_first=True)
        self.second = nn.MultiheadAttention(4, 1, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x, _ = self.first(x, x, x, need_weights=False)
        x = x.transpose(0, 1)
        x, _ = self.second(x, x, x)
        return self.head(torch.tanh(x).mean(0))

def attends():
    return Attends()

class Translates(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.gates = nn.LSTMCell(4, 6), nn.GRUCell(4, 4)
        self.others = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.sizes = nn.MultiheadAttention(4, 1, kdim=6, vdim=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        state, kept = None, []
        for row in x.unbind(1):
            state = self.cell(row, state)
            kept.append(state[0])
        seen = torch.stack(kept)
        y = self.others(x[:, :2], x, x)[0]
        y = self.sizes(y.transpose(0, 1), seen, seen[..., :2])[0]
        return self.head(self.gates(y[0], self.gates(y[1])))

def translates():
    return Translates()

class Encoder(nn.Module):  # an attention with the words first, between layers with the texts first
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))

class Elsewhere(nn.Module):  # uses a weight where no layer sees it
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(nn.functional.linear(self.body(x), self.body.weight))

class Frequent(nn.Module):  # has gradients that are no means over examples
    def __init__(self):
        super().__init__()
        self.entries = nn.Embedding(2, 4, scale_grad_by_freq=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.entries((x > 0).long()).mean(1))

class Words(nn.Module):  # takes whole numbers
    def __init__(self):
        super().__init__()
        self.entries, self.norm = nn.Embedding(6, 4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 6)

    def forward(self, words):
        x = self.norm(self.entries(words))
        return self.head(x + self.attention(x, x, x)[0]).movedim(2, 1)

def words():
    return Words()

def tied():
    model = Words()
    model.head.weight = model.entries.weight
    return model

class Failing(nn.Module):
    def forward(self, x):
        return {"logits": x}

def number():
    return 3

def alone():
    return nn.Linear(4, 3)

def zero():  # no gradient arrives behind the head
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    nn.init.zeros_(model[2].weight)
    return model

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("no way back")


class Fails(nn.Module):
    def __init__(self, fail):
        super().__init__()
        self.head, self.fail = nn.Linear(4, 3), fail

    def forward(self, x):
        return self.fail(self, self.head(x), len(x))


def raising(wrong, y):
    if wrong:
        raise RuntimeError("not in this way")
    return y


def backward():
    return Fails(lambda model, y, examples: Backward.apply(y))


def detached():
    return Fails(lambda model, y, examples: y.detach())


def changed():  # sigmoid needs its output in the backward pass
    return Fails(lambda model, y, examples: y.sigmoid().add_(1))


def single():
    return Fails(lambda model, y, examples: raising(examples > 2, y))


def training():
    return Fails(lambda model, y, examples: raising(not model.training, y))


def lazy():
    return nn.Sequential(nn.LazyLinear(3))


def lazy_norm():
    return nn.Sequential(nn.Linear(4, 3), nn.LazyBatchNorm1d())


def frozen():
    return alone().requires_grad_(False)

COVERS = {**mpikfac.KINDS, **mpikfac.NORMS, Scaled: LAYER}
"""
MIXED = ["--input", "2,4,4"]
ALONE = mpikfac.world()


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file of models; `layer` is the class that covers `Scaled`."""

    def write(layer="ScaledLayer"):
        (tmp_path / "own.py").write_text(MODELS.replace("LAYER", layer))
        return str(tmp_path / "own.py")

    return write


def wrong(capsys, *arguments):
    """Return whether a check finds an error, and the check's output."""
    found = check.checked(ALONE, CHECK.read(arguments))
    return found, capsys.readouterr().out


def verdicts(text):
    """Return the verdict on every layer."""
    numbers = text.partition("Errors")[2].partition("\n\n")[0].splitlines()[5:]
    return {line.split()[0]: " ".join(line.split()[7:]) for line in numbers}


def test_a_model_of_ones_own_passes(file, capsys):
    """Oracle: the layers of the model by hand, all right."""
    found, text = wrong(capsys, f"{file()}:mixed", *MIXED)
    layers = ["conv", "bn", "one", "entries", "scaled", "unused", "head"]
    assert verdicts(text) == dict.fromkeys(layers, "ok") | {"unused": "no vectors"}
    assert "All right: 6 of 6 checked" in text
    assert not found


def test_a_network_by_name_passes(capsys):
    """Oracle: all four layers, by hand; the plan's own numbers for five ranks."""
    found, text = wrong(capsys, "digits_cnn", "--ranks", "5")
    assert verdicts(text) == dict.fromkeys(["0", "3", "8", "10"], "ok")
    assert not found
    row = next(line for line in text.splitlines() if line.startswith("  mem-opt"))
    plan = models.build("digits_cnn", 10, 1)
    layers, others = mpikfac.layers.covered_shapes(plan)
    plan = mpikfac.make_plan(layers, 5, mpikfac.Strategy(mpikfac.MemOpt()), others)
    kept = [sum(plan.memory(rank).values()) / 2**20 for rank in range(5)]
    assert row.split()[1:4] == ["1", f"{min(kept):.2f}", f"{max(kept):.2f}"]


def test_a_model_that_is_one_layer_passes(file, capsys):
    """Oracle: the orders of the layer's factors."""
    found, text = wrong(capsys, f"{file()}:alone", "--input", "4")
    assert re.search(r"^  \(model\) +Linear +A 5, G 3$", text, re.MULTILINE)
    assert verdicts(text) == {"(model)": "ok"}
    assert not found


def test_a_model_with_a_head_of_zeros_passes(file, capsys):
    """Oracle: the gradient of the first layer is 0, and so is the direction; G is 0."""
    found, text = wrong(capsys, f"{file()}:zero", "--input", "4")
    assert verdicts(text) == {"0": "ok", "2": "ok"}
    assert not found


def test_coverage_is_told_with_reasons(file, capsys):
    """Oracle: the forms of the model's layers, by hand."""
    _, text = wrong(capsys, f"{file()}:mixed", *MIXED)
    for line in (
        *(r"conv +Conv2d +A 2 x 10, G 2 x 2", r"bn +BatchNorm2d +A 4 x 2"),
        *(r"two +Linear +weights of one", r"entries +Embedding +A diagonal of 5, G 4"),
        *(r"scaled +Scaled +A 5, G 4", r"unused .*G 4; not used in this batch"),
        *(r"Mixed: trained first-order\n +position", r"LSTM: trained first-order\n +lstm"),
        r"Linear: frozen\n +frozen",
    ):
        assert re.search(rf"^  {line}$", text, re.MULTILINE), line


def test_a_derived_class_and_normalisations_are_left_out_with_reasons(file, monkeypatch, capsys):
    """Oracle: the library's default coverage."""
    path = file()
    Path(path).write_text(Path(path).read_text().replace("COVERS =", "UNUSED ="))
    found, text = wrong(capsys, f"{path}:mixed", *MIXED)
    assert "Scaled: trained first-order; derived from Linear, but may compute differently" in text
    line = "BatchNorm2d: trained first-order; coverage=mpikfac.Coverage(covers={**mpikfac.KINDS, "
    assert line in text
    assert not found


def test_a_tied_weight_is_left_out_with_its_modules(file, capsys):
    """Oracle: the modules, and the layers of the attention, by hand."""
    found, text = wrong(capsys, f"{file()}:tied", "--input", "5", "--tokens", "6")
    why = "because no layer covers all modules that share entries.weight = head.weight"
    for kind, name in (("Embedding", "entries"), ("Linear", "head")):
        assert f"  {kind}: trained first-order, {why}\n    {name}\n" in text
    layers = ["norm", "attention.in_proj", "attention.out_proj"]
    assert verdicts(text) == dict.fromkeys(layers, "ok")
    assert not found


@pytest.mark.parametrize(("layer", "what"), [("mpikfac.Layer", "A"), ("Reversed", "A, gradient")])
def test_a_wrong_layer_is_named(layer, what, file, capsys):
    """Oracle: a layer that ignores its module's division of inputs, or reverses outputs."""
    found, text = wrong(capsys, f"{file(layer)}:mixed", *MIXED)
    assert found
    assert {n: v for n, v in verdicts(text).items() if "WRONG" in v} == {"scaled": f"WRONG: {what}"}
    assert text.splitlines()[-1] == "WRONG: scaled"


@pytest.mark.parametrize("words", [3, 8])
def test_layers_whose_first_dimension_is_not_the_batch_are_named(words, file, capsys):
    """Oracle: the layers of the attention, by hand; with 8 words, a multiple of the batch's 4."""
    found, text = wrong(capsys, f"{file()}:Encoder", "--input", f"{words},4")
    assert found
    named = {name: told for name, told in verdicts(text).items() if told != "ok"}
    projections = [f"encoder.self_attn.{name}" for name in ("in_proj", "out_proj")]
    assert named == dict.fromkeys(projections, "WRONG: examples")


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (mpikfac.KINDS[nn.Conv2d], "input_sum", "A"),
        (mpikfac.KINDS[nn.Conv2d], "output_sum", "G"),
        (mpikfac.Eigen, "direction", "eigen"),
        (mpikfac.Inverse, "direction", "inverse"),
    ],
)
def test_a_mistake_in_the_library_is_seen(owner, name, what, monkeypatch, capsys):
    """Oracle: results that are a millionth too large."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *given: right(self, *given) * (1 + 1e-6))
    found, text = wrong(capsys, "digits_cnn")
    assert found
    assert verdicts(text)["0"] == f"WRONG: {what}"


def test_a_weight_that_is_used_elsewhere_is_seen(file, capsys):
    """Oracle: a model that uses a layer's weight without the layer."""
    found, text = wrong(capsys, f"{file()}:Elsewhere", "--input", "4")
    assert found
    assert verdicts(text) == {"body": "WRONG: gradient", "head": "ok"}


def test_layers_too_large_for_the_oracle_are_told(monkeypatch, capsys):
    """Oracle: bounds that some layers exceed."""
    monkeypatch.setattr(comparison, "LARGEST_ORDER", 300)
    found, text = wrong(capsys, "digits_cnn")
    assert verdicts(text)["8"] == "too large for the reference computation"
    assert verdicts(text)["3"] == "ok"
    assert "All right: 3 of 3 checked" in text
    assert not found


def test_solves_too_large_to_be_written_out_are_left_out(file, monkeypatch, capsys):
    """Oracle: orders by hand; a layer that is left out takes along layers with shared weights."""
    monkeypatch.setattr(comparison, "LARGEST_PRODUCT", 15)
    found, text = wrong(capsys, f"{file()}:mixed", *MIXED)
    solved = re.findall(r"^  (\w+) .* (-|\de-\d+) +ok$", text, re.MULTILINE)
    unsolved = {name for name, error in solved if error == "-"}
    assert unsolved == {"conv", "one", "entries", "scaled"}
    assert not found


def test_a_model_of_words_passes(file, capsys):
    """Oracle: the model's layers by hand, all right; labels at every word."""
    found, text = wrong(capsys, f"{file()}:words", "--input", "5", "--tokens", "6")
    layers = ["entries", "norm", "attention.in_proj", "attention.out_proj", "head"]
    assert verdicts(text) == dict.fromkeys(layers, "ok")
    assert re.search(r"^  head +20 ", text, re.MULTILINE)
    assert not found


def test_a_refused_layer_is_left_out_with_the_librarys_message(file, capsys):
    """Oracle: the message of the library."""
    found, text = wrong(capsys, f"{file()}:Frequent", "--input", "4")
    assert "Embedding with scale_grad_by_freq=True is not covered" in text
    assert verdicts(text) == {"head": "ok"}
    assert not found


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("resnet5", "model=resnet5 is unknown"),
        ("nothing.py:build --input 3", "nothing.py is not a file"),
        ("FILE:nothing --input 3", "has no function 'nothing'"),
        ("FILE:mixed", "needs --input"),
        ("FILE:number --input 3", "number() returned int, not a torch.nn.Module"),
        ("FILE:Failing --input 3", "the model returns dict"),
        ("FILE:mixed --input 3,4", "the model, given [3, 4], raised ValueError: expected 4D"),
        ("FILE:mixed --input 2,0", "whole number"),
        ("FILE:words --input 5 --tokens 7", "raised IndexError: index out of range in self"),
        ("resnet20 --tokens 7", "--tokens 7 needs a model of your own, not resnet20"),
        (
            "FILE:backward --input 4",
            "a pass of the model in train() mode with 4 examples raised Runtime",
        ),
        (
            "FILE:detached --input 4",
            "in train() mode with 4 examples raised RuntimeError: element 0",
        ),
        (
            "FILE:changed --input 4",
            "in train() mode with 4 examples raised RuntimeError: one of the var",
        ),
        (
            "FILE:single --input 4",
            "in train() mode with 4 examples raised RuntimeError: not in this way",
        ),
        ("FILE:lazy --input 4", "0.weight has no shape yet; call the model once in lazy()"),
        ("FILE:lazy_norm --input 4", "1.weight has no shape yet; call the model once in lazy_nor"),
        ("FILE:frozen --input 4", "no parameter that requires a gradient"),
        ("bad.py:build --input 3", "bad.py raised ZeroDivisionError: division by zero"),
        ("", "model"),
    ],
)
def test_bad_input_is_one_line(arguments, told, file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("1 / 0")
    with pytest.raises(SystemExit) as ended:
        check.main(arguments.replace("FILE", file()).split())
    output = capsys.readouterr()
    assert (ended.value.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert told in output.err


@pytest.mark.gate
def test_strategies_are_compared_under_mpi(file):
    """Oracle: a single process on the joined batches, by the program; the next test fails."""
    job = launch(2, *PROGRAM, f"{file()}:mixed", *MIXED)
    assert job.returncode == 0, job.stderr
    found = dict(re.findall(r"^  ([a-z-]+) +\S+  (ok|WRONG)$", job.stdout, re.MULTILINE))
    assert found == dict.fromkeys(["sgd", *comparison.STRATEGIES], "ok")
    assert "All right: 12 of 12 checked" in job.stdout


@pytest.mark.gate
def test_a_model_that_fails_in_eval_is_one_line_under_mpi(file):
    """Oracle: the line; strategies are compared in eval()."""
    job = launch(2, *PROGRAM, f"{file()}:training", "--input", "4")
    (line,) = [line for line in job.stderr.splitlines() if "mpikfac" in line]
    assert job.returncode == 2 and "Traceback" not in job.stderr
    assert "in eval() mode with 4 examples raised RuntimeError: not in this way" in line


@pytest.mark.slow
def test_a_model_that_cannot_be_distributed_is_seen_under_mpi(file):
    """Oracle: an embedding whose gradient depends on the rest of the batch."""
    job = launch(2, *PROGRAM, f"{file()}:Frequent", "--input", "4")
    assert job.returncode == 1
    assert f"WRONG: sgd, {', '.join(comparison.STRATEGIES)}\n" in job.stdout, job.stderr


def test_projections_of_attentions_are_checked(file, capsys):
    """Oracle: the arguments of `F.linear` inside attentions; orders by hand."""
    assert check.main([f"{file()}:attends", "--input", "3,4"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"first.in_proj +MultiheadAttention +A 3 x 5, G 3 x 4", text)
    assert re.search(r"second.out_proj +MultiheadAttention +A 4, G 4", text)
    assert "Not covered: nothing" in text
    assert "All right: 5 of 5 checked" in text


def test_attentions_to_others_and_cells_are_checked(file, capsys):
    """Oracle: the arguments of `F.linear`, with cells written out; layers by hand."""
    assert check.main([f"{file()}:translates", "--input", "3,4"]) == 0
    text = capsys.readouterr().out
    cells = [f"{cell}.{part}" for cell in ("cell", "gates") for part in ("ih", "hh")]
    sizes = [f"sizes.{part}_proj" for part in ("q", "k", "v", "in", "out")]
    names = [*cells, "others.in_proj", "others.out_proj", *sizes, "head"]
    assert verdicts(text) == dict.fromkeys(names, "ok")
    assert "Not covered: nothing" in text


@pytest.mark.slow
def test_attentions_with_dropout_are_compared_under_mpi(file):
    """Oracle: a single process on the joined batches, by the program."""
    job = launch(2, *PROGRAM, f"{file()}:translates", "--input", "3,4")
    assert job.returncode == 0, job.stdout
    assert "All right: 18 of 18 checked" in job.stdout


def test_a_projection_that_is_recorded_wrongly_is_seen(file, monkeypatch, capsys):
    """Oracle: the single changed number."""
    watch = ProjectionLayer.watch

    def wrong(self, *given):
        call = watch(self, *given)
        return call and (call[0] * (1 + 1e-6), call[1])

    monkeypatch.setattr(ProjectionLayer, "watch", wrong)
    assert check.main([f"{file()}:attends", "--input", "3,4"]) == 1
    assert "WRONG: A" in capsys.readouterr().out


def test_layers_without_dense_solves_are_no_news(caplog):
    """Oracle: the log, which has warnings again after the comparison."""
    log = logging.getLogger("mpikfac")
    with comparison.without_warnings():
        log.warning("K-FAC covers few weights")
    log.warning("a word to the user")
    assert caplog.messages == ["a word to the user"]
