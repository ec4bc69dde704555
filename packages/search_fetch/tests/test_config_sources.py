"""Every setting by file, environment and flag, and shown with where it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepinfer_search_fetch import Config, InvalidRequestError
from deepinfer_search_fetch.cli import app
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.config_sources import configure

VALUES: dict[str, Any] = {
    "contact": "https://example.com/bot", "extract_workers": 3, "search_threads": 5,
    "robots": "ignore", "host_requests_per_second": 2.5, "host_burst": 9, "host_connections": 3,
    "host_queue": 7, "deny_cidrs": ["9.9.9.0/24", "8.8.8.8/32"], "allow_cidrs": ["10.0.0.0/8"],
    "allow_names": ["intranet.example"], "ports": [80, 81], "allow_nat64": True,
    "cache_bytes": 1000, "document_cache_bytes": 1000, "max_tokens": 500,
    "chromium": "/opt/chromium", "render_workers": 2, "render_user": "nobody",
    "render_sandbox": False, "render_seconds": 3.5, "render_bytes": 10, "render_memory_bytes": 10,
    "index_fetched": True, "searxng_url": "https://searx.example", "brave_key": "secret",
    "egress_proxy": "http://proxy.example:3128",
}  # fmt: skip


def shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def test_the_table_above_names_every_setting() -> None:
    assert set(VALUES) | {"home", "limits"} == set(Config.model_fields)


@pytest.mark.parametrize("source", ["file", "environment", "flag"])
def test_every_setting_can_be_given_in_every_way(source: str, tmp_path: Path) -> None:
    limits = dict.fromkeys(Limits.model_fields, 77)
    named = [*VALUES.items(), *((f"limits.{k}", v) for k, v in limits.items())]
    environ: dict[str, str] = {}
    settings: list[str] = []
    if source == "file":
        lines = [f"{k} = {json.dumps(v)}" for k, v in VALUES.items()]
        lines += ["[limits]", *(f"{k} = {v}" for k, v in limits.items())]
        (tmp_path / "config.toml").write_text("\n".join(lines))
    elif source == "environment":
        prefix = "DEEPINFER_SEARCH_FETCH_"
        environ = {prefix + k.replace(".", "_").upper(): shown(v) for k, v in named}
    else:
        settings = [f"{k}={shown(v)}" for k, v in named]
    found = configure({"home": tmp_path}, settings, environ=environ)
    expected = Config(home=tmp_path, **VALUES, limits=Limits(**limits))
    assert found.config == expected
    assert {found.sources[name] for name, _ in named} == {source}


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text('contact = "file"\nhost_burst = 1\nhost_queue = 1\n')
    environ = {
        "DEEPINFER_SEARCH_FETCH_CONTACT": "environment",
        "DEEPINFER_SEARCH_FETCH_HOST_BURST": "2",
    }
    found = configure({"home": tmp_path}, ["contact=flag"], file=file, environ=environ)
    config = found.config
    assert (config.contact, config.host_burst, config.host_queue) == ("flag", 2, 1)
    assert configure({}, [f"home={tmp_path}"], environ={}).config.home == tmp_path


@pytest.mark.parametrize(
    ("content", "settings", "environ", "told"),
    [
        ("hots_burst = 1", [], {}, "config.toml: there is no setting 'hots_burst'"),
        ("host_burst = ", [], {}, "config.toml"),
        ("", ["host_burst"], {}, "name=value"),
        ("", ["host_burst=x"], {}, "--set host_burst: host_burst:"),
        ("", ["limits.nothing=1"], {}, "there is no setting 'limits.nothing'"),
        ("", ["a.b=1"], {}, "there is no setting 'a.b'"),
        ("", [], {"DEEPINFER_SEARCH_FETCH_DENY_CIDRS": "1.2.3"}, "FETCH_DENY_CIDRS: deny_cidrs:"),
        ("[limits]\nredirects = 'many'", [], {}, "config.toml: limits.redirects:"),
    ],
)
def test_a_mistake_names_where_it_is(
    content: str, settings: list[str], environ: dict[str, str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(content)
    with pytest.raises(InvalidRequestError) as caught:
        configure({"home": tmp_path}, settings, environ=environ)
    assert told in caught.value.message


def test_config_show_prints_every_setting_and_no_secret(tmp_path: Path) -> None:
    flags = ["--set", "brave_key=hidden-key", "--set", "host_burst=6"]
    arguments = [*flags, "config", "show", "--json", "--home", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--allow-port", "8901"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)
    assert rows["host_burst"] == {"value": 6, "source": "flag"}
    assert rows["ports"] == {"value": [80, 443, 8080, 8443, 8901], "source": "flag"}
    assert rows["contact"]["source"] == "default"
    assert rows["brave_key"] == {"value": "set", "source": "flag"}
    assert "hidden-key" not in done.output
    plain = CliRunner().invoke(app, ["config", "show", "--home", str(tmp_path)])
    assert "limits.redirects = 10  # default" in plain.output
