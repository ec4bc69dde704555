from __future__ import annotations

import pytest

from deepinfer_search_fetch.net.charset import decode_text, resolve_label

SAMPLES = {
    "utf-8": "Grüße, мир, 世界",
    "windows-1252": "“café”, naïve",
    "iso-8859-1": "“café”",
    "iso-8859-2": "Zażółć gęślą jaźń",
    "windows-1250": "Příliš žluťoučký kůň",
    "windows-1251": "Привет, мир",
    "koi8-r": "Привет, мир",
    "koi8-u": "Привіт, світ",
    "iso-8859-5": "Привет, мир",
    "iso-8859-7": "Καλημέρα κόσμε",
    "windows-1253": "Καλημέρα κόσμε",
    "iso-8859-8": "שלום עולם",
    "windows-1255": "שלום עולם",
    "windows-1256": "مرحبا بالعالم",
    "iso-8859-9": "Merhaba dünya ığş",
    "windows-1254": "Merhaba dünya ığş",
    "shift_jis": "日本語のテキスト",
    "euc-jp": "日本語のテキスト",
    "iso-2022-jp": "日本語のテキスト",
    "euc-kr": "안녕하세요 세계",
    "gb2312": "简体中文网页",
    "gbk": "简体中文網頁",
    "gb18030": "简体中文網頁",
    "big5": "繁體中文網頁",
}
PYTHON_NAME = {"iso-8859-1": "cp1252"}


@pytest.mark.parametrize("label", SAMPLES)
@pytest.mark.parametrize("place", ["header", "meta"])
def test_declared_encodings_are_read(label: str, place: str) -> None:
    text = SAMPLES[label]
    head = f'<meta charset="{label}">' if place == "meta" else "<p>"
    body = head.encode("ascii") + text.encode(PYTHON_NAME.get(label, label))
    header = f"text/html; charset={label}" if place == "header" else "text/html"
    found, encoding, source = decode_text(body, header)
    assert text in found
    assert source == place
    assert encoding == resolve_label(label)


def test_a_wrong_header_yields_to_the_next_source() -> None:
    body = '<meta charset="windows-1251"><p>' + "Привет, мир. " * 20
    found, _, source = decode_text(body.encode("cp1251"), "text/html; charset=utf-8")
    assert "Привет, мир" in found
    assert source == "meta"


@pytest.mark.parametrize(
    ("body", "source", "text"),
    [
        (b"\xef\xbb\xbfhi", "bom", "hi"),
        ("\ufeffhé".encode("utf-16-le"), "bom", "hé"),
        ('<?xml version="1.0" encoding="iso-8859-2"?><p>ż'.encode("iso-8859-2"), "xml", "ż"),
        ("plain ü".encode(), "detected", "plain ü"),
        (b"", "detected", ""),
    ],
)
def test_other_sources(body: bytes, source: str, text: str) -> None:
    found, _, where = decode_text(body)
    assert (text in found, where) == (True, source)


def test_controls_are_dropped_and_text_is_nfc() -> None:
    found, _, _ = decode_text("a\0b\x08c e\u0301".encode())
    assert found == "abc \u00e9"


def test_unknown_labels_are_nothing() -> None:
    assert resolve_label("no-such-charset") is None
