"""A stub of a vLLM engine: real HTTP, real tickets, made-up tokens, and faults on demand.

    engine = StubEngine(StubSettings(role="prefill"))
    url = await engine.start()
    await engine.set_faults([parse_fault("prefill:status=503,times=3")])

`narwhal stub-engine` runs one as a process.
"""

from narwhal.testing.stub_engine.engine import StubEngine, StubSettings
from narwhal.testing.stub_engine.faults import Fault, FaultKind, FaultLeg, FaultSpecError, parse_fault

__all__ = ["Fault", "FaultKind", "FaultLeg", "FaultSpecError", "StubEngine", "StubSettings", "parse_fault"]
