"""Every operator as torch.ops.deepinfer.<name>: schema, fake form, aliasing, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_kernels import library, ops
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.registry import default_registry

NAMES = default_registry.op_names()


def _case(name: str, seed: int = 3) -> tuple[Any, ...]:
    """A case without padded pages: opcheck clones arguments and would lose the gaps."""
    args = default_registry.spec(name).cases(seeded(seed), torch.float32)
    return tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)


def _results(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces
def test_operator_passes_opcheck(name: str) -> None:
    torch.library.opcheck(library.operator(name), _case(name))


@pytest.mark.parametrize("name", NAMES)
def test_fake_form_gives_the_real_shapes_and_dtypes(name: str) -> None:
    spec = default_registry.spec(name)
    for seed in range(10):
        args = _case(name, seed)
        real = _results(spec.reference(*args))
        meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
        fake = _results(spec.fake(*meta))
        for got, wanted in zip(fake, real, strict=True):
            assert (got is None) == (wanted is None)
            if wanted is not None:
                assert (got.shape, got.dtype, got.is_contiguous()) == (
                    wanted.shape,
                    wanted.dtype,
                    wanted.is_contiguous(),
                )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_public_functions_compile_whole_and_give_equal_results() -> None:
    generator = seeded(0)
    x = torch.randn(5, 4, 64, generator=generator)
    pre = torch.rand(5, 4, generator=generator)
    weight = torch.rand(64, generator=generator)

    def block(streams: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(ops.mhc_collapse(streams, pre), weight, 1e-6)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(x), block(x))


def test_operator_follows_the_preference_at_the_time_of_the_call() -> None:
    x = torch.randn(2, 4, 16, generator=seeded(1))
    pre = torch.rand(2, 4, generator=seeded(2))
    spec = default_registry.spec("mhc_collapse")
    with default_registry.use(backend="reference"):
        assert torch.equal(torch.ops.deepinfer.mhc_collapse(x, pre), spec.reference(x, pre))


@pytest.mark.skipif(
    default_registry.impls("index_topk")["native"].unavailable() is not None,
    reason="no C++ form is built here",
)
def test_index_work_of_a_decode_step_is_one_call_whatever_the_sequences() -> None:
    """Scores, runs and both selections: only the memory of the outputs is asked of torch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    form = default_registry.impls("index_topk")["native"].fn
    for seed in range(10):
        args = _case("index_topk", seed)
        count = Count()
        with count:
            form(*args)
        made = {"aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"}
        assert set(count.names) <= made, count.names
