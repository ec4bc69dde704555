// packages: @openai/codex
// Codex in exec mode, with its own tools, against our Responses route.
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { KEY, MODEL, OPENAI, Report, check } from "./common.mjs";

const report = new Report("@openai/codex");
const home = mkdtempSync(join(tmpdir(), "codex-"));
mkdirSync(join(home, ".codex"));
writeFileSync(
  join(home, ".codex/config.toml"),
  `model = "${MODEL}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "${OPENAI}"
env_key = "LOCAL_KEY"
wire_api = "responses"
`,
);
await report.step("exec", async () => {
  const done = spawnSync(
    join(process.cwd(), "node_modules/.bin/codex"),
    ["exec", "--skip-git-repo-check", "--json", "Say hello."],
    {
      cwd: home,
      env: { ...process.env, HOME: home, CODEX_HOME: join(home, ".codex"), LOCAL_KEY: KEY },
      timeout: 600_000,
      input: "",
    },
  );
  const text = done.stdout.toString() + done.stderr.toString();
  check(done.status === 0 && /turn\.completed/.test(text), text.slice(-400));
});
report.done();
