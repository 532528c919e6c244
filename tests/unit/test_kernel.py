"""The row kernel against a plain-Python reference, and its instructions against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import reference
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtpstats import _core
from mtpstats.errors import InputError

FLOATS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, math.nan, math.inf, -math.inf, 3.4028235e38]),
    st.floats(-20, 20, width=32),
)
# short rows, and rows across the kernel's blocks (64) and chunks (2048), mostly of equal logits
ROWS = st.one_of(
    st.lists(FLOATS, min_size=1, max_size=200),
    st.builds(
        lambda n, fill, spots: [spots.get(i, fill) for i in range(n)],
        st.sampled_from([63, 64, 65, 2047, 2048, 2049]),
        FLOATS,
        st.dictionaries(st.integers(0, 2048), FLOATS, max_size=30),
    ),
)


def usable() -> list[str]:
    names = []
    for name in ("baseline", "avx2", "avx512"):
        try:
            _core.force_isa(name)
        except InputError:
            continue
        names.append(name)
    _core.force_isa()
    return names


ISAS = usable()


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _core.force_isa(request.param)
    yield request.param
    _core.force_isa()


def check(row: list[float], n_vocab: int | None = None) -> None:
    array = np.array(row, np.float32)
    row = array.tolist()
    ids, logits, lse, lse_top10 = _core.top_k(array, n_vocab)
    expected = reference.best(row[:n_vocab])
    missing = 10 - len(expected)
    assert ids.tolist() == [i for i, _ in expected] + [-1] * missing
    assert logits.tolist() == [v for _, v in expected] + [-math.inf] * missing
    assert lse == pytest.approx(reference.lse(row[:n_vocab]), rel=1e-6, abs=1e-6)
    assert lse_top10 == pytest.approx(reference.lse([v for _, v in expected]), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ISAS)
@settings(max_examples=60, deadline=None)
@given(ROWS)
@example([math.nan] * 70)
@example([math.inf] * 70 + [1.0])
@example([-math.inf] * 70)
@example([math.inf, -math.inf] * 1030)
@example([0.0, -0.0] * 40)
@example([3.4028235e38, -3.4028235e38] * 33)
@example([1.0] * 5000)
@example([float(i) for i in range(5000)])
@example([float(-i) for i in range(5000)])
def test_kernel_equals_the_reference(name: str, row: list[float]) -> None:
    _core.force_isa(name)
    check(row)
    _core.force_isa()


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 4))
def test_every_instruction_set_and_address_gives_the_same_bits(
    row: list[float], offset: int
) -> None:
    plain = np.array(row, np.float32)
    memory = bytearray(offset) + plain.tobytes()
    moved = np.frombuffer(memory, np.float32, offset=offset)
    results = []
    for name in ISAS:
        _core.force_isa(name)
        for source in (plain, moved):
            ids, logits, lse, lse_top10 = _core.top_k(source)
            results.append(
                (ids.tobytes(), logits.tobytes(), np.float64([lse, lse_top10]).tobytes())
            )
    _core.force_isa()
    assert len(set(results)) == 1


def test_random_rows_of_real_size(isa: str) -> None:
    rng = np.random.default_rng(7)
    for n in (151_936, 248_320):
        row = (3 * rng.standard_normal(n)).astype(np.float32)
        ids, logits, lse, _ = _core.top_k(row)
        order = np.lexsort((np.arange(n), -row))[:10]
        assert ids.tolist() == order.tolist()
        assert logits.tolist() == row[order].tolist()
        exact = math.log(math.fsum(np.exp(row.astype(np.float64)).tolist()))
        assert lse == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("depth", [-9.5, -12.25, -16.0])
def test_lse_of_one_peak_over_many_equal_logits(isa: str, depth: float) -> None:
    # equal terms all have the same error, so nothing averages out
    row = np.full(248_320, depth, np.float32)
    row[1000] = 0.0
    exact = math.log1p((len(row) - 1) * math.exp(depth))
    assert _core.top_k(row)[2] == pytest.approx(exact, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("n", [600, 2047, 2048])
def test_lse_of_one_peak_over_terms_that_rounding_would_bias(isa: str, n: int) -> None:
    for depth in np.arange(-18, -12, 0.125):
        row = np.full(n, depth, np.float32)
        row[0] = 0.0
        exact = math.log1p((n - 1) * math.exp(depth))
        assert _core.top_k(row)[2] == pytest.approx(exact, abs=1e-6)


def test_lse_when_the_reference_rises_late(isa: str) -> None:
    row = np.linspace(-300, 40, 10_000).astype(np.float32)
    assert _core.top_k(row)[2] == pytest.approx(reference.lse(row.tolist()), rel=1e-7)


def test_a_single_logit_is_certain(isa: str) -> None:
    row = _core.Row()
    for value in (0.0, -1e30, 3.4e38, 12.375):
        row.read(np.array([value], np.float32))
        assert (row.best, row.p, row.p_top10) == (0, 1.0, 1.0)
        assert row.margin == math.inf
        assert row.lse == np.float32(value)


def test_equal_logits_the_lower_id_first(isa: str) -> None:
    row = np.zeros(5000, np.float32)
    row[[4999, 3000, 17]] = 1.0
    assert _core.top_k(row)[0].tolist() == [17, 3000, 4999, 0, 1, 2, 3, 4, 5, 6]


def test_nan_is_never_a_candidate_wherever_it_stands(isa: str) -> None:
    for n in (3, 64, 100, 2048, 3000):
        for where in {0, n // 2, n - 1}:
            row = np.arange(n, dtype=np.float32)
            row[where] = np.nan
            ids = _core.top_k(row)[0].tolist()
            expected = [i for i in range(n - 1, -1, -1) if i != where][:10]
            assert ids == expected + [-1] * (10 - len(expected))


def test_negative_nan_and_signalling_nan(isa: str) -> None:
    bits = np.array([0xFFC00000, 0x7FA00000, 0x3F800000], np.uint32)
    row = _core.Row()
    row.read(bits.view(np.float32))
    assert (row.best, row.n_nan) == (2, 2)


def test_infinity_is_counted_and_never_a_candidate(isa: str) -> None:
    row = _core.Row()
    for n in (5, 64, 2048, 2500):
        values = np.zeros(n, np.float32)
        values[2], values[n - 1] = np.inf, -np.inf
        values[1] = 2.0
        row.read(values)
        assert (row.best, row.n_nan) == (1, 1)
        assert row.lse == pytest.approx(math.log(n - 3 + math.exp(2)), rel=1e-7)


def test_masked_tokens_are_not_broken_logits(isa: str) -> None:
    values = np.full(4096, -np.inf, np.float32)
    values[[7, 4000]] = (1.0, 2.0)
    row = _core.Row()
    row.read(values)
    assert (row.best, row.id(2), row.id(3), row.n_nan) == (4000, 7, -1, 0)
    assert row.prob(1) == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-7)
    assert row.prob(3) == 0.0


def test_row_reads_what_top_k_reads(isa: str) -> None:
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    ids, logits, lse, lse_top10 = _core.top_k(values, 900)
    row = _core.Row()
    row.read_at(values.ctypes.data, 1000, 900)
    assert [row.id(r) for r in range(1, 11)] == ids.tolist()
    assert [row.logit(r) for r in range(1, 11)] == logits.tolist()
    assert (row.lse, row.lse_top10) == (lse, lse_top10)
    assert row.p == pytest.approx(math.exp(float(logits[0]) - lse), rel=1e-14)
    assert row.prob_top10(3) == pytest.approx(math.exp(float(logits[2]) - lse_top10), rel=1e-14)
    assert row.margin == float(logits[0]) - float(logits[1])
    assert [row.rank_of(int(i)) for i in ids] == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
    assert row.rank_of(-1) == 0


def test_best_at_gives_the_ten_without_the_full_softmax() -> None:
    values = np.random.default_rng(4).standard_normal(300).astype(np.float32)
    full, quick = _core.Row(), _core.Row()
    full.read(values)
    quick.best_at(values.ctypes.data, 300)
    assert quick.best == full.best
    assert quick.p_top10 == full.p_top10
    for read in (lambda: quick.p, lambda: quick.prob(1), lambda: quick.lse):
        with pytest.raises(InputError, match="read_at"):
            read()


LOGIT = st.one_of(st.floats(-1e4, 1e4, width=32), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(st.lists(st.tuples(LOGIT, LOGIT), min_size=1, max_size=200))
@settings(max_examples=60)
def test_overlap_equals_the_reference(pairs: list[tuple[float, float]]) -> None:
    a, b = (np.array(row, np.float32) for row in zip(*pairs, strict=True))
    expected = reference.overlap(a.tolist(), b.tolist())
    found = overlap(a, b)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-30, nan_ok=True)
    np.testing.assert_equal(overlap(b, a), found)


def overlap(a: np.ndarray, b: np.ndarray, clean: bool = False) -> float:
    lse = [_core.top_k(row)[2] for row in (a, b)]
    return _core.overlap_at(a.ctypes.data, lse[0], b.ctypes.data, lse[1], len(a), clean)


def test_overlap_of_rows_of_real_size(isa: str) -> None:
    rng = np.random.default_rng(5)
    for n in (4096, 151_936):
        a = rng.normal(0, 4, n).astype(np.float32)
        b = (a + rng.normal(0, 1, n)).astype(np.float32)
        expected = reference.overlap(a.tolist(), b.tolist())
        assert overlap(a, b, clean=True) == pytest.approx(expected, rel=3e-6)
        assert overlap(a, b) == pytest.approx(expected, rel=3e-6)
        assert overlap(a, a) == pytest.approx(1.0, abs=3e-6)
        assert overlap(a, a) <= 1.0
        _core.force_isa("baseline")
        bits = overlap(a, b, clean=True)
        _core.force_isa(isa)
        assert overlap(a, b, clean=True) == bits


def test_overlap_leaves_out_what_is_no_token(isa: str) -> None:
    a = np.float32([0.0, math.nan, 1.0, math.inf] * 40)
    b = np.float32([0.0, 5.0, -math.inf, 7.0] * 40)
    # Each 1 / (1 + e) of a's 40 and 1 / (1 + e**5 + e**7) of b's, where a has a token at all.
    expected = min(1 / (1 + math.e), 1 / (1 + math.e**5 + math.e**7))
    assert overlap(a, b) == pytest.approx(expected, rel=1e-5)
    assert math.isnan(overlap(a, np.full(160, -np.inf, np.float32)))
    with pytest.raises(InputError, match="NULL"):
        _core.overlap_at(0, 0.0, a.ctypes.data, 0.0, 4)


def test_fill_keeps_what_a_recording_wants() -> None:
    rng = np.random.default_rng(3)
    row, out = _core.Row(), np.zeros(10, np.float32)
    logits = rng.normal(0, 3, 500).astype(np.float32)
    row.read(logits)
    row.fill(out.ctypes.data)
    best, full = reference.best(logits.tolist()), reference.lse(logits.tolist())
    ten = reference.lse([v for _, v in best])
    units = [reference.units(math.exp(v - full)) for _, v in best[:8]]
    assert (out[:8] * 2.0**24).tolist() == units
    assert out[8] == pytest.approx(math.exp(ten - full), rel=1e-6)
    assert out[9] == np.float32(row.p_top10)
    row.read(np.float32([1, -math.inf, 2]))
    row.fill(out.ctypes.data)
    assert out[:2] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
    assert np.isnan(out[2:8]).all()
    assert out[8:] == pytest.approx([1, 1 / (1 + math.exp(-1))])
    row.read(np.float32([math.nan]))
    row.fill(out.ctypes.data)
    assert np.isnan(out).all()
    with pytest.raises(InputError, match="NULL"):
        row.fill(0)


def test_empty_rows() -> None:
    row = _core.Row()
    assert (row.best, row.margin, row.p, row.p_top10, row.id(1)) == (-1, 0.0, 0.0, 0.0, -1)
    ids, logits, lse, lse_top10 = _core.top_k(np.zeros(5, np.float32), 0)
    assert ids.tolist() == [-1] * 10
    assert logits.tolist() == [-math.inf] * 10
    assert (lse, lse_top10) == (-math.inf, -math.inf)


def test_padding_is_never_a_candidate(isa: str) -> None:
    values = np.zeros(3000, np.float32)
    values[5], values[2990] = 1.0, 9.0
    row = _core.Row()
    row.read(values, 2900)
    assert (row.best, row.padded) == (5, True)
    assert row.lse == pytest.approx(math.log(2899 + math.e), rel=1e-7)
    values[2990] = 1.0  # a tie: the lower id is a token
    row.read(values, 2900)
    assert not row.padded
    values[2990] = np.nan
    row.read(values, 2900)
    assert (row.padded, row.n_nan) == (False, 0)
    row.read(np.array([np.nan, 1.0], np.float32), 1)
    assert (row.padded, row.best, row.n_nan) == (True, -1, 1)


def test_out_is_filled_and_returned() -> None:
    values = np.array([1, 3, 3, 2], np.float32)
    ids, logits = np.empty(10, np.int32), np.empty(10, np.float32)
    result = _core.top_k(values, out=(ids, logits))
    assert result[0] is ids
    assert result[1] is logits
    assert ids.tolist() == [1, 2, 3, 0, -1, -1, -1, -1, -1, -1]
    assert logits.tolist()[:4] == [3, 3, 2, 1]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (np.zeros(4, np.float64), "float32"),
        (np.zeros(4, np.int32), "float32"),
        (np.zeros(4, ">f4"), "float32"),
        (np.zeros((2, 2), np.float32), "2-dimensional"),
        (np.zeros(8, np.float32)[::2], "gaps"),
        ([1.0, 2.0], "buffer"),
        (None, "buffer"),
        (b"\0\0\0\0", "float32"),
    ],
)
def test_a_row_of_another_kind_is_refused(row: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        _core.top_k(row)
    with pytest.raises(InputError, match=words):
        _core.Row().read(row)


def test_bad_arguments_are_refused() -> None:
    row = np.zeros(4, np.float32)
    with pytest.raises(InputError, match="5 is more than"):
        _core.top_k(row, 5)
    with pytest.raises(InputError, match="-1"):
        _core.top_k(row, -1)
    with pytest.raises(InputError, match="NULL"):
        _core.Row().read_at(0, 4)
    with pytest.raises(InputError, match="-3 logits"):
        _core.Row().read_at(row.ctypes.data, -3)
    with pytest.raises(InputError, match=r"1\.\.10"):
        _core.Row().id(0)
    with pytest.raises(InputError, match="pair"):
        _core.top_k(row, out=3)
    with pytest.raises(InputError, match="10 ids"):
        _core.top_k(row, out=(np.empty(9, np.int32), np.empty(10, np.float32)))
    with pytest.raises(InputError, match="int32"):
        _core.top_k(row, out=(np.empty(10, np.int64), np.empty(10, np.float32)))
    frozen = np.empty(10, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(InputError, match="writable"):
        _core.top_k(row, out=(np.empty(10, np.int32), frozen))


def test_read_only_and_other_buffers_are_read() -> None:
    from array import array

    frozen = np.array([1, 2], np.float32)
    frozen.flags.writeable = False
    assert _core.top_k(frozen)[0][0] == 1
    assert _core.top_k(array("f", [5, 4]))[0][0] == 0
    assert _core.top_k(memoryview(array("f", [4, 5])))[0][0] == 1


def test_constants() -> None:
    assert (_core.K, _core.SHOWN, _core.MAX_POSITIONS) == (10, 8, 16)
    assert _core.CENSOR_REASONS == ("n_max", "budget", "context", "end")
    assert _core.UNIT == 2**-24


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(InputError, match="sse9"):
        _core.force_isa("sse9")
    assert _core.isa() in ISAS
