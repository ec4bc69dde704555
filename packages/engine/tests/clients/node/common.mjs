// What the client scripts share; see python/common.py.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

export const URL_ = process.env.DEEPINFER_URL;
export const OPENAI = `${URL_}/v1`;
export const MODEL = process.env.DEEPINFER_MODEL ?? "deepinfer-demo";
export const KEY = process.env.DEEPINFER_KEY ?? "sk-local";
export const QUESTION = "What is the weather in the garden?";
export const FOX = "Tell me a story about a fox.";
export const weather = ({ city }) => `sunny in ${city}`;
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

export function check(condition, message) {
  if (!condition) throw new Error(message);
}

export function versionOf(name) {
  const path = `${process.cwd()}/node_modules/${name}/package.json`;
  return JSON.parse(readFileSync(path, "utf8")).version;
}

export class Report {
  constructor(client, distribution = client) {
    this.client = client;
    this.version = versionOf(distribution);
    this.steps = {};
  }
  async step(name, call) {
    try {
      await call();
      this.steps[name] = "ok";
    } catch (error) {
      console.error(error);
      this.steps[name] = `${error?.name ?? "Error"}: ${error?.message ?? error}`.slice(0, 300);
    }
  }
  done() {
    const { client, version, steps } = this;
    console.log(JSON.stringify({ client, version, steps }));
    process.exit(Object.values(steps).some((value) => value !== "ok") ? 1 : 0);
  }
}
