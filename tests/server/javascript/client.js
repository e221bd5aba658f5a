// A client that knows nothing but the AsyncAPI document: node client.js DOCUMENT NATS-URL
// It checks the document by AsyncAPI's own schema, sends every example, and checks what it sends and receives.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import Ajv from "ajv";
import addFormats from "ajv-formats";
import { connect } from "nats";

const [, , path, servers] = process.argv;
const described = JSON.parse(readFileSync(path, "utf8"));

const ajv = new Ajv({ strict: false, allErrors: true });
addFormats(ajv);
const official = createRequire(import.meta.url)("@asyncapi/specs/schemas/3.0.0-without-$id.json");
check(ajv.compile(official), described, "the document");
// In strict mode, a misspelt keyword is an error.
const strict = new Ajv({ strict: true, strictTypes: false, strictTuple: false, strictRequired: false, allowUnionTypes: true });
addFormats(strict);

function check(validate, content, what) {
  if (!validate(content)) throw new Error(`${what}: ${strict.errorsText(validate.errors)}`);
}

function resolve({ $ref }) {
  return $ref.slice(2).split("/").reduce((found, part) => found[part], described);
}

const names = { plugin: "javascript", tenant: "acme", project: "javascript" };
const connection = await connect({ servers });
let sent = 0;
for (const [name, operation] of Object.entries(described.operations)) {
  if (operation.action !== "receive") continue;
  const channel = resolve(operation.channel);
  const subject = channel.address.replaceAll(/{(\w+)}/g, (_, part) => names[part]);
  const request = resolve(channel.messages.request);
  const { reply, refusal } = resolve(operation.reply.channel).messages;
  const [asked, answered, refused] = [request, resolve(reply), resolve(refusal)].map((one) => strict.compile(one.payload));
  const ask = async (payload) => {
    const message = await connection.request(subject, JSON.stringify(payload), { timeout: 20000 });
    return message.json();
  };
  for (const { payload } of request.examples) {
    check(asked, payload, `an example of ${name}`);
    check(answered, await ask(payload), `the reply to ${name}`);
    sent++;
  }
  check(refused, await ask([]), `the refusal of ${name}`);
}
await connection.close();
console.log(JSON.stringify({ operations: Object.keys(described.operations).length, sent }));
