"""Private keys: loads them from files, and logs in with the keys of files and agents."""

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

_MAX_KEY = 1 << 16
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
    """Raised when a file holds no private key that can be offered.

    Args:
        file: path of the file.
        reason: reason and fix.
        is_locked: True if a passphrase would unlock the key, so that an agent may hold it.
    """

    def __init__(self, file: str, reason: str, is_locked: bool = False) -> None:
        self.file, self.reason, self.is_locked = file, reason, is_locked
        super().__init__(f"{file} {reason}")


class LoginRefusedError(paramiko.AuthenticationException):
    """Raised when the server accepts none of the keys.

    Args:
        offered: files of the offered keys, and an agent's names of its keys.
        unusable: keys that could not be offered.
        takes: the server's names of its login methods; empty if they are unknown.
    """

    def __init__(self, offered: Sequence[str], unusable: Sequence[UnusableKeyError], takes: Sequence[str] = ()) -> None:
        self.offered, self.unusable, self.takes = tuple(offered), tuple(unusable), tuple(takes)
        super().__init__(f"none of {len(offered)} keys was accepted")


class MoreThanKeyError(paramiko.AuthenticationException):
    """Raised when the server requires a password or a code in addition to a key.

    Args:
        wants: the server's names of the additional login methods.
    """

    def __init__(self, wants: Sequence[str]) -> None:
        self.wants = tuple(wants)
        super().__init__(f"the server requires {', '.join(wants)} in addition to a key")


def load_key(file: str) -> paramiko.PKey:
    """Loads a private key in OpenSSH's format or any PEM, with its certificate if the folder has one.

    Raises:
        UnusableKeyError: the file holds no private key, or a locked one.
    """
    content = read_key(file)
    if content.lstrip().startswith(_PUBLIC):
        private = file.removesuffix(".pub")
        exists = private != file and Path(private).is_file()
        raise UnusableKeyError(file, f"is a public key; give the private one{f', {private}' if exists else ''}")
    if content.startswith(b"PuTTY-User-Key-File"):
        fix = f"convert it with `puttygen {file} -O private-openssh -o <new file>`"
        raise UnusableKeyError(file, f"is a key in PuTTY's format; {fix}")
    try:
        key = _parsed(content)
    except TypeError as error:  # raised by cryptography if a password is needed
        raise UnusableKeyError(
            file, f"is locked by a passphrase; unlock it: `ssh-add {file}`", is_locked=True
        ) from error
    except (ValueError, UnsupportedAlgorithm, paramiko.SSHException) as error:
        fix = "use an RSA, ECDSA or Ed25519 key, or add a key of another kind (FIDO) to an agent by `ssh-add`"
        raise UnusableKeyError(file, f"holds no private key that can be used here; {fix}") from error
    if Path(f"{file}-cert.pub").is_file():
        key.load_certificate(f"{file}-cert.pub")
    return key


def read_key(file: str) -> bytes:
    """Reads a file that should hold a key.

    Raises:
        UnusableKeyError: the file cannot be read, is empty, or is too long for a key.
    """
    path = Path(file)
    if path.is_dir():
        raise UnusableKeyError(file, "is a directory; give the private key in it")
    try:
        with path.open("rb") as opened:
            content = opened.read(_MAX_KEY + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnusableKeyError(file, f"cannot be read ({reason}); give a private key that you may read") from error
    if not content.strip() or len(content) > _MAX_KEY:
        raise UnusableKeyError(file, f"is {'too long for a key' if content.strip() else 'empty'}; give a private key")
    return content


def _parsed(content: bytes) -> paramiko.PKey:
    """Parses a key, converting it to OpenSSH's format first: paramiko cannot read PKCS #8."""
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
    """Offers the keys of files, then those of an agent, starting with those whose public key is in a `.pub` file.

    Args:
        user: user name for the login.
        files: files of private keys; missing files are skipped.
        uses_agent: True if the keys of an agent are offered.
        identities_only: True if an agent's keys that belong to none of the files are not offered.
    """

    def __init__(self, user: str, files: Sequence[str], uses_agent: bool, identities_only: bool) -> None:
        self._user, self._files = user, tuple(files)
        self._uses_agent, self._identities_only = uses_agent, identities_only
        self._offered: list[str] = []
        self._unusable: list[UnusableKeyError] = []

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Logs in.

        Raises:
            LoginRefusedError, MoreThanKeyError: the server refuses the login.
            paramiko.SSHException, EOFError: the connection was lost.
        """
        for name, key in self._keys():
            self._offered.append(name)
            try:
                more = transport.auth_publickey(self._user, key)
            except paramiko.BadAuthenticationType:
                break
            except paramiko.AuthenticationException:
                if not transport.is_active():  # the server has closed it after too many attempts
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
            yield from self._agent_keys()

    def _agent_keys(self) -> Iterator[tuple[str, paramiko.PKey]]:
        agent = None
        try:
            agent = paramiko.Agent()
            ours = self._public_keys()
            keys = [(key, key.get_base64() in ours) for key in agent.get_keys()]
            for key, is_ours in sorted(keys, key=lambda pair: not pair[1]):
                if is_ours or not self._identities_only:
                    yield f"a key of the agent ({key.get_name()})", key
        except paramiko.SSHException as error:
            self._unusable.append(UnusableKeyError("the agent", f"does not answer: {error}"))
        finally:
            if agent is not None:
                agent.close()

    def _public_keys(self) -> set[str]:
        files = [file if file.endswith(".pub") else f"{file}.pub" for file in self._files]
        public_keys = set()
        for file in filter(os.path.isfile, files):
            with contextlib.suppress(OSError):
                public_keys.update(Path(file).read_text(errors="replace").split()[1:2])
        return public_keys
