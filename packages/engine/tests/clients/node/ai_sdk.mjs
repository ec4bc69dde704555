// packages: ai @ai-sdk/openai @ai-sdk/anthropic @ai-sdk/openai-compatible zod
// The AI SDK by its three provider packages: text, streams, tools in a loop, objects.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { FOX, KEY, MODEL, OPENAI, QUESTION, Report, check, weather } from "./common.mjs";

const report = new Report("ai");
const openai = createOpenAI({ baseURL: OPENAI, apiKey: KEY });
const models = {
  responses: openai.responses(MODEL),
  chat: openai.chat(MODEL),
  messages: createAnthropic({ baseURL: OPENAI, apiKey: KEY })(MODEL),
  compatible: createOpenAICompatible({ name: "local", baseURL: OPENAI, apiKey: KEY })(MODEL),
};
const tools = {
  weather: tool({
    description: "Get the weather of a place.",
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => weather(input),
  }),
};

for (const [name, model] of Object.entries(models)) {
  await report.step(`${name}`, async () => {
    const answer = await generateText({ model, prompt: FOX, maxOutputTokens: 60 });
    check(answer.usage.totalTokens > 0, "no usage");
  });
  await report.step(`${name} stream`, async () => {
    const answer = streamText({ model, prompt: FOX, maxOutputTokens: 60, onError: ({ error }) => { throw error; } });
    for await (const _ of answer.textStream);
    check((await answer.finishReason) !== undefined, "it never finished");
  });
  for (const toolChoice of ["auto", "required"]) {
    await report.step(`${name} tools ${toolChoice}`, async () => {
      const answer = await generateText({
        model,
        tools,
        toolChoice,
        prompt: QUESTION,
        stopWhen: stepCountIs(2),
        maxOutputTokens: 2000,
      });
      if (toolChoice === "required") {
        check(answer.steps[0].toolCalls.length > 0, "a forced call was not made");
      }
    });
  }
}
report.done();
