"""The layers of the project, read from syntax trees: allowed imports, and docstrings."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import mpikfac
from support.mistakes import TABLE

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "mpikfac").rglob("*.py"))
PROGRAMS = sorted((ROOT / "apps").rglob("*.py"))
ROOMS = sorted(path.parent.name for path in (ROOT / "mpikfac").glob("*/__init__.py"))
TESTS = sorted({*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")})
INHERITED = ("forward", "emit", "find_class")  # the base class documents the method
VOCABULARY = ["mpikfac", "plan", "names"]
"""A module of nothing but names of items and stages, which other rooms import one by one."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Return dotted names of all imports of a file, anywhere in the file.

    A module's parts are `module.part`. Attributes taken from `mpikfac` count as imported too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "mpikfac":
            yield f"mpikfac.{node.attr}"


def past_a_door(tree: ast.AST, own: str) -> set[str]:
    """Return modules inside a room, without exported modules, that a file elsewhere imports."""
    inner = (name.split(".") for name in imported(tree) if name.startswith("mpikfac."))
    return {
        ".".join(parts)
        for parts in inner
        if len(parts) > 2 and parts[1] in ROOMS and parts[1] != own and is_module(parts[:3])
        if parts[:3] != VOCABULARY and (len(parts) > 3 or parts[2] not in door(parts[1]))
    }


def door(room: str) -> list[str]:
    """Return the names that a room exports: `__all__`, or the imports under the same name."""
    module = importlib.import_module(f"mpikfac.{room}")
    imports = [node for node in ast.walk(parse(Path(module.__file__))) if hasattr(node, "asname")]
    return getattr(module, "__all__", [node.name for node in imports if node.name == node.asname])


def is_module(parts: list[str]) -> bool:
    """Return whether a dotted name is a file or folder of the library, not a name in a file."""
    path = ROOT.joinpath(*parts)
    return path.with_suffix(".py").exists() or path.is_dir()


def private(tree: ast.AST) -> set[str]:
    """Return a program's imports that no door of the library exports, and MPI and HDF5.

    The end of a job by a failed rank, `mpi4py.run`, is public.
    """
    public = {
        "mpikfac",
        "mpi4py.run.set_abort_status",
        *(f"mpikfac.{name}" for name in mpikfac.__all__),
    }
    for room in ROOMS:
        public |= {f"mpikfac.{room}", *(f"mpikfac.{room}.{name}" for name in door(room))}
    for file in ("files", "timeline", "trace"):
        names = vars(importlib.import_module(f"mpikfac.{file}"))
        public |= {f"mpikfac.{file}", *(f"mpikfac.{file}.{name}" for name in names)}
    closed = ("mpikfac", "mpi4py", "h5py")
    return {name for name in imported(tree) if name.partition(".")[0] in closed} - public


def room_of(path: Path) -> str:
    """Return the room of a library file; "" outside of rooms."""
    return path.relative_to(ROOT / "mpikfac").parts[0] if path.parent != ROOT / "mpikfac" else ""


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def undocumented(tree: ast.AST) -> Iterator[str]:
    """Return public functions and classes without docstring, with members of public classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_") or node.name in INHERITED:
                continue
            if not ast.get_docstring(node):
                yield f"{node.name} (line {node.lineno})"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node)


def offenders(check: Callable[[Path], Iterable[str]], paths: Iterable[Path]) -> list[str]:
    """Return all offences of a check, each with its file."""
    return [f"{path.relative_to(ROOT)}: {each}" for path in paths for each in check(path)]


@pytest.mark.gate
def test_packages_are_entered_by_their_interfaces():
    """Oracle: the files. import-linter holds the direction of imports (pyproject.toml)."""
    assert offenders(lambda path: past_a_door(parse(path), room_of(path)), LIBRARY) == []


@pytest.mark.gate
def test_programs_use_the_public_library():
    """Oracle: the names that `mpikfac` exports, as for users; no MPI and no HDF5."""
    assert offenders(lambda path: private(parse(path)), PROGRAMS) == []


@pytest.mark.parametrize(
    "line",
    [
        *("import mpikfac.comm.grid", "from mpikfac.comm import grid"),
        *("from mpikfac import kfac", "from mpi4py import MPI", "import h5py as h"),
    ],
)
def test_a_way_around_the_house_is_seen(line):
    """Oracle: ways to reach a module of the library, MPI or HDF5."""
    assert private(ast.parse(line))


@pytest.mark.parametrize(
    "line",
    [
        "import mpikfac.comm.grid",
        "from mpikfac.comm import grid",
        "from mpikfac.comm.grid import x",
    ],
)
def test_a_way_past_a_door_is_seen(line):
    """Oracle: ways to reach a module of a room from another room."""
    assert past_a_door(ast.parse(line), "engine")
    assert not past_a_door(ast.parse(line), "comm")


def test_a_door_may_export_a_module():
    """Oracle: `__all__` of the door, which has the module, and not the module's names."""
    assert not past_a_door(ast.parse("from mpikfac.plan import stages"), "engine")
    assert past_a_door(ast.parse("from mpikfac.plan.stages import clip"), "engine")


def test_names_of_items_and_stages_are_taken_one_by_one():
    """Oracle: the module, which holds nothing but texts and tuples of texts."""
    assert not past_a_door(ast.parse("from mpikfac.plan.names import STEPS"), "engine")
    values = (v for n, v in vars(mpikfac.plan.names).items() if n.isupper())
    texts = [text for value in values for text in ([value] if isinstance(value, str) else value)]
    assert texts and all(isinstance(text, str) for text in texts)


def test_public_functions_have_docstrings():
    """Oracle: the syntax trees."""

    def missing(path: Path) -> Iterator[str]:
        tree = parse(path)
        if tree.body and not ast.get_docstring(tree):
            yield "the module"
        yield from undocumented(tree)

    assert offenders(missing, LIBRARY + PROGRAMS) == []


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def stored(function: ast.FunctionDef) -> set[str]:
    """Return the attributes of `self` that a method assigns."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def declared(node: ast.ClassDef) -> set[str]:
    """Return the attributes that `__init__` makes, and the fields of a dataclass."""
    names = {name for f in node.body if getattr(f, "name", "") == "__init__" for name in stored(f)}
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = (field.target for field in node.body if isinstance(field, ast.AnnAssign))
        names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return names


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def late(tree: ast.AST, elsewhere: Mapping[str, Sequence[ast.ClassDef]]) -> set[str]:
    """Return the attributes that arise after `__init__`, as `Class.attribute`.

    Args:
        elsewhere: classes of other files by name, for bases that are not in the file.
    """
    by_name = {**elsewhere, **{node.name: [node] for node in classes(tree)}}
    attributes = set()
    for node in classes(tree):
        bases, early = [node], set[str]()
        for base in bases:  # grows by the bases of bases
            early |= declared(base)
            names = {ast.unparse(name).rpartition(".")[2] for name in base.bases}
            bases += [each for name in names for each in by_name.get(name, ()) if each is not base]
        for function in functions(node):
            attributes |= {f"{node.name}.{name}" for name in stored(function) - early}
    return attributes


@functools.cache
def all_classes() -> dict[str, list[ast.ClassDef]]:
    """Return all classes of library and programs by name."""
    by_name: dict[str, list[ast.ClassDef]] = {}
    for path in LIBRARY + PROGRAMS:
        for node in classes(parse(path)):
            by_name.setdefault(node.name, []).append(node)
    return by_name


@pytest.mark.gate
def test_attributes_are_made_in_init():
    """Oracle: the syntax trees."""
    assert offenders(lambda path: late(parse(path), all_classes()), LIBRARY + PROGRAMS) == []


@pytest.mark.parametrize(
    "method",
    [
        *("self.late = 0", "a, self.late = 0, 1", "self.late: int = 0", "self.late += 1"),
        *("with f() as self.late: pass", "for self.late in (): pass", "def g(): self.late = 0"),
    ],
)
def test_an_attribute_that_arises_late_is_seen(method):
    """Oracle: ways to assign an attribute."""
    inits = "class A:\n    def __init__(self):\n        self.early = 0\n"
    tree = ast.parse(f"{inits}    def f(self):\n        self.early = 1\n        {method}\n")
    assert late(tree, {}) == {"A.late"}
    derived = ast.parse("class B(A):\n    def f(self):\n        self.early = 1\n")
    assert late(derived, {"A": list(classes(tree))}) == set()


@pytest.mark.gate
def test_a_class_of_the_programs_has_a_name_of_its_own():
    """Oracle: the syntax trees."""
    of_programs = {node.name for path in PROGRAMS for node in classes(parse(path))}
    assert {name for name in of_programs if len(all_classes()[name]) > 1} == set()


def test_all_mistakes_can_be_planted():
    """Oracle: the files, each of which has the right line once."""
    times = {m.what: (ROOT / "mpikfac" / m.file).read_text().count(m.old) for m in TABLE}
    assert {what: count for what, count in times.items() if count != 1} == {}


# -- the inside of trainers ------------------------------------------------------------------------

CLASSES = {
    one
    for trainer in (mpikfac.KFAC, mpikfac.FirstOrderTrainer, mpikfac.lab.AsyncSGD)
    for one in trainer.__mro__
    if one.__module__.startswith("mpikfac.")
}
CLOSED = {"engine", *(one.__module__.split(".")[1] for one in CLASSES)}  # modules of the library
PUBLIC = {
    *("step", "precondition", "record", "accumulate", "clear_statistics", "average_replicas"),
    *("update_damping", "no_recording"),
    *("call", "detach", "close", "state_dict", "load_state_dict", "missing"),
    *("model", "optimizer", "plan", "steps", "votes", "nonfinite", "is_consistent", "combined"),
    *("trace", "communicators", "kl_scale", "version", "staleness", "client_ranks"),
    *("exchange", "grafting"),
}
# What the laboratory exports, and what computes there without a trainer, and is tested alone.
OPEN_NAMES = {
    *("mpikfac.lab", *(".".join(("mpikfac", "lab", name)) for name in mpikfac.lab.__all__)),
    "mpikfac.lab.codistillation.codistillation.divergence",
    *(
        ".".join(("mpikfac", "lab", "curvature", *name))
        for name in (
            *(("owners", stage) for stage in ("COUNT", "QUERIES", "ANSWERS", "PUBLISH", "SUMS")),
            *(("owners", f"{kind}_messages") for kind in ("query", "publish", "sum")),
            ("influence", "MAX_COUNT"),
            *(("records", "gradients"), ("records", "products"), ("records", "record")),
            ("matrices", "ParameterMatrices"),
        )
    ),
    "mpikfac.lab.local_sgd.messages.PlannedCopies",
    *(
        ".".join(("mpikfac", "lab", "sample_space", *name))
        for name in (
            *(("messages", name) for name in ("Form", "form_of", "planned_messages")),
            *(("products", name) for name in ("CHUNK", "along", "chunks", "combine", "gram")),
            *(("parameters", "Parameters"), ("records", "record")),
        )
    ),
    "mpikfac.lab.top_k.codec.TopKCodec",
    *("mpikfac.lab.quadratic_model.graft.Batch", "mpikfac.lab.quadratic_model.graft.lowest"),
    "mpikfac.lab.quadratic_model.graft.inner_products",
    "mpikfac.lab.quadratic_model.graft.slopes_and_curvatures",
    *("mpikfac.lab.robust.config.NearMost", "mpikfac.lab.robust.rules.farthest"),
    "mpikfac.lab.robust.shards.Near",
    "mpikfac.lab.tensor_parallel.forward.split_forward",
    "mpikfac.lab.tensor_parallel.rows.layers_before",
}
# What has a member of the name of a part, and is no trainer: names, and functions' results.
NO_TRAINERS = {
    *("axis", "tp_plan", "factor", "hypothesis", "layer", "layouts", "method", "mpikfac"),
    "curvature",
    *("network", "options", "plan", "shape", "make_plan", "plan_of", "choose_tensor_parallel_plan"),
}
# The file that knows the inside; the benchmark that also runs older states of the library; and
# files without trainers, where the same names are members of plans, predictions and results.
OPEN = {
    "inside.py",
    "checkouts.py",
    "test_plan.py",
    "test_simulate.py",
    "test_simulator.py",
    "test_study.py",
}


def last(node: ast.expr) -> str:
    """Return the last name of a chain: "trainer" for `self.trainer`, "plan" for `plan(2)`."""
    if isinstance(node, ast.Call):
        return last(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def parts_of_trainers() -> set[str]:
    """Return the names that trainers give to their members, without the public interface."""
    trees = [ast.parse(inspect.getsource(one)) for one in CLASSES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    of_self = {n.attr for n in nodes if isinstance(n, ast.Attribute) and last(n.value) == "self"}
    methods = {function.name for tree in trees for function in functions(tree)}
    return {name for name in of_self | methods if not name.startswith("__")} - PUBLIC


PARTS = parts_of_trainers()


def members(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Return owners and names of members, also of members that are named by a text.

    A public name that is called, as in `counts.update(more)`, is no part of a trainer.
    """
    nodes = list(ast.walk(tree))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("_") or id(node) not in called:
                yield node.value, node.attr
        elif isinstance(node, ast.Call) and last(node.func) in ("getattr", "setattr", "object"):
            texts = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            yield from ((node.args[0], str(text)) for text in texts)


def reaching_in(tree: ast.AST) -> Iterator[str]:
    """Return the ways into trainers: imports and names of closed modules, and members."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    for name in (*imported(tree), *(text for text in texts if isinstance(text, str))):
        closed = name.startswith("mpikfac.") and name.split(".")[1] in CLOSED
        if closed and name not in OPEN_NAMES:
            yield name
    for node, name in members(tree):
        owner = last(node)
        options = isinstance(node, ast.Attribute) and owner == "kfac"  # as in `options.kfac`
        public = options or (owner in NO_TRAINERS and not name.startswith("_"))
        if name in PARTS and owner != "self" and not public:
            yield f"{ast.unparse(node)}.{name} (line {node.lineno})"


@pytest.mark.gate
def test_one_file_of_tests_knows_the_inside_of_trainers():
    """Oracle: the members of trainers in the library's classes, without the public interface.

    Whatever moves inside of trainers then changes `tests/support/inside.py` alone.
    """
    closed = [path for path in TESTS if path.name not in OPEN]
    assert offenders(lambda path: reaching_in(parse(path)), closed) == []


@pytest.mark.parametrize(
    "line",
    [
        *("import mpikfac.engine", "from mpikfac.engine.curvature import Bases"),
        *("from mpikfac import kfac", "from mpikfac.trainer import FirstOrderTrainer"),
        *(
            "from mpikfac.engine.curvature.scales import Scales",
            "import mpikfac.lab.local_sgd.replicas",
        ),
        'monkeypatch.setattr("mpikfac.engine.curvature.bases.Bases.decompose", None)',
        "kfac.preconditioner.factors.averages['0.A']",
        *("self.trainer.grid.world", "first.preconditioner.bases.pending"),
        *("trainer(comm).layers[0]", "kfac._end()", "optimizer.trainer.built.gradients"),
        'monkeypatch.setattr(kfac, "built", None)',
        'monkeypatch.setattr(mpikfac.KFAC, "_end", fail)',
    ],
)
def test_a_way_into_a_trainer_is_seen(line):
    """Oracle: ways that tests once took, and ways that are like them."""
    assert list(reaching_in(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        *("kfac.state_dict()", "kfac.plan.layers", "trainer.plan.of(0).layouts.gradients"),
        *("inside.factors(kfac)['0.A']", "mpikfac.layers.cover(model)", "options.kfac.estimator"),
        *("kfac.grafting.set_batch(inputs, loss)", "trainer.exchange.report_loss(loss)"),
        "from mpikfac.lab.quadratic_model.graft import lowest",
    ],
)
def test_the_public_interface_is_open(line):
    """Oracle: what tests may take: the public interface, the plan, and options of programs."""
    assert not list(reaching_in(ast.parse(line)))
