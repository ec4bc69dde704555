"""Text that a browser does not show does not reach the reader, and text that it shows does.

The page is read in every mode; SECRET stands where nobody sees it, PLAIN where everybody does.
"""

from __future__ import annotations

from typing import get_args

import pytest

from deepinfer_search_fetch.extract import extract
from deepinfer_search_fetch.extract.dom import parse_html
from deepinfer_search_fetch.extract.hidden import remove_invisible
from deepinfer_search_fetch.extract.stylesheets import media_applies, read_declarations
from deepinfer_search_fetch.models import Mode

FILL = " ".join(
    f"The survey of river gauges shows how the water changed in season number {i}."
    for i in range(1, 9)
)
SECRET = "SECRET orders for whoever reads this page by machine"


def page(inside: str, head: str = "", body: str = "") -> bytes:
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>Gauges</title>{head}</head>"
        f"<body {body}><article><h1>Gauge report</h1><p>{FILL}</p>{inside}<p>{FILL}</p></article>"
        "</body></html>"
    ).encode()


def styled(style: str) -> bytes:
    return page(f'<p style="{style}">{SECRET}</p>')


def ruled(css: str, attributes: str = "class=x") -> bytes:
    return page(f"<p {attributes}>{SECRET}</p>", f"<style>{css}</style>")


STYLES = [
    # display, visibility, and ways to write them
    "display:none", "DISPLAY : NONE !important", "display:/**/none", r"dis\70lay:none",
    r"display:\6eone", "visibility:hidden", "visibility:collapse", "content-visibility:hidden",
    "color:red;display:none;margin:0", "display:block;display:none", "content:';';display:none",
    # transparency
    "opacity:0", "opacity:.01", "opacity:0%", "opacity:calc(0)", "filter:opacity(0)",
    "filter:blur(0) opacity(0%)", "filter:blur(50px)", "filter:blur(2em)", "color:transparent",
    "color:rgba(0,0,0,0)", "color:#0000",
    "color:rgb(0 0 0 / 0)", "color:hsla(0,0%,0%,.01)", "-webkit-text-fill-color:transparent",
    "mask-image:linear-gradient(transparent,transparent)",
    # colour against the background
    "color:white", "color:#fff", "color:#fefefe;background:#fff", "background:#000;color:#010101",
    "color:hsl(0 0% 99%)", "color:rgb(255,255,254)", "background-color:navy;color:#000080",
    # sizes
    "font-size:0", "font-size:1px", "font-size:.01em", "font-size:1%", "font:0/0 a",
    "font-size:calc(1px - 1px)", "font-size:min(0px,16px)", "font-size:0.05vw", "zoom:0.01",
    "max-height:0;overflow:hidden", "height:0;overflow:hidden", "width:0;overflow:clip",
    "height:1px;width:1px;overflow:hidden", "max-width:0px;overflow-x:hidden;white-space:nowrap",
    "block-size:0;overflow:hidden", "line-height:0;overflow:hidden;height:0",
    "letter-spacing:-2em",
    # places
    "position:absolute;left:-9999px", "position:absolute;left:-100vw", "position:fixed;top:-200vh",
    "position:absolute;right:-5000px", "position:absolute;inset:-9999px auto auto -9999px",
    "position:absolute;left:calc(-1 * 9999px)", "position:relative;left:-2000em",
    "text-indent:-9999px", "text-indent:-99em",
    "text-indent:100%;white-space:nowrap;overflow:hidden",
    "margin-left:-9999px", "position:absolute;top:90000px",
    # clipping and transforms
    "clip:rect(0,0,0,0);position:absolute", "clip:rect(1px 1px 1px 1px);position:absolute",
    "clip-path:inset(50%)", "clip-path:inset(100%)", "clip-path:circle(0)",
    "clip-path:circle(0px at 50% 50%)", "clip-path:polygon(0 0, 0 0, 0 0)",
    "-webkit-clip-path:ellipse(0 0)", "transform:scale(0)", "transform:scaleY(0)",
    "transform:translateX(-9999px)", "transform:translate(-200vw, 0)", "transform:rotateX(90deg)",
    "transform:matrix(0,0,0,0,0,0)", "scale:0", "translate:-9999px", "transform:rotateY(.25turn)",
]  # fmt: skip

RULES = [
    (".x{display:none}", "class=x"),
    ("p.x{display:none}", "class='y x'"),
    ("[data-x]{display:none}", "data-x"),
    ("[data-x='1' i]{display:none}", "data-x=1"),
    ("p[class^=hid]{display:none}", "class=hid-1"),
    ("article > p:nth-of-type(2){display:none}", ""),
    ("h1 ~ .x{display:none}", "class=x"),
    (":is(.a, .x){display:none}", "class=x"),
    ("p:not(.shown):not(:first-of-type):not(:last-of-type){display:none}", ""),
    (r".\78 {display:none}", "class=x"),
    ("#s{display:none}", "id=s"),
    ("@media screen{.x{display:none}}", "class=x"),
    ("@media (min-width:600px) and (max-width:4000px){.x{display:none}}", "class=x"),
    ("@media not print{.x{display:none}}", "class=x"),
    ("@supports (display:grid){.x{display:none}}", "class=x"),
    ("@layer a{.x{display:none}}", "class=x"),
    ("article{.x{display:none}}", "class=x"),
    (".x{color:black;&{display:none}}", "class=x"),
    ("/* } */ .x{display:none}", "class=x"),
    ("a::after{content:'/*'} .x{display:none} b::after{content:'*/'}", "class=x"),
    ("b{content:'}'} .x{display:none}", "class=x"),
    (".x{display:none", "class=x"),
    (".x{--d:none;display:var(--d)}", "class=x"),
    (":root{--gone:0}.x{opacity:var(--gone)}", "class=x"),
    (".x{display:var(--unset, none)}", "class=x"),
    (".x{display:none!important} p.x{display:block}", "class=x"),
    (".x{display:block} p.x{display:none}", "class=x"),
    (".x{color:#fff}", "class=x"),
    ("article{background:#222} .x{color:#222}", "class=x"),
    (".x{animation:a 1s forwards} @keyframes a{to{opacity:0}}", "class=x"),
    ("@import url('data:text/css,.x{display:none}');", "class=x"),
]

PAGES = {
    "hidden": page(f"<p hidden>{SECRET}</p>"),
    "hidden=hidden": page(f"<div class=expand hidden=hidden>{SECRET}</div>"),
    "popover": page(f"<div popover>{SECRET}</div>"),
    "closed dialog": page(f"<dialog>{SECRET}</dialog>"),
    "inert": page(f"<div inert>{SECRET}</div>"),
    "aria-hidden": page(f"<div aria-hidden=TRUE>{SECRET}</div>"),
    "template": page(f"<template><p>{SECRET}</p></template>"),
    "noscript": page(f"<noscript>{SECRET}</noscript>"),
    "noscript on a short page": f"<p>Short.</p><noscript>{SECRET * 30}</noscript>".encode(),
    "fallback of a video": page(f"<video src=x><p>{SECRET}</p></video>"),
    "fallback of a canvas": page(f"<canvas><p>{SECRET}</p></canvas>"),
    "fallback of an object": page(f"<object data=x><p>{SECRET}</p></object>"),
    "fallback of a meter": page(f"<meter value=1>{SECRET}</meter>"),
    "title of a drawing": page(f"<svg><title>{SECRET}</title><desc>{SECRET}</desc></svg>"),
    "datalist": page(f"<datalist><option>{SECRET}</option></datalist>"),
    "comment": page(f"<!--[if IE]><p>{SECRET}</p><![endif]-->"),
    "screen reader class": page(f"<p class='note sr-only'>{SECRET}</p>"),
    "font colour": page(f"<font color=white>{SECRET}</font>"),
    "bgcolor": page(
        f"<table><tr><td bgcolor=#000000><font color=#000000>{SECRET}</font></td><td>x</td></table>"
    ),
    "text of the body": page(f"<p style='color:#fff'>{SECRET}</p>", body="bgcolor=white"),
    "inherited size": page(f"<div style='font-size:.1px'><p>{SECRET}</p></div>"),
    "inherited colour": page(f"<div style='color:transparent'><p><b>{SECRET}</b></p></div>"),
    "hidden below the shown": page(
        f"<div style='visibility:hidden'><p>{SECRET}</p>"
        "<p style='visibility:visible'>PLAIN</p></div>"
    ),
    "linked sheet in a data URL": page(
        f"<p class=x>{SECRET}</p>", "<link rel=stylesheet href='data:text/css,.x{display:none}'>"
    ),
    "sheet in base64": page(
        f"<p class=x>{SECRET}</p>",
        "<link rel=stylesheet href='data:text/css;base64,Lnh7ZGlzcGxheTpub25lfQ=='>",
    ),
    "class that only looks like an accordion": page(
        f"<div class=faq-x style='display:none'>{SECRET}</div>"
    ),
    "a tab panel without tabs": page(f"<div role=tabpanel hidden>{SECRET}</div>"),
    "more hidden than shown": (
        "<html><body><p>Hi there, this is a short visible page.</p>"
        f"<div style='display:none'>{SECRET * 20}</div></body></html>"
    ).encode(),
    "light children of a shadow root": page(
        f"<div><template shadowrootmode=open><p>PLAIN</p></template><p>{SECRET}</p></div>"
    ),
    "annotation of a formula": page(
        "<math><semantics><mi>x</mi><annotation encoding='text/plain'>"
        f"{SECRET}</annotation></semantics></math>"
    ),
    "alt of a picture nobody sees": page(
        f"<p style='visibility:hidden'>x <img src=a alt='{SECRET}'></p>"
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_what_a_style_hides_is_gone_in_every_mode(style: str) -> None:
    for mode in get_args(Mode):
        content = extract(styled(style), "https://a.example/x", mode=mode).content
        assert "SECRET" not in content, mode
        assert "season number 8" in content, mode


@pytest.mark.parametrize(("css", "attributes"), RULES)
def test_what_a_rule_hides_is_gone_in_every_mode(css: str, attributes: str) -> None:
    for mode in get_args(Mode):
        content = extract(ruled(css, attributes), "https://a.example/x", mode=mode).content
        assert "SECRET" not in content, mode
        assert "season number 8" in content, mode


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_hides_is_gone_in_every_mode(name: str) -> None:
    for mode in get_args(Mode):
        content = extract(PAGES[name], "https://a.example/x", mode=mode).content
        assert "SECRET" not in content, mode


SHOWN = {
    "hidden that a rule shows": page(
        f"<p hidden class=x>{SECRET}</p>", "<style>.x{display:block}</style>"
    ),
    "a rule for print": ruled("@media print{.x{display:none}}"),
    "a rule for phones": ruled("@media (max-width:600px){.x{display:none}}"),
    "a rule for dark screens": ruled("@media (prefers-color-scheme:dark){.x{display:none}}"),
    "a state": ruled(".x:hover{display:none}"),
    "what stands in front of it": ruled(".x::before{display:none}"),
    "a later rule": ruled(".x{display:none} .x{display:block}"),
    "a stronger rule": ruled("p.x{display:block} .x{display:none}"),
    "an important one": ruled(".x{display:block!important}", "class=x style='display:none'"),
    "another element": ruled(".y{display:none}"),
    "a child, not a descendant": page(
        f"<div class=o><div><p class=x>{SECRET}</p></div></div>",
        "<style>.o > .x{display:none}</style>",
    ),
    "visible in the hidden": page(
        f"<div style='visibility:hidden'><p style='visibility:visible'>{SECRET}</p></div>"
    ),
    "white on dark": page(f"<div style='background:#123'><p style='color:#fff'>{SECRET}</p></div>"),
    "white where a linked sheet may paint": page(
        f"<p style='color:#fff'>{SECRET}</p>", "<link rel=stylesheet href=/a.css>"
    ),
    "white on a picture": page(
        f"<div style='background:url(a.png)'><p style='color:#fff'>{SECRET}</p></div>"
    ),
    "small print": styled("font-size:9px"),
    "a limit of height": styled("max-height:40px;overflow:hidden"),
    "no overflow": styled("height:0"),
    "a little to the left": styled("position:relative;left:-20px"),
    "half transparent": styled("opacity:.5"),
    "fading in": ruled(".x{opacity:0;animation:a 1s forwards} @keyframes a{to{opacity:1}}"),
    "details": page(f"<details><summary>More</summary><p>{SECRET}</p></details>"),
    "a part that a button opens": page(
        f"<button aria-controls=p1>More</button><div id=p1 style='display:none'>{SECRET}</div>"
    ),
    "an accordion": page(
        "<div class=item><h3><a href='#a'>More</a></h3>"
        f"<div class=accordion-body style='height:0;overflow:hidden'>{SECRET}</div></div>"
    ),
    "a part that fades in when it is scrolled to": page(
        f"<div data-aos=fade-up style='opacity:0;transform:translateY(9px)'>{SECRET}</div>"
    ),
    "an open dialog": page(f"<dialog open><p>{SECRET}</p></dialog>"),
    "a shadow root": page(f"<div><template shadowrootmode=open><p>{SECRET}</p></template></div>"),
    "a page that waits for its script": (
        "<html><head><script src=a.js></script></head><body>"
        f"<div id=app style='opacity:0'><h1>Gauges</h1><p>{SECRET}. {FILL}</p></div></body></html>"
    ).encode(),
    "a page whose text is for browsers without scripts": (
        "<html><head><script src=a.js></script></head><body><div id=app></div><noscript>"
        f"<h1>Gauges</h1><p>{SECRET}</p><p>{FILL}</p><p>{FILL}</p><ul><li>x</ul></noscript>"
    ).encode(),
    "a body that fades in": page(f"<p>{SECRET}</p>", body="style='opacity:0;visibility:hidden'"),
    "a stylesheet of another kind": page(
        f"<p class=x>{SECRET}</p>", "<style type=text/less>.x{display:none}</style>"
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_page_shows_is_kept(name: str) -> None:
    tree, _ = parse_html(SHOWN[name].decode())
    assert tree is not None
    remove_invisible(tree)
    assert "SECRET" in "".join(tree.itertext())


def test_what_was_removed_is_counted_in_the_warnings() -> None:
    hidden = f"<p hidden>{SECRET}</p><p style='display:none'>{SECRET}</p>"
    for mode in get_args(Mode):
        warnings = extract(page(hidden), "https://a.example/x", mode=mode).warnings
        assert "hidden_text_removed:2" in warnings, mode


@pytest.mark.parametrize(
    ("query", "applies"),
    [
        ("", True), ("all", True), ("screen", True), ("print", False), ("only screen", True),
        ("not screen", False), ("not print", True), ("print, screen", True),
        ("(max-width: 767px)", False), ("(min-width: 48em)", True), ("(width >= 600px)", True),
        ("(600px >= width)", False), ("screen and (min-width: 2000px)", False),
        ("(prefers-reduced-motion: reduce)", False), ("not (prefers-reduced-motion: reduce)", True),
        ("(hover: hover)", True), ("(orientation: portrait)", False), ("(unknown: 1)", False),
    ],
)  # fmt: skip
def test_media_rules_are_asked_about_a_desktop_window(query: str, applies: bool) -> None:
    assert media_applies(query) is applies


@pytest.mark.parametrize(
    "css",
    ["{" * 5000, "}" * 5000, ".a{" * 3000, "/*" * 5000, '"' * 5001, "\\" * 5001, "@media" * 3000,
     ":not(" * 3000, "." * 5000, ".a .b " * 2000 + "{display:none}",
     "[a=" * 2000 + "{display:none}"],
)  # fmt: skip
def test_no_sheet_breaks_the_filter(css: str) -> None:
    assert "season number 8" in extract(ruled(css), "https://a.example/x", mode="full").content
    assert read_declarations(css) is not None
