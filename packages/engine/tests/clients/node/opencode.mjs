// packages: opencode-ai
// opencode's run command with a provider of its OpenAI-compatible kind.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { KEY, MODEL, OPENAI, Report, check } from "./common.mjs";

const report = new Report("opencode-ai");
const home = mkdtempSync(join(tmpdir(), "opencode-"));
writeFileSync(
  join(home, "opencode.json"),
  JSON.stringify({
    provider: {
      local: {
        npm: "@ai-sdk/openai-compatible",
        options: { baseURL: OPENAI, apiKey: KEY },
        models: { [MODEL]: { name: MODEL, limit: { context: 131072, output: 512 } } },
      },
    },
  }),
);
await report.step("run", async () => {
  const done = spawnSync(
    join(process.cwd(), "node_modules/.bin/opencode"),
    ["run", "--model", `local/${MODEL}`, "Say hello."],
    {
      cwd: home,
      env: { ...process.env, HOME: home, OPENCODE_DISABLE_AUTOUPDATE: "1", OPENCODE_CONFIG: join(home, "opencode.json") },
      timeout: 600_000,
      input: "",
    },
  );
  const text = done.stdout.toString() + done.stderr.toString();
  // A toy may call a tool with arguments that the tool refuses; no request of ours may be refused.
  check(!/AI_APICallError|Bad Request|status code|ECONNREFUSED/.test(text), text.slice(-400));
  check(/build/.test(text), text.slice(-400));
});
report.done();
