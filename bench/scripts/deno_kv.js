// Deno KV on a file, as it comes: deno run --unstable-kv deno_kv.js FILE
import { serve } from "./driver.js";

const kv = await Deno.openKv(Deno.args[0]);

await serve({
  async fill(pairs) {
    const atomic = kv.atomic();
    for (const [key, value] of pairs) atomic.set(key, value);
    return (await atomic.commit()).ok;
  },
  async get(key) {
    return (await kv.get(key)).value;
  },
  async get_many(keys) {
    return (await kv.getMany(keys)).map((entry) => entry.value);
  },
  async list(group) {
    const found = [];
    // A batch of 500 is the largest that it allows; by default it is 100.
    for await (const entry of kv.list({ prefix: [group] }, { batchSize: 500 })) found.push([entry.key, entry.value]);
    return found;
  },
  async set([key, value]) {
    return (await kv.set(key, value)).ok;
  },
  async swap([key, value]) {
    const entry = await kv.get(key);
    return (await kv.atomic().check(entry).set(key, value).commit()).ok;
  },
});
kv.close();
