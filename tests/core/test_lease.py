"""The lease as a value: canonical text, and anything else under its key is refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.core.lease import LeaseRecord, decode_lease
from narwhal.core.vocabulary import FencingToken
from tests.core.leases import A, B, make_lease

LEASE = make_lease()
FIELDS = sorted(json.loads(LEASE.encode()).keys() - {"v"})


def test_a_lease_reads_back_as_it_was_written() -> None:
    assert decode_lease(LEASE.encode()) == LEASE


def test_the_text_is_canonical() -> None:
    text = LEASE.encode()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert text == decode_lease(text).encode()


def test_a_token_of_thirteen_digits_survives() -> None:
    token = FencingToken(1_796_022_746_123)
    assert decode_lease(LEASE.with_token(token).encode()).token == token


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (make_lease(), True),
        (replace(make_lease(), url="http://moved"), True),
        (make_lease(B), False),
        (make_lease(token=8), False),
        (make_lease(incarnation="router-a-2"), False),
        (None, False),
    ],
)
def test_a_term_is_router_incarnation_and_token(other: LeaseRecord | None, same: bool) -> None:
    assert LEASE.same_term(other) is same


@pytest.mark.parametrize("text", ["", "x", "null", "[]", "7", "{}", '{"v":1}', '{"v":1,"process":7}', "\ud800"])
def test_what_is_no_lease_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_lease(text)


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version"):
        decode_lease(LEASE.encode().replace('"v":1', '"v":2'))


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    data = json.loads(LEASE.encode())
    del data[field]
    with pytest.raises(ValueError, match=field):
        decode_lease(json.dumps(data))


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_wrong_type_is_refused_by_name(field: str) -> None:
    """An operator may have edited the key by hand; nobody may do arithmetic with what is no number."""
    data = json.loads(LEASE.encode())
    data[field] = [data[field]]
    with pytest.raises(ValueError, match=field):
        decode_lease(json.dumps(data))


@pytest.mark.parametrize(("field", "value"), [("token", 0), ("token", True), ("ttl_ms", 0), ("ttl_ms", -1)])
def test_a_number_without_meaning_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        decode_lease(json.dumps(json.loads(LEASE.encode()) | {field: value}))


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="surprise"):
        decode_lease(json.dumps(json.loads(LEASE.encode()) | {"surprise": 1}))


@given(st.text(max_size=100))
def test_any_text_is_a_lease_or_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_lease(text)


def test_the_same_router_in_another_term_is_another_value() -> None:
    assert make_lease(A, token=7) != make_lease(A, token=8)
