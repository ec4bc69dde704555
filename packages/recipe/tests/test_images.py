"""Pictures: sizes and token counts, preparation, and fetching only where it is allowed."""

from __future__ import annotations

import base64
import contextlib
import io
import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

import deepinfer_recipe
from deepinfer_recipe import (
    BytesImageSource,
    DataUrlImageSource,
    ImageError,
    ImageFetcher,
    ImageInfo,
    ImagePreprocessor,
    ImageQuota,
    ImageResolver,
    ImageSizeRule,
    MultiModalData,
    PreprocessOptions,
    UrlImageSource,
)
from deepinfer_recipe.images.destination import is_public_address
from deepinfer_recipe.images.size import MAX_TOKENS, fitted_size, image_tokens, limited_size

pillow = pytest.importorskip("PIL.Image")
HIGH = PreprocessOptions("high", 8192, 544)


def picture(size: tuple[int, int] = (20, 10), mode: str = "RGB", kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    pillow.new(mode, size).save(out, kind)
    return out.getvalue()


def test_size_and_tokens_are_as_recorded(images_case: dict[str, Any]) -> None:
    size = (images_case["width"], images_case["height"])
    before = size
    if images_case["detail"] == "low":
        before = limited_size(*size, images_case["low_detail_max_dimension_px"])
    after = fitted_size(*before)
    assert images_case["expect"] == {
        "size_after": {"width": after[0], "height": after[1]},
        "image_tokens_of_original_size": image_tokens(*size),
        "image_tokens_after": image_tokens(*after),
    }


def test_no_picture_takes_more_tokens_than_allowed() -> None:
    for width in range(1, 8192, 611):
        for height in range(1, 8192, 487):
            assert 0 < image_tokens(width, height) <= MAX_TOKENS


@pytest.mark.parametrize("rule", [ImageSizeRule(), ImageSizeRule(4, 2, 900, 40, 8.0)])
def test_a_fitted_size_is_whole_patches_within_the_limit(rule: ImageSizeRule) -> None:
    for width in range(1, 3000, 97):
        for height in range(1, 3000, 101):
            size = rule.fitted_size(width, height)
            assert not any(side % rule.patch_px for side in size)
            assert 0 < rule.image_tokens(width, height) <= rule.max_tokens


def test_fitting_a_fitted_picture_changes_nothing() -> None:
    for width in range(30, 3000, 97):
        for height in range(30, 3000, 101):
            size = fitted_size(width, height)
            assert fitted_size(*size) == size


def test_a_rule_squeezes_what_is_too_wide() -> None:
    rule = ImageSizeRule(max_aspect=4.0)
    assert rule.fitted_size(8000, 1000) == rule.fitted_size(4000, 1000)
    assert rule.fitted_size(1000, 8000) == ImageSizeRule().fitted_size(1000, 8000)


def test_pixels_can_be_had_without_encoding_them() -> None:
    rule = ImageSizeRule(4, 2, 900, 40)
    made = ImagePreprocessor(output="rgb", size_rule=rule).preprocess(picture((8, 8)), HIGH)
    assert (made.width, made.height) == rule.fitted_size(8, 8)
    assert made.data == bytes(3 * made.width * made.height)
    with pytest.raises(ValueError, match='"webp" or "rgb"'):
        ImagePreprocessor(output="png")  # type: ignore[arg-type]


def test_adjustment_counts_tokens_beyond_the_placeholders() -> None:
    data = MultiModalData([ImageInfo(b"", 800, 600), ImageInfo(b"", 1, 1)])
    assert data.image_token_adjustment() == (317 - 1) + (184 - 1)
    assert MultiModalData().is_empty()


@pytest.mark.parametrize(("mode", "kind"), [("RGBA", "PNG"), ("L", "JPEG"), ("P", "GIF")])
def test_preparation_makes_an_rgb_webp_of_the_fitted_size(mode: str, kind: str) -> None:
    prepared = ImagePreprocessor().preprocess(picture((100, 60), mode, kind), HIGH)
    with pillow.open(io.BytesIO(prepared.data)) as image:
        assert (image.format, image.mode, image.size) == ("WEBP", "RGB", (714, 434))
    assert (prepared.width, prepared.height) == (714, 434)


def test_transparency_is_laid_on_white() -> None:
    prepared = ImagePreprocessor().preprocess(picture(mode="RGBA"), HIGH)
    with pillow.open(io.BytesIO(prepared.data)) as image:
        assert min(image.getpixel((5, 5))) > 250


def test_orientation_of_the_camera_is_applied_unless_switched_off() -> None:
    out = io.BytesIO()
    exif = pillow.Exif()
    exif[0x0112] = 6  # a quarter turn
    pillow.new("RGB", (1400, 700)).save(out, "JPEG", exif=exif)
    turned = ImagePreprocessor().preprocess(out.getvalue(), HIGH)
    kept = ImagePreprocessor(applies_orientation=False).preprocess(out.getvalue(), HIGH)
    assert (turned.width, turned.height) == (kept.height, kept.width)
    assert turned.height > turned.width


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "EmptyImage"),
        (b"GIF8 no", "Decode"),
        (b"plain text", "UnsupportedMediaType"),
        (picture()[:40], "Decode"),
        (picture(kind="BMP"), "UnsupportedMediaType"),
        (picture((8193, 1)), "ImageDimensionsTooLarge"),
    ],
)
def test_what_is_no_usable_picture_is_told_apart(data: bytes, kind: str) -> None:
    with pytest.raises(ImageError) as caught:
        ImagePreprocessor().preprocess(data, HIGH)
    assert (caught.value.kind, caught.value.is_retryable) == (kind, False)


def resolver() -> ImageResolver:
    return ImageResolver(ImageFetcher(), ImagePreprocessor())


def test_quota_counts_only_what_was_resolved() -> None:
    quota = ImageQuota()
    good = picture()
    encoded = base64.b64encode(good).decode()
    sources = [
        BytesImageSource(good),
        DataUrlImageSource(f"data:image/png;base64,{encoded}"),
        DataUrlImageSource("data:image/png," + "".join(f"%{b:02x}" for b in good)),
    ]
    assert len(resolver().resolve(sources, quota).images) == 3
    assert (quota.image_count(), quota.byte_size()) == (3, 3 * len(good))
    with pytest.raises(ImageError, match=r"messages\[0\]: "):
        resolver().resolve([sources[0], BytesImageSource(b"x", path="messages[0]")], quota)
    assert quota.image_count() == 3


def test_too_many_pictures_are_refused_before_any_is_read() -> None:
    with pytest.raises(ImageError) as caught:
        resolver().resolve([BytesImageSource(b"")] * 601, ImageQuota())
    assert caught.value.kind == "TooManyImages"


def test_too_large_pictures_are_refused() -> None:
    with pytest.raises(ImageError) as caught:
        resolver().resolve([BytesImageSource(bytes(32 * 2**20 + 1))], ImageQuota())
    assert caught.value.kind == "ImageTooLarge"
    quota = ImageQuota()
    quota.record(1, 64 * 2**20)
    with pytest.raises(ImageError) as caught:
        resolver().resolve([BytesImageSource(picture())], quota)
    assert caught.value.kind == "TotalSizeTooLarge"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("data:text/plain,hi", "UnsupportedMediaType"),
        ("data:image/png;base64,@@", "InvalidDataUrl"),
        ("data:image/png", "InvalidDataUrl"),
    ],
)
def test_bad_data_urls_are_told_apart(url: str, kind: str) -> None:
    with pytest.raises(ImageError) as caught:
        resolver().resolve([DataUrlImageSource(url)], ImageQuota())
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "192.0.0.8", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:8.8.8.8"),
        *("64:ff9b::808:808", "2002:a00:1::1", "fec0::1", "2001:db8::1", "::7f00:1", "::8.8.8.8"),
        *("2001::1", "2001:2::1", "2001:10::1", "2001:20::1", "3fff::1", "5f00::1", "100::1"),
        *("192.88.99.1", "192.0.2.1", "198.51.100.1", "203.0.113.1", "fd00::1", "::ffff:0:0"),
    ],
)
def test_addresses_that_are_not_public_are_denied_by_default(address: str) -> None:
    assert not is_public_address("host.example", address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_public_address("host.example", address)


class Site(BaseHTTPRequestHandler):
    """Serves a picture, a redirect, a redirect loop, something large, something slow."""

    outlasted: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        if self.path == "/to-picture":
            self._redirect("/picture?x=1")
        elif self.path == "/to-loopback":
            self._redirect(f"http://127.0.0.1:{self.server.server_address[1]}/picture")
        elif self.path == "/loop":
            self._redirect("/loop")
        elif self.path == "/missing":
            self.send_error(404)
        elif self.path in ("/slow-head", "/slow-body"):
            self._drip()
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "500")
            self.end_headers()
            self.wfile.write(picture()[:50])
            self.close_connection = True
        else:
            body = bytes(5000) if self.path == "/large" else picture()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _drip(self) -> None:
        """A good answer that takes too long; `outlasted` tells when it was heard out."""
        body = b"x" * 60
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n"
        self.wfile.write(head + (b"X-A: " if self.path == "/slow-head" else b"\r\n"))
        rest = b"\r\n\r\n" + body if self.path == "/slow-head" else b""
        pace = threading.Event()
        with contextlib.suppress(OSError):
            for _ in body:
                pace.wait(0.02)
                self.wfile.write(b"x")
                self.wfile.flush()
            self.outlasted.append(self.path)
            self.wfile.write(rest)

    def _redirect(self, target: str) -> None:
        self.send_response(302)
        self.send_header("Location", target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def allowing_loopback(max_bytes: int = 4000) -> ImageFetcher:
    return ImageFetcher(max_bytes=max_bytes, allows_any_port=True).with_destination_filter(
        lambda host, address: address == "127.0.0.1"
    )


def test_loopback_is_rejected_by_default(site: str) -> None:
    with pytest.raises(ImageError) as caught:
        ImageFetcher(allows_any_port=True).fetch(site + "/picture")
    assert caught.value.kind == "DestinationRejected"


def test_allowed_picture_is_fetched_through_a_redirect(site: str) -> None:
    assert allowing_loopback().fetch(site + "/to-picture") == picture()
    data = ImageResolver(allowing_loopback(), ImagePreprocessor()).resolve(
        [UrlImageSource(site + "/picture")], ImageQuota()
    )
    assert len(data.images) == 1


def test_every_redirect_is_put_to_the_rule(site: str) -> None:
    asked: list[tuple[str, str]] = []

    def once(host: str, address: str) -> bool:
        asked.append((host, address))
        return len(asked) == 1

    fetcher = ImageFetcher(destination_filter=once, allows_any_port=True)
    with pytest.raises(ImageError) as caught:
        fetcher.fetch(site + "/to-loopback")
    assert caught.value.kind == "DestinationRejected"
    assert len(asked) == 2


def broken_rule(host: str, address: str) -> bool:
    raise OSError(host)


@pytest.mark.parametrize("rule", [broken_rule, lambda host, address: 1])
def test_rule_that_fails_or_does_not_say_true_means_no(site: str, rule: Any) -> None:
    with pytest.raises(ImageError) as caught:
        ImageFetcher(destination_filter=rule, allows_any_port=True).fetch(site + "/picture")
    assert caught.value.kind == "DestinationRejected"


@pytest.mark.parametrize(
    ("path", "kind", "retryable"),
    [("/loop", "Fetch", True), ("/missing", "Fetch", True), ("/large", "ImageTooLarge", False)],
)
def test_trouble_while_fetching_is_told_apart(
    site: str, path: str, kind: str, retryable: bool
) -> None:
    with pytest.raises(ImageError) as caught:
        allowing_loopback().fetch(site + path)
    assert (caught.value.kind, caught.value.is_retryable) == (kind, retryable)


@pytest.mark.parametrize(
    "url", ["ftp://x/y", "http://", "http://a b/", "http://[::1/", "http://x:99999/", "x"]
)
def test_what_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(ImageError) as caught:
        allowing_loopback().fetch(url)
    assert caught.value.kind == "InvalidUrl"


def test_fetch_gives_up_when_its_time_is_over(site: str) -> None:
    ticks = iter([0.0, 100.0])
    fetcher = ImageFetcher(
        destination_filter=lambda host, address: True,
        allows_any_port=True,
        clock=lambda: next(ticks),
    )
    with pytest.raises(ImageError, match=r"no answer in 20\.0 s"):
        fetcher.fetch(site + "/picture")


@pytest.mark.parametrize("path", ["/slow-head", "/slow-body"])
def test_a_server_that_drips_does_not_hold_the_fetcher(site: str, path: str) -> None:
    fetcher = ImageFetcher(
        destination_filter=lambda host, address: True, allows_any_port=True, timeout_s=0.3
    )
    with pytest.raises(ImageError) as caught:
        fetcher.fetch(site + path)
    assert (caught.value.kind, caught.value.is_retryable) == ("Fetch", True)
    assert path not in Site.outlasted


def test_a_picture_that_ends_early_is_an_error(site: str) -> None:
    with pytest.raises(ImageError, match=r"ended 4\d\d bytes early"):
        allowing_loopback().fetch(site + "/short")


def test_filter_that_is_no_callable_is_misuse() -> None:
    with pytest.raises(TypeError):
        ImageFetcher().with_destination_filter(3)  # type: ignore[arg-type]


def test_the_address_table_is_that_of_the_other_fetcher_of_this_repository() -> None:
    own = Path(deepinfer_recipe.__file__).parent / "images" / "address_rules.json"
    packages = Path(__file__).parents[2]
    other = packages / "search_fetch/src/deepinfer_search_fetch/net/address_rules.json"
    if not other.exists():
        pytest.skip("search_fetch is not beside this package")
    assert json.loads(own.read_text("utf-8")) == json.loads(other.read_text("utf-8"))


RULES = json.loads(
    (Path(deepinfer_recipe.__file__).parent / "images" / "address_rules.json").read_text("utf-8")
)
DENIED = [*RULES["denied_ipv4"], *RULES["denied_ipv6"], *RULES["nat64_ipv6"], "::/8", "4000::/3"]


@pytest.mark.parametrize("network", DENIED)
def test_both_ends_of_every_denied_range_are_denied(network: str) -> None:
    found = ipaddress.ip_network(network)
    for address in (found[0], found[-1]):
        assert not is_public_address("host.example", str(address))


@pytest.mark.parametrize("name", [*RULES["denied_names"], "single", "a.internal.", "LOCALHOST"])
def test_private_names_are_denied_whatever_they_resolve_to(name: str) -> None:
    assert not is_public_address(name, "93.184.216.34")
    assert not is_public_address(f"a.{name}", "93.184.216.34") or name == "single"


@pytest.mark.parametrize("port", [22, 25, 3306, 5432, 6379, 9200, 11211, 32526])
def test_a_port_that_is_not_the_webs_is_never_connected_to(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: asked.append(a))
    with pytest.raises(ImageError, match=f"port {port} may not") as told:
        ImageFetcher().fetch(f"http://victim.example:{port}/")
    assert told.value.kind == "DestinationRejected"
    assert asked == []


def test_this_machines_own_addresses_are_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []

    class Probe(socket.socket):
        def bind(self, address: Any) -> None:
            bound.append(address)

    monkeypatch.setattr(socket, "socket", Probe)
    assert not is_public_address("host.example", "8.8.8.8")
    assert bound == [("8.8.8.8", 0)]


def test_the_pixels_of_a_request_are_counted_before_any_is_decoded() -> None:
    decoded: list[int] = []

    class Counting(ImagePreprocessor):
        def preprocess(self, data: bytes, options: PreprocessOptions) -> ImageInfo:
            decoded.append(len(data))
            return ImageInfo(b"", 14, 14)

    large = picture((8192, 8192), mode="1")
    assert len(large) < 40_000
    sources = [BytesImageSource(large)] * 5
    quota = ImageQuota()
    with pytest.raises(ImageError, match="pixels together") as told:
        ImageResolver(ImageFetcher(), Counting()).resolve(sources, quota)
    assert told.value.kind == "TotalSizeTooLarge"
    assert len(decoded) == 4
    assert quota.image_count() == 0
    resolver = ImageResolver(ImageFetcher(), Counting())
    for _ in range(4):
        resolver.resolve(sources[:1], quota)
    with pytest.raises(ImageError, match="pixels together"):
        resolver.resolve(sources[:1], quota)


def test_a_large_picture_is_decoded_once_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[str] = []
    kind = pillow.Image
    monkeypatch.setattr(kind, "copy", lambda self: pytest.fail("the picture was copied"))
    real = kind.convert
    monkeypatch.setattr(
        kind,
        "convert",
        lambda self, mode, *a, **k: copies.append(mode) or real(self, mode, *a, **k),
    )
    ImagePreprocessor(output="rgb").preprocess(picture((64, 64)), HIGH)
    assert copies == []
