"""The handoff document: what is refused and how that is said, and which of two documents is newer."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.core.handoff import (
    HANDOFF_SCHEMA,
    HANDOFF_SCHEMA_VERSION,
    HandoffDocument,
    LeasePart,
    configured_engine_set,
    decode_handoff,
    mismatches,
)
from narwhal.core.vocabulary import FencingToken
from narwhal.errors import HandoffRejected
from tests.core.fleets import entries, make_plane
from tests.core.leases import A


def make_document(*, token: int = 7, version: int = 1) -> HandoffDocument:
    lease = LeasePart(router=A, incarnation="a-1", token=FencingToken(token))
    return make_plane().capture(lease, version=version, now=100.0, wall=1.5e9)


def altered(**changes: Any) -> str:
    """The JSON of a document with some top-level keys replaced, or removed if None."""
    data = json.loads(make_document().encode()) | changes
    return json.dumps({key: value for key, value in data.items() if value is not None})


def reasons(text: str | bytes) -> tuple[str, ...]:
    with pytest.raises(HandoffRejected) as caught:
        decode_handoff(text)
    return caught.value.reasons


def test_a_document_reads_back_as_it_was_written() -> None:
    document = make_document()
    assert decode_handoff(document.encode()) == document


def test_the_text_is_plain_json_with_stable_keys() -> None:
    text = make_document().encode()
    data = json.loads(text)
    assert (data["schema"], data["schema_version"]) == (HANDOFF_SCHEMA, HANDOFF_SCHEMA_VERSION)
    assert list(data) == sorted(data)
    assert text == make_document().encode()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"schema": "other.handoff"}, "schema"),
        ({"schema_version": 2}, "schema_version"),
        ({"cluster": None}, "cluster"),
        ({"version": 0}, "version"),
        ({"version": None}, "version"),
        ({"lease": {"router": "a", "incarnation": "x"}}, "lease.token"),
        ({"surprise": 1}, "surprise"),
        ({"engines": [{"id": "p1", "url": "u", "role": "both"}]}, "engines.0.role"),
        ({"counters": {"takeovers": -1}}, "counters.takeovers"),
        ({"written_wall": math.nan}, "written_wall"),
        ({"consolidation_risk": [{"role": "prefill", "age_s": math.inf}]}, "consolidation_risk.0.age_s"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], field: str) -> None:
    (reason,) = reasons(altered(**changes))
    assert reason.startswith(f"{field}: ")


def test_every_wrong_field_is_named() -> None:
    found = reasons(altered(schema="x", schema_version=9, version=-1))
    assert [reason.partition(":")[0] for reason in found] == ["schema", "schema_version", "version"]


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "7", '"text"', b"\xff\xfe", "{" * 5000])
def test_what_is_no_document_is_rejected_and_nothing_else_is_raised(text: str | bytes) -> None:
    assert reasons(text)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace"))))
def test_any_bytes_are_either_a_document_or_rejected(data: bytes) -> None:
    with suppress(HandoffRejected):
        assert decode_handoff(data).schema_id == HANDOFF_SCHEMA


@given(st.data())
def test_a_torn_document_is_rejected(data: st.DataObject) -> None:
    text = make_document().encode()
    cut = data.draw(st.integers(min_value=0, max_value=len(text) - 1))
    assert reasons(text[:cut])


def test_a_fitting_document_has_no_mismatch() -> None:
    assert mismatches(make_document(), cluster="default", engines=entries()) == []


def test_mismatches_are_named_field_by_field() -> None:
    engines = list(entries(prefill=2, decode=3))[1:]
    engines[0] = engines[0].model_copy(update={"url": "http://elsewhere:1"})
    assert mismatches(make_document(), cluster="other", engines=engines) == [
        "cluster: the document is of 'default', this router of 'other'",
        "engines.d3: configured, not in the document",
        "engines.p1: in the document, not in the configuration",
        "engines.p2.url: http://10.0.1.2:8000 in the document, http://elsewhere:1 configured",
    ]


def test_an_engine_that_is_described_twice_is_a_mismatch() -> None:
    document = make_document()
    doubled = document.model_copy(update={"engines": (*document.engines, document.engines[0])})
    assert mismatches(doubled, cluster="default", engines=entries()) == ["engines.d1: described 2 times"]


def test_a_role_that_the_controller_moved_is_no_mismatch() -> None:
    document = make_document()
    moved = document.engines[0].model_copy(update={"role": "prefill"})
    changed = document.model_copy(update={"engines": (moved, *document.engines[1:])})
    assert mismatches(changed, cluster="default", engines=entries()) == []


@pytest.mark.parametrize(
    ("older", "newer"),
    [((7, 1), (7, 2)), ((7, 99), (8, 1)), ((7, 2), (8, 2)), ((9, 9), (10, 1))],
)
def test_the_token_orders_before_the_version(older: tuple[int, int], newer: tuple[int, int]) -> None:
    first, second = (make_document(token=token, version=version) for token, version in (older, newer))
    assert first.order < second.order


def test_the_engine_set_of_document_and_configuration_compare() -> None:
    assert make_document().engine_set == configured_engine_set(entries())
    assert configured_engine_set(reversed(entries())) == configured_engine_set(entries())
    assert configured_engine_set(entries(decode=3)) != configured_engine_set(entries())
