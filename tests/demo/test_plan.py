"""What the demo would start: ports that are free, and files that the routers accept."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path

import pytest

from narwhal.config import parse_config
from narwhal.demo.plan import DemoOptions, RealEngine, make_plan, render_config
from narwhal.demo.ports import NoPorts, Ports, choose_ports


@pytest.fixture
def base() -> int:
    """A base whose whole set of ports was free a moment ago."""
    return choose_ports(20_000, engines=4, redis=True)[0].base


def taken(port: int) -> socket.socket:
    holder = socket.socket()
    holder.bind(("127.0.0.1", port))
    holder.listen(1)
    return holder


def test_the_ports_follow_a_pattern_that_people_remember() -> None:
    ports = Ports(8000)
    assert (ports.traffic(0), ports.traffic(1)) == (8000, 8001)
    assert (ports.admin(0), ports.admin(1)) == (8100, 8101)
    assert (ports.engine(0), ports.engine(3)) == (8201, 8204)
    assert len(set(ports.used(engines=4, redis=True))) == 13


def test_a_free_base_is_used_without_remark(base: int) -> None:
    assert choose_ports(base, engines=4, redis=True) == (Ports(base), None)


def test_a_busy_port_moves_the_whole_pattern_and_is_named(base: int) -> None:
    with taken(base + 101):
        ports, remark = choose_ports(base, engines=4, redis=True)
    assert ports.base > base
    assert (ports.base - base) % 1000 == 0
    assert remark is not None
    assert str(base + 101) in remark


def test_ports_of_stub_engines_do_not_matter_when_there_are_none(base: int) -> None:
    with taken(base + 201):
        assert choose_ports(base, engines=0, redis=True)[0].base == base


def test_without_any_free_set_the_message_names_the_port_and_the_option() -> None:
    base = 31_990
    with taken(base + 1), pytest.raises(NoPorts, match=rf"port {base + 1} .*--ports-from"):
        choose_ports(base, engines=4, redis=True)


@pytest.mark.parametrize("lease_ttl_s", [0.5, 1.0, 2.0, 5.0, 60.0])
def test_the_written_files_are_valid_for_every_lease(lease_ttl_s: float, base: int, tmp_path: Path) -> None:
    options = DemoOptions(ports_from=base, lease_ttl_s=lease_ttl_s)
    plan = make_plan(options, folder=tmp_path, cluster="demo", models=["stub"])
    for router in plan.routers:
        text = render_config(plan, router, redis_url="redis://127.0.0.1:1/0", lease_ttl_s=lease_ttl_s, folder=tmp_path)
        config = parse_config(tomllib.loads(text), source="written")
        assert config.router.id == router.id
        assert f"http://127.0.0.1:{config.router.port}" == router.url
        assert f"http://127.0.0.1:{config.router.admin_port}" == router.admin_url
        assert config.ha.lease_ttl_s == lease_ttl_s
        assert [entry.id for entry in config.engines] == ["prefill-1", "prefill-2", "decode-1", "decode-2"]


def test_both_routers_get_the_same_fleet_and_different_doors(base: int, tmp_path: Path) -> None:
    plan = make_plan(DemoOptions(ports_from=base), folder=tmp_path, cluster="demo", models=["stub"])
    texts = [
        tomllib.loads(render_config(plan, router, redis_url="redis://127.0.0.1:1/0", lease_ttl_s=2.0, folder=tmp_path))
        for router in plan.routers
    ]
    assert texts[0].pop("router") != texts[1].pop("router")
    assert texts[0] == texts[1]


def test_real_engines_take_the_place_of_stubs(base: int, tmp_path: Path) -> None:
    engines = (
        RealEngine("decode", "http://10.0.0.21:8000"),
        RealEngine("prefill", "http://10.0.0.11:8000"),
        RealEngine("decode", "http://10.0.0.22:8000"),
    )
    options = DemoOptions(ports_from=base, engines=engines)
    plan = make_plan(options, folder=tmp_path, cluster="demo", models=['a model with "quotes" and ü'])
    assert [(engine.id, engine.url) for engine in plan.engines] == [
        ("decode-1", "http://10.0.0.21:8000"),
        ("prefill-1", "http://10.0.0.11:8000"),
        ("decode-2", "http://10.0.0.22:8000"),
    ]
    text = render_config(plan, plan.routers[0], redis_url="redis://127.0.0.1:1/0", lease_ttl_s=2.0, folder=tmp_path)
    assert tomllib.loads(text)["serving"]["models"] == ['a model with "quotes" and ü']
