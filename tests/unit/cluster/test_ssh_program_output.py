"""Output of the `ssh` program, converted to error messages, without a connection."""

from __future__ import annotations

import pytest

from autodist.cluster.ssh_errors import Endpoint, explain
from autodist.cluster.ssh_machine import _is_transient
from autodist.cluster.ssh_program_output import find_cause, unknown_cause
from autodist.errors import ClusterError

PLACE = Endpoint("10.9.9.9", "10.9.9.9", 2222, "ann", "/kh")
SHOWN = "debug1: Server host key: ssh-ed25519 SHA256:abc\n"
CHANGED = "@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.\n"
REVOKED = "@       WARNING: REVOKED HOST KEY DETECTED!               @\nHost key verification failed.\n"
OFFERED = "debug1: Offering public key: /k ED25519 SHA256:abc explicit\n"
DENIED = "ann@10.9.9.9: Permission denied (publickey,password).\n"
PARTLY = 'Authenticated using "publickey" with partial success.\n'
CLOSED = "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.9.9.9 port 2222\n"
RESET = "kex_exchange_identification: read: Connection reset by peer\n"
GONE = "banner exchange: Connection to 10.9.9.9 port 2222: Broken pipe\n"
REFUSED = "ssh: connect to host 10.9.9.9 port 2222: Connection refused\n"

# The output, the message, and True if it may be temporary while a machine boots.
CASES: list[tuple[str, list[str], bool]] = [
    ("ssh: Could not resolve hostname lab: Name or service not known\n", ["cannot be resolved (Name or serv"], False),
    (f"debug1: connect to address 10.9.9.9 port 2222: Connection refused\n{REFUSED}", ["connection refused"], True),
    (REFUSED.replace("Connection refused", "No route to host"), ["there is no route to it"], True),
    (REFUSED.replace("Connection refused", "Network is unreachable"), ["there is no route to it"], True),
    (REFUSED.replace("Connection refused", "Connection timed out"), ["no answer in time", "connect_timeout"], True),
    (REFUSED.replace("Connection refused", "Permission denied"), ["Permission denied. Try `ssh -p 2222"], False),
    (
        f"{SHOWN}No ED25519 host key is known for [10.9.9.9]:2222 and you have requested strict checking.\n",
        ["host key is not known (ssh-ed25519 SHA256:abc)", "`ssh-keyscan -p 2222 10.9.9.9 >> /kh`"],
        False,
    ),
    (SHOWN + CHANGED, ["host key has changed (ssh-ed25519 SHA256:abc)", "ssh-keygen -R '[10.9.9.9]:2222'"], False),
    (SHOWN + REVOKED, ["marked as revoked (ssh-ed25519 SHA256:abc)"], False),
    (OFFERED + DENIED, ["none of the keys offered for user ann (it takes publickey, password)", "ssh-copy-id"], False),
    (DENIED, ["there is no private key to log in with as user ann", "`ssh-add`"], False),
    (DENIED.replace("publickey,", ""), ["it takes no key of user ann, but password", "asks for no password"], False),
    (OFFERED + PARTLY + DENIED.replace("publickey,", ""), ["requires password in addition to a key"], False),
    (
        f"Permissions 0644 for '/k' are too open.\nLoad key \"/k\": bad permissions\n{DENIED}",
        ["no private key to log in", "/k may be read by others; run `chmod 600 /k`"],
        False,
    ),
    (f'Load key "/k": error in libcrypto\n{OFFERED}{DENIED}', ["/k cannot be used (error in libcrypto)"], False),
    (
        f"{OFFERED}{OFFERED.replace('Offering public', 'Server accepts')}"
        f'sign_and_send_pubkey: signing failed for ED25519-SK "/k": device not found\n{DENIED}',
        ["no private key to log in with", "/k is the right key, but could not be used: device not found"],
        False,
    ),
    (
        f"{OFFERED}Received disconnect from 10.9.9.9 port 2222:2: Too many authentication failures\n",
        ["none of the keys", "accepts no more than 1 attempts; set the right `key_file`"],
        False,
    ),
    ("Connection timed out during banner exchange\n", ["no SSH session was established", "`connect_timeout`"], False),
    (CLOSED, ["it closed the connection at once"], True),
    (RESET, ["Connection reset by peer"], True),
    (GONE, ["it closed the connection at once"], True),
    ("channel 0: open failed: connect failed: Connection refused\n", ["the jump host could not connect to it"], True),
    (
        "Unable to negotiate with 10.9.9.9 port 2222: no matching cipher found. Their offer: 3des-cbc\n",
        ["no SSH session was established", "no matching cipher found. Their offer: 3des-cbc"],
        False,
    ),
    ("kex_exchange_identification: banner line contains invalid characters\n", ["port that of an SSH server"], False),
]  # fmt: skip


@pytest.mark.parametrize(("said", "words", "passes"), CASES, ids=[words[0][:30] for _, words, _ in CASES])
def test_what_the_program_says_is_reported_as_by_the_other_way(said: str, words: list[str], passes: bool) -> None:
    for ends in ("\n", "\r\n"):  # as it ends its own lines
        cause = find_cause("\n".join(said.replace("\n", ends).splitlines()) + "\n")
        assert cause is not None
        text = explain(cause, PLACE)
        assert text.startswith("10.9.9.9 port 2222: ")
        assert [word for word in words if word not in text] == []
    error = ClusterError(text)
    error.__cause__ = cause
    assert _is_transient(error) == passes


def test_what_is_not_known_is_reported_whole_without_the_programs_steps() -> None:
    said = "OpenSSH_9.2p1\ndebug1: Connecting to 10.9.9.9\nsomething new\nof two lines\n"
    assert find_cause(said) is None
    text = explain(unknown_cause(said, 255), PLACE)
    assert "ended with exit status 255 with the output: something new; of two lines. Try `ssh -p 2222" in text
    assert "ended without any output. Try" in explain(unknown_cause("", None), PLACE)
