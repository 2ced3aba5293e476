"""Seal what the store keeps as JSON: the last member is a keyed hash over all bytes before it.

A manifest is JSON, in which a changed digit would otherwise go unnoticed. The seal also tells a
manifest of this store from one that was put there by others.
"""

import hashlib
import hmac
import re

_SEAL = re.compile(rb',"seal":"([0-9a-f]{64})"\}')
_LENGTH = len(',"seal":""}') + 64
_MANIFEST = b"phosd manifest 1"


def sealed(key: bytes, text: bytes, purpose: bytes = _MANIFEST) -> bytes:
    """Return the JSON object ``text`` with a seal (HMAC-SHA-256 with ``key``) as last member.
    ``purpose`` says what it is, so that nothing can be taken for something else.
    """
    return text[:-1] + b',"seal":"' + _hash(key, purpose, text).encode() + b'"}'


def unsealed(key: bytes, text: bytes, purpose: bytes = _MANIFEST) -> bytes | None:
    """Return the text that :func:`sealed` was given for this purpose, or None if a byte of ``text``
    has changed.
    """
    found = _SEAL.fullmatch(text[-_LENGTH:])
    body = text[:-_LENGTH] + b"}"
    if found is None or not hmac.compare_digest(found[1], _hash(key, purpose, body).encode()):
        return None
    return body


def _hash(key: bytes, purpose: bytes, text: bytes) -> str:
    return hmac.new(key, purpose + b"\0" + text, hashlib.sha256).hexdigest()
