"""One demo for all tests that only need a running pair; each begins when the pair is whole again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.running import RunningDemo, ask, running_demo, wait_until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, and give it time on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(150))


@pytest.fixture(scope="session")
def shared_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDemo]:
    """A demo that lasts for the whole test session; told to stop, it must end well and leave nothing."""
    with running_demo(tmp_path_factory.mktemp("demo")) as demo:
        yield demo
        assert demo.stop(signal.SIGTERM) == 0
        assert not demo.folder.exists()


@pytest.fixture
def demo(shared_demo: RunningDemo) -> RunningDemo:
    """A whole pair with every engine eligible, whatever the test before did."""
    for engine in shared_demo.document["engines"]:
        shared_demo.heal(engine["id"])
    wait_until(lambda: undrained(shared_demo), "no engine is drained", within_s=60, else_say=shared_demo.standing)
    wait_until(lambda: eligible(shared_demo), "every engine is eligible", within_s=60, else_say=shared_demo.standing)
    wait_until(shared_demo.whole, "the pair is whole", within_s=60, else_say=shared_demo.standing)
    return shared_demo


def undrained(demo: RunningDemo) -> bool:
    """Undrain whatever is drained; say whether nothing is."""
    drained = [name for name, state in states(demo).items() if state == "operator_drain"]
    for name in drained:
        ask(f"{demo.active().admin_url}/admin/engines/{name}/undrain", body={"actor": "test"})
    return not drained


def eligible(demo: RunningDemo) -> bool:
    return set(states(demo).values()) == {"eligible"}


def states(demo: RunningDemo) -> dict[str, str]:
    """The engines' states as the active router has them; all unknown while nobody is active."""
    lease = demo.lease()
    status, document = (0, None) if lease is None else ask(f"{lease['admin_url']}/admin/engines")
    if status != 200 or document is None:
        return {"every engine": "unknown"}
    return {engine["id"]: engine["state"] for engine in document["engines"]}
