"""Cache records are bit-exact: codes, scales, layouts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kernels import formats, ops
from deepinfer_kernels.capability import capability
from deepinfer_kernels.errors import RecordError
from deepinfer_kernels.formats import codes, quant
from deepinfer_kernels.registry import default_registry, use

QUANTISED = ("fp8", "fp4", "index_fp4")
BACKENDS = [
    name
    for name, impl in default_registry.impls("fake_quant").items()
    if impl.requires.refusal(capability("cpu")) is None and impl.unavailable() is None
]
ALL_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN standing for any other."""
    nan = wanted.isnan()
    return (
        got.dtype == wanted.dtype
        and torch.equal(got.isnan(), nan)
        and torch.equal(_bits(got.masked_fill(nan, 0)), _bits(wanted.masked_fill(nan, 0)))
    )


def test_released_dimensions_give_the_published_record_sizes() -> None:
    assert formats.record_bytes("fp8", 512) == 528
    assert formats.record_bytes("fp4", 512) == 288
    assert formats.record_bytes("index_fp4", 128) == 68
    assert formats.record_bytes("raw", 512, torch.bfloat16) == 1024
    assert formats.section_bytes("index_fp4", 128, 64) == 4352
    assert formats.section_bytes("fp4", 512, 64) == 18432
    assert formats.section_bytes("fp8", 32, 1) == 64  # 33 bytes, padded


def test_e2m1_rounds_to_nearest_with_ties_to_the_even_code() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -5.0, 0.2500001])
    assert codes.encode_e2m1(x).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 14, 1]


def test_e2m1_takes_the_nearest_value_everywhere() -> None:
    x = ALL_BF16.float()
    x = x[x.isfinite()]
    decoded = codes.e2m1_values(x.device)[codes.encode_e2m1(x).int()]
    magnitudes = torch.tensor(codes.E2M1_MAGNITUDES)
    nearest = (x.abs().clamp(max=6).unsqueeze(-1) - magnitudes).abs().amin(-1)
    assert torch.equal((decoded.abs() - x.abs().clamp(max=6)).abs(), nearest)


def test_power_of_two_scale_is_exact_at_and_around_powers_of_two() -> None:
    for exponent in range(-126, 127):
        power = torch.tensor([2.0**exponent], dtype=torch.float32)
        above = torch.nextafter(power, torch.tensor([math.inf]))
        assert codes.encode_pow2_ceil(power).item() == exponent + 127
        assert codes.encode_pow2_ceil(above).item() == exponent + 128
        assert codes.ue8m0_values(power.device)[exponent + 127].item() == 2.0**exponent


def test_crafted_block_gives_these_bytes() -> None:
    # 448 is the largest payload at scale 1; -0.0 keeps its sign; the floor of the scale is 2^-22.
    x = torch.zeros(64)
    x[0], x[1], x[2] = 448.0, 1.0, -0.0
    packed = formats.pack(x, "fp8")
    assert packed[:3].tolist() == [0x7E, 0x38, 0x80]
    assert packed[64:].tolist() == [127, 105]
    # An fp4 scale is amax / 6 in E4M3; even channels are in the low nibble.
    y = torch.zeros(16)
    y[0], y[1] = 6.0, -3.0
    assert formats.pack(y, "fp4")[0].item() == 7 | (8 + 5) << 4
    assert formats.pack(y, "fp4")[8:].tolist() == [0x38]
    z = torch.zeros(32)
    z[5] = 6.5  # just past 6: the scale doubles, and 3.25 rounds to 3
    assert formats.pack(z, "index_fp4")[2].item() >> 4 == 5
    assert formats.pack(z, "index_fp4")[16:].tolist() == [128]


def test_scale_of_a_full_block_never_lets_the_payload_saturate_by_a_rounding() -> None:
    for exponent in range(-8, 9):
        x = torch.full((32,), 448.0 * 2.0**exponent)
        assert torch.equal(formats.fake_quant(x, "fp8"), x)
        assert formats.pack(x, "fp8")[32].item() == 127 + exponent


@pytest.mark.parametrize("record", QUANTISED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_bfloat16_value_quantises_as_packing_and_unpacking_it_does(
    record: str, backend: str
) -> None:
    x = ALL_BF16.view(-1, 64)
    generator = torch.Generator().manual_seed(1)
    shuffled = ALL_BF16[torch.randperm(ALL_BF16.numel(), generator=generator)].view(-1, 64)
    for values in (x, shuffled):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            wide = values.to(dtype)
            wanted = formats.unpack(formats.pack(wide, record), record, 64, dtype)
            with use(backend=backend, op="fake_quant"):
                assert _same(formats.fake_quant(wide, record), wanted)


@pytest.mark.parametrize("record", QUANTISED)
def test_decoded_values_are_representable_in_bfloat16(record: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(500, 64, generator=generator) * torch.exp(
        8 * torch.randn(500, 1, generator=generator)
    )
    decoded = formats.fake_quant(x, record)
    assert torch.equal(decoded.bfloat16().float(), decoded)


@pytest.mark.parametrize("record", ["fp8", "index_fp4"])
@given(seed=st.integers(0, 2**32), sigma=st.floats(-20, 20))
def test_quantising_twice_changes_nothing_under_a_power_of_two_scale(
    record: str, seed: int, sigma: float
) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 2**sigma
    once = formats.fake_quant(x, record)
    assert torch.equal(formats.fake_quant(once, record), once)


@pytest.mark.parametrize("record", QUANTISED)
@given(seed=st.integers(0, 2**32), sigma=st.floats(-8, 8))
def test_error_stays_within_half_a_step_of_the_block_scale(
    record: str, seed: int, sigma: float
) -> None:
    fmt = formats.record_format(record)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * 2**sigma
    error = (formats.fake_quant(x, record) - x).abs().view(3, -1, fmt.block)
    amax = x.abs().view(3, -1, fmt.block).amax(-1, keepdim=True)
    # The coarsest step is 32 scales of at most 2 amax / 448 (E4M3), 2 scales of 2 amax / 6 (E2M1).
    # An fp4 scale rounded down saturates the largest value by up to a sixteenth besides.
    bound = amax / 14 if record == "fp8" else amax / 3
    floor = {"fp8": 1e-4, "fp4": 2.0**-9, "index_fp4": 0.0}[record]
    assert (error <= bound + floor).all()


def test_block_with_nan_decodes_to_nan_and_leaves_its_neighbours_alone() -> None:
    for record in QUANTISED:
        x = torch.ones(64)
        x[3] = math.nan
        decoded = formats.fake_quant(x, record)
        block = formats.record_format(record).block
        assert decoded[:block].isnan().all()
        assert decoded[block:].isfinite().all()


def test_raw_record_keeps_every_bit() -> None:
    x = ALL_BF16.view(-1, 64)
    assert _same(formats.unpack(formats.pack(x, "raw"), "raw", 64, torch.bfloat16), x)
    assert formats.fake_quant(x, "raw") is x
    assert ops.fake_quant(x, "raw") is not x


def test_packing_reads_strided_input() -> None:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).T
    for record in (*QUANTISED, "raw"):
        assert torch.equal(formats.pack(x, record), formats.pack(x.contiguous(), record))
        assert torch.equal(quant.fake_quant(x, record), quant.fake_quant(x.contiguous(), record))


def test_misuse_names_what_was_wanted() -> None:
    with pytest.raises(RecordError, match="the records are fp8, fp4, index_fp4, raw"):
        formats.record_bytes("fp16", 64)
    with pytest.raises(RecordError, match="multiple of 32 channels, got 48"):
        formats.pack(torch.zeros(48), "fp8")
    with pytest.raises(RecordError, match="pass dtype"):
        formats.record_bytes("raw", 64)
    with pytest.raises(RecordError, match=r"floating point values, got torch\.int64"):
        formats.pack(torch.zeros(64, dtype=torch.int64), "fp8")
    with pytest.raises(RecordError, match=r"uint8 \[..., 66\], got"):
        formats.unpack(torch.zeros(65, dtype=torch.uint8), "fp8", 64, torch.float32)
