"""What a search uses besides the index, made from the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer_search_fetch.config import Config
from deepinfer_search_fetch.index.authority import AuthorityTable
from deepinfer_search_fetch.index.priors import load_priors
from deepinfer_search_fetch.search.dense import Embedder, StaticTable
from deepinfer_search_fetch.search.engine import SearchParts
from deepinfer_search_fetch.search.upstream import Brave, SearxNG, UpstreamEngine, Upstreams


def parts_of(
    config: Config,
    upstreams: Mapping[str, UpstreamEngine] | None = None,
    embed: Embedder | None = None,
) -> SearchParts:
    """upstreams: engines by name beside the configured ones. embed: instead of `vectors.npz` in the
    home folder, which is used where it exists."""
    engines: dict[str, UpstreamEngine] = {}
    if config.searxng_url is not None:
        engines["searxng"] = SearxNG(config.searxng_url)
    if config.brave_key is not None:
        engines["brave"] = Brave(config.brave_key.get_secret_value())
    engines.update(upstreams or {})
    table = config.home / "vectors.npz"
    if embed is None and table.exists():
        embed = StaticTable.load(table)
    return SearchParts(authorities_of(config), Upstreams(engines), embed)


def authorities_of(config: Config) -> AuthorityTable:
    """Stored link evidence with the shipped priors and the operator's `priors.yaml`, if any."""
    priors = load_priors()
    own = config.home / "priors.yaml"
    if own.exists():
        priors = priors.extended(own)
    return AuthorityTable(config.home / "authority.sqlite3", priors)
