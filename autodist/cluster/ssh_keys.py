"""Private keys: what a file holds, and a login with all keys that may be offered."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

_LONGEST_KEY = 1 << 16
_PUBLIC = (
    b"ssh-",
    b"ecdsa-",
    b"sk-",
    b"---- BEGIN SSH2 PUBLIC KEY",
    b"-----BEGIN PUBLIC KEY",
    b"-----BEGIN RSA PUBLIC",
)
_KINDS = (
    (rsa.RSAPrivateKey, paramiko.RSAKey),
    (ec.EllipticCurvePrivateKey, paramiko.ECDSAKey),
    (ed25519.Ed25519PrivateKey, paramiko.Ed25519Key),
)


class UnusableKeyError(Exception):
    """A file holds no private key that can be offered.

    Args:
        file: its path.
        reason: why, with the mend.
        is_locked: whether a passphrase would unlock it, so that an agent may hold it.
    """

    def __init__(self, file: str, reason: str, is_locked: bool = False) -> None:
        self.file, self.reason, self.is_locked = file, reason, is_locked
        super().__init__(f"{file} {reason}")


class LoginRefusedError(paramiko.AuthenticationException):
    """The server takes none of the keys.

    Args:
        offered: the files of the keys that were, and how an agent calls its own.
        unusable: those that could not be.
        takes: the server's names for the ways to log in; none where they are not known.
    """

    def __init__(self, offered: Sequence[str], unusable: Sequence[UnusableKeyError], takes: Sequence[str] = ()) -> None:
        self.offered, self.unusable, self.takes = tuple(offered), tuple(unusable), tuple(takes)
        super().__init__(f"none of {len(offered)} keys was accepted")


class MoreThanKeyError(paramiko.AuthenticationException):
    """The server wants a password or a code besides.

    Args:
        wants: its names for what it wants.
    """

    def __init__(self, wants: Sequence[str]) -> None:
        self.wants = tuple(wants)
        super().__init__(f"the server wants {', '.join(wants)} besides a key")


def load_key(file: str) -> paramiko.PKey:
    """The private key in a file, in OpenSSH's format or any PEM, with its certificate if one stands beside it.

    Raises:
        UnusableKeyError: there is none, or it is locked.
    """
    content = read_key(file)
    if content.lstrip().startswith(_PUBLIC):
        private = file.removesuffix(".pub")
        beside = private != file and Path(private).is_file()
        raise UnusableKeyError(file, f"is a public key; give the private one{f', {private}' if beside else ''}")
    if content.startswith(b"PuTTY-User-Key-File"):
        mend = f"write it anew with `puttygen {file} -O private-openssh -o <new file>`"
        raise UnusableKeyError(file, f"is a key in PuTTY's format; {mend}")
    try:
        key = _parsed(content)
    except TypeError as error:  # so cryptography says that a password is needed
        raise UnusableKeyError(
            file, f"is locked by a passphrase; unlock it: `ssh-add {file}`", is_locked=True
        ) from error
    except (ValueError, UnsupportedAlgorithm, paramiko.SSHException) as error:
        mend = "give an RSA, ECDSA or Ed25519 key, or put a key of another kind (FIDO) into an agent by `ssh-add`"
        raise UnusableKeyError(file, f"holds no private key that can be used here; {mend}") from error
    if Path(f"{file}-cert.pub").is_file():
        key.load_certificate(f"{file}-cert.pub")
    return key


def read_key(file: str) -> bytes:
    """What stands in a file that should be a key.

    Raises:
        UnusableKeyError: it cannot be read, or nothing that could be a key is in it.
    """
    path = Path(file)
    if path.is_dir():
        raise UnusableKeyError(file, "is a directory; give the private key in it")
    try:
        with path.open("rb") as opened:
            content = opened.read(_LONGEST_KEY + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnusableKeyError(file, f"cannot be read ({reason}); give a private key that you may read") from error
    if not content.strip() or len(content) > _LONGEST_KEY:
        raise UnusableKeyError(file, f"is {'too long for a key' if content.strip() else 'empty'}; give a private key")
    return content


def _parsed(content: bytes) -> paramiko.PKey:
    """The key, by way of OpenSSH's format: paramiko itself reads no PKCS #8."""
    is_openssh = b"-----BEGIN OPENSSH PRIVATE KEY" in content
    load = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    loaded = load(content, password=None)
    for theirs, ours in _KINDS:
        if isinstance(loaded, theirs):
            openssh, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            text = loaded.private_bytes(serialization.Encoding.PEM, openssh, plain).decode()
            return ours.from_private_key(io.StringIO(text))
    raise ValueError(f"a key of type {type(loaded).__name__}")


class KeyLogin:
    """Offers keys: those of files, then an agent's, of which those come first whose public half lies beside a file.

    Args:
        user: to log in as.
        files: of private keys; one that is not there is passed over.
        uses_agent: whether an agent is asked.
        identities_only: whether an agent's keys that belong to none of the files are left alone.
    """

    def __init__(self, user: str, files: Sequence[str], uses_agent: bool, identities_only: bool) -> None:
        self._user, self._files = user, tuple(files)
        self._uses_agent, self._identities_only = uses_agent, identities_only
        self._offered: list[str] = []
        self._unusable: list[UnusableKeyError] = []

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Logs in.

        Raises:
            LoginRefusedError, MoreThanKeyError: the server does not let the user in.
            paramiko.SSHException, EOFError: the connection was lost.
        """
        for name, key in self._keys():
            self._offered.append(name)
            try:
                more = transport.auth_publickey(self._user, key)
            except paramiko.BadAuthenticationType:
                break
            except paramiko.AuthenticationException:
                if not transport.is_active():  # so it ends after too many tries
                    break
                continue
            if more:
                raise MoreThanKeyError(more)
            return
        raise LoginRefusedError(self._offered, self._unusable)

    def _keys(self) -> Iterator[tuple[str, paramiko.PKey]]:
        for file in filter(os.path.exists, self._files):
            try:
                yield file, load_key(file)
            except UnusableKeyError as error:
                self._unusable.append(error)
        if self._uses_agent:
            yield from self._agents_keys()

    def _agents_keys(self) -> Iterator[tuple[str, paramiko.PKey]]:
        agent = None
        try:
            agent = paramiko.Agent()
            ours = self._public_halves()
            keys = [(key, key.get_base64() in ours) for key in agent.get_keys()]
            for key, is_ours in sorted(keys, key=lambda item: not item[1]):
                if is_ours or not self._identities_only:
                    yield f"a key of the agent ({key.get_name()})", key
        except paramiko.SSHException as error:
            self._unusable.append(UnusableKeyError("the agent", f"does not answer: {error}"))
        finally:
            if agent is not None:
                agent.close()

    def _public_halves(self) -> set[str]:
        files = [file if file.endswith(".pub") else f"{file}.pub" for file in self._files]
        found = set()
        for file in filter(os.path.isfile, files):
            with contextlib.suppress(OSError):
                found.update(Path(file).read_text(errors="replace").split()[1:2])
        return found
