"""Scripted servers for these tests."""

import pytest
from scripted import ScriptedClock, ScriptedTransport

from companion.lab.client import Endpoint


@pytest.fixture
def scripted(monkeypatch):
    """make(*answers, **options) -> (endpoint, transport); the clock is endpoint.clock."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def make(*answers, **options):
        clock = ScriptedClock()
        transport = ScriptedTransport(clock, *answers)
        options = {"model": "m", "transport": transport, "clock": clock} | options
        return Endpoint("http://127.0.0.1:9", **options), transport

    return make
