"""One plain page to try both APIs by hand."""

from __future__ import annotations

TRY_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>search-fetch</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body{font:16px/1.5 system-ui,sans-serif;max-width:48rem;margin:2rem auto;padding:0 1rem;
color:#1c2733;background:#fbfbf9}
h1{font-size:1.3rem}form{display:flex;gap:.5rem;margin:.7rem 0}
input{flex:1;font:inherit;padding:.45rem .6rem;border:1px solid #b9c0c7;border-radius:.4rem}
button{font:inherit;padding:.45rem .9rem;border:0;border-radius:.4rem;background:#1f5f8b;color:#fff}
article{border-top:1px solid #dfe3e6;padding:.7rem 0}.where{color:#52606d;font-size:.85rem}
pre{white-space:pre-wrap;background:#f0f1ee;padding:1rem;border-radius:.4rem}
.error{color:#9b1c1c}
</style></head><body>
<h1>search-fetch</h1>
<form><input id="key" type="password" placeholder="API key (empty with --no-auth)"></form>
<form id="search"><input id="query" placeholder="Search the index" required><button>Search</button>
</form>
<form id="fetch"><input id="url" type="url" placeholder="https://… page to read" required>
<button>Fetch</button></form>
<main id="out" aria-live="polite"></main>
<script>
const out = document.getElementById("out");
function add(parent, tag, text, cls) {
  const e = document.createElement(tag); e.textContent = text; if (cls) e.className = cls;
  parent.appendChild(e); return e;
}
async function call(path, body) {
  out.replaceChildren();
  const headers = {"content-type": "application/json"};
  const key = document.getElementById("key").value;
  if (key) headers["authorization"] = "Bearer " + key;
  const answer = await fetch(path, {method: "POST", headers, body: JSON.stringify(body)});
  const data = await answer.json();
  if (!answer.ok) {
    add(out, "p", data.error.code + ": " + data.error.message, "error");
    return null;
  }
  return data;
}
document.getElementById("search").addEventListener("submit", async event => {
  event.preventDefault();
  const data = await call("/v1/search", {query: document.getElementById("query").value});
  if (!data) return;
  if (!data.results.length) add(out, "p", "Nothing found.");
  for (const r of data.results) {
    const article = add(out, "article", "");
    add(article, "strong", r.title);
    add(article, "div", r.url + " · relevance " + r.relevance.toFixed(2) + " · authority " +
      r.authority.score.toFixed(2), "where");
    add(article, "div", r.snippet);
  }
});
document.getElementById("fetch").addEventListener("submit", async event => {
  event.preventDefault();
  const data = await call("/v1/fetch", {url: document.getElementById("url").value});
  if (!data) return;
  add(out, "div", (data.title || "") + " · " + data.page_type + " · " + data.tokens.total +
    " tokens", "where");
  add(out, "pre", data.content);
});
</script></body></html>
"""
