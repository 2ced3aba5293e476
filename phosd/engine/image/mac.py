"""Seal manifests: the last member is a keyed hash over all bytes before it.

A manifest is JSON, in which a changed digit would otherwise go unnoticed. The seal also tells a
manifest of this store from one that was put there by others.
"""

import hashlib
import hmac
import re

_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"\}')
_LENGTH = len(',"seal":""}') + 64
_PURPOSE = b"phosd manifest 1\0"


def sealed(key: bytes, text: bytes) -> bytes:
    """Return the JSON object ``text`` with a seal (HMAC-SHA-256 with ``key``) as last member."""
    return text[:-1] + b',"seal":"' + _hash(key, text).encode() + b'"}'


def unsealed(key: bytes, text: bytes) -> bytes | None:
    """Return the text that :func:`sealed` was given, or None if a byte of ``text`` has changed."""
    found = _SEAL.fullmatch(text[-_LENGTH:])
    body = text[:-_LENGTH] + b"}"
    if found is None or not hmac.compare_digest(found[1], _hash(key, body).encode()):
        return None
    return body


def _hash(key: bytes, text: bytes) -> str:
    return hmac.new(key, _PURPOSE + text, hashlib.sha256).hexdigest()
