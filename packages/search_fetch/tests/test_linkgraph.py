from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import networkx
import numpy as np
import pytest
from forked_command import cli
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.index import centrality
from deepinfer_search_fetch.index.authority import (
    AuthorityTable,
    LinkEvidence,
    combine,
    node_of,
    write_evidence,
)
from deepinfer_search_fetch.index.commoncrawl import import_ranks
from deepinfer_search_fetch.index.linkgraph import LinkGraph, build_authority, rank_hosts
from deepinfer_search_fetch.index.links import PageLink, PageLinks, page_links
from deepinfer_search_fetch.index.priors import load_priors
from deepinfer_search_fetch.urls import parse


def links(*targets: str, trusted: bool = True, template: str = "") -> PageLinks:
    return PageLinks(tuple(PageLink(t, "words", trusted) for t in targets), template)


def arrays(edges: list[tuple[int, int]]) -> tuple[Any, Any]:
    pairs = np.array(edges, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def test_a_graph_of_six_hosts_worked_out_by_hand(tmp_path: Path) -> None:
    """a-d link to e; e links to f; f links nowhere; a also links to b.

    Harmonic: e has 4 hosts at distance 1; f has e at 1 and a, b, c, d at 2, so 3; b has a, so 1;
    the rest 0. Referring domains: e 4, f 1, b 1.
    """
    with LinkGraph(tmp_path / "links.sqlite3") as graph:
        for host in "abcd":
            targets = ["https://e.com/"] + (["https://b.com/"] if host == "a" else [])
            graph.add_page(f"https://{host}.com/", f"{host}.com", links(*targets))
        graph.add_page("https://e.com/", "e.com", links("https://f.com/"))
        edges = graph.edges()
    assert [(e.source[0], e.target[0], e.weight) for e in edges] == [
        ("a", "b", 1.0), ("a", "e", 1.0), ("b", "e", 1.0), ("c", "e", 1.0), ("d", "e", 1.0),
        ("e", "f", 1.0),
    ]  # fmt: skip
    source, target = arrays([(0, 1), (0, 4), (1, 4), (2, 4), (3, 4), (4, 5)])
    assert centrality.harmonic(6, source, target).tolist() == [0, 1, 0, 0, 4, 3]
    # PageRank by hand: x = base of a, c, d; b = x + .85 x/2; e = x + .85 (x/2 + b + 2x);
    # f = x + .85 e; and f's rank is spread over all six: x = .15/6 + .85 f/6.
    b = 1.425
    e = 1 + 0.85 * (0.5 + b + 2)
    f = 1 + 0.85 * e
    x = 0.025 / (1 - 0.85 * f / 6)
    ranks = centrality.pagerank(6, source, target, np.ones(6))
    assert ranks == pytest.approx([x, b * x, x, x, e * x, f * x], abs=1e-9)
    evidence = rank_hosts(edges)
    assert evidence["e.com"] == LinkEvidence(0, 1, 6, 4)
    assert evidence["f.com"] == LinkEvidence(1, 0, 6, 1)
    assert evidence["b.com"] == LinkEvidence(2, 2, 6, 1)
    assert evidence["a.com"] == LinkEvidence(3, 3, 6, 0)
    build_authority(tmp_path / "links.sqlite3", tmp_path / "authority.sqlite3")
    value, inputs = AuthorityTable(tmp_path / "authority.sqlite3").explain("https://e.com/")
    n = math.log2(5)
    link = 0.6 * 1.0 + 0.4 * (1 - math.log(2) / math.log(7))
    assert value.score == pytest.approx((n * link + 4 * 0.35) / (n + 4), abs=1e-4)
    assert value.basis == ["prior:unknown", "own_graph"]
    assert inputs["graphs"]["own"]["referring_domains"] == 4


graphs = st.integers(2, 14).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.sets(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] != e[1]),
            min_size=1,
            max_size=40,
        ),
    )
)


@settings(max_examples=60, deadline=None)
@given(graphs)
def test_centralities_agree_with_networkx(drawn: tuple[int, set[tuple[int, int]]]) -> None:
    n, edges = drawn
    oracle = networkx.DiGraph()
    oracle.add_nodes_from(range(n))
    oracle.add_weighted_edges_from((u, v, 1 + (u * 7 + v) % 5) for u, v in edges)
    source, target = arrays(sorted(edges))
    weight = 1.0 + (source * 7 + target) % 5
    expected = networkx.harmonic_centrality(oracle)
    assert centrality.harmonic_exact(n, source, target) == pytest.approx(
        [expected[i] for i in range(n)]
    )
    ranks = networkx.pagerank(oracle, tol=1e-12, max_iter=1000)
    assert centrality.pagerank(n, source, target, weight) == pytest.approx(
        [ranks[i] for i in range(n)], abs=1e-7
    )


def test_hyperball_is_close_to_the_exact_centrality() -> None:
    graph = networkx.gnp_random_graph(1500, 0.004, directed=True, seed=3)
    source, target = arrays(list(graph.edges))
    exact = centrality.harmonic_exact(1500, source, target)
    estimated = centrality.hyperball(1500, source, target)
    reached = exact > 0
    error = np.abs(estimated - exact)[reached] / exact[reached]
    assert error.mean() < 0.07
    assert np.corrcoef(exact, estimated)[0, 1] > 0.9


def test_edges_are_processed_in_slices_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = networkx.gnp_random_graph(80, 0.08, directed=True, seed=5)
    source, target = arrays(list(graph.edges))
    whole = centrality.harmonic_exact(80, source, target)
    balls = centrality.hyperball(80, source, target)
    monkeypatch.setattr(centrality, "_EDGES_AT_ONCE", 7)
    assert centrality.harmonic_exact(80, source, target) == pytest.approx(whole)
    assert centrality.hyperball(80, source, target) == pytest.approx(balls)


def test_equal_values_share_a_position() -> None:
    assert centrality.positions(np.array([0.5, 0.9, 0.5, 0.1])).tolist() == [1, 0, 1, 3]


def test_weights_are_capped_and_untrusted_links_count_little(tmp_path: Path) -> None:
    with LinkGraph(tmp_path / "links.sqlite3") as graph:
        for i in range(25):
            graph.add_page(f"https://a.com/{i}", "a.com", links("https://x.com/"))
        for i in range(3):
            graph.add_page(
                f"https://b.com/{i}", "www.b.com", links("https://x.com/", trusted=False)
            )
        graph.add_page("https://b.com/self", "b.com", links("https://docs.b.com/"))
        weights = {e.source: (e.weight, e.trusted) for e in graph.edges()}
    assert weights == {"a.com": (10.0, True), "b.com": (pytest.approx(0.3), False)}
    with LinkGraph(tmp_path / "links.sqlite3") as graph:
        assert rank_hosts(graph.edges())["x.com"].referring_domains == 1


def test_reading_a_page_again_replaces_its_links(tmp_path: Path) -> None:
    with LinkGraph(tmp_path / "links.sqlite3") as graph:
        graph.add_page("https://a.com/", "a.com", links("https://x.com/", "https://y.com/"))
        graph.add_page("https://a.com/", "a.com", links("https://y.com/"))
        assert [e.target for e in graph.edges()] == ["y.com"]
        assert graph.anchors("https://x.com/") == ""
        assert set(graph.stale()) == {"https://a.com/", "https://x.com/", "https://y.com/"}


def test_one_publishers_network_of_like_sites_counts_once(tmp_path: Path) -> None:
    with LinkGraph(tmp_path / "links.sqlite3") as graph:
        for i in range(8):
            graph.add_page(
                f"https://farm{i}.com/", f"farm{i}.com",
                links("https://x.com/", template="t1"), "192.0.2",
            )  # fmt: skip
        graph.add_page(
            "https://other.com/", "other.com", links("https://x.com/", template="t2"), "192.0.2"
        )
        assert rank_hosts(graph.edges())["x.com"].referring_domains == 2


def test_every_user_of_a_hosting_domain_is_a_node() -> None:
    assert node_of("www.shop.example.co.uk") == "example.co.uk"
    assert node_of("alice.github.io") != node_of("bob.github.io")


def test_links_of_a_page() -> None:
    html = (
        '<html><head><base href="https://a.com/dir/"></head><body>'
        '<a href="x?utm_source=q">The  x</a><a href="x">again</a><a href="#top">top</a>'
        '<a href="mailto:a@b">mail</a><a rel="UGC" href="//b.com/">b</a><a href="http://[bad">bad</a>'
    )
    found = page_links(html, parse("https://a.com/page"))
    assert found.links == (
        PageLink("https://a.com/dir/x", "The x", trusted=True),
        PageLink("https://b.com/", "b", trusted=False),
    )
    one = page_links("<div class=a><p>1</p></div>", parse("https://a.com/")).template
    assert one == page_links("<div class=a><p>2</p></div>", parse("https://b.com/")).template
    assert one != page_links("<div class=b><p>1</p></div>", parse("https://a.com/")).template


def test_common_crawl_ranks_are_imported(tmp_path: Path) -> None:
    rows = "#harmonicc_pos\t#harmonicc_val\t#pr_pos\t#pr_val\t#host_rev\n" + "".join(
        f"{i + 1}\t1.0\t{10 - i}\t0.1\t{name}\n"
        for i, name in enumerate(["org.example.www", "org.example", "com.b", "com.c"])
    )
    file = tmp_path / "ranks.txt.gz"
    file.write_bytes(gzip.compress(rows.encode()))
    output = tmp_path / "authority.sqlite3"
    assert import_ranks(file, output, hosts=1000) == 3
    table = AuthorityTable(output)
    assert table.evidence("www.example.org")["common_crawl"] == LinkEvidence(0, 8, 1000, None)
    assert table.of_page("https://example.org/").basis == ["prior:unknown", "cc_host_rank"]
    file.write_bytes(b"not\tranks\n")
    with pytest.raises(InvalidRequestError, match="line 1"):
        import_ranks(file, output)


def test_two_graphs_join_by_the_published_rule() -> None:
    own = LinkEvidence(5, 5, 100, 3)
    crawl = LinkEvidence(0, 0, 1000, None)
    assert combine({"own": own}) == (own.link_score, 2.0)
    assert combine({"own": own, "common_crawl": crawl}) == (0.9, 12.0)
    assert combine({}) == (0.0, 0.0)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**7), st.integers(0, 10**6))
def test_link_score_and_evidence_stay_in_their_ranges(
    harmonic: int, rank: int, hosts: int, referring: int
) -> None:
    evidence = LinkEvidence(min(harmonic, hosts), min(rank, hosts), hosts, referring)
    assert 0 <= evidence.link_score <= 1
    assert 0 <= evidence.weight <= 12


def test_stored_evidence_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "authority.sqlite3"
    table = AuthorityTable(file)
    before = table.of_page("https://a.com/")
    write_evidence(file, "own", {"a.com": LinkEvidence(0, 0, 100, 1000)})
    after = table.of_page("https://a.com/")
    assert after.score > before.score
    write_evidence(file, "own", {})
    assert table.of_page("https://a.com/") == before


def test_priors_say_why_and_since_when() -> None:
    priors = load_priors()
    assert len(priors.rules) > 300
    assert all(r.reason and r.reviewed for r in priors.rules.values())
    assert priors.of_host("www.gov.fr").kind == "government"
    assert priors.of_host("x.ac.jp").kind == "university"
    assert priors.of_host("a.b.example").kind == "unknown"
    assert priors.of_host("notgov").kind == "unknown"
    assert priors.of_host("someone.github.io").prior == 0.35


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rules: 3", "list 'rules'"),
        ("rules:\n- {kind: x}", "rule 0 lacks prior, reason, reviewed, suffixes"),
        (
            "rules:\n- {kind: x, prior: 2, reason: r, reviewed: 2026-01-01, suffixes: [a.com]}",
            "prior 2",
        ),
        ("rules: [", "not YAML"),
    ],
)
def test_wrong_rules_are_named(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "priors.yaml").write_text(text)
    with pytest.raises(InvalidRequestError, match=problem):
        load_priors().extended(tmp_path / "priors.yaml")


def test_a_listed_source_has_no_authority_whoever_links_to_it(tmp_path: Path) -> None:
    rules = "rules:\n- {kind: harmful, prior: 0, reason: r, reviewed: d, suffixes: [bad.com]}"
    (tmp_path / "priors.yaml").write_text(rules)
    write_evidence(tmp_path / "a.sqlite3", "own", {"bad.com": LinkEvidence(0, 0, 9, 999)})
    priors = load_priors().extended(tmp_path / "priors.yaml")
    value = AuthorityTable(tmp_path / "a.sqlite3", priors).of_page("https://bad.com/")
    assert (value.score, value.tier) == (0.0, -1)


def test_the_commands_build_and_explain(tmp_path: Path) -> None:
    def authority(*arguments: str) -> CompletedProcess[str]:
        return cli("authority", *arguments, home=tmp_path)

    assert "no link graph" in authority("build").stderr
    with LinkGraph(tmp_path / "links.sqlite3") as graph:
        graph.add_page("https://a.com/", "a.com", links("https://b.com/"))
    assert json.loads(authority("build").stdout) == {"pages": 1, "hosts": 2, "edges": 1}
    explained = json.loads(authority("explain", "b.com").stdout)
    assert explained["graphs"]["own"]["harmonic_position"] == 0
    assert explained["prior_reason"]
    bad = authority("explain", "http://a b/")
    assert (bad.returncode, len(bad.stderr.strip().splitlines())) == (2, 1)
