"""The recipes, the extras, and the archives of a release agree with setup.cfg and the folders."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PACKAGES = {"mpikfac": ROOT / "mpikfac", "mpikfac_apps": ROOT / "apps" / "mpikfac_apps"}
SPACK = {"python": "python"}  # all further packages are py-NAME
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
OF_SIGNATURES = "docstring_parser"  # conda has no extras: the part of [signatures] in use
NO_SOURCE = ("*.egg-info", ".*", "__pycache__", "build", "dist", "runs", "site", "soak")


def setup() -> configparser.ConfigParser:
    """Return setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements(section: str, key: str) -> list[Requirement]:
    """Return the requirements of an option of setup.cfg."""
    return [Requirement(line) for line in setup()[section][key].split()]


def extras() -> dict[str, list[Requirement]]:
    """Return the requirements of all extras."""
    return {
        name: requirements("options.extras_require", name)
        for name in setup()["options.extras_require"]
    }


def least(requirement: Requirement) -> str:
    """Return the least version of a requirement."""
    (specifier,) = requirement.specifier
    assert specifier.operator == ">="
    return specifier.version


def pins() -> dict[str, str]:
    """Return the tested versions by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pinned}


# -- recipes -------------------------------------------------------------------------------------


def spack_recipe(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, object]]]:
    """Return the calls of Spack's recipe by the name of the called function.

    Spack's modules are stand-ins that note calls: the first argument, and `type` or the condition.
    """
    calls: dict[str, list[tuple[str, object]]] = {}
    conditions: list[str] = []

    def noted(name: str):
        def note(first: str, **named: object) -> None:
            calls.setdefault(name, []).append((first, named.get("type"), *conditions))

        return note

    @contextmanager
    def when(condition: str) -> Iterator[None]:
        conditions.append(condition)
        yield
        conditions.pop()

    package = ModuleType("spack.package")
    for name in ("depends_on", "license", "variant", "version"):
        setattr(package, name, noted(name))
    package.when = when
    system = ModuleType("spack_repo.builtin.build_systems.python")
    system.PythonPackage = object
    parents = ("spack", "spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems")
    modules = [*map(ModuleType, parents), package, system]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    source = ROOT / "packaging" / "spack" / "package.py"
    exec(compile(source.read_text(), source, "exec"), {"__name__": "package"})
    return calls


def spack_words(requirement: Requirement) -> str:
    """Return a requirement in the words of Spack."""
    name = requirement.name.lower().replace("_", "-")
    variants = "".join(f"+{extra}" for extra in sorted(requirement.extras))
    return f"py-{name}@{least(requirement)}:{variants}"


def test_the_recipe_of_spack_asks_for_what_setup_cfg_asks_for(monkeypatch):
    """Oracle: setup.cfg and pyproject.toml; the recipe is executed with stand-ins for Spack."""
    calls = spack_recipe(monkeypatch)
    both = ("build", "run")
    library = [(spack_words(each), both) for each in requirements("options", "install_requires")]
    programs = [(spack_words(each), both, "+apps") for each in extras()["apps"]]
    python = setup()["options"]["python_requires"].removeprefix(">=")
    builds = [(f"python@{python}:", both), (f"py-setuptools@{of_build()}:", "build")]
    assert calls["depends_on"] == builds + library + programs
    assert [first for first, *_ in calls["version"]] == [setup()["metadata"]["version"]]
    assert [first for first, *_ in calls["license"]] == [setup()["metadata"]["license_expression"]]


def of_build() -> str:
    """Return the least setuptools of pyproject.toml."""
    (version,) = re.findall(r'requires = \["setuptools>=(\d+)"\]', pyproject())
    return version


def pyproject() -> str:
    """Return pyproject.toml."""
    return (ROOT / "pyproject.toml").read_text()


def test_the_recipe_of_conda_asks_for_what_setup_cfg_asks_for():
    """Oracle: setup.cfg and pyproject.toml."""
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "meta.yaml").read_text())
    python = f"python {setup()['options']['python_requires']}"
    wanted = [*requirements("options", "install_requires"), *extras()["apps"]]
    runs = [f"{CONDA.get(each.name, each.name.lower())} {each.specifier}" for each in wanted]
    assert set(recipe["requirements"]["run"]) == {python, OF_SIGNATURES, *runs}
    assert recipe["requirements"]["host"] == [python, "pip", f"setuptools >={of_build()}"]
    about = setup()["metadata"]
    assert recipe["package"] == {"name": about["name"], "version": about["version"]}
    assert recipe["about"]["license"] == about["license_expression"]
    assert recipe["about"]["summary"] == about["description"]
    (script,) = setup()["options.entry_points"]["console_scripts"].strip().splitlines()
    assert recipe["build"]["entry_points"] == [script]
    assert (ROOT / "packaging" / "conda" / recipe["source"]["path"] / "setup.cfg").samefile(
        ROOT / "setup.cfg"
    )


# -- extras --------------------------------------------------------------------------------------


def described() -> dict[str, set[str]]:
    """Return the extras of the page about packaging, each with the packages without a pin."""
    page = (ROOT / "packaging" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*)\|$", page, re.MULTILINE)
    return {name: set(re.findall(r"[\w-]+", unpinned)) for name, unpinned in rows}


def test_every_extra_is_described_once():
    """Oracle: setup.cfg, in the same order."""
    assert list(described()) == list(extras())


@pytest.mark.parametrize("extra", extras())
def test_an_extra_has_tested_versions(extra):
    """Oracle: constraints.txt; packages without a tested version stand in the table of extras."""
    unpinned = set()
    for requirement in extras()[extra]:
        version = pins().get(canonicalize_name(requirement.name))
        if version is None:
            unpinned.add(requirement.name)
        else:
            assert requirement.specifier.contains(version), requirement
    assert unpinned == described()[extra]


@pytest.mark.parametrize("extra", ["", *extras()])
def test_what_an_extra_brings_has_tested_versions_that_fit(extra):
    """Oracle: the metadata of installed packages, from package to package; constraints.txt."""
    first = extras()[extra] if extra else requirements("options", "install_requires")
    loose, torn = set(), set()
    for requirement in needed(first):
        version = pins().get(canonicalize_name(requirement.name))
        if version is None:
            loose.add(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            torn.add(str(requirement))
    assert torn == set()
    assert loose <= {"torchvision", *described().get(extra, ())}


def needed(first: list[Requirement]) -> Iterator[Requirement]:
    """Return requirements with all further requirements of installed packages."""
    waiting, seen = list(first), set()
    while waiting:
        requirement = waiting.pop()
        yield requirement
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            lines = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue
        for further in map(Requirement, lines):
            chosen = ({"extra": extra} for extra in ("", *requirement.extras))
            if further.marker is None or any(map(further.marker.evaluate, chosen)):
                waiting.append(further)


# -- archives ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[zipfile.ZipFile, tarfile.TarFile]:
    """Return the wheel and the source archive, both built from a copy of the project."""
    copy = tmp_path_factory.mktemp("release") / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NO_SOURCE, "tests"))
    shutil.copytree(ROOT / "tests" / "unit", copy / "tests" / "unit")
    (copy / "tests" / "test_version.py").write_text("")
    build = "from setuptools import build_meta as b; b.build_wheel('out'); b.build_sdist('out')"
    ended = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (wheel,), (source,) = (list((copy / "out").glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    return zipfile.ZipFile(wheel), tarfile.open(source)


def sources() -> Mapping[str, Path]:
    """Return the files of both packages by their names in a wheel."""
    return {
        f"{name}/{path.relative_to(folder)}": path
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.mark.gate
def test_the_wheel_has_every_file_of_the_packages(archives):
    """Oracle: the folders, byte for byte."""
    wheel, _ = archives
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(sources())
    assert all(wheel.read(name) == path.read_bytes() for name, path in sources().items())


@pytest.mark.gate
def test_the_wheel_tells_licence_version_and_command(archives):
    """Oracle: setup.cfg; the core metadata of packages, version 2.4."""
    wheel, _ = archives
    (about,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    told = HeaderParser().parsestr(wheel.read(about).decode())
    assert told["License-Expression"] == "MIT" and told["License"] is None
    assert told["License-File"] == "LICENSE"
    assert told["Version"] == setup()["metadata"]["version"]
    assert told.get_all("Provides-Extra") == list(extras())
    assert not any(line.startswith("License ::") for line in told.get_all("Classifier"))
    entries = wheel.read(about.replace("METADATA", "entry_points.txt")).decode()
    assert "mpikfac = mpikfac_apps.__main__:command" in entries
    assert "mpikfac/py.typed" in wheel.namelist()


@pytest.mark.gate
def test_the_source_archive_can_be_built_and_has_no_tests(archives):
    """Oracle: the files that a build takes, and the files that a reader looks for."""
    _, source = archives
    top = f"mpikfac-{setup()['metadata']['version']}"
    names = {name.removeprefix(f"{top}/") for name in source.getnames()}
    files = {str(path.relative_to(ROOT)) for path in sources().values()}
    files |= {"setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"}
    files |= {"CHANGELOG.md", "CITATION.cff", "constraints.txt"}
    assert files - names == set()
    assert not any(name.startswith("tests") for name in names)
