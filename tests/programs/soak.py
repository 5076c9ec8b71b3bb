"""Trains under random faults, restarts every time, and compares the end with a quiet run's end.

    PYTHONPATH=tests python tests/programs/soak.py DIRECTORY [--minutes 30] [--every 20] [--seed 0]

A start gets 1, 2 or 4 ranks, and a fault after about `--every` seconds. As root, a fault may also
fill a disk. The exit code is 0 if every start ended as the fault demands and both runs end with
the same bits.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import torch

from mpikfac.checkpoint import latest_checkpoint, read_checkpoint
from support import attacks, launch

OPTIONS = (
    *(
        "--batch=120",
        "--transport.virtual_ranks=4",
        "--threads=1",
        "--epochs=100000",
        "--log_every=1",
        "--lr=0.01",
    ),
    *("--checkpoint_minutes=0.05", "--watchdog_timeout=5", "--resume=auto"),
)
DISK = "64m"
FULL = 8.0  # seconds that the disk is full
TO_THE_END = 20  # steps without a fault
PATIENCE = 200.0  # seconds; the first step, an evaluation or a checkpoint may take 50

Job = subprocess.Popen[str]


def kill(job: Job, run: Path, chance: random.Random) -> None:
    chance.choice(launch.processes(job)).kill()


def stop(job: Job, run: Path, chance: random.Random) -> None:
    chance.choice(launch.processes(job)).suspend()


def ask(job: Job, run: Path, chance: random.Random) -> None:
    number = chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
    ranks = launch.processes(job)
    for rank in chance.sample(ranks, chance.randint(1, len(ranks))):
        rank.send_signal(number)


def control_stop(job: Job, run: Path, chance: random.Random) -> None:
    (run / "control" / "stop").touch()


def control_checkpoint(job: Job, run: Path, chance: random.Random) -> None:
    (run / "control" / "checkpoint").touch()


def damage(job: Job, run: Path, chance: random.Random) -> None:
    """Spoil the newest checkpoint of several, and kill a rank."""
    kill(job, run, chance)
    job.wait(PATIENCE)
    found = sorted(path for path in (run / "checkpoints").glob("step-*[0-9]") if path.is_dir())
    if len(found) < 2:
        return
    file = chance.choice(sorted(found[-1].iterdir()))
    how = chance.choice(["flip", "cut", "delete", "replace"])
    if how == "replace":
        attacks.replace(file, chance)
    elif how == "delete":
        file.unlink()
    elif how == "cut":
        os.truncate(file, chance.randrange(file.stat().st_size))
    else:
        content = bytearray(file.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)


def litter(job: Job, run: Path, chance: random.Random) -> None:
    """Kill a rank, and leave links, pipes and files with names that checkpoints use."""
    kill(job, run, chance)
    job.wait(PATIENCE)
    outside = run.parent / "outside"
    outside.mkdir(exist_ok=True)
    for name in (".step-000000001.partial", ".step-000000002.deleted", "starts.json"):
        path = run / "checkpoints" / name
        if os.path.lexists(path):
            attacks.remove(path)
        chance.choice([os.mkfifo, Path.touch, lambda link: link.symlink_to(outside)])(path)


def fill(job: Job, run: Path, chance: random.Random) -> None:
    """Leave no room on the disk for a while."""
    filler = run.parent / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:  # the run writes meanwhile
            file.write(bytes(2**16))
    time.sleep(FULL)
    filler.unlink()


# A fault's effect on a run: the run dies, stops as asked, or goes on.
DIES, STOPS, GOES_ON = "dies", "stops", "goes on"
FAULTS: dict[str, tuple[Callable[[Job, Path, random.Random], None], str]] = {
    "kill -9": (kill, DIES),
    "SIGSTOP": (stop, DIES),
    "damage and kill -9": (damage, DIES),
    "litter and kill -9": (litter, DIES),
    "signal": (ask, STOPS),
    "control/stop": (control_stop, STOPS),
    "control/checkpoint": (control_checkpoint, GOES_ON),
    "full disk": (fill, GOES_ON),
}


class Soak:
    """A run, the run's starts, and the results of starts.

    Args:
        disk: the directory that may be filled, if the directory is a separate disk.
    """

    def __init__(self, disk: Path, logs: Path, faults: list[str], seed: int) -> None:
        self.run, self.logs, self.faults = disk / "run", logs, faults
        self.chance = random.Random(seed)
        self.began = time.monotonic()
        self.starts, self.wrong = 0, 0
        self.count: Counter[str] = Counter()
        self.lost: defaultdict[str, list[int]] = defaultdict(list)
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        self.last = ("", 0)  # the fault that ended the last start, and the start's last step

    def tell(self, text: str) -> None:
        """Print a line of the log."""
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def chaos(self, deadline: float, every: float) -> None:
        """Start the run again and again, until the deadline."""
        while time.monotonic() < deadline:
            with self.started(self.chance.choice([1, 2, 4])) as job:
                while job.poll() is None and time.monotonic() < deadline:
                    time.sleep(self.chance.uniform(0, 2 * every))
                    if job.poll() is None:
                        self.inject(job)
                if job.poll() is None:
                    job.send_signal(signal.SIGUSR1)
                    job.wait(PATIENCE)
                elif not self.last[0]:
                    self.complain(f"it ended with {job.returncode} though nothing was done")

    def inject(self, job: Job) -> None:
        """Inject a fault, and check that the job ends, or continues, as expected."""
        alone = len(launch.processes(job)) == 1  # nobody could report a stopped only rank
        name = self.chance.choice([name for name in self.faults if not alone or name != "SIGSTOP"])
        fault, effect = FAULTS[name]
        self.count[name] += 1
        self.tell(f"step {self.reached()}: {name}")
        sent = time.monotonic()
        fault(job, self.run, self.chance)
        if effect == GOES_ON:
            return
        job.wait(PATIENCE)
        self.took[name].append(time.monotonic() - sent)
        self.last = name, self.reached()
        if (job.returncode == 0) != (effect == STOPS):
            self.complain(f"{name}: exit code {job.returncode}")

    @contextmanager
    def started(self, ranks: int, *more: str) -> Iterator[Job]:
        """Yield a started run, once the run trains."""
        self.starts += 1
        log = self.logs / f"start-{self.starts}.txt"
        options = (*OPTIONS, f"--run_dir={self.run}", *more)
        with open(log, "w") as output, ExitStack() as stack:
            job = stack.enter_context(launch.start(ranks, *launch.TRAIN, *options, output=output))
            stack.callback(lambda: launch.kill(job) if job.poll() is None else None)
            while not (first := re.search(r"steps (\d+) to", log.read_text())):
                if job.poll() is not None:
                    raise SystemExit(f"it does not start again; see {log}")
                time.sleep(0.05)
            name, reached = self.last
            lost = reached - int(first[1])
            self.last = "", 0
            if name:
                self.lost[name].append(lost)
                if lost < 0 or (lost and FAULTS[name][1] == STOPS):
                    self.complain(f"{name}: {lost} steps lost")
            self.tell(f"start {self.starts}, {ranks} ranks, from step {first[1]}")
            yield job

    def complain(self, text: str) -> None:
        """Note an error."""
        self.wrong += 1
        self.tell(f"WRONG: {text}; see {self.logs}/start-{self.starts}.txt")

    def reached(self) -> int:
        """Return the last step in the run's metrics."""
        steps = re.findall(rb'"step": (\d+),', (self.run / "metrics.jsonl").read_bytes())
        return int(steps[-1]) if steps else 0

    def table(self) -> str:
        """Return counts, seconds to the end and lost steps, by kind of fault."""
        lines = [f"{'fault':20}{'times':>7}{'median s':>10}{'worst s':>9}{'lost steps':>12}"]
        for name in self.faults:
            took, lost = sorted(self.took[name]) or [0.0], sum(self.lost[name])
            middle = took[len(took) // 2]
            lines.append(f"{name:20}{self.count[name]:7}{middle:10.1f}{took[-1]:9.1f}{lost:12}")
        lines.append(f"{self.starts} starts, {self.wrong} times wrong")
        return "\n".join(lines)


@contextmanager
def small_disk(place: Path) -> Iterator[bool]:
    """Mount a small file system at `place`; yield False if mounting fails."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "mpikfac-soak", str(place)]
    mounted = subprocess.run(mount, stderr=subprocess.DEVNULL).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)


def quiet(run: Path, steps: int) -> None:
    """Train `steps` steps undisturbed."""
    options = (*OPTIONS, f"--run_dir={run}", f"--max_steps={steps}")
    with launch.start(4, *launch.TRAIN, *options, output=subprocess.DEVNULL) as job:
        job.wait()


def differences(one: Path, other: Path) -> list[str]:
    """Return names of trained items that differ between the newest checkpoints of two runs."""
    found, expected = (
        read_checkpoint(latest_checkpoint(run / "checkpoints")) for run in (one, other)
    )
    trained = {name for name in {*found, *expected} if not name.startswith("run/")}
    return sorted(name for name in trained if not same(found.get(name), expected.get(name)))


def same(one: object, other: object) -> bool:
    """Return whether two items are equal to the last bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def main() -> int:
    """Run the test; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--every", type=float, default=20, help="seconds between faults, on average"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    disk = given.directory / "disk"
    with small_disk(disk) as mounted:
        faults = [name for name in FAULTS if mounted or name != "full disk"]
        soak = Soak(disk, given.directory, faults, given.seed)
        soak.chaos(time.monotonic() + 60 * given.minutes, given.every)
        steps = read_checkpoint(latest_checkpoint(soak.run / "checkpoints")).step + TO_THE_END
        with soak.started(4, f"--max_steps={steps}") as job:
            if job.wait():
                soak.complain(f"the last start ended with {job.returncode}")
        soak.tell(f"complete after {steps} steps; now {steps} steps undisturbed")
        quiet(given.directory / "quiet", steps)
        differ = differences(soak.run, given.directory / "quiet")
    left = [p for p in psutil.process_iter(["cmdline"]) if str(disk) in (p.info["cmdline"] or [])]
    print(f"\n{soak.table()}")
    print(f"bits that differ from the quiet run's: {', '.join(differ) or 'none'}")
    return int(bool(soak.wrong or differ or left))


if __name__ == "__main__":
    sys.exit(main())
