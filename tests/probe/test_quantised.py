"""FP8 and INT4, both ways, bit for bit equal to a loop over single numbers in plain Python that shares nothing with us.

The loop: an fp32 is a double packed into four bytes. A product or quotient of two fp32 in double, then rounded to fp32,
is the fp32 product or quotient, since a double has more than twice the digits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from probe import quantised
from probe.errors import BadCheckpoint, ShapeMismatch
from probe.quantised import (
    BLOCK,
    GROUP,
    dequantise_fp8,
    dequantise_int4,
    fp8_scales,
    plain_fp8,
    quantise_fp8,
    quantise_int4,
)

NAN = (0x7F, 0xFF)
CODES = [code for code in range(256) if code not in NAN]


# --- the loop ----------------------------------------------------------------------------------


def fp32(x: float) -> float:
    """The nearest fp32, ties to even."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def bf16(x: float) -> int:
    """The bits of the nearest bf16, ties to even, of an fp32 that is not NaN."""
    bits = int.from_bytes(struct.pack("<f", x), "little")
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_value(bits: int) -> float:
    return float(struct.unpack("<f", (bits << 16).to_bytes(4, "little"))[0])


def e4m3(code: int) -> float:
    """What a byte means: sign, four bits of exponent (bias 7), three of mantissa."""
    sign, exponent, mantissa = (-1.0 if code >> 7 else 1.0), code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = {code: e4m3(code) for code in CODES}


def loop_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    rows, factors = codes.tolist(), scale.tolist()
    bits = [
        [bf16(fp32(E4M3[code] * factors[i // 128][j // 128])) for j, code in enumerate(row)]
        for i, row in enumerate(rows)
    ]
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16)


def loop_int4(packed: Tensor, scale: Tensor) -> Tensor:
    words, factors = (packed.long() & 0xFFFFFFFF).tolist(), scale.double().tolist()
    bits = [
        [bf16(fp32(((row[j // 8] >> 4 * (j % 8) & 15) - 8) * factors[i][j // 32])) for j in range(8 * len(row))]
        for i, row in enumerate(words)
    ]
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16)


def fp8(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def bits(tensor: Tensor) -> Tensor:
    """Bits, so that signed zeros count."""
    return tensor.view(torch.int16)


def random_codes(m: int, n: int, seed: int = 0) -> Tensor:
    drawn = torch.randint(0, len(CODES), (m, n), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(CODES)[drawn]


def random_scales(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Of published size: some 1e-4, over two decades."""
    return 10 ** (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 5)


# --- FP8 ---------------------------------------------------------------------------------------

EXTREMES = {
    "one": 1.0,
    "usual": 3.1e-4,
    "zero": 0.0,
    "negative": -3.1e-4,
    "negative zero": -0.0,
    "least subnormal": 2.0**-149,
    "subnormal": 1.7e-41,
    "least normal": 2.0**-126,
    "products are subnormal bf16": 1.3e-38,
    "just below 2^120": float(torch.tensor(2.0**120).nextafter(torch.tensor(0.0))),
    "2^120, which times 2^8 is no fp32": 2.0**120,
    "products overflow": 2.9e38,
}


@pytest.mark.parametrize("name", EXTREMES)
def test_every_fp8_code_at_every_kind_of_scale(name: str) -> None:
    codes = torch.tensor(CODES)[None]
    scale = torch.tensor([[EXTREMES[name], -1.25 * 2.0**-9]])
    assert torch.equal(bits(dequantise_fp8(fp8(codes), scale)), loop_fp8(codes, scale))


def test_the_loop_is_torchs_own_reading_of_every_code() -> None:
    assert torch.equal(fp8(torch.tensor(CODES)).double(), torch.tensor([E4M3[code] for code in CODES]).double())


SHAPES = [(1, 1), (1, 300), (127, 128), (128, 128), (129, 257), (192, 130), (576, 96), (64, 4096)]


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_equals_the_loop(shape: tuple[int, int]) -> None:
    codes, scale = random_codes(*shape), random_scales(fp8_scales(*shape))
    assert torch.equal(bits(dequantise_fp8(fp8(codes), scale)), loop_fp8(codes, scale))


@pytest.mark.parametrize("shape", [(576, 7168), (192, 2048), (300, 40_000), (3, 2**18 + 5)])
def test_fp8_equals_its_plain_twin_where_a_loop_would_take_long(shape: tuple[int, int]) -> None:
    stored, scale = fp8(random_codes(*shape)), random_scales(fp8_scales(*shape))
    assert torch.equal(bits(dequantise_fp8(stored, scale)), bits(plain_fp8(stored, scale)))


def test_the_plain_twin_equals_the_loop() -> None:
    codes, scale = random_codes(192, 130), random_scales((2, 2))
    assert torch.equal(bits(plain_fp8(fp8(codes), scale)), loop_fp8(codes, scale))


def test_a_block_is_128_rows_whatever_the_shapes_suggest() -> None:
    """192 rows with two scales are 128 and 64, not twice 96; and a scale is multiplied by, not divided."""
    read = dequantise_fp8(fp8(torch.full((192, 1), 0x38)), torch.tensor([[2.0], [5.0]]))
    assert read[:, 0].tolist() == [2.0] * 128 + [5.0] * 64


def test_large_scales_in_one_block_leave_the_others_alone() -> None:
    codes, scale = random_codes(256, 130), random_scales((2, 2))
    scale[0, 0] = 2.0**125
    assert torch.equal(bits(dequantise_fp8(fp8(codes), scale)), loop_fp8(codes, scale))


@pytest.mark.parametrize("code", NAN)
@pytest.mark.parametrize("place", [(0, 0), (70, 129), (191, 2)])
def test_a_nan_is_refused_and_named(code: int, place: tuple[int, int]) -> None:
    codes = random_codes(192, 130)
    codes[place] = code
    with pytest.raises(BadCheckpoint, match=f"row {place[0]}, column {place[1]} is NaN"):
        dequantise_fp8(fp8(codes), random_scales((2, 2)))


def test_a_nan_is_refused_beside_a_scale_that_takes_the_plain_way() -> None:
    with pytest.raises(BadCheckpoint, match="row 1, column 2 is NaN"):
        dequantise_fp8(fp8(torch.tensor([[0, 1, 2], [3, 4, 0xFF]])), torch.tensor([[2.0**120]]))


def test_fp8_in_a_process_that_flushes_subnormal_numbers() -> None:
    """As some libraries leave it: neither a stored number nor a product of usual size may pass through one."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU flushes nothing")
    try:
        read = dequantise_fp8(fp8(torch.tensor(CODES)[None]), torch.tensor([[3.1e-4, 3.1e-4]]))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(read), loop_fp8(torch.tensor(CODES)[None], torch.tensor([[3.1e-4, 3.1e-4]])))


def test_quantised_fp8_equals_the_loop() -> None:
    """Of a block: the largest magnitude / 448, then each number's nearest code, an even one of two."""
    weight = torch.randn(140, 131) * torch.tensor([1e-6, 1.0, 1e3])[torch.arange(131) % 3]
    weight[128:, 128:] = 0  # a block of nothing
    stored, scale = quantise_fp8(weight)
    codes, numbers = stored.view(torch.uint8).tolist(), weight.tolist()
    for i, rows in enumerate((numbers[:128], numbers[128:])):
        for j, columns in enumerate((slice(128), slice(128, 131))):
            factor = fp32(max(abs(x) for row in rows for x in row[columns]) / 448)
            assert scale[i, j] == (factor or 2.0**-126)
            for row, made in list(zip(rows, codes[128 * i :], strict=False))[::9]:
                for x, code in zip(row[columns], made[columns], strict=True):
                    want = min(max(fp32(x / (factor or 1.0)), -448.0), 448.0)
                    nearest = min(CODES, key=lambda c, want=want: (abs(E4M3[c] - want), c & 1))
                    assert E4M3[code] == E4M3[nearest], x


@pytest.mark.parametrize("scale", [1e-44, 1e-37, 1e-3, 1e30])
def test_fp8_there_and_back_is_near(scale: float) -> None:
    """Half a step: of three bits of mantissa, or of the subnormal codes (2^-9 of a scale), or of subnormal bf16."""
    weight = torch.randn(200, 150) * scale
    stored, factor = quantise_fp8(weight)
    full = factor.repeat_interleave(BLOCK, 0)[:200].repeat_interleave(BLOCK, 1)[:, :150]
    error = (dequantise_fp8(stored, factor, torch.float32) - weight).abs()
    assert (error <= (weight.abs() * (2**-4 + 2**-8) + full * 2**-10 * 1.01 + 2**-134)).all()


# --- INT4 --------------------------------------------------------------------------------------


def random_packed(o: int, i: int, seed: int = 0) -> Tensor:
    drawn = torch.randint(-(2**31), 2**31, (o, i // 8), generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.int32)


@pytest.mark.parametrize("name", EXTREMES)
def test_every_nibble_at_every_place_of_a_word_at_every_kind_of_scale(name: str) -> None:
    words = [sum((n + k) % 16 << 4 * k for k in range(8)) for n in range(16)]
    packed = torch.tensor(words).to(torch.int32).view(4, 4)
    scale = torch.full((4, 1), EXTREMES[name]).to(torch.bfloat16)
    read = dequantise_int4(packed, scale, (4, 32))
    assert torch.equal(bits(read), loop_int4(packed, scale))


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (130, 256), (7, 4096)])
def test_int4_equals_the_loop(shape: tuple[int, int]) -> None:
    packed, scale = random_packed(*shape), random_scales((shape[0], shape[1] // GROUP)).to(torch.bfloat16)
    assert torch.equal(bits(dequantise_int4(packed, scale, shape)), loop_int4(packed, scale))


def test_int4_by_hand() -> None:
    """The first weight lies in the lowest bits; 0 means -8, 8 means 0, 15 means 7."""
    packed = torch.zeros(1, 4, dtype=torch.int32)
    packed[0, 0] = 0x0000_0F80
    read = dequantise_int4(packed, torch.tensor([[2.0]], dtype=torch.bfloat16), (1, 32))
    assert read[0, :4].tolist() == [-16.0, 0.0, 14.0, -16.0]


def test_quantised_int4_equals_the_loop() -> None:
    weight = torch.randn(9, 96) * torch.tensor([1e-5, 1.0, 1e4])[torch.arange(96) // 32]
    weight[4, 32:64] = 0
    packed, scale = quantise_int4(weight)
    words = (packed.long() & 0xFFFFFFFF).tolist()
    for i, row in enumerate(weight.tolist()):
        for j, x in enumerate(row):
            largest = max(map(abs, row[j // 32 * 32 : j // 32 * 32 + 32]))
            factor = bf16_value(bf16(fp32(largest / 7))) or 2.0**-126
            assert float(scale[i, j // 32]) == factor
            assert (words[i][j // 8] >> 4 * (j % 8) & 15) - 8 == min(max(round(fp32(x / factor)), -7), 7)


def test_int4_there_and_back_is_near_and_never_uses_minus_eight() -> None:
    weight = torch.randn(64, 128)
    packed, scale = quantise_int4(weight)
    full = scale.float().repeat_interleave(GROUP, 1)
    error = (dequantise_int4(packed, scale, (64, 128), torch.float32) - weight).abs()
    assert (error <= full * 0.55).all()
    nibbles = packed[..., None] >> 4 * torch.arange(8) & 15
    assert set(nibbles.unique().tolist()) == set(range(1, 16))


# --- both --------------------------------------------------------------------------------------

FP8 = (fp8(random_codes(130, 96)), random_scales((2, 1)))
INT4 = (random_packed(130, 96), random_scales((130, 3)).to(torch.bfloat16))
WAYS: dict[str, Callable[..., Tensor]] = {
    "fp8": partial(dequantise_fp8, *FP8),
    "int4": partial(dequantise_int4, *INT4, (130, 96)),
}
MADE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"fp8": quantise_fp8, "int4": quantise_int4}


def test_stripes_of_seven_rows_the_last_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "_STRIPE", 7 * 96 + 5)
    codes, scale = FP8[0].view(torch.uint8), FP8[1]
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(bits(WAYS["fp8"](dtype=dtype).to(torch.bfloat16)), loop_fp8(codes, scale))
        assert torch.equal(bits(WAYS["int4"](dtype=dtype).to(torch.bfloat16)), loop_int4(*INT4))
    broken = codes.clone()
    broken[127, 3] = 0xFF
    with pytest.raises(BadCheckpoint, match="row 127, column 3 is NaN"):
        dequantise_fp8(fp8(broken), scale)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_another_dtype_is_the_bf16_number_cast(way: str, dtype: torch.dtype) -> None:
    read = WAYS[way](dtype=dtype)
    assert read.dtype == dtype
    assert torch.equal(read, WAYS[way]().to(dtype))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_into_a_place_of_a_larger_tensor(way: str, dtype: torch.dtype) -> None:
    whole = torch.full((3, 130, 99), 7.0, dtype=dtype)
    place = whole[1, :, 2:98]
    assert WAYS[way](out=place) is place
    assert torch.equal(place, WAYS[way](dtype=dtype))
    place.fill_(7.0)
    assert (whole == 7.0).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_place_of_another_shape(way: str) -> None:
    with pytest.raises(ShapeMismatch, match=r"out should be \[130, 96\] on cpu, and is \[96, 130\]"):
        WAYS[way](out=torch.empty(96, 130))


@pytest.mark.parametrize("way", WAYS)
def test_transposed_parameters_under_other_defaults(way: str) -> None:
    """A weight as a model holds it, in a process that has its own default dtype."""
    weight = torch.nn.Parameter(torch.randn(96, 130))
    want = MADE[way](weight.detach().T.contiguous())
    torch.set_default_dtype(torch.float16)
    try:
        made, read = MADE[way](weight.T), WAYS[way]()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(made[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(made[1], want[1])
    assert not any(tensor.requires_grad for tensor in made)
    assert torch.equal(bits(read), bits(WAYS[way]()))


@pytest.mark.parametrize("way", MADE)
def test_a_bf16_weight_is_quantised_as_the_same_numbers_in_fp32(way: str) -> None:
    weight = torch.randn(130, 96).to(torch.bfloat16)
    for ours, want in zip(MADE[way](weight), MADE[way](weight.float()), strict=True):
        assert torch.equal(ours.view(torch.uint8), want.view(torch.uint8))


def test_stored_tensors_in_another_memory_order() -> None:
    stored, scale = FP8
    assert torch.equal(
        dequantise_fp8(stored.view(torch.uint8).T.contiguous().T.view(stored.dtype), scale), WAYS["fp8"]()
    )
    packed, scale = INT4
    assert torch.equal(dequantise_int4(packed.T.contiguous().T, scale.T.contiguous().T, (130, 96)), WAYS["int4"]())


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("way", WAYS)
def test_a_scale_that_is_no_number(way: str, fault: float) -> None:
    stored, scale = {"fp8": FP8, "int4": INT4}[way]
    broken = scale.clone()
    broken[1, 0] = fault
    with pytest.raises(BadCheckpoint, match=r"the scale of (block|group) \[1, 0\] is NaN or infinite"):
        dequantise_fp8(stored, broken) if way == "fp8" else dequantise_int4(stored, broken, (130, 96))


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("way", MADE)
def test_a_weight_that_is_no_number(way: str, fault: float) -> None:
    weight = torch.randn(130, 96)
    weight[129, 3] = fault
    with pytest.raises(BadCheckpoint, match=r"a weight of (block \[1|group \[129), 0\] is NaN or infinite"):
        MADE[way](weight)


def test_what_does_not_fit_together() -> None:
    stored, scale = FP8
    with pytest.raises(
        BadCheckpoint, match=r"FP8 scale should be torch.float32 \[2, 1\], and is torch.float32 \[1, 2\]"
    ):
        dequantise_fp8(stored, scale.T)
    with pytest.raises(BadCheckpoint, match=r"FP8 scale .* and is torch.bfloat16"):
        dequantise_fp8(stored, scale.to(torch.bfloat16))
    with pytest.raises(BadCheckpoint, match=r"FP8 weight .* and is torch.float8_e5m2"):
        dequantise_fp8(stored.view(torch.float8_e5m2), scale)
    packed, scale = INT4
    with pytest.raises(
        BadCheckpoint, match=r"INT4 weight should be torch.int32 \[130, 16\], and is torch.int32 \[130, 12"
    ):
        dequantise_int4(packed, scale, (130, 128))
    with pytest.raises(BadCheckpoint, match=r"INT4 scale should be torch.bfloat16 \[130, 3\], and is torch.float32"):
        dequantise_int4(packed, scale.float(), (130, 96))
    with pytest.raises(BadCheckpoint, match="40 is no multiple"):
        dequantise_int4(packed, scale, (130, 40))
    with pytest.raises(BadCheckpoint, match="40 is no multiple"):
        quantise_int4(torch.randn(2, 40))


@given(m=st.integers(1, 140), n=st.integers(1, 140), seed=st.integers(0, 2**20), exponent=st.integers(-145, 126))
def test_any_fp8_equals_its_plain_twin(m: int, n: int, seed: int, exponent: int) -> None:
    stored = fp8(random_codes(m, n, seed))
    scale = (1 + torch.rand(fp8_scales(m, n), generator=torch.Generator().manual_seed(seed))) * 2.0**exponent
    assert torch.equal(bits(dequantise_fp8(stored, scale)), bits(plain_fp8(stored, scale)))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_on_a_gpu(way: str) -> None:
    stored, scale = {"fp8": FP8, "int4": INT4}[way]
    on = (stored.cuda(), scale.cuda())
    read = dequantise_fp8(*on) if way == "fp8" else dequantise_int4(*on, (130, 96))
    assert torch.equal(bits(read.cpu()), bits(WAYS[way]()))
    weight = torch.randn(130, 96)
    for ours, theirs in zip(MADE[way](weight.cuda()), MADE[way](weight), strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.gpu
def test_every_fp8_code_at_every_kind_of_scale_on_a_gpu() -> None:
    codes = torch.tensor(CODES)[None]
    for factor in EXTREMES.values():
        scale = torch.tensor([[factor, -1.25 * 2.0**-9]])
        read = dequantise_fp8(fp8(codes).cuda(), scale.cuda())
        assert torch.equal(bits(read.cpu()), loop_fp8(codes, scale))
    with pytest.raises(BadCheckpoint, match="row 0, column 1 is NaN"):
        dequantise_fp8(fp8(torch.tensor([[0, 0xFF]])).cuda(), torch.ones(1, 1).cuda())
