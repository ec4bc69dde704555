"""The one URL parser: what is checked is what is connected to.

Follows the WHATWG URL standard for http(s), and refuses what that standard merely repairs where a
second parser could read it differently (backslashes, inner tabs, encoded NUL, user names).
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode

import idna

from deepinfer_search_fetch.errors import InvalidRequestError, RefusedError

MAX_URL_CHARS = 8192
HostKind = Literal["name", "ipv4", "ipv6"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FORBIDDEN_HOST = re.compile(r"[\x00-\x20\x7f#%/:<>?@\[\\\]^|]")
_ASCII_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_TRACKING = re.compile(
    r"utm_\w+|gclid|dclid|fbclid|msclkid|yclid|igshid|mc_eid|mc_cid|_hsenc|_hsmi"
)
_DEFAULT_PORT = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Url:
    """A checked http(s) URL.

    host: lower-case ASCII name without trailing dot, dotted IPv4, or IPv6 without brackets.
    target: path and query as sent on the request line. fragment: without '#', may be empty.
    """

    scheme: str
    host: str
    host_kind: HostKind
    port: int
    target: str
    fragment: str = ""

    @property
    def authority(self) -> str:
        """host[:port] as in the Host header (no default port, IPv6 in brackets)."""
        host = f"[{self.host}]" if self.host_kind == "ipv6" else self.host
        return host if self.port == _DEFAULT_PORT[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def without_fragment(self) -> Url:
        return replace(self, fragment="")

    def __str__(self) -> str:
        fragment = f"#{self.fragment}" if self.fragment else ""
        return f"{self.origin}{self.target}{fragment}"


def parse(text: str) -> Url:
    """Parse an absolute http(s) URL.

    Raises InvalidRequestError(invalid_url) for anything malformed and
    RefusedError(blocked_scheme) for any other scheme.
    """
    if len(text) > MAX_URL_CHARS:
        raise _invalid(f"URL has {len(text)} characters, at most {MAX_URL_CHARS} are allowed")
    text = text.strip("".join(map(chr, range(0x21))))
    scheme_match = _SCHEME.match(text)
    if scheme_match is None:
        raise _invalid("URL needs a scheme: http:// or https://")
    scheme = scheme_match.group()[:-1].lower()
    if scheme not in _DEFAULT_PORT:
        raise RefusedError("blocked_scheme", f"scheme {scheme!r} is not fetched, only http(s)")
    if _CONTROL.search(text):
        raise _invalid("URL contains a control character, tab or line break")
    rest = text[scheme_match.end() :]
    if not rest.startswith("//"):
        raise _invalid("URL needs '//' and a host after the scheme")
    head, _, fragment = rest[2:].partition("#")
    before_query, question, query = head.partition("?")
    if "\\" in before_query:
        raise _invalid("URL contains a backslash")
    if "%00" in head:
        raise _invalid("URL contains an encoded NUL")
    netloc, slash, path = before_query.partition("/")
    host, kind, port = _split_authority(netloc, scheme)
    target = _clean_path(slash + path) + (question and "?" + _quote(query, _QUERY_SAFE))
    return Url(scheme, host, kind, port, target, _quote(fragment, _QUERY_SAFE))


def join(base: Url, reference: str) -> Url:
    """Resolve `reference` against `base` (RFC 3986 section 5.2), then check it like `parse`."""
    reference = reference.strip("".join(map(chr, range(0x21))))
    if _SCHEME.match(reference):
        return parse(reference)
    if reference.startswith("//"):
        return parse(f"{base.scheme}:{reference}")
    if reference.startswith("/"):
        return parse(base.origin + reference)
    if reference.startswith("?"):
        return parse(base.origin + base.path + reference)
    if reference.startswith("#") or not reference:
        return parse(base.origin + base.target + reference)
    return parse(base.origin + base.path.rpartition("/")[0] + "/" + reference)


def canonical(url: Url) -> str:
    """The form under which a page is indexed and cached: no fragment, no tracking, sorted query."""
    # Latin-1 keeps every byte: queries in GBK or Shift-JIS must not all become U+FFFD.
    pairs = parse_qsl(url.query, keep_blank_values=True, encoding="latin-1")
    kept = sorted((k, v) for k, v in pairs if not _TRACKING.fullmatch(k.lower()))
    path = re.sub(r"/index\.(?:html?|php)$", "/", url.path)
    return f"{url.origin}{path}" + (f"?{urlencode(kept, encoding='latin-1')}" if kept else "")


def strip_tracking(text: str) -> str:
    """`text` without tracking parameters; all other characters of the query stay as they are."""
    head, question, query = text.partition("?")
    if not question:
        return text
    query, hash_mark, fragment = query.partition("#")
    kept = [p for p in query.split("&") if not _TRACKING.fullmatch(p.partition("=")[0].lower())]
    return head + ("?" + "&".join(kept) if kept else "") + hash_mark + fragment


def registrable_domain(host: str) -> str:
    """The registrable domain by the Public Suffix List, private section included.

    An address, a bare public suffix and an unlisted name are their own domain.
    """
    from tld.utils import get_tld

    found = get_tld(f"http://{host}/", as_object=True, fail_silently=True, search_private=True)
    fld = getattr(found, "fld", None)
    return fld if isinstance(fld, str) and fld else host


def domain_matches(host: str, domain: str) -> bool:
    """Suffix match on labels: example.com matches www.example.com, not badexample.com."""
    domain = domain.lower().strip().strip(".").removeprefix("*.")
    return bool(domain) and (host == domain or host.endswith("." + domain))


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_url", message)


def _split_authority(netloc: str, scheme: str) -> tuple[str, HostKind, int]:
    if "@" in netloc:
        raise _invalid("URL carries a user name or password; remove everything before '@'")
    if netloc.startswith("["):
        literal, bracket, tail = netloc[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise _invalid("malformed IPv6 literal")
        return _ipv6(literal), "ipv6", _port(tail[1:], bool(tail), scheme)
    name, colon, port_text = netloc.partition(":")
    host, kind = _host(name)
    return host, kind, _port(port_text, bool(colon), scheme)


def _port(text: str, given: bool, scheme: str) -> int:
    if not given or not text:
        return _DEFAULT_PORT[scheme]
    # int() refuses thousands of digits with an error of its own.
    digits = text.lstrip("0") if text.isascii() and text.isdigit() else ""
    if not 1 <= len(digits) <= 5 or int(digits) > 65535:
        raise _invalid(f"port {text[:16]!r} is not a number from 1 to 65535")
    return int(digits)


def _ipv6(literal: str) -> str:
    if "%" in literal:
        raise _invalid("IPv6 zone identifiers are not accepted")
    try:
        return str(ipaddress.IPv6Address(literal))
    except ValueError as error:
        raise _invalid(f"malformed IPv6 literal: {error}") from None


@lru_cache(maxsize=1024)
def _host(raw: str) -> tuple[str, HostKind]:
    """A page names few hosts, each of them in many links."""
    if not raw:
        raise _invalid("URL has no host")
    try:
        mapped = unquote_to_bytes(raw).decode("utf-8") if "%" in raw else raw
        if not mapped.isascii():  # of ASCII the mapping only changes the case, as is done below
            mapped = idna.uts46_remap(mapped, std3_rules=False, transitional=False)
    except (UnicodeError, idna.IDNAError):
        raise _invalid("host name is not valid") from None
    mapped = mapped.lower().removesuffix(".")
    if not mapped or _FORBIDDEN_HOST.search(mapped):
        raise _invalid("host name contains a character that no host may have")
    labels = mapped.split(".")
    if _looks_numeric(labels[-1]):
        return _ipv4(labels), "ipv4"
    host = ".".join(_alabel(label) for label in labels)
    if len(host) > 253:
        raise _invalid("host name is longer than 253 characters")
    return host, "name"


def _alabel(label: str) -> str:
    if label.isascii():
        if not _ASCII_LABEL.fullmatch(label):
            raise _invalid(f"host label {label[:64]!r} is not valid")
        if not label.startswith("xn--"):
            return label
    try:
        return idna.alabel(label).decode("ascii")
    except (idna.IDNAError, UnicodeError):
        raise _invalid(
            f"host label {label[:64]!r} is not a valid internationalised label"
        ) from None


def _looks_numeric(label: str) -> bool:
    return bool(re.fullmatch(r"[0-9]+|0x[0-9a-f]*", label))


def _ipv4(labels: list[str]) -> str:
    """The WHATWG IPv4 parser: 1 to 4 parts, each decimal, octal (0…) or hexadecimal (0x…)."""
    if len(labels) > 4:
        raise _invalid("numeric host has more than four parts")
    numbers = [_ipv4_part(label) for label in labels]
    *front, last = numbers
    if any(n > 255 for n in front) or last >= 256 ** (5 - len(numbers)):
        raise _invalid("numeric host is out of range")
    value = last + sum(n * 256 ** (3 - i) for i, n in enumerate(front))
    return str(ipaddress.IPv4Address(value))


def _ipv4_part(text: str) -> int:
    digits, base = text, 10
    if text.startswith("0x"):
        digits, base = text[2:] or "0", 16
    elif len(text) > 1 and text.startswith("0"):
        base = 8
    # int() takes "1_0" and non-ASCII digits; an address part must not.
    if not re.fullmatch(r"[0-9a-f]{1,16}", digits):
        raise _invalid("numeric host has a part that is not a number")
    try:
        return int(digits, base)
    except ValueError:
        raise _invalid("numeric host has a part that is not a number") from None


_PATH_SAFE = "/:@!$&'()*+,;=-._~%|[]"
_QUERY_SAFE = _PATH_SAFE + "?"
_NOTHING_TO_QUOTE = re.compile(r"[A-Za-z0-9/:@!$&'()*+,;=._~%|\[\]?-]*")
_DOT = re.compile("%2e", re.I)
_DOT_SEGMENT = re.compile(r"/(?:\.|%2e)", re.I)


def _quote(text: str, safe: str) -> str:
    if ("?" in safe or "?" not in text) and _NOTHING_TO_QUOTE.fullmatch(text):
        return text  # most URLs; `quote` takes ten times as long to say so
    return quote(text, safe=safe, errors="replace")


def _clean_path(path: str) -> str:
    """Percent-encode what must be, and resolve dot segments (also written as %2e)."""
    out: list[str] = []
    quoted = _quote(path, _PATH_SAFE)
    if not _DOT_SEGMENT.search(quoted):
        return quoted or "/"
    segments = quoted.split("/")[1:]
    for i, segment in enumerate(segments):
        plain = segment if len(segment) > 6 else _DOT.sub(".", segment)
        last = i == len(segments) - 1
        if plain == "..":
            del out[-1:]
            out += [""] if last else []
        elif plain == ".":
            out += [""] if last else []
        else:
            out.append(segment)
    return "/" + "/".join(out)
