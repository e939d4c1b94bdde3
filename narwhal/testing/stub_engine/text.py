"""The stub's model: a tokeniser, and an answer that follows from the prompt alone.

Any two stubs answer one prompt with the same text, whether the prompt was computed at home or its KV fetched, so that
a wrong ticket shows as a wrong text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from zlib import crc32

VOCABULARY_SIZE = 32_000
DEFAULT_ANSWER_TOKENS = 24

# Some words have characters of two, three and four bytes, so that a relay which cuts inside one is found out.
_TEXT = (
    "ice tide harbour lantern drift quiet northern salt bay current signal whale narrow channel deep turn hold wind "
    "shore bright slow pilot rope anchor mist chart star keel wave pod horn glass hollow winter path blue stone light "
    "brisk ferry gull ledge moor oar plank reef sail thaw urchin vessel yaw zenith crest dune eddy floe grotto isle "
    "größe åre fjörð žába naïve 鯨 氷海 角 海 🐋 🧊 🌊"
)
_WORDS = tuple(_TEXT.split())


def tokenise(text: str) -> list[int]:
    """Return one token id for each word of `text`."""
    return [crc32(word) % VOCABULARY_SIZE for word in text.encode("utf-8", "surrogatepass").split()]


def digest_of(tokens: list[int], rendered_with: bytes = b"") -> str:
    """Return the identity of a prompt: its tokens, and whatever else changes how it is rendered."""
    seen = hashlib.blake2b(rendered_with, digest_size=16)
    seen.update(",".join(map(str, tokens)).encode())
    return seen.hexdigest()


def words_for(digest: str, choice: int = 0) -> Iterator[str]:
    """Yield the words that answer the prompt of `digest`, for ever."""
    count = len(_WORDS)
    block = 0
    while True:
        seed = hashlib.blake2b(f"{digest}/{choice}/{block}".encode(), digest_size=64).digest()
        for at in range(0, 64, 2):
            yield " " + _WORDS[(seed[at] << 8 | seed[at + 1]) % count]
        block += 1


def corrupted(digest: str) -> str:
    """Return the identity that an engine answers for when it read another prompt's KV."""
    return digest_of([], f"corrupt {digest}".encode())
