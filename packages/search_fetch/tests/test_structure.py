# ruff: noqa: E501, RUF001
"""How the elements of HTML come out as Markdown, inside an article that also has a frame around it.

Every case runs without a choice of content (`full`) and with it (`article`): a structure that the
writer can print but the choice drops is lost all the same.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_search_fetch.extract import extract

URL = "https://birds.example/guide/kestrel.html"
PROSE = (
    "The kestrel hovers above open fields and watches the grass for voles. "
    "It hunts by sight, and it can see the traces that small animals leave on their paths. "
)

# Name, HTML, what the Markdown must hold; with "!" in front what it must not hold.
CASES: list[tuple[str, str, list[str]]] = [
    (
        "rowspan",
        "<table><tr><th>a<th>b<tr><td rowspan=2>x<td>1<tr><td>2</table>",
        ["| x | 1 |", "| x | 2 |"],
    ),
    (
        "colspan",
        "<table><tr><th colspan=2>ab<tr><td>1<td>2</table>",
        ["| ab | ab |\n| --- | --- |\n| 1 | 2 |"],
    ),
    (
        "thead",
        "<table><thead><tr><th>Name<th>Age<tbody><tr><td>Al<td>3</table>",
        ["| Name | Age |\n| --- | --- |\n| Al | 3 |"],
    ),
    (
        "nohead",
        "<table><tr><td>Name<td>Age<tr><td>Al<td>3</table>",
        ["| Name | Age |\n| --- | --- |\n| Al | 3 |"],
    ),
    ("pipe", "<table><tr><th>a<th>b<tr><td>x|y<td>2</table>", ["x\\|y"]),
    ("cellbr", "<table><tr><th>a<th>b<tr><td>x<br>y<td>2</table>", ["x<br>y"]),
    ("listcell", "<table><tr><th>a<th>b<tr><td><ul><li>x<li>y</ul><td>2</table>", ["| x; y | 2 |"]),
    (
        "linkcell",
        "<table><tr><th>a<th>b<tr><td><a href='/k'>x</a><td>2</table>",
        ["| [x](https://birds.example/k) | 2 |"],
    ),
    (
        "nested table",
        "<table><tr><td>o1<td><table><tr><td>i1<td>i2</table></table>",
        ["o1", "i1", "i2"],
    ),
    (
        "nested data table",
        "<table><tr><th>a<th>b<tr><td>o1<td><table><tr><td>i1<td>i2<tr><td>i3<td>i4</table><tr><td>z<td>y</table>",
        ["| a | b |", "o1", "i1", "i4", "| z | y |"],
    ),
    (
        "caption",
        "<table><caption>Sizes</caption><tr><th>a<th>b<tr><td>1<td>2</table>",
        ["Sizes\n\n| a | b |"],
    ),
    ("emptycells", "<table><tr><th>a<th>b<th>c<tr><td><td>2<td></table>", ["|  | 2 |  |"]),
    ("codecell", "<table><tr><th>a<th>b<tr><td><code>x|y</code><td>2</table>", ["`x\\|y`"]),
    (
        "precell",
        "<table><tr><th>a<th>b<tr><td><pre>x\ny</pre><td>2<tr><td>q<td>r<tr><td>s<td>t</table>",
        ["`x", "y`", "| q | r |"],
    ),
    (
        "lang class",
        "<pre><code class='language-python'>def f():\n    return 1\n</code></pre>",
        ["```python\ndef f():\n    return 1\n```"],
    ),
    (
        "hl-source",
        "<div class='highlight highlight-source-js'><pre>let x = 1;</pre></div>",
        ["```js\nlet x = 1;\n```"],
    ),
    ("brush", "<pre class='brush: java; gutter: false'>int x;</pre>", ["```java\nint x;\n```"]),
    ("data-lang", "<pre data-lang=go>x := 1</pre>", ["```go\nx := 1\n```"]),
    (
        "lang-parent",
        "<div class='highlight-ruby notranslate'><div class=highlight><pre><span>puts</span> <span>1</span></pre></div></div>",
        ["```ruby\nputs 1\n```"],
    ),
    (
        "prism",
        "<pre class='language-css'><code>a { b: c }</code></pre>",
        ["```css\na { b: c }\n```"],
    ),
    ("hljs", "<pre><code class='hljs python'>x = 1</code></pre>", ["```python\nx = 1\n```"]),
    ("hljs2", "<pre><code class='python hljs'>x = 1</code></pre>", ["```python\nx = 1\n```"]),
    (
        "gutter table",
        "<div class=highlight><table class=highlighttable><tr><td class=linenos><div class=linenodiv><pre>1\n2</pre></div></td><td class=code><div><pre>a = 1\nb = 2</pre></div></td></tr></table></div>",
        ["```\na = 1\nb = 2\n```"],
    ),
    (
        "rouge gutter",
        "<div class='language-ruby highlighter-rouge'><div class=highlight><pre><code><table class=rouge-table><tr><td class='gutter gl'><pre class=lineno>1\n2\n</pre></td><td class=code><pre>a = 1\nb = 2\n</pre></td></tr></table></code></pre></div></div>",
        ["```ruby\na = 1\nb = 2\n```"],
    ),
    (
        "span lineno",
        "<pre><span class=lineno>1 </span>a = 1\n<span class=lineno>2 </span>b = 2</pre>",
        ["```\na = 1\nb = 2\n```"],
    ),
    (
        "copy button",
        "<div class=code-wrap><button class=copy>Copy</button><pre>x = 1</pre></div>",
        ["```\nx = 1\n```", "!Copy"],
    ),
    ("pre br", "<pre>a<br>b</pre>", ["```\na\nb\n```"]),
    (
        "pre divs",
        "<pre><div class=line>a</div><div class=line>  b</div></pre>",
        ["```\na\n  b\n```"],
    ),
    (
        "pre code lines",
        "<pre><code><span class=line>a</span>\n<span class=line>b</span></code></pre>",
        ["```\na\nb\n```"],
    ),
    ("fence in code", "<pre>```\nx\n```</pre>", ["````\n```\nx\n```\n````"]),
    ("inline backtick", "<p>use <code>a`b</code> here, it is fine and short", ["``a`b``"]),
    (
        "github table code",
        "<table class='js-file-line-container'><tr><td class='blob-num' data-line-number=1></td><td class='blob-code'>x = 1</td></tr><tr><td class='blob-num' data-line-number=2></td><td class='blob-code'>y = 2</td></tr></table>",
        ["x = 1", "y = 2"],
    ),
    (
        "katex",
        "<p>so <span class=katex><span class=katex-mathml><math><semantics><mrow><mi>E</mi></mrow><annotation encoding='application/x-tex'>E=mc^2</annotation></semantics></math></span><span class=katex-html aria-hidden=true>E=mc2</span></span> holds",
        ["$E=mc^2$", "!E=mc2"],
    ),
    (
        "katex-display",
        "<span class=katex-display><span class=katex><span class=katex-mathml><math><semantics><mrow><mi>E</mi></mrow><annotation encoding='application/x-tex'>a+b</annotation></semantics></math></span><span class=katex-html aria-hidden=true>a+b</span></span></span>",
        ["$$a+b$$"],
    ),
    (
        "mathjax script",
        "<p>so <span class=MathJax_Preview>x</span><span class=MathJax>xx2</span><script type='math/tex'>x^2</script> holds",
        ["$x^2$", "!xx2"],
    ),
    ("mathml linear", "<p>so <math><msup><mi>x</mi><mn>2</mn></msup></math> holds", ["$x^{2}$"]),
    (
        "mathml display",
        "<math display=block><mfrac><mn>1</mn><mn>2</mn></mfrac></math>",
        ["$$\\frac{1}{2}$$"],
    ),
    (
        "wiki img",
        "<p>so <span class=mwe-math-element><img class='mwe-math-fallback-image-inline' alt='{\\displaystyle x^{2}}' src=/x.svg></span> holds",
        ["$x^{2}$"],
    ),
    (
        "wiki math",
        "<p>so <span class='mwe-math-element'><span class='mwe-math-mathml-inline mwe-math-mathml-a11y' style='display: none;'><math><semantics><mrow><mi>x</mi></mrow><annotation encoding='application/x-tex'>{\\displaystyle x}</annotation></semantics></math></span><img class='mwe-math-fallback-image-inline' aria-hidden=true alt='{\\displaystyle x}'></span> holds",
        ["so $x$ holds"],
    ),
    ("wiki tex img", "<p>so <img class=tex alt='x^3' src=/m.png> holds", ["$x^3$"]),
    (
        "mathjax3",
        "<p>so <mjx-container class=MathJax><svg></svg><mjx-assistive-mml><math><mi>y</mi></math></mjx-assistive-mml></mjx-container> holds",
        ["so $y$ holds"],
    ),
    (
        "base",
        "<p><a href=x.html>link text</a> is here in the sentence</p>",
        ["[link text](https://other.example/d/x.html)"],
    ),
    (
        "rel link",
        "<p>See <a href='../a/b.html?q=1#f'>the page</a> for more on it.",
        ["[the page](https://birds.example/a/b.html?q=1#f)"],
    ),
    (
        "utm",
        "<p>See <a href='/a?utm_source=x&id=3&fbclid=q'>the page</a> for more on it.",
        ["(https://birds.example/a?id=3)"],
    ),
    (
        "js",
        "<p>See <a href='javascript:void(0)'>the page</a> for more.",
        ["See the page for more.", "!javascript"],
    ),
    (
        "data",
        "<p>See <a href='data:text/html,x'>the page</a> for more.",
        ["See the page for more."],
    ),
    ("inpage", "<p>See <a href='#x'>the page</a> for more.", ["See the page for more."]),
    (
        "paren",
        "<p>See <a href='/a_(b)'>the page</a> for more.",
        ["(https://birds.example/a_%28b%29)"],
    ),
    (
        "link block",
        "<a href=/c><h3>Card title</h3><p>Card text is a whole sentence here, long enough.</p></a>",
        ["### [Card title](https://birds.example/c)", "[Card text is"],
    ),
    (
        "anchor trim",
        "<p>See <a href=/p>  the\n   page </a>for more.",
        ["See [the page](https://birds.example/p) for more."],
    ),
    (
        "img alt",
        "<p>A picture <img src=a.png alt='A kestrel in flight'> is here in the text.",
        ["A kestrel in flight"],
    ),
    (
        "hidden",
        "<p style='display:none'>SECRET text that is long enough to be content of the page.</p>",
        ["!SECRET"],
    ),
    (
        "hidden css",
        "<style>.x{display:none}</style><p class=x>SECRET text that is long enough to be content of the page.</p>",
        ["!SECRET"],
    ),
    (
        "hidden nested sel",
        "<style>div.note .x, p.y{visibility:hidden}</style><p class=y>SECRET text that is long enough to be content of the page.</p>",
        ["!SECRET"],
    ),
    (
        "hidden desc sel",
        "<style>.note .x{display:none!important}</style><div class=note><p class=x>SECRET text that is long enough to be content of the page.</p></div>",
        ["!SECRET"],
    ),
    (
        "white",
        "<p style='color:white;background:#fff'>SECRET text that is long enough to be content of the page.</p>",
        ["!SECRET"],
    ),
    (
        "zero font",
        "<p style='font-size:0'>SECRET text that is long enough to be content of the page.</p>",
        ["!SECRET"],
    ),
    (
        "tiny font",
        "<span style='font-size:1px'>SECRET text that is long enough to be content of the page.</span>",
        ["!SECRET"],
    ),
    (
        "offscreen",
        "<div style='position:absolute;left:-10000px'>SECRET text that is long enough to be content of the page.</div>",
        ["!SECRET"],
    ),
    (
        "sr-only sheet",
        "<style>.sr{position:absolute;clip:rect(0,0,0,0)}</style><span class=sr>SECRET text</span>",
        ["!SECRET"],
    ),
    (
        "aria-hidden",
        "<p aria-hidden=true>SECRET text that is long enough to be content of the page.</p>",
        ["!SECRET"],
    ),
    ("comment", "<!-- SECRET --><p>Some other text to read here.</p>", ["!SECRET"]),
    ("zero width", "<p>pay\u200bload of the\u2060 day</p>", ["payload of the day"]),
    ("tag chars", "<p>hello \U000e0053\U000e0045world of birds</p>", ["hello world of birds"]),
    ("input value", "<p>Text <input value=SECRET> after it</p>", ["!SECRET"]),
    ("title attr", "<p title=SECRET>Some other text to read here.</p>", ["!SECRET"]),
    (
        "accordion",
        "<div class=accordion-item><h3><button class=accordion-button aria-controls=c1>How far do they fly?</button></h3><div id=c1 class='accordion-collapse collapse'><p>They fly about forty kilometres every day in the summer season.</p></div></div>",
        ["### How far do they fly?", "forty kilometres"],
    ),
    (
        "tabpanel",
        "<div role=tablist><a role=tab>Range</a></div><div role=tabpanel hidden><p>They fly about forty kilometres every day in the summer season.</p></div>",
        ["forty kilometres"],
    ),
    (
        "aria-controls",
        "<button aria-controls=zz>More</button><div id=zz style='display:none'><p>They fly about forty kilometres every day in the summer season.</p></div>",
        ["forty kilometres"],
    ),
    (
        "details",
        "<details><summary>More facts</summary><p>They fly about forty kilometres every day.</p></details>",
        ["More facts", "forty kilometres"],
    ),
    (
        "nested list",
        "<ul><li>one<ul><li>two<ol><li>three</ol></ul><li>four</ul>",
        ["- one\n  - two\n    1. three\n- four"],
    ),
    ("ol start", "<ol start=5><li>five birds<li>six birds</ol>", ["5. five birds\n6. six birds"]),
    (
        "li span",
        "<ul><li><span>alpha bird</span><li><span>beta bird</span></ul>",
        ["- alpha bird\n- beta bird"],
    ),
    ("li p", "<ul><li><p>alpha bird</p><li><p>beta bird</p></ul>", ["- alpha bird", "- beta bird"]),
    (
        "li div",
        "<ul><li><div>alpha bird</div><li><div>beta bird</div></ul>",
        ["- alpha bird\n- beta bird"],
    ),
    (
        "list sibling",
        "<ul><li>one bird</li><ul><li>two birds</li></ul></ul>",
        ["- one bird\n  - two birds"],
    ),
    (
        "task",
        "<ul class=task-list><li class=task-list-item><input type=checkbox checked disabled> done it</li><li class=task-list-item><input type=checkbox disabled> not yet</li></ul>",
        ["- [x] done it\n- [ ] not yet"],
    ),
    (
        "task label",
        "<ul><li><label><input type=checkbox checked> done it</label></li><li><label><input type=checkbox> not yet</label></li></ul>",
        ["- [x] done it\n- [ ] not yet"],
    ),
    (
        "dl",
        "<dl><dt>Kestrel</dt><dd>A small falcon</dd><dt>Vole</dt><dd>A rodent</dd></dl>",
        ["**Kestrel**\n  A small falcon", "**Vole**\n  A rodent"],
    ),
    (
        "reversed",
        "<ol reversed><li>c bird<li>b bird<li>a bird</ol>",
        ["3. c bird", "2. b bird", "1. a bird"],
    ),
    (
        "glued",
        "<p><span class=a>Alpha</span><span class=b>Beta</span> words in the text",
        ["Alpha Beta"],
    ),
    ("glued div", "<div><div>Alpha</div><div>Beta</div></div>", ["Alpha\n\nBeta"]),
    ("not glued", "<p>un<b>believ</b>able words in the text", ["un**believ**able"]),
    (
        "cjk",
        "<p>我们<b>今天</b>去<a href=/b>北京</a>旅行。今天的天气非常好，我们都很高兴。</p>",
        ["我们**今天**去[北京](https://birds.example/b)旅行"],
    ),
    (
        "footnote",
        "<p>The claim<sup id=r1><a href='#fn1'>1</a></sup> is right.</p><ol class=footnotes><li id=fn1>The source. <a href='#r1'>↩</a></li></ol>",
        ["claim[^1] is right", "[^1]: The source.", "!↩"],
    ),
    (
        "footnote gfm",
        "<p>The claim<sup><a href='#user-content-fn-1' id='user-content-fnref-1' data-footnote-ref>1</a></sup> is right.</p><section data-footnotes class=footnotes><h2 class=sr-only>Footnotes</h2><ol><li id='user-content-fn-1'><p>The source. <a href='#user-content-fnref-1' data-footnote-backref>↩</a></p></li></ol></section>",
        ["claim[^1] is right", "[^1]: The source.", "!↩"],
    ),
    (
        "footnote wiki",
        "<p>The claim<sup class=reference id=cite_ref-1><a href='#cite_note-1'>[1]</a></sup> is right.</p><ol class=references><li id=cite_note-1><span class=mw-cite-backlink><a href='#cite_ref-1'>^</a></span> <span class=reference-text>The source text.</span></li></ol>",
        ["claim[^1] is right", "[^1]:", "The source text."],
    ),
    (
        "ruby",
        "<p><ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp>字<rp>(</rp><rt>ji</rt><rp>)</rp></ruby> is a word",
        ["漢(kan)字(ji)"],
    ),
    ("sup", "<p>An area of 3 km<sup>2</sup> and H<sub>2</sub>O in it", ["km^2", "H2O"]),
    (
        "del",
        "<p>Text with <del>old</del> and <ins>new</ins> and <mark>marked</mark> words",
        ["old", "new", "marked"],
    ),
    ("hr", "<p>Some text</p><hr><p>Other text</p>", ["Some text"]),
    (
        "quote",
        "<blockquote><p>To be or not to be, that is the question.</p><footer>Hamlet</footer></blockquote>",
        ["> To be or not to be"],
    ),
    (
        "figure",
        "<figure><img src=k.jpg alt='Kestrel'><figcaption>A kestrel over a field.</figcaption></figure>",
        ["*A kestrel over a field.*"],
    ),
    (
        "bodylist",
        "<ul><li>alpha bird is a long item<li>beta bird is a long item</ul>",
        ["- alpha bird"],
    ),
    (
        "br",
        "<p>line one of the poem<br>line two of the poem",
        ["line one of the poem\nline two of the poem"],
    ),
    ("nbsp", "<p>10&nbsp;000&nbsp;birds fly in this flock of birds", ["10 000 birds fly"]),
    (
        "entity",
        "<p>Fish &amp; chips &lt;b&gt; &copy; &#8364;5 for all of us",
        ["Fish & chips", "©", "€5"],
    ),
    (
        "heading levels",
        "<h2>Two</h2><p>Some text of the section.</p><h4>Four</h4><p>Some text of the section.</p>",
        ["## Two", "#### Four"],
    ),
    (
        "heading anchor",
        "<h2 id=x>Prey <a class=headerlink href='#x'>¶</a></h2><p>Some text of the section is here.</p>",
        ["## Prey\n"],
    ),
    (
        "heading anchor2",
        "<h2><a class=anchor aria-hidden=true href='#x'>#</a>Prey</h2><p>Some text of the section is here.</p>",
        ["## Prey\n"],
    ),
    (
        "em space",
        "<p>This is <b> bold </b>text and <i>it</i>.",
        ["This is **bold** text and *it*."],
    ),
    ("strong punct", "<p><b>Note:</b>text follows here and more", ["**Note:**"]),
    (
        "noscript img",
        "<p>Some text here.</p><noscript><img src=a.png></noscript>",
        ["Some text here."],
    ),
    (
        "definition multiple",
        "<dl><dt>A term<dd>one meaning<dd>two meaning</dl>",
        ["**A term**\n  one meaning", "two meaning"],
    ),
    (
        "video",
        "<video><source src=x.mp4>Your browser does not support video.</video><p>Text of it.",
        ["!does not support"],
    ),
    ("kbd", "<p>Press <kbd>Ctrl</kbd>+<kbd>C</kbd> to copy the text", ["`Ctrl`+`C`"]),
    (
        "abbr",
        "<p>The <abbr title='World Health'>WHO</abbr> said so in its report",
        ["The WHO said so"],
    ),
]


def page(name: str, content: str) -> bytes:
    head = "<base href='https://other.example/d/'>" if name == "base" else ""
    return (
        f"<!doctype html><html lang=en><head><title>Kestrels</title>{head}</head><body>"
        "<nav><ul><li><a href=/>Home</a><li><a href=/shop>Shop</a><li><a href=/login>Log in</a></ul>"
        f"</nav><main><article><h1>Kestrels</h1><p>{PROSE * 2}</p>{content}<p>{PROSE}</p></article>"
        "</main><aside><h3>Related</h3><ul><li><a href=/a>Ten best owls</a><li><a href=/b>Gulls</a>"
        "</ul></aside><footer><p>© 2026 Birds Ltd. All rights reserved. <a href=/privacy>Privacy</a>"
        "</p></footer></body></html>"
    ).encode()


def holds(text: str, expected: list[str]) -> bool:
    return all(p[1:] not in text if p.startswith("!") else p in text for p in expected)


def survives(name: str, html: str, expected: list[str], mode: Any) -> bool:
    return holds(extract(page(name, html), URL, mode=mode).content, expected)


@pytest.mark.parametrize("mode", ["full", "article"])
@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_structure_survives(case: tuple[str, str, list[str]], mode: str) -> None:
    assert survives(*case, mode)


def test_the_quick_choice_drops_few_of_them() -> None:
    lost = [case[0] for case in CASES if not survives(*case, "fast")]
    assert len(lost) <= 6, lost
