"""A minute of faults and rude clients; ten minutes of it are `nox -s soak`."""

from __future__ import annotations

from soak import soak


def test_a_minute_of_faults_leaks_nothing_and_changes_no_text():
    report = soak(60)
    assert report.answered > 0
    assert report.faults
    assert report.problems() == [], vars(report)
