// packages: openai zod@3
// The official OpenAI client of JavaScript: chat, streams, its tool runner, Responses.
import OpenAI from "openai";
import { FOX, KEY, MODEL, OPENAI, PARAMETERS, QUESTION, Report, check, weather } from "./common.mjs";

const client = new OpenAI({ baseURL: OPENAI, apiKey: KEY });
const report = new Report("openai (node)", "openai");
const user = (content) => [{ role: "user", content }];
const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "Get the weather of a place.",
      parameters: PARAMETERS,
      parse: JSON.parse,
      function: weather,
    },
  },
];

await report.step("chat", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: user(FOX), max_tokens: 60 });
  check(answer.usage.total_tokens > 0, "no usage");
});
await report.step("stream", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages: user(FOX), max_tokens: 60 });
  check((await stream.finalChatCompletion()).choices.length === 1, "no choice");
});
for (const choice of ["auto", "required"]) {
  for (const stream of [false, true]) {
    await report.step(`runTools ${choice}${stream ? " stream" : ""}`, async () => {
      const runner = client.chat.completions.runTools(
        { model: MODEL, messages: user(QUESTION), tools, tool_choice: choice, stream, max_tokens: 2000 },
        { maxChatCompletions: 3 },
      );
      await runner.done();
      if (choice === "required") {
        check(runner.messages.some((m) => m.role === "tool"), "a forced call was not made");
      }
    });
  }
}
await report.step("responses", async () => {
  const answer = await client.responses.create({ model: MODEL, input: FOX, max_output_tokens: 60 });
  check(answer.usage.total_tokens > 0, "no usage");
});
await report.step("responses stream", async () => {
  const stream = client.responses.stream({ model: MODEL, input: FOX, max_output_tokens: 60 });
  check((await stream.finalResponse()).output !== undefined, "no output");
});
report.done();
