"""Frameworks train as a plain loop does: the programs of docs/guide/own_script.md."""

from __future__ import annotations

import importlib.util

import pytest

from support import own_script


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test without the packages."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"{' and '.join(missing)} not installed: bash jobs/test.sh --frameworks"
    return pytest.mark.skipif(bool(missing), reason=reason)


pytestmark = [pytest.mark.slow, pytest.mark.parametrize("ranks", [1, 2])]

COSINE = "lambda inner: torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=100)"
AUTOMATIC = f"""
expected = plain(schedule={COSINE})
compare(model, expected)
"""
BY_HAND = """
quiet = {"devices": 1, "logger": False, "enable_progress_bar": False}
trained = fresh()
lightning.Trainer(max_epochs=2, enable_checkpointing=False, **quiet).fit(ByHand(trained), loader)
compare(trained, expected)
"""
RESUMED = """
half = lightning.Trainer(max_epochs=1, enable_checkpointing=first, **quiet)
half.fit(Task(fresh()), loader)
if first:
    half.save_checkpoint("half.ckpt")
comm.Barrier()
trained = fresh()
rest = lightning.Trainer(max_epochs=2, enable_checkpointing=False, **quiet)
rest.fit(Task(trained), loader, ckpt_path="half.ckpt")
compare(trained, expected)
"""
ACCELERATE = """
compare(model, plain(epochs=1))
"""
WHOLE_BATCHES = """
loader = list(torch.utils.data.DataLoader(dataset, batch_size=8))[comm.rank :: comm.size]
compare(model, plain(epochs=1))
assert torch.distributed.is_initialized() == (comm.size > 1)
"""
TRANSFORMERS = """
loader = torch.utils.data.DataLoader(
    torch.utils.data.Subset(dataset, range(comm.rank, len(dataset), comm.size)), batch_size=8
)
falling = lambda inner: transformers.get_linear_schedule_with_warmup(inner, 0, 2 * len(loader))
compare(model, plain(max_norm=1.0, schedule=falling))
assert not torch.distributed.is_initialized()
"""
EQUAL = """
print("\\nequal")
"""


@pytest.fixture
def check(tmp_path, monkeypatch, ranks):
    """Return a function that runs programs of the page, each with an oracle behind."""

    def checked(*parts, **choices):
        job = own_script.run(tmp_path, ranks, [*parts], env=own_script.place(), **choices)
        assert job.stdout.splitlines().count("equal") == ranks * len(parts), job.stderr

    monkeypatch.chdir(tmp_path)
    return checked


@needs("lightning")
def test_lightning_trains_and_resumes_as_the_loop(check):
    """Oracle: the loop; automatic and manual optimisation; a run of two halves."""
    by_hand = "ByHand", BY_HAND + RESUMED + EQUAL
    check(("LightningModule", AUTOMATIC + EQUAL), by_hand)


@needs("lightning")
def test_lightning_with_ddp_trains_as_the_loop(check):
    """Oracle: the loop."""
    changed = {"devices=1, **speaks": 'devices=comm.size, strategy="ddp", logger=False'}
    check(("LightningModule", AUTOMATIC + EQUAL), changed=changed)


@needs("accelerate")
def test_accelerate_trains_as_the_loop(check):
    """Oracle: the loop."""
    check(("Accelerator", ACCELERATE + EQUAL))


@needs("accelerate")
def test_accelerate_with_ddp_trains_as_the_loop(check):
    """Oracle: the loop on the batches that Accelerate deals out in turn."""
    whole = "torch.utils.data.DataLoader(dataset, batch_size=8))"
    here = "Accelerator(cpu=True, device_placement=False)"
    changed = {"Accelerator()": here, "(model), loader)": f"(model), {whole}"}
    check(("Accelerator", WHOLE_BATCHES + EQUAL), changed=changed)


@needs("accelerate", "transformers")
def test_the_trainer_of_transformers_trains_as_the_loop(check):
    """Oracle: the loop; the Trainer takes examples in order."""
    order = "max_grad_norm=0, train_sampling_strategy='sequential'"
    check(("WithLoss", TRANSFORMERS + EQUAL), changed={"max_grad_norm=0": order})
