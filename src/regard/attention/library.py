"""attend as a registered operator, `torch.ops.regard.attend`: one node of a graph, whatever mechanism runs behind it.

Compilers, exporters and transforms call it where eager code calls `run` directly (`is_called_for` says when). It has a fake kernel for
shapes, a gradient, a rule for the batches that `vmap` adds, and one for autocast. What depends on values stays inside, where there
are values: the backend is picked, padding is read, a state of zero is bypassed and NaN is reported as ever.

Forward keeps the log-sum-exp of its rows for backward where the fused kernel gives one; backward lowers q and k once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..errors import CombinationError
from ..state import State
from ..values import transformed
from . import transforms
from .allow import Allow
from .batched import batched, batched_backward, one_by_one
from .chunked import Order, order_after
from .packed import Facts, lines, pack
from .problem import Memo, Problem, check_tensors, pose
from .tiled import out_width

Run = Callable[[Problem], tuple[Tensor, Tensor | None]]
RunAfter = Callable[[Problem, Order, int, Tensor | None], tuple[Tensor, Tensor]]

_library = torch.library.Library("regard", "FRAGMENT")
_library.define(
    "attend(Tensor q, Tensor k, Tensor? v, Tensor[] tensors, SymInt[] numbers, str line, str trains, str autocast) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor? v, Tensor[] tensors, Tensor read, Tensor lse, SymInt[] numbers, "
    "str line, str trains, str autocast, str wanted) -> Tensor[]"
)
_library.define(
    "write(Tensor q, Tensor k, Tensor v, Tensor? carry, Tensor[] tensors, SymInt[] numbers, str line, SymInt held) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "write_backward(Tensor? grad, Tensor? grad_carry, Tensor q, Tensor k, Tensor v, Tensor? carry, Tensor[] tensors, "
    "SymInt[] numbers, str line, SymInt held) -> Tensor[]"
)
_attend: Any = torch.ops.regard.attend.default
_attend_backward: Any = torch.ops.regard.attend_backward.default
_write: Any = torch.ops.regard.write.default
_write_backward: Any = torch.ops.regard.write_backward.default
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # pyright: ignore
_UNREAL = (FakeTensor, FunctionalTensor)
_REAL = (Tensor, torch.nn.Parameter)
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # pyright: ignore


def is_called_for(q: Tensor) -> bool:
    """True where a call is traced or transformed, so that it has to be one operator."""
    if torch.compiler.is_compiling() or transformed() or q.is_meta:
        return True
    if type(q) not in _REAL and isinstance(q, _UNREAL):
        return True
    # Asked of every call, so that the usual one pays for nothing but this.
    return _modes() > 0 and torch._C._get_dispatch_mode(_PROXY) is not None  # pyright: ignore


def call(
    q: Tensor, k: Tensor, v: Tensor | None, facts: Facts, allow: Allow | Tensor | None, state: State | None
) -> tuple[Tensor, Tensor | None]:
    """`run` of a call as one operator: the result, and what the next call of a selection that carries has to know."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4):
        check_tensors(q, k, k if v is None else v)
    line, tensors, numbers = pack(facts, (q.shape[2], k.shape[2]), allow, state, q.device)
    trains = _flags((q, k, *(() if v is None else (v,)), *tensors)) if torch.is_grad_enabled() else ""
    if transformed() and not torch.compiler.is_compiling():
        given = transforms.Call(tuple(numbers), line, trains, _autocast_dtype(q.device.type))
        out, _, _, carry = transforms.Attend.apply(given, q, k, v, *tensors)  # pyright: ignore
    else:
        out, _, _, carry = _attend(q, k, v, tensors, numbers, line, trains, "")
    return out, carry.detach() if facts.carries else None


def call_after(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: Facts,
    allow: Allow | Tensor | None,
    state: State,
    written: tuple[int, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """`run_after` as one operator: new tokens after so many that are in the carry."""
    held, carry = written
    sizes, bare = (q.shape[2], held + k.shape[2]), replace(state, offset=None, carry=None)
    line, tensors, numbers = pack(facts, sizes, allow, bare, q.device)
    return _write(q, k, v, carry, tensors, numbers, line, held)


def _flags(given: Sequence[Tensor]) -> str:
    flags = "".join(["1" if x.requires_grad else "0" for x in given])
    return flags if "1" in flags else ""


def install(run: Run, run_after: RunAfter) -> None:
    """Register the kernels around the functions that run a problem."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor | None, tensors: list[Tensor], numbers: list[int], line: str, trains: str, autocast: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.no_grad(), _casting(q.device.type, autocast):
            p = _posed(_marked((q, k, v, *tensors), trains), numbers, line)
            memo = Memo() if trains else None
            out, carry = run(replace(p, memo=memo))
        like = _empty(p, trains, autocast)
        memo = memo or Memo()
        return (
            _laid(out, like[0]),
            _laid(memo.read, like[1]),
            _laid(memo.lse, like[2]),
            _laid(carry, like[3]),
        )

    def attend_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor | None, tensors: list[Tensor], read: Tensor, lse: Tensor,
        numbers: list[int], line: str, trains: str, autocast: str, wanted: str,
    ) -> list[Tensor]:  # fmt: skip
        with _recording(), torch.enable_grad(), _casting(q.device.type, autocast):
            leaves = _marked((q, k, v, *tensors), trains or wanted)
            p = _posed(leaves, numbers, line)
            known = lse.numel() > 0 and not bool(lse.flatten()[0].isnan())
            out, _ = run(replace(p, memo=Memo(read, lse, again=True) if known else Memo(again=True)))
            asked = [x for x, w in zip((x for x in leaves if x is not None), wanted, strict=True) if w == "1"]
            found = (None,) * len(asked)
            if out.requires_grad:
                found = torch.autograd.grad(out, asked, grad, allow_unused=True)
        return [_gradient(x, g) for x, g in zip(asked, found, strict=True)]

    def write(
        q: Tensor, k: Tensor, v: Tensor, carry: Tensor | None, tensors: list[Tensor], numbers: list[int], line: str, held: int
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            p, how = _posed_after((q, k, v, *tensors), numbers, line, held)
            out, carried = run_after(p, how, held, carry)
        return out.contiguous(), carried.contiguous()

    def write_backward(
        grad: Tensor | None, grad_carry: Tensor | None, q: Tensor, k: Tensor, v: Tensor, carry: Tensor | None,
        tensors: list[Tensor], numbers: list[int], line: str, held: int,
    ) -> list[Tensor]:  # fmt: skip
        given = [x for x in (q, k, v, carry, *tensors) if x is not None]
        with _recording(), torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
            rest = iter(leaves)
            q, k, v = next(rest), next(rest), next(rest)
            begun = None if carry is None else next(rest)
            p, how = _posed_after((q, k, v, *rest), numbers, line, held)
            pairs = zip(run_after(p, how, held, begun), (grad, grad_carry), strict=True)
            outs, grads = zip(*((x, g) for x, g in pairs if g is not None and x.requires_grad), strict=True)
            wanted = [x for x in leaves if x.requires_grad]
            found = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True))
        return [_gradient(x, next(found) if x.requires_grad else None) for x in leaves]

    for kernel in (attend, attend_backward, write, write_backward):
        _library.impl(kernel.__name__, kernel, "CompositeExplicitAutograd")


def _posed(given: Sequence[Tensor | None], numbers: Sequence[int], line: str) -> Problem:
    q, k, v, *tensors = given
    assert q is not None
    assert k is not None
    spec, allow, state = lines(line).unpack([x for x in tensors if x is not None], numbers)
    return pose(q, k, v, spec, (None, None, None), allow, state)


def _posed_after(given: Sequence[Tensor], numbers: Sequence[int], line: str, held: int) -> tuple[Problem, Order]:
    q, k, v, *tensors = given
    spec, allow, state = lines(line).unpack(tensors, numbers)
    p = pose(q, k, v, spec, (None, None, None), None, state)
    how = order_after(allow, p, held)
    assert how is not None
    return p, how


def _gradient(x: Tensor, grad: Tensor | None) -> Tensor:
    """In memory as x, which shares nothing with what it was made of."""
    return torch.zeros_like(x, requires_grad=False) if grad is None else _laid(grad, torch.empty_like(x, requires_grad=False))


def _marked(given: Sequence[Tensor | None], flags: str) -> list[Tensor | None]:
    """The same tensors, those that are trained marked so: a plan may depend on it, and an operator's inputs do not say."""
    if not flags:
        return list(given)
    rest = iter(flags)
    return [None if x is None else x.detach().requires_grad_() if next(rest) == "1" else x.detach() for x in given]


def _casting(device: str, autocast: str) -> AbstractContextManager[Any]:
    """What the caller's autocast asked for, and nothing of what is around the kernel."""
    if autocast:
        return torch.autocast(device, dtype=getattr(torch, autocast))
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _autocast_dtype(device: str) -> str:
    """What autocast rounds to here and now; nothing where it is off."""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else ""


def _recording() -> AbstractContextManager[Any]:
    """A kernel stands below autograd; inside, autograd records as it does outside."""
    c: Any = torch._C  # pyright: ignore
    hidden = c._dispatch_tls_local_exclude_set()
    for key in (
        c.DispatchKey.AutogradFunctionality,
        c.DispatchKey.ADInplaceOrView,
        c.DispatchKey.AutogradOther,
        c.DispatchKey.AutogradNestedTensor,
    ):
        hidden = hidden.remove(key)
    return c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), hidden)


def _keeps(p: Problem) -> bool:
    """True where the fused kernel of the CPU runs the problem, as far as shapes can tell."""
    t = p.inner.softmax_temperature
    refusal, biases = p.refusal, p.spec.position.biases
    fused = (
        t is not None
        and p.spec.geometry.lowers
        and not p.points
        and not (refusal is not None and refusal.threshold is not None)
    )
    return fused and not (biases and t == "learned") and p.q.device.type in ("cpu", "meta")


def _empty(p: Problem, trains: str, autocast: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tensors with the shapes and strides of the results: the output, what backward starts from, and the next carry."""
    q, (B, H, _, Q, K, _, E) = p.q, p.sizes
    wide = torch.promote_types(q.dtype, torch.float32)
    keeps = _keeps(p)
    # Torch's kernel gives heads side by side for each token, as a module wants them.
    out = q.new_empty(B, Q, H, E).transpose(1, 2) if keeps else q.new_empty(B, H, Q, out_width(p))
    apart = q.dtype != wide or bool(autocast) or p.refusal is not None or p.spec.geometry.slotted
    read = (B, H, Q, E) if keeps and trains and apart else (0,)
    lse = (B, H, Q) if keeps and trains else (0,)
    carry = p.inner.carry_shape(B, H, K) if p.inner.carries else (0,)
    return out, q.new_empty(read, dtype=wide), q.new_empty(lse, dtype=wide), q.new_empty(carry, dtype=wide)


def _laid(x: Tensor | None, like: Tensor) -> Tensor:
    """x in memory as `like`; NaN in place of what there is not."""
    if like.numel() == 0:
        return like
    if x is None:
        return like.fill_(float("nan"))
    same = x.shape == like.shape and x.stride() == like.stride() and x.dtype == like.dtype and x.storage_offset() == 0
    return x.detach() if same else like.copy_(x.detach())


def _attend_shapes(
    q: Tensor, k: Tensor, v: Tensor | None, tensors: list[Tensor], numbers: list[int], line: str, trains: str, autocast: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p = _posed((q, k, v, *tensors), numbers, line)
    return _empty(p, trains, autocast)


def _attend_backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor | None, tensors: list[Tensor], read: Tensor, lse: Tensor, numbers: list[int],
    line: str, trains: str, autocast: str, wanted: str,
) -> list[Tensor]:  # fmt: skip
    given = (x for x in (q, k, v, *tensors) if x is not None)
    return [torch.empty_like(x) for x, w in zip(given, wanted, strict=True) if w == "1"]


def _write_shapes(
    q: Tensor, k: Tensor, v: Tensor, carry: Tensor | None, tensors: list[Tensor], numbers: list[int], line: str, held: int
) -> tuple[Tensor, Tensor]:
    p, how = _posed_after((q, k, v, *tensors), numbers, line, held)
    B, H, G, Q, _, D, E = p.sizes
    real = how.real(0, 1, q.device)
    heads = H if real is not None and real.shape[1] > G else G
    return q.new_empty(B, H, Q, E), q.new_empty(B, heads, p.inner.features_for(D), E + 3)


def _write_backward_shapes(
    grad: Tensor | None, grad_carry: Tensor | None, q: Tensor, k: Tensor, v: Tensor, carry: Tensor | None, tensors: list[Tensor],
    numbers: list[int], line: str, held: int,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x) for x in (q, k, v, carry, *tensors) if x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, tensors, ctx.numbers, ctx.line, ctx.trains, ctx.autocast = inputs
    out, read, lse, _ = output
    ctx.count = len(tensors)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out if lse.numel() and not read.numel() else read, lse, *tensors)


def _backward(ctx: Any, grad: Tensor | None, *unread: Any) -> tuple[Any, ...]:
    q, k, v, read, lse, *tensors = ctx.saved_tensors
    first, listed = ctx.needs_input_grad[:3], ctx.needs_input_grad[3]
    needs = [n for x, n in zip((q, k, v), first, strict=True) if x is not None] + list(listed or [])
    wanted = "".join("1" if n else "0" for n in needs)
    none = None if ctx.numbers else []  # An empty list counts as one of tensors there.
    if grad is None or "1" not in wanted:
        return None, None, None, [None] * ctx.count, none, None, None, None
    found = iter(_attend_backward(grad, q, k, v, tensors, read, lse, ctx.numbers, ctx.line, ctx.trains, ctx.autocast, wanted))
    heads = [next(found) if x is not None and n else None for x, n in zip((q, k, v), first, strict=True)]
    return *heads, [next(found) if n else None for n in listed or []], none, None, None, None


def _setup_after(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, carry, tensors, ctx.numbers, ctx.line, ctx.held = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, carry, *tensors)


def _backward_after(ctx: Any, grad: Tensor | None, grad_carry: Tensor | None) -> tuple[Any, ...]:
    q, k, v, carry, *tensors = ctx.saved_tensors
    none = None if ctx.numbers else []
    if grad is None and grad_carry is None:
        return None, None, None, None, [None] * len(tensors), none, None, None
    found = iter(_write_backward(grad, grad_carry, q, k, v, carry, tensors, ctx.numbers, ctx.line, ctx.held))
    first = [None if x is None else next(found) for x in (q, k, v, carry)]
    return *first, [g if x.is_floating_point() else None for x, g in zip(tensors, found, strict=True)], none, None, None


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise CombinationError(
        "attend has no second derivative: its gradient was asked for one (create_graph=True, a gradient penalty, a Hessian)"
    )


for _name, _shapes in (("attend", _attend_shapes), ("attend_backward", _attend_backward_shapes),
                       ("write", _write_shapes), ("write_backward", _write_backward_shapes)):  # fmt: skip
    torch.library.register_fake(f"regard::{_name}", _shapes, lib=_library)
torch.library.register_autograd("regard::attend", _backward, setup_context=_setup, lib=_library)
torch.library.register_autograd("regard::attend_backward", _no_second, lib=_library)
torch.library.register_autograd("regard::write", _backward_after, setup_context=_setup_after, lib=_library)
torch.library.register_autograd("regard::write_backward", _no_second, lib=_library)
torch.library.register_vmap("regard::attend", batched(_attend), lib=_library)
torch.library.register_vmap("regard::attend_backward", batched_backward(_attend_backward), lib=_library)

torch.library.register_vmap("regard::write", one_by_one(_write), lib=_library)
torch.library.register_vmap("regard::write_backward", one_by_one(_write_backward), lib=_library)


def _autocast_rule(device: str, key: str) -> None:
    keys: Any = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))  # pyright: ignore

    def attend(*given: Any) -> Any:
        """torch's own call is left to autocast, the others keep the precision of their tensors: the kernel is told which."""
        dtype = _autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):  # pyright: ignore
            return _attend(*given[:7], dtype)

    _library.impl("attend", attend, key)


_autocast_rule("cpu", "AutocastCPU")
_autocast_rule("cuda", "AutocastCUDA")

__all__ = ["call", "call_after", "install", "is_called_for"]
