from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked_command import cli

Listener = Any  # see conftest


def test_a_place_is_guessed_or_its_kind_is_named(tmp_path: Path, site: Listener) -> None:
    file = tmp_path / "pages.jsonl"
    rows = [
        {"url": f"https://a.example/{i}", "title": "T", "text": "newts hunt pond insects"}
        for i in range(3)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    guessed = json.loads(cli("ingest", str(file), home=tmp_path).stdout)
    assert guessed["indexed"] == 3
    named = json.loads(cli("ingest", "jsonl", str(file), home=tmp_path).stdout)
    assert named["unchanged"] == 3
    base = f"http://127.0.0.2:{site.port}"
    site.page("/", f"<title>Newts</title><p>{'Newts live in ponds. ' * 9}<a href='/b'>b</a>")
    site.page("/b", f"<title>Frogs</title><p>{'Frogs sing at night. ' * 9}")
    allow = ["--allow-cidr", "127.0.0.2/32", "--allow-port", str(site.port)]
    crawled = cli("ingest", "crawl", f"{base}/", *allow, "--depth", "1", home=tmp_path)
    assert json.loads(crawled.stdout)["indexed"] == 2, crawled.stderr
    learned = cli("dense", "learn", "--dimensions", "8", home=tmp_path)
    assert json.loads(learned.stdout)["pages"] == 5, learned.stderr
    assert "Frogs" in cli("search", "night songs of frogs", home=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "env", "word"),
    [
        (["ingest", "warc", "/no/such/file"], {}, "not a file"),
        (["ingest", "x", "--kind", "nonsense"], {}, "--kind nonsense"),
        (["ingest", "crawl", "http://a.example/", "--scope", "planet"], {}, "--scope planet"),
        (["ingest", "crawl", "nonsense"], {}, "scheme"),
        (["authority", "import", "/no/such/file"], {}, "No such file"),
        (["dense", "learn"], {}, "too little"),
        (["search", "x", "--source", "upstream:brave"], {}, "not configured"),
        (["search", "x"], {"DEEPINFER_SEARCH_FETCH_SEARXNG_URL": "ftp://x"}, "SEARXNG_URL"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], env: dict[str, str], word: str, tmp_path: Path
) -> None:
    done = cli(*arguments, home=tmp_path, **env)
    assert done.returncode in (1, 2)
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
