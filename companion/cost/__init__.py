"""What a model costs: bytes, FLOPs and predicted time, from its shape alone. Standard library only."""

from .counts import (
    ParameterCount,
    active_parameters,
    experts_touched,
    matmul_parameters,
    parameter_count,
    parameters,
)
from .devices import HardwareSpec
from .dtypes import BITS, bits_per_value
from .memory import (
    cached_values,
    kv_bytes,
    kv_bytes_per_token,
    kv_fixed_bytes,
    kv_growth_per_token,
    weight_bytes,
    weight_bytes_read,
)
from .registry import UnknownName, hardware, models
from .spec import MLASpec, ModelSpec, MoESpec
