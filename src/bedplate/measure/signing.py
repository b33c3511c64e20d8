"""Sign a run with ed25519, and verify signed results. Needs `cryptography`, which the extra `sign` installs.

The signature is over the document without the key `signature`, as JSON with sorted keys, without spaces and with
non-ASCII characters unescaped. So it depends neither on indentation and the order of keys, nor on the version of
bedplate.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bedplate.errors import ExternalFailure, UsageError, make_unreadable_error
from bedplate.home import get_home, make_folder, open_private
from bedplate.values.record import from_json, to_json
from bedplate.values.signed_result import ResultSignature, SignedResult, VerifiedResult

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_NAME = "result-signing-key.pem"
KEY_ID_LENGTH = 16
FIELD = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
SMALL_ORDER = frozenset([0, 1, FIELD - 1, _ORDER_8, FIELD - _ORDER_8])
"""The y coordinates of the points whose order divides 8. As a public key, each has a signature that fits any file."""


def require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ExternalFailure(
            "signatures need the Python package cryptography", hint='install it: pip install "bedplate[sign]"'
        ) from error


def get_key_path() -> Path:
    return get_home() / KEY_NAME


def load_key(path: Path | None = None) -> Ed25519PrivateKey:
    """The private key in a PEM file. Without `path`, that of this installation, which is created if it is missing."""
    require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    where = path or get_key_path()
    if path is None and not where.exists():
        _create_key(where)
    try:
        key = load_pem_private_key(where.read_bytes(), password=None)
    except OSError as error:
        raise UsageError(f"cannot read the key {where}", cause=error.strerror or str(error)) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{where} is not a private key in PEM format without a password", cause=str(error)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(
            f"{where} is not an ed25519 key", hint="create one: openssl genpkey -algorithm ed25519 -out key.pem"
        )
    return key


def _create_key(path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    data = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        make_folder(path.parent)
        with open_private(path, "xb") as file:
            file.write(data)
    except FileExistsError:
        return  # another process created it meanwhile
    except OSError as error:
        raise ExternalFailure(f"cannot write {path}", cause=error.strerror or str(error)) from error


def sign_result(result: SignedResult, key: Ed25519PrivateKey) -> str:
    """The document as JSON text, with its signature."""
    document: dict[str, Any] = json.loads(to_json(result))
    public = key.public_key().public_bytes_raw()
    signature = key.sign(make_signed_bytes(document))
    signed = ResultSignature(
        public_key=base64.b64encode(public).decode(), signature=base64.b64encode(signature).decode()
    )
    document["signature"] = json.loads(to_json(signed))
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def make_signed_bytes(document: dict[str, Any]) -> bytes:
    rest = {name: value for name, value in document.items() if name != "signature"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def compute_key_id(public_key: str) -> str:
    return hashlib.sha256(base64.b64decode(public_key)).hexdigest()[:KEY_ID_LENGTH]


def verify_file(path: Path, expected_key: str | None = None) -> VerifiedResult:
    """Whether a file has a valid signature, and of which key; with `expected_key`, only that of this public key."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise make_unreadable_error(path, error) from error
    return verify_document(data, path.name, expected_key)


def verify_document(data: bytes, name: str, expected_key: str | None = None) -> VerifiedResult:
    try:
        document = json.loads(data.decode(), object_pairs_hook=_make_object, parse_constant=_refuse_constant)
    except RepeatedKeyError as error:
        return VerifiedResult(file=name, is_valid=False, reason=f"the key {error} occurs twice in one object")
    except (ValueError, RecursionError):
        return VerifiedResult(file=name, is_valid=False, reason="it is not JSON")
    if not isinstance(document, dict) or document.get("schema") != "signed-result/1":
        return VerifiedResult(file=name, is_valid=False, reason="it is not a signed result of bedplate")
    try:
        signed = from_json(ResultSignature, json.dumps(document.get("signature")))
        public, signature = (base64.b64decode(one, validate=True) for one in (signed.public_key, signed.signature))
    except (UsageError, binascii.Error):
        return VerifiedResult(file=name, is_valid=False, reason="it has no signature")
    reason = _find_mismatch(document, public, signature)
    key = base64.b64encode(public).decode()  # several texts decode to the same bytes
    if reason is None and expected_key is not None and expected_key != key:
        reason = f"it was signed with another key, {compute_key_id(key)}"
    run = document.get("run")
    return VerifiedResult(
        file=name,
        is_valid=reason is None,
        reason=reason,
        public_key=key,
        key_id=compute_key_id(key),
        run=str(run.get("id")) if isinstance(run, dict) else None,
    )


class RepeatedKeyError(ValueError):
    """Programs differ in which value of a repeated key they read, so a signature would not cover what is read."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKeyError(ascii(next(name for name in names if names.count(name) > 1)))
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _find_mismatch(document: dict[str, Any], public: bytes, signature: bytes) -> str | None:
    require_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if int.from_bytes(public, "little") % 2**255 % FIELD in SMALL_ORDER:
        return "its public key is not one that signs: a signature of it fits any file"
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, make_signed_bytes(document))
    except (InvalidSignature, ValueError):
        return "the signature does not match: the file was changed after it was signed"
    return None
