"""What a pair of routers makes of evidence: clients' mistakes hand nothing over, and a drain outlives its router."""

from __future__ import annotations

import os
import signal
import threading

from openai import BadRequestError, OpenAIError

from tests.e2e.running import RunningDemo, ask, narwhal, wait_until

MISTAKES = 1000


def break_(demo: RunningDemo, engine: str, **fault: object) -> None:
    assert ask(f"{demo.engine(engine)['admin_url']}/stub/faults", body=fault)[0] == 200


def state_of(demo: RunningDemo, engine: str) -> dict[str, dict[str, int]]:
    status, document = ask(f"{demo.engine(engine)['admin_url']}/stub/state")
    assert status == 200
    return dict(document["counters"])


def decoded(demo: RunningDemo, engine: str) -> int:
    return state_of(demo, engine)["requests"].get("decode", 0)


def test_a_thousand_mistakes_of_clients_eject_nobody_and_hand_nothing_over(demo: RunningDemo) -> None:
    active, token = demo.active(), demo.token()
    for engine in ("prefill-1", "prefill-2"):
        break_(demo, engine, kind="status", leg="prefill", status=400)
    refused = 0
    with demo.client(active) as client:
        for _ in range(MISTAKES):
            try:
                client.completions.create(model="stub", prompt="x", max_tokens=1)
            except BadRequestError:
                refused += 1
    assert refused == MISTAKES
    assert {engine["state"] for engine in active.engines().values()} == {"eligible"}
    assert all(not engine["streaks"] for engine in active.engines().values())
    assert (demo.active(), demo.token(), active.ready()) == (active, token, (200, "active"))


def test_a_drained_engine_gets_no_decode_leg_from_the_router_that_takes_over_during_a_prefill(
    demo: RunningDemo,
) -> None:
    before = demo.active()
    after = demo.other(before)
    assert narwhal("engines", "drain", "decode-1", "--reason", "test", "--config", demo.config).returncode == 0
    wait_until(lambda: after.engines()["decode-1"]["state"] == "operator_drain", "the standby has followed")
    count = decoded(demo, "decode-1")
    for engine in ("prefill-1", "prefill-2"):
        break_(demo, engine, kind="hang", leg="prefill")
    pid = demo.pid()
    lost = threading.Thread(target=ask_once, args=(demo, before.url))
    lost.start()
    wait_until(lambda: in_prefill(demo) == 1, "a request is in its prefill")
    os.kill(pid, signal.SIGKILL)
    lost.join(30)
    for engine in ("prefill-1", "prefill-2"):
        demo.heal(engine)
    wait_until(lambda: after.ready()[0] == 200, f"{after.id} serves")
    with demo.client(after) as client:
        for _ in range(10):
            assert client.completions.create(model="stub", prompt="x", max_tokens=1).choices[0].finish_reason
    assert after.engines()["decode-1"]["state"] == "operator_drain"
    assert decoded(demo, "decode-1") == count


def ask_once(demo: RunningDemo, url: str) -> None:
    """Send a request whose router will be killed."""
    router = next(one for one in demo.routers.values() if one.url == url)
    try:
        with demo.client(router, timeout_s=30.0) as client:
            client.completions.create(model="stub", prompt="x", max_tokens=1)
    except OpenAIError:
        return


def in_prefill(demo: RunningDemo) -> int:
    return sum(state_of(demo, engine)["resident"].get("prefill", 0) for engine in ("prefill-1", "prefill-2"))
