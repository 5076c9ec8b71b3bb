"""Check that every key of a YAML document is known, and given only once, nested or dotted."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import yaml

from mpikfac import files
from mpikfac_apps.options.bounded import TAG, Bounded
from mpikfac_apps.options.fields import TYPE

SYNONYMS = {
    **dict.fromkeys(("batch_size", "bs", "train_batch_size", "global_batch_size"), "batch"),
    **dict.fromkeys(("local_batch_size", "micro_batch_size"), "batch_per_rank"),
    **dict.fromkeys(("learning_rate", "base_lr"), "lr"),
    **dict.fromkeys(("num_epochs", "n_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("wd", "l2"), "weight_decay"),
    **dict.fromkeys(("arch", "net", "network", "architecture"), "model"),
    **dict.fromkeys(("dataset", "dataset_name"), "data.name"),
    **dict.fromkeys(("data_dir", "data_path", "dataset_path"), "data.path"),
    **dict.fromkeys(("output", "out", "output_dir", "log_dir", "save_dir"), "run_dir"),
    **dict.fromkeys(("optim", "opt"), "optimizer"),
    **dict.fromkeys(("pretrained", "pretrained_path", "initial_checkpoint"), "weights"),
    **dict.fromkeys(("scheduler", "lr_schedule", "lr_scheduler"), "schedule"),
    **dict.fromkeys(("warmup", "warmup_steps"), "warmup_epochs"),
    **dict.fromkeys(("tensorboard", "logger", "report_to", "log_with"), "metrics"),
    **dict.fromkeys(("inv_update_freq", "kfac_update_freq"), "kfac.inv_update_steps"),
    **dict.fromkeys(("fac_update_freq", "cov_update_freq"), "kfac.factor_update_steps"),
}
"""The option that each name from other programs corresponds to."""
LIKENESS = 0.7  # the minimum similarity of a misspelt word, as measured by `difflib`
MOST_SHOWN = 30  # maximum number of known keys in a message
MOST_GUESSES = 3  # maximum number of suggested keys


def read(path: str) -> str:
    """Return the text of a file of options.

    Raises:
        ValueError: the file cannot be read; the message is one line.
    """
    try:
        return files.read_text(os.path.expanduser(path), links=True)
    except OSError as error:
        raise ValueError(f"config={path} cannot be read: {files.why(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"config={path} is not YAML: {error.reason}") from error


def composed(text: str, where: str = "") -> yaml.Node | None:
    """Return the root node of a document in which every key is given once, nested or dotted.

    Raises:
        ValueError: the text is not YAML, or has a duplicate key; the message is one line that
            begins with `where`.
    """
    return _parsed(text, where)[0]


def loaded(text: str) -> Any:
    """Return the plain data of a document in which every key is given once, nested or dotted.

    Raises:
        ValueError: the text is not YAML, or has a duplicate key; the message is one line.
    """
    return _parsed(text, "")[1]


def _parsed(text: str, where: str) -> tuple[yaml.Node | None, Any]:
    """Return the nodes and the plain data of a document."""
    try:
        loader = Bounded(text)
        document = loader.get_single_node()
        _check_once(document, where)
        return document, None if document is None else loader.construct_document(document)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{where}line {line} is not YAML: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"{where}line {line} is not YAML: {error.reason}") from error


def _check_once(document: yaml.Node | None, where: str) -> None:
    seen = set()
    for key, line in _keys(document):
        if key in seen:
            raise ValueError(f"{where}line {line}: {key} is given twice; give it once")
        seen.add(key)


def unknown(key: str, keys: Collection[str], further: Collection[str] = ()) -> str:
    """Return the message about an unknown key, with known keys of similar meaning or spelling.

    Args:
        further: keys that can be suggested, but are not listed as known.
    """
    plain = key.replace("-", "_").lower()
    group, _, last = plain.rpartition(".")
    inside = [name for name in keys if name.rpartition(".")[0] == group]
    short = [name.removesuffix(f".{TYPE}") for name in keys if name.endswith(f".{TYPE}")]
    near = dict.fromkeys([*keys, *short, *further])
    beside = [name for name in near if name.rpartition(".")[0] == group]
    alike = [name for name in near if name.rpartition(".")[2] == last]
    synonym = SYNONYMS.get(plain, "")
    meant = [name for name in near if name == synonym or synonym.endswith(f".{name}")]
    spelled = get_close_matches(plain, beside, n=1, cutoff=0.8) if group else []
    if guesses := meant or spelled or alike or _near(last, [*keys, *short]):
        return f"unknown key {key}; did you mean {' or '.join(guesses[:MOST_GUESSES])}?"
    if len(shown := inside or keys) <= MOST_SHOWN:
        return f"unknown key {key}; known keys are {', '.join(shown) or 'none'}"
    return f"unknown key {key}; --help_all lists all keys"


def _near(last: str, keys: Collection[str]) -> list[str]:
    """Return the keys whose last part, or a synonym of the key, is most similar to `last`."""
    by_word = defaultdict(list)
    for name in keys:
        by_word[name.rpartition(".")[2]].append(name)
    for synonym, name in SYNONYMS.items():
        if name in keys:
            by_word[synonym].append(name)
    nearest = get_close_matches(last, by_word, n=1, cutoff=LIKENESS)
    return [name for word in nearest for name in by_word[word]]


def flattened(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as a single mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return tree


def _keys(node: yaml.Node | None, group: str = "") -> Iterator[tuple[str, int]]:
    """Yield the dotted key and the line of every entry of a document, including groups."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = f"{group}{name.value}"
            yield key, name.start_mark.line + 1
            yield from _keys(value, f"{key}.")


def check_keys(
    document: yaml.Node | None, path: str, keys: Collection[str], explain: Callable[[str], str]
) -> None:
    """Check that a document of options has only known keys, and no plain value for a group.

    Args:
        path: the file that contains the document.
        keys: the known keys, including groups that can have a value.
        explain: returns the message about an unknown key.

    Raises:
        ValueError: a key is wrong; the message is one line with file, line and key.
    """
    _check_group(document, path, "", keys, explain)


def _check_group(
    node: yaml.Node | None,
    path: str,
    group: str,
    keys: Collection[str],
    explain: Callable[[str], str],
) -> None:
    if not isinstance(node, yaml.MappingNode):
        name = group.rstrip(".") or "the file"
        raise ValueError(f"config={path}: {name} must have lines of the form `key: value`")
    for name, value in node.value:
        key = group + str(name.value)
        is_group = any(option.startswith(f"{key}.") for option in keys)
        if is_group and not (key in keys and isinstance(value, yaml.ScalarNode)):
            _check_group(value, path, f"{key}.", keys, explain)
        elif key not in keys:
            line = name.start_mark.line + 1
            raise ValueError(f"config={path}, line {line}: {explain(key)}")


def values_of(node: yaml.Node | None, group: str = "") -> dict[str, yaml.Node]:
    """Return the nodes of a document's values, by dotted key."""
    values: dict[str, yaml.Node] = {}
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        key = f"{group}{name.value}"
        inner = isinstance(value, yaml.MappingNode)
        values |= values_of(value, f"{key}.") if inner else {key: value}
    return values


def written(values: Mapping[str, yaml.Node]) -> str:
    """Return the YAML text of a document that contains the given nodes, by dotted key."""
    pairs = [(yaml.ScalarNode(f"{TAG}str", key), value) for key, value in values.items()]
    return str(yaml.serialize(yaml.MappingNode(f"{TAG}map", pairs), Dumper=yaml.SafeDumper))
