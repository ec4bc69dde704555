"""The dated price table: which price counts when, exact sums, and tables that are refused."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.errors import ConfigError
from deepinfer_engine.server.prices import PICOS, read_prices, spelled


def at(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("when", "period"),
    [
        ("2026-11-30T00:59:59Z", "off_peak"),  # a Monday
        ("2026-11-30T01:00:00Z", "peak"),
        ("2026-11-30T03:59:59Z", "peak"),
        ("2026-11-30T04:00:00Z", "off_peak"),
        ("2026-11-30T09:59:59Z", "peak"),
        ("2026-11-30T10:00:00Z", "off_peak"),
        ("2026-11-28T02:00:00Z", "off_peak"),  # a Saturday
        ("2026-11-30T02:00:00+08:00", "off_peak"),  # still Sunday in UTC
    ],
)
def test_peak_hours_of_the_published_list(when, period):
    tariff = read_prices("published", "deepseek-flash").at(at(when))
    assert tariff.period == period
    factor = 2 if period == "peak" else 1
    assert tariff.rates.miss == factor * 150_000  # picos a token: 0.15 a million
    assert tariff.rates.miss == 50 * tariff.rates.hit
    assert tariff.rates.output == factor * 600_000
    pro = read_prices("published", "deepseek-v4-pro").at(at(when))
    assert (pro.rates.hit, pro.rates.miss, pro.rates.output) == (
        factor * 22_000,
        factor * 660_000,
        factor * 1_980_000,
    )


def test_a_price_counts_from_its_date_on():
    prices = read_prices("published", "deepseek-flash")
    assert prices.at(at("2026-10-16T23:59:59Z")).rates.output == 660_000
    assert prices.at(at("2026-10-17T00:00:00Z")).rates.output == 600_000
    assert prices.at(at("2020-01-01T00:00:00Z")).rates.output == 660_000  # the first there is


@given(
    st.integers(0, 10**9),
    st.floats(0, 1),
    st.integers(0, 10**9),
    st.sampled_from(["2026-11-30T02:00Z", "2026-11-30T12:00Z"]),
)
def test_costs_are_exact(prompt, share, output, when):
    cached = int(prompt * share)
    cost = read_prices("published", "deepseek-flash").at(at(when)).cost(prompt, cached, output)
    dollars = [Fraction(p) for p in ("0.003", "0.15", "0.60")]
    factor = 2 if when.startswith("2026-11-30T02") else 1
    tokens = (cached, prompt - cached, output)
    expected = factor * sum(p * n for p, n in zip(dollars, tokens, strict=True)) / 10**6
    assert Fraction(cost, PICOS) == expected
    assert Fraction(Decimal(spelled(cost))) == expected


TABLE = """
currency = "EUR"
[[price]]
models = ["*"]
since = 2026-01-01T00:00:00Z
off_peak = { hit = 0, miss = 1, output = 2.000001 }
"""


def written(tmp_path, text):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return str(path)


def test_a_table_of_ones_own_for_any_model(tmp_path):
    tariff = read_prices(written(tmp_path, TABLE), "whatever").at(at("2026-11-30T02:00Z"))
    assert (tariff.currency, tariff.period) == ("EUR", "off_peak")
    assert spelled(tariff.cost(3, 1, 1)) == "0.000004000001"


def test_a_holiday_has_no_peak(tmp_path):
    peak = (
        'peak = { hit = 0, miss = 2, output = 4 }\n[peak]\nhours = ["00:00-24:00"]\n'
        "holidays = [2026-11-30]\n"
    )
    prices = read_prices(written(tmp_path, TABLE + peak), "x")
    assert prices.at(at("2026-11-30T02:00Z")).period == "off_peak"
    assert prices.at(at("2026-12-01T02:00Z")).period == "peak"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"EUR"', '"euro"', "currency"),
        ("2.000001", "2.0000001", "six decimals"),
        ("miss = 1", "miss = -1", "price.0.off_peak.miss"),
        ("miss = 1", 'miss = "1"', "wanted a number"),
        ("miss = 1", "miss = nan", "wanted a price from 0"),
        ("hit = 0,", "", "price.0.off_peak.hit"),
        ("hit = 0,", "hit = 0, hti = 1,", "hti"),
        ("00:00Z", "00:00", "since"),  # of which zone?
        ("[[price]]", "[price]", "price"),
        ('currency = "EUR"', 'currency = "EUR', "not TOML"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused_by_field(tmp_path, old, new, words):
    assert old in TABLE
    with pytest.raises(ConfigError, match=words):
        read_prices(written(tmp_path, TABLE.replace(old, new)), "x")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[peak]\nhours = ["4-1"]', "01:00-04:00"),
        ('[peak]\nhours = ["04:00-01:00"]', "later"),
        ('[peak]\nhours = ["01:00-25:00"]', "01:00-04:00"),
        ("peak = { hit = 0, miss = 2, output = 4 }", "hours say when"),
        (TABLE.partition("\n[[")[1] + "price]]" + TABLE.partition("price]]")[2], "two prices"),
    ],
)
def test_peaks_and_dates_that_contradict_are_refused(tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        read_prices(written(tmp_path, TABLE + more), "x")


def test_a_model_without_a_price_is_told_at_the_start():
    with pytest.raises(ConfigError, match=r"'toy' is not in the table.*deepseek-flash.*priced-as"):
        read_prices("published", "toy")
    with pytest.raises(ConfigError, match="cannot read"):
        read_prices("/nowhere/prices.toml", "toy")


@pytest.mark.parametrize(
    ("picos", "text"),
    [(0, "0.00"), (1, "0.000000000001"), (10**12, "1.00"), (-5 * 10**11, "-0.50")],
)
def test_amounts_are_spelled_with_all_their_digits(picos, text):
    assert spelled(picos) == text
