"""Philox against its published answers and a plain implementation; the numbers made of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling import device_noise
from engine.sampling.noise import philox4x32, uniform

WORD = st.integers(0, 2**32 - 1)

# Random123, tests/kat_vectors: philox4x32, 10 rounds.
PUBLISHED = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    a, b, c, d = counter
    for turn in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        k0, k1 = (
            (k + turn * w) % 2**32 for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        a, b, c, d = second >> 32 ^ b ^ k0, second % 2**32, first >> 32 ^ d ^ k1, first % 2**32
    return [a, b, c, d]


def words(values: list[list[int]]) -> np.ndarray:
    return np.array(values, np.uint64).T


def test_published_answers() -> None:
    counters, keys, answers = zip(*PUBLISHED, strict=True)
    assert (philox4x32(words(list(counters)), words(list(keys))) == words(list(answers))).all()


@given(
    st.lists(
        st.tuples(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2)),
        min_size=1,
        max_size=8,
    )
)
def test_plain_implementation(cases: list[tuple[list[int], list[int]]]) -> None:
    counters, keys = ([case[part] for case in cases] for part in (0, 1))
    answers = [plain_philox(counter, key) for counter, key in cases]
    assert (philox4x32(words(counters), words(keys)) == words(answers)).all()


def draw(seed: int, choice: int, index: int) -> float:
    return float(uniform(np.array([seed], np.uint64), np.array([choice]), np.array([index]))[0])


def test_each_number_depends_on_its_own_key_alone() -> None:
    rng = np.random.default_rng(1)
    seeds = rng.integers(0, 2**64, 64, np.uint64, endpoint=False)
    choices, indices = rng.integers(0, 8, 64), rng.integers(0, 2**17, 64)
    together = uniform(seeds, choices.astype(np.int32), indices.astype(np.int32))
    alone = [
        draw(*key) for key in zip(seeds.tolist(), choices.tolist(), indices.tolist(), strict=True)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("key", [(1, 0, 0), (2**63, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_every_part_of_the_key_matters(key: tuple[int, int, int]) -> None:
    assert draw(*key) != draw(0, 0, 0)


def test_uniform_and_uncorrelated() -> None:
    count = 100_000
    zeros = np.zeros(count, np.int64)
    by_index = uniform(zeros.astype(np.uint64), zeros, np.arange(count))
    by_choice = uniform(zeros.astype(np.uint64), np.arange(count), zeros)
    by_seed = uniform(np.arange(count, dtype=np.uint64), zeros, zeros)
    for numbers in (by_index, by_choice, by_seed):
        seen = np.histogram(numbers, 64, (0, 1))[0]
        chi_square = ((seen - count / 64) ** 2 / (count / 64)).sum()
        assert chi_square < 63 + 5 * np.sqrt(2 * 63)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(count)
    assert abs(np.corrcoef(by_index, by_choice)[0, 1]) < 5 / np.sqrt(count)


def test_never_zero_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = np.zeros(1, np.uint64)
    for word, low, high in ((0, 0.0, 2.0**-52), (2**32 - 1, 1 - 2.0**-52, 1.0)):
        answer = np.full((4, 1), word, np.uint64)
        monkeypatch.setattr("engine.sampling.noise.philox4x32", lambda *_, answer=answer: answer)
        assert low < uniform(one, one, one)[0] < high


def test_a_device_makes_the_same_numbers_bit_for_bit() -> None:
    rng = np.random.default_rng(4)
    edges = np.array([0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1], np.uint64)
    seeds = np.concatenate([edges, rng.integers(0, 2**64, 50_000, np.uint64)])
    indices = rng.integers(0, 2**31, len(seeds))
    indices[:9] = [0, 1, 2**31 - 1, 7, 7, 7, 7, 0, 2**17]
    choices = rng.integers(0, 1 << 10, len(seeds))
    wanted = uniform(seeds, choices, indices)
    columns = seeds.view(np.int64), choices, indices
    found = device_noise.uniform(*map(torch.from_numpy, columns)).numpy()
    assert found.dtype == np.float64
    assert (found == wanted).all()
