// OpenAI's client for node: completions, chats, tools, responses, errors. Prints JSON like checks.py.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import assert from "node:assert/strict";
import path from "node:path";

const [url, model] = process.argv.slice(2);
const require = createRequire(path.join(process.cwd(), "package.json"));
const { OpenAI, BadRequestError } = require("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "def add(a, b):" }];
const parameters = { type: "object", properties: { on: { type: "boolean" } }, required: ["on"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "switch", description: "Switch it", parameters } }];

const checks = {
  async "models"() {
    const names = [];
    for await (const each of client.models.list()) names.push(each.id);
    assert(names.includes(model));
  },
  async "completion streamed is the whole"() {
    const options = { model, prompt: "import os\n", temperature: 0, max_tokens: 24 };
    const whole = await client.completions.create(options);
    let text = "";
    for await (const chunk of await client.completions.create({ ...options, stream: true })) text += chunk.choices[0]?.text ?? "";
    assert.equal(text, whole.choices[0].text);
  },
  async "chat streamed is the whole"() {
    const options = { model, messages, temperature: 0, max_tokens: 16 };
    const whole = await client.chat.completions.create(options);
    const stream = client.chat.completions.stream({ ...options, stream_options: { include_usage: true } });
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
    assert.deepEqual((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
  },
  async "required tool streamed"() {
    const options = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 120 };
    const final = await client.chat.completions.stream(options).finalChatCompletion();
    const [call] = final.choices[0].message.tool_calls;
    assert.equal(call.function.name, "switch");
    assert.equal(typeof JSON.parse(call.function.arguments).on, "boolean");
  },
  async "structured output"() {
    const response_format = { type: "json_schema", json_schema: { name: "switch", schema: parameters, strict: true } };
    const reply = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 120 });
    assert.equal(typeof JSON.parse(reply.choices[0].message.content).on, "boolean");
  },
  async "responses streamed"() {
    const options = { model, input: "def add(a, b):", max_output_tokens: 16, temperature: 0 };
    const whole = await client.responses.create(options);
    const final = await client.responses.stream(options).finalResponse();
    assert.equal(final.output_text, whole.output_text);
  },
  async "errors have their types and fields"() {
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), (error) => {
      assert(error instanceof BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
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
const manifest = path.join(process.cwd(), "node_modules/openai/package.json");
console.log(JSON.stringify({ version: JSON.parse(readFileSync(manifest)).version, checks: results }));
