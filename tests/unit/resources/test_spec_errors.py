"""Every error in the YAML is reported with file, line, key and allowed values."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from autodist.errors import Place, ResourceSpecError
from autodist.resources import ResourceSpec
from tests.unit.resources.faults import HEAD, NODE, Fault, assert_is_told, read

KEYS = (
    "answer_timeout, batch, batch_norm, cause_timeout, checkpoint, connect_timeout, deadlock_timeout, encrypt, "
    "end_timeout, firewall, join_timeout, max_restarts, metrics, min_nodes, nodes, reach_timeout, "
    "rejoin_interval, shard, "
    "silence_timeout, ssh, stall_timeout, "
    "start_timeout, stop_timeout, strategy, sync, transport, xla"
)
SECONDS = "a number of seconds above 0, at most 1000000"

# name: (text, line, key, the whole problem)
SHAPE = {
    "empty file": ("# nothing\n", 1, "nodes", "missing, since the file is empty; allowed: a list of at least one node"),
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
        "no keys here; is this the file of the machines; allowed: a mapping",
    ),
    "no nodes key": ("batch: global\n", 1, "nodes", "missing; allowed: a list of at least one node"),
    "no nodes": ("batch: global\nnodes: []\n", 2, "nodes", "there is no node; allowed: a list of at least one node"),
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
        "a folder is copied over SSH, which `nodes: given` does not",
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
        "it selects the SSH implementation, and `nodes: given` does not use SSH; allowed: no `transport`",
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
    "metrics is text": (
        HEAD + "metrics: folder\n",
        3,
        "metrics",
        '"folder" is not allowed; allowed: a mapping of `folder`, `every_steps` and `tensorboard`, such as {folder: '
        "metrics, every_steps: 100}",
    ),
    "metrics without folder": (
        HEAD + "metrics: {every_steps: 5}\n",
        3,
        "metrics.folder",
        "missing; allowed: the path of a folder on the chief's machine",
    ),
    "metrics key": (
        HEAD + "metrics: {folder: a, every_stps: 5}\n",
        3,
        "metrics.every_stps",
        "unknown key; did you mean every_steps? allowed: every_steps, folder, tensorboard",
    ),
    "metrics in a store": (
        HEAD + "metrics: {folder: 'gs://a'}\n",
        3,
        "metrics.folder",
        "gs://a is not on a machine's file system; allowed: the path of a folder",
    ),
    "metrics at no step": (
        HEAD + "metrics: {folder: a, every_steps: 0}\n",
        3,
        "metrics.every_steps",
        "0 is not allowed; allowed: a whole number of training steps, at least 1",
    ),
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
        "neither every_steps nor every_minutes is set, nor is on_preempt true; allowed: one of them, or several",
    ),
    "checkpoint in a store": (
        HEAD + "checkpoint: {folder: 'gs://a', every_steps: 5}\n",
        3,
        "checkpoint.folder",
        "gs://a is not on a machine's file system; allowed: the path of a folder",
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
        "0 is not allowed; allowed: the number of checkpoints to keep, at least 1",
    ),
    "shard": (HEAD + "shard: batches\n", 3, "shard", '"batches" is not allowed; allowed: files'),
    "xla": (HEAD + "xla: always\n", 3, "xla", '"always" is not allowed; allowed: auto, true or false'),
    "xla as a number": (HEAD + "xla: 2\n", 3, "xla", "2 is not allowed; allowed: auto, true or false"),
    "encrypt": (HEAD + "encrypt: tls\n", 3, "encrypt", '"tls" is not allowed; allowed: ssh'),
    "encrypt of given": (
        "nodes: given\nencrypt: ssh\n",
        2,
        "encrypt",
        "SSH carries the traffic between workers then, and `nodes: given` does not use SSH; allowed: no `encrypt`; "
        "use a private network",
    ),
    "firewall": (HEAD + "firewall: yes\n", 3, "firewall", "true is not allowed; allowed: auto or none"),
    "batch_norm": (HEAD + "batch_norm: all\n", 3, "batch_norm", '"all" is not allowed; allowed: whole or replica'),
    "batch": (HEAD + "batch: local\n", 3, "batch", '"local" is not allowed; allowed: global or per_worker'),
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
        '"source ~/venv/bin/activate" is a shell command, and no shell runs it; allowed: the path of a virtual',
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
        '"PS" is not a mapping; allowed: a mapping of name patterns to settings',
    ),
}

CASES = {**SHAPE, **SECTIONS}


@pytest.mark.parametrize("fault", CASES.values(), ids=CASES.keys())
def test_error_names_file_line_key_and_what_is_allowed(tmp_path: pathlib.Path, fault: Fault) -> None:
    assert_is_told(tmp_path, fault)


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
        ({"nodes": [{"address": "a", "port": 10**5000}]}, "nodes[0].port: this has too many digits; allowed:"),
        (
            {"ssh": {"a": {"username": "a\ud800"}}},
            "ssh.a.username: the text is not allowed: it contains the character U+D8",
        ),
        ({"ssh": {"a\0": {}}}, "ssh: the text is not allowed: it contains the character U+0000"),
        ({"nodes": [{1: "a"}]}, "nodes[0]: the key 1 is a int; allowed: text"),
        ({"nodes": [{"address": b"a"}]}, "nodes[0].address: b'a' is a bytes; allowed: text"),
        ({"nodes": [{"address": "a"}], "strategy": []}, "strategy: a list is not allowed; allowed: the name"),
        (
            {"nodes": [{"address": "a"}], "strategy": {"bilder": "PS"}},
            "strategy.builder: missing (is bilder a misspelling of it?); allowed: the name",
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
