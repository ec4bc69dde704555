"""What CSS makes of an element: the cascade of the properties that decide whether text is seen."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from lxml import html
from tinycss2.color4 import parse_color

from deepinfer_search_fetch.extract.stylesheets import (
    WINDOW_PX,
    Declaration,
    Sheets,
    read_declarations,
)

Rgb = tuple[float, float, float]
_MIN_FONT_PX = 3.0
_MIN_OPACITY = 0.05
_MIN_CONTRAST = 1.2
_UNREADABLE_BLUR_PX = 16.0  # less is what a click takes off a spoiler
_FAR_PX = 400.0  # to the left or above; a reader cannot scroll there
_BEYOND_PX = 3000.0  # to the right or below
_MIN_BOX_PX = 2.0
_WHITE: Rgb = (1.0, 1.0, 1.0)
_BLACK: Rgb = (0.0, 0.0, 0.0)
_FONT_WORDS = {
    "xx-small": 9.0, "x-small": 10.0, "small": 13.0, "medium": 16.0, "large": 18.0,
    "x-large": 24.0, "xx-large": 32.0,
}  # fmt: skip
_UNITS = {
    "px": 1.0, "pt": 4 / 3, "pc": 16.0, "in": 96.0, "cm": 37.8, "mm": 3.78, "q": 0.945,
    "vw": WINDOW_PX[0] / 100, "vh": WINDOW_PX[1] / 100, "vmin": WINDOW_PX[1] / 100,
    "vmax": WINDOW_PX[0] / 100, "dvw": WINDOW_PX[0] / 100, "dvh": WINDOW_PX[1] / 100,
    "svw": WINDOW_PX[0] / 100, "svh": WINDOW_PX[1] / 100, "lvw": WINDOW_PX[0] / 100,
    "lvh": WINDOW_PX[1] / 100, "vi": WINDOW_PX[0] / 100, "vb": WINDOW_PX[1] / 100, "rem": 16.0,
}  # fmt: skip
Style = dict[str, str]


@dataclass(slots=True)
class State:
    """What an element hands down. back: the colour behind the text, None where it is not known."""

    font_px: float = 16.0
    colour: Rgb | None = _BLACK
    stated: bool = False
    alpha: float = 1.0
    back: Rgb | None = _WHITE
    visible: bool = True
    opacity: float = 1.0
    custom: Mapping[str, str] = field(default_factory=dict[str, str])


def own_style(element: html.HtmlElement, sheets: Sheets) -> Style | None:
    """The winning declarations of an element, by name; None where there are none."""
    attributes = element.attrib
    inline = attributes.get("style")
    rules = sheets.rules_of(element) if (sheets.simple or sheets.matched) else []
    if not rules and not inline and not _presentational(element):
        return None
    own = _attribute_style(element)
    key = (tuple(map(id, rules)), inline, tuple(own))
    if (known := sheets.styles.get(key)) is not None:
        return known
    layers: list[Sequence[Declaration]] = [own]
    layers += [r.declarations for r in rules]
    if inline:
        layers.append(read_declarations(inline[:8000]))
    style: Style = {}
    strong: set[str] = set()
    for layer in layers:
        for d in layer:
            if d.important or d.name not in strong:
                # A shorthand speaks for what it stands for, and the other way round.
                for other in _SAME.get(d.name, ()):
                    style.pop(other, None)
                style.pop(d.name, None)
                style[d.name] = d.value
                if d.important:
                    strong.add(d.name)
    sheets.styles[key] = style
    return style


_SAME = {
    "font": ("font-size",),
    "background": ("background-color",),
    "overflow": ("overflow-x", "overflow-y"),
    "inset": ("left", "right", "top", "bottom"),
    "margin": ("margin-left", "margin-top", "margin-right"),
    "animation": ("animation-name",),
    "mask": ("mask-image",),
}


_PRESENTATIONAL = frozenset({"hidden", "bgcolor", "color", "text", "popover"})


def _presentational(element: html.HtmlElement) -> bool:
    return not _PRESENTATIONAL.isdisjoint(element.keys())


def _attribute_style(element: html.HtmlElement) -> list[Declaration]:
    """What attributes stand for, below every rule of a sheet."""
    found: list[Declaration] = []
    attributes = element.attrib
    if "hidden" in attributes and attributes["hidden"].strip().lower() != "until-found":
        found.append(Declaration("display", "none", False))
    if "popover" in attributes:
        found.append(Declaration("display", "none", False))
    if (colour := attributes.get("bgcolor")) is not None:
        found.append(Declaration("background-color", colour.strip().lower(), False))
    if element.tag == "font" and (colour := attributes.get("color")) is not None:
        found.append(Declaration("color", colour.strip().lower(), False))
    if element.tag == "body" and (colour := attributes.get("text")) is not None:
        found.append(Declaration("color", colour.strip().lower(), False))
    return found


def step(state: State, style: Style, sheets: Sheets) -> tuple[State, str | None]:
    """The state below an element with that style, and why nothing of it is seen, None if it is.

    Reasons: "closed" for what a click may open (display, visibility, height), else "css".
    """
    custom = {k: v for k, v in style.items() if k.startswith("--")}
    if custom:
        state = replace(state, custom={**state.custom, **custom})
    if any("var(" in v for v in style.values()):
        style = {k: _resolve(v, state.custom) for k, v in style.items() if not k.startswith("--")}
    end = _last_frame(style, sheets)
    if end is not None:
        style = {**style, **end}
    state = _inherit(state, style)
    get = style.get
    if get("display") == "none" or get("content-visibility") == "hidden":
        return state, "closed" if get("display") == "none" else "css"
    reason = _boxed_away(state, style)
    if reason is not None:
        return state, reason
    if (
        state.opacity < _MIN_OPACITY
        or state.font_px < _MIN_FONT_PX
        or _moved_away(state, style)
        or _clipped(style)
        or _transformed_away(state, style)
        or _squeezed(state, style)
    ):
        return state, "css"
    return state, None


def unseen_text(state: State) -> bool:
    """Whether text directly in an element of this state is not seen, though others might be."""
    if not state.visible or state.alpha < _MIN_OPACITY:
        return True
    if not state.stated or state.colour is None or state.back is None:
        return False
    shown = _over(state.colour, state.alpha * state.opacity, state.back)
    return _contrast(shown, state.back) < _MIN_CONTRAST


def _last_frame(style: Style, sheets: Sheets) -> Style | None:
    """Where an animation leaves the element: its last frame, or an unknown one that shows it."""
    names = (style.get("animation-name") or style.get("animation") or "").replace(",", " ").split()
    if not names or names == ["none"]:
        return None
    for name in names:
        if name in sheets.keyframes:
            end = {d.name: d.value for d in sheets.keyframes[name]}
            stays = "forwards" in names or "both" in names or "infinite" in names
            return end if stays or not any(_hides_plainly(v) for v in end.values()) else None
    return {"opacity": "1", "visibility": "visible"} if sheets.linked else None


def _hides_plainly(value: str) -> bool:
    return value in ("0", "none", "hidden")


def _resolve(value: str, custom: Mapping[str, str]) -> str:
    """`var(--x, fallback)` replaced, a few levels deep."""
    for _ in range(8):
        at = value.rfind("var(")
        if at < 0:
            return value
        end = value.find(")", at)
        if end < 0:
            return value
        name, _, fallback = value[at + 4 : end].partition(",")
        found = custom.get(name.strip(), fallback.strip())
        value = (value[:at] + found + value[end + 1 :])[:4000]
    return value


def _inherit(state: State, style: Style) -> State:
    changes: dict[str, Any] = {}
    for name in ("font", "font-size"):
        if (value := style.get(name)) is not None:
            size = _font_px(value, state.font_px, shorthand=name == "font")
            if size is not None:
                changes["font_px"] = size
    if (zoom := style.get("zoom")) is not None:
        factor = _number(zoom)
        if factor:
            changes["font_px"] = changes.get("font_px", state.font_px) * factor
    if (value := style.get("visibility")) is not None and value not in ("inherit", "unset"):
        changes["visible"] = value not in ("hidden", "collapse")
    if (value := style.get("opacity")) is not None:
        changes["opacity"] = state.opacity * _share(value)
    for name in ("filter", "-webkit-filter"):
        if "opacity(" in style.get(name, ""):
            inside = style[name].partition("opacity(")[2].partition(")")[0]
            changes["opacity"] = changes.get("opacity", state.opacity) * _share(inside or "1")
        if "blur(" in style.get(name, ""):
            inside = style[name].partition("blur(")[2].partition(")")[0]
            radius = _px(inside, changes.get("font_px", state.font_px), whole=0.0)
            if radius is not None and radius >= _UNREADABLE_BLUR_PX:
                changes["opacity"] = 0.0
    for name in ("color", "-webkit-text-fill-color"):
        if (value := style.get(name)) is not None and value not in ("inherit", "currentcolor"):
            colour, alpha = _colour(value)
            if colour is not None or value == "transparent":
                changes["colour"], changes["alpha"] = colour or _BLACK, alpha
                changes["stated"] = True
            else:
                changes["colour"], changes["stated"] = None, False
    for name in ("background", "background-color"):
        if (value := style.get(name)) is not None and value not in ("inherit", "none"):
            changes["back"] = _behind(value, state.back)
    return replace(state, **changes) if changes else state


def _behind(value: str, back: Rgb | None) -> Rgb | None:
    if "url(" in value or "gradient(" in value or "var(" in value:
        return None
    for token in _tokens(value):
        colour, alpha = _colour(token)
        if colour is not None:
            return colour if alpha >= 1 or back is None else _over(colour, alpha, back)
        if token == "transparent":
            return back
    return back


def _tokens(value: str) -> list[str]:
    return re.findall(r"[a-z-]+\([^()]*\)|[^\s/,]+", value)


@lru_cache(maxsize=4096)
def _colour(value: str) -> tuple[Rgb | None, float]:
    if value == "transparent":
        return None, 0.0
    if not re.match(r"[#a-z]", value):
        return None, 1.0
    if re.fullmatch(r"[0-9a-f]{6}", value):
        value = "#" + value  # as attributes write it
    found: Any = parse_color(value)
    if found is None or isinstance(found, str):
        return None, 1.0
    try:
        red, green, blue = found.to("srgb").coordinates[:3]
    except (NotImplementedError, ValueError, TypeError):
        return None, 1.0
    return (float(red or 0), float(green or 0), float(blue or 0)), float(found.alpha)


def _over(colour: Rgb, alpha: float, back: Rgb) -> Rgb:
    red, green, blue = (alpha * c + (1 - alpha) * b for c, b in zip(colour, back, strict=True))
    return red, green, blue


def _contrast(one: Rgb, other: Rgb) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    # Equally bright but of another hue is still seen.
    if max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.25:
        return math.inf
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: Rgb) -> float:
    parts = [c / 12.92 if c <= 0.04045 else ((max(c, 0.0) + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def _font_px(value: str, inherited: float, *, shorthand: bool) -> float | None:
    if shorthand:
        # A number without a unit in front of the size is the weight.
        sizes = [t for t in value.split("/")[0].split() if not re.fullmatch(r"[1-9]\d\d", t)]
        sizes = [t for t in sizes if t in _FONT_WORDS or re.match(r"[\d.]|calc", t)]
        if not sizes:
            return None
        value = sizes[0]
    if value in _FONT_WORDS:
        return _FONT_WORDS[value]
    if value == "smaller":
        return inherited * 0.83
    if value == "larger":
        return inherited * 1.2
    return _px(value, inherited, whole=inherited)


def _share(value: str) -> float:
    """A number or percentage as 0..1; 1 for what is neither."""
    value = value.strip()
    if value.endswith("%"):
        number = _number(value[:-1])
        return 1.0 if number is None else number / 100
    number = _number(value)
    return 1.0 if number is None else number


def _number(value: str) -> float | None:
    try:
        found = float(value)
    except ValueError:
        found = _calculate(value) if "(" in value else None
        if found is None:
            return None
    return found if math.isfinite(found) else None


_LENGTH = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([a-z]*|%)")


def _px(value: str, font_px: float, *, whole: float | None = None) -> float | None:
    """A length in px; percentages of `whole`, None where that is not known."""
    value = value.strip()
    if "(" in value:
        return _calculate(_LENGTH.sub(lambda m: _as_px(m, font_px, whole), value))
    match = _LENGTH.fullmatch(value)
    if match is None:
        return None
    text = _as_px(match, font_px, whole)
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _as_px(match: re.Match[str], font_px: float, whole: float | None) -> str:
    number, unit = float(match.group(1)), match.group(2)
    if unit == "":
        return repr(number)
    if unit == "%":
        return "nan" if whole is None else repr(number / 100 * whole)
    if unit in ("em", "lh", "rlh"):
        return repr(number * font_px)
    if unit in ("ex", "ch"):
        return repr(number * font_px / 2)
    return repr(number * _UNITS[unit]) if unit in _UNITS else "nan"


_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def _calculate(text: str) -> float | None:
    """calc(), min(), max() and clamp() of plain numbers."""
    text = re.sub(r"\bcalc\(", "(", text.replace("-webkit-calc(", "("))
    if len(text) > 400:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner = _value(node.operand)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        values = [_value(a) for a in node.args]
        if node.func.id == "min":
            return min(values)
        if node.func.id == "max":
            return max(values)
        if node.func.id == "clamp" and len(values) == 3:
            return max(values[0], min(values[1], values[2]))
    raise ValueError("not plain arithmetic")


def _boxed_away(state: State, style: Style) -> str | None:
    """A box without room for its text, which it does not let out."""
    if not any(
        style.get(n, "").startswith(("hidden", "clip", "scroll", "auto"))
        for n in ("overflow", "overflow-x", "overflow-y")
    ) and style.get("contain") not in ("strict", "paint", "content", "size paint"):
        return None
    for names in (
        ("height", "max-height", "block-size", "max-block-size"),
        ("width", "max-width", "inline-size", "max-inline-size"),
    ):
        for name in names:
            value = style.get(name)
            px = None if value is None else _px(value, state.font_px, whole=1000.0)
            if px is not None and px < _MIN_BOX_PX:
                return "closed" if names[0][0] == "h" else "css"
    if (value := style.get("line-height")) is not None:
        px = _px(value, state.font_px, whole=state.font_px)
        unit = value.replace(".", "").isdigit()
        if px is not None and (px * state.font_px if unit else px) < _MIN_FONT_PX:
            return "css"
    return None


def _moved_away(state: State, style: Style) -> bool:
    placed = style.get("position") in ("absolute", "fixed", "relative", "sticky")
    sides: dict[str, str] = {}
    if "inset" in style:
        parts = _tokens(style["inset"])
        if parts:
            top = parts[0]
            right = parts[1] if len(parts) > 1 else top
            bottom = parts[2] if len(parts) > 2 else top
            left = parts[3] if len(parts) > 3 else right
            sides = {"top": top, "right": right, "bottom": bottom, "left": left}
    sides.update({n: style[n] for n in ("left", "right", "top", "bottom") if n in style})
    if placed:
        for name, value in sides.items():
            across = WINDOW_PX[0] if name in ("left", "right") else WINDOW_PX[1]
            px = _px(value, state.font_px, whole=across)
            if px is not None and (px <= -_FAR_PX or px >= _BEYOND_PX):
                return True
    indent = style.get("text-indent")
    if indent is not None:
        px = _px(indent.split()[0] if indent.split() else "", state.font_px, whole=1000.0)
        clipped = style.get("overflow", "").startswith(("hidden", "clip"))
        if px is not None and (px <= -_FAR_PX or px >= _BEYOND_PX or (px >= 900 and clipped)):
            return True
    margins = [style.get(n) for n in ("margin-left", "margin-top", "margin-right",
                                      "margin-inline-start")]  # fmt: skip
    if "margin" in style:
        margins += _tokens(style["margin"])
    for value in filter(None, margins):
        px = _px(value, state.font_px, whole=WINDOW_PX[0])
        if px is not None and px <= -2 * _FAR_PX:
            return True
    return False


_CLIP_RECT = re.compile(r"rect\(([^()]*)\)")
_SHAPE = re.compile(r"(inset|circle|ellipse|polygon|rect|xywh)\(([^()]*(?:\([^()]*\)[^()]*)*)\)")


def _clipped(style: Style) -> bool:
    match = _CLIP_RECT.search(style.get("clip", ""))
    if match is not None:
        parts = [_px(p, 16.0) for p in re.split(r"[\s,]+", match.group(1).strip())]
        if len(parts) == 4 and None not in parts:
            top, right, bottom, left = (p or 0.0 for p in parts)
            if bottom - top < _MIN_BOX_PX or right - left < _MIN_BOX_PX:
                return True
    for name in ("clip-path", "-webkit-clip-path"):
        match = _SHAPE.search(style.get(name, ""))
        if match is not None and _no_area(match.group(1), match.group(2)):
            return True
    for name in ("mask", "mask-image", "-webkit-mask", "-webkit-mask-image"):
        value = style.get(name, "")
        if "gradient(" in value:
            inside = value.partition("gradient(")[2]
            colours = [t for t in _tokens(inside) if t == "transparent" or _colour(t)[0]]
            if colours and all(c == "transparent" or _colour(c)[1] == 0 for c in colours):
                return True
    return False


def _no_area(shape: str, inside: str) -> bool:
    inside = inside.partition(" round ")[0]
    if shape == "polygon":
        points = [p.split() for p in inside.split(",")]
        numbers = [[_px(x, 16.0, whole=1000.0) for x in p] for p in points if len(p) == 2]
        if not numbers or any(x is None for p in numbers for x in p):
            return False
        xs, ys = ([p[i] or 0.0 for p in numbers] for i in (0, 1))
        return max(xs) - min(xs) < _MIN_BOX_PX or max(ys) - min(ys) < _MIN_BOX_PX
    values = [_px(t, 16.0, whole=1000.0) for t in _tokens(inside.partition(" at ")[0])]
    known = [v for v in values if v is not None]
    if shape in ("circle", "ellipse"):
        return bool(known) and min(known) < _MIN_BOX_PX
    if shape == "inset" and known and len(known) == len(values):
        top = known[0]
        right = known[1] if len(known) > 1 else top
        bottom = known[2] if len(known) > 2 else top
        left = known[3] if len(known) > 3 else right
        return top + bottom > 999 or left + right > 999
    return False


def _transformed_away(state: State, style: Style) -> bool:
    text = " ".join(style.get(n, "") for n in ("transform", "-webkit-transform"))
    if "translate" in style:
        text += f" translate({style['translate'].replace(' ', ',')})"
    if "scale" in style:
        text += f" scale({style['scale'].replace(' ', ',')})"
    if "rotate" in style and style["rotate"].startswith(("x ", "y ", "1 0 0", "0 1 0")):
        axis = "x" if style["rotate"].startswith(("x", "1")) else "y"
        text += f" rotate{axis}({style['rotate'].split()[-1]})"
    placed = style.get("position") in ("absolute", "fixed")
    for name, inside in re.findall(
        r"(matrix3d|matrix|scale3d|scale[xyz]?|translate3d|translate[xyz]?|rotate[xy])"
        r"\(((?:[^()]|\([^()]*\))*)\)",
        text,
    ):
        parts = [p.strip() for p in inside.split(",")]
        if name.startswith("scale"):
            numbers = [_share(p) for p in parts[: 1 if name[5:] in ("x", "y", "z") else 2]]
            if name != "scalez" and any(abs(n) < 0.05 for n in numbers):
                return True
        elif name.startswith("translate") and name != "translatez":
            for part in parts[:2]:
                # A percentage is of the element itself, whose size nobody knows here.
                px = _px(part, state.font_px, whole=WINDOW_PX[0] if placed else 150.0)
                if px is not None and (px <= -_FAR_PX or px >= _BEYOND_PX):
                    return True
        elif name.startswith("rotate"):
            degrees = _degrees(parts[0])
            if degrees is not None and abs(abs(degrees) % 180 - 90) < 2:
                return True
        elif name == "matrix" and len(parts) == 6:
            values = [_number(p) for p in parts]
            if None not in values:
                a, b, c, d, x, y = (v or 0.0 for v in values)
                if abs(a * d - b * c) < 0.0025 or min(x, y) <= -_FAR_PX:
                    return True
    return False


def _degrees(text: str) -> float | None:
    match = re.fullmatch(r"(-?[\d.]+)(deg|turn|rad|grad)?", text)
    if match is None:
        return None
    factor = {"turn": 360.0, "rad": 57.2958, "grad": 0.9}.get(match.group(2) or "", 1.0)
    return float(match.group(1)) * factor


def _squeezed(state: State, style: Style) -> bool:
    spacing = style.get("letter-spacing")
    if spacing is not None:
        px = _px(spacing, state.font_px)
        if px is not None and px <= -0.5 * state.font_px:
            return True
    return style.get("-webkit-text-security") in ("disc", "circle", "square")
