"""The part of vLLM's /metrics that a router reads. Source: wire.md, 2.1 and 2.2."""

from __future__ import annotations

from prometheus_client.utils import floatToGoString


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


class Exposition:
    """Collects samples in the Prometheus text format, with vLLM's labels."""

    def __init__(self, *, model: str) -> None:
        self._labels = f'engine="0",model_name="{model}"'
        self._lines: list[str] = []

    def process_start(self, start_time: float) -> None:
        """Add the process's start time: Unix seconds, 10 ms resolution, no labels."""
        name = "process_start_time_seconds"
        self._head(name, "gauge")
        self._lines.append(f"{name} {_number(round(start_time, 2))}")

    def gauge(self, name: str, value: float) -> None:
        """Add `vllm:name`."""
        self._head(f"vllm:{name}", "gauge")
        self._lines.append(f"vllm:{name}{{{self._labels}}} {_number(value)}")

    def counter(self, name: str, value: float, **labels: str) -> None:
        """Add `vllm:name_total`; repeated calls with one name add samples to it."""
        head = f"# TYPE vllm:{name}_total counter"
        if head not in self._lines:
            self._head(f"vllm:{name}_total", "counter")
        more = "".join(f',{key}="{text}"' for key, text in labels.items())
        self._lines.append(f"vllm:{name}_total{{{self._labels}{more}}} {_number(value)}")

    def render(self) -> str:
        """Return the document."""
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, kind: str) -> None:
        self._lines += [f"# HELP {name} {name}", f"# TYPE {name} {kind}"]
