"""Asynchronous training: servers apply updates to the weights in order of arrival."""

from __future__ import annotations

import copy
import time
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpikfac
from mpikfac import (
    FirstOrderTrainer,
    Int8,
    MemOpt,
    Strategy,
    TensorParallelPlan,
    UserError,
)
from mpikfac.lab import AsyncSGD, ParameterServer
from support import inside, problem
from support.strategies import changed, strategy_of

RANKS = mpikfac.world().size
RATE, MOMENTUM, SIZE = 0.05, 0.9, 6

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(RANKS == 1, reason="one rank has no second rank to serve"),
]


def asynchronous(**choices):
    """Return the strategy of clients that send updates to servers."""
    return Strategy(MemOpt(), sync=ParameterServer(**choices))


def on_both(comm, model, optimizer, strategy, train):
    """Return what `train(trainer, ranks)` returns, and on servers what their function returns."""
    team = mpikfac.split_comm(comm, strategy.sync.servers)
    if team.comm is None:
        return mpikfac.lab.run_parameter_server(model, optimizer, team)
    trainer = AsyncSGD(model, optimizer, team, strategy)
    found = train(trainer, team.comm)
    for _ in range(2):  # a second call does nothing
        trainer.close()
    return found


def quadratic(client):
    """Return matrix and target of a client's loss `|A w - b|^2 / 2`."""
    random = np.random.default_rng(client)
    return random.normal(size=(8, SIZE)), random.normal(size=8)


def linear():
    """Return a model of the quadratic, and its optimizer."""
    model = nn.Linear(SIZE, 1, bias=False).double()
    nn.init.ones_(model.weight)
    model.to(problem.DEVICE)
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def in_turns(trainer, comm, order, clients, batches=1):
    """Take steps in the scripted order; return the weights that each step fetched.

    A client computes its gradient at once, and waits for its turn to push the gradient.
    """
    client = comm.rank // (comm.size // clients)
    matrix, target = (torch.tensor(part).to(problem.DEVICE) for part in quadratic(client))

    def gradient():
        trainer.optimizer.zero_grad()
        ((trainer.model(matrix)[:, 0] - target).square().sum() / 2).backward()

    gradient()
    fetched = []
    for turn in order:
        if turn == client:
            for _ in range(batches):
                trainer.step()
                gradient()
        weights = trainer.model.weight.detach().cpu().numpy()[0].copy()
        fetched.append(comm.bcast(weights, root=turn * (comm.size // clients)))
    return fetched


def expected(order, clients, batches=1, momentum=MOMENTUM):
    """Return the weights after each update, and staleness by client: the rule in numpy.

    Downpour SGD [Dean et al. 2012]: an update is the sum of the gradients of plain local steps.
    """
    losses = [quadratic(client) for client in range(clients)]
    w, v = np.ones(SIZE), np.zeros(SIZE)
    local, fetched = [w.copy() for _ in losses], [0] * clients
    found, staleness = [], [Counter() for _ in losses]
    for version, turn in enumerate(order):
        (a, b), update = losses[turn], np.zeros(SIZE)
        for _ in range(batches):
            g = a.T @ (a @ local[turn] - b)
            update += g
            local[turn] = local[turn] - RATE * g
        staleness[turn][version - fetched[turn]] += 1
        v = momentum * v + update
        w = w - RATE * v
        local[turn], fetched[turn] = w.copy(), version + 1
        found.append(w.copy())
    return found, staleness


def script(clients, length=12):
    """Return an order in which each client comes, some more often."""
    random = np.random.default_rng(3)
    return [*range(clients), *random.integers(clients, size=length).tolist(), *range(clients)]


@pytest.mark.parametrize("batches", [3, 1])
@pytest.mark.parametrize("servers", [1, 2])
def test_updates_follow_the_rule_in_order_of_arrival(comm, batches, servers):
    """Oracle: the rule in numpy: weights after each update, and the staleness of each update."""
    if servers >= comm.size:
        pytest.skip("no rank trains")
    clients = comm.size - servers
    strategy = asynchronous(servers=servers, push_interval=batches)
    order = script(clients)
    right, staleness = expected(order, clients, batches)

    def train(trainer, ranks):
        fetched = in_turns(trainer, ranks, order, clients, batches)
        np.testing.assert_allclose(fetched, right, rtol=1e-12, atol=1e-13)
        assert trainer.staleness == staleness[ranks.rank]
        assert trainer.version == max(i + 1 for i, turn in enumerate(order) if turn == ranks.rank)

    served = on_both(comm, *linear(), strategy, train)
    if served is not None:
        assert served == staleness


def expected_apart(order, clients, push, fetch):
    """Return a client's weights after each turn, and staleness: the published loop in numpy.

    Downpour SGD [Dean et al. 2012]: a client steps its weights, adds up gradients, sends the sum
    every `push` batches and fetches weights every `fetch` batches.
    """
    losses = [quadratic(client) for client in range(clients)]
    w, v, updates = np.ones(SIZE), np.zeros(SIZE), []
    local, sums, since = [w.copy() for _ in losses], np.zeros((clients, SIZE)), [0] * clients
    found, staleness, taken = [], [Counter() for _ in losses], [0] * clients
    for turn in order:
        a, b = losses[turn]
        g = a.T @ (a @ local[turn] - b)
        local[turn], sums[turn] = local[turn] - RATE * g, sums[turn] + g
        taken[turn] += 1
        if taken[turn] % push == 0:
            staleness[turn][sum(client != turn for client in updates[since[turn] :])] += 1
            v = MOMENTUM * v + sums[turn]
            w, sums[turn] = w - RATE * v, 0
            updates.append(turn)
        if taken[turn] % fetch == 0:
            local[turn], since[turn] = w.copy(), len(updates)
        found.append(local[turn])
    return found, staleness


@pytest.mark.parametrize(("push", "fetch"), [(2, 3), (3, 1), (1, 4)])
def test_updates_and_fetches_have_periods_of_their_own(comm, push, fetch):
    """Oracle: the published loop in numpy: weights after each turn, staleness, messages."""
    clients, strategy = comm.size - 1, asynchronous(push_interval=push, fetch_interval=fetch)
    order = script(clients, 30)
    right, staleness = expected_apart(order, clients, push, fetch)

    def train(trainer, ranks):
        found = in_turns(trainer, ranks, order, clients)
        np.testing.assert_allclose(found, right, rtol=1e-11, atol=1e-12)
        assert trainer.staleness == staleness[ranks.rank]
        size, turns = inside.gradients(trainer).layout.size * 8, order.count(ranks.rank)
        assert trainer.trace.sent["exchange updates"] == size * (turns // push)

    served = on_both(comm, *linear(), strategy, train)
    if served is not None:
        assert served == staleness


def network():
    """Return a network whose running statistics move, in float64."""
    return problem.network().train()


def steps(trainer, rank, ranks, numbers=range(4)):
    """Take steps on shards of the test's batches; each step with a rate of its own."""
    for step in numbers:
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        images, labels = problem.shards(step, ranks)[rank]
        trainer.optimizer.zero_grad()
        F.cross_entropy(trainer.model(images), labels).backward()
        trainer.votes[0] = step
        trainer.step()


def same(found, right):
    return found.keys() == right.keys() and all(torch.equal(found[n], right[n]) for n in right)


@pytest.mark.parametrize("make", [problem.sgd, problem.sgd_all, problem.adam])
def test_one_client_is_synchronous_training(comm, make):
    """Oracle: `FirstOrderTrainer` on the client's ranks, bit for bit, with running statistics."""
    model, right = network(), network()
    strategy = asynchronous(ranks_per_client=comm.size - 1)

    def train(trainer, ranks):
        steps(trainer, ranks.rank, ranks.size)
        trainer.average_replicas()
        assert trainer.combined and trainer.votes[0] == 3
        alone = FirstOrderTrainer(right, make(right), ranks)
        steps(alone, ranks.rank, ranks.size)
        assert same(model.state_dict(), right.state_dict())
        assert trainer.staleness == {0: 4}

    served = on_both(comm, model, make(model), strategy, train)
    assert served in (None, [{0: 4}])


@pytest.mark.parametrize(
    "choices",
    [{"transport.fusion": 1, "transport.overlap": True}, {"compression.gradients": Int8()}],
)
def test_a_clients_ranks_take_every_transport(comm, choices):
    """Oracle: `FirstOrderTrainer` on the client's ranks with the same transport, bit for bit."""
    model, right = network(), network()
    strategy = changed(asynchronous(ranks_per_client=comm.size - 1), choices)

    def train(trainer, ranks):
        steps(trainer, ranks.rank, ranks.size)
        alone = FirstOrderTrainer(right, problem.sgd(right), ranks, strategy_of(choices))
        steps(alone, ranks.rank, ranks.size)
        assert same(model.state_dict(), right.state_dict())

    on_both(comm, model, problem.sgd(model), strategy, train)


@pytest.mark.parametrize("push_every", [1, 2])
def test_a_scaled_loss_that_overflows_changes_nothing(comm, push_every):
    """Oracle: the same training without the overflow; the scale falls."""
    model, right = network().float(), network().float()
    strategy = asynchronous(push_interval=push_every, ranks_per_client=comm.size - 1)

    def scaled(trainer, ranks, overflows):
        scaler = torch.amp.GradScaler(problem.DEVICE.type, init_scale=2.0**10)
        for step in range(4):
            images, labels = problem.shards(step, ranks.size)[ranks.rank]
            trainer.optimizer.zero_grad()
            kept = [buffer.clone() for buffer in trainer.model.buffers()]
            scaler.scale(F.cross_entropy(trainer.model(images.float()), labels)).backward()
            if step in (1, 3):
                if not overflows:
                    for buffer, value in zip(trainer.model.buffers(), kept):
                        buffer.copy_(value)
                    continue
                trainer.model[0].weight.grad.fill_(torch.inf)
            trainer.step(scaler)
        trainer.average_replicas()
        return scaler.get_scale()

    def train(trainer, ranks):
        assert scaled(trainer, ranks, True) == 2.0**8
        alone = FirstOrderTrainer(right, problem.sgd(right), ranks)
        if push_every == 1:
            scaled(alone, ranks, False)
            parameters = zip(model.parameters(), right.parameters())
            assert all(torch.equal(*pair) for pair in parameters)
        assert all(tensor.isfinite().all() for tensor in model.state_dict().values())

    on_both(comm, model, problem.sgd(model), strategy, train)


def test_all_clients_hold_the_same_model_after_they_met(comm):
    """Oracle: the other clients; votes are means over clients, and every update was taken."""
    model = network()

    def train(trainer, ranks):
        steps(trainer, ranks.rank, ranks.size, range(3))
        assert not trainer.combined
        with pytest.raises(ValueError, match="call average_replicas"):
            trainer.state_dict()
        trainer.votes[1] = ranks.rank
        time.sleep(0.05 * ranks.rank)  # the first client waits for the others
        steps(trainer, ranks.rank, ranks.size, range(3, 4))
        trainer.average_replicas()
        assert trainer.combined and trainer.version == 4 * ranks.size
        assert trainer.votes[:2].tolist() == [3, (ranks.size - 1) / 2]
        states = ranks.allgather({name: t.cpu() for name, t in model.state_dict().items()})
        assert all(same(state, states[0]) for state in states)
        assert sum(sum(c.values()) for c in ranks.allgather(trainer.staleness)) == trainer.version

    on_both(comm, model, problem.sgd(model), asynchronous(), train)


@pytest.mark.parametrize("choices", [{}, {"push_interval": 3, "fetch_interval": 2}], ids=str)
def test_a_call_makes_all_clients_meet_after_the_same_step(comm, choices):
    """Oracle: the other clients; some are slower than the client that calls."""
    model = network()

    def train(trainer, ranks):
        met = []
        for step in range(40):
            if ranks.rank == 0 and step == 5:
                trainer.call()
            time.sleep(0.02 * ranks.rank)
            steps(trainer, ranks.rank, ranks.size, [step])
            met += [step] * trainer.combined
            if met:
                break
        assert len(set(ranks.allgather(tuple(met)))) == 1
        assert len(met) == 1 and 5 <= met[0] < 40

    on_both(comm, model, problem.sgd(model), asynchronous(**choices), train)


def test_a_call_after_going_back_makes_all_clients_meet_at_once(comm):
    """Oracle: two steps, as after a call without going back; 20 steps were taken back."""
    model = network()

    def train(trainer, ranks):
        trainer.average_replicas()
        state = copy.deepcopy(problem.whole_state(trainer, ranks))
        steps(trainer, ranks.rank, ranks.size, range(20))
        trainer.average_replicas()
        trainer.load_state_dict(state)
        trainer.call()
        for step in range(20):
            steps(trainer, ranks.rank, ranks.size, [step])
            if trainer.combined:
                break
        assert step <= 2

    on_both(comm, model, problem.sgd(model), asynchronous(), train)


@pytest.mark.parametrize("warm", [5, 50])
def test_a_warm_start_is_of_one_client(comm, warm):
    """Oracle: the number of updates of each client; a meeting ends the warm start."""
    model = network()

    def train(trainer, ranks):
        seen = []
        for step in range(8):
            steps(trainer, ranks.rank, ranks.size, [step])
            seen.append(trainer.version)
        trainer.average_replicas()
        if ranks.rank:  # the first step waits, and sends no update
            assert seen[0] >= min(warm, 8)
        assert sum(trainer.staleness.values()) == 8 - (ranks.rank > 0)

    on_both(comm, model, problem.sgd(model), asynchronous(warmup_updates=warm), train)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_state_goes_to_and_from_synchronous_training(comm, servers):
    """Oracle: a client that trains on without a pause, bit for bit; and `FirstOrderTrainer`."""
    if servers >= comm.size:
        pytest.skip("no rank trains")
    strategy = asynchronous(servers=servers, ranks_per_client=comm.size - servers)
    model, other = network(), network()
    with torch.no_grad():
        model[0].weight.mul_(0.9)

    def first(trainer, ranks):
        steps(trainer, ranks.rank, ranks.size, range(2))
        trainer.average_replicas()
        state = copy.deepcopy(ranks.bcast(trainer.state_dict()))
        steps(trainer, ranks.rank, ranks.size, range(2, 4))
        assert not trainer.missing(state)
        return state, copy.deepcopy(model.state_dict())

    kept = on_both(comm, model, problem.sgd(model), strategy, first)

    def second(trainer, ranks):
        state, right = kept
        trainer.load_state_dict(state)
        assert (trainer.steps, trainer.version) == (2, 2)
        steps(trainer, ranks.rank, ranks.size, range(2, 4))
        assert same(other.state_dict(), right)
        alone = network()
        synchronous = FirstOrderTrainer(alone, problem.sgd(alone), ranks)
        synchronous.load_state_dict(state)
        steps(synchronous, ranks.rank, ranks.size, range(2, 4))
        assert same(alone.state_dict(), right)
        trainer.average_replicas()
        trainer.load_state_dict(ranks.bcast(synchronous.state_dict()))
        assert (trainer.steps, trainer.version) == (4, 4)

    on_both(comm, other, problem.sgd(other), strategy, second)


def convolutions():
    """Return a model whose layers fall into two or three slices, and its optimizer."""
    torch.manual_seed(2)
    layers = [nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 12, 3, 2), nn.Flatten(), nn.Linear(48, 5)]
    model = nn.Sequential(*layers).double().to(problem.DEVICE)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


IN_SLICES = {"0": "outputs", "2": "inputs", "4": "inputs"}


@pytest.mark.parametrize("push_every", [1, 2])
def test_a_client_of_split_layers_is_a_client_of_one_rank(comm, push_every):
    """Oracle: an unsplit client of one rank with the same batches, to rounding, also from a state.

    The state of the split client goes to several clients, and to the client of one rank.
    """
    if comm.size < 3:
        pytest.skip("a client of one rank splits nothing")
    ways, choices = comm.size - 1, {"push_interval": push_every}
    strategy = asynchronous(ranks_per_client=ways, **choices)
    model, optimizer = convolutions()

    def on_shards(trainer, ranks, numbers):
        for step in numbers:
            images, labels = (
                part[:12].chunk(ranks.size)[ranks.rank] for part in problem.batch(step)
            )
            trainer.optimizer.zero_grad()
            F.cross_entropy(trainer.model(images), labels).backward()
            trainer.step()
        trainer.average_replicas()

    def split(trainer, ranks):
        on_shards(trainer, ranks, range(4))
        state = copy.deepcopy(ranks.bcast(trainer.state_dict()))
        on_shards(trainer, ranks, range(4, 6))
        return state, problem.state(model)

    team = mpikfac.split_comm(comm, 1)
    if team.comm is not None:
        layers = mpikfac.lab.split_layers(model, team.comm, TensorParallelPlan(ways, IN_SLICES))
    kept = on_both(comm, model, optimizer, strategy, split)
    if team.comm is not None:
        layers.detach()
    kept = comm.bcast(kept)

    def several(trainer, ranks):
        trainer.load_state_dict(kept[0])
        assert trainer.steps == 4
        on_shards(trainer, ranks, range(4, 6))
        assert trainer.version == 4 // push_every + 2 // push_every * ranks.size

    on_both(comm, *convolutions(), asynchronous(**choices), several)

    def alone(trainer, ranks):
        on_shards(trainer, ranks, range(4))
        for name, value in trainer.state_dict().items():
            if torch.is_tensor(value):
                torch.testing.assert_close(value, kept[0][name], rtol=1e-10, atol=1e-13)
        trainer.load_state_dict(kept[0])
        on_shards(trainer, ranks, range(4, 6))
        torch.testing.assert_close(problem.state(trainer.model), kept[1], rtol=1e-10, atol=1e-13)

    two = comm.Split(comm.rank in (0, comm.size - 1))
    if comm.rank in (0, comm.size - 1):
        on_both(two, *convolutions(), asynchronous(**choices), alone)
    two.Free()


def test_a_state_that_does_not_fit_changes_nothing(comm):
    """Oracle: the number of steps, and the line, on the ranks that hold the whole state, too."""
    if comm.size < 3:
        pytest.skip("one client cannot differ from itself")
    model = network()

    def train(trainer, ranks):
        whole = dict(trainer.state_dict()) | {"trainer/steps": 77}
        lacking = {name: value for name, value in whole.items() if name != "model/0.weight"}
        with pytest.raises(UserError, match="loading state"):
            trainer.load_state_dict(lacking if ranks.rank else whole)
        assert trainer.steps == 0
        with pytest.raises(UserError, match="the state contains gradient momentum"):
            trainer.load_state_dict(whole | {"kfac/momentum/0": torch.zeros(1)})

    on_both(comm, model, problem.sgd(model), asynchronous(), train)


def test_a_gradient_that_is_not_finite_changes_nothing(comm):
    """Oracle: `FirstOrderTrainer` on the client's ranks."""
    model, right = network(), network()
    strategy = asynchronous(ranks_per_client=comm.size - 1)

    def broken(trainer, ranks):
        steps(trainer, ranks.rank, ranks.size, range(1))
        images, labels = problem.shards(1, ranks.size)[ranks.rank]
        trainer.optimizer.zero_grad()
        F.cross_entropy(trainer.model(images), labels).backward()
        if ranks.rank == 0:
            trainer.model[3].weight.grad[0] = torch.nan
        trainer.step()
        steps(trainer, ranks.rank, ranks.size, range(2, 3))

    def train(trainer, ranks):
        broken(trainer, ranks)
        broken(FirstOrderTrainer(right, problem.sgd(right), ranks), ranks)
        assert same(model.state_dict(), right.state_dict())

    on_both(comm, model, problem.sgd(model), strategy, train)


def test_running_statistics_are_means_over_clients_in_order_of_arrival(comm):
    """Oracle: the rule in numpy: a mean moves towards a client's by 1 over the clients."""
    clients = comm.size - 1
    order, momentum = script(clients), 0.1
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double().to(problem.DEVICE)

    def batch(client):
        return torch.tensor(quadratic(client)[0].reshape(-1, 1)).to(problem.DEVICE)

    def train(trainer, ranks):
        right, seen = 0.0, [0.0] * clients
        for turn in order:
            means = [
                (1 - momentum) * x + momentum * float(batch(c).mean()) for c, x in enumerate(seen)
            ]
            right += (means[turn] - right) / clients
            seen[turn] = right
            if turn == ranks.rank:
                trainer.optimizer.zero_grad()
                trainer.model(batch(ranks.rank)).square().sum().backward()
                trainer.step()
            found = ranks.bcast(float(model[0].running_mean), root=turn)
            assert found == pytest.approx(right, rel=1e-12)

    on_both(comm, model, torch.optim.SGD(model.parameters(), lr=0.0), asynchronous(), train)


@pytest.mark.parametrize("push_every", [1, 2])
def test_an_update_goes_once_to_the_servers(comm, push_every):
    """Oracle: the numbers of the model and of votes, with padding, in every push."""
    model = network()

    def train(trainer, ranks):
        size = inside.gradients(trainer).layout.size * 8
        for step in range(4):
            trainer.trace.clear()
            steps(trainer, ranks.rank, ranks.size, [step])
            sent = trainer.trace.sent["exchange updates"]
            assert sent == size * ((step + 1) % push_every == 0)
        trainer.average_replicas()

    on_both(comm, model, problem.sgd(model), asynchronous(push_interval=push_every), train)


@pytest.mark.parametrize(
    ("choices", "make", "said"),
    [
        ({"servers": 2}, problem.sgd, "servers=2, but the team has 1; pass the result"),
        (
            {"ranks_per_client": 9},
            problem.sgd,
            "ranks_per_client=9 must divide the number of ranks",
        ),
        ({"push_interval": 2}, problem.adam, "push_interval=2 needs the optimizer SGD, not Adam"),
        (
            {"fetch_interval": 3},
            problem.adam,
            "fetch_interval=3 needs the optimizer SGD, not Adam",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(comm, choices, make, said):
    """Oracle: the message; nothing is sent before."""
    team, model = mpikfac.split_comm(comm, 1), network()
    if team.comm is not None:
        with pytest.raises(ValueError, match=said):
            AsyncSGD(model, make(model), team, asynchronous(**choices))
        with pytest.raises(ValueError, match="run_parameter_server.. is for the servers that"):
            mpikfac.lab.run_parameter_server(model, make(model), team)
    comm.Barrier()


def test_other_trainers_refuse_updates(comm):
    """Oracle: the message."""
    model = network()
    for make in (FirstOrderTrainer, mpikfac.KFAC):
        with pytest.raises(ValueError, match="needs the trainer mpikfac.lab.AsyncSGD"):
            make(model, problem.sgd(model), comm, asynchronous())


def test_new_parameters_end_the_training(comm):
    """Oracle: the message."""
    model = network()
    strategy = asynchronous(ranks_per_client=comm.size - 1)

    def train(trainer, ranks):
        model[0].weight.requires_grad_(False)
        with pytest.raises(mpikfac.UserError, match="asynchronous training needs the same param"):
            steps(trainer, ranks.rank, ranks.size, [0])

    on_both(comm, model, problem.sgd(model), strategy, train)
