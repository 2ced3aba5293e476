"""The seal of a manifest: its last member, a keyed hash over every byte before it.

A manifest is JSON that may say anything that makes sense, so a flipped digit in it would not be
noticed otherwise. The seal also tells a manifest of this store from one that was put there.
"""

import hashlib
import hmac
import re

_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"\}')
_LENGTH = len(',"seal":""}') + 64
_PURPOSE = b"phosd manifest 1\0"


def sealed(key: bytes, text: bytes) -> bytes:
    """The JSON object ``text`` with its seal (HMAC-SHA-256 under ``key``) as the last member."""
    return text[:-1] + b',"seal":"' + _hash(key, text).encode() + b'"}'


def unsealed(key: bytes, text: bytes) -> bytes | None:
    """What :func:`sealed` was given, or None when a byte of ``text`` is not as it was."""
    found = _SEAL.fullmatch(text[-_LENGTH:])
    body = text[:-_LENGTH] + b"}"
    if found is None or not hmac.compare_digest(found[1], _hash(key, body).encode()):
        return None
    return body


def _hash(key: bytes, text: bytes) -> str:
    return hmac.new(key, _PURPOSE + text, hashlib.sha256).hexdigest()
