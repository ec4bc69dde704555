"""Kinds of words every site shares: furniture of pages, prices, dates, ends of sentences.

Every block of a page is asked all of this, so the patterns are made for speed: those that do not
care for case look at `folded` text, where a letter is one comparison, and what needs a digit is
only looked for where there is one.
"""

from __future__ import annotations

import re

# One pattern that starts with a set of characters skips all others at once.
SENTENCE_END = re.compile(
    r"[.!?。！？…](?:[\"'”’)\]]?(?:\s|$)|(?<=[。！？]))"  # noqa: RUF001
)
_BOILER = re.compile(
    r"cookie|©|\(c\) ?\d{4}|all rights reserved|privacy|terms of|sign (?:in|up)|log ?in|subscribe"
    r"|newsletter|follow us|share (?:this|on)|read more|load more|show more|learn more|click here"
    r"|powered by|javascript|add to cart|skip to|back to top|datenschutz|impressum|alle rechte"
    r"|mentions légales|tous droits|abonn|anmelden|zaloguj|polityka|copyright"
)
# What stands above the parts that follow an article: a short run of this kind ends the content.
_TAIL = re.compile(
    r"related|you (?:may|might) (?:also )?like|read (?:more|next|also)"
    r"|more (?:from|on|in|stories|news)|leave a (?:reply|comment)"
    r"|about the author|newsletter"
    r"|subscribe|recommended|popular|latest|trending|see also|sponsored|advertis|recent posts"
    r"|auch interessant|mehr (?:zum thema|aus)|kommentar|ähnliche|schlagw|weitere"
    r"|meistgelesen|beliebt|à lire aussi|commentaire|similaires"
    r"|partager|sur le même|komentarz|czytaj|zobacz"
    r"|podobne|polecane|udostępnij|powiązane|comentario|compart|relacionad|te puede interesar"
    r"|leggi anche|condivid|leia (?:mais|também)|reacties|lees ook|deel dit"
)
_TAIL_START = re.compile(r"share|tags?\b|filed under|teilen")
_COMMENTS = re.compile(r"\bcomments?\b")
_CREDIT = re.compile(
    r"\b(?:photo|image|picture|foto|bild|crédit|credit|quelle|source)\b[^.]{0,30}"
    r"(?::|©| by |/|getty)|getty images|shutterstock|reuters\)|\(ap\b|©"
)
_DATE = re.compile(r"\b(?:19|20)\d\d\b|\b\d{1,2}[./:-]\d{1,2}\b")
_AGO = re.compile(r"\bago\b")
_PRICE = re.compile(r"[$€£¥]\s?\d|\d\s?(?:€|zł|kr|USD|EUR)\b")
DIGIT = re.compile(r"\d")
_CAPITALS = "A-ZÀ-ÖØ-ÞĄĆĘŁŃÓŚŹŻА-Я"
UPPER = re.compile(f"[{_CAPITALS}]")
CAPITALISED = re.compile(rf"[{_CAPITALS}](?<!\w.)")


_ONE_CASE = {0x131: "i", 0x17F: "s"}  # the dotless i and the long s


def folded(text: str) -> str:
    """Lower case for the questions below, with the two letters that only upper case joins."""
    low = text.lower()
    return low if low.isascii() else low.translate(_ONE_CASE)


def is_boilerplate(low: str) -> bool:
    return _BOILER.search(low) is not None


def ends_content(low: str) -> bool:
    """Whether a heading says that the article is over: comments, related stories, tags."""
    return bool(
        _TAIL.search(low) or _TAIL_START.match(low) or ("comment" in low and _COMMENTS.search(low))
    )


def is_credit(low: str) -> bool:
    """Whether this names who took a picture."""
    return _CREDIT.search(low) is not None


def is_furniture(text: str) -> bool:
    """Any of the three above, of text as it stands."""
    low = folded(text)
    return is_boilerplate(low) or ends_content(low) or is_credit(low)


def has_date(low: str) -> bool:
    digit = DIGIT.search(low)
    return bool((digit and _DATE.search(low, digit.start())) or ("ago" in low and _AGO.search(low)))


def has_price(text: str) -> bool:
    return DIGIT.search(text) is not None and _PRICE.search(text) is not None
