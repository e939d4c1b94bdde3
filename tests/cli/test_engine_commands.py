"""`narwhal engines` asks the active router's admin port, wherever the lease says that it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from narwhal.cli import main
from tests.cli.clusters import ScriptedCluster


def engine(name: str, **facts: Any) -> dict[str, Any]:
    return {
        "id": name,
        "url": f"http://{name}:8000",
        "role": name.partition("-")[0],
        "state": "eligible",
        "healthy": True,
        "generation": "1796022746.12",
        "inflight": 0,
        "ejection": None,
        "holds": [],
        "streaks": {},
        "leg_streaks": {},
        "interval": {"succeeded": 3, "failed": 0},
        "history": [],
        **facts,
    }


DRAIN = {
    "kind": "operator_drain",
    "age_s": 12.3,
    "reason": "new driver",
    "actor": "ann",
    "remaining_s": None,
    "settled": True,
    "next_probe_s": None,
}
EJECTION = {
    "cause": "liveness",
    "age_s": 75.0,
    "detail": "status 500",
    "attempts": 4,
    "last_step": "health",
    "last_reason": "status 500",
    "next_attempt_s": 8.0,
}
FLEET = [
    engine("prefill-1", inflight=3),
    engine("prefill-2", state="operator_drain", holds=[DRAIN]),
    engine("decode-1", healthy=None, streaks={"connection": 2}, leg_streaks={"stream/decode": 1}),
    engine(
        "decode-2",
        state="ejected",
        healthy=False,
        ejection=EJECTION,
        history=[{"age_s": 75.0, "what": "ejected", "why": "x"}],
    ),
]


@pytest.fixture
async def pair(cluster: ScriptedCluster) -> ScriptedCluster:
    """A whole pair whose active router knows the fleet."""
    await cluster.a_whole_pair()
    answers = cluster.routers["router-a"].admin
    answers["GET /admin/engines"] = (200, {"engines": FLEET})
    answers |= {f"GET /admin/engines/{one['id']}": (200, one) for one in FLEET}
    answers["POST /admin/engines/prefill-1/drain"] = (200, engine("prefill-1", state="operator_drain", inflight=3))
    answers["POST /admin/engines/prefill-2/undrain"] = (200, engine("prefill-2"))
    return cluster


async def test_the_list_shows_state_load_streaks_and_holds(
    pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await pair.run("engines", "list") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "eligible" in lines["prefill-1"]
    assert " 3 " in lines["prefill-1"]
    assert "operator_drain by ann (new driver) for 12 s, settled" in lines["prefill-2"]
    assert "connection 2, stream/decode 1" in lines["decode-1"]
    assert "liveness (status 500) for 75 s, readmission stopped at health: status 500" in lines["decode-2"]


async def test_the_list_as_json_is_what_the_router_said(
    pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await pair.run("engines", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"engines": FLEET}


async def test_one_engine_is_shown_with_its_history(pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert await pair.run("engines", "show", "decode-2") == 0
    shown = capsys.readouterr().out
    assert "does not answer /health" in shown
    assert "75 s ago  ejected: x" in shown


async def test_a_drain_carries_reason_and_actor(
    pair: ScriptedCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setenv("LOGNAME", "ann")
    assert await pair.run("engines", "drain", "prefill-1", "--reason", "new driver") == 0
    assert capsys.readouterr().out == "prefill-1 is operator_drain, 3 in flight\n"
    ((what, _, body),) = pair.routers["router-a"].asked
    assert (what, body) == ("POST /admin/engines/prefill-1/drain", {"actor": "ann", "reason": "new driver"})


async def test_an_undrain_says_what_the_engine_is_now(
    pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await pair.run("engines", "undrain", "prefill-2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "eligible"


async def test_the_admin_token_is_sent(pair: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARWHAL_ADMIN_TOKEN", "t0ken")
    assert await pair.run("engines", "list") == 0
    ((_, headers, _),) = pair.routers["router-a"].asked
    assert headers["Authorization"] == "Bearer t0ken"


async def test_a_router_that_is_no_longer_active_is_followed_to_the_owner(
    pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = {"error": {"message": "router-a is standby, not active; ask router-b", "owner": "router-b"}}
    pair.routers["router-a"].admin["POST /admin/engines/prefill-1/drain"] = (409, refusal)
    drained = engine("prefill-1", state="operator_drain")
    pair.routers["router-b"].admin["POST /admin/engines/prefill-1/drain"] = (200, drained)
    assert await pair.run("engines", "drain", "prefill-1") == 0
    assert capsys.readouterr().out == "prefill-1 is operator_drain, 0 in flight\n"


async def test_an_owner_is_followed_only_once(pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]) -> None:
    for name, other in (("router-a", "router-b"), ("router-b", "router-a")):
        refusal = {"error": {"message": f"{name} is standby, not active; ask {other}", "owner": other}}
        pair.routers[name].admin["POST /admin/engines/prefill-1/drain"] = (409, refusal)
    assert await pair.run("engines", "drain", "prefill-1") == 1
    assert "router-b is standby" in capsys.readouterr().err
    assert sum(len(router.asked) for router in pair.routers.values()) == 2


async def test_what_the_router_refuses_is_said_in_its_words(
    pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = {"error": {"message": "there is no engine 'x'; engines: prefill-1"}}
    pair.routers["router-a"].admin["GET /admin/engines/x"] = (404, refusal)
    assert await pair.run("engines", "show", "x") == 1
    assert "there is no engine 'x'; engines: prefill-1" in capsys.readouterr().err


async def test_an_admin_port_that_does_not_answer_is_exit_code_3_with_advice(
    pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await pair.routers["router-a"].stop()
    assert await pair.run("engines", "list") == 3
    assert "--admin URL" in capsys.readouterr().err


async def test_without_an_active_router_there_is_nobody_to_ask(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await cluster.run("engines", "list") == 3
    assert "no active router" in capsys.readouterr().err


async def test_a_named_admin_port_is_asked_without_any_redis(
    pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    url = pair.routers["router-a"].url
    assert await asyncio.to_thread(main, ["engines", "list", "--json", "--admin", url]) == 0
    assert json.loads(capsys.readouterr().out) == {"engines": FLEET}


async def test_something_that_is_no_admin_port_is_said_to_be_none(
    pair: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.routers["router-a"].admin["GET /admin/engines"] = (200, ["not", "a", "narwhal"])
    assert await pair.run("engines", "list") == 3
    assert "is the address right?" in capsys.readouterr().err
