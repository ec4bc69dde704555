// packages: @anthropic-ai/sdk
// The official Anthropic client of JavaScript: messages, streams, token counts, its tool runner.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { FOX, KEY, MODEL, PARAMETERS, QUESTION, Report, URL_, check, weather } from "./common.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: KEY });
const report = new Report("@anthropic-ai/sdk");
const user = (content) => [{ role: "user", content }];
const tool = betaTool({
  name: "weather",
  description: "Get the weather of a place.",
  inputSchema: PARAMETERS,
  run: weather,
});

await report.step("messages", async () => {
  const answer = await client.messages.create({ model: MODEL, max_tokens: 60, messages: user(FOX) });
  check(answer.content.every((block) => block.type === "text"), "it thinks unasked");
});
await report.step("count", async () => {
  const count = await client.messages.countTokens({ model: MODEL, messages: user(FOX) });
  check(count.input_tokens > 0, "no count");
});
await report.step("stream", async () => {
  const stream = client.messages.stream({ model: MODEL, max_tokens: 60, messages: user(FOX) });
  check((await stream.finalMessage()).usage.output_tokens > 0, "no output");
});
for (const choice of [undefined, { type: "any" }]) {
  for (const stream of [false, true]) {
    await report.step(`tool runner ${choice?.type ?? "auto"}${stream ? " stream" : ""}`, async () => {
      const runner = client.beta.messages.toolRunner({
        model: MODEL,
        max_tokens: 2000,
        tools: [tool],
        messages: user(QUESTION),
        max_iterations: 3,
        stream,
        ...(choice && { tool_choice: choice }),
      });
      const message = await runner.runUntilDone();
      check(message.content !== undefined, "no message");
    });
  }
}
report.done();
