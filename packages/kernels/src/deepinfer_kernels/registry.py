"""One table of operators, and the choice of a back end for each.

The choice is made once per (operator, device type, preference) and cached. The hot path asks
`resolve` once and keeps the callable it returns::

    mla_sparse = registry.resolve("mla_sparse", "cpu")

Preference, strongest first: ``with use(...)``, `configure`, the environment
(``DEEPINFER_KERNELS``), and last the order of `BACKEND_ORDER` for the device.
A preference for one named operator must be met or raises; a preference for all operators applies
where that back end has the operator. A back end that refuses is reported, never skipped in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal

import torch

from deepinfer_kernels.capability import Requirement, capability
from deepinfer_kernels.errors import BackendError, FallbackError, UnknownOpError
from deepinfer_kernels.settings import KernelConfig

__all__ = [
    "BACKEND_ORDER",
    "Choice",
    "Impl",
    "Kernel",
    "Maturity",
    "OpSpec",
    "Registry",
    "Tag",
    "Tolerance",
    "choose",
    "configure",
    "default_registry",
    "op_names",
    "resolve",
    "use",
]

Kernel = Callable[..., Any]
Maturity = Literal["stable", "experimental", "unmeasured"]
Tag = Literal["memory", "compute", "latency"]

BACKEND_ORDER: Mapping[str, tuple[str, ...]] = {
    "cpu": ("native", "cpu", "reference"),
    "cuda": ("vendor", "sm100", "triton", "reference"),
    "npu": ("vendor", "ascend", "reference"),
}
"""Best first. Device types not listed know only ``reference``."""

_log = logging.getLogger("deepinfer_kernels")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - wanted| <= absolute + relative * |wanted|, by activation dtype; zero means bit-equal.

    Integer, boolean and byte outputs are always compared bit for bit.
    """

    float32: tuple[float, float] = (0.0, 0.0)
    bfloat16: tuple[float, float] = (0.0, 0.0)
    float64: tuple[float, float] = (0.0, 0.0)

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """(absolute, relative) for one dtype."""
        if dtype is torch.float64:
            return self.float64
        return self.bfloat16 if dtype is torch.bfloat16 else self.float32


@dataclass(frozen=True, slots=True)
class OpSpec:
    """What an operator is, independent of who computes it.

    schema:    torch schema without the name, e.g. ``(Tensor x, float eps) -> Tensor``
    reference: the plain torch form, the oracle
    fake:      output shapes and dtypes from input shapes alone
    cost:      (bytes moved at least, floating point operations) of one call, from its arguments
    cases:     draws the arguments of one fuzz case: (generator, dtype) -> arguments
    shapes:    arguments of the shapes that matter in serving, by label, for the bench
    writes:    positions of the arguments that are written in place
    twin:      whether the float64 form of the same arguments is a meaningful oracle
    """

    name: str
    schema: str
    reference: Kernel
    fake: Kernel
    tags: frozenset[Tag]
    tolerance: Tolerance
    cost: Callable[..., tuple[int, int]]
    cases: Callable[[torch.Generator, torch.dtype], tuple[Any, ...]]
    shapes: Callable[[torch.dtype], Mapping[str, tuple[Any, ...]]]
    twin: bool = True
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Impl:
    """One way to compute an operator. ``evidence`` names the file of its measurements."""

    op: str
    backend: str
    fn: Kernel
    requires: Requirement
    maturity: Maturity = "stable"
    evidence: str | None = None
    differentiable: bool = False
    """Autograd knows its derivative; calls that need one go to the reference otherwise."""
    unavailable: Callable[[], str | None] = lambda: None
    """Why this machine cannot run it (a missing compiler, say), or None."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome for one operator on one device type."""

    impl: Impl
    refused: tuple[tuple[str, str], ...] = field(default=())
    """(back end, reason) of every better one that exists for this operator and was not taken."""
    degraded: bool = False
    """A better back end refused, or only the reference is left on an accelerator."""


class Registry:
    """Operators, their implementations, and the cached choice between them."""

    def __init__(
        self,
        config: KernelConfig | None = None,
        populate: Callable[[Registry], None] | None = None,
    ) -> None:
        """``populate`` fills the table when something is first asked of it."""
        self._populate = populate
        self._specs: dict[str, OpSpec] = {}
        self._impls: dict[str, dict[str, Impl]] = {}
        self._config = config
        self._overrides: ContextVar[tuple[tuple[str | None, str], ...]] = ContextVar(
            "deepinfer_kernels_overrides", default=()
        )
        self._choices: dict[tuple[Any, ...], Choice] = {}
        self._reported: set[tuple[str, str]] = set()
        self._lock = Lock()

    def _filled(self) -> dict[str, OpSpec]:
        if self._populate is not None:
            populate, self._populate = self._populate, None
            populate(self)
        return self._specs

    # -- filling -----------------------------------------------------------------------------

    def add_op(self, spec: OpSpec) -> None:
        """Register an operator; its reference runs on every device type.

        Raises BackendError for a back end that is there already or is not there.
        """
        if spec.name in self._specs:
            raise BackendError(f"operator {spec.name!r} is already registered")
        self._specs[spec.name] = spec
        everywhere = frozenset({"cpu", "cuda", "npu", "meta"})
        self._impls[spec.name] = {
            "reference": Impl(
                spec.name, "reference", spec.reference, Requirement(everywhere), differentiable=True
            )
        }

    def add_impl(self, impl: Impl) -> None:
        """Register one more way to compute a known operator.

        Raises BackendError for a back end that is there already or is not there.
        """
        impls = self._impls[self.spec(impl.op).name]
        if impl.backend in impls:
            raise BackendError(f"{impl.op!r} already has a back end {impl.backend!r}")
        impls[impl.backend] = impl
        self._choices.clear()

    # -- asking ------------------------------------------------------------------------------

    @property
    def config(self) -> KernelConfig:
        """The settings in force; read from the environment on first use."""
        if self._config is None:
            self.configure(KernelConfig.from_env())
        assert self._config is not None
        return self._config

    def configure(self, config: KernelConfig) -> None:
        """Replace the settings. Names of operators and back ends are checked here."""
        for op, backend in config.per_op.items():
            self._check(op, backend)
        if config.backend is not None:
            self._check(None, config.backend)
        self._config = config
        self._choices.clear()

    def op_names(self) -> tuple[str, ...]:
        """Every operator, in the order of registration."""
        return tuple(self._filled())

    def spec(self, name: str) -> OpSpec:
        """The operator of that name, or UnknownOpError."""
        try:
            return self._filled()[name]
        except KeyError:
            known = ", ".join(self._specs)
            raise UnknownOpError(f"no operator {name!r}; there are: {known}") from None

    def impls(self, name: str) -> Mapping[str, Impl]:
        """Every implementation of an operator, by back end."""
        return dict(self._impls[self.spec(name).name])

    def resolve(self, name: str, device: str | torch.device = "cpu") -> Kernel:
        """The callable to use for ``name`` on ``device`` under the preferences in force now.

        It follows no later `use` and checks no shapes: hold it where dispatch would cost, and give
        it what the function of that name in `deepinfer_kernels.ops` accepts. A native form trusts
        the shapes, as compiled code does. With ``KernelConfig(checked=True)`` the checking
        function itself is returned, which finds such a mistake at the price of some microseconds.
        """
        choice = self.choose(name, device)
        if self.config.checked:
            from deepinfer_kernels import ops  # the operators import this module

            return getattr(ops, name)
        return choice.impl.fn

    def choose(self, name: str, device: str | torch.device = "cpu") -> Choice:
        """As `resolve`, with the reasons."""
        kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
        overrides = self._overrides.get()
        choice = self._choices.get((name, kind, overrides))
        if choice is None:
            with self._lock:
                choice = self._decide(name, kind, overrides)
                self._choices[name, kind, overrides] = choice
            self._report(name, choice)
        return choice

    @contextmanager
    def use(self, *, backend: str, op: str | None = None) -> Generator[None, None, None]:
        """Prefer ``backend`` inside the block, for one operator or for all (this context only)."""
        self._check(op, backend)
        token = self._overrides.set((*self._overrides.get(), (op, backend)))
        try:
            yield
        finally:
            self._overrides.reset(token)

    # -- deciding ----------------------------------------------------------------------------

    def _check(self, op: str | None, backend: str) -> None:
        if op is not None:
            if backend not in self.impls(op):
                raise BackendError(
                    f"operator {op!r} has no back end {backend!r}; "
                    f"it has: {', '.join(self.impls(op))}"
                )
        elif self._filled() and not any(backend in impls for impls in self._impls.values()):
            known = sorted({name for impls in self._impls.values() for name in impls})
            raise BackendError(f"no back end {backend!r}; there are: {', '.join(known)}")

    def _preferred(
        self, name: str, overrides: tuple[tuple[str | None, str], ...]
    ) -> tuple[str | None, str | None]:
        """(back end demanded for this operator, back end preferred for all)."""
        demanded = next((b for op, b in reversed(overrides) if op == name), None)
        general = next((b for op, b in reversed(overrides) if op is None), None)
        if demanded is None and general is None:
            demanded = self.config.per_op.get(name)
        return demanded, general if general is not None else self.config.backend

    def _decide(
        self, name: str, kind: str, overrides: tuple[tuple[str | None, str], ...]
    ) -> Choice:
        impls = self._impls[self.spec(name).name]
        have = capability(kind)
        demanded, general = self._preferred(name, overrides)

        def refusal(impl: Impl) -> str | None:
            return impl.requires.refusal(have) or impl.unavailable()

        if demanded is not None:
            reason = refusal(impls[demanded])
            if reason is not None:
                raise BackendError(f"{name!r} was asked of back end {demanded!r}: it {reason}")
            return Choice(impls[demanded])

        order = BACKEND_ORDER.get(kind, ("reference",))
        if general is not None:
            after = order.index(general) + 1 if general in order else 0
            order = (general, *order[after:])
        refused: list[tuple[str, str]] = []
        # An unmeasured form waits until nothing measured fits; the reference comes last.
        ranked = sorted(
            (impls[backend] for backend in order if backend in impls),
            key=lambda impl: (
                impl.backend == "reference",
                impl.maturity == "unmeasured" and impl.backend != general,
            ),
        )
        for impl in ranked:
            reason = refusal(impl)
            if reason is None:
                accelerated = kind not in {"cpu", "meta"}
                reference_on_accelerator = accelerated and impl.backend == "reference"
                degraded = bool(refused) or (reference_on_accelerator and general != "reference")
                if degraded and self.config.strict:
                    why = "; ".join(f"{b}: {r}" for b, r in refused) or "no better form is built"
                    raise FallbackError(
                        f"strict: {name!r} on {kind} would fall back to {impl.backend!r} ({why})"
                    )
                return Choice(impl, tuple(refused), degraded)
            refused.append((impl.backend, reason))
        raise BackendError(f"{name!r} has no back end for device type {kind!r}")

    def _report(self, name: str, choice: Choice) -> None:
        """Say once per reason, not once per operator, that a better back end was not taken."""
        reasons = "; ".join(f"{backend}: {why}" for backend, why in choice.refused)
        key = (choice.impl.backend, reasons)
        if choice.degraded and key not in self._reported:
            self._reported.add(key)
            _log.warning(
                "%s, and maybe others, falls back to %s (%s); see deepinfer-kernels doctor",
                name,
                choice.impl.backend,
                reasons or "no better form is built for this device",
            )


def _populate_default(registry: Registry) -> None:
    from deepinfer_kernels import forms  # the forms import this module

    forms.register(registry)


default_registry = Registry(populate=_populate_default)
"""The registry that `deepinfer_kernels.ops` uses; it fills itself when first asked."""

resolve = default_registry.resolve
choose = default_registry.choose
use = default_registry.use
configure = default_registry.configure
op_names = default_registry.op_names
