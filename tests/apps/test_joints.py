"""Options that choose a type, for made-up types of a journey."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from mpikfac.plan.choices.choice import Choice
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.documents import flattened
from mpikfac_apps.options.fields import build, flat, inline
from mpikfac_apps.options.sources import Presets


@dataclass(frozen=True)
class Fuel(Choice):
    """What drives a car."""


@dataclass(frozen=True)
class Petrol(Fuel):
    """Burn petrol.

    Attributes:
        octane: the number on the pump.
    """

    name: ClassVar[str] = "petrol"
    octane: int = 95


@dataclass(frozen=True)
class Battery(Fuel):
    """Take electricity along.

    Attributes:
        capacity: kilowatt-hours.
    """

    name: ClassVar[str] = "battery"
    capacity: float = 50.0

    def __post_init__(self) -> None:
        if self.capacity <= 0:
            raise ValueError(f"capacity={self.capacity} must be a number above 0")


@dataclass(frozen=True)
class Vehicle(Choice):
    """How to travel."""


@dataclass(frozen=True)
class Bicycle(Vehicle):
    """Ride a bicycle.

    Attributes:
        gears: the number of gears.
    """

    name: ClassVar[str] = "bicycle"
    gears: int = 3


@dataclass(frozen=True)
class Car(Vehicle):
    """Drive a car.

    Attributes:
        seats: the number of seats.
        fuel: what drives the car.
    """

    name: ClassVar[str] = "car"
    seats: int = 4
    fuel: Fuel = Petrol()


@dataclass(frozen=True)
class Boot:
    """The boot.

    Attributes:
        spare: what drives the car when the fuel is used up.
    """

    spare: Fuel | None = None


@dataclass(frozen=True)
class Journey:
    """Travel.

    Args:
        style: a usual way to travel.
        vehicle: how to travel.
        boot: what is taken along.
        days: the number of days.
    """

    style: str = "plain"
    vehicle: Vehicle = Car(seats=5)
    boot: Boot = field(default_factory=Boot)
    days: int = 1


@dataclass(frozen=True)
class Plan:
    """Plan a journey.

    Args:
        journey: the journey.
    """

    journey: Journey = inline(Journey)


STYLES = {
    "plain": Journey(),
    "sporty": Journey("sporty", Bicycle(gears=21)),
    "green": Journey("green", Car(seats=2, fuel=Battery(capacity=80.0)), Boot(Battery())),
}


def style(name: str) -> dict[str, object]:
    values = flat(STYLES[name]) if name in STYLES else {}
    return {key: value for key, value in values.items() if key.startswith(("vehicle.", "boot."))}


LINE = CommandLine("travel", Plan, ("days", "vehicle.type"), files=True)
STYLED = CommandLine("travel", Plan, files=True, presets=Presets("style", style))


def journey(*arguments: str, line: CommandLine[Plan] = LINE) -> Journey:
    return line.read(arguments).journey


def file(path: Path, text: str) -> str:
    path.write_text(text)
    return f"--config={path}"


def test_defaults_are_those_of_the_default_value() -> None:
    assert journey() == Journey()
    assert journey("--vehicle.seats=6").vehicle == Car(seats=6)
    assert journey("--vehicle", "car", "--vehicle.fuel.octane=98").vehicle == Car(
        seats=5, fuel=Petrol(98)
    )


@pytest.mark.parametrize("name", ["--vehicle", "--vehicle.type"])
def test_a_name_chooses_the_type(name: str) -> None:
    assert journey(name, "bicycle").vehicle == Bicycle()
    assert journey(f"{name}=bicycle", "--vehicle.gears", "7").vehicle == Bicycle(7)


def test_types_have_joints_of_their_own() -> None:
    arguments = ["--vehicle.fuel", "battery", "--vehicle.fuel.capacity", "60"]
    assert journey(*arguments).vehicle == Car(seats=5, fuel=Battery(60.0))
    assert journey("--boot.spare", "battery").boot == Boot(Battery())
    assert journey("--boot.spare", "null").boot == Boot()


@pytest.mark.parametrize(
    "text",
    [
        "vehicle: {type: car, fuel: {type: battery, capacity: 60}}",
        "vehicle: {fuel: battery, fuel.capacity: 6e1}",
        "vehicle.fuel: battery\nvehicle.fuel.capacity: 60",
    ],
)
def test_files_name_types(tmp_path: Path, text: str) -> None:
    read = journey(file(tmp_path / "journey.yaml", text)).vehicle
    assert isinstance(read, Car)
    assert read.fuel == Battery(60.0)


def test_a_later_type_leaves_out_the_options_of_the_type_before(tmp_path: Path) -> None:
    given = file(tmp_path / "a.yaml", "vehicle: {type: bicycle, gears: 7}\ndays: 3")
    assert journey(given) == Journey(vehicle=Bicycle(7), days=3)
    assert journey(given, "--vehicle=car").vehicle == Car(seats=5)
    other = file(tmp_path / "b.yaml", "vehicle: {type: car, fuel: battery}")
    assert journey(given, other).vehicle == Car(seats=5, fuel=Battery())
    spare = file(tmp_path / "c.yaml", "boot: {spare: {type: battery, capacity: 9}}")
    assert journey(spare, "--boot.spare=null").boot == Boot()


def test_options_of_a_file_without_a_type_belong_to_the_last_type(tmp_path: Path) -> None:
    given = file(tmp_path / "a.yaml", "vehicle: {gears: 7}")
    assert journey("--vehicle=bicycle", given).vehicle == Bicycle(7)
    assert journey(given, "--vehicle=bicycle").vehicle == Bicycle(7)


def test_a_preset_comes_before_files(tmp_path: Path) -> None:
    given = file(tmp_path / "a.yaml", "style: green\nvehicle.seats: 3")
    assert journey("--style=green", line=STYLED) == STYLES["green"]
    assert journey(given, line=STYLED).vehicle == Car(seats=3, fuel=Battery(80.0))
    assert journey(given, "--vehicle.fuel=petrol", line=STYLED).vehicle == Car(3, Petrol())
    assert journey(given, "--vehicle=bicycle", line=STYLED).vehicle == Bicycle()
    assert journey("--style=green", "--boot.spare=null", line=STYLED).boot == Boot()


def test_another_preset_leaves_out_the_options_of_the_preset_before(tmp_path: Path) -> None:
    given = file(tmp_path / "a.yaml", "style: green\nvehicle.seats: 3\ndays: 2")
    assert journey(given, "--style=sporty", line=STYLED) == Journey("sporty", Bicycle(21), days=2)
    assert journey(given, "--style=green", line=STYLED).vehicle == Car(3, Battery(80.0))
    short = file(tmp_path / "b.yaml", "style: green\nvehicle: car")
    assert journey(short, "--style=sporty", line=STYLED).vehicle == Bicycle(21)


def test_kept_options_come_before_files(tmp_path: Path) -> None:
    kept = flat(Plan(Journey(vehicle=Bicycle(7), days=3)))
    assert LINE.read([], kept).journey == Journey(vehicle=Bicycle(7), days=3)
    assert LINE.read(["--vehicle.gears=8"], kept).journey.vehicle == Bicycle(8)
    assert LINE.read(["--vehicle=car"], kept).journey == Journey(days=3)
    given = file(tmp_path / "a.yaml", "vehicle: car")
    assert LINE.read([given], kept).journey.vehicle == Car(seats=5)
    assert STYLED.read(["--style=sporty"], kept).journey.vehicle == Bicycle(21)


BAD = {
    "option of another type": (
        "--vehicle.gears=7",
        "vehicle.gears belongs to vehicle=bicycle, not to vehicle=car",
    ),
    "option of another type inside": (
        "--vehicle.fuel.capacity=7",
        "vehicle.fuel.capacity belongs to vehicle.fuel=battery, not to vehicle.fuel=petrol",
    ),
    "option of no type": (
        "--boot.spare.octane=7",
        "boot.spare.octane belongs to boot.spare=petrol, not to boot.spare=null",
    ),
    "joint of another type": (
        "--vehicle=bicycle --vehicle.fuel=battery",
        "vehicle.fuel belongs to vehicle=car, not to vehicle=bicycle",
    ),
    "misspelt option": (
        "--vehicle=bicycle --vehicle.gaers=7",
        "unknown key vehicle.gaers; did you mean vehicle.gears?",
    ),
    "misspelt option of another type": (
        "--vehicle.gaers=7",
        "unknown key vehicle.gaers; did you mean vehicle.gears?",
    ),
    "option without its joint": ("--gears=7", "unknown key gears; did you mean vehicle.gears?"),
    "misspelt type": (
        "--vehicle=bicycel",
        "vehicle=bicycel must be one of bicycle, car, FILE.py:CLASS; did you mean bicycle?",
    ),
    "no type": ("--vehicle=null", "vehicle=null must be one of bicycle, car, FILE.py:CLASS"),
    "a number for a type": ("vehicle: 3\n", "vehicle=3 must be one of bicycle, car, FILE.py:CLASS"),
    "type without a name": ("--vehicle", "vehicle=true must be one of bicycle, car, FILE.py:CLASS"),
    "value of a type": (
        "--boot.spare=battery --boot.spare.capacity=0",
        "boot.spare.capacity=0.0 must be a number above 0",
    ),
    "text for a number": (
        "--vehicle.seats=few",
        "vehicle.seats=few must be a whole number",
    ),
    "option of another type in a file": (
        "days: 3\nvehicle:\n  gears: 7\n",
        "line 3: vehicle.gears belongs to vehicle=bicycle, not to vehicle=car",
    ),
    "misspelt option in a file": (
        "vehicle: {type: bicycle, gaers: 7}\n",
        "line 1: unknown key vehicle.gaers; did you mean vehicle.gears?",
    ),
    "value for a group": ("boot: 3\n", "boot must have lines of the form `key: value`"),
    "own type without a file": (
        "--vehicle=missing.py:Train",
        "vehicle=missing.py:Train: missing.py is not a file",
    ),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD)
def test_one_line_tells_what_is_wrong(tmp_path: Path, given: str, message: str) -> None:
    arguments = [file(tmp_path / "a.yaml", given)] if given.endswith("\n") else given.split()
    with pytest.raises(ValueError) as refused:
        LINE.read(arguments)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


ALL = [
    Journey(),
    Journey(vehicle=Bicycle(7)),
    Journey(vehicle=Car(fuel=Battery(1.5)), boot=Boot(Petrol(91)), days=4),
]


@pytest.mark.parametrize("value", ALL, ids=repr)
def test_options_survive_a_mapping(value: Journey) -> None:
    assert build(Plan, flat(Plan(value))) == Plan(value)


def test_printed_options_are_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--vehicle.fuel=battery", "--vehicle.seats=2"]
    with pytest.raises(SystemExit):
        LINE.read([*arguments, "--print_config"])
    text = capsys.readouterr().out
    assert flattened(yaml.safe_load(text)) == flat(LINE.read(arguments))
    assert LINE.read([file(tmp_path / "a.yaml", text)]) == LINE.read(arguments)


def test_help_shows_the_options_of_the_chosen_types(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, present, absent in (
        (["--help_all"], ["--vehicle NAME", "--vehicle.seats", "octane"], ["gears", "capacity"]),
        (["--vehicle=bicycle", "--help_all"], ["--vehicle.gears GEARS"], ["seats", "octane"]),
        (["--help"], ["--vehicle NAME", "one of bicycle, car", "--days"], ["seats"]),
    ):
        with pytest.raises(SystemExit):
            LINE.answer(arguments)
        text = capsys.readouterr().out
        assert all(word in text for word in present)
        assert not any(word in text for word in absent)
        assert "vehicle.type" not in text


def test_names_are_checked_before_values() -> None:
    LINE.answer(["--vehicle=bicycle", "--vehicle.gears=7", "--boot.spare.octane=x"])
    LINE.answer(["--vehicle=mine.py:Train", "--vehicle.wagons=7"])
    LINE.answer(["--vehicle.fuel=battery", "--vehicle.fuel.capacity=7"])  # a type inside a type
    with pytest.raises(ValueError, match=r"unknown key vehicle\.wagons"):
        LINE.answer(["--vehicle.wagons=7"])


OWN = f'''
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from {__name__} import Fuel, Petrol, Vehicle

@dataclass(frozen=True)
class Train(Vehicle):
    """Take a train.

    Attributes:
        wagons: the number of wagons.
    """

    wagons: int = 9
    fuel: Fuel = Petrol()

class Dog:
    pass
'''


def test_files_may_have_the_same_name(tmp_path: Path) -> None:
    """Oracle: the classes; each file imports the types of its annotations itself."""
    for folder in ("a", "b"):
        file = tmp_path / folder / "same.py"
        file.parent.mkdir()
        file.write_text(OWN if folder == "b" else "class Train: pass")
    with pytest.raises(ValueError, match="same.py"):
        LINE.read([f"--vehicle={tmp_path}/a/same.py:Train"])
    read = LINE.read([f"--vehicle={tmp_path}/b/same.py:Train", "--vehicle.wagons=3"])
    assert flat(read)["vehicle.wagons"] == 3


def test_a_type_may_come_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    arguments = ["--vehicle=mine.py:Train", "--vehicle.wagons=3", "--vehicle.fuel=battery"]
    read = LINE.read(arguments)
    values = {"vehicle.type": "mine.py:Train", "vehicle.wagons": 3, "vehicle.fuel.type": "battery"}
    assert flat(read).items() >= values.items()
    assert build(Plan, flat(read)) == read
    assert LINE.read(["--vehicle=mine.py:Train"], flat(read)) == read
    with pytest.raises(ValueError, match=r"vehicle=mine.py:Train would run mine.py; if you trust"):
        LINE.read([], flat(read))
    (tmp_path / "typo.py").write_text(OWN.replace("wagons: int", "wagons: Int"))
    with pytest.raises(ValueError, match=r"Train has an unknown annotation: name 'Int'"):
        LINE.read(["--vehicle=typo.py:Train"])
    with pytest.raises(ValueError, match=r"mine\.py:Dog must be a class derived from Vehicle"):
        LINE.read(["--vehicle=mine.py:Dog"])
    with pytest.raises(ValueError, match="mine.py has no class 'Plane'"):
        LINE.read(["--vehicle=mine.py:Plane"])
    with pytest.raises(ValueError, match=r"did you mean vehicle\.wagons"):
        LINE.read(["--vehicle=mine.py:Train", "--vehicle.wagon=3"])
