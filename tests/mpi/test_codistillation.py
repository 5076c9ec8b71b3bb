"""Groups of ranks that learn from each other's predictions, with first-order steps and K-FAC."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import FirstOrderTrainer
from mpikfac.lab import Codistillation
from mpikfac.lab.codistillation.codistillation import divergence
from mpikfac.numerics import Arena
from mpikfac.plan import divisors
from support import inside, problem

pytestmark = pytest.mark.lab

GROUPS = divisors(mpikfac.world().size)
APART = [groups for groups in GROUPS if groups > 1] or [1]
RULE = {"burn_in": 2, "every": 3, "weight": 0.7}
STEPS = 9  # swaps after 2, 5 and 8 steps


def network(number, train_norm=False):
    """Return the test's network with the weights and running statistics of a group."""
    model = problem.network()
    generator = torch.Generator().manual_seed(number)
    for tensor in [*model.parameters(), model[1].running_mean, model[1].running_var]:
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
        tensor.data += 0.2 * noise.to(tensor)
    return model.train(train_norm)


def data(step, number):
    """Return the batch of a group; groups see different images."""
    return problem.batch(100 * number + step)


def optimizer_of(name, model):
    return {"SGD": problem.sgd, "AdamW": lambda m: torch.optim.AdamW(m.parameters(), 0.01)}[name](
        model
    )


def trained(comm, groups, steps=STEPS, optimizer="SGD", made=None, train_norm=False, **rule):
    """Train in groups, and return trainer and codistillation; `made` goes on."""
    rule = {**RULE, **rule}
    if made is None:
        model = network(comm.rank * groups // comm.size, train_norm)
        codistillation = Codistillation(model, comm, groups=groups, **rule)
        group = codistillation.group
        if optimizer == "K-FAC":
            trainer = problem.kfac(model, problem.sgd(model), group, **problem.SETTINGS)
            model.train()
            model[1].eval()
        else:
            trainer = FirstOrderTrainer(model, optimizer_of(optimizer, model), group)
        made = trainer, codistillation
    trainer, codistillation = made
    group = codistillation.group
    for step in range(codistillation.steps, codistillation.steps + steps):
        batch = data(step, codistillation.number)
        images, labels = (part.chunk(group.size)[group.rank] for part in batch)
        trainer.optimizer.zero_grad()
        outputs = trainer.model(images)
        loss = F.cross_entropy(outputs, labels)
        (loss + codistillation.term(images, outputs)).backward()
        trainer.step()
        codistillation.end_step()
    return made


def numbers(model):
    """Return parameters and running statistics as a vector."""
    tensors = [*model.parameters(), model[1].running_mean, model[1].running_var]
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def expected(groups, step_of, train_norm=False):
    """Return the models of all groups: the rule as a loop over models in one process."""
    models = [network(number, train_norm) for number in range(groups)]
    steps = [step_of(model) for model in models]
    for step in range(STEPS):
        if step in (2, 5, 8):
            stale = [network(number) for number in range(groups)]
            for old, model in zip(stale, models):
                old.load_state_dict(copy.deepcopy(model.state_dict()))
        for number, model in enumerate(models):
            images, labels = data(step, number)
            model.zero_grad()
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels)
            if step >= 2 and groups > 1:
                others = [m(images).softmax(1) for j, m in enumerate(stale) if j != number]
                mean = (sum(others) / (groups - 1)).detach()
                each = (mean * (mean.log() - outputs.log_softmax(1))).sum(1)
                loss = loss + 0.7 * each.mean()
            loss.backward()
            steps[number]()
    return models


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("groups", GROUPS)
def test_groups_follow_the_rule(comm, groups, optimizer):
    """Oracle: the rule [Anil et al. 2018] in torch, all models in one process."""
    trainer, codistillation = trained(comm, groups, optimizer=optimizer)
    models = expected(groups, lambda model: optimizer_of(optimizer, model).step)
    found, right = numbers(trainer.model), numbers(models[codistillation.number])
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_copies_normalise_with_the_peers_running_statistics(comm):
    """Oracle: the rule in torch; a group is a rank, whose normalisation is in train() mode."""
    trainer, _ = trained(comm, comm.size, train_norm=True)
    models = expected(comm.size, lambda model: problem.sgd(model).step, train_norm=True)
    found, right = numbers(trainer.model), numbers(models[comm.rank])
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    assert not torch.equal(models[0][1].running_mean, network(0)[1].running_mean)


def test_the_term_is_a_mean_over_batch_and_positions(comm):
    """Oracle: `torch.distributions`, and of a certain peer the cross-entropy."""
    torch.manual_seed(comm.rank)
    outputs, *peers = torch.randn(4, 5, 3, 2, 2, dtype=torch.float64)
    probabilities = [peer.softmax(1) for peer in peers]
    mean, own = (
        torch.distributions.Categorical(p.movedim(1, -1))
        for p in (sum(probabilities) / 3, outputs.softmax(1))
    )
    right = torch.distributions.kl_divergence(mean, own).mean()
    torch.testing.assert_close(divergence(probabilities, outputs), right)
    labels = torch.randint(0, 3, (5, 2, 2))
    certain = F.one_hot(labels, 3).movedim(-1, 1).double()
    torch.testing.assert_close(divergence([certain], outputs), F.cross_entropy(outputs, labels))


def test_several_arguments_of_a_model_are_a_tuple(comm):
    """Oracle: the single argument."""
    trainer, codistillation = trained(comm, GROUPS[-1], 3)
    images, _ = data(9, codistillation.number)
    outputs = trainer.model(images)
    found, right = (codistillation.term(given, outputs) for given in ((images,), images))
    assert torch.equal(found, right)
    assert bool(right > 0) == (comm.size > 1)


@pytest.mark.parametrize("groups", GROUPS)
def test_kfac_records_its_own_passes_alone(comm, groups):
    """Oracle: the rule in torch with K-FAC of a single rank, whose peers are plain networks."""
    alone = comm.Split(comm.rank)
    trainer, codistillation = trained(comm, groups, optimizer="K-FAC")

    def step_of(model):
        kfac = problem.kfac(model, problem.sgd(model), alone, **problem.SETTINGS)
        model.train()
        model[1].eval()
        return kfac.step

    models = expected(groups, step_of)
    found, right = numbers(trainer.model), numbers(models[codistillation.number])
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def test_a_copy_of_a_model_with_hooks_records_nothing(comm):
    """Oracle: the factors of training without the copy's passes, bit for bit."""
    factors = []
    for weight in (0.0, 1e-300):  # the term changes no bit of the loss
        model = network(0).train()
        model[1].eval()
        kfac = problem.kfac(model, problem.sgd(model), comm, **problem.SETTINGS)
        rule = {"burn_in": 0, "groups": comm.size, "weight": weight}
        codistillation = Codistillation(model, comm, **rule)
        images, labels = data(0, 0)
        outputs = model(images)
        (F.cross_entropy(outputs, labels) + codistillation.term(images, outputs)).backward()
        kfac.step()
        factors.append(inside.factors(kfac).flat.clone())
    assert codistillation.learning == (comm.size > 1)
    assert torch.equal(*factors)


@pytest.mark.parametrize("groups", GROUPS)
def test_without_weight_groups_train_apart(comm, groups):
    """Oracle: `FirstOrderTrainer` on the ranks of a group, bit for bit; a single group is plain."""
    number = comm.rank * groups // comm.size
    group, model = comm.Split(number), network(number)
    plain = FirstOrderTrainer(model, problem.sgd(model), group)
    for step in range(STEPS):
        images, labels = (part.chunk(group.size)[group.rank] for part in data(step, number))
        plain.optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        plain.step()
    trainer, codistillation = trained(comm, groups, weight=0.0 if groups > 1 else 0.7)
    assert torch.equal(numbers(trainer.model), numbers(model))
    assert not codistillation.trace.sent


@pytest.mark.parametrize("kind", ["SGD", "K-FAC"])
@pytest.mark.parametrize("steps", [1, 2, 4])  # in the burn-in, at its end, between two swaps
def test_a_loaded_state_goes_on_as_the_run(comm, tmp_path_factory, kind, steps):
    """Oracle: the run that was not interrupted, bit for bit; each group has a checkpoint."""
    groups = APART[0]
    first, codistillation = trained(comm, groups, steps, optimizer=kind)
    folder = comm.bcast(tmp_path_factory.mktemp("run") if comm.rank == 0 else None)
    state = first.state_dict() | codistillation.state_dict()
    root = folder / f"group-{codistillation.number}"
    path = mpikfac.save_checkpoint(codistillation.group, root, state, steps)
    second = trained(comm, groups, 0, optimizer=kind)
    checkpoint = mpikfac.load_checkpoint(codistillation.group, path)
    for part in second:
        part.load_state_dict(checkpoint)
    ends = [trained(comm, groups, 5, made=made)[0] for made in ((first, codistillation), second)]
    assert second[1].steps == steps + 5
    assert torch.equal(*(numbers(trainer.model) for trainer in ends))


@pytest.mark.skipif(mpikfac.world().size != 4, reason="needs two groups of two ranks")
def test_a_state_goes_on_with_fewer_ranks_in_a_group(comm):
    """Oracle: the run on all ranks, to rounding: gradients are added up in another order."""
    first = trained(comm, 2, 4)
    mine = first[0].state_dict() | first[1].state_dict()
    states = [comm.bcast(mine, root=root) for root in (0, 2)]
    pair = comm.Split(comm.rank % 2)  # ranks of two groups
    second = trained(pair, 2, 0)
    for part in second:
        part.load_state_dict(states[second[1].number])
    found, right = (
        numbers(trained(of, 2, 4, made=made)[0].model)
        for of, made in ((pair, second), (comm, first))
    )
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_groups_send_their_weights_at_swaps_alone(comm):
    """Oracle: the bytes of all parameters and buffers, and the steps of the rule."""
    groups = GROUPS[-1]
    made = trained(comm, groups, 0)
    codistillation = made[1]
    sent = []
    for _ in range(STEPS):
        codistillation.trace.clear()
        trained(comm, groups, 1, made=made)
        sent.append(sum(codistillation.trace.sent.values()))
    arena = codistillation._arena
    assert isinstance(arena, Arena)
    whole = arena.segment(0).nbytes * (groups > 1)
    assert sent == [0, whole, 0, 0, whole, 0, 0, whole, 0]
    assert arena.segment(0).nbytes >= numbers(made[0].model).nbytes
    assert arena.flat.nbytes == groups * arena.segment(0).nbytes
    assert len(codistillation.peers) == groups - 1


@pytest.mark.skipif(mpikfac.world().size == 1, reason="one rank cannot differ from itself")
def test_groups_that_differ_stop_together(comm):
    """Oracle: the message on all ranks."""
    with pytest.raises(mpikfac.UserError, match="ranks disagree on every: 1 on rank 0, 2 on rank"):
        Codistillation(network(0), comm, burn_in=1, groups=APART[0], every=1 + (comm.rank > 0))
    wider = nn.Linear(3, 2 + (comm.rank > 0))
    with pytest.raises(mpikfac.UserError, match="ranks disagree on the shape of weight"):
        Codistillation(wider, comm, burn_in=1, groups=APART[0])
    trainer, codistillation = trained(comm, APART[-1], 4)
    if codistillation.number == 1:
        trainer.model[0].weight.data[0] = torch.nan
    with pytest.raises(mpikfac.UserError, match="the weights of group 1 are not finite"):
        codistillation.end_step()


@pytest.mark.skipif(mpikfac.world().size == 1, reason="a single group has no peers")
def test_states_that_do_not_fit_are_refused_on_all_ranks(comm):
    """Oracle: the message, and the steps before."""
    _, codistillation = trained(comm, APART[0], 4)
    state = codistillation.state_dict()
    steps = {"codistillation/steps": 4 + codistillation.number}
    lacking = {name: item for name, item in state.items() if "5.bias" not in name}
    for wrong, text in (
        ({}, "item 'codistillation/steps' is missing; it must be a number"),
        ({**state, "codistillation/steps": -1}, "must be a whole number >= 0"),
        (lacking, r"item 'codistillation/peers/\d/5.bias' is missing; it must be float64 \[5\]"),
        (state | steps, "ranks disagree on codistillation/steps: 4 on rank 0, 5 on rank"),
    ):
        with pytest.raises(mpikfac.UserError, match=text):
            codistillation.load_state_dict(wrong)
        assert codistillation.steps == 4


def test_wrong_arguments_are_refused(comm):
    """Oracle: the message."""
    rule = {"burn_in": 1, "groups": 1}
    several = comm.size + 1
    for wrong, text in (
        ({"groups": several}, rf"groups={several} must divide the number of ranks \({comm.size}\)"),
        ({"groups": 0}, "groups=0 must be a whole number >= 1"),
        ({"burn_in": -1}, "burn_in=-1 must be a whole number >= 0"),
        ({"every": 2.5}, "every=2.5 must be a whole number >= 1"),
        ({"weight": -1.0}, "weight=-1.0 must be a finite number >= 0"),
    ):
        with pytest.raises(ValueError, match=text):
            Codistillation(network(0), comm, **{**rule, **wrong})
    with pytest.raises(ValueError, match="comm=None must be a communicator"):
        Codistillation(network(0), None, **rule)
    codistillation = Codistillation(network(0), comm, **rule)
    with pytest.raises(ValueError, match=r"term\(\) needs logits .* not \[12\]"):
        codistillation.term(problem.batch(0)[0], torch.zeros(12))


def test_a_changed_model_is_refused_at_the_swap(comm):
    """Oracle: the message; a single group has no swap."""
    _, codistillation = trained(comm, GROUPS[-1], 4)
    nn.utils.parametrizations.weight_norm(codistillation.model[5])
    if comm.size == 1:
        codistillation.end_step()
        return
    with pytest.raises(ValueError, match="parameters or buffers have changed"):
        codistillation.end_step()
