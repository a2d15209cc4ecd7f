// Streams one chat with the official JavaScript client and prints what came, as JSON: node chat.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused" });
const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "What is the capital of France?" }],
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
const result = { text: "", chunks: 0, finish: [], usage: null };
for await (const chunk of stream) {
  result.chunks += 1;
  for (const choice of chunk.choices) {
    result.text += choice.delta.content ?? "";
    if (choice.finish_reason) result.finish.push(choice.finish_reason);
  }
  if (chunk.usage) result.usage = chunk.usage;
}
console.log(JSON.stringify(result));
