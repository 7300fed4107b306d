// Vercel's AI SDK over its providers for OpenAI (chats, responses), compatible servers and Anthropic, which check replies
// against zod's types: texts, streams, objects, tools, errors. Prints JSON like checks.py.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import assert from "node:assert/strict";
import path from "node:path";

const [url, model] = process.argv.slice(2);
const require = createRequire(path.join(process.cwd(), "package.json"));
const { generateText, streamText, generateObject, streamObject, tool, stepCountIs } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { z } = require("zod");

const where = { baseURL: `${url}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({ name: "local", includeUsage: true, supportsStructuredOutputs: true, ...where });
const openai = createOpenAI(where);
const models = [compatible(model), openai.chat(model), openai.responses(model), createAnthropic(where)(model)];
const schema = z.object({ on: z.boolean() }).strict();
const look = tool({ description: "Look at it", inputSchema: schema, execute: async ({ on }) => `it is ${on}` });
const fail = ({ error }) => {
  throw error;
};

async function all(run) {
  for (const each of models) await run({ model: each, maxRetries: 0, maxOutputTokens: 120 });
}

const checks = {
  async "text streamed is the whole"() {
    await all(async (options) => {
      const asked = { ...options, maxOutputTokens: 16, temperature: 0, prompt: "def add(a, b):" };
      const whole = await generateText(asked);
      const stream = streamText({ ...asked, onError: fail });
      assert.equal(await stream.text, whole.text);
      assert.equal(whole.usage.outputTokens, 16);
      assert.deepEqual([(await stream.usage).outputTokens, await stream.finishReason], [16, whole.finishReason]);
    });
  },
  async "completions"() {
    for (const each of [compatible.completionModel(model), openai.completion(model)]) {
      const options = { model: each, maxRetries: 0, maxOutputTokens: 8, prompt: "import os" };
      assert.equal((await generateText(options)).usage.outputTokens, 8);
    }
  },
  async "objects whole and streamed"() {
    await all(async (options) => {
      const asked = { ...options, schema, prompt: "on" };
      assert.equal(typeof (await generateObject(asked)).object.on, "boolean");
      const stream = streamObject({ ...asked, onError: fail });
      for await (const partial of stream.partialObjectStream) assert(partial);
      assert.equal(typeof (await stream.object).on, "boolean");
    });
  },
  async "tools and their results"() {
    await all(async (options) => {
      const steps = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "look" } : "none" });
      const asked = { ...options, tools: { look }, prompt: "look", stopWhen: stepCountIs(2), prepareStep: steps };
      const reply = await generateText(asked);
      assert.equal(typeof reply.steps[0].toolCalls[0].input.on, "boolean");
      assert.equal(reply.steps.length, 2);
      const stream = streamText({ ...asked, stopWhen: stepCountIs(1), onError: fail });
      assert.equal(typeof (await stream.toolCalls)[0].input.on, "boolean");
    });
  },
  async "prompts that are too long are not tried again"() {
    await all(async (options) => {
      await assert.rejects(generateText({ ...options, prompt: "x = 1\n".repeat(2000) }), (error) => {
        assert.deepEqual([error.statusCode, error.isRetryable], [400, false]);
        assert.match(error.message, /prompt is too long/);
        return true;
      });
    });
  },
};

const results = {};
for (const [name, run] of Object.entries(checks)) {
  try {
    await run();
    results[name] = null;
  } catch (error) {
    console.error(name, error);
    results[name] = `${error.name}: ${error.message}`.slice(0, 400);
  }
}
const manifest = path.join(process.cwd(), "node_modules/ai/package.json");
console.log(JSON.stringify({ version: JSON.parse(readFileSync(manifest)).version, checks: results }));
