"""`narwhal ha status` says who is active and who could follow; its exit code says whether that is enough."""

from __future__ import annotations

import json
from typing import Any

import pytest

from narwhal.cli import main
from tests.cli.clusters import ScriptedCluster


async def status(cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = await cluster.run("ha", "status", "--json")
    return code, json.loads(capsys.readouterr().out)


async def test_one_active_and_one_warm_standby_is_healthy(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    record = await cluster.a_whole_pair()
    code, document = await status(cluster, capsys)
    assert (code, document["healthy"], document["problems"]) == (0, True, [])
    assert document["lease"]["router"] == "router-a"
    assert document["lease"]["fencing_token"] == record.token
    assert 0 < document["lease"]["remaining_ms"] <= record.ttl_ms
    assert document["handoff"]["version"] == 5
    first, second = document["routers"]
    assert (first["router"], first["role"], first["ready"], first["behind"]) == ("router-a", "active", True, 0)
    assert (second["router"], second["role"], second["ready"], second["behind"]) == ("router-b", "standby", False, 1)
    assert second["warm"] is True
    assert 0 <= second["announced_age_s"] < 10


async def test_the_table_shows_every_router_with_reason_and_address(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    record = await cluster.a_whole_pair()
    assert await cluster.run("ha", "status") == 0
    shown = capsys.readouterr().out
    for word in (
        "router-a",
        "router-b",
        "active",
        "standby",
        str(record.token),
        *(r.url for r in cluster.routers.values()),
    ):
        assert word in shown
    assert "one active, one warm standby" in shown


async def test_an_empty_cluster_has_no_active_router(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = await status(cluster, capsys)
    assert code == 1
    assert any("nobody holds the lease" in problem for problem in document["problems"])
    assert any("no other router has announced itself" in problem for problem in document["problems"])


async def test_an_active_without_a_standby_is_not_enough(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    record = await cluster.hold(cluster.record("router-a"))
    cluster.routers["router-a"].is_active(record.token)
    await cluster.announce("router-a", role="active")
    code, document = await status(cluster, capsys)
    assert code == 1
    assert document["problems"] == ["no warm standby: no other router has announced itself"]


@pytest.mark.parametrize(
    ("reason", "control_ready"),
    [("standby: no healthy decode engine in view", True), ("standby", False)],
    ids=["says why it could not", "its monitoring is not clean"],
)
async def test_a_standby_that_could_not_take_over_is_not_warm(
    reason: str, control_ready: bool, cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.a_whole_pair()
    cluster.routers["router-b"].is_standby(reason, control_ready=control_ready)
    code, document = await status(cluster, capsys)
    assert code == 1
    (problem,) = document["problems"]
    assert problem == f"no warm standby: router-b is standby: {reason}"


async def test_a_standby_that_does_not_answer_is_not_warm_although_it_announced_itself(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.a_whole_pair()
    await cluster.routers["router-b"].stop()
    code, document = await status(cluster, capsys)
    assert code == 1
    assert document["routers"][1]["ready"] is None
    assert document["routers"][1]["reach"] == "silent"


async def test_routers_whose_names_are_unknown_here_are_judged_by_what_they_announced(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await cluster.a_whole_pair()
    await cluster.announce("router-a", role="active", url="http://router-a.invalid:8000")
    await cluster.announce("router-b", role="standby", url="http://router-b.invalid:8000")
    code, document = await status(cluster, capsys)
    assert code == 0
    assert [router["reach"] for router in document["routers"]] == ["unknown", "unknown"]


async def test_a_holder_that_does_not_serve_is_named_with_its_reason(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    record = await cluster.a_whole_pair()
    cluster.routers["router-a"].says(503, role="active", reason="no eligible decode engine", token=record.token)
    code, document = await status(cluster, capsys)
    assert code == 1
    assert document["problems"] == ["router-a holds the lease but does not serve: no eligible decode engine"]


async def test_two_routers_that_say_ready_are_a_problem(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    record = await cluster.a_whole_pair()
    cluster.routers["router-b"].is_active(record.token - 1)
    code, document = await status(cluster, capsys)
    assert code == 1
    assert "2 routers say that they are ready: router-a, router-b" in document["problems"]
    assert "router-b says that it is ready but does not hold the lease" in document["problems"]


async def test_a_holder_that_never_announced_itself_is_shown_from_the_lease(
    cluster: ScriptedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    record = await cluster.hold(cluster.record("router-a"))
    cluster.routers["router-a"].is_active(record.token)
    cluster.routers["router-b"].is_standby()
    await cluster.announce("router-b", role="standby")
    code, document = await status(cluster, capsys)
    assert code == 0
    assert [router["router"] for router in document["routers"]] == ["router-a", "router-b"]


def test_an_unreachable_redis_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ha", "status", "--redis", "redis://127.0.0.1:1/0", "--cluster", "nowhere"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "redis://127.0.0.1:1/0" in said.err
