"""Traces of Chakra: read back by protobuf, they have a plan's messages and computing stages."""

from __future__ import annotations

import io
import json

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto
from google.protobuf.unknown_fields import UnknownFieldSet

import mpikfac
from mpikfac_apps.planning import chakra
from mpikfac_apps.planning.options import PLAN
from mpikfac_apps.planning.plan import main, plan_of

KINDS = {"ordinary": (False, False), "factors": (True, False), "refresh": (True, True)}
TYPES = {"Allreduce": 0, "Reduce": 1, "Allgatherv": 2, "Bcast": 5, "Alltoall": 6}
TYPES |= {"Reduce_scatter": 7}
"""ALL_REDUCE, REDUCE, ALL_GATHER, BROADCAST, ALL_TO_ALL, REDUCE_SCATTER."""
COMPUTATION, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
# Names, numbers and types of the fields in schema/protobuf/et_def.proto of mlcommons/chakra.
SCHEMA = {
    "GlobalMetadata": ["version 1 string", "attr 2 AttributeProto*"],
    "AttributeProto": [
        *("name 1 string", "doc_string 2 string", "int64_val 9 int64", "uint64_val 13 uint64"),
        *("bool_val 27 bool", "string_val 30 string"),
    ],
    "Node": [
        *("id 1 uint64", "name 2 string", "type 3 uint32", "ctrl_deps 4 uint64*"),
        *("data_deps 5 uint64*", "start_time_micros 6 uint64", "duration_micros 7 uint64"),
        "attr 10 AttributeProto*",
    ],
}


def classes():
    """Return protobuf's classes of the schema, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        oneof = name == "AttributeProto" and bool(message.oneof_decl.add(name="value"))
        for text in fields:
            key, number, kind = text.split()
            field = message.field.add(name=key, number=int(number))
            field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            field.type = getattr(field, f"TYPE_{kind.upper()}", field.TYPE_MESSAGE)
            if kind in SCHEMA:
                field.type_name = kind
            if oneof and key.endswith("_val"):
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in SCHEMA
    }


CLASSES = classes()


def read(path):
    """Return the nodes of a trace; a field that the schema lacks fails."""
    file = io.BytesIO(path.read_bytes())
    metadata = proto.parse_length_prefixed(CLASSES["GlobalMetadata"], file)
    assert metadata.version
    nodes = list(iter(lambda: proto.parse_length_prefixed(CLASSES["Node"], file), None))
    for part in [metadata, *nodes, *(attribute for node in nodes for attribute in node.attr)]:
        assert not len(UnknownFieldSet(part))
    return nodes


def attributes(node):
    """Return the values of a node's attributes by name."""
    return {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}


def written(folder, *options, ranks=4):
    """Return the plan and the nodes of all traces by kind of step and rank, and the groups."""
    argv = ["--model", "resnet20", "--ranks", str(ranks), *options]
    assert main([*argv, "--export", f"chakra:{folder / 'plan'}"]) == 0
    traces = {
        (kind, rank): read(folder / f"plan.{kind}.{rank}.et")
        for kind in KINDS
        for rank in range(ranks)
    }
    assert len(list(folder.iterdir())) == len(traces) + 1
    return plan_of(PLAN.read(argv)), traces, json.loads((folder / "plan.groups.json").read_text())


WAYS = {
    "comm-opt": ["--strategy", "comm-opt"],
    "hybrid": ["--assignment", "hybrid-opt", "--assignment.grad_workers", "2"],
    "hybrid on nodes": [
        "--assignment",
        "hybrid-opt",
        "--assignment.grad_workers",
        "2",
        "--transport.ranks_per_node",
        "2",
    ],
    "owners": ["--strategy", "sharded-optimizer"],
    "overlapped": [
        "--strategy",
        "spd-kfac",
        "--assignment",
        "hybrid-opt",
        "--assignment.grad_workers",
        "2",
    ],
    "shards": ["--strategy", "balanced-shards"],
    "shards on nodes": ["--strategy", "balanced-shards", "--transport.ranks_per_node", "2"],
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_trace_has_the_messages_of_the_plan(options, tmp_path):
    """Oracle: `Plan.messages` and `RankGrid.team`, and protobuf's reader with Chakra's schema."""
    plan, traces, groups = written(tmp_path, *options)
    for (kind, rank), nodes in traces.items():
        expected, found = [], []
        for message in plan.messages(rank, *KINDS[kind]):
            team = list(plan.grid.team(rank, message.over))
            size = message.size // (len(team) if message.primitive == "Allgatherv" else 1)
            root = team[message.root] if message.root >= 0 else None
            if message.primitive in TYPES:
                expected.append((message.stage, TYPES[message.primitive], size, team, root))
        for node in nodes:
            values = attributes(node)
            assert values["is_cpu_op"] is False
            if node.type == COLLECTIVE:
                team = groups[values["pg_name"]] if "pg_name" in values else list(range(4))
                numbers = values["comm_type"], values["comm_size"]
                found.append((node.name, *numbers, team, values.get("root")))
        assert found == expected
    assert {type(ranks) for ranks in groups.values()} <= {list}


def test_a_send_of_a_trace_is_a_reception_of_another_trace(tmp_path):
    """Oracle: the other rank's trace, and the bytes that each rank sends in the plan."""
    plan, traces, _ = written(tmp_path, *WAYS["shards"])
    sent = {SEND: [], RECEIVE: []}
    for (kind, rank), nodes in traces.items():
        for node in nodes:
            if node.type in sent:
                values = attributes(node)
                assert rank == values["comm_src" if node.type == SEND else "comm_dst"]
                sent[node.type].append((kind, node.name, *sorted(values.items())))
        handed = [m.bytes for m in plan.messages(rank, *KINDS[kind]) if m.primitive[:5] == "Isend"]
        sizes = [attributes(node)["comm_size"] for node in nodes if node.type == SEND]
        assert sum(sizes) == sum(handed)
    assert sorted(sent[SEND]) == sorted(sent[RECEIVE]) != []


@pytest.mark.gate
@pytest.mark.parametrize("name", ["balanced-shards", "spd-kfac"])
def test_computations_take_the_predicted_seconds(name, tmp_path):
    """Oracle: `mpikfac.predict.simulate`, whose stages without messages are computations."""
    options = ["--strategy", name, "--machine", "a100-hdr", "--model", "resnet50"]
    plan, traces, _ = written(tmp_path, *options)
    job = mpikfac.predict.Job("resnet50", 32)
    machine = mpikfac.predict.load_machine("a100-hdr")
    prediction = mpikfac.predict.simulate(plan, machine, job)
    for (kind, rank), nodes in traces.items():
        sending = {message.stage for message in plan.messages(rank, *KINDS[kind])}
        stages = getattr(prediction, kind).stages.items()
        expected = [(name, round(1e6 * s)) for name, s in stages if name not in sending]
        found = [(n.name, n.duration_micros) for n in nodes if n.type == COMPUTATION]
        assert found == expected
        assert [node.id for node in nodes] == list(range(len(nodes)))
        assert_in_order(nodes)


def assert_in_order(nodes):
    """Assert that nodes follow each other; neighbouring sends and receptions begin together."""
    before, together = [], []
    for node in nodes:
        if together and (node.type not in (SEND, RECEIVE) or node.name != nodes[node.id - 1].name):
            before, together = together, []
        assert list(node.data_deps) == before
        together.append(node.id)
        if node.type not in (SEND, RECEIVE):
            before, together = together, []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--export", "goal:x"], "export: goal:x must be chakra:FILE"),
        (["--export", "chakra:"], "export: chakra: must be chakra:FILE"),
        (["--export", "chakra:/none/x"], "/none/x must be a file in an existing folder"),
        (["--strategy", "staggered", "--export", "chakra:x"], "stagger=5 refreshes in slots, whi"),
        (
            ["--strategy", "downpour", "--export", "chakra:x"],
            "sync=parameter-server takes steps without",
        ),
        (["--strategy", "daso", "--export", "chakra:x"], "sync=daso takes steps without"),
        (
            ["--strategy", "median", "--export", "chakra:x"],
            "' aggregates with a rule other than the mean, which Chakra does not support; use",
        ),
        (
            ["--transport.virtual_ranks", "2", "--export", "chakra:x"],
            "Send, Bcast of 'reduce gradients' has no",
        ),
        (
            ["--compression.gradients", "int8", "--export", "chakra:x"],
            "Alltoall, Allgather of 'reduce gradients' has no counterpart in Chakra; use",
        ),
        (
            ["--strategy", "curvature-servers", "--export", "chakra:x"],
            "Send of 'send factors' has no counterpart in Chakra; use",
        ),
    ],
)
def test_a_trace_that_cannot_be_written_is_told_in_a_line(
    options, line, tmp_path, monkeypatch, capsys
):
    """Oracle: a single line, and no file."""
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "resnet20", "--ranks", "2", *options]) == 2
    error = capsys.readouterr().err
    assert line in error and len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [0, 1, 127, 128, 2**32, 2**63 - 1])
def test_numbers_of_any_length_are_read_back(value):
    """Oracle: protobuf."""
    node = CLASSES["Node"].FromString(chakra.attribute("comm_size", value))
    assert attributes(node) == {"comm_size": value}
