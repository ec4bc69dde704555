"""Some faults and rude clients; ten minutes of them are `nox -s soak`."""

from __future__ import annotations

from soak import soak


def test_twenty_seconds_of_faults_leak_nothing_and_change_no_text():
    report = soak(20)
    assert report.answered > 0
    assert report.faults
    assert report.encoded > 0
    assert report.problems() == [], vars(report)
