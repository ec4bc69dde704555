"""The choice of a back end: order, preferences, refusals, reports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer_kernels import ops, registry
from deepinfer_kernels.capability import Requirement
from deepinfer_kernels.errors import (
    BackendError,
    ConfigError,
    FallbackError,
    KernelsError,
    UnknownOpError,
)
from deepinfer_kernels.registry import Impl, OpSpec, Registry, Tolerance
from deepinfer_kernels.settings import KernelConfig


def _named(name: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> str:
        return name

    return kernel


def _spec(name: str) -> OpSpec:
    return OpSpec(
        name=name,
        schema="(Tensor x) -> Tensor",
        reference=_named("reference"),
        fake=_named("fake"),
        tags=frozenset({"latency"}),
        tolerance=Tolerance(),
        cost=lambda x: (1, 1),
        cases=lambda g, dtype: (),
        shapes=lambda dtype: {},
    )


def _impl(op: str, backend: str, on: str = "cpu", **rest: Any) -> Impl:
    return Impl(op, backend, _named(backend), Requirement(frozenset({on})), **rest)


def _registry(config: KernelConfig | None = None) -> Registry:
    table = Registry(config or KernelConfig())
    for name in ("one", "two"):
        table.add_op(_spec(name))
    table.add_impl(_impl("one", "cpu"))
    return table


def test_best_back_end_of_the_order_wins_and_the_reference_is_always_there() -> None:
    table = _registry()
    assert table.resolve("one")() == "cpu"
    assert table.resolve("two")() == "reference"
    assert table.resolve("two", torch.device("cpu"))() == "reference"


def test_choice_is_made_once() -> None:
    asked: list[int] = []

    def unavailable() -> None:
        asked.append(1)

    table = _registry()
    table.add_impl(_impl("one", "native", unavailable=unavailable))
    assert {table.resolve("one")() for _ in range(5)} == {"native"}
    assert len(asked) == 1


def test_a_later_registration_is_seen() -> None:
    table = _registry()
    assert table.resolve("one")() == "cpu"
    table.add_impl(_impl("one", "native"))
    assert table.resolve("one")() == "native"


def test_use_applies_inside_its_block_and_the_innermost_wins() -> None:
    table = _registry()
    with table.use(backend="reference"):
        assert table.resolve("one")() == "reference"
        with table.use(backend="cpu", op="one"):
            assert table.resolve("one")() == "cpu"
        assert table.resolve("one")() == "reference"
    assert table.resolve("one")() == "cpu"


def test_innermost_of_two_preferences_of_one_kind_wins() -> None:
    table = _registry()
    for op in ("one", None):
        with table.use(backend="cpu", op=op), table.use(backend="reference", op=op):
            assert table.resolve("one")() == "reference"


def test_use_is_undone_when_the_block_raises() -> None:
    table = _registry()
    with pytest.raises(ZeroDivisionError), table.use(backend="reference"):
        _ = 1 / 0
    assert table.resolve("one")() == "cpu"


def test_use_beats_the_configuration_and_the_configuration_beats_the_order() -> None:
    table = _registry(KernelConfig(per_op={"one": "reference"}))
    assert table.resolve("one")() == "reference"
    with table.use(backend="cpu"):
        assert table.resolve("one")() == "cpu"


def test_preference_for_all_applies_where_the_back_end_has_the_operator() -> None:
    table = _registry(KernelConfig(backend="cpu"))
    table.add_impl(_impl("one", "native"))
    table.add_impl(_impl("two", "native"))
    assert table.resolve("one")() == "cpu"
    assert table.resolve("two")() == "reference"


def test_demand_for_one_operator_is_met_or_raises() -> None:
    table = _registry()
    table.add_impl(_impl("one", "native", unavailable=lambda: "has no compiler"))
    with table.use(backend="native", op="one"), pytest.raises(BackendError, match="no compiler"):
        table.resolve("one")
    with pytest.raises(BackendError, match="has no back end 'triton'; it has: reference, cpu"):
        table.configure(KernelConfig(per_op={"one": "triton"}))
    with pytest.raises(BackendError, match="no back end 'nonsense'"), table.use(backend="nonsense"):
        pass


def test_refusal_is_reported_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    table = _registry()
    table.add_impl(_impl("one", "native", unavailable=lambda: "is not built"))
    with caplog.at_level(logging.WARNING, "deepinfer_kernels"):
        for _ in range(3):
            assert table.resolve("one")() == "cpu"
        with table.use(backend="native"):
            assert table.resolve("one")() == "cpu"
    assert [record.getMessage() for record in caplog.records] == [
        "one, and maybe others, falls back to cpu (native: is not built); "
        "see deepinfer-kernels doctor"
    ]
    assert table.choose("one").refused == (("native", "is not built"),)


def test_one_reason_of_many_operators_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    table = Registry(KernelConfig())
    for name in ("one", "two", "three"):
        table.add_op(_spec(name))
        table.add_impl(_impl(name, "native", unavailable=lambda: "is not built"))
    with caplog.at_level(logging.WARNING, "deepinfer_kernels"):
        for name in ("one", "two", "three"):
            table.resolve(name)
    assert len(caplog.records) == 1


def test_strict_turns_a_fallback_into_an_error() -> None:
    table = _registry(KernelConfig(strict=True))
    assert table.resolve("one")() == "cpu"
    table.add_impl(_impl("one", "native", unavailable=lambda: "is not built"))
    with pytest.raises(FallbackError, match="'one' on cpu would fall back to 'cpu'"):
        table.resolve("one")


def test_unmeasured_form_waits_for_a_measured_one() -> None:
    table = _registry()
    table.add_impl(_impl("one", "native", maturity="unmeasured"))
    assert table.resolve("one")() == "cpu"
    with table.use(backend="native"):
        assert table.resolve("one")() == "native"
    table.add_impl(_impl("two", "native", maturity="unmeasured", unavailable=lambda: "is broken"))
    assert table.resolve("two")() == "reference"


def test_reference_on_an_accelerator_counts_as_degraded() -> None:
    table = _registry()
    assert table.choose("two", "cuda:0").degraded
    assert not table.choose("two", "cpu").degraded
    strict = _registry(KernelConfig(strict=True))
    with pytest.raises(FallbackError, match="no better form is built"):
        strict.resolve("two", "cuda")


def test_back_end_of_another_device_refuses() -> None:
    table = _registry()
    table.add_impl(_impl("two", "native", on="cuda"))
    assert table.choose("two").refused == (("native", "runs on cuda, not on cpu"),)


def test_environment_is_read() -> None:
    config = KernelConfig.from_env(
        {"DEEPINFER_KERNELS": " one=cpu, reference ,two=reference", "DEEPINFER_KERNELS_STRICT": "1"}
    )
    assert config == KernelConfig("reference", {"one": "cpu", "two": "reference"}, strict=True)
    assert KernelConfig.from_env({}) == KernelConfig()
    for broken in ({"DEEPINFER_KERNELS": "one="}, {"DEEPINFER_KERNELS_STRICT": "perhaps"}):
        with pytest.raises(ConfigError, match="wants"):
            KernelConfig.from_env(broken)


def test_environment_reaches_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_KERNELS", "one=reference")
    table = Registry()
    table.add_op(_spec("one"))
    table.add_impl(_impl("one", "cpu"))
    assert table.resolve("one")() == "reference"


def test_unknown_operator_names_the_known_ones() -> None:
    with pytest.raises(UnknownOpError, match="no operator 'three'; there are: one, two"):
        _registry().resolve("three")
    with pytest.raises(KernelsError):
        registry.resolve("no_such_operator")


def test_registering_twice_raises() -> None:
    table = _registry()
    with pytest.raises(BackendError, match="already registered"):
        table.add_op(_spec("one"))
    with pytest.raises(BackendError, match="already has a back end 'cpu'"):
        table.add_impl(_impl("one", "cpu"))


def test_public_operators_follow_use() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    with registry.use(backend="reference"):
        assert registry.choose("rms_norm").impl.backend == "reference"
        slow = ops.rms_norm(x, None, 1e-6)
    torch.testing.assert_close(ops.rms_norm(x, None, 1e-6), slow)


def test_every_public_operator_is_registered_and_the_other_way_round() -> None:
    assert set(ops.__all__) == set(registry.op_names())


def test_checked_mode_hands_out_the_checking_functions() -> None:
    before = registry.default_registry.config
    try:
        registry.configure(KernelConfig(checked=True))
        assert registry.resolve("rms_norm") is ops.rms_norm
    finally:
        registry.configure(before)
    assert registry.resolve("rms_norm") is registry.choose("rms_norm").impl.fn
    assert KernelConfig.from_env({"DEEPINFER_KERNELS_CHECK": "yes"}).checked
