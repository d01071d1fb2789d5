"""Each thing that can be wrong in the YAML is reported with file, line, key and what is allowed."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from autodist.errors import Place, ResourceSpecError
from autodist.resources import ResourceSpec, _yaml

HEAD = "nodes:\n  - {address: 10.0.0.1, chief: true}\n"
NODE = "nodes:\n  - address: 10.0.0.1\n    "
NODE_KEYS = "address, chief, cpus, gpus, network_bandwidth, port, ssh_config, workers"
KEYS = (
    "answer_timeout, batch, cause_timeout, checkpoint, connect_timeout, deadlock_timeout, end_timeout, join_timeout, "
    "max_restarts, min_nodes, nodes, reach_timeout, shard, silence_timeout, ssh, stall_timeout, start_timeout, "
    "stop_timeout, "
    "strategy, sync, transport"
)
SECONDS = "a number of seconds above 0, at most 1000000"
INDICES = "a list of different whole numbers from 0, such as [0, 1]"

# name: (text, line, key, the whole problem)
SHAPE = {
    "empty file": ("# nothing\n", 1, "nodes", "missing, the file is empty; allowed: a list of at least one node"),
    "a list": (
        "- a\n",
        1,
        "document",
        f"a list is not allowed; allowed: a mapping with the keys {KEYS}",
    ),
    "a script": (
        "import a\nb = 1\n",
        1,
        "document",
        "no keys here, is this the file of the machines; allowed: a mapping",
    ),
    "no nodes key": ("batch: global\n", 1, "nodes", "missing; allowed: a list of at least one node"),
    "no nodes": ("batch: global\nnodes: []\n", 2, "nodes", "no node is given; allowed: a list of at least one node"),
    "nodes null": ("nodes:\n", 1, "nodes", "null is not allowed; allowed: a list of at least one node"),
    "node is text": ("nodes:\n  - a\n", 2, "nodes[0]", '"a" is not allowed; allowed: a mapping with the keys address'),
    "unknown top": (HEAD + "stratgy: {}\n", 3, "stratgy", f"unknown key; did you mean strategy? allowed: {KEYS}"),
    "inner field": (HEAD + "source: {}\n", 3, "source", f"unknown key; allowed: {KEYS}"),
    "near limit": (HEAD + "end_timout: 5\n", 3, "end_timout", "unknown key; did you mean end_timeout? allowed: "),
    "no time": (HEAD + "end_timeout: 0\n", 3, "end_timeout", f"0 is not allowed; allowed: {SECONDS}"),
    "for ever": (HEAD + "end_timeout: .inf\n", 3, "end_timeout", f"Infinity is not allowed; allowed: {SECONDS}"),
    "too long": (HEAD + "end_timeout: 1000001\n", 3, "end_timeout", "1000001 is not allowed; allowed: "),
    "time as text": (HEAD + "end_timeout: 5 min\n", 3, "end_timeout", '"5 min" is not allowed; allowed: '),
    "time as bool": (HEAD + "end_timeout: yes\n", 3, "end_timeout", "true is not allowed; allowed: "),
    "sync of given": (
        "nodes: given\nsync: {}\n",
        2,
        "sync",
        "a folder is brought over SSH, and `nodes: given` reaches no",
    ),
    "transport": (
        HEAD + "transport: ssh\n",
        3,
        "transport",
        '"ssh" is not allowed; allowed: paramiko, or openssh: the `ssh` program of the chief\'s machine',
    ),
    "transport of given": (
        "nodes: given\ntransport: openssh\n",
        2,
        "transport",
        "it says what speaks SSH, and `nodes: given` reaches no machine so; allowed: no `transport`",
    ),
    "sync is text": (HEAD + "sync: .\n", 3, "sync", '"." is not allowed; allowed: a mapping of `folder` and `exclude`'),
    "sync key": (
        HEAD + "sync: {foldr: .}\n",
        3,
        "sync.foldr",
        "unknown key; did you mean folder? allowed: exclude, folder",
    ),
    "sync folder": (
        HEAD + "sync: {folder: 3}\n",
        3,
        "sync.folder",
        "3 is not allowed; allowed: the path of a folder on",
    ),
    "sync exclude": (HEAD + "sync: {exclude: a}\n", 3, "sync.exclude", '"a" is not allowed; allowed: a list of names'),
    "checkpoint is text": (
        HEAD + "checkpoint: folder\n",
        3,
        "checkpoint",
        '"folder" is not allowed; allowed: a mapping of `folder`, `every_steps`, `every_minutes`, `keep` and '
        "`on_preempt`, such as",
    ),
    "checkpoint without folder": (
        HEAD + "checkpoint: {every_steps: 5}\n",
        3,
        "checkpoint.folder",
        "missing; allowed: the path of a folder on the chief's machine",
    ),
    "checkpoint key": (
        HEAD + "checkpoint: {folder: a, every_stps: 5}\n",
        3,
        "checkpoint.every_stps",
        "unknown key; did you mean every_steps? allowed: every_minutes, every_steps, folder, keep",
    ),
    "checkpoint never": (
        HEAD + "checkpoint: {folder: a}\n",
        3,
        "checkpoint",
        "neither every_steps nor every_minutes says how often, nor is on_preempt true; allowed: one of them, or "
        "several",
    ),
    "checkpoint in a store": (
        HEAD + "checkpoint: {folder: 'gs://a', every_steps: 5}\n",
        3,
        "checkpoint.folder",
        "gs://a is on no file system of a machine; allowed: the path of a folder",
    ),
    "checkpoint at no step": (
        HEAD + "checkpoint: {folder: a, every_steps: 0}\n",
        3,
        "checkpoint.every_steps",
        "0 is not allowed; allowed: a whole number of training steps, at least 1",
    ),
    "checkpoint at once": (
        HEAD + "checkpoint: {folder: a, every_minutes: .nan}\n",
        3,
        "checkpoint.every_minutes",
        "NaN is not allowed; allowed: a number of minutes above 0",
    ),
    "none kept": (
        HEAD + "checkpoint: {folder: a, every_steps: 1, keep: 0}\n",
        3,
        "checkpoint.keep",
        "0 is not allowed; allowed: how many checkpoints stay, at least 1",
    ),
    "shard": (HEAD + "shard: batches\n", 3, "shard", '"batches" is not allowed; allowed: files'),
    "batch": (HEAD + "batch: local\n", 3, "batch", '"local" is not allowed; allowed: global or per_worker'),
    "syntax": (
        "nodes:\n  - {address: a\nssh: {}\n",
        3,
        "syntax",
        "not valid YAML: while parsing a flow mapping, expected",
    ),
    "tab": (
        "nodes:\n\t- a\n",
        2,
        "syntax",
        "not valid YAML: while scanning for the next token, found character '\\t'"
        " that cannot start any token; indent by blanks, since YAML takes no tabs",
    ),
    "two documents": (HEAD + "---\na: 1\n", 3, "syntax", "not valid YAML: expected a single document in the stream"),
    "control character": ("nodes:\n  - \x07\n", 2, "syntax", "not valid YAML: character U+0007 is not allowed"),
    "tag": (
        NODE + "cpus: !!python/name:os.system\n",
        3,
        "nodes[0].cpus",
        "the tag !!python/name:os.system is not allowed",
    ),
    "false tag": (NODE + "port: !!int abc\n", 3, "nodes[0].port", "'abc' is not of the type that its tag says"),
    "key twice": (HEAD + "ssh:\n  a: {}\n  a: {}\n", 5, "ssh.a", "given twice, first on line 4; keep one"),
    "key not text": (HEAD + "ssh:\n  1: {}\n", 4, 'ssh["1"]', 'the key 1 is not text; put it in quotes: "1"'),
    "key is a list": (HEAD + "ssh:\n  [a]: {}\n", 4, "ssh", "a list or mapping is used as a key; keys are text"),
    "endless": (HEAD + "ssh: &s\n  lab: *s\n", 3, "ssh.lab", "contains itself through an alias"),
    "other base": (
        NODE + "port: 1:20:30\n",
        3,
        "nodes[0].port",
        "'1:20:30' is a number to the base of 60 in YAML, 4830; write a plain number, or put it in quotes",
    ),
    "other base in a key's text": (
        HEAD + "ssh: {lab: {username: 1:20.5}}\n",
        3,
        "ssh.lab.username",
        "'1:20.5' is a num",
    ),
    "octal": (
        NODE + "port: 010000\n",
        3,
        "nodes[0].port",
        "'010000' is an octal number in YAML, 4096; write it without the leading 0 (or 10000, if that is meant)",
    ),
    "new octal": (
        NODE + "port: 0o17\n",
        3,
        "nodes[0].port",
        '"0o17" is not allowed; allowed: a whole number from 1024',
    ),
    "long number": (NODE + f"port: {'9' * 5000}\n", 3, "nodes[0].port", f"'{'9' * 59}… has more digits than any"),
    "long hexadecimal number": (NODE + f"port: 0x{'f' * 20}\n", 3, "nodes[0].port", f"'0x{'f' * 20}' has more digits"),
    "empty number": (NODE + 'port: !!int ""\n', 3, "nodes[0].port", "'' is not of the type that its tag says"),
    "no word for true": (
        NODE + "ssh_config: no\n",
        3,
        "nodes[0].ssh_config",
        "false is not allowed; allowed: the name",
    ),
    "brackets": (
        "nodes: " + "[" * 3000,
        1,
        "syntax",
        "not valid YAML: nested more than 32 levels deep; write it flatter",
    ),
    "dashes": ("- " * 3000, 1, "syntax", "not valid YAML: nested more than 32 levels deep"),
    "blocks": (
        "".join(f"{' ' * level}k:\n" for level in range(1000)),
        33,
        "syntax",
        "not valid YAML: nested more than 32 levels deep",
    ),
    "aliases nest": (
        "a: &a0 [x]\n" + "".join(f"a{level}: &a{level} [*a{level - 1}]\n" for level in range(1, 40)),
        1,
        "a31" + "[0]" * 32,
        "nested more than 32 levels deep",
    ),
    "escape": (
        HEAD + 'batch: "\\UFFFFFFFF"\n',
        3,
        "syntax",
        "not valid YAML: a number in an escape or in a directive is",
    ),
    "directive": (f"%YAML 1.{'9' * 5000}\n---\n{HEAD}", 1, "syntax", "not valid YAML: a number in an escape or in"),
    "binary": (
        "nodes:\n\0",
        2,
        "syntax",
        "not valid YAML: character U+0000 is not allowed; is this a text file, and in",
    ),
    "NUL": (
        HEAD + 'ssh: {lab: {username: "a\\0"}}\n',
        3,
        "ssh.lab.username",
        "the text cannot be used: it holds the character U+0000; allowed: text without NUL and halves of",
    ),
    "surrogate": (
        HEAD + 'ssh: {lab: {key_file: "\\uD800"}}\n',
        3,
        "ssh.lab.key_file",
        "the text cannot be used: it hol",
    ),
    "NUL in a key": (HEAD + 'ssh: {"a\\0": {}}\n', 3, "ssh", "a key cannot be used: it holds the character U+0000"),
    "long key": (
        HEAD + f"? {'k' * 2000}\n: 1\n",
        3,
        "document",
        f"a key cannot be used: the key that begins with '{'k' * 59}… has 2000 characters; allowed: up to 1000",
    ),
    "bad merge": (NODE + "<<: 5\n", 3, 'nodes[0]["<<"]', "not a mapping; `<<` takes an alias of a mapping"),
}

NODES = {
    "unknown key": (NODE + "prot: 1\n", 3, "nodes[0].prot", f"unknown key; did you mean port? allowed: {NODE_KEYS}"),
    "far key": (NODE + "zzz: 1\n", 3, "nodes[0].zzz", f"unknown key; allowed: {NODE_KEYS}"),
    "no address": (
        "nodes:\n  - {chief: true}\n",
        2,
        "nodes[0].address",
        "missing; allowed: a host name or an IP address",
    ),
    "address number": (
        "nodes:\n  - address: 10.1\n",
        2,
        "nodes[0].address",
        "10.1 is not allowed; allowed: a host name",
    ),
    "address empty": ("nodes:\n  - address: ''\n", 2, "nodes[0].address", '"" is not allowed; allowed: a host name'),
    "address port": (
        "nodes:\n  - address: 10.0.0.1:22\n",
        2,
        "nodes[0].address",
        "'10.0.0.1:22' is not an address; allowed: a host name or an IP address; a port stands under `port`",
    ),
    "address option": (
        "nodes:\n  - address: -oX\n",
        2,
        "nodes[0].address",
        "'-oX' is not an address; allowed: a host name",
    ),
    "address range": ("nodes:\n  - address: 10.0.0.300\n", 2, "nodes[0].address", "'10.0.0.300' is not an address"),
    "address any": (
        "nodes:\n  - address: 0.0.0.0\n",
        2,
        "nodes[0].address",
        "0.0.0.0 is not the address of one machine",
    ),
    "address twice": (
        HEAD + "  - {address: b}\n  - address: 10.0.0.1\n",
        4,
        "nodes[2].address",
        "10.0.0.1 is the address of nodes[0] too; allowed: one node for each machine",
    ),
    "address spelled twice": (
        "nodes:\n  - {address: LocalHost, chief: true}\n  - address: 127.0.0.1\n",
        3,
        "nodes[1].address",
        "127.0.0.1 is the address of nodes[0] too",
    ),
    "no chief": (
        "nodes:\n  - address: a\n  - address: b\n",
        1,
        "nodes",
        "none of the 2 nodes is the chief; allowed: `chief: true` in exactly one",
    ),
    "two chiefs": (
        HEAD + "  - {address: b}\n  - address: c\n    chief: true\n",
        5,
        "nodes[2].chief",
        "true is not allowed, nodes[0] (10.0.0.1) is the chief already; allowed: `chief: true` in exactly one node",
    ),
    "chief text": (NODE + "chief: 'yes'\n", 3, "nodes[0].chief", '"yes" is not allowed; allowed: true or false'),
    "port low": (
        NODE + "port: 80\n",
        3,
        "nodes[0].port",
        "80 is not allowed; allowed: a whole number from 1024 to 65535",
    ),
    "port high": (
        NODE + "port: 65536\n",
        3,
        "nodes[0].port",
        "65536 is not allowed; allowed: a whole number from 1024",
    ),
    "port bool": (NODE + "port: yes\n", 3, "nodes[0].port", "true is not allowed; allowed: a whole number from 1024"),
    "last port high": (
        NODE + "cpus: [0, 1]\n    workers: 2\n    port: 65535\n",
        5,
        "nodes[0].port",
        "2 workers need the ports 65535 to 65536; allowed: 1024 to 65534",
    ),
    "index negative": (
        NODE + "gpus:\n      - 0\n      - -1\n",
        5,
        "nodes[0].gpus[1]",
        f"-1 is not allowed; allowed: {INDICES}",
    ),
    "index twice": (
        NODE + "gpus:\n      - 2\n      - 2\n",
        5,
        "nodes[0].gpus[1]",
        "2 is given twice; allowed: each device once",
    ),
    "index text": (NODE + "cpus: [a]\n", 3, "nodes[0].cpus[0]", f'"a" is not allowed; allowed: {INDICES}'),
    "gpus number": (NODE + "gpus: 2\n", 3, "nodes[0].gpus", f"2 is not allowed; allowed: {INDICES}"),
    "both kinds": (
        NODE + "gpus: [0]\n    cpus: [0]\n",
        4,
        "nodes[0].cpus",
        "the node has gpus too; allowed: one of the two",
    ),
    "chief without device": (
        NODE + "cpus: []\n",
        3,
        "nodes[0].cpus",
        "the chief's node has no device, and the script that is started there needs its outputs computed; "
        "allowed: one device or more; `cpus: []` is for other nodes, which then only own variables",
    ),
    "chief among others without device": (
        "nodes:\n  - address: a\n  - address: b\n    chief: true\n    gpus: []\n    cpus: []\n",
        6,
        "nodes[1].cpus",
        "the chief's node has no device",
    ),
    "workers without device": (
        HEAD + "  - address: b\n    cpus: []\n    workers: 2\n",
        5,
        "nodes[1].workers",
        "2 workers are more than a node without replicas can use; allowed: 1",
    ),
    "workers zero": (NODE + "workers: 0\n", 3, "nodes[0].workers", "0 is not allowed; allowed: a whole number from 1"),
    "workers many": (
        NODE + "cpus: [0, 1]\n    workers: 3\n",
        4,
        "nodes[0].workers",
        "3 workers cannot share 2 devices evenly; allowed: 1, 2, or name more devices",
    ),
    "workers uneven": (
        NODE + "cpus: [0, 1, 2, 3]\n    workers: 3\n",
        4,
        "nodes[0].workers",
        "3 workers cannot share 4 devices evenly; allowed: 1, 2, 4, or name more devices",
    ),
    "bandwidth zero": (
        NODE + "network_bandwidth: 0\n",
        3,
        "nodes[0].network_bandwidth",
        "0 is not allowed; allowed: a number above 0, in Gbit/s",
    ),
    "bandwidth endless": (
        NODE + "network_bandwidth: .inf\n",
        3,
        "nodes[0].network_bandwidth",
        "Infinity is not allowed",
    ),
}

SECTIONS = {
    "group unknown": (
        NODE + "ssh_config: lba\nssh:\n  lab: {}\n  cloud: {}\n",
        3,
        "nodes[0].ssh_config",
        "there is no SSH group 'lba'; allowed: cloud, lab",
    ),
    "group undefined": (
        NODE + "ssh_config: lab\n",
        3,
        "nodes[0].ssh_config",
        "there is no SSH group 'lab'; allowed: none is defined, add it under `ssh`",
    ),
    "groups list": (
        HEAD + "ssh: [lab]\n",
        3,
        "ssh",
        "a list is not allowed; allowed: a mapping of names to SSH groups",
    ),
    "group text": (
        HEAD + "ssh:\n  lab: me\n",
        4,
        "ssh.lab",
        '"me" is not allowed; allowed: a mapping with the keys username',
    ),
    "group key": (
        HEAD + "ssh:\n  lab:\n    user: me\n",
        5,
        "ssh.lab.user",
        "unknown key; did you mean username? allowed: host_key_checking",
    ),
    "group port": (
        HEAD + "ssh:\n  lab:\n    port: 0\n",
        5,
        "ssh.lab.port",
        "0 is not allowed; allowed: a whole number from 1 to",
    ),
    **{
        f"username {name!r}": (
            HEAD + f"ssh:\n  lab:\n    username: {json.dumps(name)}\n",
            5,
            "ssh.lab.username",
            f"{json.dumps(name)} is not allowed; allowed: a user's name",
        )
        for name in ("", " ", "-oProxyCommand=x", "a b", "a\n", "a;b", "$(a)")
    },
    **{
        f"venv {path!r}": (
            HEAD + f"ssh:\n  lab:\n    python_venv: {json.dumps(path)}\n",
            5,
            "ssh.lab.python_venv",
            f"{json.dumps(path)} is not allowed; allowed: the path of a virtual environment on the node, absolute or",
        )
        for path in ("", "-S", "/a=b", "a\nb", "~ann/venv", "venv", "./venv")
    },
    "venv of a shell": (
        HEAD + "ssh:\n  lab:\n    python_venv: source ~/venv/bin/activate\n",
        5,
        "ssh.lab.python_venv",
        '"source ~/venv/bin/activate" is for a shell, and none reads it; allowed: the path of a virtual environment',
    ),
    "key file": (
        HEAD + 'ssh:\n  lab:\n    key_file: "a\\nb"\n',
        5,
        "ssh.lab.key_file",
        '"a\\nb" is not allowed; allowed: the path of a private key',
    ),
    "known hosts": (
        HEAD + 'ssh: {lab: {known_hosts: "\\t"}}\n',
        3,
        "ssh.lab.known_hosts",
        '"\\t" is not allowed; allowed',
    ),
    "variable with =": (
        HEAD + "ssh: {lab: {shared_envs: {A=B: c}}}\n",
        3,
        'ssh.lab.shared_envs["A=B"]',
        "this is not al",
    ),
    "variable without name": (
        HEAD + 'ssh: {lab: {shared_envs: {"": c}}}\n',
        3,
        'ssh.lab.shared_envs[""]',
        "this is not",
    ),
    "variable name": (
        HEAD + "ssh:\n  lab:\n    shared_envs:\n      A B: c\n",
        6,
        'ssh.lab.shared_envs["A B"]',
        "this is not allowed; allowed: a mapping of environment variables (letters, digits and _) to text",
    ),
    "variable value": (
        HEAD + "ssh:\n  lab:\n    shared_envs: {TOKEN: 4711}\n",
        5,
        "ssh.lab.shared_envs.TOKEN",
        "this is not allowed; allowed: a mapping of environment variables",
    ),
    "strategy number": (
        HEAD + "strategy: 5\n",
        3,
        "strategy",
        "5 is not allowed; allowed: the name of a strategy builder, such as AllReduce, or a mapping with builder, its",
    ),
    "no text": (HEAD + 'strategy: ""\n', 3, "strategy", '"" is not allowed; allowed: the name of a strategy builder'),
    "null builder": (
        HEAD + "strategy:\n  builder:\n",
        4,
        "strategy.builder",
        "null is not a name; allowed: the name of a strategy builder",
    ),
    "builder number": (
        HEAD + "strategy:\n  builder: 1\n",
        4,
        "strategy.builder",
        "1 is not a name; allowed: the name of a",
    ),
    "overrides list": (
        HEAD + "strategy:\n  builder: PS\n  variables: [a]\n",
        5,
        "strategy.variables",
        "a list is not a mapping; allowed: a mapping",
    ),
    "override text": (
        HEAD + "strategy:\n  builder: PS\n  variables:\n    a/b: PS\n",
        6,
        'strategy.variables["a/b"]',
        '"PS" is not a mapping; allowed: a mapping of patterns of names to settings',
    ),
}

CASES = {**SHAPE, **NODES, **SECTIONS}


def read(tmp_path: pathlib.Path, content: str | bytes) -> tuple[str, ResourceSpecError]:
    path = tmp_path / "cluster.yml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ResourceSpecError) as caught:
        ResourceSpec.from_file(path)
    return str(path), caught.value


@pytest.mark.parametrize("text, line, key, problem", CASES.values(), ids=CASES.keys())
def test_error_names_file_line_key_and_what_is_allowed(
    tmp_path: pathlib.Path, text: str, line: int, key: str, problem: str
) -> None:
    file, error = read(tmp_path, text)
    assert error.place == Place(file, line, key)
    assert error.problem.startswith(problem)
    assert str(error).startswith(f"{file}:{line}: {key}: {problem}")
    assert "pydantic" not in str(error) and "Input should" not in str(error)


@pytest.mark.parametrize("value", ["4711", "04711", "!!int x4711", "4:7:11", "4711" * 20, '"4711\\0"'])
def test_environment_values_are_not_shown(tmp_path: pathlib.Path, value: str) -> None:
    _, error = read(tmp_path, HEAD + f"ssh:\n  lab:\n    shared_envs: {{TOKEN: {value}}}\n")
    assert "4711" not in str(error) and "2505" not in str(error) and "14831" not in str(error)


def test_further_faults_follow_in_the_order_of_the_file(tmp_path: pathlib.Path) -> None:
    file, error = read(tmp_path, "batch: x\nnodes:\n  - address: a\n    prot: 1\n    workers: 0\n")
    assert error.place == Place(file, 1, "batch")
    _, *others = str(error).splitlines()
    assert [re.sub(r": (unknown|0).*", "", line) for line in others] == [
        f"  also {file}:4: nodes[0].prot",
        f"  also {file}:5: nodes[0].workers",
    ]


def test_only_the_first_faults_are_told_and_the_others_counted(tmp_path: pathlib.Path) -> None:
    _, error = read(tmp_path, f"nodes:\n  - {{address: a, cpus: [{', '.join('x' * 1000)}]}}\n")
    lines = str(error).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "  and 980 more"


def assert_is_too_large(tmp_path: pathlib.Path, text: str) -> None:
    _, error = read(tmp_path, text)
    assert error.problem.startswith("too large: it holds too many values, or too long ones, once its aliases (*name)")
    assert error.place is not None


def test_aliases_that_stand_for_gigabytes_are_refused(tmp_path: pathlib.Path) -> None:
    lists = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20))
    assert_is_too_large(tmp_path, lists)


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30)),
        f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 10_000)}]\n",
    ],
    ids=["merges", "texts"],
)
def test_merged_mappings_and_texts_are_counted_as_often_as_aliases_name_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(_yaml, "LARGEST_SPEC", 1 << 20)  # sooner than after seconds
    assert_is_too_large(tmp_path, text)


def test_a_file_that_is_too_long_is_not_read_to_its_end() -> None:
    with pytest.raises(ResourceSpecError, match="/dev/zero: longer than 1 MiB, which no such YAML needs"):
        ResourceSpec.from_file("/dev/zero")


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(ResourceSpecError, match="no file can have this name; give the path of a YAML file"):
        ResourceSpec.from_file(name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_told(tmp_path: pathlib.Path, encoding: str) -> None:
    _, error = read(tmp_path, HEAD.encode(encoding))
    assert "UTF-8" in error.problem


def test_encoding_other_than_utf8_is_refused(tmp_path: pathlib.Path) -> None:
    file, error = read(tmp_path, b"nodes:\n  - {address: \xff}\n")
    assert error.place == Place(file, 2, "encoding")
    assert error.problem == "not UTF-8 text; save the file in UTF-8"


@pytest.mark.parametrize("name, reason", [("absent.yml", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: pathlib.Path, name: str, reason: str) -> None:
    with pytest.raises(ResourceSpecError, match=reason) as caught:
        ResourceSpec.from_file(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    "content, message",
    [
        (
            {"nodes": [{"address": "a", "port": 80}]},
            "nodes[0].port: 80 is not allowed; allowed: a whole number from 1024",
        ),
        ({"nodes": [{"address": "a", "prot": 1}]}, "nodes[0].prot: unknown key; did you mean port?"),
        ({}, "nodes: missing; allowed: a list"),
        ([], "document: a list is not allowed; allowed: a mapping"),
        ({"nodes": [{"address": "a", "port": 10**5000}]}, "nodes[0].port: this has more digits than any number here"),
        (
            {"ssh": {"a": {"username": "a\ud800"}}},
            "ssh.a.username: the text cannot be used: it holds the character U+D8",
        ),
        ({"ssh": {"a\0": {}}}, "ssh: the text cannot be used: it holds the character U+0000"),
        ({"nodes": [{1: "a"}]}, "nodes[0]: the key 1 is a int; allowed: text"),
        ({"nodes": [{"address": b"a"}]}, "nodes[0].address: b'a' is a bytes; allowed: text"),
        ({"nodes": [{"address": "a"}], "strategy": []}, "strategy: a list is not allowed; allowed: the name"),
        (
            {"nodes": [{"address": "a"}], "strategy": {"bilder": "PS"}},
            "strategy.builder: missing (is bilder meant to be it?); allowed: the name",
        ),
    ],
)
def test_errors_without_a_file_name_the_key(content: dict[str, object], message: str) -> None:
    with pytest.raises(ResourceSpecError) as caught:
        ResourceSpec.from_dict(content)
    assert caught.value.place is None
    assert str(caught.value).startswith(message)


def test_python_data_that_holds_itself_is_refused() -> None:
    content: dict[str, object] = {}
    content["nodes"] = [content]
    with pytest.raises(ResourceSpecError, match="nested more than 32 levels deep"):
        ResourceSpec.from_dict(content)
    value: object = "x"
    for _ in range(20):
        value = [value] * 10
    with pytest.raises(ResourceSpecError, match="too large"):
        ResourceSpec.from_dict({"nodes": value})


def test_faults_in_merged_mappings_stand_where_they_were_written(tmp_path: pathlib.Path) -> None:
    base = "nodes:\n  - &base\n    address: a\n    cpus: [0, 0]\n    chief: true\n"
    file, error = read(tmp_path, base + "  - <<: *base\n    chief: false\n    address: b\n")
    assert error.place == Place(file, 4, "nodes[0].cpus[1]")
    assert f"also {file}:4: nodes[1].cpus[1]: 0 is given twice" in str(error)
