"""The devices that kernels are compiled for without having one, and what a block may use on each.

Shared memory is the most that one block may have, from the vendors' tables (CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability"; AMD's CDNA3 instruction set: 64 KiB of local data share).
"""

from dataclasses import dataclass

_KIB = 1024


@dataclass(frozen=True)
class Target:
    """One architecture: `sm_80` is compute capability (8, 0), `gfx942` has none.

    name            what Triton, and `compile_report`, calls it
    capability      CUDA's (major, minor); None on an AMD device
    shared_limit    bytes of shared memory that one block may have
    devices         where a reader may meet it
    """

    name: str
    capability: tuple[int, int] | None
    shared_limit: int
    devices: str

    @property
    def has_matrix(self) -> bool:
        """Whether Triton makes matrix instructions of `tl.dot` here: on NVIDIA from capability 8.0 on."""
        return self.capability is None or self.capability >= (8, 0)

    @property
    def has_bf16(self) -> bool:
        """Whether bfloat16 is the device's own type; below capability 8.0 it is emulated."""
        return self.capability is None or self.capability >= (8, 0)


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("sm_75", (7, 5), 64 * _KIB, "T4, RTX 20"),
        Target("sm_80", (8, 0), 163 * _KIB, "A100"),
        Target("sm_89", (8, 9), 99 * _KIB, "L4, L40S, RTX 40"),
        Target("sm_90", (9, 0), 227 * _KIB, "H100, H200"),
        Target("sm_100", (10, 0), 227 * _KIB, "B200"),
        Target("sm_120", (12, 0), 99 * _KIB, "RTX 50, RTX PRO 6000"),
        Target("gfx942", None, 64 * _KIB, "MI300X, MI325X"),
    )
}


def target(name: str) -> Target:
    """The target called `name`. Raises ValueError for another name."""
    if name not in TARGETS:
        raise ValueError(f"arch={name!r} is no known target; accepted: {', '.join(TARGETS)}")
    return TARGETS[name]
