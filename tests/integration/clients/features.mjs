// Tools, structured output and responses with the official JavaScript client: node features.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const question = "What is the capital of France?";
const messages = [{ role: "user", content: "How is the weather in Paris in the next 3 days?" }];
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, days: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const result = {};

let stream = await client.responses.create({ model, input: question, temperature: 0, stream: true });
result.events = [];
result.text = "";
for await (const event of stream) {
  result.events.push(event.type);
  if (event.type === "response.output_text.delta") result.text += event.delta;
}

const runner = client.chat.completions.stream({
  model,
  messages,
  temperature: 0,
  max_tokens: 200,
  tools: [{ type: "function", function: { name: "weather", parameters: schema } }],
  tool_choice: { type: "function", function: { name: "weather" } },
});
const [call] = (await runner.finalMessage()).tool_calls;
result.call = [call.function.name, JSON.parse(call.function.arguments)];

const called = await client.responses.create({
  model,
  input: messages[0].content,
  temperature: 0,
  max_output_tokens: 200,
  tools: [{ type: "function", name: "weather", parameters: schema, strict: true }],
  tool_choice: { type: "function", name: "weather" },
});
const item = called.output.find((one) => one.type === "function_call");
result.responses_call = [item.name, JSON.parse(item.arguments)];

const structured = await client.chat.completions.create({
  model,
  messages,
  temperature: 0,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "weather", schema, strict: true } },
});
result.structured = JSON.parse(structured.choices[0].message.content);
console.log(JSON.stringify(result));
