"use strict";
// The page at `/`: a chat over /v1/chat/completions and what /status tells. No library, no other
// server. Text of models and users only ever becomes text nodes.

const $ = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const EXAMPLE = [{
  type: "function",
  function: {
    name: "weather",
    description: "The weather in a town.",
    parameters: {
      type: "object",
      properties: { town: { type: "string" } },
      required: ["town"],
    },
  },
}];
const POLL_MS = 2000;
const messages = []; // of the conversation, as the protocol has them
let running = null; // AbortController of the answer that is being read
let unanswered = []; // calls of the last answer that wait for results
let away = []; // workers that are not ready, from the last status

// -- words ------------------------------------------------------------------------------------

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

function headers() {
  const key = $("key").value.trim();
  const found = { "content-type": "application/json" };
  if (key) found.authorization = `Bearer ${key}`;
  return found;
}

async function reason(reply) {
  try {
    const value = await reply.json();
    return value.error.message;
  } catch {
    return `the server answered ${reply.status}`;
  }
}

function explained(text) {
  const names = away.map((w) => `${w.role} worker ${w.name}`);
  return names.length ? `${text} (away now: ${names.join(", ")})` : text;
}

// -- one answer -------------------------------------------------------------------------------

function entry(role) {
  const item = make("li", role);
  item.append(make("div", "who", role === "user" ? "you" : role));
  $("log").append(item);
  return item;
}

function say(role, text) {
  entry(role).append(make("div", "text", text));
}

class Answer {
  constructor() {
    this.item = entry("assistant");
    this.message = { role: "assistant", content: "" };
    this.reasoning = "";
    this.calls = [];
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.usage = null;
    this.finish = null;
    this.waiting = make("p", "usage", "waiting for the first token");
    this.item.append(this.waiting);
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices || []) {
      const delta = choice.delta || {};
      if (choice.finish_reason) this.finish = choice.finish_reason;
      if (delta.reasoning_content) this.think(delta.reasoning_content);
      if (delta.content) this.write(delta.content);
      for (const part of delta.tool_calls || []) this.call(part);
      if (delta.reasoning_content || delta.content || delta.tool_calls) {
        this.last = performance.now();
        if (this.first === null) {
          this.first = this.last;
          this.waiting.remove();
        }
      }
    }
    const log = $("log");
    log.scrollTop = log.scrollHeight;
  }

  think(text) {
    if (!this.thought) {
      const details = make("details");
      details.open = true;
      details.append(make("summary", "", "reasoning"));
      this.thought = details.appendChild(make("div", "text reasoning"));
      this.item.append(details);
    }
    this.reasoning += text;
    this.thought.append(text);
  }

  write(text) {
    if (!this.text) this.text = this.item.appendChild(make("div", "text content"));
    this.message.content += text;
    this.text.append(text);
  }

  call(part) {
    const at = part.index || 0;
    if (!this.calls[at]) {
      const box = make("div", "call");
      const title = box.appendChild(make("div", "who"));
      const code = box.appendChild(make("pre"));
      this.calls[at] = { id: "", name: "", arguments: "", box, title, code };
      this.item.append(box);
    }
    const call = this.calls[at];
    if (part.id) call.id = part.id;
    const told = part.function || {};
    call.name += told.name || "";
    call.arguments += told.arguments || "";
    call.title.textContent = `calls ${call.name}`;
    call.code.textContent = call.arguments;
  }

  end() {
    this.waiting.remove();
    const calls = this.calls.filter(Boolean);
    if (calls.length) {
      this.message.tool_calls = calls.map((c) => ({
        id: c.id, type: "function", function: { name: c.name, arguments: c.arguments },
      }));
      if (this.reasoning) this.message.reasoning_content = this.reasoning;
    }
    messages.push(this.message);
    for (const call of calls) this.ask(call);
    if (this.finish === "length") this.item.append(make("p", "note", "cut at the longest answer"));
    this.bill();
  }

  ask(call) {
    const id = `result-${call.id}`;
    const label = make("label", "", `Result of ${call.name}`);
    label.htmlFor = id;
    const area = make("textarea");
    area.id = id;
    area.rows = 2;
    const button = make("button", "", "Give the result");
    button.type = "button";
    const give = () => {
      messages.push({ role: "tool", tool_call_id: call.id, content: area.value });
      area.disabled = button.disabled = true;
      unanswered = unanswered.filter((c) => c !== call);
      if (unanswered.length) $(`result-${unanswered[0].id}`).focus();
      else run();
    };
    button.addEventListener("click", give);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        give();
      }
    });
    call.box.append(label, area, button);
    unanswered.push(call);
  }

  bill() {
    const line = make("p", "usage");
    const usage = this.usage;
    if (usage) {
      const cached = (usage.prompt_tokens_details || {}).cached_tokens || 0;
      line.append(`${usage.prompt_tokens} prompt tokens, `, make("b", "cached", `${cached} cached`),
        `, ${usage.completion_tokens} out`);
      const thought = (usage.completion_tokens_details || {}).reasoning_tokens;
      if (thought) line.append(` (${thought} reasoning)`);
    }
    if (this.first !== null) {
      line.append(`${usage ? "; " : ""}first after ${Math.round(this.first - this.began)} ms`);
      const seconds = (this.last - this.first) / 1000;
      if (usage && seconds > 0 && usage.completion_tokens > 1) {
        line.append(`, ${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
      }
    }
    if (usage && usage.cost) line.append(`; ${usage.cost} ${usage.cost_currency}`);
    this.item.append(line);
  }

  fail(text) {
    this.waiting.remove();
    this.item.classList.add("failed");
    this.item.append(make("p", "note", text));
    this.bill();
  }
}

function body() {
  const system = $("system").value.trim();
  const found = {
    model: $("model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    max_tokens: Number($("tokens").value) || 512,
    stream: true,
    stream_options: { include_usage: true },
    thinking: { type: $("thinking").checked ? "enabled" : "disabled" },
  };
  if ($("temperature").value !== "") found.temperature = Number($("temperature").value);
  const tools = $("tools").value.trim();
  if (tools) found.tools = JSON.parse(tools);
  return found;
}

async function* chunks(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

async function run() {
  let request;
  try {
    request = JSON.stringify(body());
  } catch (error) {
    trouble(`The tools are not JSON: ${error.message}`);
    $("tools").focus();
    return;
  }
  trouble("");
  unanswered = [];
  const answer = new Answer();
  running = new AbortController();
  busy(true);
  let ended = false;
  let why = "";
  try {
    const reply = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: request, signal: running.signal,
    });
    if (!reply.ok) {
      why = await reason(reply);
    } else {
      for await (const data of chunks(reply)) {
        if (data === "[DONE]") {
          ended = true;
          break;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) {
          why = chunk.error.message;
          break;
        }
        answer.take(chunk);
      }
      if (!ended && !why) why = "the connection ended before the answer did";
    }
  } catch (error) {
    why = error.name === "AbortError" ? "stopped" : "the server cannot be reached";
  }
  if (ended) {
    answer.end();
  } else {
    const stopped = why === "stopped";
    answer.fail(stopped ? "stopped" : `This answer failed: ${why}`);
    if (!stopped) {
      trouble(explained(`The answer failed: ${why}. Your message is kept: Try again sends it once more.`));
    }
  }
  running = null;
  busy(false);
  $("again").disabled = ended;
  const call = unanswered[0];
  (call ? $(`result-${call.id}`) : !ended && why !== "stopped" ? $("again") : $("ask")).focus();
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  if (on) $("again").disabled = true;
  document.body.dataset.busy = on ? "yes" : "no";
}

function send() {
  const text = $("ask").value.trim();
  if (!text || running) return;
  if (unanswered.length) {
    trouble("The model waits for the result of its call: give it, or begin a new chat.");
    $(`result-${unanswered[0].id}`).focus();
    return;
  }
  $("ask").value = "";
  messages.push({ role: "user", content: text });
  say("user", text);
  run();
}

// -- live status ------------------------------------------------------------------------------

const seconds = (value) => value === null || value === undefined ? "–"
  : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
const share = (value) => value === null ? "–" : `${Math.round(value * 100)}%`;

function show(status) {
  away = status.workers.filter((w) => !w.ready);
  const state = $("state");
  state.textContent = away.length && status.status === "ready"
    ? `ready, ${away.length} of ${status.workers.length} workers away` : status.status;
  state.className = `state ${status.status === "ready" && !away.length ? "ready" : "away"}`;
  const recent = status.recent;
  const rate = recent.seconds > 0 ? (recent.generated_tokens / recent.seconds).toFixed(1) : "0";
  const rows = [
    ["requests in flight", status.in_flight], ["tokens/s out", rate],
    ["cache hits", share(recent.hit_rate)], ["drafts accepted", share(recent.accepted_rate)],
    ["first token, p50", seconds(recent.ttft.p50)], ["first token, p99", seconds(recent.ttft.p99)],
    ["token gap, p50", seconds(recent.token_gap.p50)], ["token gap, p99", seconds(recent.token_gap.p99)],
  ];
  $("numbers").replaceChildren(...rows.map(([name, value]) => {
    const row = make("div");
    row.append(make("dt", "", name), make("dd", "", String(value)));
    return row;
  }));
  $("workers").replaceChildren(...status.workers.flatMap((w) => {
    const row = make("tr");
    const told = w.draining ? "draining" : w.ready ? "ready" : "away";
    const queue = (w.waiting || 0) + (w.loading || 0) + (w.reserve_queue || 0) + (w.parked || 0);
    const active = (w.running || 0) + (w.prefilling || 0);
    const blocks = w.blocks_capacity ? `${w.blocks_capacity - w.blocks_free}/${w.blocks_capacity}` : "–";
    const name = make("td", "", w.role === "single" ? "one process" : w.role);
    name.title = w.name;
    row.append(name, make("td", w.ready ? "ready" : "away", told), make("td", "", active),
      make("td", "", queue), make("td", "", blocks));
    if (w.ready || !w.detail) return [row];
    const why = make("tr");
    const cell = make("td", "away why", w.detail);
    cell.colSpan = 5;
    why.append(cell);
    return [row, why];
  }));
  watch(status);
}

function watch(status) {
  // A worker's death while an answer is read: say what happens, take it back when it is over.
  const node = $("trouble");
  if (running && away.length) {
    trouble(explained(status.status === "ready"
      ? "A worker was lost; the answer goes on with another one"
      : "A worker was lost; the answer goes on when it is back, for up to a minute"));
    node.dataset.watch = "yes";
  } else if (node.dataset.watch && !away.length) {
    delete node.dataset.watch;
    if (running) trouble("");
    else if (/was lost/.test(node.textContent)) trouble("");
  }
}

async function poll() {
  try {
    const reply = await fetch("status", { headers: headers() });
    if (reply.ok) {
      show(await reply.json());
    } else {
      $("state").textContent = reply.status === 401 ? "wants an API key" : await reason(reply);
      $("state").className = "state away";
    }
  } catch {
    $("state").textContent = "the server cannot be reached";
    $("state").className = "state away";
  }
  setTimeout(poll, POLL_MS);
}

async function models() {
  try {
    const reply = await fetch("v1/models", { headers: headers() });
    if (!reply.ok) {
      trouble(`${await reason(reply)}. Type the key on the right.`);
      return;
    }
    const names = (await reply.json()).data.map((model) => model.id);
    $("model").replaceChildren(...names.map((name) => make("option", "", name)));
    trouble("");
  } catch {
    trouble("The server cannot be reached.");
  }
}

// -- keys and buttons -------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => running && running.abort());
$("again").addEventListener("click", () => !running && run());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages.length = 0;
  unanswered = [];
  $("log").replaceChildren();
  $("again").disabled = true;
  trouble("");
  $("ask").focus();
});
$("example").addEventListener("click", () => {
  $("tools").value = JSON.stringify(EXAMPLE, null, 1);
});
$("key").addEventListener("change", models);
if (matchMedia("(max-width: 60rem)").matches) $("settings").open = false;
document.body.dataset.busy = "no";
$("ask").focus();
models();
poll();
