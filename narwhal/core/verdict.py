"""Whom an inference probe convicts: a pure judgement over the pairs that it tried.

A KV transfer names a pair, so one failed pair does not say which side is sick. The probe tries the recorded pair first,
then the suspect with another partner, or the partner with another engine where there is no other partner. Then:
- the suspect served with some partner: it is well, and a partner with which it failed becomes suspect itself, unless it
  was the suspect's own prefill that failed, in which no decode engine has a part;
- a decode suspect failed, and so did another decode engine with the same prefill: that prefill becomes suspect;
- the suspect's own leg failed: it is sick; so is a prefill whose KV two decode engines could not use;
- only the other leg failed, or nothing conclusive was seen: nothing follows, and the hold stays.
Source: source, "Failure evidence"; decisions 10 and 13.
"""

from __future__ import annotations

from dataclasses import dataclass

from narwhal.core.events import PairFinding
from narwhal.core.vocabulary import EngineId, Leg, ProbeResult, Role


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for the suspect, and the partner to suspect next, if one poisons its pairs."""

    result: ProbeResult
    detail: str
    next_suspect: EngineId | None = None


def judge(suspect: EngineId, role: Role, findings: tuple[PairFinding, ...]) -> Verdict:
    """Return the verdict over `findings` for `suspect`, which serves `role`."""
    conclusive = [finding for finding in findings if finding.conclusive]
    own = [finding for finding in conclusive if suspect in (finding.prefill, finding.decode)]
    failed = [finding for finding in own if finding.failed_leg is not None]
    if len(failed) < len(own):
        involved = [f for f in failed if not (role is Role.PREFILL and f.failed_leg is Leg.PREFILL)]
        return Verdict(ProbeResult.PASSED, "", _partner(suspect, involved[0]) if involved else None)
    cross = [finding for finding in conclusive if finding not in own and finding.failed_leg is Leg.DECODE]
    own_leg = [finding for finding in failed if finding.failed_leg is Leg(role.value)]
    for finding in cross:
        if role is Role.DECODE and any(finding.prefill == mine.prefill for mine in own_leg):
            detail = f"{finding.decode} failed with {finding.prefill} too: {finding.detail}"
            return Verdict(ProbeResult.INCONCLUSIVE, detail, finding.prefill)
    if own_leg:
        return Verdict(ProbeResult.FAILED, own_leg[0].detail)
    if role is Role.PREFILL and len(failed) > 1 and all(f.failed_leg is Leg.DECODE for f in failed):
        users = " and ".join(finding.decode for finding in failed)
        return Verdict(ProbeResult.FAILED, f"{users} could not use its KV: {failed[0].detail}")
    detail = "; ".join(finding.detail for finding in findings if finding.detail)
    return Verdict(ProbeResult.INCONCLUSIVE, detail or "no pair could be tried")


def _partner(suspect: EngineId, finding: PairFinding) -> EngineId:
    return finding.decode if finding.prefill == suspect else finding.prefill
