// packages: @anthropic-ai/claude-code
// Claude Code in print mode, with all its tools, against our Messages route.
import { spawnSync } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { KEY, MODEL, Report, URL_, check } from "./common.mjs";

const report = new Report("@anthropic-ai/claude-code");
const home = mkdtempSync(join(tmpdir(), "claude-"));
const env = {
  ...process.env,
  HOME: home,
  ANTHROPIC_BASE_URL: URL_,
  ANTHROPIC_API_KEY: KEY,
  ANTHROPIC_MODEL: MODEL,
  ANTHROPIC_SMALL_FAST_MODEL: MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  DISABLE_AUTOUPDATER: "1",
};
await report.step("print", async () => {
  const done = spawnSync(
    join(process.cwd(), "node_modules/.bin/claude"),
    ["-p", "Say hello.", "--model", MODEL, "--output-format", "json", "--max-turns", "3"],
    { cwd: home, env, timeout: 600_000, input: "" },
  );
  const out = done.stdout.toString();
  check(out.includes("{"), `${done.status} ${out} ${done.stderr}`.slice(0, 300));
  const result = JSON.parse(out.slice(out.indexOf("{")));
  // A toy may call tools until the turns run out; what counts is that no request was refused.
  check(result.type === "result", out.slice(0, 300));
  check(!/API Error/.test(out), out.slice(0, 300));
  check(result.usage.output_tokens > 0, out.slice(0, 300));
});
report.done();
