"""Launch paths without a device: what they launch, under which guard, and which operations they ask of torch.

`record` puts stand-ins in the place of every kernel, so that wrappers run on meta tensors, which have shapes
and no values. `Watch` lists torch's operations and raises at one that makes the host wait for the device.
"""

import ast
import importlib
import inspect
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from companion.kernels import mode

KERNEL_MODULES = [f"companion.kernels.{room}.kernel" for room in ("append", "copy", "decode", "moe")]


# --- launches -----------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One start of a kernel: arguments by name, options of the launch among them."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict
    guard: torch.device | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in self.arguments.values() if isinstance(x, torch.Tensor)]

    @property
    def constants(self) -> dict:
        """All that is no tensor: integers, floats, constexprs, warps."""
        return {n: x for n, x in self.arguments.items() if not isinstance(x, torch.Tensor)}


@dataclass
class Recorder:
    """Stands where a kernel does: `kernel[grid](...)` is written down and nothing runs."""

    kernel: object
    launches: list
    guards: list

    def __getitem__(self, grid):
        def launched(*args, **options):
            names = self.kernel.arg_names
            given = dict(zip(names, args)) | options
            guard = self.guards[-1] if self.guards else None
            self.launches.append(Launch(self.kernel.__name__, tuple(grid), given, guard))

        return launched


def record(monkeypatch, *, capability=(9, 0), cores=264) -> list[Launch]:
    """From here on every kernel is a recorder, on a device with these figures. Returns the growing list."""
    launches, guards = [], []

    @contextmanager
    def on(tensor):
        guards.append(tensor.device)
        yield
        guards.pop()

    answers = {
        "on": on,
        "triton_for": lambda *tensors: False,
        "capability": lambda tensor: capability,
        "cores": lambda tensor: cores,
    }
    for room in KERNEL_MODULES:
        importlib.import_module(room.rpartition(".")[0])
        importlib.import_module(room)
    real = {getattr(mode, name): stand_in for name, stand_in in answers.items()}
    for module in [m for name, m in sys.modules.items() if name.startswith("companion.kernels") and m]:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in real:
                monkeypatch.setattr(module, name, real[value])
            elif module.__name__ in KERNEL_MODULES and name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Recorder(value, launches, guards))
    return launches


# --- operations ---------------------------------------------------------------------------------------------

WAITING = {  # the host has to know a value before it can go on
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "argwhere", "masked_select", "_unique",
    "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount", "equal",
    "is_nonzero", "allclose", "_linalg_check_errors", "_assert_async", "multinomial",
}  # fmt: skip


class Waits(AssertionError):
    """The host would wait for the device."""


@dataclass(eq=False)
class Watch(TorchDispatchMode):
    """Lists the operations that are asked of torch; raises Waits at one that would wait for the device.

    names   of the operations, in order
    sizes   of what is allocated, in numbers, with its dtype
    """

    names: list[str] = field(default_factory=list)
    sizes: list[tuple] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        overload = function._schema.overload_name
        self.names.append(name)
        if name in WAITING or (name == "repeat_interleave" and overload != "self_int"):
            raise Waits(f"{name} waits for the device")
        if name in ("index", "index_put", "index_put_") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise Waits(f"{name} with a mask has to count it")
        source = next((x for x in args if isinstance(x, torch.Tensor)), None)
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if name == "_to_copy" and target is not None and source.device != target:
            raise Waits(f"a copy from {source.device} to {target}")
        if name == "copy_" and args[0].device != args[1].device:
            raise Waits(f"a copy from {args[1].device} to {args[0].device}")
        result = function(*args, **kwargs)
        if name.removeprefix("new_").startswith(("empty", "zeros", "full", "ones", "arange")):
            self.sizes.append((name, tuple(result.shape), result.dtype))
        return result

    @property
    def count(self) -> int:
        """Operations that were dispatched, views and allocations included."""
        return len(self.names)


# --- the text -----------------------------------------------------------------------------------------------


def unguarded(source: str) -> list[int]:
    """Lines of `kernel[grid](...)` outside a `with on(tensor):` (or `mode.on`).

    A kernel is what is decorated with `triton.jit`, imported from a module called kernel, or named so.
    """
    tree = ast.parse(source)
    kernels = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] == "kernel":
            kernels |= {a.asname or a.name for a in node.names}
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            kernels.add(node.name)
    found = []

    def walk(node, guarded):
        if isinstance(node, ast.With):
            calls = (i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call))
            guarded = guarded or any(ast.unparse(c.func) in ("on", "mode.on") for c in calls)
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            guarded = False  # it may be called when the guard has been left
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and not guarded:
            name = ast.unparse(node.func.value).split(".")[-1]
            if name in kernels or name.endswith("_kernel"):
                found.append(node.lineno)
        for child in ast.iter_child_nodes(node):
            walk(child, guarded)

    walk(tree, False)
    return found
