"""What a server decides, without a tensor: who computes what in the next step. Standard library only.

scheduler   who computes what in the next step
simulation  the same scheduler with a clock that a cost model turns: what to expect before it is measured
records     a request and a step as they are planned; a step as it was, measured or simulated
"""

from .records import Chunk, Part, Plan, Step
from .scheduler import Refused, Scheduler
from .simulation import Arrival, Timeline, roofline, simulate

__all__ = [
    "Arrival",
    "Chunk",
    "Part",
    "Plan",
    "Refused",
    "Scheduler",
    "Step",
    "Timeline",
    "roofline",
    "simulate",
]
