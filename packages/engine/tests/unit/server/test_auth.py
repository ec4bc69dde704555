"""Keys, callers and cache partitions."""

from __future__ import annotations

import pytest

from deepinfer_engine.codec.errors import AuthenticationFailed, PermissionDenied
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.server.auth import (
    AdminGate,
    Caller,
    KeyRing,
    accepted_keys,
    read_keys,
    read_secret,
)
from deepinfer_engine.settings import Settings


def test_an_empty_ring_takes_everybody():
    assert KeyRing({}).identify({}) == Caller(None)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer s3cret"},
        {"authorization": "bearer  s3cret"},
        {"x-api-key": "s3cret"},
    ],
)
def test_both_headers_name_the_same_caller(headers):
    assert KeyRing({"alice": "s3cret", "bob": "other"}).identify(headers) == Caller("alice")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Basic s3cret"},
        {"authorization": "Bearer "},
        {"x-api-key": "s3cre"},
        {"x-api-key": ""},
    ],
)
def test_no_key_or_a_wrong_one_is_refused(headers):
    with pytest.raises(AuthenticationFailed):
        KeyRing({"alice": "s3cret"}).identify(headers)


def test_the_same_end_user_of_two_keys_shares_no_cache():
    assert Caller("a").salt("u1") != Caller("b").salt("u1")
    assert Caller("a").salt("u1") != Caller("a").salt("u2")
    assert Caller("a").salt(None) == "a"


def test_an_open_server_salts_by_user_or_not_at_all():
    assert Caller().salt("u1") == "u1"
    assert Caller().salt(None) == "anonymous"


def test_key_files_take_ids_comments_and_bare_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nalice: s3cret\n\nbare-key\n")
    keys = read_keys(path)
    assert keys["alice"] == "s3cret"
    assert set(keys.values()) == {"s3cret", "bare-key"}


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "a:x\na:y\n", ":x\n", "a:\n", "a/b:x\n"]
)
def test_unusable_key_files_are_named(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match="keys"):
        read_keys(path)


def test_a_missing_key_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(tmp_path / "none")


def test_admin_routes_want_the_admin_key_and_where_there_is_none_answer_nobody():
    gate = AdminGate("k")
    gate.check({"authorization": "Bearer k"})
    for headers in ({}, {"authorization": "Bearer other"}, {"x-api-key": ""}):
        with pytest.raises(PermissionDenied):
            gate.check(headers)
        with pytest.raises(PermissionDenied, match="admin-key-file"):
            AdminGate(None).check(headers)


def test_one_key_of_the_command_line_stands_beside_those_of_the_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice:one\n")
    settings = Settings(api_key_file=path, api_key="hidden-key")
    assert sorted(accepted_keys(settings).values()) == ["hidden-key", "one"]
    assert "hidden-key" not in settings.model_dump_json() + repr(settings)
    with pytest.raises(ConfigError, match="empty"):
        accepted_keys(Settings(api_key=" "))
