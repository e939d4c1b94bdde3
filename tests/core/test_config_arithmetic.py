"""The arithmetic between settings, on both sides of each limit. Source: ha.md, 2.5."""

from __future__ import annotations

from typing import Any

import pytest

from narwhal.core.tenure import Tenure
from narwhal.errors import ConfigError
from tests.core.fleets import make_config
from tests.core.leases import make_ha, make_lease


def problems(**sections: Any) -> tuple[str, ...]:
    try:
        make_config(**sections)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"renew_every_s": 1.18}, None),
        ({"renew_every_s": 1.2}, "ha.lease_ttl_s"),
        ({"lease_ttl_s": 1.21, "op_timeout_s": 0.25}, None),
        ({"lease_ttl_s": 1.1, "op_timeout_s": 0.23}, "ha.op_timeout_s"),
        ({"op_timeout_s": 0.45}, None),
        ({"op_timeout_s": 0.46}, "ha.op_timeout_s"),
        ({"poll_every_s": 0.4}, None),
        ({"poll_every_s": 0.41}, "ha.poll_every_s"),
        ({"margin_s": 0.05}, None),
        ({"margin_s": 0.049}, "ha.margin_s"),
        ({"clock_error": 0.099, "lease_ttl_s": 3.0}, None),
        ({"clock_error": 0.1}, "ha.clock_error"),
    ],
)
def test_the_lease_settings_are_judged_on_both_sides_of_each_limit(settings: dict[str, Any], field: str | None) -> None:
    found = problems(ha=settings)
    assert [problem.partition(":")[0] for problem in found] == ([] if field is None else [field])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lease_ttl_s": 1.0, "renew_every_s": 0.2, "op_timeout_s": 0.15, "margin_s": 0.1},
        {"lease_ttl_s": 0.5, "renew_every_s": 0.1, "op_timeout_s": 0.08, "margin_s": 0.075},
    ],
    ids=["default", "fast", "floor"],
)
def test_the_documented_profiles_are_accepted_and_survive_two_lost_renewals(settings: dict[str, Any]) -> None:
    settings = {"poll_every_s": 0.05, **settings}
    assert problems(ha=settings) == ()
    ha = make_ha(**settings)
    tenure = Tenure(margin_s=ha.margin_s, clock_error=ha.clock_error)
    tenure.granted(make_lease(ttl_s=ha.lease_ttl_s), sent_at=0.0)
    assert tenure.held(ha.renew_every_s + 2 * ha.op_timeout_s)


def test_the_back_off_may_not_shrink() -> None:
    assert problems(recovery={"retry_backoff_s": 5.0, "retry_backoff_max_s": 4.0})[0].startswith(
        "recovery.retry_backoff_max_s:"
    )
    assert problems(recovery={"retry_backoff_s": 5.0, "retry_backoff_max_s": 5.0}) == ()
