"""Faults are written in one way, read back as they were written, and refused with words that help."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narwhal.testing.stub_engine import Fault, FaultKind, FaultLeg, FaultSpecError, parse_fault
from narwhal.testing.stub_engine.faults import KINDS, fault_from_json


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hang", Fault(FaultKind.HANG)),
        ("health:hang", Fault(FaultKind.HANG, FaultLeg.HEALTH)),
        ("decode:status=500,times=3", Fault(FaultKind.STATUS, FaultLeg.DECODE, times=3, status=500)),
        (
            "status=503,retry_after_s=1.5,body=busy, really",
            Fault(FaultKind.STATUS, status=503, retry_after_s=1.5, body="busy, really"),
        ),
        ("decode:silence=5,every=10", Fault(FaultKind.SILENCE, FaultLeg.DECODE, every=10, after=5)),
        ("prefill:bad_ticket", Fault(FaultKind.BAD_TICKET, FaultLeg.PREFILL, variant="null")),
        ("bad_200=empty", Fault(FaultKind.BAD_200, variant="empty")),
        ("no_finish,done=false", Fault(FaultKind.NO_FINISH, done=False)),
        ("restart", Fault(FaultKind.RESTART, times=1)),
        ("restart,skip=4", Fault(FaultKind.RESTART, times=1, skip=4)),
        ("refuse=rst,times=2", Fault(FaultKind.REFUSE, times=2, variant="rst")),
        ("big_frame", Fault(FaultKind.BIG_FRAME, size_bytes=3_000_000)),
        (" decode : slow = 20 ", Fault(FaultKind.SLOW, FaultLeg.DECODE, itl_ms=20.0)),
    ],
)
def test_a_spec_means_what_it_says(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "unknown kind ''"),
        ("explode", "unknown kind 'explode'; there are refuse, hang"),
        ("encoder:hang", "has no leg 'encoder'"),
        ("prefill:refuse", "has no leg 'prefill', only any"),
        ("decode:bad_ticket", "has no leg 'decode', only any, prefill"),
        ("health:cut", "has no leg 'health'"),
        ("status", "needs a value: status=... sets status"),
        ("status=99", "status must be a status code"),
        ("status=many", "status must be a status code"),
        ("delay=-1", "delay_ms must be milliseconds"),
        ("delay=nan", "delay_ms must be milliseconds"),
        ("hang=3", "takes no value"),
        ("hang,times=0", "times must be a whole number, at least 1"),
        ("hang,times=1.5", "times must be a whole number"),
        ("hang,times", "must be KEY=VALUE"),
        ("hang,times=1,times=2", "each key once"),
        ("hang,after=3", "hang has no 'after', only every, skip, times"),
        ("bad_ticket=wet", "has no variant 'wet', only null"),
        ("refuse,times=1", "only refuse=rst can"),
        ("paused,every=2", "holds until it is lifted"),
        ("no_finish=perhaps", "done must be true or false"),
        ("other_model=", "model must be a model name"),
    ],
)
def test_a_bad_spec_is_refused_with_the_part_that_is_wrong(text: str, words: str) -> None:
    with pytest.raises(FaultSpecError) as caught:
        parse_fault(text)
    assert words in str(caught.value)


def test_json_says_the_same_as_text() -> None:
    document = {"leg": "decode", "kind": "status", "status": 503, "times": 3}
    assert fault_from_json(document) == parse_fault("decode:status=503,times=3")
    assert fault_from_json("decode:status=503,times=3") == fault_from_json(document)


@pytest.mark.parametrize(
    "document", [3, None, [], {}, {"kind": "hang", "times": True}, {"kind": "delay", "delay_ms": "x"}]
)
def test_bad_json_is_refused(document: object) -> None:
    with pytest.raises(FaultSpecError):
        fault_from_json(document)


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_reads_back_what_it_describes(kind: FaultKind) -> None:
    value = {"status": "503", "delay_ms": "5", "model": "m", "itl_ms": "7"}.get(KINDS[kind].value or "")
    fault = parse_fault(kind if value is None else f"{kind}={value}")
    assert fault_from_json(fault.describe()) == fault


@given(st.text() | st.from_regex(r"(any|decode|health):[a-z_0-9]+(=\w+)?(,\w+=\w+)*"))
def test_any_text_is_a_fault_or_refused(text: str) -> None:
    try:
        fault = parse_fault(text)
    except FaultSpecError:
        return
    assert fault_from_json(fault.describe()) == fault


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(["kind", "leg", "times", "status", "after", "variant", "body", "delay_ms", "done", "x"]),
        st.sampled_from([*FaultKind, *FaultLeg, "null", 1, 500, -3, 2.5, True]) | json_values,
    )
)
def test_any_object_is_a_fault_or_refused(document: dict[str, object]) -> None:
    try:
        fault = fault_from_json(document)
    except FaultSpecError:
        return
    assert fault_from_json(fault.describe()) == fault
